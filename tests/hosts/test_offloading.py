"""Hooks of accelerate: weights loaded for one forward pass, and blocks on several devices."""

import pytest
import torch

import vispe
from tests.cases import cases
from tests.hosts.helpers import image, tiny
from tests.hosts.packed import naflex, pack
from tests.hosts.windows import common as windows
from vispe.hosts.common.position_cache import PositionCache, positions_on

accelerate = pytest.importorskip("accelerate", reason="vispe[train] is not installed")
hooks = accelerate.hooks


def of_transformers(name, **options):
    from tests.hosts.transformers.vision import vision_models

    return vision_models.build(name, **options), vision_models.inputs(name)


def built(name):
    """Return a model in evaluation mode, and its inputs."""
    if name == "timm":
        return tiny(), {"x": image()}
    if name == "naflex":
        return naflex(), {"x": pack([(3, 5), (3, 5)])}
    if name in windows.MODELS:
        x = windows.image(name)
        return windows.build(name), {"x" if name.startswith("timm") else "pixel_values": x}
    pytest.importorskip("transformers", reason="vispe[vlm] is not installed")
    name, _, attention = name.partition(" ")
    return of_transformers(name, **({"attn_implementation": attention} if attention else {}))


def values(model, inputs):
    with torch.no_grad():
        out = model(**inputs)
    return out if isinstance(out, torch.Tensor) else out.last_hidden_state


CASES = [(name, "alibi2d") for name in ("IJepaModel", "hub_vitdet", "hub_sam3", "timm_swin_v2")]
# a network that is called, a rotation, a term of the values, and a function that reads the tokens
CASES += [("timm", spec) for spec in ("rpb_cpb", "rope_mixed", "shaw.values", "cope")]
CASES += [("ViTModel eager", "cope"), ("naflex", "cope"), ("hub_vitdet", "irpe"), ("hub_swin", "t5")]


@cases(("name", "spec"), CASES)
def test_offloading_does_not_change_outputs(name, spec, tmp_path):
    model, inputs = built(name)
    model = vispe.convert(model, spec)
    expected = values(model, inputs)
    model = accelerate.disk_offload(model, tmp_path, execution_device="cpu")
    for _ in range(2):
        assert torch.equal(values(model, inputs), expected)
    assert all(p.is_meta for p in model.parameters())


@cases(
    ("name", "spec"),
    [("timm", "peg"), *((n, s) for n in ("timm", "naflex") for s in ("learned", "seqpe_input"))],
)
def test_offloaded_weights_outside_attention(name, spec):
    model, inputs = built(name)
    model = vispe.convert(model, spec)
    expected = values(model, inputs)
    model = accelerate.cpu_offload(model, execution_device="cpu")
    assert torch.equal(values(model, inputs), expected)
    hooks.remove_hook_from_submodules(model)
    assert torch.equal(values(model, inputs), expected)


@cases("name", ["IJepaModel", "ViTModel eager", "hub_vitdet"])
def test_positions_follow_the_tokens_to_their_device(name):
    """Hooks move inputs from the CPU to the device of the model, the meta device in this test."""
    model, inputs = built(name)
    model = vispe.convert(model, "alibi2d+rope_axial")
    hooks.attach_align_device_hook(model, execution_device=torch.device("meta"))
    assert values(model, inputs).is_meta


def test_moved_positions_share_the_memo_but_not_random_draws():
    pos = PositionCache()(vispe.Grid((2, 3), prefix=1), torch.zeros(1))
    moved = [
        positions_on(pos.replace(attrs={"draw": torch.ones(1) * k}), torch.device("meta")) for k in (0, 1)
    ]
    assert moved[0].memo is moved[1].memo
    assert moved[0].attrs["draw"].is_meta
    assert moved[0].attrs["draw"] is not moved[1].attrs["draw"]
    assert moved[0].on_grid
    assert positions_on(pos, torch.device("cpu")) is pos
