"""LieRE against matrix exponentials in float64."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vispe
from tests.cases import cases
from vispe import Grid, Positions, create_encoding
from vispe.errors import OptionError, ShapeError

DIM, HEADS = 24, 2


def build(**options):
    return create_encoding("liere", **{"dim": DIM, "num_heads": HEADS, **options}).double()


@cases(
    ("options", "shape"),
    [
        ({}, (3, 4)),
        ({"block": 5, "per_head": False, "reference": [4, 2]}, (2, 5)),
        ({"block": "head", "normalize": "linspace", "reference": [3, 7]}, (1, 4)),
        ({"block": 2, "axes": 3, "normalize": "none", "scale_factor": 3.0}, (2, 1, 3)),
        ({"axes": 1, "normalize": "linspace"}, (6,)),
    ],
)
def test_rotations_are_the_exponentials_of_the_definition(options, shape):
    encoding = build(**options)
    s, head, trained = encoding.width, DIM // HEADS, options.get("reference", shape)
    heads, axes, blocks, _ = encoding.skew.shape
    pos = Grid(shape, prefix=2).positions()
    expected = torch.eye(head, dtype=torch.float64).repeat(pos.tokens, HEADS, 1, 1)
    for n, cell in enumerate(itertools.product(*map(range, shape))):
        if encoding.normalize == "train":
            position = [i / t for i, t in zip(cell, trained, strict=True)]
        elif encoding.normalize == "none":
            position = list(cell)
        else:
            lines = [
                torch.linspace(0, m / t, m, dtype=torch.float64) for m, t in zip(shape, trained, strict=True)
            ]
            position = [line[i].item() for line, i in zip(lines, cell, strict=True)]
        for h, j in itertools.product(range(HEADS), range(blocks)):
            total = torch.zeros(s, s, dtype=torch.float64)
            for axis in range(axes):
                entries = encoding.skew[h if heads > 1 else 0, axis, j].tolist()
                for (a, b), u in zip(itertools.combinations(range(s), 2), entries, strict=True):
                    total[a, b] += position[axis] * u / encoding.scale_factor
                    total[b, a] -= position[axis] * u / encoding.scale_factor
            expected[n + 2, h, j * s : j * s + s, j * s : j * s + s] = torch.linalg.matrix_exp(total)
    x = torch.randn(3, HEADS, pos.tokens, head, dtype=torch.float64)
    transform = encoding.transform(pos, 0)
    actual = transform.query(x)
    torch.testing.assert_close(actual, torch.einsum("nhij,bhnj->bhni", expected, x), rtol=1e-5, atol=1e-5)
    assert torch.equal(actual, transform.key(x))
    assert torch.equal(actual[:, :, :2], x[:, :, :2])
    assert transform.value(x) is x
    torch.testing.assert_close(actual.norm(dim=-1), x.norm(dim=-1))


@cases("kind", ["inverse_exp", "even"])
@cases("shape", [(3, 4), (2, 3, 2)])
def test_fixed_generators_are_axial_rotations(kind, shape):
    axes = len(shape)
    encoding = create_encoding("liere", dim=DIM, num_heads=HEADS, kind=kind, axes=axes, normalize="none")
    assert not list(encoding.parameters())
    assert not encoding.per_layer
    grid = Grid(shape, prefix=1)
    x = torch.randn(2, HEADS, grid.tokens, 12)
    result = encoding.transform(grid.positions(), 0).query(x)
    count = 12 // axes // 2
    assert torch.equal(result[:, :, 0], x[:, :, 0])
    assert torch.equal(result[..., 2 * count * axes :], x[..., 2 * count * axes :])
    for n, cell in enumerate(itertools.product(*map(range, shape))):
        for axis, f in itertools.product(range(axes), range(count)):
            t = f / (count - 1)
            angle = cell[axis] * (math.exp(-4 * t) if kind == "inverse_exp" else t)
            c = 2 * (axis * count + f)
            a, b = x[:, :, n + 1, c], x[:, :, n + 1, c + 1]
            cos, sin = math.cos(angle), math.sin(angle)
            torch.testing.assert_close(result[:, :, n + 1, c], cos * a - sin * b, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(result[:, :, n + 1, c + 1], sin * a + cos * b, rtol=1e-5, atol=1e-5)


def test_coordinates_of_patches_do_not_depend_on_the_size():
    encoding = build(reference=[3, 4])
    small, large = (encoding.coordinates(Grid(s).positions())[0] for s in ((3, 4), (6, 8)))
    torch.testing.assert_close(large.reshape(6, 8, 2)[:3, :4], small.reshape(3, 4, 2))
    host = build()
    torch.testing.assert_close(host.coordinates(Grid((6, 8), reference=(3, 4)).positions())[0], large)
    # as in the reference: 2 / 5, not 1 / 2 of the step
    drifting = build(reference=[3, 4], normalize="linspace")
    assert drifting.coordinates(Grid((6, 8)).positions())[0, 1, 1].item() == pytest.approx(2 / 7)
    assert drifting.coordinates(Grid((3, 4)).positions())[0, 1, 1].item() == pytest.approx(1 / 3)


@given(h=st.integers(1, 5), w=st.integers(1, 5), down=st.floats(-2, 2), right=st.floats(-2, 2))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_planar_and_fixed_generators_depend_on_offsets_only(h, w, down, right):
    coords = Grid((h, w)).positions().coords.double()
    for options in ({"block": 2, "normalize": "none"}, {"kind": "even", "normalize": "none"}):
        encoding = build(**options)
        q, k = torch.randn(2, 1, HEADS, h * w, 12, dtype=torch.float64)
        scores = []
        for shift in (0.0, torch.tensor([down, right])):
            transform = encoding.transform(Positions(coords + shift), 0)
            scores.append(transform.query(q) @ transform.key(k).mT)
        torch.testing.assert_close(*scores, rtol=1e-8, atol=1e-8)


def test_larger_blocks_depend_on_absolute_positions():
    encoding = build(block=4, normalize="none")
    coords = Grid((3, 4)).positions().coords.double()
    first, second = (encoding.rotations(Positions(coords + s))[0, 0, :, 0] for s in (0.0, 0.7))
    assert (first[0].mT @ first[7] - second[0].mT @ second[7]).abs().max() > 0.1


def test_dropped_tokens():
    for options in ({}, {"kind": "even"}, {"normalize": "linspace"}):
        encoding = build(**options)
        pos = Grid((3, 5), prefix=1).positions()
        x = torch.randn(3, HEADS, pos.tokens, 12, dtype=torch.float64)
        full = encoding.transform(pos, 0).query(x)
        keep = torch.stack([torch.cat([torch.arange(1), 1 + torch.randperm(15)[:6]]) for _ in range(3)])
        take = keep[:, None, :, None].expand(-1, HEADS, -1, 12)
        subset = encoding.transform(pos.gather(keep), 0).query(x.gather(2, take))
        torch.testing.assert_close(subset, full.gather(2, take), rtol=1e-5, atol=1e-6)


@cases("shape", [(3, 2), (1, 4)])
def test_gradients(shape):
    encoding = create_encoding("liere", dim=12, num_heads=2, block=3, normalize="none").double()
    grid = Grid(shape, prefix=1)
    q = torch.randn(1, 2, grid.tokens, 6, dtype=torch.float64, requires_grad=True)
    coords = grid.positions().coords.double().requires_grad_()
    start = encoding.skew.detach().clone().requires_grad_()

    def rotated(q, coords, skew):
        del encoding.skew
        encoding.skew = skew
        return encoding.transform(grid.positions().replace(coords=coords), 0).query(q)

    assert torch.autograd.gradcheck(rotated, (q, coords, start), fast_mode=True)


def test_initialisation():
    torch.manual_seed(0)
    many = {"dim": 64 * 16, "num_heads": 64}
    uniform, symmetric = (create_encoding("liere", init=i, **many).skew for i in ("uniform", "symmetric"))
    normal = create_encoding("liere.comrope", init_std=0.5, scale_factor=8.0, **many)
    assert uniform.min() >= 0
    assert uniform.max().item() == pytest.approx(2 * math.pi, rel=1e-2)
    assert symmetric.mean().item() == pytest.approx(0, abs=0.1)
    assert symmetric.abs().max() <= math.pi
    assert normal.generators().square().mean().sqrt().item() == pytest.approx(
        0.5 * (2 * 7 / 8) ** 0.5, rel=0.05
    )


def test_layers_share_generators_only_when_requested():
    for share in (False, True):
        model = vispe.create_encoding("liere", dim=24, num_heads=2, share_layers=share)
        assert model.per_layer is not share


def test_checkpoints_of_the_reference_load():
    for per_head in (True, False):
        encoding = build(block=4, per_head=per_head)
        raw = torch.rand(2, 1, 6 if per_head else 3, 4, 4, dtype=torch.float64)
        state = {"enc.generator_raw_params": raw}
        encoding.rename_checkpoint_keys(state, "enc.", "")
        encoding.load_state_dict(state)
        expected = raw[:, 0].triu(1) - raw[:, 0].triu(1).mT
        torch.testing.assert_close(encoding.generators().transpose(0, 1).flatten(1, 2), expected)


@cases(
    ("spec", "message"),
    [
        ("liere(axes=0)", "axes needs an integer from 1 to 3, got axes=0"),
        ("liere(block=13)", "needs a block of 2 to 12 channels for 12 channels per head"),
        ("liere(block=whole)", "block needs an integer of 2 or more, or head, got block='whole'"),
        ("liere(kind=odd)", "kind must be one of learned, inverse_exp, even, got 'odd'"),
        ("liere(kind=even,block=2)", "block=2 has no effect with kind='even', which has no parameters"),
        ("liere(kind=even,init=symmetric)", "init='symmetric' has no effect with kind='even'"),
        ("liere(kind=even,share_layers=true)", "share_layers=True has no effect with kind='even'"),
        ("liere(per_head=2)", "per_head is true or false, got per_head=2"),
        ("liere(share_layers=no)", "share_layers is true or false"),
        ("liere(normalize=max)", "normalize must be one of train, linspace, none, got 'max'"),
        ("liere(reference=[3])", r"reference needs one number for each of 2 axes, got reference=\[3\]"),
        ("liere(reference=3)", "reference needs a list of integers above 0, got reference=3"),
        ("liere(normalize=none,reference=[3,3])", r"reference=\[3, 3\] has no effect with normalize='none'"),
        ("liere(init=zeros)", "init must be one of uniform, symmetric, normal"),
        ("liere(init_std=2)", "init_std=2 has no effect with init='uniform'. Use init=normal"),
        ("liere(init=normal,init_std=-1)", "init_std needs a number of 0 or more, got init_std=-1"),
        ("liere(scale_factor=0)", "scale_factor needs a number above 0, got scale_factor=0"),
    ],
)
def test_option_errors(spec, message):
    with pytest.raises(OptionError, match=message):
        create_encoding(spec, dim=DIM, num_heads=HEADS)


def test_other_errors():
    with pytest.raises(ShapeError, match=r"liere needs 2-axis positions, got 1 axis .* Use liere\(axes=1\)"):
        build().transform(Grid((4,)).positions(), 0)
    with pytest.raises(ShapeError, match="liere needs 2-axis positions"):
        build(kind="even").transform(Grid((4,)).positions(), 0)
    with pytest.raises(OptionError, match="has matrices with kind=learned only, got 'even'"):
        build(kind="even").generators()
    with pytest.raises(
        OptionError, match="needs a pair of channels per axis, got 4 channels per head for 3 axes"
    ):
        create_encoding("liere(kind=even,axes=3)", dim=8, num_heads=2)


@cases(("normalize", "factor"), [("train", 3.0), ("none", 3.0), ("linspace", 1.0)])
def test_spacing_scales_coordinates_that_are_not_relative_to_the_field(normalize, factor):
    encoding = build(normalize=normalize)
    plain, spaced = (encoding.coordinates(Grid((4, 5), spacing=s).positions()) for s in (None, (3.0, 3.0)))
    torch.testing.assert_close(spaced, factor * plain)
