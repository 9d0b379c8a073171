"""Logits in which a pair of tokens decides how far both are rotated, and memories alongside the keys."""

import pytest
import torch

from tests.cases import cases
from vispe.attention import DenseBias, PairRotation, attention
from vispe.attention.call import Call
from vispe.attention.pairwise_rope.pine import PineScores
from vispe.attention.pairwise_rope.self_extend import SelfExtendScores, self_extend
from vispe.errors import OptionError, ShapeError, UnsupportedCombination
from vispe.experimental.extended_mind import ExternalMemory, attend_with_external_memory, external_memory_bias
from vispe.multimodal import Parallel, Stream, Text, create_scheme

RATES = torch.tensor([[[1.0, 0.3, 0.05]]], dtype=torch.float64)


def inputs(b=2, heads=4, kv_heads=2, n=13, width=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(b, h, n, width, generator=generator, dtype=torch.float64)
        for h in (heads, kv_heads, kv_heads)
    ]


def turn(at):
    angle = at[:, None] @ RATES
    return PairRotation(angle.cos(), angle.sin(), "half")


def line(n, b=1):
    return torch.arange(float(n), dtype=torch.float64)[None, :, None].expand(b, -1, -1)


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
            expected = (turn(at).query(q[:, :, i : i + 1]) * k[:, :, j : j + 1]).sum(-1)[..., 0]
            torch.testing.assert_close(actual[:, :, i, j], expected)


def test_a_short_input_and_groups_of_one_are_plain_rotation():
    q, k, v = inputs()
    plain = attention(q, k, v, transform=turn(line(13)), enable_gqa=True, is_causal=True)
    for group, window in ((3, 13), (1, 4)):
        bias = SelfExtendScores(line(13), line(13), RATES, group, window)
        torch.testing.assert_close(attention(q, k, v, bias=bias, enable_gqa=True, is_causal=True), plain)
    assert self_extend(torch.arange(4), 2, 4)[0].tolist() == [0, 0, 1, 1]


def test_on_two_axes_each_goes_by_its_own_rule():
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


def test_wrong_groups_are_refused():
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
def test_permuted_segments_leave_the_rest_unchanged(order):
    q, k, v = inputs(n=15)
    stream = Stream.of([[Text(2), Parallel([Text(n) for n in SIZES], "all", "end"), Text(3)]] * 2)
    moved = Stream.of([[Text(2), Parallel([Text(SIZES[m]) for m in order], "all", "end"), Text(3)]] * 2)
    parts = (2 + torch.arange(10)).split(SIZES)
    place = torch.cat([torch.arange(2), *(parts[m] for m in order), torch.arange(12, 15)])
    y = pine(stream, q, k, v)
    torch.testing.assert_close(pine(moved, q[:, :, place], k[:, :, place], v[:, :, place]), y[:, :, place])
    plain = attention(q, k, v, transform=turn(line(15)), enable_gqa=True, is_causal=True)
    assert (y - plain).abs().max() > 0.1


def test_what_is_decoded_is_what_the_prompt_would_have():
    q, k, v = inputs(n=15)
    rows = [[Text(2), Parallel([Text(n) for n in SIZES], "all", "end"), Text(3)]] * 2
    stream = Stream.of(rows)
    torch.testing.assert_close(pine(stream, q, k, v, 2), pine(stream, q, k, v)[:, :, -2:])


def test_padded_rows_and_several_sets_are_those_of_each_alone():
    one = [Text(2), Parallel([Text(3), Text(2), Text(4)], "all", "end"), Text(1),
           Parallel([Text(1), Text(3), Text(2)], "all", "end"), Text(2)]  # fmt: skip
    two = [Parallel([Text(2), Text(1), Text(2)], "all", "end"), Text(2)]
    q, k, v = inputs(n=20)
    for padding, where in (("left", slice(13, 20)), ("right", slice(0, 7))):
        y = pine(Stream.of([one, two], padding), q, k, v)
        alone = pine(Stream.of([one]), *(x[:1] for x in (q, k, v)))
        torch.testing.assert_close(y[:1], alone)
        short = pine(Stream.of([two]), *(x[1:, :, where] for x in (q, k, v)))
        torch.testing.assert_close(y[1:, :, where], short)


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


