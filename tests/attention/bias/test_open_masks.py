"""Cached masks that hide keys: used without a search for rows without keys, unless there are such rows."""

import pytest
import torch

from tests.cases import cases, pairwise
from vispe import Grid, attention, create_encoding
from vispe.attention import DistanceBias, RadialBias, SumBias, TableBias, masks
from vispe.attention.backends import sdpa
from vispe.attention.transform.pairs import PairRotation

HEADS, SHAPE, NONE = 3, (5, 6), float("-inf")


def _table(pos, hidden, **options):
    values = torch.randn(HEADS, 9, 11)
    values[hidden] = NONE
    return TableBias(values, pos, **options)


def _lookhere(pos, directions):
    return create_encoding(f"lookhere(directions={directions})", num_heads=HEADS, depth=2).bias(pos, 0)


def _radial(pos, radius):
    def function(d):
        return torch.where(d > radius, NONE, -d)[None]

    return RadialBias(function, pos, key=("within", radius))


LATER_ROWS = (slice(None), slice(0, 4))  # keys in rows behind that of the query
BIASES = {
    "halves": lambda pos: _lookhere(pos, "halves"),
    "corners": lambda pos: _lookhere(pos, "corners"),
    "diagonals, all": lambda pos: _lookhere(pos, "diagonals-none"),
    "eighths": lambda pos: _lookhere(pos, "eighths2"),
    "learned": lambda pos: _table(pos, LATER_ROWS),
    "declared sparse": lambda pos: _table(pos, LATER_ROWS, is_sparse=True),
    "prefix hidden": lambda pos: _table(pos, LATER_ROWS, prefix=torch.tensor([[0.5, NONE, 0.0]])),
    "fixed": lambda pos: _radial(pos, 2.5),
    "sum": lambda pos: SumBias([_table(pos, LATER_ROWS), DistanceBias((0.5, 0.2, 0.1), pos)]),
    "sum of fixed": lambda pos: SumBias([_radial(pos, 2.5), DistanceBias((0.5, 0.2, 0.1), pos)]),
}
CLOSED = {
    "a head": lambda pos: _table(pos, (slice(1, 2),)),
    "first rows": lambda pos: _table(pos, (slice(None), slice(0, 5))),
    "fixed": lambda pos: _radial(pos, -1.0),
}
LIMITS = {torch.float32: 3e-6, torch.bfloat16: 4e-2, torch.float16: 6e-3}


def inputs(pos, dtype):
    return torch.randn(3, 2, HEADS, pos.tokens, 8, dtype=dtype)


def check(pos, make, dtype, **masks):
    """Compare three calls with the float64 reference; return inputs, bias and the last output."""
    q, k, v = inputs(pos, dtype)
    with torch.no_grad():
        for _ in range(3):
            bias = make(pos)
            out = attention(q, k, v, bias=bias, **masks)
        exact = (t.double() for t in (q, k, v))
        expected = attention(*exact, bias=bias, backend="reference", **masks)
    assert (out - expected).abs().max() < LIMITS[dtype]
    return q, k, v, bias, out


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def frozen(make):
    """Equal values in each call, as a layer has them."""

    def seeded(pos):
        torch.manual_seed(3)
        return make(pos)

    return seeded


@pairwise
@cases("dtype", LIMITS, ids=str)
@cases("prefix", [0, 1, 3])
@cases("name", BIASES)
def test_open_masks_are_used_directly(name, prefix, dtype, monkeypatch):
    pos, make = Grid(SHAPE, prefix).positions(), frozen(BIASES[name])
    q, k, v, bias, _ = check(pos, make, dtype)
    assert sdpa.cached_mask(q, k, v, bias) is not None
    # a rotation needs the general path, which must not search the mask either
    angles = torch.rand(1, 1, pos.tokens, 4)
    rotation = PairRotation(angles.cos(), angles.sin(), "half")
    searched = []
    monkeypatch.setattr(sdpa, "combine_masks", lambda *a: searched.append(a) or masks.combine_masks(*a))
    with torch.no_grad():
        actual = attention(q, k, v, bias=bias, transform=rotation)
        exact = (t.double() for t in (q, k, v))
        expected = attention(*exact, bias=bias, transform=rotation, backend="reference")
    assert (actual - expected).abs().max() < LIMITS[dtype]
    assert not searched


@pairwise
@cases("dtype", LIMITS, ids=str)
@cases("prefix", [0, 1])
@cases("name", BIASES)
def test_padding_hides_all_keys_of_open_masks(name, prefix, dtype):
    pos = Grid(SHAPE, prefix).positions()
    keep = torch.rand(2, pos.tokens) > 0.5
    keep[0, : prefix + 12] = False
    check(pos, frozen(BIASES[name]), dtype, key_padding_mask=keep)


@pairwise
@cases("dtype", LIMITS, ids=str)
@cases("padded", [False, True])
@cases("name", CLOSED)
def test_rows_without_keys_are_zero(name, padded, dtype):
    pos, make = Grid(SHAPE).positions(), frozen(CLOSED[name])
    masks = {"key_padding_mask": torch.rand(2, pos.tokens) > 0.3} if padded else {}
    q, k, v, bias, out = check(pos, make, dtype, **masks)
    no_key = (bias.dense() == NONE).all(-1).expand(2, HEADS, -1)
    assert no_key.any()
    assert not out[no_key].any()
    assert sdpa.cached_mask(q, k, v, bias) is None
