"""Positions of packed patches and merging by windows, against loops and transformers."""

import pytest
import torch

from tests.cases import cases
from vispe.errors import OptionError, ShapeError
from vispe.grid import packed_positions, pool_windows

GRIDS = torch.tensor([[1, 4, 6], [3, 2, 2], [2, 6, 4]])


def pooled_counts(grids, kh, kw):
    """Return (frame, row, column) of every patch, by loops over windows."""
    return [
        (f, y, x)
        for t, h, w in grids
        for f in range(t)
        for top in range(0, h, kh)
        for left in range(0, w, kw)
        for y in range(top, top + kh)
        for x in range(left, left + kw)
    ]


@cases("merge", [1, 2, (2, 1), (1, 2)])
def test_positions_equal_a_loop(merge):
    kh, kw = (merge, merge) if isinstance(merge, int) else merge
    expected = torch.tensor(pooled_counts(GRIDS.tolist(), kh, kw)).float()
    pos = packed_positions(GRIDS, merge)
    assert torch.equal(pos.coords[0], expected)
    assert torch.equal(packed_positions(GRIDS, merge, frames=False).coords[0], expected[:, 1:])
    assert pos.spatial.all()


@cases("merge", [1, 2])
def test_positions_are_those_of_transformers(merge):
    utils = pytest.importorskip("transformers.vision_utils")
    if not hasattr(utils, "get_vision_position_ids"):
        pytest.skip("this transformers has no position ids of vision towers")
    theirs = utils.get_vision_position_ids(GRIDS, merge)
    assert torch.equal(packed_positions(GRIDS, merge, frames=False).coords[0], theirs.float())


@cases("kernel", [(2, 2), (2, 1), 1])
def test_windows_are_means_over_frames(kernel):
    x = torch.randn(int(GRIDS.prod(1).sum()), 3, dtype=torch.float64)
    kh, kw = (kernel, kernel) if isinstance(kernel, int) else kernel
    expected, start = [], 0
    for t, h, w in GRIDS.tolist():
        for top in range(0, h, kh):
            for left in range(0, w, kw):
                window = [(y, c) for y in range(top, top + kh) for c in range(left, left + kw)]
                patches = [[start + (f * h + y) * w + c for f in range(t)] for y, c in window]
                expected.append(torch.stack([x[p].mean(0) for p in patches]))
        start += t * h * w
    torch.testing.assert_close(pool_windows(x, GRIDS, kernel), torch.stack(expected))


def test_errors():
    with pytest.raises(ShapeError, match=r"merge window \(4, 4\) divides, got \[1, 4, 6\]"):
        packed_positions(GRIDS, 4)
    with pytest.raises(ShapeError, match=r"grids of shape \(m, 3\)"):
        packed_positions(GRIDS[0])
    with pytest.raises(ShapeError, match=r"torch\.float32"):
        packed_positions(GRIDS.float())
    with pytest.raises(OptionError, match=r"rows and columns above 0, got \(2, 0\)"):
        packed_positions(GRIDS, (2, 0))
    with pytest.raises(ShapeError, match="one row for each of the 84 patches of grids, got"):
        pool_windows(torch.zeros(5, 2), GRIDS, 2)
