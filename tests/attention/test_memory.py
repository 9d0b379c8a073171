"""Head groups, and what is stored with the positions."""

import pytest
import torch
from torch.nn import functional as F

from tests.attention.cases import (
    BACKENDS,
    CASES,
    HEADS,
    _distance,
    _sum,
    _table,
    close,
    compare,
    leaf,
    tensors,
)
from tests.cases import cases
from vispe import Grid, attention
from vispe.attention import DistanceBias, SumBias, TableBias, explain
from vispe.attention.backends import sdpa
from vispe.errors import ShapeError

pytestmark = pytest.mark.usefixtures("poisoned")


@cases("training", [True, False])
@cases("name", CASES)
def test_head_groups_equal_one_mask(name, training, monkeypatch):
    monkeypatch.setattr(sdpa, "MASK_LIMIT", 2 * 10 * 10 * 4)  # two heads of one sample
    pos = Grid((3, 3), prefix=1).positions()
    case = CASES[name](pos, 2)
    q, k, v = tensors(2, 10)
    padding = torch.ones(2, 10, dtype=torch.bool)
    padding[0, 7:] = False
    added = torch.randn(1, HEADS, 10, 10)
    arguments = {"key_padding_mask": padding, "attn_mask": added}
    if training:
        expected = {"keep": padding[:, None, None], "added": added.double()}
        compare(case, "sdpa", q, k, v, oracle_args=expected, **arguments)
        return
    with torch.no_grad():
        actual = attention(q, k, v, bias=case.bias, backend="sdpa", **arguments)
        close(actual, attention(q, k, v, bias=case.bias, backend="reference", **arguments), 1e-5)


def test_memory_of_head_groups(monkeypatch):
    recorded = []
    original = F.scaled_dot_product_attention

    def watch(*args, attn_mask=None, **kwargs):
        recorded.append(None if attn_mask is None else attn_mask.numel())
        return original(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watch)
    pos = Grid((5, 5)).positions()
    q, k, v = (t.detach() for t in tensors(4, 25))
    bias = DistanceBias((0.5, 0.2, 0.1), pos)
    monkeypatch.setattr(sdpa, "MASK_LIMIT", 625 * 4)
    attention(q, k, v, bias=bias, backend="sdpa")
    assert recorded == [625] * 3
    recorded.clear()  # padding makes the mask differ between samples
    monkeypatch.setattr(sdpa, "MASK_LIMIT", 4 * 625 * 4)
    attention(q, k, v, bias=bias, key_padding_mask=torch.ones(4, 25, dtype=torch.bool), backend="sdpa")
    assert recorded == [2500] * 3
    monkeypatch.setattr(sdpa, "MASK_LIMIT", 1 << 30)
    recorded.clear()
    attention(q, k, v, bias=bias, backend="sdpa")
    assert recorded == [3 * 625]


def test_masks_are_stored_with_the_positions_and_reused_in_training():
    pos = Grid((3, 3), prefix=1).positions()
    q, k, v = tensors(2, 10)
    fixed, other = DistanceBias((0.5, 0.2, 0.1), pos), DistanceBias((0.5, 0.2, 0.3), pos)
    learned = DistanceBias(leaf(HEADS), pos)
    with torch.inference_mode():
        first = attention(q, k, v, bias=fixed, backend="sdpa")
        attention(q, k, v, bias=learned, backend="sdpa")
    assert fixed.mask(torch.float32) is DistanceBias((0.5, 0.2, 0.1), pos).mask(torch.float32)
    assert fixed.mask(torch.float32) is not other.mask(torch.float32)
    assert fixed.mask(torch.bfloat16).dtype == torch.bfloat16
    out = attention(q, k, v, bias=fixed, backend="sdpa")
    assert torch.equal(out, first)
    torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    out = attention(q, k, v, bias=learned, backend="sdpa")
    assert torch.autograd.grad(out, learned.slopes, torch.randn_like(out))[0].isfinite().all()
    with pytest.raises(
        ShapeError, match="DistanceBias is learned or has no positions, so its mask cannot be cached"
    ):
        learned.mask(torch.float32)


def test_terms_of_a_sum_have_separate_positions():
    grid = Grid((3, 4))
    near, far = grid.positions(), Grid((3, 4), spacing=(3.0, 1.0)).positions()
    total = SumBias([DistanceBias((1.0,), far), DistanceBias((1.0,), near)])
    torch.testing.assert_close(
        total.dense(), DistanceBias((1.0,), far).dense() + DistanceBias((1.0,), near).dense()
    )
    assert total.key is None  # the positions of the first alone do not determine it
    q, k, v = tensors(1, 12, heads=1)
    close(
        attention(q, k, v, bias=total, backend="sdpa"),
        attention(q, k, v, bias=total, backend="reference"),
        1e-5,
    )


def test_positions_of_dropped_tokens_differ_between_samples():
    pos = Grid((4, 5), prefix=1).positions()
    keep = torch.stack(
        [torch.cat([torch.tensor([0]), 1 + torch.randperm(20)[:9].sort().values]) for _ in range(3)]
    )
    subset = pos.gather(keep)
    for name in ("distance fixed", "squared learned", "table with prefix", "profile", "sum"):
        torch.manual_seed(1)
        full = CASES[name](pos, 3) if name != "sum" else _sum(_distance(pos, (0.5, 0.2, 0.0)), _table(pos))
        q, k, _ = tensors(3, 21)
        full_bias = full.bias.dense(q=q, k=k, scale=1.0)[0]
        part = full.bias.dense(subset)
        assert part.shape == (3, HEADS, 10, 10)
        for i in range(3):
            torch.testing.assert_close(part[i], full_bias[:, keep[i]][:, :, keep[i]])
    squared = DistanceBias((0.5, 0.2, 0.1), subset, metric="squared")
    q, k, v = tensors(3, 10)
    outs = [attention(q, k, v, bias=squared, backend=b) for b in BACKENDS]
    close(outs[0], outs[1], 1e-5)
    close(outs[0], outs[2], 1e-5)
    across = TableBias(torch.randn(1, 7, 9), pos).dense(subset, pos)
    assert across.shape == (3, 1, 10, 21)


def test_explain_reports_groups_of_heads(monkeypatch):
    pos = Grid((3, 3)).positions()
    q, k, v = tensors(2, 9)
    bias, arguments = DistanceBias((0.5, 0.2, 0.1), pos), {"attn_mask": torch.zeros(9, 9)}
    assert explain(q, k, v, bias=bias, **arguments).reason == "one dense mask, cached with its positions"
    monkeypatch.setattr(sdpa, "MASK_LIMIT", 2 * 9 * 9 * 4)
    reason = explain(q, k, v, bias=bias, **arguments).reason
    assert reason.startswith("one dense mask for a part of the heads at a time (2 of 3)")
    assert reason.endswith("computed in each call and again in the backward pass")
