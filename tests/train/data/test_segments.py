"""Windows of large images: which patches they are, and that their coordinates are those of the whole image."""

import numpy as np
import pytest
import torch

from vispe import Attention, create_encoding
from vispe.errors import OptionError, ShapeError
from vispe.grid import Grid
from vispe.train.data.window_sequences import segments, window_patches

GRID = (7, 9)


def taken(prefix=0, **options):
    images = torch.randn(2, 3, 28, 36, generator=torch.Generator().manual_seed(0))
    requested = {"count": 4, "length": 2, "generator": np.random.default_rng(1), "prefix": prefix, **options}
    return images, segments(images, 4, **requested)


def test_patches_are_those_of_the_image():
    images, actual = taken(prefix=1)
    assert actual.patches.shape == (2, 16, 3, 4, 4)
    index = actual.positions.index[:, 1:]
    for image, patches, numbers in zip(images, actual.patches, index, strict=True):
        assert len(set(numbers.tolist())) == 16
        for patch, number in zip(patches, numbers.tolist(), strict=True):
            row, column = divmod(number, GRID[1])
            assert torch.equal(patch, image[:, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4])
    assert not torch.equal(index[0], index[1])


@pytest.mark.parametrize("encoding", ["alibi2d", "rope_axial", "rope_mixed", "rpb", "alibi2d+rope_axial"])
def test_attention_is_that_of_the_whole_image_among_these_tokens(encoding):
    _, actual = taken(prefix=1, reference=(4, 4))
    pos = actual.positions
    torch.manual_seed(0)
    spec = "rpb(grid=(7, 9))" if encoding == "rpb" else encoding
    layer = Attention(32, num_heads=2, encoding=spec).eval()
    full_grid = Grid(GRID, prefix=1, reference=(4, 4))
    x = torch.randn(2, full_grid.tokens, 32)
    # token numbers: the prefix first, then the cells of the grid
    keep = torch.where(pos.spatial, pos.index + 1, 0)
    visible = torch.zeros(2, full_grid.tokens, dtype=torch.bool).scatter(1, keep, True)
    expected = layer(x, full_grid, key_padding_mask=visible)
    at = keep[..., None].expand(-1, -1, 32)
    torch.testing.assert_close(layer(x.gather(1, at), pos), expected.gather(1, at), rtol=1e-4, atol=1e-5)


def test_tables_are_those_of_the_large_grid():
    _, actual = taken(reference=(4, 4))
    table = create_encoding("learned", dim=8, grid=(4, 4))
    full = table.table(Grid(GRID, reference=(4, 4)).positions()).expand(2, -1, -1)
    expected = full.gather(1, actual.positions.index[..., None].expand(-1, -1, 8))
    torch.testing.assert_close(table.table(actual.positions), expected)


def test_windows_cover_the_image_and_never_overlap():
    generator, seen_numbers = np.random.default_rng(0), set()
    for _ in range(200):
        numbers = window_patches(GRID, 3, 2, generator)
        assert len(set(numbers.tolist())) == 12
        squares = numbers.reshape(3, 2, 2)
        assert (squares[:, 1] - squares[:, 0] == GRID[1]).all()
        assert (squares[..., 1] - squares[..., 0] == 1).all()
        assert (squares[..., 0] % GRID[1] < GRID[1] - 1).all(), "a window goes around the border"
        seen_numbers |= set(numbers.tolist())
    assert seen_numbers == set(range(63))
    assert sorted(window_patches((4, 4), 4, 2, generator).tolist()) == list(range(16))


def test_errors():
    for options in ({"count": 13}, {"count": 0}, {"length": 8}, {"length": 0}):
        with pytest.raises(OptionError, match=r"fit into a grid of .* without overlap"):
            taken(**options)
    with pytest.raises(ShapeError, match="divisible by patch_size="):
        segments(torch.zeros(1, 3, 30, 36), 4, count=1, length=1, generator=np.random.default_rng(0))
