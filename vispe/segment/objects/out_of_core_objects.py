"""Objects of images larger than memory: an object that crosses blocks is one object.

Patches are labelled block by block and joined where blocks meet; then each is cut and measured by itself, in the box
around it, as in memory.  So no number depends on the blocks, not even where touching objects are split.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from vispe.errors import InputError
from vispe.segment.features.tiles import Region
from vispe.segment.objects.labelling import Found, Patch, cut
from vispe.segment.objects.options import ObjectOptions
from vispe.segment.objects.table import neighbours

_BYTES = 160  # per pixel of the box around a patch while it is cut, roughly
_STEPS = [
    step for step in product((-1, 0, 1), repeat=3) if step < (0, 0, 0)
]  # to neighbours that come before


@dataclass(frozen=True)
class Source:
    """What objects are found in, read by boxes; z counts pages.

    Attributes:
        shape: (z, h, w).
        labels: gives classes (rows, columns) of a region of a page.
        prob: gives the probability (rows, columns) of a class, by its number, in a region of a page.
        grey: gives the values of the file (rows, columns, c) in a region of a page.
        marks: array (z, h, w) int64 for provisional numbers, zeros.
        out: function that takes a page, a region, the pixels of an object there, and its number.
    """

    shape: tuple[int, int, int]
    labels: Callable[[int, Region], np.ndarray]
    prob: Callable[[int, Region, int], np.ndarray]
    grey: Callable[[int, Region], np.ndarray]
    marks: Any
    out: Callable[[int, Region, np.ndarray, int], None]


@dataclass(eq=False)
class Pieces:
    """Patches as blocks see them: numbers from 1 on, each with its class, box and first pixel; joined by pairs."""

    classes: list[int]
    boxes: list[tuple[int, ...]]  # page, end, top, bottom, left, right
    firsts: list[int]
    pairs: list[np.ndarray]


def find_in_blocks(
    source: Source,
    regions: Sequence[Region],
    names: Sequence[str],
    options: ObjectOptions,
    *,
    volumes: int | None = None,
    spacing: Sequence[float] | None = None,
    memory: int | None = None,
) -> Found:
    """Find and measure the objects of an image block by block, as `vispe.segment.objects.labelling.find` does in memory.

    Args:
        source: the image and its label map.
        regions: blocks that cover a page.
        names: of the K classes.
        options: what counts.
        volumes: pages of a volume; None takes each page by itself.
        spacing: microns per pixel; None where it is not known.
        memory: bytes that the box around one patch may take; None for any.

    Raises:
        InputError: the box around a patch is larger than memory.
    """
    numbers, found = options.numbers(names), Found()
    pieces = _label(source, regions, numbers, volumes)
    step = volumes or 1
    shape = source.shape[1:] if volumes is None else (volumes, *source.shape[1:])
    for first, box, own, number in _joined(pieces, step):
        page, end, region = box[0], box[1], Region(*box[2:])
        size = (end - page) * math.prod(region.shape)
        if memory is not None and size * _BYTES > memory:
            raise InputError(
                f"a patch of {names[number - 1]!r} lies in a box of {end - page} x {region.shape[0]} x "
                f"{region.shape[1]} pixels, which needs about {size * _BYTES / 2**20:.0f} MiB; leave the class out of "
                "--objects, or raise --memory."
            )
        patch = _patch(source, page - first, first, box, own, number, numbers, volumes)
        for place, mask, row in cut(patch, shape, options, spacing, found):
            count = len(found.rows) + 1
            where = Region(place[-2].start, place[-2].stop, place[-1].start, place[-1].stop)
            pages = [first] if volumes is None else range(first + place[0].start, first + place[0].stop)
            for index, at in enumerate(pages):
                source.out(at, where, mask if volumes is None else mask[index], count)
            found.rows.append({"page": first, "object": count, "class": names[number - 1], **row})
    neighbours(found.rows)
    return found


def _label(source: Source, regions: Sequence[Region], numbers: Sequence[int], volumes: int | None) -> Pieces:
    """Number the patches of each block, and list which of them touch."""
    from scipy.ndimage import find_objects
    from skimage.measure import label

    pieces = Pieces([0], [()], [0], [])
    height, width = source.shape[1:]
    for page in range(source.shape[0]):
        joins = volumes is not None and page % volumes > 0
        for region in regions:
            classes = source.labels(page, region)
            asked = np.where(np.isin(classes, numbers), classes, 0)
            marked = label(asked, background=0, connectivity=2).astype(np.int64)
            base = len(pieces.classes) - 1
            for index, box in enumerate(find_objects(marked), start=1):
                own = marked[box] == index
                rows, columns = box
                y, x = np.unravel_index(own.argmax(), own.shape)
                top, left = region.top + rows.start, region.left + columns.start
                pieces.classes.append(int(asked[box][own][0]))
                ends = region.top + rows.stop, region.left + columns.stop
                pieces.boxes.append((page, page + 1, top, ends[0], left, ends[1]))
                pieces.firsts.append((page * height + top + int(y)) * width + left + int(x))
            marked[marked > 0] += base
            source.marks[(page, *region.slices)] = marked
            # blocks that are not numbered yet are 0, and look back when it is their turn
            around = Region(
                max(region.top - 1, 0), min(region.bottom + 1, height),
                max(region.left - 1, 0), min(region.right + 1, width),
            )  # fmt: skip
            start = page - 1 if joins else page
            _pairs(np.asarray(source.marks[(slice(start, page + 1), *around.slices)]), pieces)
    return pieces


def _pairs(marks: np.ndarray, pieces: Pieces) -> None:
    """Note which numbers of one class are neighbours in (z, rows, columns)."""
    classes = np.array(pieces.classes)
    for step in _STEPS:
        here, there = [], []
        for s, n in zip(step, marks.shape, strict=True):
            here.append(slice(max(-s, 0), n - max(s, 0)))
            there.append(slice(max(s, 0), n + min(s, 0)))
        a, b = marks[tuple(here)], marks[tuple(there)]
        touch = (a > 0) & (b > 0) & (a != b)
        found = np.unique(np.stack([a[touch], b[touch]], 1), axis=0)
        found = found[classes[found[:, 0]] == classes[found[:, 1]]]
        if len(found):
            pieces.pairs.append(found)


def _joined(
    pieces: Pieces, step: int
) -> Iterator[tuple[int, tuple[int, int, int, int, int, int], np.ndarray, int]]:
    """Yield the patches in the order of their first pixels: first page, box, numbers that they consist of, class."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    count = len(pieces.classes)
    pairs = np.concatenate(pieces.pairs) if pieces.pairs else np.zeros((0, 2), np.int64)
    graph = coo_array((np.ones(len(pairs), bool), (pairs[:, 0], pairs[:, 1])), (count, count))
    group = connected_components(graph, directed=False)[1]
    order = np.argsort(group, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(group[order])) + 1)
    patches = [part for part in parts if part[0] > 0]
    boxes, firsts = np.array([(0,) * 6, *pieces.boxes[1:]]), np.array(pieces.firsts)
    for own in sorted(patches, key=lambda part: firsts[part].min()):
        low, high = boxes[own].min(0), boxes[own].max(0)
        box = (int(low[0]), int(high[1]), int(low[2]), int(high[3]), int(low[4]), int(high[5]))
        yield box[0] // step * step, box, own, pieces.classes[own[0]]


