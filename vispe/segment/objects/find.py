"""From connected patches to objects: each patch by itself, so that the result does not depend on how it was read."""

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
        prob: probability of the class.
        grey: (..., c) values of the file.
    """

    origin: tuple[int, ...]
    mask: np.ndarray
    number: int
    free: np.ndarray
    prob: np.ndarray
    grey: np.ndarray


@dataclass(eq=False)
class Found:
    """The objects of an image.

    Attributes:
        rows: of the table.
        small: objects left out for their size.
        border: objects left out since they touch the border.
    """

    rows: list[Row] = field(default_factory=list)
    small: int = 0
    border: int = 0


def cut(
    patch: Patch,
    shape: Sequence[int],
    options: ObjectOptions,
    spacing: Sequence[float] | None,
    found: Found,
) -> Iterator[tuple[tuple[slice, ...], np.ndarray, Row]]:
    """Divide a patch into objects, and measure them.

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
        if options.exclude_border and (0 in origin or any(e == n for e, n in zip(ends, shape, strict=True))):
            found.border += 1
        elif own.sum() < options.min_area:
            found.small += 1
        else:
            place = tuple(slice(o, e) for o, e in zip(origin, ends, strict=True))
            yield place, own, measure(own, patch.grey[box], origin, spacing)


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

    asked = np.isin(labels, numbers)
    marked = label(np.where(asked, labels, 0), background=0, connectivity=labels.ndim)
    for index, box in enumerate(find_objects(marked), start=1):
        mask = marked[box] == index
        number = int(labels[box][mask][0])
        origin = tuple(s.start for s in box)
        yield Patch(origin, mask, number, ~asked[box], prob[(number - 1, *box)], grey[box])


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
