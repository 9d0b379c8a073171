"""`rope_axial` with the axes of Kimi's and MiniMax's vision towers: by formulas, and against transformers."""

import math

import pytest
import torch

from tests.cases import cases
from vispe import Grid, create_encoding
from vispe.errors import OptionError
from vispe.grid import packed_positions

GRIDS = torch.tensor([[1, 4, 6], [2, 2, 4]])


def transformed(x, axis_of_pair, rates, coords):
    """Return x (n, h, d) with channels c and c + pairs rotated by coordinate times rate, in Python floats."""
    out, pairs = x.clone(), len(rates)
    for n, at in enumerate(coords.tolist()):
        for c in range(pairs):
            angle = at[axis_of_pair[c]] * rates[c]
            a, b = x[n, :, c], x[n, :, c + pairs]
            out[n, :, c] = a * math.cos(angle) - b * math.sin(angle)
            out[n, :, c + pairs] = b * math.cos(angle) + a * math.sin(angle)
    return out


def rotated(spec, x, pos, **options):
    encoding = create_encoding(
        spec, dim=x.shape[1] * x.shape[2], num_heads=x.shape[1], head_dim=x.shape[2], **options
    )
    return encoding.transform(pos, 0).query(x.transpose(0, 1)[None])[0].transpose(0, 1)


@cases(("width", "theta"), [(4, 100.0), (12, 10000.0), (20, 7.0)])
def test_moonvit_alternates_columns_and_rows(width, theta):
    pos = packed_positions(GRIDS, frames=False)
    x = torch.randn(len(pos.coords[0]), 2, width, dtype=torch.float64)
    rates = [theta ** (-2 * (p // 2) / (width // 2)) for p in range(width // 2)]
    axes = [1 - p % 2 for p in range(width // 2)]  # the column first
    result = rotated("rope_axial.moonvit", x, pos, temperature=theta)
    torch.testing.assert_close(result, transformed(x, axes, rates, pos.coords[0]), rtol=1e-5, atol=1e-5)


@cases(("width", "theta"), [(6, 100.0), (8, 10.0), (14, 10000.0), (15, 100.0), (17, 9.0), (80, 1e4)])
def test_minimax_rotates_the_first_channels(width, theta):
    pos = packed_positions(GRIDS, 2)
    x = torch.randn(len(pos.coords[0]), 2, width, dtype=torch.float64)
    d = 2 * ((width // 3) // 2)
    rates = [theta ** (-2 * j / d) for _ in range(3) for j in range(d // 2)]
    axes = [axis for axis in range(3) for _ in range(d // 2)]
    result = rotated("rope_axial.minimax", x, pos, temperature=theta)
    torch.testing.assert_close(result, transformed(x, axes, rates, pos.coords[0]), rtol=1e-5, atol=1e-5)
    assert torch.equal(result[..., 3 * d :], x[..., 3 * d :])


def test_remaining_pairs_at_the_end_of_halves():
    """The default layout pairs channels over the head, also those that are not rotated."""
    pos = packed_positions(GRIDS)
    x = torch.randn(len(pos.coords[0]), 1, 8, dtype=torch.float64)
    result = rotated("rope_axial", x, pos, layout="half")
    assert torch.equal(result[..., [3, 7]], x[..., [3, 7]])
    assert not torch.equal(result[..., 6], x[..., 6])


def test_alternating_axes_are_a_permutation_of_pairs():
    pos = Grid((3, 4)).positions()
    plain, alternate = (
        create_encoding("rope_axial", dim=16, num_heads=1, layout="half", alternate=a).transform(pos, 0)
        for a in (False, True)
    )
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    assert torch.equal(alternate.cos, plain.cos[..., order])
    assert torch.equal(alternate.sin, plain.sin[..., order])


def test_options_that_do_not_fit():
    with pytest.raises(OptionError, match=r"equal numbers of pairs per axis, got split=\[1, 3\]"):
        create_encoding("rope_axial", dim=16, num_heads=2, alternate=True, split=(1, 3))
    with pytest.raises(OptionError, match="tail='end' has no effect on pairs of adjacent channels"):
        create_encoding("rope_axial", dim=16, num_heads=2, tail="end")


def test_moonvit_is_that_of_transformers():
    module = pytest.importorskip("transformers.models.kimi_k25.modeling_kimi_k25")
    config = module.Kimi_K25VisionConfig(hidden_size=24, num_attention_heads=2)
    rotary, pos = module.Kimi_K25VisionRotaryEmbedding(config), packed_positions(GRIDS, frames=False)
    q, k = (torch.randn(len(pos.coords[0]), 2, 12) for _ in range(2))
    cos, sin = rotary(q, pos.coords[0].long())
    theirs = module.apply_rotary_pos_emb_vision(q, k, cos, sin)
    theta = config.rope_parameters["rope_theta"]
    for x, expected in zip((q, k), theirs, strict=True):
        torch.testing.assert_close(rotated("rope_axial.moonvit", x, pos, temperature=theta), expected)


@cases("width", [8, 14, 80])
def test_minimax_is_that_of_transformers(width):
    from tests.hosts.transformers.tiny import needs

    needs("5.23", "the rotation of the stock model expects queries of another shape")
    module = pytest.importorskip("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl")
    config = module.MiniMaxM3VLVisionConfig(hidden_size=2 * width, num_attention_heads=2)
    rotary, pos = module.MiniMaxM3VLVisionRotaryEmbedding(config), packed_positions(GRIDS, 2)
    ids = module.get_vision_position_ids(GRIDS, 2, include_temporal=True)
    assert torch.equal(pos.coords[0], ids.float())
    q, k = (torch.randn(len(ids), 2, width) for _ in range(2))
    theirs = module.apply_rotary_pos_emb_vision(q, k, *rotary(q, ids))
    theta = config.rope_parameters["rope_theta"]
    for x, expected in zip((q, k), theirs, strict=True):
        torch.testing.assert_close(rotated("rope_axial.minimax", x, pos, temperature=theta), expected)
