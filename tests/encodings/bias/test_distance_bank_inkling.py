"""Logits of distance_bank with the options of Inkling, against a loop over pairs."""

import math

import pytest
import timm
import torch

import vispe
from tests.cases import cases
from vispe import Grid, Positions, attention, create_encoding
from vispe.encodings.attention_layer import attend
from vispe.encodings.compose import bias_of, transform_of
from vispe.errors import OptionError, ShapeError

DIM, HEADS, WIDTH, BASIS = 10, 4, 6, 3
FACTS = {"dim": DIM, "num_heads": HEADS, "head_dim": WIDTH}


def build(**options):
    """Return the encoding in float64 with parameters away from their start."""
    encoding = create_encoding({"name": "distance_bank", "basis": BASIS, **options}, **FACTS).double()
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter += torch.randn_like(parameter)
    return encoding


def slow_logits(encoding, x, q, k, layer, prefix):
    """Return the logits (b, h, n, n) of a causal sequence before any mask, pair by pair."""
    weight, bank = encoding.gates.weight.unflatten(0, (HEADS, BASIS)), encoding.distance_bank
    reach = encoding.max_dist[layer] if isinstance(encoding.max_dist, tuple) else encoding.max_dist
    grows = encoding.log_floor is not None and layer in (encoding.log_layers or range(99))
    factor = 1 / WIDTH if encoding.scale == "inverse" else WIDTH**-0.5
    batch, n, rows = x.shape[0], x.shape[1], []
    for i in range(n):
        tau = 1 + encoding.log_alpha * math.log(max((i + 1) / encoding.log_floor, 1)) if grows else 1.0
        gates = torch.einsum("hrd,bd->bhr", weight, x[:, i])
        if encoding.gate_bias:
            gates = gates + encoding.gates.bias.unflatten(0, (HEADS, BASIS))
        row = []
        for j in range(n):
            added = x.new_zeros(batch, HEADS)
            if min(i, j) >= prefix and 0 <= i - j < reach:
                added = gates @ bank[:, i - j]
            row.append(tau * (factor * (q[:, :, i] * k[:, :, j]).sum(-1) + added))
        rows.append(torch.stack(row, -1))
    return torch.stack(rows, -2)


CASES = [
    ({"scale": "inverse", "gate_bias": False, "max_dist": 5}, 9, 0, 0),
    ({"log_floor": 4, "max_dist": 16}, 10, 0, 0),
    ({"scale": "inverse", "gate_bias": False, "log_floor": 2.5, "log_alpha": 0.7, "max_dist": 4}, 7, 0, 0),
    ({"scale": "inverse", "log_floor": 3, "log_layers": [1], "max_dist": [2, 6]}, 8, 0, 0),
    ({"scale": "inverse", "log_floor": 3, "log_layers": [1], "max_dist": [2, 6]}, 8, 1, 0),
    ({"scale": "inverse", "log_floor": 3, "max_dist": [2, 6, 3]}, 5, 2, 2),
    ({"log_floor": 100}, 1, 0, 0),
]


@cases(("options", "n", "layer", "prefix"), CASES)
def test_logits_and_gradients(options, n, layer, prefix):
    encoding = build(causal=True, **options)
    for length in (n, n + 3):
        pos, tokens = Grid((length,), prefix=prefix).positions(), length + prefix
        x, q, k, v = (
            torch.randn(size, dtype=torch.float64, requires_grad=True)
            for size in ((2, tokens, DIM), *[(2, HEADS, tokens, WIDTH)] * 3)
        )
        logits = slow_logits(encoding, x, q, k, layer, prefix)
        causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        expected = logits.masked_fill(~causal, -torch.inf).softmax(-1) @ v
        # a single token attends to itself whatever its logit is
        leaves = [x, q, k, v, *encoding.parameters()]
        cotangent = torch.randn_like(expected)
        gradients = torch.autograd.grad(expected, leaves, cotangent, materialize_grads=True)
        for backend in ("reference", "sdpa"):
            out = attend(q, k, v, [encoding], pos, layer, x, is_causal=True, backend=backend)
            torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
            actual = torch.autograd.grad(out, leaves, cotangent, materialize_grads=True)
            torch.testing.assert_close(actual, gradients, rtol=1e-5, atol=1e-6)


