"""SelfExtend on grids: rope_axial nearby, grouped offsets far away."""

import pytest
import torch

from tests.cases import cases
from vispe import Grid, create_encoding
from vispe.attention import attention
from vispe.encodings.parts.rotary.pairwise.self_extend import SelfExtendScores
from vispe.errors import OptionError, ShapeError


def both(grid, **options):
    axial = create_encoding("rope_axial", dim=24, num_heads=2, layout=options.get("layout", "interleaved"))
    grouped = create_encoding("self_extend", dim=24, num_heads=2, **options)
    pos = Grid(grid, prefix=2).positions()
    q, k, v = torch.randn(3, 2, 2, pos.tokens, 12, generator=torch.Generator().manual_seed(0))
    transform = axial.transform(pos, 0)
    plain = transform.query(q) @ transform.key(k).mT / 12**0.5
    return grouped.bias(pos, 0), plain, (q, k, v), transform, pos


@cases("layout", ["half", "interleaved"])
@cases("grid", [(3, 5), (7,), (1, 9)])
def test_groups_of_one_are_rope_axial(grid, layout):
    bias, plain, (q, k, v), transform, _ = both(grid, group=1, window=2, layout=layout)
    torch.testing.assert_close(bias.dense(q=q, k=k), plain, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        attention(q, k, v, bias=bias), attention(q, k, v, transform=transform), rtol=1e-4, atol=1e-5
    )


def test_within_the_window_and_with_prefix_tokens_nothing_changes():
    bias, plain, (q, k, _), _, pos = both((3, 11), group=3, window=4)
    distance = (pos.coords[0, :, None] - pos.coords[0]).abs().amax(-1)
    positioned = pos.spatial[0][:, None] & pos.spatial[0]
    near = (distance < 4) | ~positioned
    result = bias.dense(q=q, k=k)
    torch.testing.assert_close(result[..., near], plain[..., near], rtol=1e-4, atol=1e-5)
    assert ((result - plain).abs()[..., ~near].amax()) > 0.1


def test_far_offsets_are_those_of_groups():
    bias, *_, (q, k, _), _, pos = both((1, 20), group=4, window=6)
    line = create_encoding("rope_axial", dim=24, num_heads=2)
    actual = bias.dense(q=q, k=k)
    for i, j in ((19, 0), (2, 17), (13, 7)):
        offset = i // 4 - j // 4 + (1 if i > j else -1) * (6 - 1)
        at = pos.replace(
            coords=torch.tensor([[[0.0, float(offset)], [0.0, 0.0]]]),
            spatial=torch.ones(1, 2).bool(),
            grid=None,
        )
        pair = torch.stack([q[:, :, 2 + i], k[:, :, 2 + j]], 2)
        transform = line.transform(at, 0)
        expected = (transform.query(pair)[:, :, 0] * transform.key(pair)[:, :, 1]).sum(-1) / 12**0.5
        torch.testing.assert_close(actual[:, :, 2 + i, 2 + j], expected, rtol=1e-4, atol=1e-4)


def test_wrong_heads_and_no_queries_are_refused():
    with pytest.raises(OptionError, match="self_extend needs an even head_dim, got 3"):
        create_encoding("self_extend", dim=6, num_heads=2)
    with pytest.raises(ShapeError, match="q and k to dense"):
        both((2, 3))[0].dense()


def test_rounding_does_not_change_the_group():
    """Sums of fractions may be a little less than a multiple of the group."""
    q, k = torch.randn(2, 1, 1, 24, 8, generator=torch.Generator().manual_seed(0)).double().unbind()
    rates, at = torch.tensor([[[1.0, 0.5, 0.2, 0.1]]]), torch.arange(24, dtype=torch.float64)[None, :, None]
    logits = [SelfExtendScores(x, x, rates, 4, 8).scores(q, k, 1.0) for x in (at, at - 1e-13)]
    torch.testing.assert_close(*logits, rtol=1e-9, atol=1e-9)
