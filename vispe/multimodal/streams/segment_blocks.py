"""Blocks of token sequences that are described by segments, and the checks of the description."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from vispe.errors import InputError
from vispe.multimodal.streams.attention_blocks import Blocks
from vispe.multimodal.streams.parallel_segments import OUTSIDE, Parallel
from vispe.multimodal.streams.position_coupling import Picture, coupled_tokens
from vispe.multimodal.streams.segments import IMAGE, TEXT, VIDEO, WHOLE, Image, Segment, Text, Video

Element = Segment | Parallel
Row = Sequence[Element] | Sequence[Sequence[Element]]  # a sample, or several packed into one row
ParallelRow = tuple[int, int, int, int]


class _Block(NamedTuple):
    """Row of the table of `Blocks`, in the order of its fields."""

    sample: int
    document: int
    group: int
    kind: int
    tokens: int
    size: tuple[int, int, int]
    seconds: float
    image: int
    tile: tuple[int, int, int, int]
    shared: bool
    boundary: bool
    parallel: ParallelRow


def blocks_from_segments(rows: Sequence[Row]) -> tuple[Blocks, list[int], Tensor | None]:
    """Return the blocks of the rows, the number of tokens of each row, and `Stream.coupled`.

    Raises:
        InputError: there are no segments, or a text refers to a missing cell.
    """
    table: list[_Block] = []
    totals: list[int] = []
    coupled: list[list[int]] = []
    image = token = sets = 0  # running numbers of images and videos, tokens, and `Parallel` sets
    for row, samples in enumerate(map(_samples, rows)):
        before = token
        for document, elements in enumerate(samples):
            images: list[Picture] = []
            referring: list[tuple[Text, int]] = []  # texts with cells, and the index of their first token
            for segment, parallel in _flat(elements, sets):
                if isinstance(segment, Text):
                    if segment.cells:
                        referring.append((segment, token))
                    table.append(_text_block(segment, row, document, parallel))
                    token += segment.tokens
                    continue
                images.append((segment, token))
                for block in _visual_blocks(segment, row, document, image, parallel):
                    table.append(block)
                    token += block.tokens
                image += 1
            sets += sum(isinstance(element, Parallel) for element in elements)
            coupled += [c for text, first in referring for c in coupled_tokens(text, first, images)]
        totals.append(token - before)
    if not table:
        raise InputError("A stream needs at least one segment, got none.")
    return _joined(table), totals, torch.tensor(coupled) if coupled else None


def _text_block(text: Text, row: int, document: int, parallel: ParallelRow) -> _Block:
    return _Block(
        row, document, text.group, TEXT, text.tokens, (1, 1, 1), torch.nan, -1, WHOLE, text.shared, text.boundary,
        parallel,
    )  # fmt: skip


def _visual_blocks(
    segment: Image | Video, row: int, document: int, image: int, parallel: ParallelRow
) -> list[_Block]:
    """Return one block for each tile of an image, or one for a video."""
    kind, seconds = (VIDEO, segment.seconds) if isinstance(segment, Video) else (IMAGE, None)
    about = row, document, 0, kind
    seconds = torch.nan if seconds is None else float(seconds)
    return [
        _Block(*about, t * h * w, (t, h, w), seconds, image, tile, False, False, parallel)
        for t, h, w, tile in segment.parts()
    ]


def _flat(elements: Sequence[Element], sets: int) -> list[tuple[Segment, ParallelRow]]:
    """Return the segments of a sample and their rows of `Blocks.parallel`, with sets numbered from `sets`."""
    flat: list[tuple[Segment, ParallelRow]] = []
    for element in elements:
        if isinstance(element, Parallel):
            flat += [(segment, (sets, *parallel)) for segment, parallel in element.parts()]
            sets += 1
        else:
            flat.append((element, OUTSIDE))
    return flat


def _is_element(item: object) -> bool:
    return isinstance(item, Text | Image | Video | Parallel)


def _samples(row: object) -> list[Sequence[Element]]:
    """Return the samples packed into a row."""
    if _is_element(row) or not isinstance(row, Sequence):
        raise InputError(
            f"A row must be a list of segments, got {row!r}. Use Stream.of([[Text(5), Image(4, 6)]])."
        )
    items = list(cast("Sequence[object]", row))
    if all(map(_is_element, items)):
        return [cast("list[Element]", items)]
    if any(map(_is_element, items)):
        raise InputError(
            "A row must contain segments, or lists of segments that are packed into it, got both."
        )
    for item in items:
        if not isinstance(item, Sequence) or not all(map(_is_element, cast("Sequence[object]", item))):
            raise InputError(
                f"A row must contain Text, Image, Video and Parallel, or lists of them, got {item!r}."
            )
    return [list(i) for i in cast("list[Sequence[Element]]", items)]


def _joined(table: list[_Block]) -> Blocks:
    columns = [
        torch.tensor(column, dtype=torch.float64 if name == "seconds" else None)
        for name, column in zip(_Block._fields, zip(*table, strict=True), strict=True)
    ]
    if all(block.parallel == OUTSIDE for block in table):
        columns.pop()  # `parallel`, the last column
    return Blocks(*columns)
