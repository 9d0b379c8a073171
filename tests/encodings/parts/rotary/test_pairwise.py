"""Logits with a rotation per pair of tokens (SelfExtend, PINE)."""

import pytest
import torch

from tests.cases import cases
from tests.encodings.parts.rotary.pairwise_inputs import RATES, inputs, line, rotation
from vispe.attention import PairRotation, attention
from vispe.encodings.parts.rotary.pairwise.pine import PineScores
from vispe.encodings.parts.rotary.pairwise.self_extend import SelfExtendScores, self_extend
from vispe.errors import OptionError, ShapeError, UnsupportedCombination
from vispe.multimodal import Parallel, Stream, Text, create_scheme


@cases(("n", "group", "window"), [(13, 2, 4), (13, 3, 5), (7, 4, 1), (9, 1, 3)])
def test_self_extend_pair_by_pair(n, group, window):
    q, k, _ = inputs(n=n, kv_heads=4)
    actual = SelfExtendScores(line(n), line(n), RATES, group, window).dense(q=q, k=k, scale=1.0)
    for i in range(n):
        for j in range(n):
            offset = i - j
            if abs(offset) >= window:
                sign = 1 if offset > 0 else -1
                offset = i // group - j // group + sign * (window - window // group)
            at = torch.tensor([[[float(offset)]]], dtype=torch.float64)
            expected = (rotation(at).query(q[:, :, i : i + 1]) * k[:, :, j : j + 1]).sum(-1)[..., 0]
            torch.testing.assert_close(actual[:, :, i, j], expected)


def test_a_short_input_and_groups_of_one_are_plain_rotation():
    q, k, v = inputs()
    plain = attention(q, k, v, transform=rotation(line(13)), enable_gqa=True, is_causal=True)
    for group, window in ((3, 13), (1, 4)):
        bias = SelfExtendScores(line(13), line(13), RATES, group, window)
        torch.testing.assert_close(attention(q, k, v, bias=bias, enable_gqa=True, is_causal=True), plain)
    assert self_extend(torch.arange(4), 2, 4)[0].tolist() == [0, 0, 1, 1]


def test_rules_of_two_axes_are_independent():
    q, k, _ = inputs(b=1, n=20, kv_heads=4, width=8)
    rates = torch.tensor([[[1.0, 0.0, 0.3], [0.0, 0.7, 0.0]]], dtype=torch.float64)
    at = torch.cartesian_prod(torch.arange(2.0), torch.arange(10.0))[None].double()
    both = SelfExtendScores(at, at, rates, 2, 4).dense(q=q, k=k, scale=1.0)
    angle = at[:, None] @ rates
    plain = PairRotation(angle.cos(), angle.sin(), "half")
    near = (at[:, :, None] - at[:, None]).abs().amax(-1)[:, None] < 4  # Chebyshev
    torch.testing.assert_close(
        torch.where(near, both, 0.0), torch.where(near, plain.query(q) @ plain.key(k).mT, 0.0)
    )
    assert ((both - plain.query(q) @ plain.key(k).mT).abs() * ~near).max() > 0.1


def test_gradients_of_grouped_positions():
    q, k, v = (x[:1, :2, :5].clone().requires_grad_() for x in inputs(kv_heads=4))

    def run(q, k, v):
        return attention(
            q, k, v, bias=SelfExtendScores(line(5), line(5), RATES, 2, 2), is_causal=True, backend="reference"
        )

    assert torch.autograd.gradcheck(run, (q, k, v), fast_mode=True)


def test_wrong_groups_raise():
    with pytest.raises(OptionError, match="group must be a positive integer, got 0"):
        self_extend(torch.arange(3), 0, 2)
    with pytest.raises(ShapeError, match="several axes"):
        SelfExtendScores(torch.zeros(1, 2, 2), torch.zeros(1, 2, 2), torch.ones(1, 2, 3), 2, 2)
    with pytest.raises(ShapeError, match="coordinates"):
        SelfExtendScores(line(4), line(4), RATES, 2, 2).dense(
            *[None] * 2, q=torch.ones(1, 1, 5, 8), k=torch.ones(1, 1, 5, 8)
        )


