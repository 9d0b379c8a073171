"""Streaming percentiles for the grey limits, identical to those of an image in memory.

Values of up to 16 bits are counted directly. For wider values, the sortable bit pattern is determined 16 bits
at a time (radix selection): each pass counts the next 16 bits of the values that share the known prefix of
the target. So any order statistic needs two passes (32 bits) or four passes (64 bits), independent of the
image size.
"""

from collections.abc import Callable, Iterable

import numpy as np

from vispe.errors import InputError, counted
from vispe.images.normalize import grey_range, type_top
from vispe.segment.out_of_core.source.image import OutOfCoreImage, valid_pixels

_PART = 1 << 16  # values per chunk
_BITS = 16

Limits = tuple[float, float] | None


def find_limits(
    image: OutOfCoreImage, mode: str, clip: tuple[float, float], rows: int, step: Callable[[float], None]
) -> tuple[list[Limits], int, list[str]]:
    """Compute the grey limits of `vispe.images.normalize.normalize`.

    Args:
        image: the image.
        mode: 'stack', 'image' or 'none'.
        clip: two percentiles.
        rows: side in pixels of the pieces that are read.
        step: called with the fraction of all pages read in the first pass.

    Returns:
        (low, high) for each page, None for a constant page or one without data; the number of pixels with data;
        and notes.

    Raises:
        InputError: no page has data, or values are out of range with mode 'none'.
    """
    n_valid = [0]
    step_fraction = 1 / (image.n_pages * max(-(-image.shape[0] // rows) * -(-image.shape[1] // rows), 1))

    def values(pages: Iterable[int], first: bool) -> Iterable[np.ndarray]:
        for page in pages:
            for piece in image.strips(page, rows):
                valid = valid_pixels(piece)
                if first:
                    n_valid[0] += int(valid.sum())
                    step(step_fraction)
                flat = piece.reshape(-1) if valid.all() else piece[valid].reshape(-1)
                yield flat.astype(np.float32) if flat.dtype == np.float16 else flat

    notes: list[str] = []
    out: list[Limits] = []
    groups = [[i] for i in range(image.n_pages)] if mode == "image" else [list(range(image.n_pages))]
    for group in groups:
        source = image.path.name if mode != "image" else f"page {group[0]} of {image.path.name}"
        dtype = np.dtype(np.float32) if image.dtype == np.float16 else image.dtype
        result = percentiles(lambda first, g=group: values(g, first), dtype, () if mode == "none" else clip)
        if result is None:
            notes.append(f"{source} holds no data.")
            out += [None] * len(group)
            continue
        cut_values, lowest, highest = result
        if mode == "none":
            out += [(0.0, type_top(image.path, image.dtype, lowest, highest))] * len(group)
        else:
            limits = grey_range(
                *(float(c) for c in cut_values), lambda s=(lowest, highest): s, clip, source, notes
            )
            out += [limits] * len(group)
    pixels = image.n_pages * image.shape[0] * image.shape[1]
    if not n_valid[0]:
        raise InputError(f"{image.path} has no data: all {pixels} pixels are NaN or infinite.")
    if n_valid[0] < pixels:
        n_missing, percent = pixels - n_valid[0], 100 * (1 - n_valid[0] / pixels)
        verb = "is" if n_missing == 1 else "are"
        notes.insert(
            0,
            f"{counted(n_missing, 'pixel')} ({percent:.2g} %) of {image.path.name} {verb} NaN or infinite: treated as "
            "no data.",
        )
    return out, n_valid[0], notes


def percentiles(
    read: Callable[[bool], Iterable[np.ndarray]], dtype: np.dtype, clip: tuple[float, ...]
) -> tuple[list[np.floating], float, float] | None:
    """Return the percentiles `clip` of all values, bitwise equal to those of `numpy.percentile`.

    Args:
        read: returns all values as one-dimensional arrays; called once per pass, with whether it is the first.
        dtype: dtype of the values: integers, float32 or float64, finite.
        clip: percentiles, 0 to 100.

    Returns:
        The percentiles, the minimum and the maximum; None without values.
    """
    width = 8 * dtype.itemsize
    shift = max(width - _BITS, 0)
    counts = np.zeros(1 << min(width, _BITS), np.int64)
    for key in _keys(read(True), dtype):
        counts += np.bincount((key >> key.dtype.type(shift)).astype(np.int64), minlength=len(counts))
    total = int(counts.sum())
    if not total:
        return None
    # order statistics needed: minimum, maximum, and the two neighbours of each percentile
    ranks = {0, total - 1}
    positions = [(total - 1) * (q / 100) for q in clip]  # as numpy.percentile does with method='linear'
    for position in positions:
        ranks |= {int(position), min(int(position) + 1, total - 1)}
    # first pass: the upper 16 bits of each order statistic, and its rank among the values with this prefix
    sums = np.cumsum(counts)
    prefix = {rank: int(np.searchsorted(sums, rank, side="right")) for rank in ranks}
    rank_within = {rank: rank - int(sums[p] - counts[p]) for rank, p in prefix.items()}
    while shift:
        shift -= _BITS
        tables = {p: np.zeros(1 << _BITS, np.int64) for p in set(prefix.values())}
        for key in _keys(read(False), dtype):
            upper = key >> key.dtype.type(shift + _BITS)
            # only values with the prefix of a wanted rank are counted
            for p, table in tables.items():
                lower = (key[upper == p] >> key.dtype.type(shift)) & key.dtype.type(0xFFFF)
                table += np.bincount(lower.astype(np.int64), minlength=len(table))
        for rank, p in prefix.items():
            sums = np.cumsum(tables[p])
            digit = int(np.searchsorted(sums, rank_within[rank], side="right"))
            rank_within[rank] -= int(sums[digit] - tables[p][digit])
            prefix[rank] = p << _BITS | digit
    value = {rank: _value(key, dtype) for rank, key in prefix.items()}
    quantiles = []
    for position in positions:
        first = int(position)
        pair = np.array([value[first], value[min(first + 1, total - 1)]], dtype)
        quantiles.append(np.quantile(pair, np.array([position - first if first < total - 1 else 0.0]))[0])
    return quantiles, float(value[0]), float(value[total - 1])


def _keys(arrays: Iterable[np.ndarray], dtype: np.dtype) -> Iterable[np.ndarray]:
    """Convert values to unsigned integers of the same order, chunk by chunk."""
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
                # IEEE 754: flip all bits of negative values, and the sign bit of others
                bits = (part + dtype.type(0)).view(kind)  # -0 becomes 0
                yield np.where(bits & top, ~bits, bits | top)


def _value(key: int, dtype: np.dtype) -> np.generic:
    """Convert a key of `_keys` back to its value."""
    kind = np.dtype(f"u{dtype.itemsize}")
    top = 1 << (8 * dtype.itemsize - 1)
    if dtype.kind == "i":
        key ^= top
    elif dtype.kind == "f":
        key = key ^ top if key & top else ~key & (2 * top - 1)
    return np.array([key], kind).view(dtype)[0]
