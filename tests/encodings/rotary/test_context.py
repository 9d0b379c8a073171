"""Content-dependent rotations, Selective RoPE and CARoPE, against their definitions token by token."""

import itertools
import math

import pytest
import timm
import torch
from torch.nn import functional as F

import vispe
from tests.cases import cases
from vispe import Grid, Positions, attention, create_encoding
from vispe.errors import OptionError, ShapeError

DIM, HEADS, PAIRS = 12, 2, 3
SCANS = [
    "selective_rope.scan",
    "selective_rope.scan(projection=full,gate=true)",
    "selective_rope.scan(rank=2,filter=difference,drift=true)",
    "selective_rope.scan(gate=true,drift=true)",
    "carope.scan",
]
FIELDS = ["selective_rope", "selective_rope(projection=full)", "carope"]


def build(spec, **options):
    """Return an encoding in float64 with random parameters."""
    encoding = create_encoding(spec, dim=DIM, num_heads=HEADS, **options).double()
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return encoding


def unit(encoding, x):
    """Return one token (d,) with the part of each head at length 1, (h, d / h)."""
    parts = x.reshape(HEADS, -1)
    return torch.stack([p / (p @ p + encoding.eps).sqrt() for p in parts])


def phases(encoding, x, h):
    """Return W x~ of one token and head, (pairs,)."""
    if encoding.name == "carope":
        rise = F.softplus(encoding.frequency.weight[h] @ x + encoding.frequency.bias[h])
        return torch.stack([(1 / (1 + rise)) ** (c + 1) for c in range(PAIRS)])
    parts = unit(encoding, x)
    if encoding.weight is None:
        return (encoding.up.weight @ (encoding.down.weight @ parts.flatten()))[h * PAIRS : (h + 1) * PAIRS]
    weight = encoding.weight[h]
    if encoding.scalar is not None:
        weight = torch.stack([c / c.norm() for c in weight.T], 1) * encoding.scalar[h]
    return parts[h] @ weight


def scanned(encoding, x, prefix):
    """Return angles (h, n, pairs) of the tokens (n, d) of one sequence."""
    angles = x.new_zeros(HEADS, len(x), PAIRS)
    for h in range(HEADS):
        phi = [phases(encoding, token, h) for token in x[prefix:]]
        total = x.new_zeros(PAIRS)
        for t in range(len(phi)):
            step = phi[t]
            if encoding.name == "selective_rope":
                before = [phi[t - s] if t >= s else torch.zeros_like(step) for s in range(4)]
                if encoding.taps is None:
                    step = before[0] - before[1]
                else:
                    taps = encoding.taps[h * PAIRS : (h + 1) * PAIRS]
                    step = sum(taps[:, 3 - s] * before[s] for s in range(4))
                if encoding.drift_log is not None:
                    step = step + encoding.drift_log[h].exp()
                if encoding.gate_proj is not None:
                    parts = unit(encoding, x[prefix + t]).flatten()
                    step = (
                        step * (encoding.gate_proj.weight[h] @ parts + encoding.gate_proj.bias[h]).sigmoid()
                    )
            total = total + step
            angles[h, prefix + t] = total * (encoding.temperature if encoding.name == "selective_rope" else 1)
    return angles


