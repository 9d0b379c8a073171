"""Masks, rows without keys, packed sequences."""

import pytest
import torch

from tests.attention import oracle
from tests.attention.cases import (
    BACKENDS,
    CASES,
    HEADS,
    close,
    compare,
    doubles,
    is_supported,
    leaf,
    masked,
    tensors,
)
from tests.cases import cases, pairwise
from vispe import Grid, Positions, attention
from vispe.attention import (
    DenseBias,
    DistanceBias,
)
from vispe.attention.call import Call
from vispe.errors import BackendUnavailable

pytestmark = pytest.mark.usefixtures("poisoned")


MASKS = [
    "padding",
    "bool",
    "bool per head",
    "float",
    "float with -inf",
    "closed rows",
    "closed sample",
    "causal",
    "both",
]


@pairwise
@cases("kind", MASKS)
@cases("backend", BACKENDS)
@cases("name", ["none", "squared learned", "table"])
def test_masks(name, backend, kind):
    pos = Grid((3, 3), prefix=1).positions()
    case = CASES[name](pos, 2)
    if is_supported(case, backend):
        arguments, expected = masked(kind, 2, 10, 10)
        compare(case, backend, *tensors(2, 10), oracle_args=expected, **arguments)


@cases("backend", BACKENDS)
def test_rows_without_a_key_give_zero_and_no_gradient(backend):
    pos = Grid((2, 3)).positions()
    q, k, v = tensors(2, 6)
    keep = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    keep[0, :, 2] = False
    slopes = leaf(HEADS)
    bias = DistanceBias(slopes, pos, metric="squared")
    for mask in (keep, torch.zeros(2, 1, 6, 6).masked_fill(~keep, float("-inf"))):
        out = attention(q, k, v, bias=bias, attn_mask=mask, backend=backend)
        assert (out[0, :, 2] == 0).all()
        assert out[1, :, 2].abs().min() > 0
        grads = torch.autograd.grad(out, (q, k, v, slopes), torch.randn_like(out))
        assert all(g.isfinite().all() for g in grads)
        assert (grads[0][0, :, 2] == 0).all()


@cases("dtype", [torch.float32, torch.bfloat16, torch.float16])
@cases("backend", ["reference", "sdpa"])
def test_a_bias_may_hide_all_keys_of_a_row(backend, dtype):
    values = torch.zeros(1, HEADS, 4, 4)
    values[:, 1, 2] = float("-inf")
    values[:, :, 0, 3] = float("-inf")
    q, k, v = tensors(1, 4, dtype=dtype)
    out = attention(q, k, v, bias=DenseBias(values), backend=backend)
    assert (out[0, 1, 2] == 0).all()
    grads = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    assert all(g.isfinite().all() for g in grads)
    close(
        out,
        oracle.attend(*doubles((q, k, v)), bias=values.double()),
        1e-5 if dtype == torch.float32 else 2e-2,
    )


@pairwise
@cases("dtype", [torch.float32, torch.bfloat16, torch.float16])
@cases("low", [-1e30, torch.finfo(torch.float32).min])
@cases("backend", ["reference", "sdpa"])
def test_large_finite_masks_stay_finite(backend, low, dtype):
    # a whole row at the least float is a common way to say "padding query": it attends evenly, in every dtype
    mask = torch.zeros(1, 1, 4, 4)
    mask[..., 1, :] = low
    mask[..., 2, 0] = low
    q, k, v = (t.detach() for t in tensors(1, 4, dtype=dtype))
    out = attention(q, k, v, attn_mask=mask, backend=backend)
    assert out.isfinite().all()
    expected = oracle.attend(*(t.double() for t in (q, k, v)), added=mask.double())
    close(out[:, :, [0, 2, 3]], expected[:, :, [0, 2, 3]], 1e-5 if dtype == torch.float32 else 2e-2)
    assert (out[:, :, 1] != 0).any()


