"""dape against a loop over pairs and windows of keys, and nested specs."""

import itertools
import json

import pytest
import timm
import torch
from torch.nn import functional as F

from tests.cases import cases
from vispe import Grid, attention, create_encoding
from vispe.encodings.registry import parse_spec
from vispe.encodings.spec import spec_to_text
from vispe.errors import OptionError, ShapeError

FACTS = {"dim": 12, "num_heads": 3}


def build(inner="alibi2d(slopes=learned,wrap=false)", grid=(3, 4), **options):
    encoding = create_encoding(
        {"name": "dape", "inner": inner, "width": 5, **options}, **FACTS, grid=grid
    ).double()
    with torch.no_grad():
        for parameter in encoding.mlp2.parameters():
            parameter.normal_()
    return encoding


def content(count):
    return torch.randn(2, 2, 3, count, 4, dtype=torch.float64).requires_grad_().unbind()


def slow(encoding, grid, q, k):
    """Return the bias (b, h, n, n), pair by pair."""
    pos = grid.positions()
    a = encoding.adapted.bias(pos, 0).dense().to(q.dtype).expand(2, 3, -1, -1)
    first, second = encoding.mlp2[0], encoding.mlp2[2]
    x, p, n = torch.cat([q @ k.mT / 2, a], 1), grid.prefix, grid.patches
    cells = list(itertools.product(*map(range, grid.shape)))

    def layer(module, image, i, j):
        if encoding.version == 1:
            return image[..., i, j] @ module.weight.t() + module.bias
        side, total = module.weight.shape[-1], module.bias.expand(2, -1)
        for tap in itertools.product(range(side), repeat=grid.axes):
            cell = tuple(c + t - side // 2 for c, t in zip(cells[j], tap, strict=True))
            if cell in cells:
                total = (
                    total
                    + image[..., i, cells.index(cell)] @ module.weight[(slice(None), slice(None), *tap)].t()
                )
        return total

    def all_pairs(module, image):
        rows = [layer(module, image, i, j) for i in range(n) for j in range(n)]
        return torch.stack(rows, -1).unflatten(-1, (n, n))

    x = x[..., p:, p:]
    x = x.tril() if encoding.causal else x
    out = all_pairs(second, F.leaky_relu(all_pairs(first, x), encoding.negative_slope))
    return a + F.pad(out, (p, 0, p, 0))


@cases(
    ("options", "grid"),
    [
        ({}, Grid((3, 2), 2)),
        ({"inner": "alibi", "negative_slope": 0.3}, Grid((5,), 1)),
        ({"inner": "alibi3d"}, Grid((2, 1, 2), 1)),
        ({"version": 2}, Grid((3, 2), 1)),
        ({"version": 2, "inner": "alibi(slopes=learned)", "causal": True, "kernel": 5}, Grid((5,), 1)),
        ({"version": 2, "inner": "alibi3d", "grid": (2, 2, 2), "kernel": 1}, Grid((2, 1, 2))),
    ],
)
def test_values_and_gradients(options, grid):
    encoding, (q, k) = build(**options), content(grid.tokens)
    actual, expected = (
        encoding.bias(grid.positions(), 0).dense(q=q, k=k, scale=0.5),
        slow(encoding, grid, q, k),
    )
    torch.testing.assert_close(actual, expected)
    cotangent, leaves = torch.randn_like(actual), [q, k, *encoding.parameters()]
    ours = torch.autograd.grad(actual, leaves, cotangent)
    torch.testing.assert_close(ours, torch.autograd.grad(expected, leaves, cotangent))


def test_backends_and_some_heads():
    encoding, pos, (q, k) = build(), Grid((3, 4), 1).positions(), content(13)
    bias, v = encoding.bias(pos, 0), torch.randn(2, 3, 13, 4, dtype=torch.float64)
    expected = ((q @ k.mT) / 2 + bias.dense(q=q, k=k, scale=0.5)).softmax(-1) @ v
    for backend in ("reference", "sdpa"):
        torch.testing.assert_close(attention(q, k, v, bias=bias, backend=backend), expected)
    indices = torch.tensor([[0, 3, 8], [0, 12, 5]])
    rows = torch.arange(2)[:, None]
    gathered = {
        "q": q[rows, :, indices].transpose(1, 2),
        "k": k[rows, :, indices].transpose(1, 2),
        "scale": 0.5,
    }
    dropped = encoding.bias(pos.gather(indices), 0).dense(**gathered)
    for b in range(2):
        torch.testing.assert_close(
            dropped[b], bias.dense(q=q, k=k, scale=0.5)[b][:, indices[b]][:, :, indices[b]]
        )
    part = bias.dense(q=q, k=k, scale=0.5, heads=slice(1, 3))
    torch.testing.assert_close(part, bias.dense(q=q, k=k, scale=0.5)[:, 1:3])


@cases("turns", [1, 2, 3])
def test_rotations_of_the_inner_encoding(turns):
    encoding, pos, (q, k) = build(), Grid((3, 3)).positions(), content(9)
    order = torch.arange(9).reshape(3, 3).rot90(turns).flip(0).flatten()
    dense = encoding.bias(pos, 0).dense(q=q, k=k, scale=0.5)
    rotated = encoding.bias(pos, 0).dense(q=q[:, :, order], k=k[:, :, order], scale=0.5)
    torch.testing.assert_close(rotated, dense[..., order, :][..., order])


def test_nested_specs():
    text = "dape(inner=alibi2d(slopes=learned,wrap=false)+alibi2d.local,width=4)"
    encoding = create_encoding(text, **FACTS)
    assert encoding.inner == "alibi2d(slopes=learned,wrap=false)+alibi2d(normalize=none,wrap=false)"
    rebuilt = create_encoding(json.loads(json.dumps(encoding.config)))
    assert rebuilt.config == encoding.config
    rebuilt.load_state_dict(encoding.state_dict(), strict=True)
    assert create_encoding(spec_to_text([encoding.spec]), **FACTS).config == encoding.config
    terms = parse_spec({"name": "dape", "inner": {"name": "alibi2d", "slopes": "learned"}})
    assert create_encoding(terms[0], **FACTS).inner == "alibi2d(slopes=learned)"
    assert {"adapted.members.0.slope"} <= set(encoding.state_dict())


def test_a_vit_with_skipped_blocks():
    spec = "dape(inner=alibi2d(layers=[0],slopes=learned),width=4)"
    model = timm.create_model("test_vit", pos_embed=spec, img_size=(48, 32), num_classes=3)
    model(torch.randn(2, 3, 48, 32)).square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if "mlp2" in name}
    assert len(gradients) == 4
    assert all(g is not None for g in gradients.values())


def test_errors():
    with pytest.raises(OptionError, match=r"kernel and causal have no effect with version=1"):
        build(causal=True)
    with pytest.raises(OptionError, match="inner needs encodings of kind bias only, got rope_axial"):
        build("rope_axial+alibi2d")
    with pytest.raises(OptionError, match="kernel needs an odd number, got kernel=4"):
        build(version=2, kernel=4)
    with pytest.raises(OptionError, match="inner=alibi2d does not support the requested axes"):
        build("alibi2d", version=2, causal=True)
    with pytest.raises(OptionError, match=r"inner needs a spec, got an instance of alibi2d. Pass its config"):
        build(create_encoding("alibi2d", num_heads=3))
    pos = Grid((3, 4), 1).positions()
    with pytest.raises(ShapeError, match=r"some have been dropped. Use version=1"):
        build(version=2).bias(pos.gather(torch.tensor([[0, 2]])), 0)
    with pytest.raises(ShapeError, match="Pass q, k and scale to dense"):
        build().bias(pos, 0).dense()
