"""Counter of a position scheme: the part that generated text needs, without images and videos."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor


class TextCounter:
    """Base of `Scheme`: a counter that advances by `step` per text token, and the coordinates of text at a counter.

    Attributes:
        name: name in the registry.
        step: counter step of a text token.
        levels: numbers in the counter; with more than one, it is not a position.

    Example:
        >>> import torch
        >>> from vispe.multimodal import create_scheme
        >>> scheme = create_scheme("mrope")
        >>> scheme.continue_text(torch.arange(2), counter=torch.tensor([5.0])).tolist()
        [[[5.0, 6.0]], [[5.0, 6.0]], [[5.0, 6.0]]]
        >>> scheme.counter_after(torch.tensor([5.0]), tokens=torch.tensor([2])).tolist()
        [7.0]
    """

    name: ClassVar[str] = ""
    step: ClassVar[float] = 1.0
    levels: ClassVar[int] = 1

    @property
    def axes(self) -> int:
        """Number of coordinates of a token."""
        return 3

    @property
    def counts(self) -> int:
        """Number of counters: one, or one per scheme if layers have different schemes."""
        return 1

    def text(self, at: Tensor) -> Tensor:
        """Return the coordinates (axes, ...) of text at a counter (...)."""
        return at.expand(self.axes, *at.shape)

    def counter(self, ids: Tensor) -> Tensor:
        """Return the counter (...) at which text has the coordinates (axes, ...); the reverse of `text`."""
        return ids[0]

    def continue_text(self, number: Tensor, counter: Tensor) -> Tensor:
        """Return the coordinates (axes, b, s) of text tokens `number`, (s) or (b, s), after a counter per row."""
        return self.text(number.double() * self.step + counter[:, None])

    def counter_after(self, counter: Tensor, tokens: Tensor) -> Tensor:
        """Return the counter of each row (b) after `tokens` text tokens (b); negative numbers count backwards."""
        return counter + self.step * tokens
