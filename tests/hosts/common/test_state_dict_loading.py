"""Loading the weights of one encoding into a model with another raises; stock weights load into all models."""

import copy
import itertools
import logging
import re

import pytest
import timm
import torch
from torch import nn

import vispe
from tests.cases import cases
from tests.hosts.helpers import SHAPE, image, shake, tiny
from tests.products import partly, slow_except
from vispe.errors import EncodingMismatch

SPECS = (
    "none",
    "alibi2d",
    "sincos2d",
    "rope_axial",
    "rope_mixed",
    "irpe",
    "irpe(on=qk)",
    "alibi2d(slopes=learned)",
    "learned",
    "rpb",
    "peg",
    "seqpe",
    "rope_axial+alibi2d(slopes=learned)",
    "learn+alibi2d",
)
NAMES = {"eva": "eva02_tiny_patch14_224", "naflex": "naflexvit_base_patch16_gap"}
NAMES |= {"distilled": "deit_tiny_distilled_patch16_224", "hybrid": "vit_tiny_r_s16_p8_224"}


def converted(spec, seed=0, **options):
    return shake(vispe.convert(tiny(**options), spec), seed).eval()


def named(spec):
    """Return a pattern for the printed spec, with the default ratio of irpe."""
    full = spec.replace("irpe(on=qk)", "irpe(on=qk,ratio=1.9)")
    return re.escape(repr(re.sub(r"irpe(?!\()", "irpe(ratio=1.9)", full)))


@partly(6)
@cases("source", SPECS)
def test_every_pair_of_encodings(source):
    theirs = converted(source, 5)
    weights = theirs.state_dict()
    for spec in SPECS:
        ours = converted(spec, 1)
        before = copy.deepcopy(dict(ours.state_dict()))
        if spec == source:
            assert not any(ours.load_state_dict(weights))
            assert torch.equal(ours(image()), theirs(image()))
            continue
        for strict in (True, False):
            with pytest.raises(EncodingMismatch, match=f"{named(source)}, but .* has {named(spec)}"):
                ours.load_state_dict(weights, strict=strict)
        assert issubclass(EncodingMismatch, RuntimeError)
        assert all(torch.equal(now, before[name]) for name, now in ours.state_dict().items()), "half loaded"


@pytest.mark.parametrize("source", slow_except(SPECS, SPECS[::3]))
def test_every_pair_of_encodings_where_no_spec_is_stored(source, caplog):
    theirs = converted(source, 5)
    weights = dict(theirs.state_dict())
    of = {name for name in weights if "pos_enc." in name}
    for spec in SPECS:
        ours = converted(spec, 1)
        initial = {name: value.clone() for name, value in ours.state_dict().items() if "pos_enc." in name}
        table = ("pos_embed" in weights) - (spec == "learn+alibi2d")
        caplog.clear()
        if (of and of != set(initial)) or table == -1:
            with pytest.raises(RuntimeError):
                ours.load_state_dict(weights)
        elif of and any(weights[name].shape != initial[name].shape for name in initial):
            with pytest.raises(RuntimeError, match="size mismatch"):
                ours.load_state_dict(weights)
        elif table == 1 and of:
            with pytest.raises(RuntimeError, match=r"Unexpected key.*pos_embed"):
                ours.load_state_dict(weights)
        else:  # equal names, or nothing that tells
            ours.load_state_dict(weights)
            fresh = bool(initial) and not of
            state = ours.state_dict()
            assert all(torch.equal(state[n], initial[n]) for n in initial) == fresh or not initial
            if source != "learn+alibi2d":
                assert ("another encoding, or none" in caplog.text) == fresh
        if extra := of - set(initial):
            actual = ours.load_state_dict(weights, strict=False)
            assert extra <= set(actual.unexpected_keys)
            if table != -1:
                with pytest.raises(RuntimeError, match=f"{re.escape(min(extra))}.* has "):
                    ours.load_state_dict(weights)


