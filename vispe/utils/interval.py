"""Range of the values of a numeric option."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """Range of an option: of finite numbers in ``Annotated[float, Interval(...)]`` (or ``int``), of lengths for tuples.

    Args:
        least: inclusive lower bound.
        above: exclusive lower bound.
        most: inclusive upper bound.
        below: exclusive upper bound.
        step: integers must be multiples of it.

    Example:
        >>> Interval(least=0, below=1).words("number")
        'number of 0 or more and below 1'
    """

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    step: int = 1

    def accept(self, value: float) -> bool:
        """Return whether a number is finite and within the limits."""
        return (
            math.isfinite(value)
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
            and (self.step == 1 or value % self.step == 0)
        )

    def words(self, noun: str) -> str:
        """Return the noun with the accepted range, such as 'number above 0'."""
        if self.least is not None and self.most is not None:
            return f"{noun} from {_plain(self.least)} to {_plain(self.most)}"
        bounds_by_text = {"of {} or more": self.least, "above {}": self.above, "below {}": self.below}
        bounds_by_text["up to {}"] = self.most
        bounds = [text.format(_plain(bound)) for text, bound in bounds_by_text.items() if bound is not None]
        bounds += [f"divisible by {self.step}"] if self.step > 1 else []
        return f"{noun} {' and '.join(bounds)}".rstrip()


def _plain(bound: float) -> str:
    """Return a number with all digits of an integer."""
    return f"{bound:g}" if isinstance(bound, float) else str(bound)
