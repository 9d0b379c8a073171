"""cope and tra: counts of nearer keys, against loops."""

import math

import pytest
import timm
import torch
from torch.nn import functional as F

from tests.cases import cases
from vispe import Attention, Grid, Positions, attention, create_encoding
from vispe.errors import OptionError, ShapeError

FACTS = {"dim": 12, "num_heads": 3}
GRIDS = [(Grid((3, 4), 2), {}), (Grid((1, 1), 1), {}), (Grid((2, 3, 2), 1), {}), (Grid((6,), 1), {})]
GRIDS += [(Grid((6,), 2), {"causal": True}), (Grid((4, 2), 1), {"spacing": (0.7, 0.7)})]


def build(name="cope", **options):
    encoding = create_encoding({"name": name, **options}, **FACTS).double()
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.normal_()
    return encoding


def tensors(count, batch=2):
    q, k = torch.randn(2, batch, 3, count, 4, dtype=torch.float64).requires_grad_().unbind()
    x = torch.randn(batch, count, 12, dtype=torch.float64).requires_grad_()
    return q, k, x


def nearer(encoding, pos, i, j):
    """Return the keys that count for a pair: no farther from i than j is; none if the pair does not count."""

    def distance(a, b):
        gap = pos.coords[0, a].double() - pos.coords[0, b].double()
        if encoding.causal and gap[0] < 0:
            return math.inf
        return float(gap.norm()) if pos.spatial[0, a] and pos.spatial[0, b] else math.inf

    if distance(i, j) == math.inf:
        return []
    return [m for m in range(pos.tokens) if distance(i, m) <= distance(i, j) + 1e-4]


def slow_cope(encoding, pos, q, k):
    gates = (q @ k.mT / 2).sigmoid()
    rows = []
    for i in range(pos.tokens):
        for j in range(pos.tokens):
            keys = nearer(encoding, pos, i, j)
            if not keys:
                rows.append(torch.zeros(2, 3, dtype=torch.float64))
                continue
            count = gates[:, :, i, keys].sum(-1).clamp(max=encoding.max_pos - 1)
            low = count.detach().floor().long()
            e, f = encoding.pos_emb[low], encoding.pos_emb[(low + 1).clamp(max=encoding.max_pos - 1)]
            vector = e + (f - e) * (count - low)[..., None]
            rows.append((q[:, :, i] * vector).sum(-1))
    return torch.stack(rows, -1).unflatten(-1, (pos.tokens, pos.tokens))


def slow_tra(encoding, pos, q, k, x):
    q, k = (t / (t.square().mean(-1, keepdim=True) + encoding.eps).sqrt() for t in (q, k))
    score = (q @ k.mT / 2).relu()
    decay = F.logsigmoid(encoding.delta_proj(x)).transpose(1, 2)
    positive, out = score > 0, torch.full_like(score, -math.inf)
    for i in range(pos.tokens):
        for j in range(pos.tokens):
            keys = nearer(encoding, pos, i, j)
            later = encoding.causal and pos.spatial[0, [i, j]].all() and not keys
            count = positive[:, :, i, keys].sum(-1) if keys else 0
            value = score[:, :, i, j] + decay[:, :, i] * count
            if not later:
                out[:, :, i, j] = torch.where(positive[:, :, i, j], value, -math.inf)
    return out


@cases(("grid", "options"), GRIDS)
def test_cope(grid, options):
    encoding, pos, (q, k, _) = build(max_pos=4, **options), grid.positions(), tensors(grid.tokens)
    actual = encoding.bias(pos, 0).dense(q=q, k=k, scale=0.5)
    expected = slow_cope(encoding, pos, q, k)
    torch.testing.assert_close(actual, expected)
    cotangent, leaves = torch.randn_like(actual), [q, k, encoding.pos_emb]
    ours = torch.autograd.grad(actual, leaves, cotangent)
    torch.testing.assert_close(ours, torch.autograd.grad(expected, leaves, cotangent))


@cases(("grid", "options"), GRIDS)
def test_tra(grid, options):
    encoding, pos, (q, k, x) = build("tra", **options), grid.positions(), tensors(grid.tokens)
    bias = encoding.bias(pos, 0, x)
    target = slow_tra(encoding, pos, q, k, x)
    torch.testing.assert_close(bias.dense(q=q, k=k, scale=0.5), target)
    v = torch.randn_like(q)
    dead = (target == -math.inf).all(-1, keepdim=True)
    out = target.masked_fill(dead, 0.0).softmax(-1).masked_fill(dead, 0.0) @ v
    leaves, cotangent = [q, k, x, *encoding.parameters()], torch.randn_like(out)
    expected = torch.autograd.grad(out, leaves, cotangent, retain_graph=True)
    for backend in ("reference", "sdpa"):
        actual = attention(q, k, v, bias=encoding.bias(pos, 0, x), backend=backend)
        torch.testing.assert_close(actual, out)
        torch.testing.assert_close(torch.autograd.grad(actual, leaves, cotangent), expected)


