"""rpb against timm's modules and a slow oracle, on 1, 2 and 3 axes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import RelPosBias, resize_rel_pos_bias_table
from timm.models import VisionTransformer
from timm.models.beit import Attention as BeitAttention
from torch.nn import functional as F

import vispe
from tests.attention import oracle
from tests.cases import cases
from vispe import Grid, Positions, attention, create_encoding
from vispe.encodings.parts.bias.table_interpolation import growth, resample_table
from vispe.errors import OptionError, ShapeError

TABLE = "relative_position_bias_table"
theirs_warns = pytest.mark.filterwarnings(  # timm's interpolation, with this torch
    "ignore:Using a non-tuple sequence:UserWarning", "ignore:torch.searchsorted:UserWarning"
)
property_settings = settings(max_examples=25, deadline=None, derandomize=True)


def build(grid, name="rpb", heads=3, **options):
    encoding = create_encoding({"name": name, **options}, num_heads=heads, grid=grid).double()
    with torch.no_grad():
        encoding.relative_position_bias_table.normal_(generator=torch.Generator().manual_seed(0))
    return encoding


def parts(encoding):
    """Return the table as (h, 2 n_1 - 1, ...) and the prefix values (h, 3) or None."""
    table = encoding.relative_position_bias_table.t()
    edge = table[:, -3:] if encoding.prefix_values else None
    table = table[:, :-3] if encoding.prefix_values else table
    return table.reshape(-1, *(2 * n - 1 for n in encoding.table_grid)), edge


@cases("name", ["rpb.swin", "rpb.beit"])
@cases("shape", [(5,), (3, 4), (1, 6), (1, 1), (2, 3, 2)])
@cases("prefix", [0, 1, 4])
def test_values_and_gradients(name, shape, prefix):
    encoding, grid = build(shape, name), Grid(shape, prefix)
    actual = encoding.bias(grid.positions(), 0).dense()[0]
    expected = oracle.table_matrix(parts(encoding)[0], grid, *parts(encoding)[1:])
    torch.testing.assert_close(actual, expected)
    cotangent = torch.randn_like(actual)
    for f, w in zip(
        torch.autograd.grad(actual, list(encoding.parameters()), cotangent),
        torch.autograd.grad(expected, list(encoding.parameters()), cotangent),
        strict=True,
    ):
        torch.testing.assert_close(f, w)


@theirs_warns
@cases("prefix", [0, 1])
@cases("shape", [(4, 4), (3, 5), (2, 1)])
def test_equals_timm(shape, prefix):
    stock = RelPosBias(shape, 3, prefix_tokens=prefix)
    encoding = create_encoding("rpb", num_heads=3, grid=shape, prefix_values=bool(prefix))
    encoding.load_state_dict(stock.state_dict())
    torch.testing.assert_close(encoding.bias(Grid(shape, prefix).positions(), 0).dense(), stock.get_bias())
    for size in ((7, 6), (3, 3), (2, 5)):
        stock.set_window_size(shape)
        stock.load_state_dict(encoding.state_dict())
        stock.set_window_size(size)
        result = encoding.bias(Grid(size, prefix).positions(), 0).dense()
        torch.testing.assert_close(result, stock.get_bias(), rtol=1e-4, atol=1e-6)


def test_equals_beit_with_several_prefix_tokens():
    stock = BeitAttention(12, num_heads=3, attn_head_dim=4, window_size=(3, 4))
    encoding = create_encoding("rpb.beit", num_heads=3, grid=(3, 4))
    assert (encoding.relative_position_bias_table == 0).all()
    torch.nn.init.normal_(stock.relative_position_bias_table)
    state = {f"attn.{k}": v for k, v in stock.state_dict().items() if TABLE in k}
    state["attn.relative_position_index"] = torch.zeros(13, 13)
    encoding.rename_checkpoint_keys(state, "attn.", "attn.pos_enc.")
    assert set(state) == {f"attn.pos_enc.{TABLE}"}
    encoding.load_state_dict({TABLE: state[f"attn.pos_enc.{TABLE}"]})
    one = encoding.bias(Grid((3, 4), 1).positions(), 0).dense()
    torch.testing.assert_close(one, stock._get_rel_pos_bias())
    order = torch.tensor([0, 0, 0, *range(1, 13)])
    assert torch.equal(encoding.bias(Grid((3, 4), 3).positions(), 0).dense(), one[:, :, order][..., order])


@cases("old", [1, 2, 3, 7, 14])
@cases("new", [1, 2, 5, 14, 24])
def test_resampling_of_one_axis(old, new):
    table = torch.randn(3, 2 * old - 1, dtype=torch.float64)
    actual = resample_table(table, (old,), (new,), "geometric")
    ratio = growth(old, new)
    side = np.cumsum(ratio ** np.arange(old - 1))
    points = np.concatenate([-side[::-1], [0], side])
    expected = [np.interp(np.arange(1 - new, new), points, row) for row in table.numpy()]
    expected = table if old == new else torch.tensor(np.array(expected))
    torch.testing.assert_close(actual, expected)
    actual = resample_table(table, (old,), (new,), "bicubic")
    expected = F.interpolate(table[None, :, None], size=(1, 2 * new - 1), mode="bicubic")[0, :, 0]
    torch.testing.assert_close(actual, expected)


@theirs_warns
def test_resampling_of_two_and_three_axes():
    table = torch.randn(35, 2)
    values = table.t().reshape(2, 5, 7)
    expected = resize_rel_pos_bias_table(table, (6, 5), (99, 2), old_window_size=(3, 4)).t().reshape(2, 11, 9)
    torch.testing.assert_close(
        resample_table(values, (3, 4), (6, 5), "geometric"), expected, rtol=1e-4, atol=1e-5
    )
    expected = F.interpolate(values[None], size=(11, 9), mode="bicubic")[0]
    torch.testing.assert_close(
        resample_table(values, (3, 4), (6, 5), "bicubic"), expected, rtol=1e-5, atol=1e-5
    )
    cube = torch.randn(2, 3, 5, 3, dtype=torch.float64)
    for method in ("geometric", "bicubic"):
        step = resample_table(cube.flatten(0, 1), (3, 2), (4, 5), method).reshape(2, 3, 7, 9)
        step = resample_table(step.permute(0, 2, 3, 1).flatten(0, 2), (2,), (3,), method)
        step = step.reshape(2, 7, 9, 5).permute(0, 3, 1, 2)
        torch.testing.assert_close(resample_table(cube, (2, 3, 2), (3, 4, 5), method), step)


@cases("resample", ["geometric", "bicubic"])
def test_resampling_has_gradients_and_does_not_change_the_table(resample):
    encoding = build((3, 4), resample=resample, prefix_values=True)
    before = encoding.relative_position_bias_table.detach().clone()
    pos = Grid((5, 6), 2).positions()
    dense = encoding.bias(pos, 0).dense()
    assert dense.shape == (1, 3, 32, 32)
    (grad,) = torch.autograd.grad(dense, encoding.relative_position_bias_table, torch.randn_like(dense))
    assert (grad != 0).all()
    assert torch.equal(encoding.relative_position_bias_table, before)
    small = encoding.bias(Grid((3, 4), 2).positions(), 0).dense()
    assert torch.equal(
        small,
        build((3, 4), resample=resample, prefix_values=True).bias(Grid((3, 4), 2).positions(), 0).dense(),
    )


def test_window_is_the_grid_of_the_table():
    encoding = build((6, 6), window=[3, 4])
    assert encoding.relative_position_bias_table.shape == (35, 3)
    plain = build((3, 4))
    for shape in ((6, 6), (3, 4)):
        pos = Grid(shape).positions()
        assert torch.equal(encoding.bias(pos, 0).dense(), plain.bias(pos, 0).dense())


@property_settings
@given(h=st.integers(1, 6), w=st.integers(1, 6), beit=st.booleans(), data=st.data())
def test_invariant_to_translation(h, w, beit, data):
    down, right = data.draw(st.integers(0, h - 1)), data.draw(st.integers(0, w - 1))
    encoding = build((3, 4), "rpb.beit" if beit else "rpb")
    dense = encoding.bias(Grid((h, w)).positions(), 0).dense()[0].reshape(3, h, w, h, w)
    assert torch.equal(
        dense[:, down:, right:, down:, right:], dense[:, : h - down, : w - right, : h - down, : w - right]
    )


def test_dropped_tokens_and_attention():
    encoding, grid = build((3, 4), "rpb.beit"), Grid((5, 3), 2)
    pos = grid.positions()
    keep = torch.tensor([[0, 1, 16, 3], [0, 1, 7, 11]])
    dense, subset = encoding.bias(pos, 0).dense()[0], encoding.bias(pos.gather(keep), 0)
    for b in range(2):
        assert torch.equal(subset.dense()[b], dense[:, keep[b]][:, :, keep[b]])
    q, k, v = torch.randn(3, 2, 3, 4, 8, dtype=torch.float64)
    expected = oracle.attend(q, k, v, bias=subset.dense())
    for backend in ("reference", "sdpa"):
        torch.testing.assert_close(attention(q, k, v, bias=subset, backend=backend), expected)


@cases(
    ("options", "theirs"),
    [
        ("", "blocks.{}.attn.relative_position_bias_table"),
        ("", "blocks.{}.attn.rel_pos.relative_position_bias_table"),
        ("share_layers=true", "rel_pos_bias.relative_position_bias_table"),
        ("share_layers=true", "shared_rel_pos.relative_position_bias_table"),
    ],
)
def test_released_checkpoints_load(options, theirs):
    torch.manual_seed(0)
    model = VisionTransformer(img_size=24, patch_size=8, embed_dim=12, depth=2, num_heads=3, num_classes=2)
    vispe.convert(model, f"rpb.beit({options})" if options else "rpb.beit")
    state = {k: v for k, v in model.state_dict().items() if "pos_enc" not in k}
    tables = {theirs.format(i): torch.randn(28, 3) for i in range(2)}
    index = {k.replace("bias_table", "index"): torch.zeros(10, 10) for k in tables}
    model.load_state_dict({**state, **tables, **index})
    parameters = [v for k, v in model.state_dict().items() if k.endswith(TABLE)]
    assert all(torch.equal(a, b) for a, b in zip(parameters, tables.values(), strict=True))
    assert model(torch.randn(1, 3, 24, 24)).isfinite().all()


@cases(
    ("options", "message"),
    [
        ({"num_heads": 0}, "num_heads needs an integer above 0, got num_heads=0"),
        ({"grid": []}, r"rpb: grid needs a list of 1 to 3 integers above 0, got grid=\[\]"),
        ({"grid": (2, 0)}, r"got grid=\(2, 0\)"),
        ({"grid": (2, 2, 2, 2)}, "1 to 3 integers"),
        ({"window": [3]}, r"window needs one number for each of 2 axes, got window=\[3\]"),
        ({"window": 3}, "got window=3"),
        ({"window": [3, 1.5]}, r"got window=\[3, 1\.5\]"),
        ({"prefix_values": 1}, "prefix_values is true or false, got prefix_values=1"),
        ({"share_layers": "yes"}, "share_layers is true or false, got share_layers='yes'"),
        ({"std": -1}, "std needs a number of 0 or more, got std=-1"),
        ({"std": True}, "got std=True"),
        ({"resample": "linear"}, "resample must be one of geometric, bicubic, got 'linear'"),
    ],
)
def test_option_errors(options, message):
    with pytest.raises(OptionError, match=message):
        create_encoding("rpb", **{"num_heads": 2, "grid": (3, 3), **options})


def test_positions_that_do_not_fit():
    encoding = create_encoding("rpb", num_heads=2, grid=(3, 3))
    for pos in (Grid((4,)).positions(), Positions(torch.zeros(1, 4, 2)), Grid((1, 2, 2)).positions()):
        with pytest.raises(ShapeError, match=r"rpb needs the tokens of a 2-axis grid, got [123] ax[ei]s"):
            encoding.bias(pos, 0)
