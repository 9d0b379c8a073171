"""The endless order in which pictures fill the rows of batches: known at any place, it depends on its seed alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

EPOCH, PERIOD, ROW = 1, 2, 3  # what random numbers are drawn for; keeps their streams apart
_KEPT = 4  # permutations that are kept in memory


def stream(seed: int, *purpose: int) -> np.random.PCG64:
    """Return the random bits for one purpose; another seed or purpose has others."""
    return np.random.PCG64(np.random.SeedSequence(seed, spawn_key=purpose))


def permutation(count: int, seed: int, *purpose: int) -> np.ndarray:
    """Return the numbers below `count` in random order, int64; the same for every release of numpy."""
    return np.argsort(stream(seed, *purpose).random_raw(count), kind="stable")


class Order:
    """The endless order of rows: pictures in epochs without repetition, or parts in exact proportions.

    One part: rows [e n, (e + 1) n) are a permutation of its n pictures, another one in each epoch e. Several parts:
    each period of rows has the given number of rows of each part, in random order, and each part is gone through as if
    alone.

    >>> sorted(Order([(0, 4, 1)], seed=0)(np.arange(4)).tolist())
    [0, 1, 2, 3]

    Args:
        shares: (first, length, rows) of each part, as `Source.shares` returns them.
        seed: of all permutations.
        keep: numbers of the pictures that may be taken, sorted; None takes all. A part without any is an error of the
            caller.
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
        """Return how many different pictures there are."""
        return sum(stop - start for start, stop in self.parts)

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """Return the numbers of the pictures at places (n,) int64 of the order."""
        places = np.asarray(places, np.int64)
        out = np.empty_like(places)
        if len(self.parts) == 1:
            out[:] = self._within(0, places)
        else:
            parts, turns = self._turns(places)
            for part in range(len(self.parts)):
                out[parts == part] = self._within(part, turns[parts == part])
        return out if self.keep is None else self.keep[out]

    def _turns(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the part of each row, and the number of that row within its part, from 0."""
        periods, offsets = np.divmod(places, len(self._slots))
        parts, turns = np.empty_like(places), np.empty_like(places)
        for period in np.unique(periods):
            here = periods == period
            slots = self._slots[self._permuted(len(self._slots), PERIOD, int(period))]
            for part, rows in enumerate(self.rows):
                own = here & (slots[offsets] == part)
                parts[own] = part
                turns[own] = period * rows + np.cumsum(slots == part)[offsets[own]] - 1
        return parts, turns

    def _within(self, part: int, turns: np.ndarray) -> np.ndarray:
        start, stop = self.parts[part]
        epochs, offsets = np.divmod(turns, max(stop - start, 1))
        out = np.empty_like(turns)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            out[here] = self._permuted(stop - start, EPOCH, part, int(epoch))[offsets[here]]
        return start + out

    def _permuted(self, count: int, *purpose: int) -> np.ndarray:
        if purpose not in self._permutations:
            while len(self._permutations) >= max(_KEPT, 2 * len(self.parts) + 1):
                self._permutations.pop(next(iter(self._permutations)))
            self._permutations[purpose] = permutation(count, self.seed, *purpose)
        return self._permutations[purpose]
