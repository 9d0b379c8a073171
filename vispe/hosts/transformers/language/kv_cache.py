"""Where a sequence stands: keys of tokens, coordinates, and what a cache must remember to go on.

Keys are ordinary position ids, 0 .. n - 1 in every sequence; masks, packing and caches of the host see only these.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vispe.errors import InputError
from vispe.hosts.transformers.subclasses import positioned
from vispe.multimodal import Coordinates, Scheme

PREFIX = "vispe_prefix"  # attribute of a cache that was filled with slots of prefix tuning


@dataclass(eq=False)
class NextTokens:
    """The rotation of the text tokens that follow a cache, computed once for many steps of decoding.

    Attributes:
        scheme: that the coordinates are of.
        keys: of the tokens (b, n).
        offset: that their coordinates were computed with, (b) or (b, k).
        length: how many tokens the cache had before the first of them.
        rotation: cosines and sines (b, n, width) for each kind of layers.
    """

    scheme: Scheme
    keys: Tensor
    offset: Tensor
    length: int
    rotation: dict[str, tuple[Tensor, Tensor]]

    def select(self, rows: Tensor) -> NextTokens:
        """Return the same for these rows."""
        rotation = {
            kind: (cos[rows.to(cos.device)], sin[rows.to(sin.device)])
            for kind, (cos, sin) in self.rotation.items()
        }
        return replace(self, keys=self.keys[rows], offset=self.offset[rows], rotation=rotation)


@dataclass(eq=False)
class SequenceState:
    """What follows a prompt: the coordinates of text are ``scheme.going_on(key, offset)``.

    Attributes:
        offset: (b), float64, or (b, k) where layers have k counters.
        padding: tokens of each row that have no key of their own (b).
        ids: coordinates of all tokens (axes, b, s), where keys are kept without them; else None.
        by_mask: whether padding has no keys; text alone is counted with its padding, as the model of before does.
        marks: what is said of all tokens (rows, b, s) where some stand side by side, see `beside`; else None.
        settled: from how many cached tokens on this holds: all that follows them is text; None until it is known.
        packed: whether rows are packed samples, which no call can go on from.
        prefix: whether the cache holds nothing but slots of prefix tuning.
        upcoming: rotation of the next text tokens, while single tokens are decoded; else None.
    """

    offset: Tensor
    padding: Tensor
    ids: Tensor | None = None
    by_mask: bool = True
    settled: int | Tensor | None = None
    marks: Tensor | None = None
    packed: bool = False
    prefix: bool = False
    upcoming: NextTokens | None = None

    def select(self, rows: Tensor) -> SequenceState:
        """Return the state of these rows."""
        rows = rows.to(self.offset.device)
        ids, marks = (None if x is None else x[:, rows] for x in (self.ids, self.marks))
        upcoming = None if self.upcoming is None else self.upcoming.select(rows)
        return replace(
            self,
            offset=self.offset[rows],
            padding=self.padding[rows],
            ids=ids,
            marks=marks,
            upcoming=upcoming,
        )

    def repeat(self, times: int) -> SequenceState:
        """Return the state with every row repeated."""
        return self.select(torch.arange(len(self.offset), device=self.offset.device).repeat_interleave(times))


class PositionedCache:
    """Mixed into the class of a cache: the state of its rows, which follows what is done with the rows."""

    vispe_state: SequenceState | None = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take these rows, as beam search does."""
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self.vispe_state = self.vispe_state and self.vispe_state.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        super().batch_select_indices(indices)  # type: ignore[misc]
        self.vispe_state = self.vispe_state and self.vispe_state.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        self.vispe_state = self.vispe_state and self.vispe_state.repeat(repeats)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, which must be text.

        Raises:
            InputError: a picture would go too, and nobody knows any more where the text before it stood.
        """
        state = self.vispe_state
        if state is not None and state.settled is not None:
            left = int(self.get_seq_length()) + tokens_to_remove  # type: ignore[attr-defined]
            if 0 < left < int(state.settled):
                raise InputError(
                    f"The cache would be cropped to {left} tokens, but the last picture in it ends at token "
                    f"{int(state.settled)}; keep a copy of the cache from before the picture."
                )
        super().crop(tokens_to_remove)  # type: ignore[misc]
        if state is not None and state.ids is not None:
            left = self.get_seq_length()  # type: ignore[attr-defined]
            marks = None if state.marks is None else state.marks[..., :left]
            self.vispe_state = replace(state, ids=state.ids[..., :left], marks=marks)

    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()  # type: ignore[misc]
        self.vispe_state = None


def remember(cache: Any, state: SequenceState) -> None:
    """Put the state of its rows onto a cache."""
    if not isinstance(cache, PositionedCache):
        cache.__class__ = positioned(type(cache), PositionedCache)
    cache.vispe_state = state


def prompt_keys(length: int, rows: int, mask: Tensor | None, device: torch.device) -> Tensor:
    """Return the keys (b, s) of sequences that begin here; those of padding are 0."""
    if mask is None:
        return torch.arange(length, device=device).expand(rows, length)
    return (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)


def next_keys(length: int, cache: Any, state: SequenceState, mask: Tensor | None) -> Tensor:
    """Return the keys (b, length) of tokens that follow what is in a cache; padding repeats the key before it."""
    seen = cache.get_seq_length() - state.padding
    if mask is not None and state.by_mask:
        return seen[:, None] + mask[:, -length:].long().cumsum(1) - 1
    return seen[:, None] + torch.arange(length, device=seen.device)


def valid_tokens(keys: Tensor, mask: Tensor | None) -> Tensor:
    """Return which tokens are not padding (b, s); without a mask, padding is a run of zeros before another zero."""
    if mask is not None:
        return mask[:, -keys.shape[1] :].bool()
    following = torch.cat([keys[:, 1:], keys.new_ones(len(keys), 1)], 1)
    return (keys != 0) | (following != 0)


def documents(keys: Tensor, valid: Tensor) -> Tensor:
    """Return the number of the packed sample of each token (b, s): keys that do not go on by 1 start another one."""
    before = torch.cat([keys[:, :1] - 1, keys[:, :-1]], 1)
    was_valid = torch.cat([torch.zeros_like(valid[:, :1]), valid[:, :-1]], 1)
    return ((keys != before + 1) & valid & was_valid).cumsum(1)


def text_state(rows: int, device: torch.device) -> SequenceState:
    """Return what follows text without padding."""
    offset = torch.zeros(rows, dtype=torch.float64, device=device)
    return SequenceState(offset, torch.zeros_like(offset, dtype=torch.long))


def state_after(coordinates: Coordinates, keys: Tensor, valid: Tensor) -> SequenceState:
    """Return what follows a prompt."""
    last = torch.where(valid, torch.arange(keys.shape[1], device=keys.device), -1).amax(1)
    following = torch.where(last < 0, 0, keys.gather(1, last.clamp(min=0)[:, None])[:, 0] + 1)
    return SequenceState(coordinates.scheme.counted_on(coordinates.next, -following), (~valid).sum(1))


def settled(state: SequenceState, cache: Any, keys: Tensor, ids: Tensor, scheme: Scheme) -> int | Tensor:
    """Return how many cached tokens there are up to the last one, of all rows, that is not text with this offset."""
    text = ((ids - text_coordinates(scheme, keys, state)).abs() < 1e-6).all(0)
    return cache.get_seq_length() - text.flip(1).long().cumprod(1).sum(1).amin()


def text_coordinates(scheme: Scheme, keys: Tensor, state: SequenceState) -> Tensor:
    """Return the coordinates (axes, b, s) of text that follows a prompt."""
    return scheme.going_on(keys, state.offset)


def by_key(ids: Tensor, keys: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Return the coordinates (axes, b, s) of a prompt by key, to be looked up again whatever part of it is asked for.

    Returns:
        coordinates (b, axes, s) and, for each row, the first key and how many there are (b, 2); rows come first, so
        that generation can repeat them for its beams.
    """
    first = torch.where(valid, keys, keys.max()).amin(1)
    count = valid.sum(1)
    slot = torch.where(valid, keys - first[:, None], keys.shape[1])
    ids = ids.movedim(1, 0)
    table = ids.new_zeros(*ids.shape[:2], keys.shape[1] + 1)
    table.scatter_(2, slot[:, None].expand_as(ids), ids)
    return table[..., :-1], torch.stack([first, count], 1)


