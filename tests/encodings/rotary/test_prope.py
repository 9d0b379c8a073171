"""PRoPE against its definition with one full matrix per token, in float64."""

import itertools

import pytest
import torch

import vispe
from tests.cases import cases
from vispe import Grid, Positions, create_encoding
from vispe.errors import OptionError, ShapeError
from vispe.grid import PerToken


def extrinsics(views, batch=1, seed=0, rigid=True):
    """Return random poses (batch, views, 4, 4), rotations with translations or any invertible affine maps."""
    generator = torch.Generator().manual_seed(seed)
    linear = torch.randn(batch, views, 3, 3, dtype=torch.float64, generator=generator)
    if rigid:
        linear, _ = torch.linalg.qr(linear)
        linear = linear * torch.linalg.det(linear)[..., None, None]
    matrices = torch.eye(4, dtype=torch.float64).repeat(batch, views, 1, 1)
    matrices[..., :3, :3] = linear
    matrices[..., :3, 3] = torch.randn(batch, views, 3, dtype=torch.float64, generator=generator)
    return matrices


def intrinsics(views, batch=1, skew=0.0):
    """Return intrinsics in pixels (batch, views, 3, 3) that differ between axes, views and samples."""
    matrices = torch.eye(3, dtype=torch.float64).repeat(batch, views, 1, 1)
    for b, c in itertools.product(range(batch), range(views)):
        matrices[b, c, 0] = torch.tensor([50.0 + 3 * c, skew, 41.0 - b])
        matrices[b, c, 1, 1:] = torch.tensor([70.0 - 5 * c + b, 22.0 + c])
    return matrices


def matrix_of(token_row, token_column, pose, camera, size, channels, base):
    """Return rho (channels, channels), entry by entry: its inverse acts on keys, its transpose on queries."""
    out = torch.zeros(channels, channels, dtype=torch.float64)
    padded = torch.eye(4, dtype=torch.float64)
    if camera is not None:
        height, width = size
        padded[0, :3] = torch.stack([camera[0, 0] / width, camera[0, 1] / width, camera[0, 2] / width - 0.5])
        padded[1, 1:3] = torch.stack([camera[1, 1] / height, camera[1, 2] / height - 0.5])
    projection = padded @ pose
    for group in range(channels // 8):
        out[4 * group : 4 * group + 4, 4 * group : 4 * group + 4] = projection
    pairs = channels // 8
    for section, coordinate in ((0, token_column), (1, token_row)):
        for j in range(pairs):
            a = torch.tensor(float(coordinate) * base ** (-j / pairs), dtype=torch.float64)
            first = channels // 2 + section * channels // 4 + j
            second = first + pairs
            # the output is rotated by +a
            out[first, first], out[first, second] = a.cos(), -a.sin()
            out[second, first], out[second, second] = a.sin(), a.cos()
    return out


def slow(q, k, v, rho):
    """Return attention with matrices (b, n, d, d): transposed on q, inverted on k and v, unchanged on the output."""
    inverse = torch.linalg.inv(rho)
    q_t = torch.einsum("bnji,bhnj->bhni", rho, q)
    k_t, v_t = (torch.einsum("bnij,bhnj->bhni", inverse, x) for x in (k, v))
    weights = (q_t @ k_t.mT * q.shape[-1] ** -0.5).softmax(-1)
    return torch.einsum("bnij,bhnj->bhni", rho, weights @ v_t)


CASES = [  # channels, (views, rows, columns), intrinsics, base, prefix, rigid, skew
    (8, (1, 3, 2), False, 100.0, 0, True, 0.0),
    (8, (2, 2, 3), True, 100.0, 1, True, 0.0),
    (24, (3, 1, 5), True, 7.0, 2, True, 0.0),
    (16, (2, 5, 1), False, 100.0, 3, False, 0.0),
    (16, (3, 2, 2), True, 100.0, 0, False, 4.0),
]


def rho_of(shape, channels, base, prefix, poses, cameras, size, batch):
    views, rows, columns = shape
    per_sample = []
    for b in range(batch):
        matrices = [torch.eye(channels, dtype=torch.float64)] * prefix
        for c, row, column in itertools.product(range(views), range(rows), range(columns)):
            pose = poses[b % len(poses), c]
            camera = None if cameras is None else cameras[b % len(cameras), c]
            matrices.append(matrix_of(row, column, pose, camera, size, channels, base))
        per_sample.append(torch.stack(matrices))
    return torch.stack(per_sample)


@cases(("channels", "shape", "with_intrinsics", "base", "prefix", "rigid", "skew"), CASES)
@cases("batches", [(1, 1), (3, 1), (3, 3)])
def test_attention_and_gradients(channels, shape, with_intrinsics, base, prefix, rigid, skew, batches):
    encoding = create_encoding("prope", dim=2 * channels, num_heads=2, base=base)
    views, size, batch = shape[0], (48, 80), 3
    poses = extrinsics(views, batches[0], rigid=rigid).requires_grad_()
    cameras = intrinsics(views, batches[1], skew).requires_grad_() if with_intrinsics else None
    attrs = {"extrinsic": poses} | ({"intrinsic": cameras, "image_size": size} if with_intrinsics else {})
    pos = encoding.prepare(Grid(shape, prefix=prefix).positions().replace(attrs=attrs))
    assert encoding.prepare(pos) is pos
    q, k, v = (
        torch.randn(batch, 2, pos.tokens, channels, dtype=torch.float64, requires_grad=True) for _ in range(3)
    )
    rho = rho_of(shape, channels, base, prefix, poses, cameras, size, batch)
    expected = slow(q, k, v, rho)
    transform = encoding.transform(pos, 0)
    leaves = [q, k, v, poses] + ([cameras] if with_intrinsics else [])
    cotangent = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, leaves, cotangent)
    for backend in ("reference", "sdpa"):
        out = vispe.attention(q, k, v, transform=transform, backend=backend)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        ours = torch.autograd.grad(out, leaves, cotangent, retain_graph=True)
        torch.testing.assert_close(ours[:4], gradients[:4], rtol=1e-4, atol=1e-4)
        if with_intrinsics:  # the definition reads 5 of the 9 entries of K
            read = torch.tensor([[1, 1, 1], [0, 1, 1], [0, 0, 0]], dtype=torch.bool)
            torch.testing.assert_close(ours[4][..., read], gradients[4][..., read], rtol=1e-4, atol=1e-4)
    for name in ("query", "key", "value", "output"):
        assert torch.equal(getattr(transform, name)(q)[:, :, :prefix], q[:, :, :prefix])


