"""rpb_cpb against timm's modules, a slow oracle, and the claims of its docstring."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import RelPosMlp
from timm.models import VisionTransformer
from timm.models.swin_transformer_v2 import WindowAttention

import vispe
from tests.attention import oracle
from tests.cases import cases
from vispe import Grid, Positions, attention, create_encoding
from vispe.encodings.bias.offsets.rpb_cpb import DRAW
from vispe.errors import OptionError, ShapeError

property_settings = settings(max_examples=25, deadline=None, derandomize=True)


def build(grid, name="rpb_cpb", heads=3, **options):
    encoding = create_encoding({"hidden": 10, **options, "name": name}, num_heads=heads, grid=grid).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return encoding


def slow(encoding, grid, dropout_mask=None):
    """Return the bias (h, n, n), pair by pair."""
    weights = dict(encoding.named_parameters())
    cells = oracle.cells_of(grid.shape, grid.prefix)
    rows = [[torch.zeros(encoding.num_heads, dtype=torch.float64)] * len(cells) for _ in cells]
    for i, p in enumerate(cells):
        for j, q in enumerate(cells):
            if p is None or q is None:
                continue
            c = [a - b for a, b in zip(p, q, strict=True)]
            if encoding.coords == "swin":
                c = [8 * o / max(n - 1, 1) for o, n in zip(c, encoding.pretrained or grid.shape, strict=True)]
                c = [math.copysign(math.log2(1 + abs(o)) / 3, o) for o in c]
            else:
                c = [math.copysign(math.log(1 + abs(o)), o) for o in c]
            x = torch.tensor(c, dtype=torch.float64)
            hidden = (weights["cpb_mlp.0.weight"] @ x + weights["cpb_mlp.0.bias"]).clamp(min=0)
            if dropout_mask is not None:
                entry = 0
                for a, b, n in zip(p, q, grid.shape, strict=True):
                    entry = entry * (2 * n - 1) + a - b + n - 1
                hidden = hidden * dropout_mask[entry]
            out = weights["cpb_mlp.2.weight"] @ hidden
            if encoding.coords == "cr":
                rows[i][j] = out + weights["cpb_mlp.2.bias"]
            else:
                rows[i][j] = 16 * (out.sigmoid() - 0.5 * encoding.centre)
    return torch.stack([torch.stack(row, -1) for row in rows], 1)


@cases("options", [{}, {"centre": False}, {"coords": "cr"}, {"name": "rpb_cpb.swinv2", "hidden": 7}])
@cases("shape", [(5,), (3, 4), (1, 4), (2, 1, 3)])
def test_values_and_gradients(shape, options):
    encoding, grid = build(shape, **options), Grid(shape, prefix=2)
    actual, expected = encoding.bias(grid.positions(), 0).dense()[0], slow(encoding, grid)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)  # coordinates are float32
    cotangent = torch.randn_like(actual)
    for f, w in zip(
        torch.autograd.grad(actual, list(encoding.parameters()), cotangent),
        torch.autograd.grad(expected, list(encoding.parameters()), cotangent),
        strict=True,
    ):
        torch.testing.assert_close(f, w, rtol=1e-4, atol=1e-4)


@cases(("mode", "prefix"), [("cr", 0), ("cr", 3), ("swin", 0), ("swin", 2)])
@cases("pretrained", [(0, 0), (4, 6)])
def test_equals_timm_after_loading_its_entries(mode, prefix, pretrained):
    stock = RelPosMlp((3, 5), 3, 12, prefix, mode, pretrained).eval()
    options = {"pretrained": list(pretrained)} if pretrained[0] and mode == "swin" else {}
    options |= {"centre": False} if mode == "swin" else {}
    encoding = create_encoding(
        {"name": "rpb_cpb", "coords": mode, "hidden": 12, **options}, num_heads=3, grid=(3, 5)
    )
    for parent, holder in (("attn.", "rel_pos."), ("", "shared_rel_pos.")):
        state = {f"{parent}{holder}{k}": v for k, v in stock.state_dict().items()}
        encoding.rename_checkpoint_keys(state, parent, f"{parent}pos_enc.")
        encoding.load_state_dict({k.removeprefix(f"{parent}pos_enc."): v for k, v in state.items()})
    for size in ((3, 5), (6, 2), (5, 5)):
        stock.set_window_size(size)
        torch.testing.assert_close(
            encoding.bias(Grid(size, prefix).positions(), 0).dense(), stock.get_bias(), rtol=1e-5, atol=1e-5
        )


@cases("pretrained", [(0, 0), (2, 5)])
def test_equals_swin_v2(pretrained):
    stock = WindowAttention(12, (3, 4), num_heads=3, pretrained_window_size=pretrained)
    entries = {}
    stock.softmax.register_forward_pre_hook(lambda module, args: entries.update(logits=args[0]))
    torch.nn.init.zeros_(stock.qkv.weight)  # cosine attention of equal vectors: logits are the bias alone
    stock(torch.randn(1, 12, 12))
    options = {"pretrained": list(pretrained)} if pretrained[0] else {}
    encoding = create_encoding({"name": "rpb_cpb", "centre": False, **options}, num_heads=3, grid=(3, 4))
    state = {f"attn.{k}": v for k, v in stock.state_dict().items() if "cpb_mlp" in k}
    state["attn.relative_coords_table"] = state["attn.relative_position_index"] = torch.zeros(1)
    encoding.rename_checkpoint_keys(state, "attn.", "attn.pos_enc.")
    encoding.load_state_dict({k.removeprefix("attn.pos_enc."): v for k, v in state.items()})
    result = encoding.bias(Grid((3, 4)).positions(), 0).dense()
    torch.testing.assert_close(result, entries["logits"], rtol=1e-5, atol=1e-5)


def test_centring_changes_nothing_without_prefix_tokens():
    centred, plain = build((3, 4)), build((3, 4), centre=False)
    q, k, v = torch.randn(3, 2, 3, 12, 8, dtype=torch.float64)
    pos = Grid((3, 4)).positions()
    outs = [attention(q, k, v, bias=encoding.bias(pos, 0)) for encoding in (centred, plain)]
    torch.testing.assert_close(*outs)
    fresh = create_encoding("rpb_cpb", num_heads=3, grid=(3, 4))
    assert fresh.bias(pos, 0).dense().abs().max() < 0.5
    assert fresh.centre
    assert not create_encoding("rpb_cpb.swinv2", num_heads=3, grid=(3, 4)).centre


def test_a_released_swin_v2_layout_loads_into_a_vit():
    model = VisionTransformer(img_size=24, patch_size=8, embed_dim=12, depth=2, num_heads=3, num_classes=2)
    vispe.convert(model, "rpb_cpb(hidden=16)")
    entries = {k: torch.randn_like(v) for k, v in model.state_dict().items() if "pos_enc" in k}
    assert len(entries) == 6
    other_entries = {k: v for k, v in model.state_dict().items() if "pos_enc" not in k}
    model.load_state_dict({**other_entries, **{k.replace("pos_enc.", ""): v for k, v in entries.items()}})
    state = model.state_dict()
    assert all(torch.equal(state[k], v) for k, v in entries.items())
    assert model(torch.randn(1, 3, 24, 24)).isfinite().all()


def test_dropout():
    encoding, grid = build((3, 4), dropout=0.25), Grid((3, 4), 1)
    assert encoding.eval().prepare(grid.positions()).attrs == {}
    encoding.train()
    pos = encoding.prepare(grid.positions(), generator=torch.Generator().manual_seed(0))
    dropout_mask = pos.attrs[DRAW]
    assert dropout_mask.shape == (35, 10)
    assert dropout_mask.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert abs((dropout_mask == 0).float().mean() - 0.25) < 0.07
    assert encoding.prepare(pos) is pos
    torch.testing.assert_close(
        encoding.bias(pos, 0).dense()[0], slow(encoding, grid, dropout_mask.double()), rtol=1e-5, atol=1e-5
    )
    assert torch.equal(encoding.bias(pos, 0).dense(), encoding.bias(pos, 1).dense())
    draws = torch.ones(35, 10)
    prepared = encoding.prepare(grid.positions(), draws={DRAW: draws})
    torch.testing.assert_close(
        encoding.bias(prepared, 0).dense()[0], slow(encoding, grid), rtol=1e-5, atol=1e-5
    )
    with pytest.raises(ShapeError, match=r"draw of rpb_cpb_dropout of shape \(35, 10\), got \(35, 9\)"):
        encoding.prepare(grid.positions(), draws={DRAW: draws[:, :9]})
    plain = build((3, 4))
    assert torch.equal(plain.bias(pos, 0).dense(), plain.bias(grid.positions(), 0).dense())


@property_settings
@given(h=st.integers(1, 6), w=st.integers(1, 6), cr=st.booleans(), data=st.data())
def test_invariant_to_translation(h, w, cr, data):
    down, right = data.draw(st.integers(0, h - 1)), data.draw(st.integers(0, w - 1))
    encoding = build((3, 4), coords="cr" if cr else "swin")
    dense = encoding.bias(Grid((h, w)).positions(), 0).dense()[0].reshape(3, h, w, h, w)
    assert torch.equal(
        dense[:, down:, right:, down:, right:], dense[:, : h - down, : w - right, : h - down, : w - right]
    )


def test_dropped_tokens():
    encoding, grid = build((3, 4)), Grid((5, 3), 2)
    pos = grid.positions()
    keep = torch.tensor([[0, 1, 16, 3], [0, 1, 7, 11]])
    dense, subset = encoding.bias(pos, 0).dense()[0], encoding.bias(pos.gather(keep), 0).dense()
    for b in range(2):
        assert torch.equal(subset[b], dense[:, keep[b]][:, :, keep[b]])


@cases(
    ("options", "message"),
    [
        ({"num_heads": 0}, "num_heads needs an integer above 0, got num_heads=0"),
        ({"grid": ()}, r"rpb_cpb: grid needs a list of 1 to 3 integers above 0, got grid=\(\)"),
        ({"coords": "log"}, "coords must be one of swin, cr, got 'log'"),
        ({"hidden": 0}, "hidden needs an integer above 0, got hidden=0"),
        ({"hidden": 1.5}, "hidden needs an integer above 0, got hidden=1.5"),
        ({"pretrained": [3]}, r"pretrained needs one number for each of 2 axes, got pretrained=\[3\]"),
        (
            {"coords": "cr", "pretrained": [3, 3]},
            r"centre and pretrained have no effect with coords='cr', got centre=False, pretrained=\(3, 3\)",
        ),
        ({"coords": "cr", "centre": True}, "have no effect with coords='cr', got centre=True"),
        ({"centre": 1}, "centre is true or false, got centre=1"),
        ({"share_layers": 0}, "share_layers is true or false, got share_layers=0"),
        ({"dropout": 1.0}, "dropout needs a number of 0 or more and below 1, got dropout=1.0"),
        ({"dropout": "some"}, "got dropout='some'"),
    ],
)
def test_option_errors(options, message):
    with pytest.raises(OptionError, match=message):
        create_encoding("rpb_cpb", **{"num_heads": 2, "grid": (3, 3), **options})


def test_positions_that_do_not_fit():
    encoding = create_encoding("rpb_cpb(dropout=0.5)", num_heads=2, grid=(3, 3))
    for pos in (Grid((4,)).positions(), Positions(torch.zeros(1, 4, 2)), Grid((1, 2, 2)).positions()):
        for call in (encoding.prepare, lambda p: encoding.bias(p, 0)):
            with pytest.raises(
                ShapeError, match=r"rpb_cpb needs the tokens of a 2-axis grid, got [123] ax[ei]s"
            ):
                call(pos)
