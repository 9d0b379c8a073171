"""Objects of out-of-core images, where an object may span several blocks.

Connected components are labelled block by block and merged across block borders. Then each component is split
and measured in its own bounding box, as for images in memory. So no number depends on the blocks, even for
split objects.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

from vispe.errors import InputError
from vispe.segment.features.tiles import Region
from vispe.segment.objects.labelling import Component, ObjectList, split_component
from vispe.segment.objects.options import ObjectOptions
from vispe.segment.objects.table import add_nearest_distances

_BYTES = 160  # approximate memory per pixel of the bounding box while it is split
# offsets to the neighbours that precede a pixel in raster order
_STEPS = [step for step in product((-1, 0, 1), repeat=3) if step < (0, 0, 0)]


@dataclass(frozen=True)
class RegionSource:
    """Access to an image and its label map by region; z counts pages.

    Attributes:
        shape: (z, h, w).
        labels: returns the classes (rows, columns) of a region of a page.
        prob: returns the probability (rows, columns) of a class, by its number, in a region of a page.
        grey: returns the values of the file (rows, columns, c) in a region of a page.
        component_ids: array (z, h, w) int64 for provisional component numbers, zeros.
        out: called with a page, a region, the mask of an object in it, and the number of the object.
    """

    shape: tuple[int, int, int]
    labels: Callable[[int, Region], np.ndarray]
    prob: Callable[[int, Region, int], np.ndarray]
    grey: Callable[[int, Region], np.ndarray]
    component_ids: Any
    out: Callable[[int, Region, np.ndarray, int], None]


@dataclass(eq=False)
class BlockComponents:
    """Components within blocks: numbers from 1, each with its class, box and first pixel; `pairs` are to be merged.

    `fields` has the bounding box of the pixels with data by page or volume.
    """

    classes: list[int]
    boxes: list[tuple[int, ...]]  # page, end, top, bottom, left, right
    firsts: list[int]
    pairs: list[np.ndarray]
    fields: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def add_data(self, page: int, step: int, region: Region, data: np.ndarray) -> None:
        """Extend the bounding box of the page, or of its volume of `step` pages, by a region of it."""
        if not data.any():
            return
        rows, columns = np.flatnonzero(data.any(1)) + region.top, np.flatnonzero(data.any(0)) + region.left
        box = (page, page + 1, int(rows[0]), int(rows[-1]) + 1, int(columns[0]), int(columns[-1]) + 1)
        first = page // step * step
        known = self.fields.get(first, box)
        self.fields[first] = tuple(
            (max if n % 2 else min)(ends) for n, ends in enumerate(zip(known, box, strict=True))
        )

    def field_shape(self, first: int, volumes: int | None) -> tuple[int, ...]:
        """Return the shape of the bounding box of the page, or of the volume, that starts at page `first`."""
        starts, stops = self.fields[first][::2], self.fields[first][1::2]
        shape = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return shape[1:] if volumes is None else shape


def find_in_blocks(
    source: RegionSource,
    regions: Sequence[Region],
    names: Sequence[str],
    options: ObjectOptions,
    *,
    volumes: int | None = None,
    spacing: Sequence[float] | None = None,
    memory: int | None = None,
) -> ObjectList:
    """Find and measure the objects of an image block by block; `labelling.find` does the same in memory.

    Args:
        source: the image and its label map.
        regions: blocks that cover a page.
        names: names of the K classes.
        options: definition of objects.
        volumes: pages per volume; None treats each page separately.
        spacing: microns per pixel; None if unknown.
        memory: upper bound in bytes for the box around one component; None for no limit.

    Raises:
        InputError: the box around a component exceeds the memory.
    """
    numbers, result = options.numbers(names), ObjectList()
    pieces = _label(source, regions, numbers, volumes)
    step = volumes or 1
    for first, box, parts, number in _joined(pieces, step):
        page, end, region = box[0], box[1], Region(*box[2:])
        size = (end - page) * math.prod(region.shape)
        if memory is not None and size * _BYTES > memory:
            raise InputError(
                f"a connected component of {names[number - 1]!r} has a bounding box of {end - page} x "
                f"{region.shape[0]} x {region.shape[1]} pixels, which needs about "
                f"{size * _BYTES / 2**20:.0f} MiB. Remove the class from objects, or increase memory."
            )
        component = _patch(source, page - first, first, box, parts, number, numbers, volumes)
        for object_box, mask, row in split_component(
            component, pieces.field_shape(first, volumes), options, spacing, result
        ):
            count = len(result.rows) + 1
            object_region = Region(
                object_box[-2].start, object_box[-2].stop, object_box[-1].start, object_box[-1].stop
            )
            pages = (
                [first] if volumes is None else range(first + object_box[0].start, first + object_box[0].stop)
            )
            for index, object_page in enumerate(pages):
                source.out(object_page, object_region, mask if volumes is None else mask[index], count)
            result.rows.append({"page": first, "object": count, "class": names[number - 1], **row})
    add_nearest_distances(result.rows)
    return result


def _label(
    source: RegionSource, regions: Sequence[Region], numbers: Sequence[int], volumes: int | None
) -> BlockComponents:
    """Label the components of each block, and list pairs to be merged."""
    from scipy.ndimage import find_objects
    from skimage.measure import label

    pieces = BlockComponents([0], [()], [0], [])
    height, width = source.shape[1:]
    for page in range(source.shape[0]):
        joins = volumes is not None and page % volumes > 0
        for region in regions:
            classes = source.labels(page, region)
            pieces.add_data(page, volumes or 1, region, classes > 0)
            requested = np.where(np.isin(classes, numbers), classes, 0)
            marked = label(requested, background=0, connectivity=2).astype(np.int64)
            base = len(pieces.classes) - 1
            for index, box in enumerate(find_objects(marked), start=1):
                component = marked[box] == index
                rows, columns = box
                y, x = np.unravel_index(component.argmax(), component.shape)
                top, left = region.top + rows.start, region.left + columns.start
                pieces.classes.append(int(requested[box][component][0]))
                stops = region.top + rows.stop, region.left + columns.stop
                pieces.boxes.append((page, page + 1, top, stops[0], left, stops[1]))
                pieces.firsts.append((page * height + top + int(y)) * width + left + int(x))
            marked[marked > 0] += base
            source.component_ids[(page, *region.slices)] = marked
            # later blocks are still 0; they are compared with this one when they are labelled
            neighbourhood = Region(
                max(region.top - 1, 0), min(region.bottom + 1, height),
                max(region.left - 1, 0), min(region.right + 1, width),
            )  # fmt: skip
            start = page - 1 if joins else page
            _pairs(np.asarray(source.component_ids[(slice(start, page + 1), *neighbourhood.slices)]), pieces)
    return pieces


def _pairs(marks: np.ndarray, pieces: BlockComponents) -> None:
    """List the pairs of adjacent components of equal class in (z, rows, columns)."""
    classes = np.array(pieces.classes)
    for step in _STEPS:
        targets, neighbour_slices = [], []
        for s, n in zip(step, marks.shape, strict=True):
            targets.append(slice(max(-s, 0), n - max(s, 0)))
            neighbour_slices.append(slice(max(s, 0), n + min(s, 0)))
        a, b = marks[tuple(targets)], marks[tuple(neighbour_slices)]
        touch = (a > 0) & (b > 0) & (a != b)
        pairs = np.unique(np.stack([a[touch], b[touch]], 1), axis=0)
        pairs = pairs[classes[pairs[:, 0]] == classes[pairs[:, 1]]]
        if len(pairs):
            pieces.pairs.append(pairs)


def _joined(
    pieces: BlockComponents, step: int
) -> Iterator[tuple[int, tuple[int, int, int, int, int, int], np.ndarray, int]]:
    """Yield the merged components in order of their first pixels: first page, box, numbers of their parts, class."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    count = len(pieces.classes)
    pairs = np.concatenate(pieces.pairs) if pieces.pairs else np.zeros((0, 2), np.int64)
    graph = coo_array((np.ones(len(pairs), bool), (pairs[:, 0], pairs[:, 1])), (count, count))
    # components that touch across blocks form one group
    group = connected_components(graph, directed=False)[1]
    order = np.argsort(group, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(group[order])) + 1)
    patches = [part for part in parts if part[0] > 0]
    boxes, firsts = np.array([(0,) * 6, *pieces.boxes[1:]]), np.array(pieces.firsts)
    for component in sorted(patches, key=lambda part: firsts[part].min()):
        low, high = boxes[component].min(0), boxes[component].max(0)
        box = (int(low[0]), int(high[1]), int(low[2]), int(high[3]), int(low[4]), int(high[5]))
        yield box[0] // step * step, box, component, pieces.classes[component[0]]


