"""Errors for unsupported models name the reason and the module to convert; wrappers are unwrapped or rejected."""

import importlib
import inspect
import os
import pkgutil

import pytest
import timm
import timm.models
import torch
from timm.utils import ModelEmaV3
from torch import nn

import vispe
from tests.cases import cases
from tests.hosts.helpers import RELEASE, close, image, tiny
from vispe.errors import UnsupportedHost
from vispe.hosts.common.equivalent_models import ELSEWHERE, TRANSFORMERS
from vispe.hosts.timm.families import FAMILIES
from vispe.hosts.timm.unsupported import REASONS, refusal
from vispe.hosts.windows.model_table import known


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.skipif(RELEASE < (1, 0, 31), reason="older timm has fewer models")
def test_every_unsupported_class_of_timm_has_a_reason():
    modules = [
        importlib.import_module(f"timm.models.{m.name}") for m in pkgutil.iter_modules(timm.models.__path__)
    ]
    actual = {}
    for module in modules:
        classes = [
            c for _, c in inspect.getmembers(module, inspect.isclass) if c.__module__ == module.__name__
        ]
        actual |= {c.__name__: c for c in classes if issubclass(c, nn.Module)}
    assert set(REASONS) <= set(actual)
    models = [c for c in actual.values() if {"num_classes", "in_chans"} <= {*inspect.signature(c).parameters}]
    assert len(models) > 70
    families = tuple(f.base for f in FAMILIES)
    missing = [
        c.__name__
        for c in models
        if not issubclass(c, families) and not known(c) and not {*map(_name, c.__mro__)} & {*REASONS}
    ]
    assert not missing


def _name(cls: type) -> str:
    return cls.__name__


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "davit_tiny",
            "DaVit does not support encodings of vispe: it alternates windowed attention with attention between",
        ),
        ("resnet18", "ResNet does not support encodings of vispe: it is a convolutional network"),
        ("pit_ti_224", "grids that shrink from stage to stage"),
        ("swinv2_cr_tiny_224", "attends inside windows"),
    ],
)
def test_errors_of_unsupported_models_of_timm(name, words):
    with torch.device("meta"):
        model = timm.create_model(name)
    with pytest.raises(UnsupportedHost, match=words):
        vispe.convert(model, "alibi2d")
    with pytest.raises(UnsupportedHost, match=words):
        timm.create_model(name, pos_embed="alibi2d")
    assert "'vit_base_patch16_224'" in refusal(type(model))


def test_every_suggested_model_of_timm_converts():
    defaults = {default for table in (TRANSFORMERS, ELSEWHERE) for _, default in table.values()}
    for name in defaults:
        assert timm.is_model(name), name
        with torch.device("meta"):
            model = timm.create_model(name, depth=1, pos_embed="alibi2d")
        assert model.vispe.spec == [{"name": "alibi2d"}], name