def look_up(keys: Tensor, table: Tensor, span: Tensor, beyond: Tensor) -> Tensor:
    """Return what a table of the prompt has for keys (axes, b, s), and `beyond` for those that follow it."""
    slot = keys - span[:, :1]
    inside = (slot >= 0) & (slot < span[:, 1:])
    prompt = table.gather(
        2, slot.clamp(0, table.shape[2] - 1)[:, None].expand(-1, table.shape[1], -1)
    ).movedim(1, 0)
    return torch.where(inside, prompt, beyond)


def check_mask(mask: Tensor | None, owner: str, advice: str) -> None:
    """Raise `InputError` where a mask (b, s) has values other than 0 and 1.

    Args:
        mask: bool, integers or floating point, or None.
        owner: what was called, for the message.
        advice: what to do for packed samples, as a sentence.
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
    """Raise `InputError` where a cache holds tokens but not where they are."""
    if cache is not None and cache.get_seq_length() and not hasattr(cache, PREFIX):
        raise InputError(
            "The cache was filled by a model without this position scheme; fill a new cache with this model, "
            "giving input_ids and the grids of the images."
        )


def state_of_prefix(
    cache: Any, tokens: Tensor, axes: int, *, late: bool, by_mask: bool
) -> SequenceState | None:
    """Return the state of a cache that holds slots of prefix tuning: text that came before, without rotation.

    Args:
        cache: of a call, or None.
        tokens: of the call (b, s) or (b, s, width).
        axes: of the scheme.
        late: whether keys are rotated inside the attention, so that their coordinates are cached.
        by_mask: whether padding behind the slots has no keys.
    """
    if not hasattr(cache, PREFIX):
        return None
    shape = axes, len(tokens), int(cache.get_seq_length())
    ids = torch.zeros(shape, dtype=torch.float64, device=tokens.device) if late else None
    state = replace(text_state(len(tokens), tokens.device), ids=ids, by_mask=by_mask, prefix=True)
    delattr(cache, PREFIX)
    remember(cache, state)
    return state
