"""`rope_field` against angles computed pair by pair, and the claims of its docstring."""

import math

import pytest
import timm
import torch

import vispe
from tests.cases import cases
from vispe import Grid, Positions, create_encoding
from vispe.attention import attention
from vispe.errors import OptionError, ShapeError

SIZES = [(3, 5), (1, 6), (4, 4), (1, 1), (7, 2)]


def build(spec="rope_field", dim=32, heads=2, **options):
    return create_encoding(spec, dim=dim, num_heads=heads, **options)


def angles(encoding, pos):
    transform = encoding.transform(pos, 0)
    return torch.atan2(transform.sin, transform.cos)


def same_angles(actual, expected, atol=2e-5):
    off = torch.remainder(actual.double() - expected.double() + math.pi, 2 * math.pi) - math.pi
    assert off.abs().max() < atol


def golden(pairs, low, high, unrotated=0):
    """Return (x, y) of each pair by the definition of Golden Gate RoPE."""
    rows = []
    for f in range(pairs):
        step = (f - unrotated) / max(pairs - unrotated - 1, 1)
        size = 0.0 if f < unrotated else low * (high / low) ** step
        angle = f * math.pi / ((1 + math.sqrt(5)) / 2)
        rows.append((size * math.cos(angle), size * math.sin(angle)))
    return rows


def spiral(counts, low, high):
    rows = []
    for g, count in enumerate(counts):
        angle = math.pi * g / len(counts)
        sizes = [high * (low / high) ** (j / count) for j in range(count)]
        rows += [(size * math.cos(angle), size * math.sin(angle)) for size in sizes]
    return rows


def slow_angles(rows, shape, unit=None):
    """Return angles (tokens, pairs) float64, patch by patch, with both axes from -1 to 1 or in patches."""
    table = []
    for i in range(shape[0]):
        for j in range(shape[1]):
            y, x = (
                float(index)
                if unit == "patch"
                else 2 * index / ((unit or n) - 1) - 1
                if (unit or n) > 1
                else index - 1.0
                for index, n in zip((i, j), shape, strict=True)
            )
            table.append([a * x + b * y for a, b in rows])
    return torch.tensor(table, dtype=torch.float64)


@cases("shape", SIZES)
@cases("prefix", [0, 3])
def test_angles_are_those_of_the_definitions(shape, prefix):
    pos = Grid(shape, prefix=prefix).positions()
    cases = [
        (build(), golden(8, 0.2, 20), None),
        (
            build("rope_field.golden_gate(min_freq=1,max_freq=7,unrotated=0.4)"),
            golden(8, 1, 7, unrotated=3),
            None,
        ),
        (build("rope_field(normalize_coords=max)"), golden(8, 0.2, 20), max(shape)),
        (build("rope_field.spiral"), spiral([2, 2, 2, 2], 0.01, 1), "patch"),
        (build("rope_field.spiral(groups=3,min_freq=0.1)"), spiral([3, 3, 2], 0.1, 1), "patch"),
    ]
    for encoding, rows, unit in cases:
        result = angles(encoding, pos)
        assert result.dtype == torch.float32
        assert not result[:, :, :prefix].any()
        same_angles(result[0, 0, prefix:], slow_angles(rows, shape, unit))


def test_two_groups_are_axial_rope():
    pos = Grid((4, 6), prefix=1).positions()
    assert torch.allclose(
        angles(build("rope_field.spiral(groups=2)"), pos), angles(build("rope_axial"), pos), atol=1e-5
    )


def test_explicit_frequencies_and_odd_pairs():
    rows = [[0.5, -2.0], [0.0, 0.0], [1.0, 3.0]]
    encoding = build(dim=6, heads=1, frequencies=rows, normalize_coords="none", schedule="none")
    assert encoding.ndim == (2,)
    assert encoding.per_layer is False
    result = angles(encoding, Grid((3, 2)).positions())[0, 0]
    same_angles(result, torch.cartesian_prod(torch.arange(3.0), torch.arange(2.0)) @ torch.tensor(rows).T)


