"""string against matrix exponentials of its definition, and its invariances."""

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import cases
from vispe import Grid, Positions, attention, create_encoding
from vispe.errors import OptionError, ShapeError


def build(**options):
    return create_encoding("string", **{"dim": 16, "num_heads": 2, "std": 0.5, **options}).double()


def slow(encoding, coords):
    """Return the matrices (h, blocks, s, s) of one position."""
    heads, blocks, axes, _ = encoding.odd.shape
    s = encoding.width
    out = torch.zeros(heads, blocks, s, s, dtype=torch.float64)
    for h in range(heads):
        for block in range(blocks):
            for a in range(axes):
                c = torch.zeros(s, dtype=torch.float64)
                c[1 : len(encoding.odd[h, block, a]) + 1] = encoding.odd[h, block, a].detach()
                circulant = torch.stack([torch.stack([c[(i - j) % s] for j in range(s)]) for i in range(s)])
                out[h, block] += float(coords[a]) * (circulant - circulant.T)
    return torch.matrix_exp(out)


@cases(
    ("shape", "options"),
    [
        ((3, 4), {}),
        ((2, 5), {"block": 3}),
        ((2, 3), {"block": 7, "spacing": (2.0, 0.3)}),
        ((4,), {"axes": 1, "block": 4}),
        ((2, 2, 3), {"axes": 3, "block": 5}),
    ],
)
def test_rotations_are_the_exponentials_of_the_definition(shape, options):
    encoding = build(**options)
    pos = Grid(shape, prefix=2).positions()
    transform, x = encoding.transform(pos, 0), torch.randn(2, 2, pos.tokens, 8, dtype=torch.float64)
    actual, width = transform.query(x), encoding.odd.shape[1] * encoding.width
    assert torch.equal(actual[:, :, :2], x[:, :, :2])
    assert torch.equal(actual[..., width:], x[..., width:])
    assert torch.equal(actual, transform.key(x))
    coords = pos.coords[0] * torch.tensor(options.get("spacing", 1.0))
    for i in range(2, pos.tokens):
        matrices = slow(encoding, coords[i])
        for h in range(2):
            expected = torch.block_diag(*matrices[h]) @ x[:, h, i, :width, None]
            torch.testing.assert_close(actual[:, h, i, :width], expected[..., 0], rtol=1e-5, atol=1e-5)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1000), block=st.sampled_from([3, 4, 8]))
def test_scores_depend_on_offsets_and_norms_are_preserved(seed, block):
    torch.manual_seed(seed)
    encoding, positions = build(block=block), torch.randn(1, 5, 2, dtype=torch.float64) * 4
    q, k = torch.randn(2, 1, 2, 5, 8, dtype=torch.float64)
    scores = []
    for shift in (torch.zeros(2), torch.randn(2) * 10):
        transform = encoding.transform(Positions(positions + shift), 0)
        torch.testing.assert_close(transform.query(q).norm(dim=-1), q.norm(dim=-1))
        scores.append(transform.query(q) @ transform.key(k).mT)
    torch.testing.assert_close(*scores)


class Attend(torch.nn.Module):
    def __init__(self, encoding):
        super().__init__()
        self.encoding = encoding

    def forward(self, coords, q, k, v, backend):
        return attention(q, k, v, transform=self.encoding.transform(Positions(coords), 0), backend=backend)


@cases("backend", ["reference", "sdpa"])
def test_gradients(backend):
    layer = Attend(build(block=5))
    q, k, v = torch.randn(3, 2, 2, 4, 8, dtype=torch.float64)
    leaves = layer.encoding.odd.detach().clone(), torch.randn(2, 4, 2, dtype=torch.float64), q, k

    def out(odd, *tensors):
        return torch.func.functional_call(layer, {"encoding.odd": odd}, (*tensors, v, backend))

    assert torch.autograd.gradcheck(out, tuple(x.requires_grad_() for x in leaves), fast_mode=True)
    torch.testing.assert_close(out(*leaves), layer(*leaves[1:], v, "reference"))


def test_starts_and_learns_from_the_identity():
    encoding, pos = build(std=0), Grid((3, 3)).positions()
    x = torch.randn(1, 2, 9, 8, dtype=torch.float64)
    torch.testing.assert_close(encoding.transform(pos, 0).query(x), x)
    transform = encoding.transform(pos, 0)
    scores = transform.query(x) @ transform.key(torch.randn_like(x)).mT
    (scores * torch.randn_like(scores)).sum().backward()
    assert encoding.odd.grad.all()
    assert create_encoding("string", dim=96, num_heads=2).odd.shape == (2, 3, 2, 7)


def test_dropped_tokens():
    encoding, pos = build(), Grid((3, 4), 1).positions()
    keep = torch.tensor([[0, 5, 2], [0, 12, 3]])
    every = encoding.rotations(pos)[0]
    subset = encoding.rotations(pos.gather(keep))
    for i in range(2):
        torch.testing.assert_close(subset[i], every[:, keep[i]])


def test_a_vit():
    model = timm.create_model("test_vit", pos_embed="string(block=8)", img_size=64)
    out = model(torch.randn(2, 3, 64, 64))
    out.backward(torch.randn_like(out))
    assert all(block.attn.pos_enc.odd.grad.any() for block in model.blocks)


def test_errors():
    for block in (2, 9):
        with pytest.raises(
            OptionError, match=rf"3 to 8 channels for 8 channels per head, got block={block}\."
        ):
            build(block=block)
    with pytest.raises(
        OptionError, match=r"spacing needs one number for each of 2 axes, got spacing=\[1.0\]"
    ):
        build(spacing=(1.0,))
    with pytest.raises(
        ShapeError, match=r"string needs 2-axis positions, got 3 axes .*\. Use string\(axes=3\)"
    ):
        build().transform(Grid((2, 2, 2)).positions(), 0)
