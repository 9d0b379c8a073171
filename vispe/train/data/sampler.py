"""Infinite random order of images with random access, determined by its seed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

EPOCH, PERIOD, ROW = 1, 2, 3  # purposes of random numbers, as spawn keys of independent streams
_CACHED = 4  # permutations in memory


def stream(seed: int, *purpose: int) -> np.random.PCG64:
    """Return an independent bit generator for each seed and purpose."""
    return np.random.PCG64(np.random.SeedSequence(seed, spawn_key=purpose))


def permutation(count: int, seed: int, *purpose: int) -> np.ndarray:
    """Return a random permutation (count,) int64 that does not depend on the release of numpy."""
    return np.argsort(stream(seed, *purpose).random_raw(count), kind="stable")


class Order:
    """Infinite order of rows: epochs without repetition, or parts in exact proportions.

    One part: rows [e n, (e + 1) n) are a permutation of its n images, different in each epoch e. Several parts: each
    period contains the specified number of rows of each part in random order, and each part has its own epochs.

    >>> sorted(Order([(0, 4, 1)], seed=0)(np.arange(4)).tolist())
    [0, 1, 2, 3]

    Args:
        shares: (first, length, rows) of each part, as `Source.shares` returns them.
        seed: seed of all permutations.
        keep: sorted indices of the allowed images; None allows all. Callers must check that no part is empty.
    """

    def __init__(
        self, shares: Sequence[tuple[int, int, int]], seed: int, keep: np.ndarray | None = None
    ) -> None:
        self.seed = seed
        self.keep = keep
        cuts = [(first, first + length) for first, length, _ in shares]
        if keep is not None:
            cuts = [tuple(np.searchsorted(keep, cut).tolist()) for cut in cuts]
        self.parts = cuts
        self.rows = [rows for *_, rows in shares]
        self._permutations: dict[tuple[int, ...], np.ndarray] = {}
        self._slots = np.repeat(np.arange(len(shares)), self.rows)

    def __len__(self) -> int:
        """Return the number of distinct images."""
        return sum(stop - start for start, stop in self.parts)

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """Return the image indices (n,) int64 of rows (n,) of the order."""
        rows = np.asarray(rows, np.int64)
        out = np.empty_like(rows)
        if len(self.parts) == 1:
            out[:] = self._within(0, rows)
        else:
            parts, numbers = self._assign(rows)
            for part in range(len(self.parts)):
                out[parts == part] = self._within(part, numbers[parts == part])
        return out if self.keep is None else self.keep[out]

    def _assign(self, row_numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the part of each row, and the index of the row within its part."""
        periods, offsets = np.divmod(row_numbers, len(self._slots))
        parts, numbers = np.empty_like(row_numbers), np.empty_like(row_numbers)
        for period in np.unique(periods):
            in_period = periods == period
            slots = self._slots[self._permuted(len(self._slots), PERIOD, int(period))]
            for part, rows in enumerate(self.rows):
                selected = in_period & (slots[offsets] == part)
                parts[selected] = part
                numbers[selected] = period * rows + np.cumsum(slots == part)[offsets[selected]] - 1
        return parts, numbers

    def _within(self, part: int, numbers: np.ndarray) -> np.ndarray:
        start, stop = self.parts[part]
        epochs, offsets = np.divmod(numbers, max(stop - start, 1))
        out = np.empty_like(numbers)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            out[in_epoch] = self._permuted(stop - start, EPOCH, part, int(epoch))[offsets[in_epoch]]
        return start + out

    def _permuted(self, count: int, *purpose: int) -> np.ndarray:
        if purpose not in self._permutations:
            while len(self._permutations) >= max(_CACHED, 2 * len(self.parts) + 1):
                self._permutations.pop(next(iter(self._permutations)))
            self._permutations[purpose] = permutation(count, self.seed, *purpose)
        return self._permutations[purpose]
