"""Image sources for training: interface, concatenation, and mixtures in exact proportions."""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Annotated, Any

from torch import Tensor

from vispe.errors import InputError, OptionError
from vispe.utils.interval import Interval
from vispe.utils.option_values import read_option

PERIOD = 1_000_000  # largest number of rows after which the proportions of a mixture are exact
SMOOTH = 256  # smallest period in rows, which limits the number of permutations


class Source(ABC):
    """Interface of map-style image sources, as used by `vispe.train.data.Batches`.

    An image is (3, h, w) float32 in [0, 1], of any size, and reading image i must be deterministic. Worker processes
    read sources, so they must be picklable and must not contain open files.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of images."""

    @abstractmethod
    def __getitem__(self, i: int) -> Tensor:
        """Return image i, (3, h, w) float32 in [0, 1]."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return the entry of the model card, as JSON: kind, count, where, licence (empty if unknown)."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a sha256 of the identity of the content: names and sizes, or seeds, and reading options."""

    def name(self, i: int) -> str:
        """Return the name of image i in messages."""
        return f"image {i}"

    def shape(self, i: int) -> tuple[int, int]:
        """Return height and width of image i in pixels; reads the image unless overridden."""
        h, w = self[i].shape[-2:]
        return h, w

    def shares(self) -> list[tuple[int, int, int]]:
        """Return (first, length, rows) of each part: its range of images, and its number of rows per period."""
        return [(0, len(self), 1)]

    def __iter__(self) -> Iterator[Tensor]:
        """Yield all images in order."""
        return (self[i] for i in range(len(self)))


class ConcatSource(Source):
    """Concatenation of sources: every image has the same frequency.

    >>> from vispe.train.data import SyntheticSource
    >>> len(ConcatSource([SyntheticSource(3), SyntheticSource(4, seed=1)]))
    7

    Raises:
        OptionError: there is no source, or a source is a `Mixture`, whose weights would have no effect.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = tuple(sources)
        if not self.sources:
            raise OptionError("Concat: needs at least one source, got none.")
        if any(len(s.shares()) > 1 for s in self.sources):
            raise OptionError(
                "Concat: sources must not be mixtures, whose weights would have no effect. Pass all sources and "
                "weights to one Mixture."
            )
        self._firsts = [0, *accumulate(map(len, self.sources))]

    def __len__(self) -> int:
        return self._firsts[-1]

    def _find(self, i: int) -> tuple[Source, int]:
        i = index(i, len(self))
        k = bisect_right(self._firsts, i) - 1
        return self.sources[k], i - self._firsts[k]

    def __getitem__(self, i: int) -> Tensor:
        source, local = self._find(i)
        return source[local]

    def name(self, i: int) -> str:
        """Return the name of image i in messages."""
        source, local = self._find(i)
        return source.name(local)

    def shape(self, i: int) -> tuple[int, int]:
        """Return height and width of image i in pixels."""
        source, local = self._find(i)
        return source.shape(local)

    def describe(self) -> dict[str, Any]:
        """Return kind, count and the descriptions of the parts."""
        return {"kind": "concat", "count": len(self), "parts": [s.describe() for s in self.sources]}

    def fingerprint(self) -> str:
        """Return a sha256 of the fingerprints of the parts, in order."""
        return digest("concat", *(s.fingerprint() for s in self.sources))


class Mixture(ConcatSource):
    """Mixture of sources in exact proportions, regardless of their sizes.

    With weights 2 and 1, every aligned block of `period` rows has two thirds of its rows from the first source and one
    third from the second, in random order. Each source has its own epochs without repetition, so the images of a small
    source with a large weight are repeated more often.

    >>> from vispe.train.data import SyntheticSource
    >>> Mixture([SyntheticSource(3), SyntheticSource(4, seed=1)], [2, 1]).describe()["weights"]
    [2.0, 1.0]

    Args:
        sources: one or more sources.
        weights: one positive weight per source; only their ratios matter. Decimals are exact: 0.1 is one tenth.

    Attributes:
        period: number of rows after which the proportions are exact; a multiple of the sum of the weights reduced to
            the smallest integers.

    Raises:
        OptionError: the number of weights differs from that of sources, a weight is not positive, or the
            period exceeds a million rows.
    """

    def __init__(self, sources: Sequence[Source], weights: Sequence[float]) -> None:
        super().__init__(sources)
        self.weights = tuple(weights)
        if len(self.weights) != len(self.sources):
            raise OptionError(
                f"Mixture: weights must have one entry per source ({len(self.sources)}), got {len(self.weights)}."
            )
        exact = [_fraction(w) for w in self.weights]
        scale = Fraction(math.lcm(*(w.denominator for w in exact)), math.gcd(*(w.numerator for w in exact)))
        rows = [int(w * scale) for w in exact]
        rows = [n // math.gcd(*rows) for n in rows]
        if sum(rows) > PERIOD:
            raise OptionError(
                f"Mixture: weights must have a common period of at most {PERIOD} rows, got {list(self.weights)} with a "
                f"period of {sum(rows)}. Round them, such as 2 and 1 for 0.6667 and 0.3333."
            )
        repeats = math.ceil(SMOOTH / sum(rows))
        self.rows = tuple(n * repeats for n in rows)
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
        """Return a sha256 of the fingerprints of the parts and their proportions."""
        return digest("mixture", *self.rows, *(s.fingerprint() for s in self.sources))


def index(i: int, count: int) -> int:
    """Return a non-negative index; negative ones count from the end.

    Raises:
        IndexError: out of range; this also ends iteration over a source.
    """
    if not -count <= i < count:
        raise IndexError(f"image index must be below {count}, got {i}.")
    return i % count


def check_integer(name: str, value: Any, least: int) -> int:
    """Return the value of an integer option.

    Raises:
        OptionError: not an integer, or below `least`.
    """
    return read_option(name, value, Annotated[int, Interval(least=least)])


def digest(*parts: str | int | float | Sequence[Any] | None) -> str:
    """Return the sha256 of the arguments as JSON."""
    return hashlib.sha256(json.dumps(parts, ensure_ascii=False).encode()).hexdigest()


def shorten(names: Sequence[str], limit: int = 20) -> str:
    """Return the first names, separated by commas, and the number of further ones."""
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest


def check_not_empty(count: int, where: str) -> None:
    """Check that a source has images.

    Raises:
        InputError: `count` is 0.
    """
    if count == 0:
        raise InputError(f"{where} contains no readable image. Use another source.")


def _fraction(weight: float) -> Fraction:
    try:
        exact = Fraction(str(weight))
    except (ValueError, ZeroDivisionError):
        exact = Fraction(0)
    if isinstance(weight, bool) or exact <= 0:
        raise OptionError(
            f"weight must be a positive number, got {weight!r}. Omit sources that should not be used."
        )
    return exact