JUNK = ("blocks.0.attn.pos_enc", "pos_enc", "blocks.1.pos_enc", "rope", "blocks.0.attn.pos_enc.deep")


@pytest.mark.slow
@pytest.mark.parametrize("name", [None, *NAMES])
@pytest.mark.parametrize("spec", ["none", "alibi2d", "sincos2d", "rope_mixed", "irpe"])
def test_junk_is_an_error(spec, name):
    stock = tiny() if name is None else small(name)
    ours = vispe.convert(copy.deepcopy(stock), spec)
    stock = {k: v for k, v in stock.state_dict().items() if not k.startswith("rope.")}
    for weights, at in itertools.product((stock, ours.state_dict(), dict(ours.state_dict())), JUNK):
        if at == "rope" and name in ("eva", "naflex"):
            continue  # of the stock model, whose own rope is omitted
        key = f"{at}.JUNK"
        with pytest.raises(RuntimeError, match=key):
            ours.load_state_dict({**weights, key: torch.zeros(1)})
        assert key in ours.load_state_dict({**weights, key: torch.zeros(1)}, strict=False).unexpected_keys


def small(name, **options):
    torch.manual_seed(0)
    sizes = {"depth": 2, "embed_dim": 48, "num_heads": 4, "num_classes": 5, "img_size": 64}
    sizes |= {"patch_size": 16} if name in ("eva", "distilled") else {}
    if name == "naflex":
        sizes.pop("img_size")
    return shake(timm.create_model(NAMES[name], **{**sizes, **options}), 2).eval()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_family_of_timm(name):
    specs = ("alibi2d", "rope_axial", "rope_mixed", "irpe", "learned", "alibi2d(slopes=learned)", "none")
    models = {spec: shake(vispe.convert(small(name), spec), 3).eval() for spec in specs}
    x = torch.randn(1, 3, 64, 64)
    for a, b in itertools.product(specs, specs):
        ours = vispe.convert(small(name), b).eval()
        if a == b:
            ours.load_state_dict(models[a].state_dict())
            assert torch.equal(ours(x), models[a](x))
        else:
            with pytest.raises(EncodingMismatch, match=f"{named(a)}, but .* has {named(b)}"):
                ours.load_state_dict(models[a].state_dict())
    stock, ours = small(name), vispe.convert(small(name), "rope_mixed")
    encodings = copy.deepcopy(dict(ours.state_dict()))
    assert not any(ours.load_state_dict(stock.state_dict()))
    assert all(torch.equal(v, encodings[k]) for k, v in ours.state_dict().items() if "pos_enc" in k)
    assert not any(vispe.restore(ours).load_state_dict(stock.state_dict()))


@cases("name", ["eva", "naflex"])
def test_a_stored_rope_is_not_discarded(name):
    mixed = {"eva": "vit_small_patch16_rope_mixed_224", "naflex": "naflexvit_base_patch16_gap"}[name]
    options = {"depth": 2, "embed_dim": 48, "num_heads": 4, "num_classes": 0}
    options |= {"img_size": 64} if name == "eva" else {"rope_type": "mixed"}

    def model(spec):
        return vispe.convert(timm.create_model(mixed, **options), spec)

    remaining = model("rope+irpe").state_dict()
    assert any(key.startswith("rope.") for key in remaining)
    with pytest.raises(EncodingMismatch, match=rf"{named('rope+irpe')}, but .* has {named('irpe')}"):
        model("irpe").load_state_dict(remaining)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*rope\."):
        model("irpe").load_state_dict(dict(remaining))
    assert not any(model("irpe").load_state_dict(timm.create_model(mixed, **options).state_dict()))


