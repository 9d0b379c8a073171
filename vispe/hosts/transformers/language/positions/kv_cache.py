"""KV cache with a `SequenceState`, and the states after text, a prompt and virtual tokens of prefix tuning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vispe.errors import InputError, counted
from vispe.hosts.transformers.language.positions.sequence_state import SequenceState
from vispe.hosts.transformers.subclasses import converted_subclass
from vispe.multimodal import Coordinates, Scheme

PREFIX = "vispe_prefix"  # attribute of a cache that contains the virtual tokens of prefix tuning


class PositionedCache:
    """Mixin of the class of a KV cache: a `SequenceState` that is updated with the rows of the cache."""

    vispe_state: SequenceState | None = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows, as in beam search."""
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self.vispe_state = self.vispe_state and self.vispe_state.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select rows."""
        super().batch_select_indices(indices)  # type: ignore[misc]
        self.vispe_state = self.vispe_state and self.vispe_state.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        self.vispe_state = self.vispe_state and self.vispe_state.repeat(repeats)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, which must be text.

        Raises:
            InputError: an image would be cropped too; the offset of the text before the image is not stored.
        """
        state = self.vispe_state
        if state is not None and state.settled is not None:
            length = int(self.get_seq_length())  # type: ignore[attr-defined]
            # transformers 5.17 reads a positive number as the new length, later versions raise an error
            remaining = min(tokens_to_remove, length) if tokens_to_remove > 0 else length + tokens_to_remove
            if 0 < remaining < int(state.settled):
                raise InputError(
                    f"The cache can only be cropped after the last image in it, which ends at token "
                    f"{int(state.settled)}, got a crop to {counted(remaining, 'token')}. Use a copy of the cache "
                    "from before the image."
                )
        super().crop(tokens_to_remove)  # type: ignore[misc]
        if state is not None and tokens_to_remove:
            self.vispe_state = state.cropped(int(self.get_seq_length()))  # type: ignore[attr-defined]

    def reset(self) -> None:
        """Remove all tokens."""
        super().reset()  # type: ignore[misc]
        self.vispe_state = None


def set_state(cache: Any, state: SequenceState) -> None:
    """Store the state of its rows on a KV cache."""
    if not isinstance(cache, PositionedCache):
        cache.__class__ = converted_subclass(type(cache), PositionedCache)
    cache.vispe_state = state


def text_state(rows: int, device: torch.device) -> SequenceState:
    """Return the state after text without padding."""
    offset = torch.zeros(rows, dtype=torch.float64, device=device)
    return SequenceState(offset, torch.zeros_like(offset, dtype=torch.long))


def state_after(coordinates: Coordinates, token_index: Tensor, valid: Tensor) -> SequenceState:
    """Return the state after a prompt."""
    last = torch.where(valid, torch.arange(token_index.shape[1], device=token_index.device), -1).amax(1)
    following = torch.where(last < 0, 0, token_index.gather(1, last.clamp(min=0)[:, None])[:, 0] + 1)
    return SequenceState(coordinates.scheme.counter_after(coordinates.next, -following), (~valid).sum(1))


def settled_length(
    state: SequenceState,
    before: SequenceState | None,
    cache: Any,
    token_index: Tensor,
    ids: Tensor,
    scheme: Scheme,
    valid: Tensor,
    visual: Tensor | None = None,
) -> int | Tensor:
    """Return the number of cached tokens up to the last one, in all rows, that is not text with this offset.

    Tokens of images may have coordinates of text with the offset that they cause (the last one of an image of `v2pe`).
    Padding has no coordinates, and may be removed.

    Args:
        state: state after the call.
        before: state before the call, or None.
        cache: KV cache after the call.
        token_index: token indices of the call (b, s).
        ids: coordinates of the call (axes, b, s).
        scheme: scheme of the model.
        valid: tokens of the call that are not padding (b, s).
        visual: tokens of images and videos in the call (b, s); None if there are none, or if they are unknown.
    """
    text = ((ids - text_coordinates(scheme, token_index, state)).abs() < 1e-6).all(0) | ~valid
    length = ids.shape[2]
    first = length - text.flip(1).long().cumprod(1).sum(1)
    cached = cache.get_seq_length() - length
    if before is not None and before.settled is not None and before.offset.shape == state.offset.shape:
        continued = (first == 0).all() & (before.offset == state.offset).all()
        first = torch.where(continued, before.settled - cached, first)
    if visual is not None:
        index = torch.arange(length, device=first.device)
        is_text = ~visual.to(first.device) & (index >= first[:, None])
        ends = torch.where(is_text, index, length).amin(1)
        # sequences whose tokens all have coordinates of text can be cropped anywhere
        first = torch.where((first >= 0) & (first + cached > 0), ends, first)
    return cached + first.amax()


def text_coordinates(scheme: Scheme, token_index: Tensor, state: SequenceState) -> Tensor:
    """Return the coordinates (axes, b, s) of text after a prompt."""
    return scheme.continue_text(token_index, state.offset)


def state_of_prefix(
    cache: Any, tokens: Tensor, axes: int, *, late: bool, by_mask: bool
) -> SequenceState | None:
    """Return the state of a cache with virtual tokens of prefix tuning (unrotated text); None for other caches.

    Args:
        cache: KV cache of a call, or None.
        tokens: tokens of the call (b, s) or (b, s, width).
        axes: number of axes of the scheme.
        late: whether keys are rotated inside the attention, so that their coordinates are cached.
        by_mask: whether indices of tokens after them exclude padding.
    """
    if not hasattr(cache, PREFIX):
        return None
    shape = axes, len(tokens), int(cache.get_seq_length())
    ids = torch.zeros(shape, dtype=torch.float64, device=tokens.device) if late else None
    state = replace(text_state(len(tokens), tokens.device), ids=ids, by_mask=by_mask, prefix=True)
    delattr(cache, PREFIX)
    set_state(cache, state)
    return state
