"""Adapters on layers of a host by name: layers of encodings with the same names are not wrapped and raise no error."""

import functools
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import vispe
from tests.cases import cases
from tests.hosts.helpers import EVERY, cotangent, image, shake
from tests.hosts.test_unused_parameters import HOSTS
from tests.hosts.transformers.saving.test_vision import VISION, build, transformers
from tests.hosts.windows import common as windows
from vispe.errors import VispeError
from vispe.hosts.transformers.saving import peft_adapters

peft = pytest.importorskip("peft", reason="vispe[train] is not installed")

TABLE = json.loads((Path(__file__).parents[3] / "encodings/parts/parameters.json").read_text())
# encodings with layers inside
SPECS = [name for name, shapes in TABLE.items() if any(path.endswith(".weight") for path in shapes)]


def deep():
    """Return a tower with so many layers that peft shortens their names to `out_proj` and similar."""
    config = transformers.SiglipVisionConfig(**VISION | {"num_hidden_layers": 5, "vision_use_head": False})
    return transformers.SiglipVisionModel(config)


def windowed(name):
    return lambda: windows.MODELS[name][0]()


# host: what builds it, and the side of its images
MODELS = {name: (make, 32) for name, make in HOSTS.items()}
MODELS |= {
    name: (lambda name=name: build(name), 16)
    for name in ("CLIPVisionModel", "InternVLVisionModel", "TimmWrapperModel")
}
MODELS |= {"siglip": (deep, 16)}
MODELS |= {
    name: (windowed(name), windows.MODELS[name][1])
    for name in ("timm_sam", "timm_swin_v2", "hub_swin", "hub_vitdet")
}
PAIRS = [
    (h, s)
    for i, s in enumerate(SPECS)
    for j, h in enumerate(MODELS)
    if EVERY or (i + 3 * j) % len(SPECS) == 0
]
PAIRS += [
    pair
    for pair in (("CLIPVisionModel", "seqpe"), ("open_clip", "seqpe"), ("torchvision_vit", "seqpe"))
    if not EVERY
]


def names_of(stock):
    """Return the last parts of the names of linear layers that are unique in the stock model."""
    linear = {n.rpartition(".")[2] for n, m in stock.named_modules() if isinstance(m, nn.Linear)}
    others = {n.rpartition(".")[2] for n, m in stock.named_modules() if not isinstance(m, nn.Linear)}
    return sorted(linear - others)


def lora(model, targets, **options):
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=targets, r=2, **options))


def outputs(model, side):
    out = model(image(2, 3, side, side))
    return out if isinstance(out, torch.Tensor) else out[0]


def merged(tuned, side):
    """Return the outputs with adapters before and after merging."""
    with torch.no_grad():
        return outputs(tuned.eval(), side), outputs(tuned.merge_and_unload(), side)


def close(actual, expected):
    return torch.allclose(actual, expected, rtol=2e-3, atol=2e-3 * float(expected.abs().max()))


@functools.cache
def stock_merges(host):
    """Return whether merging keeps the outputs of the stock host.

    EVA and `torch.nn.MultiheadAttention` read the weights of layers without calling the layers, so their adapters have
    an effect only after merging.
    """
    make, side = MODELS[host]
    torch.manual_seed(0)
    return close(*merged(lora(shake(make().float(), 3), "all-linear", init_lora_weights=False), side))


def check(host, spec, form):
    make, side = MODELS[host]
    torch.manual_seed(0)
    model = make().float()
    targets = {"all-linear": "all-linear", "names": names_of(model)}
    targets["pattern"] = rf".*\.({'|'.join(targets['names'])})"
    expected = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    expected = [n for n in expected if form == "all-linear" or n.rpartition(".")[2] in targets["names"]]
    try:
        vispe.convert(model, spec)
    except VispeError as refused:
        pytest.skip(str(refused))
    shake(model, 3)
    torch.manual_seed(0)
    tuned = lora(model, targets[form], init_lora_weights=False).train()
    adapted = {
        n.partition(".lora_A")[0] for n, _ in tuned.base_model.model.named_parameters() if ".lora_A" in n
    }
    assert not [n for n in adapted if "pos_enc" in n]
    assert adapted <= set(expected) or host == "siglip"
    out = outputs(tuned, side)
    assert out.isfinite().all()
    (out * cotangent(out)).sum().backward()
    grads = [p.grad for n, p in tuned.named_parameters() if "lora_" in n and p.grad is not None]
    assert grads
    assert all(g.isfinite().all() for g in grads)
    if stock_merges(host):
        assert close(*merged(tuned, side))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["all-linear", "names", "pattern"])
@pytest.mark.parametrize(("host", "spec"), PAIRS)
def test_adapters_on_layers_of_the_host(host, spec, form):
    check(host, spec, form)


@cases("targets", [["pe_qk.0"], ["out_proj", "pe_qk.0"], r".*pe_qk\.0"])
def test_peft_rejects_names_that_only_an_encoding_has(targets):
    with pytest.raises(ValueError, match="PreciseLinear"):
        lora(vispe.convert(build("CLIPVisionModel"), "seqpe"), targets)


def test_an_adapter_of_the_stock_model_loads_into_a_converted_model(tmp_path):
    """Target names in the file were selected without the encoding."""
    lora(deep(), "all-linear", init_lora_weights=False).save_pretrained(tmp_path)
    assert "out_proj" in json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]
    result = peft.PeftModel.from_pretrained(vispe.convert(deep(), "seqpe"), tmp_path)
    adapted = [n for n, _ in result.named_parameters() if "lora_A" in n]
    assert len(adapted) == 30
    assert not [n for n in adapted if "pos_enc" in n]


def test_other_kinds_of_adapters_and_injection():
    model = vispe.convert(build("CLIPVisionModel"), "seqpe")
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["out_proj"], r=2), model)
    assert sum("lora_A" in n for n, _ in model.named_parameters()) == 2
    for kind in ("LoHaConfig", "WaveFTConfig"):
        model = vispe.convert(build("CLIPVisionModel"), "seqpe")
        more = {"n_frequency": 8} if kind == "WaveFTConfig" else {}
        tuned = peft.get_peft_model(model, getattr(peft, kind)(target_modules=["out_proj"], **more))
        assert not [n for n, p in tuned.named_parameters() if "pos_enc" in n and p.requires_grad]


def test_modules_of_other_libraries_called_pos_enc_are_adapted():
    model = nn.Sequential(nn.ModuleDict({"pos_enc": nn.ModuleDict({"out_proj": nn.Linear(4, 4)})}))
    assert any("lora_A" in n for n, _ in lora(model, ["out_proj"]).named_parameters())


def test_peft_raises_without_the_wrappers():
    """peft selects modules by the ends of their names; the wrappers are needed as long as this fails."""
    peft_adapters.uninstall()
    try:
        with pytest.raises(ValueError, match="PreciseLinear"):
            lora(vispe.convert(build("CLIPVisionModel"), "seqpe"), ["out_proj"])
    finally:
        peft_adapters.install()