def test_grouped_keys_share_no_bias():
    encoding = build(causal=True, scale="inverse", max_dist=4, log_floor=2)
    pos, x = Grid((7,)).positions(), torch.randn(2, 7, DIM, dtype=torch.float64)
    q, k = (torch.randn(2, h, 7, WIDTH, dtype=torch.float64) for h in (HEADS, 2))
    repeated = k.repeat_interleave(2, 1)
    expected = slow_logits(encoding, x, q, repeated, 0, 0).softmax(-1) @ repeated
    out = attend(q, k, k, [encoding], pos, 0, x, enable_gqa=True)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


def test_the_bias_of_one_block_has_its_extent():
    encoding = build(causal=True, max_dist=[2, 5], depth=2)
    pos, x = Grid((6,)).positions(), torch.randn(1, 6, DIM, dtype=torch.float64)
    near, far = (encoding.bias(pos, layer, x).dense() for layer in (0, 1))
    offsets = torch.arange(6)[:, None] - torch.arange(6)
    for dense, extent in ((near, 2), (far, 5)):
        inside = (offsets >= 0) & (offsets < extent)
        assert (dense[..., inside] != 0).all()
        assert (dense[..., ~inside] == 0).all()
    shared = (offsets >= 0) & (offsets < 2)
    assert torch.equal(near[..., shared], far[..., shared])


def test_positions_of_a_decoding_step_are_absolute():
    """The last tokens, at their coordinates, have the same growth and bias as in the full sequence."""
    encoding = build(causal=True, scale="inverse", log_floor=3, max_dist=4)
    x = torch.randn(1, 9, DIM, dtype=torch.float64)
    full = Grid((9,)).positions()
    last = Positions(torch.arange(6.0, 9.0)[:, None])
    last_positions = full.gather(torch.tensor([[6, 7, 8]]))
    for pos in (last, last_positions):
        torch.testing.assert_close(encoding.growth(pos, 0), encoding.growth(full, 0)[:, 6:])
        torch.testing.assert_close(
            encoding.bias(pos, 0, x[:, 6:]).dense(), encoding.bias(full, 0, x).dense()[..., 6:, 6:]
        )


@cases("over", ["distance", "offset"])
def test_an_image_with_an_extent_per_block(over):
    encoding = build(over=over, scale="inverse", max_dist=[3, 2])
    pos, x = Grid((3, 4), prefix=1).positions(), torch.randn(2, 13, DIM, dtype=torch.float64)
    cells = pos.coords[0, 1:].double()
    for layer, extent in ((0, 3), (1, 2)):
        dense = encoding.bias(pos, layer, x).dense()[:, :, 1:, 1:]
        step = cells[:, None] - cells
        size = step.abs().amax(-1) if over == "offset" else step.norm(dim=-1).round()
        assert (dense[..., size >= extent] == 0).all()
        assert (dense[..., size < extent] != 0).all()
    q, k = torch.randn(2, 2, HEADS, 13, WIDTH, dtype=torch.float64)
    out = attend(q, k, k, [encoding], pos, 0, x)
    logits = q @ k.mT / WIDTH + encoding.bias(pos, 0, x).dense()
    torch.testing.assert_close(out, logits.softmax(-1) @ k, rtol=1e-6, atol=1e-6)


def test_the_factor_precedes_rotations_and_is_not_part_of_other_biases():
    facts = {"dim": 32, "num_heads": 4, "grid": (3, 4)}
    bank = create_encoding("distance_bank(scale=inverse,basis=3)", **facts)
    rope, alibi = create_encoding("rope_axial", **facts), create_encoding("alibi2d", **facts)
    pos, x = Grid((3, 4)).positions(), torch.randn(1, 12, 32)
    q, k, v = torch.randn(3, 1, 4, 12, 8)
    rotation = rope.transform(pos, 0)
    logits = rotation.query(q) @ rotation.key(k).mT / 8
    logits = logits + bank.bias(pos, 0, x).dense() + alibi.bias(pos, 0).dense()
    torch.testing.assert_close(attend(q, k, v, [bank, rope, alibi], pos, 0, x), logits.softmax(-1) @ v)
    parts = create_encoding("distance_bank(scale=inverse)+rope_axial+alibi2d", **facts)
    assert parts.transform(pos, 0).query(q).shape == q.shape
    assert transform_of([alibi], pos, 0) is None
    assert bias_of([bank], pos, 0, x).dense().shape == (1, 4, 12, 12)