def test_equivalent_specs_are_equal():
    weights = vispe.convert(tiny(), "alibi2d.local").state_dict()
    preset = vispe.encoding_info("alibi2d").presets["local"]
    every = {"name": "alibi2d", **vispe.encoding_info("alibi2d").options, **preset}
    vispe.convert(tiny(), {"name": "alibi2d", **preset}).load_state_dict(weights)
    vispe.convert(tiny(), {k: v for k, v in every.items() if v is not None}).load_state_dict(weights)
    vispe.convert(tiny(), vispe.create_encoding("alibi2d.local", dim=32, num_heads=4)).load_state_dict(
        weights
    )
    irpe = vispe.convert(tiny(), "irpe").state_dict()
    for same in ("irpe(ratio=1.9)", vispe.create_encoding("irpe", dim=32, num_heads=4)):
        vispe.convert(tiny(), same).load_state_dict(irpe)
    for other in ("alibi2d", "alibi2d.local+rope_axial", "rope_axial+alibi2d.local"):
        with pytest.raises(EncodingMismatch):
            vispe.convert(tiny(), other).load_state_dict(weights)


def test_the_spec_adds_no_entry_to_the_state_dict(tmp_path):
    ours = converted("learn+alibi2d")
    weights = ours.state_dict()
    assert list(weights) == list(tiny().state_dict())
    torch.save(weights, tmp_path / "a.pth")
    reloaded = torch.load(tmp_path / "a.pth", weights_only=True)
    assert not any(tiny().load_state_dict(reloaded))
    with pytest.raises(EncodingMismatch, match=r"'learn\+alibi2d', but .* has 'learn\+rope_axial'"):
        converted("learn+rope_axial").load_state_dict(reloaded)


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "_orig_mod.module."])
@pytest.mark.parametrize("container", [None, "state_dict", "state_dict_ema", "model"])
def test_checkpoints_of_training_programs_store_the_spec(prefix, container, tmp_path):
    theirs = converted("alibi2d", 5)
    outer = theirs
    for name in reversed(prefix.split(".")[:-1]):
        outer = nn.ModuleDict({name: outer})
    weights = outer.state_dict()
    assert not prefix or all(name.startswith(prefix) for name in weights)
    file = tmp_path / "last.pth.tar"
    torch.save({container: weights, "epoch": 3} if container else weights, file)
    for load in (
        lambda spec: timm.models.load_checkpoint(converted(spec), str(file)),
        lambda spec: timm.create_model(
            "vit_tiny_patch16_224", pos_embed=spec, checkpoint_path=str(file), **SHAPE
        ),
    ):
        load("alibi2d")
        with pytest.raises(EncodingMismatch, match=r"'alibi2d', but .* has 'rope_axial'"):
            load("rope_axial")
    if container == "state_dict":
        timm.models.resume_checkpoint(converted("alibi2d"), str(file))
        with pytest.raises(EncodingMismatch):
            timm.models.resume_checkpoint(converted("sincos2d"), str(file))


@pytest.mark.slow
def test_inside_other_models_and_copies():
    outer = nn.ModuleDict({"trunk": converted("alibi2d", 5), "head": nn.Linear(5, 2)})
    other = nn.ModuleDict({"trunk": converted("rope_axial", 1), "head": nn.Linear(5, 2)})
    for source in (outer, copy.deepcopy(outer), torch.optim.swa_utils.AveragedModel(outer).module):
        with pytest.raises(EncodingMismatch, match=r"'alibi2d', but .* has 'rope_axial'"):
            other.load_state_dict(source.state_dict())
        modules = nn.ModuleDict({"trunk": converted("alibi2d", 1), "head": nn.Linear(5, 2)})
        modules.load_state_dict(source.state_dict())
        assert torch.equal(modules["trunk"](image()), outer["trunk"](image()))
    mixed = nn.ModuleDict({"trunk": converted("rope_mixed", 5), "head": nn.Linear(5, 2)})
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"trunk.blocks.0.attn.pos_enc.freqs"'):
        other.load_state_dict(dict(mixed.state_dict()))
    ema = timm.utils.ModelEmaV3(converted("rope_mixed", 5))
    with pytest.raises(EncodingMismatch):
        converted("rope_axial").load_state_dict(timm.utils.get_state_dict(ema))