def ordered(stream, n=None):
    result = create_scheme("rope1d").coordinates(stream)
    member = stream.scatter(stream.blocks.parallel[stream.block].T, -1)[:2]
    at = result.ids.movedim(0, -1)
    last = slice(None) if n is None else slice(-n, None)
    return PineScores(at[:, last], at, RATES, member[..., last], member, result.extent)


def pine(stream, q, k, v, n=None):
    mask = stream.attention_mask()
    if n is not None:
        q, mask = q[:, :, -n:], mask[:, :, -n:]
    return attention(q, k, v, bias=ordered(stream, n), attn_mask=mask, enable_gqa=True)


SIZES = [4, 2, 3, 1]


@cases("order", [(1, 0, 2, 3), (3, 2, 1, 0), (2, 3, 0, 1)])
def test_permuted_segments_do_not_change_other_tokens(order):
    q, k, v = inputs(n=15)
    stream = Stream.of([[Text(2), Parallel([Text(n) for n in SIZES], "all", "end"), Text(3)]] * 2)
    permuted = Stream.of([[Text(2), Parallel([Text(SIZES[m]) for m in order], "all", "end"), Text(3)]] * 2)
    parts = (2 + torch.arange(10)).split(SIZES)
    index = torch.cat([torch.arange(2), *(parts[m] for m in order), torch.arange(12, 15)])
    y = pine(stream, q, k, v)
    torch.testing.assert_close(pine(permuted, q[:, :, index], k[:, :, index], v[:, :, index]), y[:, :, index])
    plain = attention(q, k, v, transform=rotation(line(15)), enable_gqa=True, is_causal=True)
    assert (y - plain).abs().max() > 0.1


def test_decoding_equals_the_prefill():
    q, k, v = inputs(n=15)
    rows = [[Text(2), Parallel([Text(n) for n in SIZES], "all", "end"), Text(3)]] * 2
    stream = Stream.of(rows)
    torch.testing.assert_close(pine(stream, q, k, v, 2), pine(stream, q, k, v)[:, :, -2:])


def test_padded_rows_and_several_sets_equal_separate_ones():
    one = [Text(2), Parallel([Text(3), Text(2), Text(4)], "all", "end"), Text(1),
           Parallel([Text(1), Text(3), Text(2)], "all", "end"), Text(2)]  # fmt: skip
    two = [Parallel([Text(2), Text(1), Text(2)], "all", "end"), Text(2)]
    q, k, v = inputs(n=20)
    for padding, valid in (("left", slice(13, 20)), ("right", slice(0, 7))):
        y = pine(Stream.of([one, two], padding), q, k, v)
        single = pine(Stream.of([one]), *(x[:1] for x in (q, k, v)))
        torch.testing.assert_close(y[:1], single)
        short = pine(Stream.of([two]), *(x[1:, :, valid] for x in (q, k, v)))
        torch.testing.assert_close(y[1:, :, valid], short)


def test_equal_segments_keep_the_order_of_the_input():
    q, k, v = inputs(b=1, n=7)
    k[:, :, 3:5], v[:, :, 3:5], q[:, :, 3:5] = k[:, :, 1:3], v[:, :, 1:3], q[:, :, 1:3]
    stream = Stream.of([[Text(1), Parallel([Text(2)] * 2, "all", "end"), Text(2)]])
    y = pine(stream, q, k, v)
    swapped = torch.tensor([0, 3, 4, 1, 2, 5, 6])
    assert torch.equal(pine(stream, *(x[:, :, swapped] for x in (q, k, v)))[:, :, 5:], y[:, :, 5:])


def test_pine_has_no_gradient():
    q, k, v = inputs(n=15)
    stream = Stream.of([[Text(2), Parallel([Text(n) for n in SIZES], "all", "end"), Text(3)]] * 2)
    with pytest.raises(UnsupportedCombination, match="importance, which has no gradient"):
        pine(stream, q.requires_grad_(), k, v)
