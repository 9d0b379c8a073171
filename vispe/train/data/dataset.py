"""What training reads: sources of pictures by number, one after another, or mixed in exact proportions."""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any

import numpy as np
from torch import Tensor

from vispe.errors import InputError, OptionError

PERIOD = 1_000_000  # rows at most after which the proportions of a mixture come out exactly
SMOOTH = 256  # rows at least that are drawn together, so that few draws are needed


class Source(ABC):
    """Pictures by number. Anything that has these methods will do; `vispe.train.data.Batches` reads it.

    A picture is (3, h, w) float32 in [0, 1], of any size, and picture i is the same whenever it is read. Sources are
    read by worker processes, so they must be picklable and hold no open files.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of pictures."""

    @abstractmethod
    def __getitem__(self, i: int) -> Tensor:
        """Return picture i, (3, h, w) float32 in [0, 1]."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return what a card says of it, as JSON: kind, count, where, licence (empty where it is not known)."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a sha256 over what identifies the content: names and sizes, or seeds, and how it is read."""

    def name(self, i: int) -> str:
        """Return what messages call picture i."""
        return f"picture {i}"

    def shape(self, i: int) -> tuple[int, int]:
        """Return height and width of picture i in pixels; reads it unless the source knows better."""
        h, w = self[i].shape[-2:]
        return h, w

    def shares(self) -> list[tuple[int, int, int]]:
        """Return (first, length, rows) of each part: its pictures, and how many rows of a period it gets."""
        return [(0, len(self), 1)]

    def __iter__(self) -> Iterator[Tensor]:
        """Yield all pictures in order."""
        return (self[i] for i in range(len(self)))


class Concat(Source):
    """Several sources, one after another: every picture is seen as often as any other.

    >>> from vispe.train.data import SyntheticSource
    >>> len(Concat([SyntheticSource(3), SyntheticSource(4, seed=1)]))
    7

    Raises:
        OptionError: no source, or one that is a `Mixture`, whose weights would have no effect in here.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = tuple(sources)
        if not self.sources:
            raise OptionError("no source of pictures was given; give at least one.")
        if any(len(s.shares()) > 1 for s in self.sources):
            raise OptionError(
                "a mixture is among the sources, and its weights would have no effect there; put its sources and their "
                "weights into one Mixture."
            )
        self._firsts = [0, *accumulate(map(len, self.sources))]

    def __len__(self) -> int:
        return self._firsts[-1]

    def _find(self, i: int) -> tuple[Source, int]:
        i = index(i, len(self))
        k = bisect_right(self._firsts, i) - 1
        return self.sources[k], i - self._firsts[k]

    def __getitem__(self, i: int) -> Tensor:
        source, own = self._find(i)
        return source[own]

    def name(self, i: int) -> str:
        """Return what messages call picture i."""
        source, own = self._find(i)
        return source.name(own)

    def shape(self, i: int) -> tuple[int, int]:
        """Return height and width of picture i in pixels."""
        source, own = self._find(i)
        return source.shape(own)

    def describe(self) -> dict[str, Any]:
        """Return kind, count and the descriptions of the parts."""
        return {"kind": "concat", "count": len(self), "parts": [s.describe() for s in self.sources]}

    def fingerprint(self) -> str:
        """Return a sha256 over those of the parts, in order."""
        return digest("concat", *(s.fingerprint() for s in self.sources))


class Mixture(Concat):
    """Several sources in exact proportions, whatever their sizes.

    With weights of 2 and 1, every run of `period` rows that starts at a multiple of it has two thirds of its rows from
    the first source and one third from the second, in random order. Each source is gone through in its own order,
    without repetition until all of its pictures have been seen, and then anew; so the pictures of a small source with a
    large weight come back soon.

    >>> from vispe.train.data import SyntheticSource
    >>> Mixture([SyntheticSource(3), SyntheticSource(4, seed=1)], [2, 1]).describe()["weights"]
    [2.0, 1.0]

    Args:
        sources: at least one.
        weights: one for each, positive; only their proportions count. Decimals are taken as they are written: 0.1 is a
            tenth.

    Attributes:
        period: rows after which the proportions have come out exactly; a multiple of the sum of the weights as the
            smallest whole numbers of these proportions.

    Raises:
        OptionError: as many weights as sources are needed, all positive; or the period would exceed a million rows.
    """

    def __init__(self, sources: Sequence[Source], weights: Sequence[float]) -> None:
        super().__init__(sources)
        self.weights = tuple(weights)
        if len(self.weights) != len(self.sources):
            raise OptionError(
                f"{len(self.weights)} weights were given for {len(self.sources)} sources; give one for each."
            )
        exact = [_fraction(w) for w in self.weights]
        scale = Fraction(math.lcm(*(w.denominator for w in exact)), math.gcd(*(w.numerator for w in exact)))
        rows = [int(w * scale) for w in exact]
        rows = [n // math.gcd(*rows) for n in rows]
        if sum(rows) > PERIOD:
            raise OptionError(
                f"weights={list(self.weights)} come out exactly only every {sum(rows)} rows, at most {PERIOD} are "
                "possible; give rounder ones, such as 2 and 1 for 0.6667 and 0.3333."
            )
        times = math.ceil(SMOOTH / sum(rows))
        self.rows = tuple(n * times for n in rows)
        self.period = sum(self.rows)

    def shares(self) -> list[tuple[int, int, int]]:
        """Return (first, length, rows) of each part."""
        lengths = [len(s) for s in self.sources]
        return list(zip(self._firsts[:-1], lengths, self.rows, strict=True))

    def describe(self) -> dict[str, Any]:
        """Return kind, count, weights, period and the descriptions of the parts."""
        weights = [float(w) for w in self.weights]
        return {**super().describe(), "kind": "mixture", "weights": weights, "period": self.period}

    def fingerprint(self) -> str:
        """Return a sha256 over those of the parts and their proportions."""
        return digest("mixture", *self.rows, *(s.fingerprint() for s in self.sources))


def index(i: int, count: int) -> int:
    """Return i, counted from the end if it is negative.

    Raises:
        IndexError: there is no such picture; this also ends iteration over a source.
    """
    if not -count <= i < count:
        raise IndexError(f"picture {i} was asked for, and there are {count}.")
    return i % count


def whole(name: str, value: Any, least: int) -> int:
    """Return a whole number that was given as an option.

    Raises:
        OptionError: it is none, or less than `least`.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise OptionError(f"{name}={value!r} is not a whole number of at least {least}.")
    return int(value)


def digest(*parts: str | int | float | Sequence[Any] | None) -> str:
    """Return the sha256 of what is given, written as JSON."""
    return hashlib.sha256(json.dumps(parts, ensure_ascii=False).encode()).hexdigest()


def some(names: Sequence[str], limit: int = 20) -> str:
    """Return the first names in a row, and how many more there are."""
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest


def filled(count: int, where: str) -> None:
    """Raise where a source has no pictures.

    Raises:
        InputError: `count` is 0.
    """
    if count == 0:
        raise InputError(f"{where} holds no picture that can be read; give another source.")


def _fraction(weight: float) -> Fraction:
    try:
        exact = Fraction(str(weight))
    except (ValueError, ZeroDivisionError):
        exact = Fraction(0)
    if isinstance(weight, bool) or exact <= 0:
        raise OptionError(f"weight={weight!r} is not a positive number; leave a source out to give it none.")
    return exact