def test_parts_of_a_checkpoint_without_strict():
    ours = converted("rope_mixed", 1)
    head = {k: v for k, v in tiny().state_dict().items() if k.startswith("head.")}
    before = copy.deepcopy(dict(ours.state_dict()))
    actual = ours.load_state_dict(head, strict=False)
    assert not actual.unexpected_keys
    assert "cls_token" in actual.missing_keys
    assert all(torch.equal(v, before[k]) for k, v in ours.state_dict().items() if k not in head)
    encoding = {k: v + 1 for k, v in before.items() if "pos_enc" in k}
    actual = ours.load_state_dict(encoding, strict=False)
    assert not actual.unexpected_keys
    assert not any("pos_enc" in name for name in actual.missing_keys)
    state = ours.state_dict()
    assert all(torch.equal(state[k], v) for k, v in encoding.items())


@cases("spec", ["rope_mixed", "alibi2d", "learned"])
def test_assign(spec):
    theirs, stock = converted(spec, 5), tiny()
    with torch.device("meta"):
        ours = vispe.convert(timm.create_model("vit_tiny_patch16_224", **SHAPE), spec)
    if spec != "alibi2d":  # a stock checkpoint has nothing for an encoding that has no values yet
        with pytest.raises(RuntimeError, match=r"Missing key.*pos_enc"):
            ours.load_state_dict(stock.state_dict(), assign=True)
    ours.load_state_dict(theirs.state_dict(), assign=True)
    assert not any(p.is_meta for p in ours.parameters())
    ours.load_state_dict(stock.state_dict(), assign=True)
    assert all(p.requires_grad for p in ours.parameters())
    assert torch.equal(ours.cls_token, stock.cls_token)
    with pytest.raises(EncodingMismatch):
        ours.load_state_dict(converted("sincos2d").state_dict(), assign=True)


def test_distributed_state_dicts():
    from torch.distributed.checkpoint import state_dict as of_torch

    theirs = converted("rope_mixed", 5)
    for options in (None, of_torch.StateDictOptions(full_state_dict=True, cpu_offload=True)):
        weights = of_torch.get_model_state_dict(theirs, options=options)
        ours = converted("rope_mixed", 1)
        of_torch.set_model_state_dict(ours, weights, options=options)
        assert torch.equal(ours(image()), theirs(image()))
        for other in ("alibi2d", "irpe", "rope_axial"):
            with pytest.raises(RuntimeError):
                of_torch.set_model_state_dict(converted(other), weights, options=options)


