"""Refusals of the fused backend, with reasons, and machines without a GPU."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from vispe import Grid, Positions, attention, explain
from vispe.attention import DenseBias, DistanceBias, SumBias, TableBias, ValueTerm
from vispe.attention.backends import flex
from vispe.attention.backends.triton import unsupported_reason
from vispe.attention.bias.lower_to_table import table_unsupported_reason
from vispe.attention.call import Call
from vispe.errors import BackendUnavailable

GRID = Grid((3, 4), 1)
POS = GRID.positions()


@pytest.fixture
def device(monkeypatch):
    """Simulate a machine that can run the kernels."""
    monkeypatch.setitem(unsupported_reason.__globals__, "device_unsupported_reason", lambda q: None)


def tensors(n=13, width=16, dtype=torch.float32):
    return [torch.randn(1, 2, n, width, dtype=dtype) for _ in range(3)]


def test_wide_heads(device, monkeypatch):
    """Above 128 channels FlexAttention runs for biases without a gradient, a dense mask for those with one."""
    monkeypatch.setattr(flex, "device_unsupported_reason", lambda q: None)
    with FakeTensorMode():
        pos = GRID.positions("cuda")
        learned = TableBias(torch.zeros(2, 5, 7, device="cuda", requires_grad=True), pos)
        for width, backends in ((72, ["triton"] * 2), (160, ["flex", "sdpa"]), (264, ["sdpa"] * 2)):
            q = torch.empty(1, 2, 13, width, device="cuda")
            for backend, bias in zip(backends, (DistanceBias((0.1, 0.2), pos), learned), strict=True):
                result = explain(q, q, q, bias=bias)
                assert result.backend == backend
                if width > 128:
                    why = f"the fused kernels support head_dim up to 128, got {width}"
                    assert result.unsupported["triton"] == why
                if backend == "sdpa":
                    why = (
                        "adds the gradient of a learned bias"
                        if width == 160
                        else "needs head_dim <= 256, got 264"
                    )
                    assert why in result.unsupported["flex"]


def test_not_selected_on_cpu():
    q, k, v = tensors()
    bias = DistanceBias((0.1, 0.2), POS)
    assert explain(q, k, v, bias=bias).backend == "sdpa"
    with pytest.raises(BackendUnavailable, match=r"Triton (kernels do not run on cpu|is not installed)"):
        attention(q, k, v, bias=bias, backend="triton")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"attn_mask": torch.ones(13, 13, dtype=torch.bool)}, "n x m tensor"),
        ({"is_causal": True, "bias": None}, "is_causal is fused only together with a bias"),
        (
            {"is_causal": True, "cu_seqlens": torch.tensor([0, 6, 13])},
            "is_causal is not fused with packed sequences",
        ),
        (
            {"dropout_p": 0.1, "cu_seqlens": torch.tensor([0, 13])},
            "dropout is fused only with biases on one full grid",
        ),
        ({"scale": 0.0}, "scale 0.0 is not positive"),
        ({"scale": -1.0}, "scale -1.0 is not positive"),
        (
            {"value_term": ValueTerm(torch.zeros(2, 3, 16), torch.zeros(13, 13, dtype=torch.int64))},
            "not materialised",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arguments(device, options, reason):
    assert reason in unsupported_reason(
        Call(*tensors(), **{"bias": DistanceBias((0.1, 0.2), POS), **options})
    )


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (tensors(dtype=torch.float64), "float64"),
        (tensors(width=130), "the fused kernels support head_dim up to 128, got 130"),
        (
            [t[:, :, : 13 if i else 5] for i, t in enumerate(tensors())],
            "queries, 5, is not that of the keys, 13",
        ),
        ([t[:0] for t in tensors()], "nothing to attend to"),
    ],
    ids=["float64", "wide", "unequal", "empty"],
)
def test_tensors(device, arguments, reason):
    assert reason in unsupported_reason(Call(*arguments))


def test_supported(device):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert unsupported_reason(Call(*tensors(dtype=dtype))) is None
        edge = TableBias(torch.zeros(2, 5, 7), POS, torch.zeros(2, 3))
        for bias in (DistanceBias((0.1, 0.2), POS), edge, SumBias([edge, DistanceBias((0.1, 0.2), POS)])):
            assert unsupported_reason(Call(*tensors(dtype=dtype), bias=bias)) is None


def test_a_mask_over_keys_is_supported(device):
    bias, keep = DistanceBias((0.1, 0.2), POS), torch.rand(1, 1, 1, 13) < 0.8
    assert unsupported_reason(Call(*tensors(), bias=bias, attn_mask=keep)) is None
    plan = explain(*tensors(), bias=bias, attn_mask=keep, backend="triton")
    assert plan.backend == "triton"
    assert (
        "n x m tensor"
        in explain(*tensors(), bias=bias, attn_mask=keep.expand(1, 1, 13, 13)).unsupported["triton"]
    )


def test_biases_without_a_table():
    slopes = (0.1, 0.2)
    moved = Positions(POS.coords * 1.5, POS.spatial, POS.extent, cell=POS.cell, grid=GRID)
    graded = Positions(POS.coords.clone().requires_grad_(), POS.spatial, POS.extent, grid=GRID)
    subset = POS.gather(torch.tensor([[0, 2, 5]]))
    other = Grid((4, 3), 1).positions()
    for bias, reason in (
        (DenseBias(torch.zeros(1, 2, 13, 13), POS), "DenseBias depends on more than the offset"),
        (DistanceBias(slopes, subset), "not a full grid in raster order"),
        (DistanceBias(slopes, None), "not a full grid in raster order"),
        (DistanceBias(slopes, Positions(torch.rand(13, 2))), "not a full grid in raster order"),
        (DistanceBias(slopes, graded), "positions with a gradient"),
        (DistanceBias(slopes, moved), "not at the positions of their grid"),
        (SumBias([DistanceBias(slopes, POS), DistanceBias(slopes, other)]), "different grids"),
        (SumBias([DistanceBias(slopes, POS), DenseBias(torch.zeros(1, 2, 13, 13))]), "DenseBias"),
    ):
        assert reason in table_unsupported_reason(bias)
