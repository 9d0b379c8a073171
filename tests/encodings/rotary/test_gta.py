"""GTA against its definition with full matrices per token, in float64."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vispe
from tests.cases import cases
from vispe import Grid, Positions, create_encoding
from vispe.attention import PairRotation
from vispe.errors import OptionError, ShapeError


def pose(seed=0, views=2, batch=1):
    """Return random rigid motions (batch, views, 4, 4)."""
    generator = torch.Generator().manual_seed(seed)
    matrix, _ = torch.linalg.qr(torch.randn(batch, views, 3, 3, dtype=torch.float64, generator=generator))
    matrix = matrix * torch.linalg.det(matrix)[..., None, None]
    out = torch.eye(4, dtype=torch.float64).repeat(batch, views, 1, 1)
    out[..., :3, :3] = matrix
    out[..., :3, 3] = torch.randn(batch, views, 3, dtype=torch.float64, generator=generator)
    return out


def second_degree(matrix):
    """Return the action of R S R^T on the five numbers of a traceless symmetric S, by least squares."""
    half, third = 0.5**0.5, 6**-0.5
    s = torch.zeros(5, 3, 3, dtype=torch.float64)
    for i, (a, b) in enumerate(((0, 1), (1, 2), (0, 2))):
        s[i, a, b] = s[i, b, a] = half
    s[3] = torch.diag(torch.tensor([-third, -third, 2 * third], dtype=torch.float64))
    s[4] = torch.diag(torch.tensor([half, -half, 0], dtype=torch.float64))
    columns = [
        torch.linalg.lstsq(s.flatten(1).t(), (matrix @ m @ matrix.t()).flatten()[:, None]).solution for m in s
    ]
    return torch.cat(columns, 1)


def representation(encoding, coords, extrinsic):
    """Return rho (d, d) of one token for its position (axes,) and pose (4, 4) or None."""
    d, blocks = encoding.head, []
    sizes = {g.name: g.size for g in encoding.groups}
    blocks += [torch.eye(sizes.get("triv", 0), dtype=torch.float64)]
    if "se3" in sizes:
        rho = torch.linalg.inv(extrinsic)
        rho[:3, 3] *= encoding.scale.item()
        blocks += [rho] * (sizes["se3"] // 4)
    if "so3" in sizes:
        matrix = extrinsic[:3, :3].t()
        both = [matrix] if encoding.so3_degree == 1 else [matrix, second_degree(matrix)]
        blocks += both * (sizes["so3"] // sum(len(b) for b in both))
    if "so2" in sizes:
        count = sizes["so2"] // 2 // encoding.axes
        for f, axis in itertools.product(range(count), reversed(range(encoding.axes))):
            speed = 1 if encoding.share_freqs else 2.0 ** (f + 1 - count)
            a = 2 * math.pi * encoding.top[axis] * coords[axis] * speed
            rows = [[math.cos(a), -math.sin(a)], [math.sin(a), math.cos(a)]]
            blocks.append(torch.tensor(rows, dtype=torch.float64))
    if "t2" in sizes:
        shift = torch.eye(3, dtype=torch.float64)
        shift[2, 0], shift[2, 1] = coords[1], coords[0]
        blocks += [shift] * (sizes["t2"] // 3)
    full = torch.block_diag(*[b for b in blocks if b.numel()])
    assert full.shape == (d, d)
    return full


CASES = [
    ({}, 12, (3, 4), False),
    ({"so2": 4, "values": False}, 10, (2, 5), False),
    ({"so2": 4, "max_freq": [1, 3]}, 7, (1, 4), False),  # an odd triv: no pair tables
    ({"share_freqs": True, "axes": 3, "max_freq": 0.5}, 14, (2, 1, 3), False),
    ({"axes": 1, "normalize": "train", "reference": [9]}, 8, (6,), False),
    ({"t2": 6, "so2": 4}, 12, (2, 3), False),
    ({"se3": 8, "so2": 8}, 20, (4, 3), True),
    ({"se3": 8, "values": False}, 16, (2, 3), True),
    ({"so3": 8, "so2": 4}, 12, (2, 2), True),
    ({"so3": 6, "so3_degree": 1, "so2": 0}, 7, (2, 3), True),
    ({"se3": 4, "so3": 8, "so2": 4, "t2": 3}, 20, (2, 2), True),
]


@cases(("options", "head", "shape", "posed"), CASES)
@cases("prefix", [0, 2])
def test_attention_is_that_of_the_definition(options, head, shape, posed, prefix):
    encoding = create_encoding("gta", dim=2 * head, num_heads=2, **options).double()
    if encoding.se3:
        with torch.no_grad():
            encoding.scale.fill_(0.7)
    grid = Grid(shape, prefix=prefix)
    attrs = {"extrinsic": pose(views=2, batch=3)} if posed else {}
    pos = encoding.prepare(grid.positions().replace(attrs=attrs))
    assert encoding.prepare(pos) is pos
    n = pos.tokens
    q, k, v = torch.randn(3, 3, 2, n, head, dtype=torch.float64)
    cells = list(itertools.product(*map(range, shape)))
    divisor = {"axis": shape, "train": options.get("reference"), "none": [1] * len(shape)}[encoding.normalize]
    expected = torch.zeros_like(v)
    for b in range(3):
        rho = [torch.eye(head, dtype=torch.float64)] * prefix
        for i, cell in enumerate(cells):
            coords = [c / m for c, m in zip(cell, divisor, strict=True)]
            arguments = attrs["extrinsic"][b, i * 2 // len(cells)] if posed else None
            rho.append(representation(encoding, coords, arguments))
        rho = torch.stack(rho)
        inverse = torch.linalg.inv(rho)
        for h in range(2):
            qt = torch.einsum("nji,nj->ni", inverse, q[b, h])
            kt = torch.einsum("nij,nj->ni", rho, k[b, h])
            vt = torch.einsum("nij,nj->ni", rho, v[b, h]) if encoding.values else v[b, h]
            out = (qt @ kt.t() * head**-0.5).softmax(-1) @ vt
            expected[b, h] = torch.einsum("nij,nj->ni", inverse, out) if encoding.values else out
    transform = encoding.transform(pos, 0)
    for backend in ("reference", "sdpa"):
        actual = vispe.attention(q, k, v, transform=transform, backend=backend)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    if prefix:
        for act in (transform.query, transform.key, transform.value, transform.output):
            assert torch.equal(act(q)[:, :, :prefix], q[:, :, :prefix])


def test_images_use_tables_and_not_matrices():
    pos = Grid((3, 4)).positions()
    plain = create_encoding("gta", dim=24, num_heads=2)
    assert isinstance(plain.transform(pos, 0), PairRotation)
    assert isinstance(create_encoding("gta(so2=4)", dim=24, num_heads=2).transform(pos, 0), PairRotation)
    assert not list(plain.parameters())
    assert not plain.per_layer
    assert create_encoding("gta(se3=4)", dim=24, num_heads=2).per_layer


@given(
    h=st.integers(1, 5),
    w=st.integers(1, 5),
    down=st.floats(-3, 3),
    right=st.floats(-3, 3),
    t2=st.sampled_from([0, 3]),
)
@settings(max_examples=20, deadline=None, derandomize=True)
def test_output_is_invariant_to_shifts(h, w, down, right, t2):
    encoding = create_encoding("gta", dim=22, num_heads=2, normalize="none", t2=t2, max_freq=0.3)
    coords = Grid((h, w)).positions().coords.double()
    q, k, v = torch.randn(3, 1, 2, h * w, 11, dtype=torch.float64)
    outs = [
        vispe.attention(q, k, v, transform=encoding.transform(Positions(coords + shift), 0))
        for shift in (0.0, torch.tensor([down, right]))
    ]
    torch.testing.assert_close(*outs, rtol=1e-6, atol=1e-6)


@given(seed=st.integers(0, 1000), scale=st.floats(0.01, 2))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_output_is_invariant_to_a_motion_of_all_cameras(seed, scale):
    encoding = create_encoding("gta", dim=40, num_heads=2, se3=8, so3=8).double()
    with torch.no_grad():
        encoding.scale.fill_(scale)
    q, k, v = torch.randn(3, 1, 2, 6, 20, dtype=torch.float64)
    cameras, motion = pose(seed, views=3), pose(seed + 1, views=1)
    pos = Grid((3, 2)).positions()
    outs = [
        vispe.attention(q, k, v, transform=encoding.transform(pos.replace(attrs={"extrinsic": e}), 0))
        for e in (cameras, cameras @ motion)
    ]
    torch.testing.assert_close(*outs, rtol=1e-6, atol=1e-6)


@cases("options", [{}, {"se3": 8}, {"so3": 8, "t2": 3, "so2": 4}])
def test_dropped_tokens(options):
    encoding = create_encoding("gta", dim=32, num_heads=2, **options)
    attrs = {"extrinsic": pose(views=3, batch=2).float()} if len(options) else {}
    pos = encoding.prepare(Grid((3, 4), prefix=1).positions().replace(attrs=attrs))
    x = torch.randn(2, 2, 13, 16)
    transform = encoding.transform(pos, 0)
    keep = torch.stack([torch.cat([torch.arange(1), 1 + torch.randperm(12)[:5]]) for _ in range(2)])
    take = keep[:, None, :, None].expand(-1, 2, -1, 16)
    subset = encoding.transform(pos.gather(keep), 0)
    for act in ("query", "key", "value", "output"):
        torch.testing.assert_close(
            getattr(subset, act)(x.gather(2, take)), getattr(transform, act)(x).gather(2, take)
        )


@cases("options", [{}, {"se3": 4, "so2": 4, "t2": 3}])
def test_gradients(options):
    encoding = create_encoding("gta", dim=24, num_heads=2, **options).double()
    pos = Grid((2, 3), prefix=1).positions()
    if options:
        pos = pos.replace(attrs={"extrinsic": pose(views=2)})
    q, k, v = (torch.randn(2, 2, 7, 12, dtype=torch.float64, requires_grad=True) for _ in range(3))
    coords = pos.coords.double().requires_grad_()
    scale = torch.tensor([0.4], dtype=torch.float64, requires_grad=True)

    def out(q, k, v, coords, scale):
        if options:
            del encoding.scale
            encoding.scale = scale
        transform = encoding.transform(pos.replace(coords=coords), 0)
        return vispe.attention(q, k, v, transform=transform, backend="reference") * scale

    assert torch.autograd.gradcheck(out, (q, k, v, coords, scale), fast_mode=True)


def test_poses_per_token():
    encoding = create_encoding("gta(se3=8)", dim=32, num_heads=2)
    base, views = Grid((4, 3)).positions(), pose(views=4).float()
    each = vispe.grid.PerToken(views.repeat_interleave(3, 1), (1,))
    one, two = (encoding.transform(base.replace(attrs={"extrinsic": e}), 0) for e in (views, each))
    assert torch.equal(one.k, two.k)


def test_another_size():
    per_axis, trained = (create_encoding("gta", dim=16, num_heads=2, normalize=n) for n in ("axis", "train"))
    large = Grid((6, 8), reference=(3, 4)).positions()
    assert per_axis.coordinates(large)[0, -1].tolist() == pytest.approx([5 / 6, 7 / 8])
    assert trained.coordinates(large)[0, -1].tolist() == pytest.approx([5 / 3, 7 / 4])


@cases(
    ("spec", "message"),
    [
        ("gta(axes=5)", "axes needs an integer from 1 to 3, got axes=5"),
        ("gta(se3=6)", "se3 needs an integer of 0 or more and divisible by 4, got se3=6"),
        ("gta(so3=3)", "so3 needs a multiple of 8 channels, got so3=3"),
        ("gta(so3=8,so3_degree=3)", "so3_degree must be one of 1, 2, got 3"),
        ("gta(so3_degree=1)", "so3_degree=1 has no effect without so3 channels"),
        ("gta(so2=6)", "so2 needs a multiple of 4 channels, got so2=6"),
        ("gta(so2=half)", "so2 needs an integer of 0 or more, got so2='half'"),
        ("gta(se3=half)", "se3 needs an integer of 0 or more and divisible by 4, got se3='half'"),
        ("gta(t2=4)", "t2 needs an integer of 0 or more and divisible by 3, got t2=4"),
        ("gta(t2=3,axes=1)", "t2 needs axes=2, for translations in the plane, got axes=1"),
        ("gta(so2=16,se3=4)", "gta has 16 channels per head, but its groups use 20"),
        ("gta(so2=0)", "its groups use 0"),
        ("gta(values=1)", "values is true or false, got values=1"),
        ("gta(share_freqs=no)", "share_freqs is true or false"),
        ("gta(normalize=max)", "normalize must be one of axis, train, none, got 'max'"),
        ("gta(reference=[3,3])", r"reference=\[3, 3\] has no effect with normalize='axis'"),
        (
            "gta(normalize=train,reference=[3])",
            r"reference needs one number for each of 2 axes, got reference=\[3\]",
        ),
        (
            "gta(max_freq=[1,2,3])",
            r"max_freq needs one number for each of 2 axes, got max_freq=\[1, 2, 3\]",
        ),
        (
            "gta(max_freq=-1)",
            "max_freq needs a number of 0 or more, or a list of numbers of 0 or more, got max_freq=-1",
        ),
        (
            "gta(max_freq=fast)",
            "max_freq needs a number of 0 or more, or a list of numbers of 0 or more, got max_freq='fast'",
        ),
        ("gta(trans_coeff=1)", "trans_coeff=1 has no effect without se3 channels. Use se3="),
        ("gta(se3=4,trans_coeff=small)", "trans_coeff needs a finite number, got trans_coeff='small'"),
    ],
)
def test_option_errors(spec, message):
    with pytest.raises(OptionError, match=message):
        create_encoding(spec, dim=32, num_heads=2)


def test_position_errors():
    encoding = create_encoding("gta(se3=8)", dim=32, num_heads=2)
    pos = Grid((2, 3), prefix=1).positions()
    with pytest.raises(ShapeError, match="gta needs 2-axis positions, got 1 axis"):
        encoding.transform(Grid((4,)).positions(), 0)
    with pytest.raises(
        ShapeError, match=r"needs camera poses, got none\. Put \(b, views, 4, 4\) matrices into"
    ):
        encoding.transform(pos, 0)
    for wrong in (torch.eye(4)[None, None].repeat(1, 4, 1, 1), torch.eye(4)[None], torch.ones(1, 2, 3, 4)):
        with pytest.raises(
            ShapeError, match=r"needs poses \(b, views, 4, 4\) with equally many of the 6 tokens"
        ):
            encoding.prepare(pos.replace(attrs={"extrinsic": wrong}))
    dropped = pos.gather(torch.tensor([[0, 2, 3]])).replace(attrs={"extrinsic": torch.eye(4)[None, None]})
    with pytest.raises(ShapeError, match="set before tokens are dropped"):
        encoding.transform(dropped, 0)


@cases(("normalize", "factor"), [("train", 3.0), ("none", 3.0), ("axis", 1.0)])
def test_spacing_scales_coordinates_that_are_not_relative_to_the_field(normalize, factor):
    encoding = create_encoding("gta", dim=16, num_heads=2, normalize=normalize)
    plain, spaced = (encoding.coordinates(Grid((4, 5), spacing=s).positions()) for s in (None, (3.0, 3.0)))
    torch.testing.assert_close(spaced, factor * plain)