TINY = {"num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}


@cases(
    ("stem", "width", "equivalent"),
    [
        ("Data2VecVision", 768, "vit_base_patch16_224"),
        ("Yolos", 384, "deit_small_patch16_224"),
        ("Yolos", 64, "deit_small_patch16_224"),
    ],
)
def test_the_error_for_a_model_of_transformers_suggests_the_equivalent_of_timm(stem, width, equivalent):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = getattr(transformers, f"{stem}Config")(hidden_size=width, **TINY)
    with torch.device("meta"):
        model = getattr(transformers, f"{stem}Model")(config)
    before = type(model)
    with pytest.raises(
        UnsupportedHost, match=rf"{stem}Model.*timm.create_model\('{equivalent}', pos_embed='alibi2d'\)"
    ):
        vispe.convert(model, "alibi2d")
    assert type(model) is before


def test_data_parallel_is_unwrapped():
    expected = vispe.convert(tiny(), "alibi2d")
    model = nn.DataParallel(tiny())
    assert vispe.convert(model, "alibi2d") is model
    close(model(image()), expected(image()))
    assert vispe.restore(model) is model
    close(model(image()), tiny()(image()))


def test_features_only_models_are_unwrapped():
    options = {"img_size": 64, "out_indices": (1, 2), "features_only": True}
    torch.manual_seed(0)
    model = timm.create_model("test_vit", **options).eval()
    torch.manual_seed(0)
    stock = timm.create_model(
        "test_vit", **{**options, "features_only": False, "out_indices": None}, num_classes=0
    ).eval()
    stock.load_state_dict(model.model.state_dict(), strict=False)
    vispe.convert(model, "alibi2d")
    vispe.convert(stock, "alibi2d")
    x = image(2, 3, 64, 64)
    for actual, expected in zip(
        model(x), stock.forward_intermediates(x, [1, 2], intermediates_only=True), strict=True
    ):
        assert torch.equal(actual, expected)


def test_a_backbone_of_transformers_is_unwrapped():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    options = {"backbone": "test_vit", "use_pretrained_backbone": False, "out_indices": (1, 2)}
    model = transformers.TimmBackbone(transformers.TimmBackboneConfig(**options)).eval()
    x = image(1, 3, 64, 64)
    before = model(x).feature_maps
    vispe.convert(model, "alibi2d")
    after = model(x).feature_maps
    inner = model._backbone.model
    expected = inner.forward_intermediates(x, [1, 2], intermediates_only=True)
    for old, actual, exact in zip(before, after, expected, strict=True):
        assert torch.equal(actual, exact)
        assert not torch.allclose(actual, old)


def test_adapters_of_peft_are_unwrapped():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=2, target_modules=["qkv"], init_lora_weights=False)
    torch.manual_seed(0)
    model = peft.get_peft_model(tiny(), config)
    weights = model.state_dict()
    vispe.convert(model, "alibi2d")
    torch.manual_seed(0)
    other = peft.get_peft_model(vispe.convert(tiny(), "alibi2d"), config)
    other.load_state_dict({k: v for k, v in weights.items() if "pos_embed" not in k}, strict=False)
    close(model(image()), other(image()))


@cases("verb", ["convert", "restore"])
def test_wrappers_that_register_parameters_are_rejected(verb):
    act = (lambda m: vispe.convert(m, "alibi2d")) if verb == "convert" else vispe.restore
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(tiny())
        with pytest.raises(
            UnsupportedHost, match=r"DistributedDataParallel, .*vispe.convert\(model.module, \.\.\.\)"
        ):
            act(model)
        sharded = tiny()
        torch.distributed.fsdp.fully_shard(sharded, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        with pytest.raises(UnsupportedHost, match="sharded by fully_shard"):
            act(sharded)
    finally:
        torch.distributed.destroy_process_group()


def test_compiled_and_traced_models_are_rejected():
    with pytest.raises(
        UnsupportedHost, match=r"OptimizedModule, which compiles .*vispe.convert\(model._orig_mod, "
    ):
        vispe.convert(torch.compile(tiny()), "alibi2d")
    with pytest.raises(UnsupportedHost, match=r"vispe.convert\(model.module._orig_mod, "):
        vispe.convert(nn.DataParallel(torch.compile(tiny())), "alibi2d")
    with pytest.raises(UnsupportedHost, match="is a GraphModule, rebuilt from parts of another model"):
        vispe.convert(torch.fx.symbolic_trace(tiny()), "alibi2d")
    options = {"img_size": 64, "out_indices": (1, 2), "features_only": True}
    with pytest.raises(UnsupportedHost, match="is a FeatureGraphNet, rebuilt from parts"):
        vispe.convert(timm.create_model("test_vit", feature_cls="fx", **options), "alibi2d")


@pytest.mark.slow
def test_a_model_compiled_in_place_runs_the_converted_model():
    torch._dynamo.reset()
    model = tiny()
    model.compile(backend="eager")
    model(image())
    vispe.convert(model, "alibi2d")
    close(model(image()), vispe.convert(tiny(), "alibi2d")(image()))


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.head = tiny(), nn.Linear(5, 2)


def test_the_error_names_the_module_to_convert():
    with pytest.raises(UnsupportedHost, match=r"supports encodings: vispe.convert\(model.backbone, \.\.\.\)"):
        vispe.convert(Holder(), "alibi2d")
    with pytest.raises(UnsupportedHost, match=r"vispe.convert\(model.get_submodule\('0'\), \.\.\.\)"):
        vispe.convert(nn.Sequential(tiny()), "alibi2d")
    with pytest.raises(UnsupportedHost, match=r"vispe.convert\(model.module, "):
        vispe.convert(ModelEmaV3(tiny()), "alibi2d")
    with pytest.raises(
        UnsupportedHost, match=r"a Linear of torch\. .* or use vispe.Attention in your own blocks"
    ):
        vispe.convert(nn.Linear(2, 2), "alibi2d")
