"""Decode state: token indices, coordinates, and the state stored with the KV cache.

Token indices are ordinary position ids, 0 .. n - 1 in every sequence; masks, packing and caches of the host
use only token indices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vispe.errors import InputError, counted
from vispe.hosts.transformers.subclasses import converted_subclass
from vispe.multimodal import Coordinates, Scheme

PREFIX = "vispe_prefix"  # attribute of a cache that contains the virtual tokens of prefix tuning


@dataclass(eq=False)
class NextTokens:
    """Cosines and sines of the next text tokens, computed once for many decoding steps.

    Attributes:
        scheme: scheme of the coordinates.
        token_index: token indices (b, n).
        offset: offset of their coordinates, (b) or (b, k).
        length: number of cached tokens before the first of them.
        rotation: cosines and sines (b, n, width) for each kind of layers.
    """

    scheme: Scheme
    token_index: Tensor
    offset: Tensor
    length: int
    rotation: dict[str, tuple[Tensor, Tensor]]

    def select(self, rows: Tensor) -> NextTokens:
        """Return the values for some rows of the batch."""
        rotation = {
            kind: (cos[rows.to(cos.device)], sin[rows.to(sin.device)])
            for kind, (cos, sin) in self.rotation.items()
        }
        return replace(self, token_index=self.token_index[rows], offset=self.offset[rows], rotation=rotation)


@dataclass(eq=False)
class SequenceState:
    """State after a prompt: the coordinates of text are ``scheme.continue_text(index, offset)``.

    Attributes:
        offset: (b), float64, or (b, k) where layers have k counters.
        padding: number of tokens of each row without a separate index, such as padding (b).
        ids: coordinates of all tokens (axes, b, s), where keys are cached without rotation, or layers
            need the rotation of all tokens; otherwise None.
        by_mask: whether indices exclude padding; those of prompts without images include padding, as in the
            stock model.
        token_attributes: attributes of parallel sets for all tokens (k, b, s) as `Blocks.parallel`; None without sets.
        settled: number of cached tokens after which all tokens are text with this offset; None until it is known.
        packed: whether rows are packed samples, which cannot be continued.
        prefix: whether the cache contains only virtual tokens of prefix tuning.
        rotated: whether cached keys are rotated although `ids` is stored, for indexers that rotate cached keys.
        upcoming: rotation of the next text tokens during decoding of single tokens; otherwise None.
    """

    offset: Tensor
    padding: Tensor
    ids: Tensor | None = None
    by_mask: bool = True
    settled: int | Tensor | None = None
    token_attributes: Tensor | None = None
    packed: bool = False
    prefix: bool = False
    rotated: bool = False
    upcoming: NextTokens | None = None

    def select(self, rows: Tensor) -> SequenceState:
        """Return the state of some rows of the batch."""
        rows = rows.to(self.offset.device)
        ids, token_attributes = (None if x is None else x[:, rows] for x in (self.ids, self.token_attributes))
        upcoming = None if self.upcoming is None else self.upcoming.select(rows)
        return replace(
            self,
            offset=self.offset[rows],
            padding=self.padding[rows],
            ids=ids,
            token_attributes=token_attributes,
            upcoming=upcoming,
        )

    def repeat(self, times: int) -> SequenceState:
        """Return the state with every row repeated."""
        return self.select(torch.arange(len(self.offset), device=self.offset.device).repeat_interleave(times))


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
            remaining = int(self.get_seq_length()) + tokens_to_remove  # type: ignore[attr-defined]
            if 0 < remaining < int(state.settled):
                raise InputError(
                    f"The cache can only be cropped after the last image in it, which ends at token "
                    f"{int(state.settled)}, got a crop to {counted(remaining, 'token')}. Use a copy of the cache "
                    "from before the image."
                )
        super().crop(tokens_to_remove)  # type: ignore[misc]
        if state is not None and state.ids is not None:
            remaining = self.get_seq_length()  # type: ignore[attr-defined]
            token_attributes = (
                None if state.token_attributes is None else state.token_attributes[..., :remaining]
            )
            self.vispe_state = replace(
                state, ids=state.ids[..., :remaining], token_attributes=token_attributes
            )

    def reset(self) -> None:
        """Remove all tokens."""
        super().reset()  # type: ignore[misc]
        self.vispe_state = None


def set_state(cache: Any, state: SequenceState) -> None:
    """Store the state of its rows on a KV cache."""
    if not isinstance(cache, PositionedCache):
        cache.__class__ = converted_subclass(type(cache), PositionedCache)
    cache.vispe_state = state


def prompt_token_index(length: int, rows: int, mask: Tensor | None, device: torch.device) -> Tensor:
    """Return the token indices (b, s) of new sequences; 0 for padding."""
    if mask is None:
        return torch.arange(length, device=device).expand(rows, length)
    return (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)


def next_token_index(length: int, cache: Any, state: SequenceState, mask: Tensor | None) -> Tensor:
    """Return the token indices (b, length) of tokens after a cache; padding repeats the previous index."""
    cached_tokens = cache.get_seq_length() - state.padding
    if mask is not None and state.by_mask:
        return cached_tokens[:, None] + mask[:, -length:].long().cumsum(1) - 1
    return cached_tokens[:, None] + torch.arange(length, device=cached_tokens.device)


def valid_tokens(token_index: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mask of tokens that are not padding (b, s); without a mask, padding is a 0 before another 0."""
    if mask is not None:
        return mask[:, -token_index.shape[1] :].bool()
    following = torch.cat([token_index[:, 1:], token_index.new_ones(len(token_index), 1)], 1)
    return (token_index != 0) | (following != 0)