def _patch(
    source: Source,
    depth: int,
    first: int,
    box: tuple[int, int, int, int, int, int],
    own: np.ndarray,
    number: int,
    numbers: Sequence[int],
    volumes: int | None,
) -> Patch:
    """Read what is in the box around a patch."""
    pages, region = range(box[0], box[1]), Region(*box[2:])
    mask = np.stack([np.isin(np.asarray(source.marks[(page, *region.slices)]), own) for page in pages])
    classes = np.zeros((len(pages) + 1, region.shape[0] + 1, region.shape[1] + 1), np.uint8)
    height, width = source.shape[1:]
    around = Region(region.top, min(region.bottom + 1, height), region.left, min(region.right + 1, width))
    last = first + volumes if volumes is not None else box[1]
    for index, page in enumerate(range(box[0], min(box[1] + 1, last))):
        classes[index, : around.shape[0], : around.shape[1]] = source.labels(page, around)
    free, valid = ~np.isin(classes[:-1, :-1, :-1], numbers), classes > 0
    prob = np.stack([source.prob(page, region, number) for page in pages])
    grey = np.stack([source.grey(page, region) for page in pages])
    if volumes is None:
        return Patch((region.top, region.left), mask[0], number, free[0], valid[0], prob[0], grey[0])
    return Patch((depth, region.top, region.left), mask, number, free, valid, prob, grey)