@cases("spec", ["rope_field", "rope_field.spiral(groups=4)"])
@cases("axes", [1, 2, 3])
def test_directions_are_isotropic_unit_vectors(spec, axes):
    encoding = build(spec, dim=1024, heads=1, min_freq=1, max_freq=1 + 1e-9)
    field = encoding.field(axes)
    torch.testing.assert_close(field.norm(dim=-1), torch.ones(512, dtype=torch.float64))
    if "spiral" not in spec or axes == 2:  # the mean square is the same along each axis
        covariance = field.T @ field / 512
        torch.testing.assert_close(covariance, torch.eye(axes, dtype=torch.float64) / axes, rtol=0, atol=0.02)


def unevenness(field):
    """Return the variation of the similarity of two patches with the direction between them."""
    around = torch.arange(360, dtype=torch.float64) * math.pi / 180
    reach = torch.linspace(1, 6, 20, dtype=torch.float64)[:, None, None]
    offsets = reach * torch.stack([around.sin(), around.cos()], -1)
    return (offsets @ field.T).cos().mean(-1).std(1).mean()


def test_similarity_is_more_isotropic_than_that_of_axial_rope():
    options = {"dim": 64, "heads": 1, "min_freq": 0.05, "max_freq": 1.0}
    axial = unevenness(build("rope_field.spiral(groups=2)", **options).field(2))
    assert unevenness(build("rope_field", **options).field(2)) < axial / 3
    assert unevenness(build("rope_field.spiral(groups=8)", **options).field(2)) < axial / 3


@cases("spec", ["rope_field", "rope_field.spiral", "rope_field(normalize_coords=min)"])
def test_scores_are_invariant_to_shifts_and_norms_are_preserved(spec):
    encoding = build(spec)
    coords = torch.rand(1, 9, 2, dtype=torch.float64) * 8
    pos = Positions(coords, extent=torch.tensor([[9.0, 9.0]]).double())
    shifted = pos.replace(coords=coords + torch.tensor([3.7, -11.2]).double())
    q, k = torch.randn(2, 1, 2, 9, 16, dtype=torch.float64)
    scores = [
        t.query(q) @ t.key(k).transpose(-1, -2) for t in (encoding.transform(p, 0) for p in (pos, shifted))
    ]
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-9, atol=1e-9)
    rotated = encoding.transform(pos, 0).query(q)
    torch.testing.assert_close(rotated.norm(dim=-1), q.norm(dim=-1))


def test_a_quarter_turn_exchanges_the_groups_of_a_spiral():
    table = angles(build("rope_field.spiral"), Grid((5, 5)).positions())[0, 0].unflatten(0, (5, 5))
    rotated = table.rot90()
    off, turned_off = (
        (table - table[0, 0]).unflatten(-1, (4, 2)),
        (rotated - rotated[0, 0]).unflatten(-1, (4, 2)),
    )
    # rotated by 90 degrees, directions 0 and 45 degrees are 90 and 135, and those are 0 and 45 with the sign changed
    same_angles(turned_off[..., :2, :], -off[..., 2:, :])
    same_angles(turned_off[..., 2:, :], off[..., :2, :])


def test_schedules_extend_the_training_grid():
    large = Grid((11, 5), reference=(6, 5)).positions()
    small = Grid((6, 5)).positions()
    same = angles(build("rope_field"), small)[0, 0].unflatten(0, (6, 5))
    none = angles(build("rope_field(schedule=none)"), large)[0, 0].unflatten(0, (11, 5))
    same_angles(none[1:6] - none[:5], same[1:] - same[:5])  # a step turns as in training
    plain = angles(build("rope_field"), large)
    same_angles(angles(build("rope_field(schedule=pi)"), large), plain)
    fewer = Grid((4, 5), reference=(6, 5)).positions()
    for schedule in ("none", "pi", "yarn"):
        actual = angles(build(f"rope_field(schedule={schedule})"), fewer)[0, 0].unflatten(0, (4, 5))
        same_angles(actual[1:] - actual[:3], same[1:4] - same[:3])
    patches = angles(
        build("rope_field.spiral(schedule=rescale)"), Grid((12, 5), reference=(6, 5)).positions()
    )
    expected = angles(build("rope_field.spiral"), Grid((6, 5)).positions())[0, 0].unflatten(0, (6, 5))
    same_angles(patches[0, 0].unflatten(0, (12, 5))[::2], expected)


