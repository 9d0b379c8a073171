"""Objects from connected components, each processed separately, so that the result does not depend on blocks."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from vispe.segment.objects.options import ObjectOptions
from vispe.segment.objects.split import split
from vispe.segment.objects.table import Row, add_nearest_distances, measure


@dataclass(frozen=True, eq=False)
class Component:
    """A connected component of one class (8 neighbours on a page, 26 in a volume), in its bounding box.

    Attributes:
        origin: position of the box in the image.
        mask: bool, the component.
        number: number of its class.
        free: bool, pixels that may be filled as holes: pixels of classes that are not requested.
        valid: bool, pixels with data; the array is one pixel larger than the box at both ends of each axis,
            with False beyond the page.
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
class ObjectList:
    """The objects of an image.

    Attributes:
        rows: rows of the table.
        small: number of objects excluded by size.
        border: number of objects excluded because they touch the border or pixels without data.
        in_frame: number of objects in the counting frame, by class number; see `split_component`.
    """

    rows: list[Row] = field(default_factory=list)
    small: int = 0
    border: int = 0
    in_frame: dict[int, float] = field(default_factory=dict)


def split_component(
    component: Component,
    field_shape: Sequence[int],
    options: ObjectOptions,
    spacing: Sequence[float] | None,
    objects: ObjectList,
) -> Iterator[tuple[tuple[slice, ...], np.ndarray, Row]]:
    """Split a component into objects, measure them, and count those in the counting frame.

    The frame counts an object unless it touches the lower, right or last side of the data (Gundersen, Journal
    of Microscopy 111, 1977): of two adjacent fields, exactly one counts an object that extends over both. The size of
    an object that the border cuts is unknown, so `min_area` is not applied to it. Instead objects of all sizes are
    counted, and two estimates are subtracted: small objects, and, on pages, slanted objects that pass the lower right
    corner of a field and that both adjacent fields count. The estimates are sums over objects inside, each weighted by
    the inverse of the probability that an object of its extent is inside (Miles, 1974; Lantuejoul, 1980).
    `exclude_border` has no effect on the frame.

    Args:
        component: component in its bounding box.
        field_shape: shape of the bounding box of the pixels with data of the page or volume.
        options: definition of objects.
        spacing: microns per pixel along each axis; None if unknown.
        objects: list of objects whose counts of excluded and framed objects are updated.

    Yields:
        The box in the image, the mask in the box, and the table row of each object.
    """
    from scipy.ndimage import binary_fill_holes, find_objects

    mask = component.mask
    if options.fill_holes:
        mask = mask | (binary_fill_holes(mask) & component.free)
    parts = mask.astype(np.int32)
    if options.touching == "split":
        # relative to the mean of y and x, so that a transposed image is split like the image
        side = None if spacing is None else math.sqrt(spacing[-2] * spacing[-1])
        relative = None if spacing is None else [s / side for s in spacing]
        # filled holes get probability 1, so that they do not act as necks
        parts = split(mask, np.where(component.mask, component.prob, 1), relative)
    for number, box in enumerate(find_objects(parts), start=1):
        object_mask = parts[box] == number
        origin = tuple(o + s.start for o, s in zip(component.origin, box, strict=True))
        stops = [o + n for o, n in zip(origin, object_mask.shape, strict=True)]
        before, after = _ends(object_mask, component.valid[tuple(slice(s.start, s.stop + 2) for s in box)])
        at_border = before or after
        small = object_mask.sum() < options.min_area
        framed = 0.0 if after else 1.0
        if framed and not at_border:
            # inverse probability that an object of this extent is inside the field
            weight = math.prod(
                n / (n - e + o - 1) for n, o, e in zip(field_shape, origin, stops, strict=True)
            )
            framed -= weight * (1.0 if small else _counted_twice(object_mask) / math.prod(field_shape))
        objects.in_frame[component.number] = objects.in_frame.get(component.number, 0.0) + framed
        if options.exclude_border and at_border:
            objects.border += 1
        elif small:
            objects.small += 1
        else:
            object_box = tuple(slice(o, e) for o, e in zip(origin, stops, strict=True))
            yield object_box, object_mask, measure(object_mask, component.grey[box], origin, spacing)


