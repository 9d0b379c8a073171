"""Converted models pass tables to attention, so fused kernels use their fastest path, in eager mode and compiled."""

import pytest
import torch
from timm.models import Eva, VisionTransformer
from torch.utils._python_dispatch import TorchDispatchMode

import vispe
from tests.cases import cases
from tests.hosts.helpers import close, image, tiny
from tests.hosts.packed import naflex
from vispe.attention import dispatch
from vispe.attention.bias.lower_to_table import table_unsupported_reason

SPECS = ["alibi2d", "alibi2d(slopes=learned)", "rpb", "alibi2d+rope_axial"]
HOSTS = {
    "vit": lambda: tiny(VisionTransformer),
    "vit of any size": lambda: tiny(VisionTransformer, dynamic_img_size=True),
    "eva": lambda: tiny(Eva, use_rot_pos_emb=False),
    "naflex": naflex,
}


@pytest.fixture
def reasons(monkeypatch):
    """Return why each call of attention had no table, None for calls with one."""
    actual = []
    choose = dispatch.select_backend

    def chosen(call, backend):
        actual.append(table_unsupported_reason(call.bias))
        return choose(call, backend)

    monkeypatch.setattr(dispatch, "select_backend", chosen)
    monkeypatch.setattr(dispatch.sdpa, "cached_mask", lambda *_: None)
    monkeypatch.setattr("vispe.hosts.common.context.Context.plain_mask", lambda *_: None)
    return actual


class Comparisons(TorchDispatchMode):
    """Count comparisons of complete tensors (a learned table with infinite entries, on the CPU only)."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket is torch.ops.aten.equal
        return func(*args, **(kwargs or {}))


@cases("spec", SPECS)
@cases("host", HOSTS)
def test_eager(host, spec, reasons):
    reasons.clear()
    model = vispe.convert(HOSTS[host](), spec).eval()
    with Comparisons() as first:
        model(image())
    assert reasons == [None] * len(model.blocks)
    assert first.count == 0


@pytest.mark.compiles
@pytest.mark.slow
@pytest.mark.parametrize("host", HOSTS)
def test_compiled(host, reasons):
    torch._dynamo.reset()
    model = vispe.convert(HOSTS[host](), "alibi2d(slopes=learned)+rpb").eval()
    expected = model(image())
    reasons.clear()
    close(torch.compile(model, backend="eager", fullgraph=True)(image()), expected)
    assert reasons == [None] * len(model.blocks)
