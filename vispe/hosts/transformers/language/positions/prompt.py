"""Coordinates of the prompt during generation: one object in the keyword arguments of every step."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

PROMPT = "vispe_prompt"  # keyword of generation
# keyword of generation: the padding mask, which the host replaces for caches of fixed size
MASK = "vispe_mask"
# keyword of generation: whether the prompt is processed in chunks, and this mask is that of the complete prompt
CHUNKED = "vispe_chunked"


@dataclass(eq=False)
class PromptPositions:
    """Coordinates of a prompt as a table by token index, of which a call reads any part.

    Attributes:
        table: coordinates (b, axes, n), float64.
        span: first token index of each row, and the number of its tokens (b, 2).
        offset: offset of the text after the prompt, (b) or (b, k), see `SequenceState`.
        token_attributes: attributes of parallel sets (b, k, n), None without sets.
    """

    table: Tensor
    span: Tensor
    offset: Tensor
    token_attributes: Tensor | None = None

    def repeat(self, times: int) -> PromptPositions:
        """Return the positions with every row repeated, for beams and several answers."""
        return self._each(lambda x: x.repeat_interleave(times, dim=0))

    def to(self, device: Any, non_blocking: bool = False) -> PromptPositions:
        """Return the same positions on another device; dtypes are not changed, as this would round coordinates."""
        if isinstance(device, torch.dtype):
            return self
        return self._each(lambda x: x.to(device=device, non_blocking=non_blocking))

    def _each(self, function: Any) -> PromptPositions:
        values = (getattr(self, field.name) for field in fields(self))
        return PromptPositions(*(None if x is None else function(x) for x in values))  # type: ignore[arg-type]