def _ends(mask: np.ndarray, valid: np.ndarray) -> tuple[bool, bool]:
    """Return whether the data end before an object, and whether they end after it, along any axis.

    Args:
        mask: bool, pixels of the object.
        valid: bool, as in `Component`.
    """
    from scipy.ndimage import binary_fill_holes

    if valid.all():
        return False, False
    # pixels without data inside an object do not end the data
    filled, before, after = np.pad(binary_fill_holes(mask), 1), False, False
    for axis in range(mask.ndim):
        pixels, data = filled.swapaxes(0, axis), valid.swapaxes(0, axis)
        before |= bool((pixels[1:] & ~pixels[:-1] & ~data[:-1]).any())
        after |= bool((pixels[:-1] & ~pixels[1:] & ~data[1:]).any())
    return before, after


def _counted_twice(mask: np.ndarray) -> int:
    """Return the number of positions of the corner of four fields at which two count an object (h, w); 0 for volumes.

    The upper right and the lower left field both count it if the object does not extend into the lower right field.
    """
    if mask.ndim > 2:
        return 0
    # positions from which the object extends into the lower right field
    reached = np.logical_or.accumulate(np.logical_or.accumulate(mask[:0:-1, :0:-1], 0), 1)
    return int(reached.size - np.count_nonzero(reached))


def data_extent(labels: np.ndarray) -> tuple[int, ...]:
    """Return the shape of the bounding box of the pixels with data: that of the field within a crop or mask."""
    axes = range(labels.ndim)
    ends = [np.flatnonzero(labels.any(tuple(a for a in axes if a != axis))) for axis in axes]
    return tuple(int(np.ptp(positions)) + 1 if positions.size else 0 for positions in ends)


def components(
    labels: np.ndarray, prob: np.ndarray, grey: np.ndarray, numbers: Sequence[int]
) -> Iterator[Component]:
    """Yield the components of a page or volume in memory, in order of their first pixels.

    Args:
        labels: (h, w) or (z, h, w) classes.
        prob: (K, ...) probabilities.
        grey: (..., c) values of the file.
        numbers: class numbers.
    """
    from scipy.ndimage import find_objects
    from skimage.measure import label

    requested, valid = np.isin(labels, numbers), np.pad(labels > 0, 1)
    marked = label(np.where(requested, labels, 0), background=0, connectivity=labels.ndim)
    for index, box in enumerate(find_objects(marked), start=1):
        mask = marked[box] == index
        number = int(labels[box][mask][0])
        origin = tuple(s.start for s in box)
        data = valid[tuple(slice(s.start, s.stop + 2) for s in box)]
        yield Component(origin, mask, number, ~requested[box], data, prob[(number - 1, *box)], grey[box])


def find(
    labels: np.ndarray,
    prob: np.ndarray,
    grey: np.ndarray,
    names: Sequence[str],
    options: ObjectOptions,
    *,
    volumes: int | None = None,
    spacing: Sequence[float] | None = None,
) -> tuple[np.ndarray, ObjectList]:
    """Find and measure the objects of an image in memory.

    Args:
        labels: (z, h, w) classes 1..K, 0 = no data.
        prob: (z, K, h, w) probabilities.
        grey: (z, h, w, c) values of the file.
        names: names of the K classes.
        options: definition of objects.
        volumes: pages per volume, of which the image has one or more; None treats each page separately.
        spacing: microns per pixel (y, x), or (z, y, x) with `volumes`; None if unknown.

    Returns:
        A map (z, h, w) uint32, 0 = no object, and the objects. Numbers start at 1 and continue from page to page.

    Example:
        >>> page = np.array([[[2, 2, 1, 2]]])
        >>> options = ObjectOptions("pore", "keep", 0)
        >>> instances, objects = find(page, np.ones((1, 2, 1, 4)), page[..., None], ["matrix", "pore"], options)
        >>> instances.tolist(), [row["area_px"] for row in objects.rows]
        ([[[1, 1, 0, 2]]], [2, 1])
    """
    numbers, out, objects = options.numbers(names), np.zeros(labels.shape, np.uint32), ObjectList()
    step = volumes or 1
    for first in range(0, len(labels), step):
        pages = first if volumes is None else slice(first, first + step)
        page_prob = prob[pages] if volumes is None else np.moveaxis(prob[pages], 1, 0)
        page, field_shape = out[pages], data_extent(labels[pages])
        for component in components(labels[pages], page_prob, grey[pages], numbers):
            for object_box, object_mask, row in split_component(
                component, field_shape, options, spacing, objects
            ):
                count = len(objects.rows) + 1
                page[object_box][object_mask] = count
                head = {"page": first, "object": count, "class": names[component.number - 1]}
                objects.rows.append(head | row)
    add_nearest_distances(objects.rows)
    return out, objects
