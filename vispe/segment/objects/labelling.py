"""From connected patches to objects: each patch by itself, so that the result does not depend on how it was read."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from vispe.segment.objects.options import ObjectOptions
from vispe.segment.objects.split import split
from vispe.segment.objects.table import Row, measure, neighbours


@dataclass(frozen=True, eq=False)
class Patch:
    """Pixels of one class that hang together (8 neighbours on a page, 26 in a volume), in the box around them.

    Attributes:
        origin: place of the box in the image.
        mask: bool, the patch.
        number: of its class.
        free: bool, pixels that a hole may have: those of no class that is asked for.
        valid: bool, pixels with data, one more than the box at the end of each axis; False off the page.
        prob: probability of the class.
        grey: (..., c) values of the file.
    """

    origin: tuple[int, ...]
    mask: np.ndarray
    number: int
    free: np.ndarray
    valid: np.ndarray
    prob: np.ndarray
    grey: np.ndarray


@dataclass(eq=False)
class Found:
    """The objects of an image.

    Attributes:
        rows: of the table.
        small: objects left out for their size.
        border: objects left out since they touch the border.
        framed: number of objects in the counting frame, by the number of the class; see `cut`.
    """

    rows: list[Row] = field(default_factory=list)
    small: int = 0
    border: int = 0
    framed: dict[int, float] = field(default_factory=dict)


def cut(
    patch: Patch,
    shape: Sequence[int],
    options: ObjectOptions,
    spacing: Sequence[float] | None,
    found: Found,
) -> Iterator[tuple[tuple[slice, ...], np.ndarray, Row]]:
    """Divide a patch into objects, measure them, and count those in the counting frame.

    The frame counts an object unless it touches the lower, right or last side of what holds data (Gundersen, Journal
    of Microscopy 111, 1977): of two adjacent fields, exactly one counts an object that lies in both. The size of an
    object that the border cuts is unknown, so `min_area` is not applied to it. Instead objects of all sizes are
    counted, and two estimates are subtracted: small objects, and, on pages, slanted objects that pass the lower right
    corner of a field and that both adjacent fields count. The estimates are sums over objects inside, each weighted by
    the inverse of how likely an object of its extent is to lie inside (Miles, 1974; Lantuejoul, 1980).
    `exclude_border` has no effect on the frame.

    Args:
        patch: with the box around it.
        shape: of the whole page or volume.
        options: what counts.
        spacing: microns per pixel along each axis; None where it is not known.
        found: counts what is left out.

    Yields:
        For each object its box in the image, its pixels there, and its row.
    """
    from scipy.ndimage import binary_fill_holes, find_objects

    mask = patch.mask
    if options.fill_holes:
        mask = mask | (binary_fill_holes(mask) & patch.free)
    parts = mask.astype(np.int32)
    if options.touching == "split":
        relative = None if spacing is None else [s / spacing[-1] for s in spacing]
        # a filled hole is no neck, however unlikely the class is there
        parts = split(mask, np.where(patch.mask, patch.prob, 1), relative)
    for number, box in enumerate(find_objects(parts), start=1):
        own = parts[box] == number
        origin = tuple(o + s.start for o, s in zip(patch.origin, box, strict=True))
        ends = [o + n for o, n in zip(origin, own.shape, strict=True)]
        at_border = 0 in origin or any(e == n for e, n in zip(ends, shape, strict=True))
        small = own.sum() < options.min_area
        framed = 0.0 if _excluded(own, patch.valid[tuple(slice(s.start, s.stop + 1) for s in box)]) else 1.0
        if framed and not at_border:
            weight = math.prod(n / (n - e + o - 1) for n, o, e in zip(shape, origin, ends, strict=True))
            framed -= weight * (1.0 if small else _counted_twice(own) / math.prod(shape))
        found.framed[patch.number] = found.framed.get(patch.number, 0.0) + framed
        if options.exclude_border and at_border:
            found.border += 1
        elif small:
            found.small += 1
        else:
            place = tuple(slice(o, e) for o, e in zip(origin, ends, strict=True))
            yield place, own, measure(own, patch.grey[box], origin, spacing)


def _excluded(own: np.ndarray, valid: np.ndarray) -> bool:
    """Return whether an object touches an excluded side: what follows it along an axis holds no data.

    Args:
        own: bool, its pixels.
        valid: bool, as in `Patch`.
    """
    from scipy.ndimage import binary_fill_holes

    if valid.all():
        return False
    # no data inside an object does not cut it
    filled = np.pad(binary_fill_holes(own), [(0, 1)] * own.ndim)
    for axis in range(own.ndim):
        pixels, data = filled.swapaxes(0, axis), valid.swapaxes(0, axis)
        if (pixels[:-1] & ~pixels[1:] & ~data[1:]).any():
            return True
    return False


def _counted_twice(own: np.ndarray) -> int:
    """Return at how many positions of the corner of four fields two of them count an object (h, w); 0 for volumes.

    The upper right field and the lower left one do where the object does not reach into the lower right field.
    """
    if own.ndim > 2:
        return 0
    reached = np.logical_or.accumulate(np.logical_or.accumulate(own[:0:-1, :0:-1], 0), 1)
    return int(reached.size - np.count_nonzero(reached))


def patches(
    labels: np.ndarray, prob: np.ndarray, grey: np.ndarray, numbers: Sequence[int]
) -> Iterator[Patch]:
    """Find the patches of a page or volume in memory, in the order of their first pixels.

    Args:
        labels: (h, w) or (z, h, w) classes.
        prob: (K, ...) probabilities.
        grey: (..., c) values of the file.
        numbers: of the classes.
    """
    from scipy.ndimage import find_objects
    from skimage.measure import label

    asked, valid = np.isin(labels, numbers), np.pad(labels > 0, [(0, 1)] * labels.ndim)
    marked = label(np.where(asked, labels, 0), background=0, connectivity=labels.ndim)
    for index, box in enumerate(find_objects(marked), start=1):
        mask = marked[box] == index
        number = int(labels[box][mask][0])
        origin = tuple(s.start for s in box)
        near = valid[tuple(slice(s.start, s.stop + 1) for s in box)]
        yield Patch(origin, mask, number, ~asked[box], near, prob[(number - 1, *box)], grey[box])


def find(
    labels: np.ndarray,
    prob: np.ndarray,
    grey: np.ndarray,
    names: Sequence[str],
    options: ObjectOptions,
    *,
    volumes: int | None = None,
    spacing: Sequence[float] | None = None,
) -> tuple[np.ndarray, Found]:
    """Find and measure the objects of an image in memory.

    Args:
        labels: (z, h, w) classes 1..K, 0 = no data.
        prob: (z, K, h, w) probabilities.
        grey: (z, h, w, c) values of the file.
        names: of the K classes.
        options: what counts.
        volumes: pages of a volume, of which the image has one or more; None takes each page by itself.
        spacing: microns per pixel (y, x), or (z, y, x) with `volumes`; None where it is not known.

    Returns:
        A map (z, h, w) uint32, 0 = no object, and the objects. Numbers start at 1 and go on from page to page.

    >>> page = np.array([[[2, 2, 1, 2]]])
    >>> options = ObjectOptions("pore", "keep", 0)
    >>> found = find(page, np.ones((1, 2, 1, 4)), page[..., None], ["matrix", "pore"], options)
    >>> found[0].tolist(), [row["area_px"] for row in found[1].rows]
    ([[[1, 1, 0, 2]]], [2, 1])
    """
    numbers, out, found = options.numbers(names), np.zeros(labels.shape, np.uint32), Found()
    step = volumes or 1
    for first in range(0, len(labels), step):
        pages = first if volumes is None else slice(first, first + step)
        likely = prob[pages] if volumes is None else np.moveaxis(prob[pages], 1, 0)
        page, shape = out[pages], labels[pages].shape
        for patch in patches(labels[pages], likely, grey[pages], numbers):
            for place, own, row in cut(patch, shape, options, spacing, found):
                count = len(found.rows) + 1
                page[place][own] = count
                head = {"page": first, "object": count, "class": names[patch.number - 1]}
                found.rows.append(head | row)
    neighbours(found.rows)
    return out, found