def test_adapters_of_peft(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")

    def adapted(spec, seed):
        config = peft.LoraConfig(
            r=2, target_modules=["qkv"], modules_to_save=["head"], init_lora_weights=False
        )
        model = converted(spec, 0)
        torch.manual_seed(seed)
        return peft.get_peft_model(model, config).eval()

    theirs = adapted("rope_mixed", 5)
    adapters = peft.get_peft_model_state_dict(theirs)
    ours = adapted("rope_mixed", 1)
    assert not torch.equal(ours(image()), theirs(image()))
    assert not peft.set_peft_model_state_dict(ours, adapters).unexpected_keys
    assert torch.equal(ours(image()), theirs(image()))
    complete = theirs.state_dict()
    ours = adapted("rope_mixed", 1)
    assert not any(ours.load_state_dict(complete))
    assert torch.equal(ours(image()), theirs(image()))
    for weights in (complete, dict(complete)):
        with pytest.raises(RuntimeError, match=r"rope_mixed|pos_enc.freqs"):
            adapted("alibi2d", 1).load_state_dict(weights)


def test_custom_attention_layers():
    def layer(spec):
        return shake(nn.Sequential(vispe.Attention(32, 4, spec)), 3)

    specs = (
        None,
        "alibi2d",
        "rope_axial",
        "rope_mixed",
        "irpe",
        "alibi2d(slopes=learned)",
        "rope_axial+alibi2d",
    )
    for a, b in itertools.product(specs, specs):
        weights = layer(a).state_dict()
        if a == b:
            assert not any(layer(b).load_state_dict(weights))
            continue
        with pytest.raises(
            EncodingMismatch, match=f"{named(a) if a else 'none'}, but .* has {named(b) if b else 'none'}"
        ):
            layer(b).load_state_dict(weights)
        if {n for n in weights if "pos_enc" in n} != {n for n in layer(b).state_dict() if "pos_enc" in n}:
            with pytest.raises(RuntimeError):
                layer(b).load_state_dict(dict(weights))
    plain = vispe.create_encoding("alibi2d", num_heads=4)
    with pytest.raises(
        EncodingMismatch, match=r"'alibi2d', but the module alibi2d has 'alibi2d\(wrap=false\)'"
    ):
        vispe.create_encoding("alibi2d(wrap=false)", num_heads=4).load_state_dict(plain.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("complete", [True, False])
def test_open_clip(complete):
    pytest.importorskip("open_clip")
    from tests.hosts.open_clip.common import tiny_clip, tiny_tower

    def model(spec, seed):
        stock_model = tiny_clip() if complete else tiny_tower()
        return shake(vispe.convert(stock_model, spec), seed).eval()

    specs = (
        "alibi2d",
        "rope_axial",
        "rope_mixed",
        "irpe",
        "peg",
        "rope_axial+alibi2d(slopes=learned)",
        "learn+alibi2d",
    )
    x = image()
    for a, b in itertools.product(specs, specs):
        weights, ours = model(a, 5).state_dict(), model(b, 1)
        if a == b:
            assert not any(ours.load_state_dict(weights))
            tower = ours.visual if complete else ours
            other = model(a, 5)
            assert torch.equal(tower(x), (other.visual if complete else other)(x))
            continue
        with pytest.raises(EncodingMismatch, match=f"{named(a)}, but .* has {named(b)}"):
            ours.load_state_dict(weights)
        extra = {n for n in weights if "pos_enc" in n} - set(ours.state_dict())
        if extra:
            with pytest.raises(RuntimeError, match=re.escape(min(extra))):
                ours.load_state_dict(dict(weights))
    stock = (tiny_clip() if complete else tiny_tower()).state_dict()
    for spec in specs:
        assert not any(model(spec, 1).load_state_dict(stock))
        junk = "visual." * complete + "transformer.resblocks.0.attn.pos_enc.JUNK"
        with pytest.raises(RuntimeError, match=junk):
            model(spec, 1).load_state_dict({**stock, junk: torch.zeros(1)})


@pytest.mark.parametrize("spec", SPECS)
def test_parameters_without_weights_are_logged(spec, caplog):
    ours = converted(spec, 1)
    with caplog.at_level(logging.INFO, logger="vispe"):
        ours.load_state_dict(tiny().state_dict())
    has_parameters = any("pos_enc" in name for name in ours.state_dict())
    assert ("no weights for" in caplog.text) == has_parameters
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_another_training_grid_is_logged(caplog):
    weights = converted("alibi2d(normalize=reference)", img_size=(24, 24)).state_dict()
    converted("alibi2d(normalize=reference)").load_state_dict(weights)
    assert "trained on the grid (3, 3), but alibi2d uses the grid (3, 5) of this model" in caplog.text
    caplog.clear()
    converted("alibi2d(normalize=reference,reference=[3,3])").load_state_dict(weights)
    converted("rope_mixed").load_state_dict(
        converted("rope_mixed", img_size=(24, 24)).state_dict(), strict=False
    )
    assert not caplog.text
    with pytest.raises(EncodingMismatch, match=r"reference=\[3,3\].* has .*reference=\[4,4\]"):
        converted("alibi2d(normalize=reference,reference=[4,4])").load_state_dict(
            converted("alibi2d(normalize=reference,reference=[3,3])").state_dict()
        )
