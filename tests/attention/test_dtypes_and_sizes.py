"""Empty axes and dtypes that attention does not compute in: one sentence, from every backend and every description."""

import pytest
import torch

from tests.cases import cases, pairwise
from vispe import Grid, attention, explain
from vispe.attention import (
    Affine,
    BlockTransform,
    Calibrate,
    ContextBias,
    DenseBias,
    DistanceBias,
    Expand,
    GatedBias,
    LowRankBias,
    OffsetBias,
    PairRotation,
    ProfileBias,
    RadialBias,
    TableBias,
    ValueTerm,
)
from vispe.attention.bias.decomposed import DecomposedBias
from vispe.errors import ShapeError

POS = Grid((2, 3)).positions()
BUCKETS = torch.zeros(6, 6, dtype=torch.int64)
FIXED = DistanceBias((1.0, 0.5), POS, metric="squared")
DTYPES = [torch.complex64, torch.int32, torch.bool]


def _numbers(*shape, dtype=torch.float32):
    return (torch.randn(*shape) * 3).to(dtype)


DESCRIPTIONS = {
    "table": lambda t: TableBias(_numbers(2, 3, 5, dtype=t), POS),
    "table prefix": lambda t: TableBias(_numbers(2, 3, 5), POS, _numbers(2, 3, dtype=t)),
    "profile": lambda t: ProfileBias(_numbers(2), _numbers(1, 3, 5, dtype=t), POS),
    "profile slopes": lambda t: ProfileBias(_numbers(2, dtype=t), _numbers(1, 3, 5), POS),
    "dense": lambda t: DenseBias(_numbers(1, 2, 6, 6, dtype=t)),
    "lowrank": lambda t: LowRankBias(_numbers(1, 2, 6, 3), _numbers(1, 2, 6, 3, dtype=t)),
    "slopes": lambda t: DistanceBias(_numbers(2, dtype=t), POS),
    "context": lambda t: ContextBias(_numbers(2, 5, 8, dtype=t), BUCKETS, "query", True, POS),
    "content": lambda t: ContextBias(
        _numbers(2, 5, 8), BUCKETS, "key", True, POS, _numbers(1, 2, 6, 8, dtype=t)
    ),
    "gates": lambda t: GatedBias(None, _numbers(1, 2, 6, dtype=t), FIXED),
    "decomposed": lambda t: DecomposedBias(_numbers(1, 2, 6, 3), _numbers(1, 2, 6, 4, dtype=t), "query", POS),
    "radial": lambda t: RadialBias(lambda d: torch.stack([d, d]).to(t), POS).dense(),
    "offset": lambda t: OffsetBias(lambda step: step.T.to(t), POS).dense(),
    "value term": lambda t: ValueTerm(_numbers(1, 5, 8, dtype=t), BUCKETS),
    "rotation": lambda t: PairRotation(*[_numbers(1, 1, 6, 4, dtype=t)] * 2, "half"),
    "expand": lambda t: Expand(*[_numbers(1, 1, 6, 4, dtype=t)] * 2),
    "affine": lambda t: Affine(k_add=_numbers(1, 1, 6, 8, dtype=t)),
    "blocks": lambda t: BlockTransform(v=_numbers(1, 1, 6, 2, 2, 2, dtype=t)),
    "calibrate": lambda t: Calibrate(k_up=_numbers(2, 8, 3), k_down=_numbers(2, 3, 8, dtype=t)),
}


@cases("dtype", DTYPES, ids=str)
@cases("name", DESCRIPTIONS)
def test_descriptions_of_other_dtypes(name, dtype):
    DESCRIPTIONS[name](torch.float64)
    with pytest.raises(ShapeError, match=rf": \w+ must be floating point, got {dtype}\. Convert it"):
        DESCRIPTIONS[name](dtype)


@cases("backend", ["auto", "reference", "sdpa", "lowrank", "flex"])
@cases("dtype", [*DTYPES, torch.complex128, torch.uint8, torch.float8_e4m3fn], ids=str)
def test_inputs_of_other_dtypes(dtype, backend):
    x, y = _numbers(1, 2, 6, 8, dtype=dtype), _numbers(1, 2, 6, 8)
    for q, k, v in ((x, x, x), (y, y, x)):
        for call in (attention, explain):
            with pytest.raises(
                ShapeError, match=r"q, k, v must be float16, bfloat16, float32 or float64, got"
            ):
                call(q, k, v, bias=FIXED, backend=backend)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ShapeError, match="must be float16"):
        attention(y, y, x, backend=backend)


@pairwise
@cases("backend", ["auto", "reference", "sdpa", "lowrank", "flex"])
@cases("bias", [None, FIXED], ids=["none", "squared"])
@cases("enable_gqa", [False, True])
@cases(
    ("q", "k", "match"),
    [
        ((2, 0, 6, 8), (2, 0, 6, 8), r"at least one head, got q=\(2, 0, 6, 8\)"),
        ((2, 2, 6, 8), (2, 0, 6, 8), r"at least one head, got q=\(2, 2, 6, 8\), k=\(2, 0, 6, 8\)"),
        ((2, 2, 6, 0), (2, 2, 6, 0), r"needs head_dim >= 1, got q=\(2, 2, 6, 0\).*Pass scale"),
    ],
    ids=["no heads", "no key heads", "no channels"],
)
def test_empty_axes(q, k, match, enable_gqa, bias, backend):
    q, k, v = torch.randn(q), torch.randn(k), torch.randn(*k[:3], 8)
    for call in (attention, explain):
        with pytest.raises(ShapeError, match=match):
            call(q, k, v, bias=bias, enable_gqa=enable_gqa, backend=backend)


@cases("backend", ["auto", "reference", "sdpa"])
def test_empty_axes_with_a_result(backend):
    v = torch.randn(2, 2, 6, 8)
    empty = torch.randn(2, 2, 6, 0)
    weights = FIXED.dense().softmax(-1)
    out = attention(empty, empty, v, bias=FIXED, scale=1.0, backend=backend)
    torch.testing.assert_close(out, weights @ v)
    assert attention(v, v, empty, bias=FIXED, backend=backend).shape == (2, 2, 6, 0)
    assert attention(v[:0], v[:0], v[:0], bias=FIXED, backend=backend).shape == (0, 2, 6, 8)
    assert attention(v[:, :, :0], v, v, backend=backend).shape == (2, 2, 0, 8)
