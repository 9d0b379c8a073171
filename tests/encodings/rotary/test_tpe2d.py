"""tpe2d against its definition, token by token, and through a model."""

import pytest
import timm
import torch
from torch.nn import functional as F

from tests.cases import cases
from vispe import Attention, Grid, Positions, create_encoding
from vispe.encodings.attention_layer import attend
from vispe.errors import OptionError, ShapeError, UnsupportedCombination


def build(**options):
    return create_encoding("tpe2d", **{"dim": 12, "num_heads": 2, **options}).double()


def rotated(x, rank, base):
    """Return one vector, its halves rotated by a rank."""
    half = len(x) // 2
    out = x.clone()
    for c in range(half):
        angle = torch.tensor(rank * base ** (-c / half), dtype=torch.float64)
        out[c] = x[c] * angle.cos() - x[c + half] * angle.sin()
        out[c + half] = x[c + half] * angle.cos() + x[c] * angle.sin()
    return out


def slow(encoding, grid, q, k, v, x):
    """Return the output (b, h, n, d_h), query by query."""
    rows, columns = grid.shape
    cells = [None] * grid.prefix + [(y, z) for y in range(rows) for z in range(columns)]
    orders = [
        [None if c is None else c[0] * columns + c[1] for c in cells],
        [None if c is None else c[1] * rows + c[0] for c in cells],
    ]
    out = torch.zeros_like(q)
    for s in range(len(q)):
        for h in range(q.shape[1]):
            for i in range(len(cells)):
                features = x[s, i].reshape(q.shape[1], -1)[h]
                inner = F.silu(encoding.gate_1.weight @ features) * (encoding.gate_2.weight @ features)
                gates = (encoding.gate_3.weight @ inner).softmax(0)
                for gate, ranks in zip(gates, orders, strict=True):
                    first = rotated(q[s, h, i], ranks[i] or 0, encoding.temperature)
                    logits = torch.full((len(cells),), -torch.inf, dtype=torch.float64)
                    for j in range(len(cells)):
                        mine, its = (
                            (i - 99 if ranks[i] is None else ranks[i]),
                            (j - 99 if ranks[j] is None else ranks[j]),
                        )
                        if its <= mine or not encoding.causal:
                            logits[j] = first @ rotated(k[s, h, j], ranks[j] or 0, encoding.temperature)
                    out[s, h, i] += gate * ((logits * q.shape[-1] ** -0.5).softmax(0) @ v[s, h])
    return out


@cases("backend", ["reference", "sdpa", "auto"])
@cases(
    ("grid", "options"),
    [
        (Grid((2, 3), 2), {}),
        (Grid((3, 2), 1), {"causal": True, "gate_dim": 3}),
        (Grid((1, 4)), {"temperature": 20.0}),
    ],
)
def test_output(grid, options, backend):
    encoding, pos = build(**options), grid.positions()
    x = torch.randn(2, grid.tokens, 12, dtype=torch.float64)
    q, k, v = torch.randn(3, 2, 2, grid.tokens, 6, dtype=torch.float64)
    result = attend(q, k, v, [encoding], pos, 0, x, backend=backend)
    torch.testing.assert_close(result, slow(encoding, grid, q, k, v, x), rtol=1e-5, atol=1e-5)
    gates = torch.stack([b.gate for b in encoding.branches(pos, 0, x)], -1)
    torch.testing.assert_close(gates[..., 0, :], encoding.gates(x))
    torch.testing.assert_close(gates.sum(-1), torch.ones_like(gates[..., 0]))


def test_later_tokens_have_no_effect_in_causal_orders():
    encoding, grid = build(causal=True), Grid((3, 3))
    x = torch.randn(1, 9, 12, dtype=torch.float64)
    q, k, v = torch.randn(3, 1, 2, 9, 6, dtype=torch.float64)
    masks = [b.bias.dense()[0, 0] for b in encoding.branches(grid.positions(), 0, x)]
    assert [int((m == 0).sum()) for m in masks] == [45, 45]
    changed = v.clone()
    changed[:, :, 8] += 1  # the last cell in both orders
    first, second = (attend(q, k, u, [encoding], grid.positions(), 0, x) for u in (v, changed))
    torch.testing.assert_close(first[:, :, :8], second[:, :, :8])
    assert not torch.allclose(first[:, :, 8], second[:, :, 8])


@cases("causal", [False, True])
def test_dropped_tokens(causal):
    encoding, pos = build(causal=causal), Grid((3, 4), 1).positions()
    keep = torch.tensor([[0, 5, 2, 9], [0, 12, 3, 1]])
    x, q, k = torch.randn(2, 13, 12).double(), *torch.randn(2, 2, 2, 13, 6).double()
    rows = torch.arange(2)[:, None]
    every = encoding.branches(pos, 0, x)
    subset = encoding.branches(pos.gather(keep), 0, x[rows, keep])
    for a, b in zip(every, subset, strict=True):
        scores = a.transform.query(q) @ a.transform.key(k).mT
        scores = scores if a.bias is None else scores + a.bias.dense()
        small_q, small_k = (t.transpose(1, 2)[rows, keep].transpose(1, 2) for t in (q, k))
        result = b.transform.query(small_q) @ b.transform.key(small_k).mT
        result = result if b.bias is None else result + b.bias.dense()
        for i in range(2):
            torch.testing.assert_close(result[i], scores[i][:, keep[i]][..., keep[i]], rtol=1e-4, atol=1e-5)


def test_gradients():
    layer = Attention(8, 2, "tpe2d(gate_dim=3)").double()
    names, pos = [n for n, _ in layer.named_parameters() if "pos_enc" in n], Grid((2, 2), 1).positions()
    x = torch.randn(2, 5, 8, dtype=torch.float64)

    def out(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x, pos))

    leaves = [x, *(layer.get_parameter(n).detach().clone() for n in names)]
    assert torch.autograd.gradcheck(out, [t.requires_grad_() for t in leaves], fast_mode=True)


def test_a_vit():
    model = timm.create_model("test_vit", pos_embed="tpe2d", img_size=64)
    out = model(torch.randn(2, 3, 64, 64))
    out.backward(torch.randn_like(out))
    for block in model.blocks:
        (encoding,) = block.attn.pos_enc.parts()
        assert all(p.grad.any() for p in encoding.parameters())


def test_errors():
    with pytest.raises(OptionError, match="tpe2d needs an even head_dim, got 3"):
        build(dim=6)
    grid, x = Grid((2, 2)), torch.zeros(1, 4, 12)
    with pytest.raises(ShapeError, match=r"tpe2d reads the tokens. Pass x"):
        build().branches(grid.positions(), 0)
    with pytest.raises(ShapeError, match=r"tpe2d needs the tokens of a 2-axis grid, .*ranks count the cells"):
        build().branches(Positions(torch.zeros(1, 4, 2)), 0, x)
    with pytest.raises(
        UnsupportedCombination, match=r"tpe2d uses several softmaxes, which cannot be combined with alibi2d"
    ):
        create_encoding("tpe2d+alibi2d", dim=12, num_heads=2)