def test_a_second_size_of_the_same_encoding():
    encoding = create_encoding("prope", dim=16, num_heads=1)
    for shape in ((2, 3, 2), (3, 2, 5), (2, 3, 2)):
        poses = extrinsics(shape[0], seed=shape[2])
        pos = Grid(shape, prefix=1).positions().replace(attrs={"extrinsic": poses})
        q, k, v = torch.randn(3, 1, 1, pos.tokens, 16, dtype=torch.float64)
        expected = slow(q, k, v, rho_of(shape, 16, 100.0, 1, poses, None, None, 1))
        out = vispe.attention(q, k, v, transform=encoding.transform(pos, 0))
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@cases(("width", "pairs", "groups"), [(4, 1, 0), (7, 1, 0), (8, 1, 1), (12, 1, 2), (21, 2, 3)])
def test_widths_that_are_not_multiples_of_8(width, pairs, groups):
    encoding = create_encoding("prope", dim=width, num_heads=1).double()
    attrs = {"extrinsic": extrinsics(2)} if groups else {}
    pos = Grid((2, 3, 2) if groups else (3, 4)).positions().replace(attrs=attrs)
    x = torch.randn(1, 1, 12, width, dtype=torch.float64)
    query = encoding.transform(pos, 0).query(x)
    rows, columns = pos.coords[0, :, -2:].double().unbind(-1)
    if groups:
        poses = attrs["extrinsic"][0].repeat_interleave(6, 0)
        for g in range(groups):
            part = slice(4 * g, 4 * g + 4)
            torch.testing.assert_close(
                query[0, 0, :, part], torch.einsum("nji,nj->ni", poses, x[0, 0, :, part])
            )
    for section, coordinate in enumerate((columns, rows)):
        start = 4 * groups + 2 * pairs * section
        for j in range(pairs):
            a, b = x[0, 0, :, start + j], x[0, 0, :, start + pairs + j]
            angle = coordinate * 100.0 ** (-j / pairs)
            actual = query[0, 0, :, start + j], query[0, 0, :, start + pairs + j]
            expected = a * angle.cos() + b * angle.sin(), b * angle.cos() - a * angle.sin()
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    end = 4 * groups + 4 * pairs
    assert torch.equal(query[..., end:], x[..., end:])


