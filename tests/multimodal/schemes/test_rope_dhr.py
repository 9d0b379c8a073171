"""RoPE-DHR: tiles on the thumbnail, positions per image, and differences from the reference."""

import pytest
import torch

from tests.cases import cases
from vispe.errors import OptionError, UnsupportedCombination
from vispe.multimodal import Image, Stream, Text, Video, create_scheme
from vispe.multimodal.schemes.rope_dhr import media_ids

REFERENCE = {"tile_order": "column_major", "sampling": "corner"}


def image_ids(image, before=5, **options):
    """Return positions relative to the start of the image, one row for each part, and all coordinates."""
    coordinates = create_scheme("rope_dhr", **options).coordinates(
        Stream.of([[Text(before), image, Text(2)]])
    )
    return (coordinates.ids[0, 0, before:-2] - before).unflatten(
        0, (-1, image.h * image.w)
    ).long(), coordinates


def canvas(image):
    """Return (row, column) of the thumbnail for each token of the full image, as an image."""
    rows, cols = image.tiles
    tiles = image_ids(image)[0][: rows * cols] if image.thumbnail == "last" else image_ids(image)[0][1:]
    full = tiles.unflatten(0, (rows, cols)).unflatten(-1, (image.h, image.w)).transpose(1, 2)
    return full.reshape(rows * image.h, cols * image.w) // image.w, full.reshape(
        rows * image.h, cols * image.w
    ) % image.w


def test_worked_example_of_the_reference():
    ids, coordinates = image_ids(Image(16, 16, (1, 2), "last"), **REFERENCE)
    assert (ids[0, :16] + 5).tolist() == [5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12]
    assert (ids[1, :6] + 5).tolist() == [12, 13, 14, 14, 15, 15]
    assert (ids[2] + 5).tolist() == list(range(5, 261))
    assert coordinates.ids[0, 0, -2:].tolist() == [261, 262]
    right = image_ids(Image(16, 16, (1, 2), "last"))[0]
    assert (right[0, :16] + 5).tolist() == [5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12]
    assert (right[1, :6] + 5).tolist() == [13, 13, 14, 14, 15, 15]


def test_the_reference_has_another_order_of_tiles():
    image = Image(6, 6, (3, 2), "last")
    rows, cols = image.tiles
    ours, theirs = image_ids(image)[0], image_ids(image, tile_order="column_major")[0]
    order = [row * cols + column for column in range(cols) for row in range(rows)]
    assert torch.equal(theirs[: rows * cols], ours[order])
    assert not torch.equal(theirs, ours)
    assert torch.equal(theirs[-1], ours[-1])


@cases("location", ["first", "last"])
@cases(
    ("h", "w", "tiles"), [(16, 16, (2, 3)), (4, 6, (2, 3)), (3, 5, (4, 2)), (1, 7, (1, 3)), (5, 5, (1, 1))]
)
def test_an_image_uses_the_positions_of_its_thumbnail(h, w, tiles, location):
    image = Image(h, w, tiles, location)
    ids, coordinates = image_ids(image)
    small = ids[-1] if location == "last" else ids[0]
    assert small.tolist() == list(range(h * w))
    assert (int(ids.min()), int(ids.max())) == (0, h * w - 1)
    assert coordinates.ids[0, 0, -2:].tolist() == [5 + h * w, 6 + h * w]
    assert coordinates.decode(2)[0, 0].tolist() == [7 + h * w, 8 + h * w]


@cases(("h", "w", "tiles"), [(16, 16, (2, 4)), (16, 16, (8, 1)), (4, 6, (2, 3)), (6, 4, (3, 2))])
def test_cells_occur_equally_often_if_tiles_divide_the_thumbnail(h, w, tiles):
    ids = image_ids(Image(h, w, tiles, "last"))[0][:-1]
    assert torch.equal(ids.flatten().bincount(), torch.full((h * w,), tiles[0] * tiles[1]))


@cases("location", ["first", "last"])
@cases(("h", "w", "tiles"), [(16, 16, (3, 2)), (5, 3, (2, 3)), (2, 7, (5, 1))])
def test_positions_of_tiles_form_one_image(h, w, tiles, location):
    rows, cols = canvas(Image(h, w, tiles, location))
    assert torch.equal(rows, rows[:, :1].expand_as(rows))
    assert torch.equal(cols, cols[:1].expand_as(cols))
    for along, side in ((rows[:, 0], h), (cols[0], w)):
        assert set(along.diff().tolist()) <= {0, 1}
        assert torch.equal(along, side - 1 - along.flip(0))
        assert (along[0], along[-1]) == (0, side - 1)


@cases(("h", "w", "tiles"), [(4, 6, (2, 3)), (3, 5, (4, 2)), (5, 5, (3, 3)), (24, 24, (2, 1))])
def test_tokens_have_the_position_of_the_thumbnail_token_at_their_centre(h, w, tiles):
    """ID-Align, with the thumbnail first: by a search over all tokens of the thumbnail, in integers."""
    ids = image_ids(Image(h, w, tiles, "first"))[0]
    assert ids[0].tolist() == list(range(h * w))
    (down, across), part = tiles, 0
    for row in range(down):
        for column in range(across):
            part += 1
            for number, result in enumerate(ids[part].tolist()):
                # middles in units of half a token of the full image, in which thumbnail tokens are 2 * tiles wide
                y, x = 2 * (row * h + number // w) + 1, 2 * (column * w + number % w) + 1
                under = [
                    k
                    for k in range(h * w)
                    if 2 * down * (k // w) <= y < 2 * down * (k // w + 1)
                    and 2 * across * (k % w) <= x < 2 * across * (k % w + 1)
                ]
                assert under == [result]


def test_without_tiles_positions_are_consecutive():
    stream = Stream.of(
        [[Text(2), Image(3, 4), Text(1), Video(2, 2, 3)], [Image(2, 2), Text(4)]], padding="left"
    )
    result, expected = (create_scheme(n).coordinates(stream) for n in ("rope_dhr", "rope1d"))
    assert torch.equal(result.ids, expected.ids)
    assert torch.equal(result.next, expected.next)


def test_media_ids_are_those_of_images():
    rows = [[Text(2), Image(2, 3, (1, 2), "last"), Text(1), Image(2, 2)], [Text(3), Image(1, 2), Text(9)]]
    stream = Stream.of(rows, padding="left")
    coordinates = create_scheme("rope_dhr").coordinates(stream)
    tiled = [2, 2, 3, 5, 5, 6, 3, 4, 4, 6, 7, 7, 2, 3, 4, 5, 6, 7]
    assert media_ids(stream, coordinates).tolist() == [[*tiled, 9, 10, 11, 12, 3, 4]]
    assert coordinates.next.tolist() == [13, 14]


def test_tiles_without_a_thumbnail_raise():
    scheme = create_scheme("rope_dhr")
    stream = Stream.of([[Text(1)], [Image(2, 2, (1, 2), "last"), Image(2, 2, (3, 2))]])
    with pytest.raises(
        UnsupportedCombination, match=r"sample 1 has an image of 3 x 2 tiles without an adjacent thumbnail"
    ):
        scheme.coordinates(stream)
    with pytest.raises(OptionError, match="tile_order must be one of row_major, column_major"):
        create_scheme("rope_dhr", tile_order="spiral")
    with pytest.raises(OptionError, match="sampling must be one of centre, corner"):
        create_scheme("rope_dhr", sampling="linspace")