@cases("mode", ["unturned", "reference"])
@cases(("topk", "threshold"), [(1, None), (3, 0.1), (50, None), (4, 2.0)])
def test_memories_query_by_query(mode, topk, threshold):
    q, k, v = inputs(n=6)
    bank, values = (x[:, :, :9] for x in inputs(n=9, seed=1)[1:])
    call = Call(q, k, v, transform=turn(line(6)), is_causal=True, enable_gqa=True)
    y = attend_with_external_memory(
        call, ExternalMemory(bank, values), topk=topk, threshold=threshold, mode=mode
    )
    rotated, own = turn(line(6)).query(q), turn(line(6)).key(k)
    for b in range(2):
        for h in range(4):
            for i in range(6):
                compared = (rotated if mode == "reference" else q)[b, h, i]
                cosine = torch.cosine_similarity(compared, bank[b, h // 2], -1)
                best = [int(j) for j in cosine.argsort(descending=True)[:topk]]
                best = [j for j in best if threshold is None or cosine[j] > threshold]
                keys = torch.cat([bank[b, h // 2, best], own[b, h // 2, : i + 1]])
                weights = (keys @ rotated[b, h, i] * 8**-0.5).softmax(0)
                expected = weights @ torch.cat([values[b, h // 2, best], v[b, h // 2, : i + 1]])
                torch.testing.assert_close(y[b, h, i], expected)


def test_memories_with_alibi_and_where_they_are():
    q, k, v = inputs(n=5, kv_heads=4)
    bank = k[:1, :, :3].clone()
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
    own = DenseBias(-slopes[None, :, None, None] * torch.ones(1, 4, 5, 5, dtype=torch.float64))
    call = Call(q, k, v, bias=own, is_causal=True)
    y = attend_with_external_memory(
        call, ExternalMemory(bank, bank, bias=external_memory_bias(slopes, 5)), topk=3
    )
    keys = torch.cat([bank.expand(2, -1, -1, -1), k], 2)
    bias = torch.cat(
        [
            -5 * slopes[:, None, None].expand(4, 5, 3),
            own.dense()[0].masked_fill(~torch.ones(5, 5).tril().bool(), -torch.inf),
        ],
        -1,
    )
    expected = attention(q, keys, torch.cat([bank.expand(2, -1, -1, -1), v], 2), bias=DenseBias(bias[None]))
    torch.testing.assert_close(y, expected)
    rotated = Call(q, k, v, transform=turn(line(5)), is_causal=True)
    at_origin = attend_with_external_memory(rotated, ExternalMemory(bank, bank), topk=2)
    zero = turn(torch.zeros(1, 3, 1, dtype=torch.float64))
    torch.testing.assert_close(
        attend_with_external_memory(rotated, ExternalMemory(bank, bank, "own", zero), topk=2), at_origin
    )
    far = turn(torch.full((1, 1, 1), 9.0, dtype=torch.float64))
    last = attend_with_external_memory(rotated, ExternalMemory(bank, bank, "far", far), topk=2)
    assert (last - at_origin).abs().max() > 1e-3


def test_gradients_with_memories():
    q, k, v = (x[:1, :2, :4].clone().requires_grad_() for x in inputs(kv_heads=4))
    bank = inputs(kv_heads=4, seed=3)[1][:1, :2, :5].clone().requires_grad_()

    def run(q, k, v, bank):
        call = Call(q, k, v, transform=turn(line(4)), is_causal=True)
        return attend_with_external_memory(call, ExternalMemory(bank, bank), topk=2)

    assert torch.autograd.gradcheck(run, (q, k, v, bank), fast_mode=True)


def test_wrong_memories_are_refused():
    q, k, v = inputs(n=5)
    call, bank = Call(q, k, v, enable_gqa=True), torch.ones(1, 4, 3, 8)
    with pytest.raises(ShapeError, match="batch size"):
        attend_with_external_memory(call, ExternalMemory(bank, bank), topk=2)
    with pytest.raises(OptionError, match="topk must be a positive integer"):
        attend_with_external_memory(call, ExternalMemory(bank[:, :2], bank[:, :2]), topk=0)
    with pytest.raises(OptionError, match="'own' needs the rotation"):
        ExternalMemory(bank, bank, "own")
