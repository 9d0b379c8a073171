"""Decode state: what the KV cache stores of the positions of its tokens, and how the text after them continues."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vispe.errors import InputError, counted
from vispe.hosts.transformers.language.parallel_sets import text_attributes
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
        padded: these tokens, which `crop` may remove: for each call with such tokens, the number of tokens cached
            before it, and their mask (b, s).
        shift: position of the first token of each row (b), if padding before it has positions; None for 0.
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
        ends_unknown: whether the offset is unknown: the caller passed other coordinates than those of the scheme,
            and the last token is part of an image.
        conversion: identity of the conversion that rotated the cached keys, `TextConversion.of_keys`; None if
            there are no such keys. The scheme in it is None after `reposition`, which accepts any.
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
    ends_unknown: bool = False
    conversion: tuple[Any, ...] | None = None
    padded: tuple[tuple[int | Tensor, Tensor], ...] = ()
    shift: Tensor | None = None

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
            padded=tuple((cached, padding[rows]) for cached, padding in self.padded),
            shift=None if self.shift is None else self.shift[rows],
        )

    def repeat(self, times: int) -> SequenceState:
        """Return the state with every row repeated."""
        return self.select(torch.arange(len(self.offset), device=self.offset.device).repeat_interleave(times))

    def first_of_each(self, rows: int) -> SequenceState:
        """Return the state of `rows` sequences, each of which the cache may repeat for beams or several answers.

        Raises:
            InputError: the rows of the cache are not repetitions of as many sequences.
        """
        cached = len(self.offset)
        if cached == rows:
            return self
        times = cached // rows
        first = None if times * rows != cached else self.select(torch.arange(0, cached, times))
        again = None if first is None else first.repeat(times)
        if (
            first is None
            or again is None
            or not (torch.equal(again.offset, self.offset) and torch.equal(again.padding, self.padding))
        ):
            raise InputError(
                f"The cache must have one row for each of {counted(rows, 'sequence')}, or equal repetitions of it for "
                f"beams or several answers, got {counted(cached, 'row')}. Select or repeat its rows with "
                "batch_select_indices or batch_repeat_interleave."
            )
        return first

    def with_padding(self, valid: Tensor, before: SequenceState | None, cache: Any) -> SequenceState:
        """Return the state after a call, in which the padding that the call has added is recorded.

        Args:
            valid: mask of the tokens of the call that are not padding (b, s).
            before: state before the call, or None.
            cache: KV cache before the call, or None.
        """
        compiling = torch.compiler.is_compiling()
        # a record of every compiled step would recompile the step
        if self is before or valid.is_meta or (compiling and valid.shape[1] == 1):
            return self
        padded = () if before is None else before.padded
        # prompts of text are indexed with their padding
        added = self.padding if before is None else self.padding - before.padding
        padding = ~valid & (added > 0)[:, None]
        if compiling or bool(padding.any()):
            cached = 0 if before is None else cache.get_seq_length()
            padded = (*padded, (cached.clone() if isinstance(cached, Tensor) else cached, padding))
        return self if len(padded) == len(self.padded) else replace(self, padded=padded)

    def with_ended_rows(self, mask: Tensor | None, cached: int) -> SequenceState:
        """Return the state in which text after the last image is padding if the mask of a later call excludes it.

        `generate` continues rows that have ended, until all have; their further tokens are not part of the next turn.

        Args:
            mask: padding mask (b, all tokens so far), or None.
            cached: number of cached tokens.
        """
        recorded = sum(int(padding.sum()) for _, padding in self.padded)
        if mask is None or not self.by_mask or self.settled is None or recorded != int(self.padding.sum()):
            return self
        start = int(self.settled)
        ended = ~mask[:, start:cached].bool()
        for first, padding in self.padded:
            known = padding[:, max(start - int(first), 0) :]
            begin = max(int(first) - start, 0)
            ended[:, begin : begin + known.shape[1]] &= ~known
        if not bool(ended.any()):
            return self
        padded = (*self.padded, (start, ended))
        return replace(self, padding=self.padding + ended.sum(1), padded=padded, upcoming=None)

    def cropped(self, length: int) -> SequenceState | None:
        """Return the state of the first `length` tokens, which end with text; None for no tokens.

        Raises:
            InputError: the position of padding is unknown.
        """
        if not length:
            return None
        if int(self.padding.sum()) != sum(int(padding.sum()) for _, padding in self.padded):
            raise InputError(
                "The cache cannot be cropped, as compiled steps with padding do not record where it is. Use a copy of "
                "the cache from before these steps."
            )
        ids, token_attributes = (
            None if x is None else x[..., :length] for x in (self.ids, self.token_attributes)
        )
        padded = tuple(
            (cached, padding[:, : length - int(cached)])
            for cached, padding in self.padded
            if int(cached) < length
        )
        padding = sum((p.sum(1) for _, p in padded), torch.zeros_like(self.padding))
        return replace(self, ids=ids, token_attributes=token_attributes, padded=padded, padding=padding)

    def add_text_attributes(self, mask: Tensor | None) -> None:
        """Add the attributes of cached text, where layers need those of all tokens, before the first set of a sequence.

        Args:
            mask: padding mask (b, all tokens so far), or None.
        """
        if self.token_attributes is not None or self.ids is None:
            return
        axes, rows, length = self.ids.shape
        valid = (
            torch.ones(rows, length, dtype=torch.bool, device=self.ids.device)
            if mask is None
            else mask[:, :length].bool()
        )
        self.token_attributes = text_attributes(axes, valid)


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
