"""Coordinates of the tokens of a stream, and positions of the text generated after them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vispe.errors import OptionError, counted
from vispe.multimodal.text_counter import TextCounter


@dataclass(frozen=True, eq=False)
class Coordinates:
    """Coordinates of every token, and the counters at which sequences continue.

    Attributes:
        ids: (axes, b, s), float64; padding has the requested value.
        mask: (b, s) bool, false for padding.
        next: counter of the token that follows each row (b), float64; (b, k) if layers have k separate
            counters.
        scheme: the scheme of the coordinates.
        draws: random draws of each block (m), or None; pass them again for the same coordinates.
        extent: counter steps of the `Parallel` member that contains a token (b, s), 0 outside; None if
            there is none.

    Example:
        >>> from vispe.multimodal import Image, Stream, Text, create_scheme
        >>> coordinates = create_scheme("mrope").coordinates(Stream.of([[Text(1), Image(2, 2)]]))
        >>> coordinates.ids[:, 0].tolist()
        [[0.0, 1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 2.0, 2.0], [0.0, 1.0, 2.0, 1.0, 2.0]]
        >>> coordinates.next.tolist(), coordinates.decode(2)[0].tolist()
        ([3.0], [[3.0, 4.0]])
    """

    ids: Tensor
    mask: Tensor
    next: Tensor
    scheme: TextCounter
    draws: Tensor | None = None
    extent: Tensor | None = None

    def decode(self, tokens: int) -> Tensor:
        """Return the coordinates of the next text tokens of each row, (axes, b, tokens)."""
        return self.scheme.continue_text(torch.arange(tokens, device=self.next.device), self.next)

    def delta(self, end: str = "next", padded: bool = False) -> Tensor:
        """Return the offset from token indices to positions of generated text, (b, 1), float64.

        Args:
            end: definition of the next position: ``'next'``, the counter, correct for every scheme; or, as in model
                code, one more than the largest coordinate on all axes (``'max'``) or on the first
                (``'time'``), rounded up if not integers (``'ceil'``).
            padded: whether token indices include padding.

        Raises:
            OptionError: `end` is invalid, or the counter of the scheme has several numbers.
        """
        if end != "next" and self.scheme.levels > 1:
            raise OptionError(
                f"The counter of {self.scheme.name} has {counted(self.scheme.levels, 'number')}, which cannot be "
                f"inferred from the largest coordinate, got end={end!r}. Omit end."
            )
        if self.next.ndim > 1:
            raise OptionError(
                f"A delta needs a single counter, got {counted(self.next.shape[1], 'counter')} of layers "
                f"({self.scheme})."
            )
        if end == "next":
            following = self.next
        elif end in ("max", "time", "ceil"):
            rows = self.ids[:1] if end == "time" else self.ids
            largest = rows.masked_fill(~self.mask, -torch.inf).amax((0, 2))
            following = (largest.ceil() if end == "ceil" else largest) + 1
        else:
            raise OptionError(f"end must be 'next', 'max', 'time' or 'ceil', got {end!r}.")
        length = self.mask.shape[1] if padded else self.mask.sum(1)
        return (following - length * self.scheme.step)[:, None]
