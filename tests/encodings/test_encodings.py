"""Each encoding against its definition and the reference named in its docstring."""

import math

import pytest
import torch
from torch.nn import functional as F

from tests.attention import oracle
from tests.cases import cases
from vispe import Grid, Positions, create_encoding
from vispe.encodings.additive.trained.learned import resample
from vispe.encodings.parts.bias.slopes import fixed_slopes
from vispe.errors import OptionError, ShapeError

ALIBI = {
    1: [2**-8],
    2: [2**-4, 2**-8],
    3: [2**-4, 2**-8, 2**-2],
    6: [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3],
    12: [2.0**-i for i in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5],
}


@cases("heads", ALIBI)
def test_slopes(heads):
    assert fixed_slopes("alibi", heads) == pytest.approx(ALIBI[heads], rel=1e-12)
    assert fixed_slopes("geometric", heads) == pytest.approx(
        [2 ** (-8 * k / heads) for k in range(1, heads + 1)]
    )
    assert fixed_slopes("constant", heads) == (1.0,) * heads


@cases("name", ["alibi", "alibi2d", "alibi3d"])
def test_harmonic_and_radius_slopes(name):
    def slopes(options, heads=4):
        return create_encoding(f"{name}({options})", num_heads=heads).head_slopes()

    reach = {"alibi": 3.00, "alibi2d": 4.74, "alibi3d": 6.30}[name]
    assert slopes("slopes=harmonic") == pytest.approx((1, 1 / 2, 1 / 3, 1 / 4))
    assert slopes("slopes=harmonic,steepest=0.3,biased_heads=2") == pytest.approx((0.3, 0.15, 0, 0))
    assert slopes("slopes=radius,radius=[2,16]") == pytest.approx([reach / r for r in (2, 4, 8, 16)])
    assert slopes("slopes=radius,radius=[3,1,7,2]") == pytest.approx([reach / r for r in (3, 1, 7, 2)])
    assert slopes("slopes=radius,radius=[3,9]", heads=2) == pytest.approx([reach / 3, reach / 9])
    assert slopes("slopes=radius,radius=[5]", heads=1) == pytest.approx([reach / 5])
    assert slopes("slopes=radius,radius=[4,1],biased_heads=3") == pytest.approx(
        [reach / r for r in (4, 2, 1)] + [0]
    )