def test_queries_without_keys_return_zeros():
    encoding, pos, (q, _, x) = build("tra"), Grid((2, 3)).positions(), tensors(6)
    k = -q.detach()[:, :, :1].expand_as(q)
    q = q.detach()[:, :, :1].expand_as(q)
    assert not attention(q, k, torch.randn_like(q), bias=encoding.bias(pos, 0, x)).any()


def dense(name, encoding, pos, q, k, x):
    return encoding.bias(pos, 0, x).dense(q=q, k=k, scale=0.5)


@cases("name", ["cope", "tra"])
def test_rotations_and_translations(name):
    encoding, (q, k, x) = build(name), tensors(9)
    coords = torch.rand(1, 9, 2, dtype=torch.float64) * 6
    angle = torch.tensor(37.0, dtype=torch.float64).deg2rad()
    matrix = torch.stack([torch.stack([angle.cos(), -angle.sin()]), torch.stack([angle.sin(), angle.cos()])])
    reference = dense(name, encoding, Positions(coords), q, k, x)
    torch.testing.assert_close(dense(name, encoding, Positions(coords @ matrix + 3), q, k, x), reference)
    mirrored = coords * torch.tensor([1.0, -1.0], dtype=torch.float64)
    torch.testing.assert_close(dense(name, encoding, Positions(mirrored), q, k, x), reference)
    # on a grid keys at equal distances have no order among them
    order = torch.arange(9).reshape(3, 3).rot90().flatten()
    reference = dense(name, encoding, Grid((3, 3), spacing=(0.7, 0.7)).positions(), q, k, x)
    rotated = dense(
        name,
        encoding,
        Grid((3, 3), spacing=(0.7, 0.7)).positions(),
        q[:, :, order],
        k[:, :, order],
        x[:, order],
    )
    torch.testing.assert_close(rotated, reference[..., order, :][..., order])


@cases("name", ["cope", "tra"])
def test_counts_use_the_remaining_tokens(name):
    encoding, pos, (q, k, x) = build(name), Grid((3, 4), 1).positions(), tensors(13)
    keep, rows = torch.tensor([[0, 3, 8, 1], [0, 12, 5, 6]]), torch.arange(2)[:, None]
    gathered = [q[rows, :, keep].transpose(1, 2), k[rows, :, keep].transpose(1, 2), x[rows, keep]]
    actual = dense(name, encoding, pos.gather(keep), *gathered)
    for b in range(2):
        single = Positions(pos.coords[:, keep[b]], pos.spatial[:, keep[b]])
        expected = dense(name, encoding, single, *gathered)
        torch.testing.assert_close(actual[b], expected[b])


def test_slices_of_heads_and_half_precision():
    pos, (q, k, x) = Grid((3, 4), 1).positions(), tensors(13)
    for name in ("cope", "tra"):
        encoding = build(name)
        full = dense(name, encoding, pos, q, k, x)
        part = encoding.bias(pos, 0, x).dense(q=q, k=k, scale=0.5, heads=slice(1, 3))
        torch.testing.assert_close(part, full[:, 1:3])
        half = dense(name, encoding.half(), pos, q.half(), k.half(), x.half())
        assert half.dtype == torch.float32


def test_start_and_models():
    encoding = create_encoding("cope", **FACTS)
    q, k, _ = tensors(6)
    assert not encoding.bias(Grid((2, 3)).positions(), 0).dense(q=q, k=k, scale=0.5).any()
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    for name in ("cope", "tra"):
        layer = Attention(12, 3, f"{name}(causal=true)")
        assert layer(torch.randn(2, 6, 12), Grid((6,)), attn_mask=mask).isfinite().all()
        model = timm.create_model("test_vit", pos_embed=name, img_size=(48, 32), num_classes=3)
        model(torch.randn(2, 3, 48, 32)).square().sum().backward()
        gradients = [p.grad for n, p in model.named_parameters() if "pos_enc" in n]
        assert gradients
        assert all(g is not None for g in gradients)


def test_errors():
    pos = Grid((2, 3)).positions()
    for name in ("cope", "tra"):
        with pytest.raises(OptionError, match=f"{name}: spacing has no effect with causal=True"):
            build(name, causal=True, spacing=(1.0,))
        with pytest.raises(ShapeError, match=f"{name} needs 1 axis with causal=True, got 2 axes"):
            build(name, causal=True).bias(pos, 0, torch.ones(1, 6, 12))
        with pytest.raises(ShapeError, match="Pass q, k and scale to dense"):
            build(name).bias(pos, 0, torch.ones(1, 6, 12).double()).dense()
        with pytest.raises(ShapeError, match=f"{name} needs 2-axis positions, got 1 axis"):
            build(name, spacing=(1.0, 1.0)).bias(Grid((3,)).positions(), 0, torch.ones(1, 3, 12))
    with pytest.raises(ShapeError, match=r"tra reads the tokens. Pass x"):
        build("tra").bias(pos, 0)