def test_one_view_without_camera():
    """P P^-1 cancels, so an image has the same output with any camera and without one."""
    encoding = create_encoding("prope", dim=16, num_heads=1)
    q, k, v = torch.randn(3, 2, 1, 12, 16, dtype=torch.float64)
    plain = Grid((3, 4)).positions()
    attrs = {"extrinsic": extrinsics(1, 2), "intrinsic": intrinsics(1, 2), "image_size": [30, 40]}
    outs = [
        vispe.attention(q, k, v, transform=encoding.transform(pos, 0))
        for pos in (plain, plain.replace(attrs=attrs))
    ]
    torch.testing.assert_close(*outs, rtol=1e-6, atol=1e-6)
    assert not list(encoding.parameters())


@cases("seed", range(5))
def test_invariant_under_a_change_of_the_world_frame(seed):
    encoding = create_encoding("prope", dim=32, num_heads=2)
    q, k, v = torch.randn(3, 1, 2, 12, 16, dtype=torch.float64)
    pos, poses = Grid((3, 2, 2)).positions(), extrinsics(3, seed=seed)
    cameras = {"intrinsic": intrinsics(3), "image_size": (32, 64)}
    outs = [
        vispe.attention(
            q, k, v, transform=encoding.transform(pos.replace(attrs={"extrinsic": e, **cameras}), 0)
        )
        for e in (poses, poses @ extrinsics(1, seed=seed + 9), poses.flip(1))
    ]
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(outs[0], outs[2], atol=1e-2)


def test_dropped_tokens():
    encoding = create_encoding("prope", dim=16, num_heads=1)
    attrs = {"extrinsic": extrinsics(3, 2), "intrinsic": intrinsics(3), "image_size": (20, 30)}
    pos = encoding.prepare(Grid((3, 2, 2), prefix=1).positions().replace(attrs=attrs))
    keep = torch.stack([torch.cat([torch.arange(1), 1 + torch.randperm(12)[:5]]) for _ in range(2)])
    x = torch.randn(2, 1, 13, 16)
    taken = keep[:, None, :, None].expand(-1, -1, -1, 16)
    full, subset = encoding.transform(pos, 0), encoding.transform(pos.gather(keep), 0)
    for name in ("query", "key", "value", "output"):
        torch.testing.assert_close(
            getattr(subset, name)(x.gather(2, taken)), getattr(full, name)(x).gather(2, taken)
        )


def test_cameras_per_token_and_free_coordinates():
    encoding = create_encoding("prope", dim=16, num_heads=1)
    grid, poses, cameras = Grid((2, 3, 2)).positions(), extrinsics(2), intrinsics(2)
    per_view = {"extrinsic": poses, "intrinsic": cameras, "image_size": (20, 30)}
    per_token = {
        "extrinsic": PerToken(poses.repeat_interleave(6, 1), (1,)),
        "intrinsic": PerToken(cameras.repeat_interleave(6, 1), (1,)),
        "image_size": (20, 30),
    }
    free = Positions(grid.coords[..., 1:])
    x = torch.randn(1, 1, 12, 16)
    expected = encoding.transform(grid.replace(attrs=per_view), 0).query(x)
    for pos, attrs in ((grid, per_token), (free, per_view), (free, per_token)):
        assert torch.equal(encoding.transform(pos.replace(attrs=attrs), 0).query(x), expected)
    # intrinsics that are already divided by the size of the image
    unit = cameras / torch.tensor([30.0, 20.0, 1.0], dtype=torch.float64)[:, None]
    attrs = {"extrinsic": poses, "intrinsic": unit, "image_size": (1, 1)}
    torch.testing.assert_close(encoding.transform(grid.replace(attrs=attrs), 0).query(x), expected)


def test_large_world_coordinates_in_float32():
    """P^-1 is computed in float64: cameras of one position far from the world origin are accurate."""
    encoding = create_encoding("prope", dim=8, num_heads=1)
    poses = extrinsics(2)
    poses[..., :3, 3] *= 300
    pos = Grid((2, 1, 2)).positions().replace(attrs={"extrinsic": poses.float()})
    matrices = encoding.projections(pos).double()
    key = encoding.transform(pos, 0).key(torch.eye(8).expand(1, 1, 4, 8, 8)[:, :, :, :, 0])[0, 0, :, :4]
    torch.testing.assert_close(key.double(), torch.linalg.inv(matrices)[0, :, :, 0], rtol=1e-5, atol=1e-6)