@cases("index", [torch.int32, torch.int64])
@cases("backend", BACKENDS)
def test_packed_sequences_equal_separate_ones(backend, index):
    sizes = [(2, 3), (1, 4), (3, 3)]
    parts = [Grid(s, prefix=1).positions() for s in sizes]
    coords = torch.cat([p.coords for p in parts], 1)
    spatial = torch.cat([p.spatial for p in parts], 1)
    packed = Positions(coords, spatial, torch.tensor([[9.0, 9.0]]))
    q, k, v = tensors(1, packed.tokens)
    ends = torch.tensor([0, *(p.tokens for p in parts)]).cumsum(0)
    slopes = (0.5, 0.2, 0.1)
    if backend == "lowrank":
        with pytest.raises(BackendUnavailable, match="free coordinates"):
            attention(q, k, v, bias=DistanceBias(slopes, packed, metric="squared"), backend=backend)
        return
    bias = DistanceBias(slopes, packed, metric="squared")
    out = attention(q, k, v, bias=bias, cu_seqlens=ends.to(index), backend=backend)
    for pos, start, end in zip(parts, ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        window = (t[:, :, start:end] for t in (q, k, v))
        expected = attention(*window, bias=DistanceBias(slopes, pos, metric="squared"), backend="reference")
        close(out[:, :, start:end], expected, 1e-5)


@cases("backend", BACKENDS)
@cases("name", ["squared learned", "table with prefix"])
def test_a_mask_over_keys_is_key_padding(name, backend):
    pos = Grid((3, 3), prefix=1).positions()
    case = CASES[name](pos, 2)
    if not is_supported(case, backend):
        return
    q, k, v = tensors(2, 10)
    leaves, cotangent = (q, k, v, *case.params), torch.randn(2, HEADS, 10, q.shape[-1])
    keep = torch.rand(2, 10) > 0.4
    keep[1] = False  # no key at all
    other = torch.rand(2, 10) > 0.2

    def results(**masks):
        out = attention(q, k, v, bias=case.bias, backend=backend, **masks)
        return out, *torch.autograd.grad(out, leaves, cotangent)

    for mask, padding in ((keep, None), (keep, other), (keep[:1], None), (keep[:1], other)):
        four = mask[:, None, None]
        added = torch.zeros(four.shape).masked_fill(~four, float("-inf"))
        both = mask if padding is None else mask & padding
        # the same pairs, which no kernel takes for padding
        square = both[:, None, None].expand(-1, 1, 10, 10)
        expected = results(attn_mask=square)
        for same in (four, added, added.double()):
            for a, b in zip(results(attn_mask=same, key_padding_mask=padding), expected, strict=True):
                assert torch.equal(a, b)
        assert (expected[0][~both.any(1).expand(2)] == 0).all()


def test_which_masks_are_key_padding():
    q, k, v = tensors(2, 5)
    keep = torch.tensor([[True, False, True, True, True], [True, True, False, False, True]])
    four, other = keep[:, None, None], torch.tensor([[True, True, True, False, True]] * 2)
    inf = torch.zeros(2, 1, 1, 5).masked_fill(~four, float("-inf"))
    for mask, expected in (
        (four, keep), (inf, keep), (inf.half(), keep), (keep[1], keep[1].expand(2, 5)),
        (keep[:1], keep[:1].expand(2, 5)),
        (torch.tensor(True), torch.ones(2, 5, dtype=torch.bool)), (four[..., :1], keep[:, :1].expand(2, 5)),
    ):  # fmt: skip
        call = Call(q, k, v, attn_mask=mask)
        assert call.attn_mask is None
        assert torch.equal(call.key_padding_mask, expected)
        call = Call(q, k, v, attn_mask=mask, key_padding_mask=other)
        assert torch.equal(call.key_padding_mask, expected & other)
    assert not Call(q, k, v, attn_mask=keep[1]).padding_per_sample
    assert Call(q, k, v, attn_mask=keep[1]).allowed().shape == (1, 1, 1, 5)
    graded = inf.clone().requires_grad_()
    some = torch.finfo(torch.float32).min
    for mask in (graded, inf + 1, inf.clamp(min=some), inf * float("nan"), four.expand(2, 1, 5, 5),
                 four.expand(2, HEADS, 1, 5), inf.to("meta")):  # fmt: skip
        on = [t.to(mask.device) for t in (q, k, v)]
        call = Call(*on, attn_mask=mask)
        assert call.attn_mask is mask
        assert call.key_padding_mask is None
    one = Call(q[:, :, :1], k, v, attn_mask=four)  # a single query
    assert torch.equal(one.key_padding_mask, keep)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_a_mask_over_keys_in_transforms_and_compiled():
    q, k, v = (t.detach() for t in tensors(2, 5))
    mask = torch.rand(3, 2, 1, 1, 5) > 0.4
    mask[..., 0] = True
    added = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
    expected = torch.stack([attention(q, k, v, attn_mask=m) for m in mask])
    for arguments in (mask, added):
        actual = torch.vmap(lambda m: attention(q, k, v, attn_mask=m))(arguments)
        close(actual, expected, 1e-6)
        compiled = torch.compile(
            lambda q, m: attention(q, k, v, attn_mask=m), fullgraph=True, backend="eager"
        )
        close(compiled(q, arguments[0]), expected[0], 1e-6)