def field(encoding, x, grid):
    """Return angles (h, n, pairs) of the tokens (n, d) of one grid."""
    counts = [PAIRS // grid.axes + (i < PAIRS % grid.axes) for i in range(grid.axes)]
    axis_of = [(a, c, n) for a, n in reversed([*enumerate(counts)]) for c in range(n)]
    angles = x.new_zeros(HEADS, len(x), PAIRS)
    cells = enumerate(itertools.product(*map(range, grid.shape)), grid.prefix)
    for h, (t, cell) in itertools.product(range(HEADS), [*cells]):
        for pair, (axis, c, n) in enumerate(axis_of):
            token_angles = phases(encoding, x[t], h)
            if encoding.name == "carope":
                rise = F.softplus(encoding.frequency.weight[h] @ x[t] + encoding.frequency.bias[h])
                delta = math.pi * ((1 / (1 + rise)) ** (c + 1) - encoding.base ** (-(c + 1) / PAIRS))
            else:
                delta = math.pi * token_angles[pair].tanh()
            angles[h, t, pair] = cell[axis] * encoding.base ** (-c / n) + delta
    return angles


def rotated(angle, x, layout):
    a, b = x.chunk(2, -1) if layout == "half" else (x[..., 0::2], x[..., 1::2])
    parts = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
    return torch.cat(parts, -1) if layout == "half" else torch.stack(parts, -1).flatten(-2)


def same_with_gradients(encoding, grid, slow):
    pos = Positions(grid.positions().coords.double(), grid.positions().spatial, grid=grid)
    x = torch.randn(2, grid.tokens, DIM, dtype=torch.float64, requires_grad=True)
    q = torch.randn(2, HEADS, grid.tokens, 2 * PAIRS, dtype=torch.float64, requires_grad=True)
    expected = rotated(torch.stack([slow(encoding, sample) for sample in x]), q, encoding.layout)
    leaves, cotangent = [q, x, *encoding.parameters()], torch.randn_like(q)
    for side in ("query", "key"):
        actual = getattr(encoding.transform(pos, 0, x), side)(q)
        assert torch.equal(actual[:, :, : grid.prefix], q[:, :, : grid.prefix])
        grads = [torch.autograd.grad(y, leaves, cotangent, retain_graph=True) for y in (actual, expected)]
        torch.testing.assert_close((actual, grads[0]), (expected, grads[1]))


@cases("spec", SCANS)
@cases(("n", "prefix"), [(6, 0), (3, 2)])
def test_scans(spec, n, prefix):
    layout = "half" if prefix else "interleaved"
    same_with_gradients(
        build(spec, layout=layout), Grid((n,), prefix=prefix), lambda e, x: scanned(e, x, prefix)
    )


@cases("spec", FIELDS)
@cases(("shape", "prefix"), [((2, 3), 2), ((4,), 0), ((1, 2, 2), 1)])
def test_fields(spec, shape, prefix):
    grid = Grid(shape, prefix=prefix)
    layout = "half" if prefix else "interleaved"
    same_with_gradients(build(spec, layout=layout, base=7.0), grid, lambda e, x: field(e, x, grid))


@cases("spec", FIELDS)
def test_fields_start_as_rope_and_all_parameters_learn(spec):
    encoding = create_encoding(spec, dim=16, num_heads=2)
    pos = Grid((3, 4), prefix=1).positions()
    x, (q, k) = torch.randn(2, 13, 16), torch.randn(2, 2, 2, 13, 8)
    rope = create_encoding("rope_axial", dim=16, num_heads=2, layout="half").transform(pos, 0)
    torch.testing.assert_close(encoding.transform(pos, 0, x).query(q), rope.query(q), rtol=1e-5, atol=1e-5)
    optimiser = torch.optim.SGD(encoding.parameters(), lr=0.1)
    for _ in range(2):
        optimiser.zero_grad()
        transform = encoding.transform(pos, 0, x)
        (transform.query(q) @ transform.key(k).mT).backward(torch.randn(2, 2, 13, 13))
        optimiser.step()
    assert all((p.grad != 0).all() for p in encoding.parameters())


@cases("spec", FIELDS)
def test_fields_with_offsets_and_dropped_tokens(spec):
    encoding = build(spec)
    coords, x = torch.randn(7, 2, dtype=torch.float64), torch.randn(2, 7, DIM, dtype=torch.float64)
    q, k = torch.randn(2, 2, HEADS, 7, 6, dtype=torch.float64)
    turns = [encoding.transform(Positions(coords + s), 0, x) for s in (0.0, torch.tensor([3.7, -20.1]))]
    torch.testing.assert_close(*(transform.query(q) @ transform.key(k).mT for transform in turns))
    pos = Grid((2, 3), prefix=1).positions()
    full = encoding.transform(pos, 0, x)
    keep = torch.tensor([[0, 6, 3], [0, 1, 5]])
    gathered = torch.stack([x[i, keep[i]] for i in range(2)])
    subset = encoding.transform(pos.gather(keep), 0, gathered).query(
        torch.stack([q[i][:, keep[i]] for i in range(2)])
    )
    for i in range(2):
        torch.testing.assert_close(subset[i], full.query(q)[i][:, keep[i]])


@cases("spec", [SCANS[3], SCANS[4], *FIELDS])
def test_backends_and_half_precision(spec):
    encoding = build(spec).float()
    pos = Grid((8,), prefix=1).positions()
    x = torch.randn(2, 9, DIM)
    q, k, v = torch.randn(3, 2, HEADS, 9, 6)
    transform = encoding.transform(pos, 0, x)
    outs = [attention(q, k, v, transform=transform, backend=b) for b in ("reference", "sdpa")]
    torch.testing.assert_close(*outs)
    with torch.autocast("cpu", torch.bfloat16):  # angles are not rounded
        torch.testing.assert_close(encoding.transform(pos, 0, x).cos, transform.cos)
    low = encoding.bfloat16().transform(pos, 0, x.bfloat16())
    assert low.cos.dtype == torch.float32
    torch.testing.assert_close(low.cos, transform.cos, rtol=0, atol=0.2)


def test_a_scan_is_causal():
    for spec in SCANS:
        encoding = build(spec)
        pos, x = Grid((6,)).positions(), torch.randn(1, 6, DIM, dtype=torch.float64)
        later = x.clone()
        later[:, 4:] = 0
        one, two = (encoding.transform(pos, 0, t).sin for t in (x, later))
        assert torch.equal(one[:, :, :4], two[:, :, :4])
        assert not torch.allclose(one[:, :, 4:], two[:, :, 4:])


def test_heads_of_another_width():
    encoding = create_encoding("selective_rope", dim=DIM, num_heads=HEADS, head_dim=8)
    transform = encoding.transform(Grid((2, 3)).positions(), 0, torch.randn(2, 6, DIM))
    assert transform.query(torch.randn(2, HEADS, 6, 8)).shape == (2, HEADS, 6, 8)
    assert transform.cos.shape == (2, HEADS, 6, 4)


@cases("spec", ["selective_rope", "carope"])
def test_a_vit(spec):
    model = timm.create_model("test_vit", pos_embed=spec, img_size=(48, 64))
    out = model(torch.randn(2, 3, 48, 64))
    out.backward(torch.randn_like(out))
    last = "up.weight" if spec == "selective_rope" else "frequency.weight"
    grads = [p.grad for name, p in model.named_parameters() if name.endswith(last)]
    assert grads
    assert all(g.abs().sum() > 0 for g in grads)
    layer = vispe.Attention(DIM, HEADS, f"{spec}.scan")
    assert layer(torch.randn(1, 6, DIM), (6,)).isfinite().all()


@cases(
    ("spec", "message"),
    [
        (
            "selective_rope(gate=true)",
            "filter, gate and drift have no effect with form='field'. Omit them, or use form='scan'",
        ),
        ("selective_rope(projection=full,rank=3)", "rank=3 has no effect with projection='full'"),
        ("selective_rope.scan(spacing=[2])", r"spacing=\[2\] has no effect with form='scan'"),
        ("selective_rope(head_dim=3)", "head_dim needs an integer above 0 and divisible by 2"),
        ("carope(base=1)", "carope needs a base above 1"),
        ("carope(form=sum)", "form must be one of field, scan"),
    ],
)
def test_option_errors(spec, message):
    with pytest.raises(OptionError, match=message):
        create_encoding(spec, dim=DIM, num_heads=HEADS)


def test_shape_errors():
    field, scan = (create_encoding(spec, dim=DIM, num_heads=HEADS) for spec in ("carope", "carope.scan"))
    pos, x = Grid((6,)).positions(), torch.randn(1, 6, DIM)
    with pytest.raises(ShapeError, match=r"carope reads the tokens and needs x \(b, 6, 12\), got none"):
        field.transform(pos, 0)
    with pytest.raises(ShapeError, match=r"got \(1, 5, 12\)"):
        field.transform(pos, 0, x[:, 1:])
    with pytest.raises(
        ShapeError, match="carope with form='scan' needs 1 axis, along which it sums, got 2 axes"
    ):
        scan.transform(Grid((2, 3)).positions(), 0, x)
    with pytest.raises(ShapeError, match=r"needs all tokens of a sequence.* dropped"):
        scan.transform(pos.gather(torch.tensor([[0, 2]])), 0, x[:, :2])


@cases(
    "spec", ["selective_rope(form=scan)", "selective_rope(form=scan,filter=difference)", "carope(form=scan)"]
)
def test_a_scan_skips_tokens_without_a_position(spec):
    encoding, x = (
        create_encoding(spec, dim=12, num_heads=2).double(),
        torch.randn(2, 7, 12, dtype=torch.float64),
    )
    spatial = torch.tensor([[1, 0, 1, 1, 0, 0, 1], [0, 1, 1, 0, 1, 1, 1]]).bool()
    q = torch.randn(2, 2, 7, 6, dtype=torch.float64)
    pos = Positions(torch.arange(7.0)[None, :, None].expand(2, 7, 1), spatial)
    rotated = encoding.transform(pos, 0, x).query(q)
    for b, at in enumerate(spatial):
        spatial_positions = Positions(torch.arange(float(at.sum()))[None, :, None])
        short = encoding.transform(spatial_positions, 0, x[b : b + 1, at]).query(q[b : b + 1, :, at])
        torch.testing.assert_close(rotated[b][:, at], short[0])
        torch.testing.assert_close(rotated[b][:, ~at], q[b][:, ~at])