def test_the_preset():
    encoding = create_encoding("distance_bank.inkling", **FACTS)
    assert {name: tuple(p.shape) for name, p in encoding.named_parameters()} == {
        "gates.weight": (HEADS * 16, DIM),
        "distance_bank": (16, 1024),
    }
    assert encoding.growth(Grid((3,)).positions(), 0) is None


def test_a_vit_and_a_checkpoint():
    spec = "distance_bank(basis=3,max_dist=[2,4,3,6,2,2],gate_bias=false,scale=inverse)"
    torch.manual_seed(0)
    model = timm.create_model("test_vit", pos_embed=spec, img_size=(48, 32), num_classes=3)
    image = torch.randn(2, 3, 48, 32)
    model(image).square().sum().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "distance_bank" in name)
    other = timm.create_model("test_vit", pos_embed=spec, img_size=(48, 32), num_classes=3)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.eval()(image), model.eval()(image))
    plain = timm.create_model(
        "test_vit", pos_embed=spec.replace("inverse", "sqrt"), img_size=(48, 32), num_classes=3
    )
    missing = plain.load_state_dict(dict(model.state_dict()), strict=False)
    assert not missing.missing_keys
    assert not torch.allclose(plain.eval()(image), model(image))


def test_attention_layer_in_half_precision():
    layer = vispe.Attention(
        24, 4, "distance_bank(causal=true,log_floor=2,scale=inverse,max_dist=3)"
    ).bfloat16()
    out = layer(torch.randn(1, 7, 24, dtype=torch.bfloat16), (7,))
    assert out.dtype == torch.bfloat16
    assert out.isfinite().all()


@cases(
    ("options", "message"),
    [
        (
            {"log_floor": 4},
            "log_floor=4 reads the position of a query in a causal sequence, got causal=False",
        ),
        ({"causal": True, "log_alpha": 0.2}, "log_alpha=0.2 has no effect without log_floor"),
        ({"causal": True, "log_layers": [0]}, r"log_layers=\(0,\) has no effect without log_floor"),
        ({"causal": True, "log_floor": 0}, "log_floor needs .*number above 0"),
        ({"causal": True, "log_floor": 2, "log_layers": [3], "depth": 3}, r"below depth=3, got \[3\]"),
        ({"max_dist": [3, 4], "depth": 3}, r"max_dist needs one number for each of 3 blocks, got \[3, 4\]"),
        ({"max_dist": []}, r"max_dist needs one number for each of 1 block, got \[\]"),
        ({"max_dist": [3, 0]}, "max_dist needs"),
        ({"scale": "half"}, "scale must be one of sqrt, inverse, got 'half'"),
        ({"scale": "inverse", "dim": 10, "head_dim": None}, "dim to be a multiple of num_heads"),
    ],
)
def test_option_errors(options, message):
    with pytest.raises(OptionError, match=message):
        create_encoding("distance_bank", **{**FACTS, **options})


def test_a_block_beyond_the_list():
    encoding = build(max_dist=[3, 2])
    with pytest.raises(ShapeError, match="max_dist for 2 blocks, got a call for block 2"):
        encoding.bias(Grid((2, 2)).positions(), 2, torch.zeros(1, 4, DIM, dtype=torch.float64))


def test_attention_with_a_factor_only():
    """Without a mask, the factor of a query is a temperature of its row."""
    encoding = build(causal=True, log_floor=1, log_alpha=1.0)
    with torch.no_grad():
        encoding.distance_bank.zero_()
    pos, x = Grid((5,)).positions(), torch.randn(1, 5, DIM, dtype=torch.float64)
    q, k, v = torch.randn(3, 1, HEADS, 5, WIDTH, dtype=torch.float64)
    tau = 1 + torch.arange(1.0, 6.0, dtype=torch.float64).log()
    out = attend(q, k, v, [encoding], pos, 0, x)
    torch.testing.assert_close(out, attention(q * tau[:, None], k, v), rtol=1e-6, atol=1e-6)