def _patch(
    source: RegionSource,
    depth: int,
    first: int,
    box: tuple[int, int, int, int, int, int],
    parts: np.ndarray,
    number: int,
    numbers: Sequence[int],
    volumes: int | None,
) -> Component:
    """Read the data in the bounding box of a component."""
    pages, region = range(box[0], box[1]), Region(*box[2:])
    mask = np.stack(
        [np.isin(np.asarray(source.component_ids[(page, *region.slices)]), parts) for page in pages]
    )
    # one pixel more at each side, 0 beyond the page and the volume
    classes = np.zeros((len(pages) + 2, region.shape[0] + 2, region.shape[1] + 2), np.uint8)
    height, width = source.shape[1:]
    around = Region(
        max(region.top - 1, 0), min(region.bottom + 1, height),
        max(region.left - 1, 0), min(region.right + 1, width),
    )  # fmt: skip
    y, x = around.top - region.top + 1, around.left - region.left + 1
    ends = (box[0], box[1]) if volumes is None else (first, first + volumes)
    for page in range(max(box[0] - 1, ends[0]), min(box[1] + 1, ends[1])):
        target = classes[page - box[0] + 1, y : y + around.shape[0], x : x + around.shape[1]]
        target[:] = source.labels(page, around)
    free, valid = ~np.isin(classes[1:-1, 1:-1, 1:-1], numbers), classes > 0
    prob = np.stack([source.prob(page, region, number) for page in pages])
    grey = np.stack([source.grey(page, region) for page in pages])
    if volumes is None:
        return Component((region.top, region.left), mask[0], number, free[0], valid[1], prob[0], grey[0])
    return Component((depth, region.top, region.left), mask, number, free, valid, prob, grey)