@cases("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_its_dtype(dtype):
    encoding = create_encoding("prope", dim=16, num_heads=1).to(dtype)
    attrs = {"extrinsic": extrinsics(2).float(), "intrinsic": intrinsics(2).float(), "image_size": (48, 80)}
    pos = Grid((2, 2, 3)).positions().replace(attrs=attrs)
    q, k, v = torch.randn(3, 1, 1, 12, 16)
    transform = encoding.transform(pos, 0)
    exact = vispe.attention(q, k, v, transform=transform)
    out = vispe.attention(q.to(dtype), k.to(dtype), v.to(dtype), transform=transform)
    assert out.dtype == dtype
    assert (out - exact).abs().max() < 0.05 * exact.abs().max()


def test_option_errors():
    with pytest.raises(OptionError, match=r"prope: head_dim must be at least 4, got 3\."):
        create_encoding("prope", dim=6, num_heads=2)
    with pytest.raises(OptionError, match="base needs a number above 0, got base=0"):
        create_encoding("prope(base=0)", dim=16, num_heads=2)


@cases(
    ("shape", "attrs", "message"),
    [
        ((2, 2, 3), {}, r"prope needs 2-axis positions, got 3 axes"),
        (
            (4, 3),
            {"extrinsic": extrinsics(2)},
            r"within each of 2 views, got .*Use .*Grid\(\(2, rows, columns\)\)",
        ),
        ((3, 2, 2), {"extrinsic": extrinsics(2)}, r"within each of 2 views"),
        ((5,), {"extrinsic": extrinsics(1)}, r"prope needs 2-axis positions, got 1 axis"),
        (
            (2, 2, 3),
            {"extrinsic": extrinsics(5)},
            r"needs poses \(b, views, 4, 4\) with equally many of the 12",
        ),
        ((2, 2, 3), {"extrinsic": torch.ones(1, 2, 3, 4)}, r"needs poses \(b, views, 4, 4\)"),
        ((2, 2, 3), {"extrinsic": extrinsics(2), "intrinsic": torch.eye(4)[None, None]}, r"needs intrinsics"),
        (
            (2, 2, 3),
            {"extrinsic": extrinsics(2), "intrinsic": intrinsics(3), "image_size": (4, 4)},
            r"one pose and one intrinsic matrix per view, got extrinsic and intrinsic of 2 and 3 views",
        ),
        (
            (2, 3),
            {"intrinsic": intrinsics(1), "image_size": (4, 4)},
            "needs the poses of cameras with intrinsics",
        ),
        (
            (2, 2, 3),
            {"extrinsic": extrinsics(2), "intrinsic": intrinsics(2)},
            "size of the images .* got None",
        ),
        (
            (2, 2, 3),
            {"extrinsic": extrinsics(2), "intrinsic": intrinsics(2), "image_size": (4, 0)},
            r"size of the images for intrinsics in pixels, got \(4, 0\)\. Put \(height, width\)",
        ),
        ((2, 2, 3), {"extrinsic": extrinsics(2) * 0}, "invertible matrices .*'extrinsic'.* singular"),
        ((2, 2, 3), {"extrinsic": extrinsics(2) / 0}, "invertible matrices .*'extrinsic'.* non-finite"),
    ],
)
def test_camera_errors(shape, attrs, message):
    encoding = create_encoding("prope", dim=16, num_heads=2)
    with pytest.raises(ShapeError, match=message):
        encoding.transform(encoding.prepare(Grid(shape).positions().replace(attrs=attrs)), 0)


def test_heads_too_narrow_for_cameras():
    encoding = create_encoding("prope", dim=8, num_heads=2)
    with pytest.raises(ShapeError, match="prope needs head_dim of 8 or more for cameras, got 4"):
        encoding.transform(Grid((2, 2, 3)).positions().replace(attrs={"extrinsic": extrinsics(2)}), 0)


def test_cameras_after_dropped_tokens_raise():
    encoding = create_encoding("prope", dim=16, num_heads=2)
    pos = (
        Grid((2, 2, 3)).positions().gather(torch.tensor([[0, 5]])).replace(attrs={"extrinsic": extrinsics(2)})
    )
    with pytest.raises(ShapeError, match="before tokens are dropped"):
        encoding.transform(pos, 0)


@pytest.mark.compiles
@pytest.mark.slow
@pytest.mark.parametrize("prepared", [False, True])
def test_cameras_compile_as_one_graph(prepared):
    encoding = create_encoding("prope", dim=8, num_heads=1)
    attrs = {"extrinsic": extrinsics(2).float(), "intrinsic": intrinsics(2).float(), "image_size": (20, 30)}
    pos = Grid((2, 1, 3)).positions().replace(attrs=attrs)
    pos = encoding.prepare(pos) if prepared else pos
    q = torch.randn(1, 1, 6, 8)

    def run(q):
        return vispe.attention(q, q, q, transform=encoding.transform(pos, 0))

    torch.testing.assert_close(torch.compile(run, backend="eager", fullgraph=True)(q), run(q))