def test_dropped_tokens_and_a_second_grid():
    encoding = build("rope_field.spiral")
    pos = Grid((4, 5), prefix=1).positions()
    keep = torch.tensor([[0, 3, 7], [0, 20, 1]])
    result = angles(encoding, pos.gather(keep))
    for i in range(2):
        same_angles(result[i], angles(encoding, pos)[0][:, keep[i]])
    assert angles(encoding, Grid((5, 4)).positions()).shape == (1, 1, 20, 8)


@cases("backend", ["sdpa", "auto"])
def test_backends_agree(backend):
    encoding = build("rope_field(logit_scale=1.3)")
    transform = encoding.transform(Grid((3, 5), prefix=1).positions(), 0)
    result = []
    for name in ("reference", backend):
        qkv = [torch.randn(2, 2, 16, 16, generator=torch.Generator().manual_seed(i)) for i in range(4)]
        leaves = [t.requires_grad_() for t in qkv[:3]]
        out = attention(*leaves, transform=transform, backend=name)
        result.append([out, *torch.autograd.grad(out, leaves, qkv[3])])
    for a, b in zip(*result, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_angles_are_exact_in_half_precision_and_autocast():
    encoding = build("rope_field").bfloat16()
    pos = Grid((1, 300)).positions()
    with torch.autocast("cpu", torch.bfloat16):
        result = encoding.transform(pos, 0)
    assert result.cos.dtype == torch.float32
    same_angles(torch.atan2(result.sin, result.cos)[0, 0], slow_angles(golden(8, 0.2, 20), (1, 300)), 1e-4)


def test_a_vit_trains():
    model = timm.create_model("test_vit", pos_embed="rope_field(logit_scale=ssmax)", img_size=32)
    model(torch.randn(2, 3, 32, 32)).square().sum().backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "sharpness" in n)
    assert "rope_field" in vispe.describe(model)


@cases(
    ("spec", "message"),
    [
        ("rope_field(schedule=ntk)", "schedule='ntk' needs frequencies in order"),
        ("rope_field(min_freq=3,max_freq=1)", "min_freq <= max_freq, got 3 and 1"),
        ("rope_field(groups=3)", "groups=3 has no effect with directions='golden'"),
        ("rope_field.spiral(groups=9)", "each of 9 groups, got 8 pairs. Use fewer groups"),
        ("rope_field(frequencies=[[1,2]])", "each of 8 pairs, got 1 list of 2 numbers"),
        ("rope_field(frequencies=[])", "each of 8 pairs, got 0 lists"),
        (f"rope_field(frequencies={[[1]] * 7 + [[1, 2]]})", "got 8 lists of 1 or 2 numbers"),
        (f"rope_field(frequencies={[[1]] * 8},unrotated=0.5)", "unrotated has no effect with frequencies"),
        ("rope_field(frequencies=[[a]])", "frequencies needs a list of"),
        ("rope_field(directions=silver)", "directions must be one of golden, spiral, got 'silver'"),
        ("rope_field(reference=[4,4])", r"reference=\[4, 4\] has no effect with schedule='rescale'"),
        ("rope_field.spiral(reference=[4,4])", r"reference=\[4, 4\] has no effect with schedule='none'"),
        ("rope_field(rotated=0.3)", "a head_dim divisible by 2, got head_dim=16 with rotated=0.3"),
    ],
)
def test_option_errors(spec, message):
    with pytest.raises(OptionError, match=message):
        build(spec)


def test_shape_errors():
    with pytest.raises(ShapeError, match="rope_field needs 1-axis positions, got 2 axes"):
        build("rope_field", frequencies=[[1]] * 8).transform(Grid((2, 2)).positions(), 0)
    with pytest.raises(ShapeError, match="needs the training grid of 2 axes"):
        build("rope_field(schedule=none)").transform(Grid((2, 2)).positions(), 0)


def test_groups_are_built_on_the_meta_device():
    spiral = create_encoding("rope_field.spiral", dim=64, num_heads=2)
    expected = spiral.field(2)
    with torch.device("meta"):
        assert spiral.field(2).shape == expected.shape