@cases(("name", "shape"), [("alibi", (401,)), ("alibi2d", (81, 81)), ("alibi3d", (41, 41, 41))])
@cases("metric", ["euclidean", "manhattan"])
def test_radius_holds_95_percent_of_even_attention(name, shape, metric):
    radius = {"alibi": 40.0, "alibi2d": 15.0, "alibi3d": 9.0}[name]
    (slope,) = create_encoding(f"{name}(slopes=radius,radius=[{radius}])", num_heads=1).head_slopes()
    lines = torch.meshgrid(*(torch.arange(n) - n // 2.0 for n in shape), indexing="ij")
    offsets = torch.stack(lines).flatten(1)
    distance = offsets.norm(dim=0) if metric == "euclidean" else offsets.abs().sum(0)
    weight = (-slope * distance).exp()
    # a cell at the edge is in or out as a whole: the radius half a cell in and out are the bounds
    within = [(weight * (distance <= radius + off)).sum() / weight.sum() for off in (-0.5, 0.5)]
    assert within[0] - 0.01 < 0.95 < within[1] + 0.01
    assert within[1] - within[0] < 0.05


@cases("slopes", ["constant", "geometric", "alibi", "harmonic"])
@cases("rule", [("euclidean", True, "max"), ("manhattan", False, "none"), ("squared", True, "reference")])
def test_alibi2d(rule, slopes):
    metric, wrap, normalize = rule
    grid = Grid((3, 5), prefix=2, spacing=(2.0, 1.0), reference=(4, 4))
    encoding = create_encoding(
        "alibi2d", num_heads=6, metric=metric, wrap=wrap, normalize=normalize, slopes=slopes
    )
    expected = -torch.tensor(fixed_slopes(slopes, 6))[:, None, None] * oracle.distance_matrix(grid, *rule)
    actual = encoding.bias(grid.positions(), 0).dense()[0].expand(6, -1, -1)
    torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-6, atol=1e-6)


def test_alibi2d_values_of_the_paper():
    # measured on the authors' code: the penalty of one step
    for side, expected in ((16, -0.0884), (37, -0.0393), (64, -0.0221)):
        encoding = create_encoding("alibi2d", num_heads=1)
        grid = Grid((side, side))
        assert encoding.bias(grid.positions(), 0).table(grid)[0, side - 1, side].item() == pytest.approx(
            expected, abs=5e-5
        )
    assert (
        create_encoding("alibi2d.dinosaw", num_heads=3).config
        == create_encoding("alibi2d", num_heads=3).config
    )


def test_spacing_layers_and_biased_heads():
    pos = Grid((3, 4), prefix=1, spacing=(9.0, 9.0)).positions()
    wide = create_encoding("alibi2d(spacing=[2,1])", num_heads=4)
    expected = create_encoding("alibi2d", num_heads=4).bias(
        Grid((3, 4), prefix=1, spacing=(2, 1)).positions(), 0
    )
    torch.testing.assert_close(wide.bias(pos, 0).dense(), expected.dense())
    torch.testing.assert_close(
        wide.bias(pos, 0).table(pos.grid), expected.table(Grid((3, 4), spacing=(2, 1)))
    )
    some = create_encoding("alibi2d(layers=[1,3])", num_heads=4, depth=4)
    assert [some.bias(pos, i) is not None for i in range(4)] == [False, True, False, True]
    half = create_encoding("alibi2d.geometric(biased_heads=2)", num_heads=4).bias(pos, 0).dense()[0]
    assert (half[2:] == 0).all()
    torch.testing.assert_close(
        half[:2], create_encoding("alibi2d.geometric", num_heads=2).bias(pos, 0).dense()[0]
    )
    learned = create_encoding("alibi2d(slopes=learned,biased_heads=2)", num_heads=4)
    assert learned.slope.shape == (2,)
    assert (learned.bias(pos, 0).dense()[0, 2:] == 0).all()


def test_sum_of_two_spacings():
    grid = Grid((3, 4), prefix=1)
    pos = grid.positions()
    both = create_encoding("alibi2d.local(spacing=[2,1])+alibi2d.local", num_heads=2)
    parts = [e.bias(pos, 0).dense() for e in both.parts()]
    torch.testing.assert_close(both.bias(pos, 0).dense(), parts[0] + parts[1])
    assert not torch.equal(parts[0], parts[1])


def test_learned_slopes():
    torch.manual_seed(0)
    plain = create_encoding("alibi2d(slopes=learned)", num_heads=500)
    soft = create_encoding("alibi2d(slopes=learned,softplus=true)", num_heads=500)
    for encoding in (plain, soft):
        slopes = encoding.head_slopes().detach().clone()
        assert 0 <= slopes.min() < 0.02
        assert 0.98 < slopes.max() < 1
        assert encoding.per_layer
        encoding.reset_parameters()
        assert not torch.equal(encoding.head_slopes(), slopes)
    assert not create_encoding("alibi2d", num_heads=2).per_layer
    half = create_encoding("alibi2d(slopes=learned)", num_heads=2).half()
    assert half.head_slopes().dtype == torch.float32
    assert (
        create_encoding("alibi2d(slopes=learned)", num_heads=2).double().head_slopes().dtype == torch.float64
    )


def test_slopes_of_released_checkpoints():
    arguments = torch.tensor([0.3, 1e-6, 2.5, 40.0]).reshape(4, 1, 1)
    for options in ("slopes=learned", "slopes=learned,softplus=true"):
        encoding = create_encoding(f"alibi2d({options})", num_heads=4)
        state = {"blocks.0.attn.m": arguments.clone(), "blocks.1.attn.m": arguments.clone()}
        encoding.rename_checkpoint_keys(state, "blocks.0.attn.", "blocks.0.attn.pos_enc.")
        assert set(state) == {"blocks.0.attn.pos_enc.slope", "blocks.1.attn.m"}
        encoding.load_state_dict({"slope": state["blocks.0.attn.pos_enc.slope"]})
        torch.testing.assert_close(encoding.head_slopes(), arguments.flatten())
    with pytest.raises(OptionError, match=r"slopes down to -0\.5 in .*attn\.m"):
        encoding.rename_checkpoint_keys(
            {"attn.m": torch.tensor([-0.5, 1.0]).reshape(2, 1, 1)}, "attn.", "attn.pos_enc."
        )
    fixed = create_encoding("alibi2d", num_heads=4)
    state = {"attn.m": arguments}
    fixed.rename_checkpoint_keys(state, "attn.", "attn.pos_enc.")
    assert set(state) == {"attn.m"}
    both = create_encoding("sincos2d+alibi2d(slopes=learned)", num_heads=4, dim=8)
    both.rename_checkpoint_keys(state, "attn.", "attn.pos_enc.")
    assert set(state) == {"attn.pos_enc.members.1.slope"}


def test_jitter():
    grid = Grid((4, 4), prefix=2)
    encoding = create_encoding("alibi2d(jitter=0.3)", num_heads=3)
    plain = create_encoding("alibi2d", num_heads=3).bias(grid.positions(), 0).dense()
    assert torch.equal(encoding.eval().bias(encoding.prepare(grid.positions()), 0).dense(), plain)
    encoding.train()
    pos = encoding.prepare(grid.positions())
    noise = encoding.bias(pos, 0).dense() - plain
    assert noise.shape == (1, 3, 18, 18)
    assert abs(noise.std() - 0.3) < 0.03
    assert noise[..., :2, :].abs().min() > 0  # prefix tokens included, as in the reference
    assert torch.equal(encoding.bias(pos, 1).dense() - plain, noise)  # one draw for all layers
    assert encoding.prepare(pos) is pos  # prepared already
    draws = torch.randn(1, 3, 18, 18)
    pos = encoding.prepare(grid.positions(), draws={"jitter": draws})
    torch.testing.assert_close(encoding.bias(pos, 0).dense(), plain + draws)
    other = create_encoding("alibi2d", num_heads=3)
    assert torch.equal(other.bias(pos, 0).dense(), plain)  # the draw of another encoding
    with pytest.raises(ShapeError, match=r"jitter of shape \(1 or b, 3, 18, 18\), got \(1, 2, 18, 18\)"):
        encoding.prepare(grid.positions(), draws={"jitter": draws[:, :2]})


def test_alibi():
    pos = Grid((6,), prefix=1).positions()
    dense = create_encoding("alibi", num_heads=2).bias(pos, 0).dense()[0]
    line = torch.arange(6.0)
    assert (dense[:, 0] == 0).all()
    torch.testing.assert_close(dense[0, 1:, 1:], -(2**-4) * (line[:, None] - line).abs())
    torch.testing.assert_close(dense[1, 1:, 1:], -(2**-8) * (line[:, None] - line).abs())


def test_sincos2d():
    grid = Grid((3, 4), prefix=1, spacing=(2.0, 0.5))
    table = create_encoding("sincos2d(temperature=100)", dim=12).table(grid.positions())
    for i, cell in enumerate(oracle.cells_of(grid.shape, 1)):
        if cell is None:
            assert (table[0, i] == 0).all()
            continue
        y, x = cell[0] * 2.0, cell[1] * 0.5
        rates = [100 ** (-k / 3) for k in range(3)]
        expected = [f(p * w) for p in (y, x) for f in (math.sin, math.cos) for w in rates]
        assert table[0, i].tolist() == pytest.approx(expected, abs=1e-6)


def test_sincos2d_rescaled():
    encoding = create_encoding("sincos2d(std=0.02)", dim=16)
    pos = Grid((5, 3), prefix=2).positions()
    table = encoding.table(pos)
    assert table[:, 2:].std().item() == pytest.approx(0.02, rel=1e-5)
    plain = create_encoding("sincos2d", dim=16).table(pos)
    torch.testing.assert_close(table / table.abs().max(), plain / plain.abs().max())
    keep = torch.tensor([[0, 1, 3], [0, 9, 16]])
    torch.testing.assert_close(encoding.table(pos.gather(keep))[1], table[0, keep[1]])


def test_sincos2d_far_from_the_origin():
    far = Grid((1, 5000)).positions()
    table = create_encoding("sincos2d", dim=8).table(far)
    expected = torch.arange(5000.0, dtype=torch.float64).sin()
    torch.testing.assert_close(table[0, :, 4].double(), expected, rtol=0, atol=1e-6)


def test_learned_resamples_to_the_target_size():
    encoding = create_encoding("learned", dim=8, grid=(5, 7))
    pos = Grid((5, 7), prefix=1).positions()
    assert torch.equal(encoding.table(pos)[0, 1:], encoding.weight[0])
    for shape in ((3, 4), (10, 14), (1, 1), (5, 8), (7, 5)):
        image = encoding.weight.reshape(1, 5, 7, 8).permute(0, 3, 1, 2)
        expected = F.interpolate(image, size=shape, mode="bicubic", antialias=True, align_corners=False)
        actual = encoding.table(Grid(shape).positions())
        assert torch.equal(actual, expected.permute(0, 2, 3, 1).flatten(1, 2))
    with torch.no_grad():
        encoding.weight.fill_(0.7)
    torch.testing.assert_close(encoding.table(Grid((9, 4)).positions()), torch.full((1, 36, 8), 0.7))


@cases("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_learned_in_every_dtype(dtype):
    encoding = create_encoding("learned", dim=8, grid=(3, 3)).to(dtype)
    same, other = (encoding.table(Grid(s).positions()) for s in ((3, 3), (4, 2)))
    assert same.dtype == other.dtype == torch.promote_types(dtype, torch.float32)
    assert resample(encoding.weight, (3, 3), (4, 2)).dtype == dtype
    double = encoding.weight.double().reshape(1, 3, 3, 8).permute(0, 3, 1, 2)
    expected = (
        F.interpolate(double, size=(4, 2), mode="bicubic", antialias=True).permute(0, 2, 3, 1).flatten(1, 2)
    )
    tol = {torch.bfloat16: 1e-3, torch.float32: 1e-7, torch.float64: 1e-15}[dtype]
    torch.testing.assert_close(other.double(), expected, rtol=0, atol=tol)


def test_learned_needs_a_grid():
    encoding = create_encoding("learned", dim=8, grid=(3, 3))
    assert encoding.weight.std().item() == pytest.approx(0.02, rel=0.3)
    with pytest.raises(
        ShapeError, match=r"learned needs the tokens of a 2-axis grid, got 2 axes .*\. Use sincos2d"
    ):
        encoding.table(Positions(torch.zeros(1, 4, 2)))


def test_none_does_nothing():
    encoding = create_encoding("none")
    assert encoding.config == {"name": "none"}
    assert encoding.spec == {"name": "none"}
    assert not list(encoding.parameters())
    assert encoding.active(3)
