"""Coupled positions: corresponding tokens share positions (arXiv 2405.20671).

Text that refers to a cell or box of an image has the position of that cell or box: `Text.cells`. The module
also contains the position ids of two tasks: addition and boards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vispe.errors import InputError, OptionError, counted, is_integer
from vispe.multimodal.streams.segments import Image, Text, Video

Picture = tuple[Image | Video, int]  # an image or video of a sample, and the index of its first token


def coupled_tokens(text: Text, first: int, images: Sequence[Picture]) -> list[list[int]]:
    """Return for each token of a text its index, and the indices of the four central cells of its box.

    Args:
        text: text with cells.
        first: index of its first token.
        images: images and videos of its sample, in order.

    Raises:
        InputError: the image or video does not exist, or does not contain a cell.
    """
    image, start = _picture(text, images)
    cells = text.cells or ()
    each = cells * text.tokens if len(cells) == 1 else cells
    return [[first + k, *(start + n for n in _middle(image, cell))] for k, cell in enumerate(each)]


def couple(ids: Tensor, coupled: Tensor) -> Tensor:
    """Return coordinates (axes, n) in which coupled tokens (k, 5) have the mean coordinates of their cells."""
    token, *cells = coupled.to(ids.device).unbind(1)
    a, b, c, d = (ids.index_select(1, cell) for cell in cells)
    # average in pairs: a single cell keeps its exact coordinates
    return ids.index_copy(1, token, ((a + b) / 2 + (c + d) / 2) / 2)


def _picture(text: Text, images: Sequence[Picture]) -> Picture:
    """Return the image or video that a text refers to."""
    of = text.of
    if isinstance(of, int):
        if of >= len(images):
            raise InputError(
                f"Text(of={of}) refers to image or video {of} of its sample, counted from 0, but there are "
                f"{len(images)}."
            )
        return images[of]
    if of is None:
        candidates = list(images)
        hint = "Select one by of=, an index from 0 on or the segment"
    else:
        candidates = [p for p in images if p[0] is of] or [p for p in images if p[0] == of]
        hint = f"{of} must occur exactly once. Use its index, of=0 for the first one"
    if len(candidates) != 1:
        raise InputError(
            f"Text with cells needs one image or video of its sample, got {len(candidates)}. {hint}."
        )
    return candidates[0]


def _middle(image: Image | Video, cell: Sequence[int]) -> list[int]:
    """Return the indices of the four cells around the centre of a cell or box, possibly equal."""
    is_video = isinstance(image, Video)
    down, across = (1, 1) if is_video else image.tiles
    rows, columns = down * image.h, across * image.w
    form = (
        "(frame, row, column) or (frame, r0, c0, r1, c1)" if is_video else "(row, column) or (r0, c0, r1, c1)"
    )
    if len(cell) - is_video not in (2, 4):
        raise InputError(f"A cell of {image} must be {form}, got {tuple(cell)}.")
    frame, box = (cell[0], cell[1:]) if is_video else (0, cell)
    top, left, bottom, right = (*box, *box)[:4]
    if frame >= (image.t if is_video else 1) or not (top <= bottom < rows and left <= right < columns):
        frames = f"{counted(image.t, 'frame')} of " if is_video else ""
        raise InputError(
            f"The cell {tuple(cell)} is outside of {image}, which has {frames}{rows} x {columns} tokens. Cells "
            f"are {form} counted from 0, both ends included."
        )
    middles = [
        (r, c)
        for r in ((top + bottom) // 2, (top + bottom + 1) // 2)
        for c in ((left + right) // 2, (left + right + 1) // 2)
    ]
    return [_number(image, frame, r, c) for r, c in middles]


def _number(image: Image | Video, frame: int, row: int, column: int) -> int:
    """Return the index of a cell among the tokens of its image or video; rows and columns run through all tiles."""
    h, w = image.h, image.w
    if isinstance(image, Video):
        return (frame * h + row) * w + column
    tile = row // h * image.tiles[1] + column // w + (image.thumbnail == "first")
    return (tile * h + row % h) * w + column % w


def addition_positions(
    first: int,
    second: int,
    total: int,
    start: int = 1,
    *,
    reverse_input: bool = False,
    reverse_output: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return position ids of an addition in digits: digits of equal significance share an id (arXiv 2405.20671).

    Args:
        first: number of digits of the first number.
        second: number of digits of the second number.
        total: number of digits of the answer.
        start: id of the plus sign; drawn at random in training.
        reverse_input: whether the numbers are written in reverse.
        reverse_output: whether the answer is written in reverse.

    Returns:
        the ids of ``first + second`` (first + 1 + second) and of ``= total`` (1 + total), int64.

    Raises:
        OptionError: a count is not an integer above 0.
    """
    _check_whole(first=first, second=second, total=total)

    def number(digits: int, reverse: bool) -> Tensor:
        # the last digit has the smallest id, next to the start
        ids = torch.arange(start + 1, start + 1 + digits)
        return ids if reverse else ids.flip(0)

    plus = torch.tensor([start])
    equals = plus if reverse_output else plus + total + 1
    question = torch.cat([number(first, reverse_input), plus, number(second, reverse_input)])
    return question, torch.cat([equals, number(total, reverse_output)])


def board_positions(width: int, height: int, start: Sequence[int] = (1, 1)) -> tuple[Tensor, Tensor]:
    """Return position ids of a board, and of an answer with a token per cell (arXiv 2405.20671).

    Args:
        width: columns.
        height: rows.
        start: ids of column and row of the separator after the board; drawn at random in training.

    Returns:
        columns, then rows, of the board in raster order and the separator (2, height * width + 1), and of the answer
        (2, height * width), int64.

    Raises:
        OptionError: a side is not an integer above 0, or `start` does not have two numbers.
    """
    _check_whole(width=width, height=height)
    if len(start) != 2:
        raise OptionError(f"start needs two ids, of column and row, got {list(start)}.")
    column, row = start
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    cells = torch.stack([columns.flatten() + column + 1, rows.flatten() + row + 1])
    return torch.cat([cells, torch.tensor([[column], [row]])], 1), cells


def draw_starts(sides: Sequence[int], longest: int, generator: torch.Generator | None = None) -> list[int]:
    """Return a random start for each side, from 1 to longest - side; no id is then above `longest`.

    Raises:
        OptionError: a side is too large.
    """
    if max(sides) >= longest:
        raise OptionError(f"longest={longest} is too small for a side of {max(sides)}. Use a larger one.")
    return [int(torch.randint(1, longest - side + 1, (1,), generator=generator)) for side in sides]


def _check_whole(**counts: object) -> None:
    for name, count in counts.items():
        if not is_integer(count) or count < 1:  # type: ignore[operator]
            raise OptionError(f"{name} needs an integer above 0, got {name}={count!r}.")
