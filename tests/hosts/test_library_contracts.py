"""Contracts with other libraries: installed versions satisfy them, and each rename is reported in one sentence."""

import importlib
import inspect
import re
import sys
import types
import warnings

import pytest
import timm
import torch

import vispe
from tests.cases import cases
from tests.hosts.transformers.tiny import make
from vispe.errors import UnsupportedHost
from vispe.hosts import import_hooks
from vispe.hosts.contracts import check, contract
from vispe.hosts.contracts.check import LIBRARIES, check_contract
from vispe.hosts.contracts.contract import Contract, problems
from vispe.hosts.contracts.transformers_models import language_contracts, vision_contracts
from vispe.hosts.open_clip.patch_constructors import register_alias
from vispe.hosts.transformers.language.families import language_model_of, model_inside
from vispe.hosts.transformers.vision.convert import vision_tower_of
from vispe.hosts.transformers.vision.families import attentions, family_of

QWEN = "transformers.models.qwen2_vl.modeling_qwen2_vl"
RENAMES = (  # library, owner, old name, and what it is
    ("timm", "timm.layers:Attention.forward", "attn_mask", "parameter"),
    ("timm", "timm.models.vision_transformer:VisionTransformer.__init__", "pos_embed", "parameter"),
    ("timm", "timm.models.eva:EvaAttention.forward", "rope", "parameter"),
    ("timm", "timm.layers:resample_abs_pos_embed", "new_size", "parameter"),
    ("timm", "timm.layers:Attention", "qkv", "constructor"),
    ("timm", "timm.models.naflexvit:NaFlexVit", "_forward_embeds", "attribute"),
    ("timm", "timm.models.swin_transformer:WindowAttention", "_get_rel_pos_bias", "attribute"),
    ("open_clip", "open_clip.transformer:ResidualAttentionBlock.attention", "attn_mask", "parameter"),
    ("open_clip", "open_clip.transformer:VisionTransformer", "class_embedding", "constructor"),
    ("open_clip", "open_clip.pretrained", "_PRETRAINED", "attribute"),
    (
        "transformers",
        "transformers.generation.utils:GenerationMixin._get_candidate_generator",
        "model_kwargs",
        "parameter",
    ),
    ("transformers", "transformers.generation.utils:GenerationMixin", "_validate_model_kwargs", "attribute"),
    ("transformers", "transformers.cache_utils:Cache.reorder_cache", "beam_idx", "parameter"),
    ("transformers", "transformers.vision_utils:get_vision_cu_seqlens", "kwargs", "parameter"),
    (
        "transformers",
        "transformers.configuration_utils:PreTrainedConfig",
        "_attn_implementation",
        "attribute",
    ),
    ("peft", "peft.tuners.tuners_utils", "check_target_module_exists", "attribute"),
    ("peft", "peft.peft_model:PeftModel", "get_prompt", "attribute"),
    ("torch", "torch.nn:Module._apply", "fn", "parameter"),
    ("torch", "torch._guards", "detect_fake_mode", "attribute"),
    ("torch", "torch.nn:MultiheadAttention.forward", "need_weights", "parameter"),
)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Reset the results of earlier checks."""
    monkeypatch.setattr(check, "_fulfilled", set())
    monkeypatch.setattr(check, "_compared", set())


def owner_of(name):
    module, _, path = name.partition(":")
    owner = importlib.import_module(module)
    for part in path.split(".") if path else ():
        parent, owner = owner, getattr(owner, part)
    return (parent if path else None), owner


def rename(monkeypatch, name, old, kind):
    """Rename a parameter, attribute, or attribute set by a constructor, as a future version of a library could."""
    parent, owner = owner_of(name)
    if kind == "attribute":
        monkeypatch.setattr(owner, f"{old}_renamed", getattr(owner, old), raising=False)
        monkeypatch.delattr(owner, old)
        return
    if kind == "parameter":

        def function(*args, **kwargs):
            raise AssertionError

        function.__wrapped__ = owner
        signature = inspect.signature(owner)
        function.__signature__ = signature.replace(
            parameters=[
                p.replace(name=f"{old}_renamed" if p.name == old else p.name)
                for p in signature.parameters.values()
            ]
        )
        monkeypatch.setattr(parent, name.rpartition(".")[2].rpartition(":")[2], function)
        return
    init = inspect.unwrap(owner.__init__)
    names = tuple(f"{old}_renamed" if n == old else n for n in init.__code__.co_names)
    code = init.__code__.replace(co_names=names)
    renamed = types.FunctionType(code, init.__globals__, "__init__", init.__defaults__, init.__closure__)
    monkeypatch.setattr(owner, "__init__", renamed)


@cases("library", LIBRARIES)
def test_the_installed_version_satisfies_every_contract(library):
    assert not [*problems(LIBRARIES[library])]


@pytest.mark.parametrize(("library", "owner", "old", "kind"), RENAMES)
def test_a_rename_is_reported_in_one_sentence(monkeypatch, library, owner, old, kind):
    rename(monkeypatch, owner, old, kind)
    (sentence,) = problems(LIBRARIES[library])
    assert sentence.startswith(f"{library} {importlib.import_module(library).__version__}: ")
    assert old in sentence.partition(", and vispe assumes that ")[0]
    assert f"pip install --force-reinstall --no-deps {LIBRARIES[library].distribution}==" in sentence
    assert not re.search(r"\. [A-Z]", sentence)  # a single sentence
    assert sentence.endswith(".")


def test_alternatives_and_variable_keywords(monkeypatch):
    def older(tokens, past_key_values=None, **kwargs): ...
    def newer(tokens, cache=None): ...

    module = types.ModuleType("fulfils")
    module.older, module.newer = older, newer
    older.__module__ = newer.__module__ = "fulfils"
    monkeypatch.setitem(sys.modules, "fulfils", module)
    library = LIBRARIES["torch"]
    required = {"assumes": "it decodes", "keywords": "cache|past_key_values **", "positional": "tokens"}
    assert not [*problems(library, [Contract("fulfils:older", **required)])]
    (missing,) = problems(library, [Contract("fulfils:newer", **required)])
    assert "fulfils.newer must accept arbitrary keywords, got tokens, cache" in missing
    assert not [*problems(library, [Contract("fulfils:absent", "it exists", since="99.0")])]
    absent = [
        Contract(name, "it exists") for name in ("fulfils:absent.method", "fulfils:absent", "lacking:name")
    ]
    first, second = problems(library, absent)
    assert "fulfils.absent is missing" in first
    assert "the module lacking is missing" in second


def test_timm_models_are_rejected_unchanged(monkeypatch):
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
    before = [type(m) for m in model.modules()]
    rename(monkeypatch, "timm.models.vision_transformer:VisionTransformer", "pos_drop", "constructor")
    with pytest.raises(UnsupportedHost, match=r"^timm .* must have the attribute 'pos_drop'"):
        vispe.convert(model, "alibi2d")
    assert [type(m) for m in model.modules()] == before


def test_patched_constructors_of_timm_check_contracts(monkeypatch):
    rename(monkeypatch, "timm.layers:Attention.forward", "attn_mask", "parameter")
    timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)  # without vispe
    with pytest.raises(
        UnsupportedHost, match=r"Attention.forward must have the parameter 'attn_mask', got x"
    ):
        timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, pos_embed="alibi2d")


def test_aliases_of_open_clip_check_contracts(monkeypatch):
    rename(monkeypatch, "open_clip.transformer:VisionTransformer", "_embeds", "attribute")
    with pytest.raises(UnsupportedHost, match=r"^open_clip .*_embeds is missing"):
        register_alias("ViT-B-32", "alibi2d")


def test_names_of_other_families_are_ignored(monkeypatch):
    rename(monkeypatch, "timm.models.swin_transformer:WindowAttention", "_get_rel_pos_bias", "attribute")
    vispe.convert(timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1), "alibi2d")
    swin = timm.create_model("swin_tiny_patch4_window7_224", img_size=56, depths=(1,), embed_dim=24)
    with pytest.raises(UnsupportedHost, match="_get_rel_pos_bias"):
        vispe.convert(swin, "alibi2d")


@pytest.mark.parametrize("cls", ["Qwen2VLAttention", "Qwen2VLDecoderLayer"])
def test_language_models_are_rejected_unchanged(monkeypatch, cls):
    model = make("qwen2_vl")
    before = [type(m) for m in model.modules()]
    rename(monkeypatch, f"{QWEN}:{cls}.forward", "position_embeddings", "parameter")
    with pytest.raises(
        UnsupportedHost, match=rf"{cls}.forward must have the parameter 'position_embeddings'"
    ):
        vispe.convert(model, "mrope_i")
    assert [type(m) for m in model.modules()] == before


def test_a_third_name_of_the_cache_is_reported(monkeypatch):
    model = make("qwen2_vl")
    text = language_model_of(model_inside(model))
    old = next(n for n in ("cache", "past_key_values") if n in inspect.signature(text.forward).parameters)
    rename(monkeypatch, f"{QWEN}:Qwen2VLTextModel.forward", old, "parameter")
    (sentence,) = problems(LIBRARIES["transformers"], language_contracts(model_inside(model), text))
    assert "must have the parameter 'cache' or 'past_key_values'" in sentence


def test_vision_towers_are_rejected(monkeypatch):
    tower = vision_tower_of(make("qwen2_vl"))
    rename(monkeypatch, f"{QWEN}:VisionAttention.forward", "cu_seqlens", "parameter")
    with pytest.raises(
        UnsupportedHost, match=r"VisionAttention.forward must have the parameter 'cu_seqlens'"
    ):
        vispe.convert(tower, "alibi2d")
    (sentence,) = problems(
        LIBRARIES["transformers"], vision_contracts(tower, family_of(tower), type(next(attentions(tower))[2]))
    )
    assert "cu_seqlens" in sentence


def test_a_patch_that_cannot_be_installed_names_the_reason(monkeypatch):
    rename(monkeypatch, "peft.peft_model:PeftModel", "get_prompt", "attribute")
    with pytest.raises(UnsupportedHost, match=r"^peft .*PeftModel.get_prompt is missing"):
        import_hooks._install("peft.peft_model")


def test_a_repeated_check_inspects_nothing(monkeypatch):
    for library in LIBRARIES:
        check_contract(library)
    monkeypatch.setattr(contract, "import_module", None)
    monkeypatch.setattr(contract, "inspect", None)
    for library in LIBRARIES:
        check_contract(library)


def test_a_newer_version_is_reported_once(monkeypatch):
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
    tested = LIBRARIES["timm"].tested
    monkeypatch.setattr(timm, "__version__", "99.0.0.dev0")
    with pytest.warns(UserWarning, match=rf"^timm 99.0.0.dev0 is newer than {tested}, the newest ") as caught:
        vispe.convert(vispe.convert(model, "alibi2d"), "rope_axial")
    newer = [w for w in caught if "is newer than" in str(w.message)]
    assert [w.filename for w in newer] == [__file__]


@pytest.mark.parametrize("version", [None, "0.9.0"])
def test_tested_versions_are_not_reported(monkeypatch, version):
    monkeypatch.setattr(timm, "__version__", version or LIBRARIES["timm"].tested)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_contract("timm")


def test_patches_of_other_packages_are_not_reported_as_renames(monkeypatch):
    original = torch.nn.Module.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)

    def apply(self, *args):
        return args

    monkeypatch.setattr(torch.nn.Module, "__init__", init)
    monkeypatch.setattr(torch.nn.Module, "_apply", apply)
    assert not list(problems(LIBRARIES["torch"]))


def test_constructors_are_read_after_torch_compile(monkeypatch):
    """torch.compile replaces the constructor of `nn.Module` for the rest of the process."""
    torch.compile(torch.nn.Linear(2, 2), backend="eager")(torch.zeros(1, 2))
    assert not list(problems(LIBRARIES["torch"]))
    rename(monkeypatch, "timm.layers:Attention", "qkv", "constructor")
    (sentence,) = problems(LIBRARIES["timm"])
    assert "must have the attribute 'qkv'" in sentence


def test_constructors_that_do_not_call_the_original_are_not_read(monkeypatch):
    def init(self, *args, **kwargs): ...

    monkeypatch.setattr(timm.layers.Attention, "__init__", init)
    assert not list(problems(LIBRARIES["timm"], [c for c in LIBRARIES["timm"].contracts if c.attributes]))
