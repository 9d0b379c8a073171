"""Crops of several magnifications: coordinates against a formula, boxes per sample, masks by level, errors."""

import pytest
import torch

from vispe.errors import OptionError, ShapeError
from vispe.grid import Grid, Positions
from vispe.grid.crops import crop_positions, level_mask


def test_true_centres_are_those_of_joined_grids():
    pos = crop_positions((8, 12), (4, 2), levels=(1, 4))
    grids = [Grid((2, 6), spacing=(4 * level, 2 * level)) for level in (1, 4)]
    joined = Positions.joined(grids)
    torch.testing.assert_close(pos.coords, joined.coords)
    torch.testing.assert_close(pos.extent, joined.extent)
    torch.testing.assert_close(pos.extent, torch.tensor([[32.0, 48.0]]))
    for name in ("spacing", "level"):
        assert torch.equal(pos.attrs[name].values, joined.attrs[name].values)


def test_boxes_of_each_sample():
    boxes = torch.tensor([[[[10.0, -3.0], [17.0, 4.0]]], [[[0.0, 1.0], [28.0, 15.0]]]])  # steps 1, 1 and 4, 2
    pos = crop_positions((8, 8), (4, 2), boxes=boxes)
    for sample, (first, pixel) in enumerate([((10, -3), (1, 1)), ((0, 1), (4, 2))]):
        points = [
            (first[0] + pixel[0] * (4 * r + 1.5), first[1] + pixel[1] * (2 * c + 0.5))
            for r in range(2)
            for c in range(4)
        ]
        torch.testing.assert_close(pos.coords[sample], torch.tensor(points))
    torch.testing.assert_close(pos.extent, torch.tensor([[8.0, 8.0], [32.0, 16.0]]))
    box = crop_positions((8, 8), (4, 2), boxes=boxes, edges="box")
    for sample in range(2):
        assert torch.equal(box.coords[sample, 0], boxes[sample, 0, 0])
        assert torch.equal(box.coords[sample, -1], boxes[sample, 0, 1])


def test_a_single_patch_and_a_single_pixel():
    assert crop_positions((4,), (4,), levels=(3,)).coords.tolist() == [[[0.0]]]
    assert crop_positions((4,), (4,), levels=(3,), edges="box").coords.tolist() == [[[-4.5]]]  # as released
    pos = crop_positions((1, 2), (1, 1), levels=(5,))
    assert pos.coords.tolist() == [[[0.0, -2.5], [0.0, 2.5]]]
    assert pos.extent.tolist() == [[5.0, 10.0]]


def test_box_ignores_remaining_pixels_like_the_released_code():
    assert crop_positions((9,), (4,), edges="box").coords.flatten().tolist() == [-4.0, 4.0]
    with pytest.raises(
        ShapeError, match=r"multiple of patch_size on every axis, got size=\(9,\), patch_size=\(4,\)"
    ):
        crop_positions((9,), (4,))


def test_masks_by_level():
    pos = Positions.joined([Grid((2,), prefix=1).positions(), Grid((1,)), Grid((1,))])
    level = [0, 0, 0, 1, 2]
    for mode, rule in {"causal": lambda i, j: i >= j, "same": lambda i, j: i == j}.items():
        expected = [[q == 0 or k == 0 or rule(level[q], level[k]) for k in range(5)] for q in range(5)]
        mask = level_mask(pos, mode)
        assert mask.shape == (1, 1, 5, 5)
        assert mask[0, 0].tolist() == expected
    subset = pos.gather(torch.tensor([[4, 1], [3, 4]]))
    assert level_mask(subset, "causal")[:, 0].tolist() == [
        [[True, True], [False, True]],
        [[True, False], [True, True]],
    ]


def test_errors():
    with pytest.raises(OptionError, match="edges must be one of centres, box, got 'corners'"):
        crop_positions((8,), (4,), edges="corners")
    with pytest.raises(
        OptionError, match=r"levels must be one positive number per crop, got levels=\(1, 0\)"
    ):
        crop_positions((8,), (4,), levels=(1, 0))
    with pytest.raises(ShapeError, match=r"needs boxes \(b, 2, 2, 1\) .* got \(1, 1, 2, 1\)"):
        crop_positions((8,), (4,), levels=(1, 2), boxes=torch.zeros(1, 1, 2, 1))
    with pytest.raises(
        ShapeError, match=r"size and patch_size of 1 to 3 axes, got size=\(8, 8\), patch_size=\(4,\)"
    ):
        crop_positions((8, 8), (4,))
    with pytest.raises(OptionError, match="mode must be one of causal, same, got 'random'"):
        level_mask(crop_positions((8,), (4,)), "random")
    with pytest.raises(ShapeError, match="level_mask needs positions of several grids"):
        level_mask(Grid((2, 3)).positions(), "same")
