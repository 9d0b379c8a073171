"""transformer_xl against its definition, pair by pair, and the claims of its docstring."""

import math

import pytest
import timm
import torch

import vispe
from tests.cases import cases
from tests.encodings.bias.products import DIM, HEADS, WIDTH, check_dropped_tokens, content, random_encoding
from vispe import Grid, Positions, attention, create_encoding
from vispe.encodings.attention_layer import attend
from vispe.encodings.multi_softmax import calls_of, weights_of
from vispe.errors import OptionError, ShapeError

GRIDS = [Grid((5,), 1), Grid((3, 4), 2), Grid((1, 6)), Grid((4, 3), 0, (0.5, 2.0)), Grid((2, 3, 2), 1)]
OPTIONS = [{}, {"clamp_len": 1.5}, {"temperature": 50}]


def build(**options):
    return random_encoding("transformer_xl", **options)


def code(encoding, offset):
    """Return R of one offset, channel by channel."""
    width, out = DIM // len(offset), []
    for o in offset:
        o = o if encoding.clamp_len is None else max(-encoding.clamp_len, min(encoding.clamp_len, o))
        angles = [o * encoding.temperature ** (-2 * c / width) for c in range(width // 2)]
        out += [*map(math.sin, angles), *map(math.cos, angles)]
    return torch.tensor(out, dtype=torch.float64)


def slow(encoding, pos, q, k, v):
    """Return attention, by a loop over pairs of tokens of one sample."""
    coords = (pos.coords if encoding.spacing is None else pos.with_spacing(encoding.spacing).coords)[
        0
    ].tolist()
    positioned, n = pos.spatial[0].tolist(), pos.tokens
    r = torch.zeros(n, n, DIM, dtype=torch.float64)
    for i in range(n):
        for j in range(n):
            if positioned[i] and positioned[j]:
                r[i, j] = code(encoding, [a - b for a, b in zip(coords[i], coords[j], strict=True)])
    met = torch.einsum("bhid,ijc,chd->bhij", q + encoding.r_r_bias[:, None], r, encoding.r)
    known = torch.tensor(positioned)[:, None]
    logits = (q + encoding.r_w_bias[:, None] * known) @ k.mT + met
    return (logits * WIDTH**-0.5).softmax(-1) @ v


def agree(encoding, pos, backends=("reference", "sdpa")):
    leaves = [t.requires_grad_() for t in content(pos.tokens)]
    every = [*leaves, *encoding.parameters()]
    expected = slow(encoding, pos, *leaves)
    cotangent = torch.randn_like(expected)
    grads = torch.autograd.grad(expected, every, cotangent)
    for backend in backends:
        actual = attend(*leaves, encoding.parts(), pos, 0, backend=backend)
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)
        for f, w in zip(torch.autograd.grad(actual, every, cotangent), grads, strict=True):
            torch.testing.assert_close(f, w, rtol=1e-5, atol=1e-6)


@cases("options", OPTIONS, ids=str)
def test_attention_and_all_gradients(options):
    encoding = build(**options)
    for grid in GRIDS:  # one after the other, of all numbers of axes
        agree(encoding, grid.positions())


def test_spacing_replaces_that_of_the_grid():
    agree(build(spacing=(3, 0.5)), Grid((2, 3), 1, (0.5, 2.0)).positions())


@cases("axes", [1, 2, 3])
def test_free_coordinates(axes):
    coords = torch.rand(1, 6, axes, dtype=torch.float64) * 5 - 1
    spatial = torch.tensor([[False, True, True, True, True, True]])
    agree(build(temperature=20), Positions(coords * spatial[..., None], spatial))
    encoding = build(temperature=20, spacing=(2.0,) * axes)
    agree(encoding, Positions(coords * spatial[..., None], spatial), ("reference",))
    # coordinates learn, too
    coords.requires_grad_()
    q, k, _ = content(6, 1)
    dense = encoding.bias(Positions(coords, spatial), 0).dense(q=q, k=k, scale=1.0)
    (grad,) = torch.autograd.grad(dense, coords, torch.randn_like(dense))
    assert (grad[:, 1:] != 0).all()


def test_coordinates_of_a_grid_may_be_free():
    pos = Grid((3, 4), 1).positions()
    encoding, (q, k, _) = build(), content(13)
    free = Positions(pos.coords.double(), pos.spatial)
    torch.testing.assert_close(
        encoding.bias(free, 0).dense(q=q, k=k, scale=0.5), encoding.bias(pos, 0).dense(q=q, k=k, scale=0.5)
    )
    shifted = pos.replace(coords=pos.coords + 3.0)  # not in place
    dense = encoding.bias(shifted, 0).dense(q=q, k=k, scale=0.5)
    torch.testing.assert_close(dense, encoding.bias(pos, 0).dense(q=q, k=k, scale=0.5), rtol=1e-4, atol=1e-5)


def test_invariant_to_translation():
    coords = torch.rand(1, 7, 2, dtype=torch.float64) * 9
    encoding, (q, k, v) = build(), content(7)
    for shift in ([3.7, -2.2], [100.0, 55.5]):
        actual, expected = (
            attend(q, k, v, encoding.parts(), Positions(c), 0)
            for c in (coords + torch.tensor(shift, dtype=torch.float64), coords)
        )
        torch.testing.assert_close(actual, expected)


def test_dropped_tokens_on_each_sample():
    check_dropped_tokens(build(), Grid((3, 4), 2).positions(), scale=0.5)


def test_sum_with_a_rotation():
    spec = "transformer_xl(std=0.1)+rope_axial"
    both = create_encoding(spec, dim=DIM, num_heads=HEADS, depth=1, grid=(3, 4))
    pos, (q, k, v) = Grid((3, 4), 1).positions(), (t.float() for t in content(13))
    with torch.no_grad():
        both.members[0].r_w_bias.normal_()
    rope = both.members[1].transform(pos, 0)
    shifted = q + both.members[0].r_w_bias[:, None] * pos.spatial[0, :, None]
    bias = both.members[0].bias(pos, 0).dense(q=q, k=k, scale=0.5)
    expected = attention(rope.query(shifted), rope.key(k), v, attn_mask=bias, scale=0.5)
    torch.testing.assert_close(attend(q, k, v, both.parts(), pos, 0, scale=0.5), expected)


def test_a_converted_vit_is_unchanged_and_learns_from_the_second_step():
    torch.manual_seed(0)
    model = timm.create_model("test_vit", img_size=(64, 96), num_classes=3, global_pool="avg").eval()
    x = torch.randn(2, 3, 64, 96)
    before = model(x)
    vispe.convert(model, "transformer_xl", keep_abs=True)
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)
    mine = {name: p for name, p in model.named_parameters() if "pos_enc" in name}
    for step in range(2):
        out = model(x)
        for p, grad in zip(
            mine.values(), torch.autograd.grad(out, [*mine.values()], torch.randn_like(out)), strict=True
        ):
            p.data -= 0.1 * grad
        updated = {name for name, p in mine.items() if (p != 0).any()}
        assert updated == {name for name in mine if step or "r_r_bias" not in name}


