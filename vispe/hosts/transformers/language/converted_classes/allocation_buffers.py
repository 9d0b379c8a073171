"""Buffers of a converted language model: the axis of each channel pair, which is not saved in checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vispe.attention.precision import float32_buffers, restore_buffers
from vispe.hosts.transformers.language.conversion_record import TextConversion


def buffer_of(kind: str) -> str:
    """Return the name of the buffer with the axis of each channel pair, in layers of one kind."""
    return f"vispe_axis_of_pair_{kind}" if kind else "vispe_axis_of_pair"


def register_allocation(text: Any, allocated: dict[str, Tensor]) -> None:
    """Register the axis of each channel pair, for each kind of layers, on the device of their frequencies."""
    for kind, axes in allocated.items():
        device = text.vispe_text.rotary[kind].rates(text).device
        text.register_buffer(buffer_of(kind), axes.to(device), persistent=False)


class AllocationBuffers:
    """Mixin of the language model, whose buffers keep their values when it is moved, cast or initialised."""

    vispe_text: TextConversion

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move or cast the model; frequencies stay in float32.

        The allocation is written again, as `to_empty` creates buffers without values.
        """
        frequencies = [(module, float32_buffers(module, "inv_freq")) for module in self.modules()]  # type: ignore[attr-defined]
        result = super()._apply(fn, recurse)  # type: ignore[misc]
        for module, buffers in frequencies:
            restore_buffers(module, buffers)
        self._write_allocation()
        return result

    def _init_weights(self, module: Any) -> None:
        """Initialise a module, and the buffers of the language model itself."""
        super()._init_weights(module)  # type: ignore[misc]
        if module is self:
            self._write_allocation()

    def _write_allocation(self) -> None:
        """Write the allocations into their buffers."""
        for kind, axes in self.vispe_text.allocation.items():
            buffer: Tensor = getattr(self, buffer_of(kind))
            if not buffer.is_meta:
                buffer.copy_(torch.tensor(axes, device="cpu"))