def documents(token_index: Tensor, valid: Tensor) -> Tensor:
    """Return the index of the packed sample of each token (b, s); token indices that restart begin a sample."""
    before = torch.cat([token_index[:, :1] - 1, token_index[:, :-1]], 1)
    was_valid = torch.cat([torch.zeros_like(valid[:, :1]), valid[:, :-1]], 1)
    return ((token_index != before + 1) & valid & was_valid).cumsum(1)


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
    state: SequenceState, cache: Any, token_index: Tensor, ids: Tensor, scheme: Scheme
) -> int | Tensor:
    """Return the number of cached tokens up to the last one, in all rows, that is not text with this offset."""
    text = ((ids - text_coordinates(scheme, token_index, state)).abs() < 1e-6).all(0)
    return cache.get_seq_length() - text.flip(1).long().cumprod(1).sum(1).amin()


def text_coordinates(scheme: Scheme, token_index: Tensor, state: SequenceState) -> Tensor:
    """Return the coordinates (axes, b, s) of text after a prompt."""
    return scheme.continue_text(token_index, state.offset)


def table_by_index(ids: Tensor, token_index: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Return the coordinates (axes, b, s) of a prompt as a table by token index, of which `look_up` reads any part.

    Returns:
        coordinates (b, axes, s) and, for each row, the first index and their number (b, 2); the batch is the first
        axis, so that generation can repeat it for beams.
    """
    first = torch.where(valid, token_index, token_index.max()).amin(1)
    count = valid.sum(1)
    slot = torch.where(valid, token_index - first[:, None], token_index.shape[1])
    ids = ids.movedim(1, 0)
    table = ids.new_zeros(*ids.shape[:2], token_index.shape[1] + 1)
    table.scatter_(2, slot[:, None].expand_as(ids), ids)
    return table[..., :-1], torch.stack([first, count], 1)


def look_up(token_index: Tensor, table: Tensor, span: Tensor, beyond: Tensor) -> Tensor:
    """Return the entries (axes, b, s) of a prompt's table for token indices; after the prompt, those of `beyond`."""
    slot = token_index - span[:, :1]
    inside = (slot >= 0) & (slot < span[:, 1:])
    prompt = table.gather(
        2, slot.clamp(0, table.shape[2] - 1)[:, None].expand(-1, table.shape[1], -1)
    ).movedim(1, 0)
    return torch.where(inside, prompt, beyond)


def check_mask(mask: Tensor | None, owner: str, advice: str) -> None:
    """Raise `InputError` if a mask (b, s) has values other than 0 and 1.

    Args:
        mask: bool, integer or floating-point mask, or None.
        owner: name of the called function, for the message.
        advice: what to do with packed samples, a sentence.
    """
    if mask is None or mask.dtype == torch.bool:
        return
    other = mask[(mask != 0) & (mask != 1)]
    if len(other):
        raise InputError(
            f"{owner}: attention_mask (b, s) must be 1 for tokens and 0 for padding, got the value "
            f"{other[0].item():g}. If it numbers packed samples: {advice}"
        )


def check_filled_here(cache: Any) -> None:
    """Raise `InputError` if a cache contains tokens without a state."""
    if cache is not None and cache.get_seq_length() and not hasattr(cache, PREFIX):
        raise InputError(
            "The cache must be filled by a model with this position scheme, got one filled by another model. Fill a "
            "new cache with this model, from input_ids and the grids of the images."
        )


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