def test_weights_sum_to_one_and_random_initialisation():
    encoding = create_encoding("transformer_xl.xlnet", dim=64, num_heads=4)
    assert encoding.r.std().item() == pytest.approx(0.02, rel=0.05)
    q, k, v = torch.randn(3, 1, 4, 13, 16)
    result = weights_of(calls_of(q, k, v, encoding.parts(), Grid((3, 4), 1).positions(), 0))
    torch.testing.assert_close(result.sum(-1), torch.ones(1, 4, 13))


@cases(
    ("options", "message"),
    [
        ({"dim": 9}, "dim needs an integer above 0 and divisible by 2, got dim=9"),
        ({"dim": 14}, "dim to be a multiple of num_heads, got dim=14, num_heads=3"),
        ({"std": -1}, "std needs a number of 0 or more, got std=-1"),
        ({"clamp_len": 0}, "clamp_len needs a number above 0, got clamp_len=0"),
        ({"spacing": [0, 1]}, "spacing needs a list of"),
    ],
)
def test_option_errors(options, message):
    with pytest.raises(OptionError, match=message):
        create_encoding("transformer_xl", **{"dim": DIM, "num_heads": HEADS, **options})


def test_positions_that_do_not_fit():
    with pytest.raises(ShapeError, match=r"dim to be a multiple of 6 for 3-axis positions, got dim=16"):
        create_encoding("transformer_xl", dim=16, num_heads=2).bias(Grid((2, 2, 2)).positions(), 0)
    with pytest.raises(ShapeError, match=r"clamp_len=2 needs tokens at the cells of a grid"):
        build(clamp_len=2).bias(Positions(torch.rand(1, 4, 2)), 0)
    with pytest.raises(ShapeError, match=r"transformer_xl needs 2-axis positions, got 1 axis"):
        build(spacing=(1, 2)).transform(Grid((4,)).positions(), 0)
    for pos in (Grid((2, 2)).positions(), Positions(torch.rand(1, 4, 2))):
        with pytest.raises(ShapeError, match=r"query.*q, k and scale"):
            build().bias(pos, 0).dense()
