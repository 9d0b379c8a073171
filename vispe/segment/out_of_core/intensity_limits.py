"""The percentiles that become black and white, exactly as for an image in memory, from a stream of values.

Numbers of 16 bits or fewer are counted. Of wider ones the sorted bit pattern is narrowed down 16 bits at a time: each
pass counts the next 16 bits of the values that agree with the wanted one so far. So any order statistic is found in two
passes (32 bits) or four (64 bits), whatever the size of the image.
"""

from collections.abc import Callable, Iterable

import numpy as np

from vispe.errors import InputError
from vispe.images.normalize import grey_range, type_top
from vispe.segment.out_of_core.image_source import BigImage, valid_pixels

_PART = 1 << 16  # values that are counted at once
_BITS = 16

Limits = tuple[float, float] | None


def find_limits(
    image: BigImage, mode: str, clip: tuple[float, float], rows: int, step: Callable[[float], None]
) -> tuple[list[Limits], int, list[str]]:
    """Find what `vispe.images.normalize.normalize` scales by.

    Args:
        image: the image.
        mode: 'stack', 'image' or 'none'.
        clip: two percentiles.
        rows: side of the pieces that are read at once, in pixels.
        step: called with the share of all pages that was read in the first pass.

    Returns:
        (low, high) for each page, None for one that is constant or holds no data; the number of pixels with data;
        and notes.

    Raises:
        InputError: no data at all; mode 'none' and values out of range.
    """
    counted = [0]
    share = 1 / (image.n_pages * max(-(-image.shape[0] // rows) * -(-image.shape[1] // rows), 1))

    def values(pages: Iterable[int], first: bool) -> Iterable[np.ndarray]:
        for page in pages:
            for piece in image.strips(page, rows):
                valid = valid_pixels(piece)
                if first:
                    counted[0] += int(valid.sum())
                    step(share)
                kept = piece.reshape(-1) if valid.all() else piece[valid].reshape(-1)
                yield kept.astype(np.float32) if kept.dtype == np.float16 else kept

    notes: list[str] = []
    out: list[Limits] = []
    groups = [[i] for i in range(image.n_pages)] if mode == "image" else [list(range(image.n_pages))]
    for group in groups:
        where = image.path.name if mode != "image" else f"page {group[0]} of {image.path.name}"
        dtype = np.dtype(np.float32) if image.dtype == np.float16 else image.dtype
        found = percentiles(lambda first, g=group: values(g, first), dtype, () if mode == "none" else clip)
        if found is None:
            notes.append(f"{where} holds no data.")
            out += [None] * len(group)
            continue
        cuts, lowest, highest = found
        if mode == "none":
            out += [(0.0, type_top(image.path, image.dtype, lowest, highest))] * len(group)
        else:
            limits = grey_range(*(float(c) for c in cuts), lambda s=(lowest, highest): s, clip, where, notes)
            out += [limits] * len(group)
    pixels = image.n_pages * image.shape[0] * image.shape[1]
    if not counted[0]:
        raise InputError(f"{image.path} holds no data: all {pixels} pixels are NaN or infinite.")
    if counted[0] < pixels:
        lost, percent = pixels - counted[0], 100 * (1 - counted[0] / pixels)
        notes.insert(
            0,
            f"{lost} pixels ({percent:.2g} %) of {image.path.name} are NaN or infinite: treated as no data.",
        )
    return out, counted[0], notes


def percentiles(
    read: Callable[[bool], Iterable[np.ndarray]], dtype: np.dtype, clip: tuple[float, ...]
) -> tuple[list[np.floating], float, float] | None:
    """Find the percentiles `clip` of all values, equal to those of `numpy.percentile` in every bit.

    Args:
        read: gives all values, in arrays of one dimension, each time it is called, with whether it is the first time.
        dtype: of the values: integers, float32 or float64, finite.
        clip: percentiles, 0 to 100.

    Returns:
        The percentiles, the smallest and the largest value; None when there are no values.
    """
    width = 8 * dtype.itemsize
    shift = max(width - _BITS, 0)
    counts = np.zeros(1 << min(width, _BITS), np.int64)
    for key in _keys(read(True), dtype):
        counts += np.bincount((key >> key.dtype.type(shift)).astype(np.int64), minlength=len(counts))
    total = int(counts.sum())
    if not total:
        return None
    ranks = {0, total - 1}
    places = [(total - 1) * (q / 100) for q in clip]  # as numpy.percentile does with method='linear'
    for place in places:
        ranks |= {int(place), min(int(place) + 1, total - 1)}
    sums = np.cumsum(counts)
    prefix = {rank: int(np.searchsorted(sums, rank, side="right")) for rank in ranks}
    left = {rank: rank - int(sums[p] - counts[p]) for rank, p in prefix.items()}
    while shift:
        shift -= _BITS
        tables = {p: np.zeros(1 << _BITS, np.int64) for p in set(prefix.values())}
        for key in _keys(read(False), dtype):
            upper = key >> key.dtype.type(shift + _BITS)
            for p, table in tables.items():
                lower = (key[upper == p] >> key.dtype.type(shift)) & key.dtype.type(0xFFFF)
                table += np.bincount(lower.astype(np.int64), minlength=len(table))
        for rank, p in prefix.items():
            sums = np.cumsum(tables[p])
            digit = int(np.searchsorted(sums, left[rank], side="right"))
            left[rank] -= int(sums[digit] - tables[p][digit])
            prefix[rank] = p << _BITS | digit
    value = {rank: _value(key, dtype) for rank, key in prefix.items()}
    found = []
    for place in places:
        first = int(place)
        pair = np.array([value[first], value[min(first + 1, total - 1)]], dtype)
        found.append(np.quantile(pair, np.array([place - first if first < total - 1 else 0.0]))[0])
    return found, float(value[0]), float(value[total - 1])


def _keys(arrays: Iterable[np.ndarray], dtype: np.dtype) -> Iterable[np.ndarray]:
    """Turn values into unsigned numbers of the same order, part by part."""
    kind = np.dtype(f"u{dtype.itemsize}")
    top = kind.type(1 << (8 * dtype.itemsize - 1))
    for array in arrays:
        for start in range(0, len(array), _PART):
            part = array[start : start + _PART]
            if dtype.kind == "u":
                yield part
            elif dtype.kind == "i":
                yield part.view(kind) ^ top
            else:
                bits = (part + dtype.type(0)).view(kind)  # -0 becomes 0
                yield np.where(bits & top, ~bits, bits | top)


def _value(key: int, dtype: np.dtype) -> np.generic:
    """Turn a key of `_keys` into its value."""
    kind = np.dtype(f"u{dtype.itemsize}")
    top = 1 << (8 * dtype.itemsize - 1)
    if dtype.kind == "i":
        key ^= top
    elif dtype.kind == "f":
        key = key ^ top if key & top else ~key & (2 * top - 1)
    return np.array([key], kind).view(dtype)[0]
