"""Coordinates of a call: those of the caller, of a table of the prompt, of text, or of text with images.

Each function returns `Assigned`; `pipeline.py` selects one of them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from vispe.errors import VispeError
from vispe.hosts.transformers.language.parallel_sets import check_complete_sets, text_attributes
from vispe.hosts.transformers.language.positions.call import GRIDS, LanguageCall
from vispe.hosts.transformers.language.positions.caller_coordinates import (
    check_given,
    check_layout,
    same_ids,
    stock_scheme,
)
from vispe.hosts.transformers.language.positions.kv_cache import state_after, text_coordinates
from vispe.hosts.transformers.language.positions.position_ids import readable
from vispe.hosts.transformers.language.positions.prompt import PromptPositions
from vispe.hosts.transformers.language.positions.sequence_state import SequenceState
from vispe.hosts.transformers.language.positions.token_index import TokenIndex, valid_tokens
from vispe.multimodal import Coordinates, Scheme


class Assigned(NamedTuple):
    """Coordinates of the tokens of a call.

    Attributes:
        ids: coordinates (axes, b, s).
        after: state of the cache after the call.
        token_attributes: attributes of parallel sets (k, b, s); None without sets.
    """

    ids: Tensor
    after: SequenceState
    token_attributes: Tensor | None = None


def of_text(call: LanguageCall, index: TokenIndex, state: SequenceState | None) -> Assigned:
    """Return the coordinates of text, at the start of a sequence or after cached tokens."""
    after = state
    if after is None:
        padding = (
            (~valid_tokens(index.ids, call.mask)).sum(1)
            if index.without_padding
            else index.ids.new_zeros(len(index.ids))
        )
        offset = torch.zeros_like(padding, dtype=torch.float64)
        after = SequenceState(offset, padding, by_mask=index.without_padding)
    elif index.without_padding:  # a further turn of a dialogue
        after = _with_padding(after, index, valid_tokens(index.ids, call.mask))
    return Assigned(text_coordinates(call.model.vispe_scheme, index.ids, after), after)


def of_images(call: LanguageCall, index: TokenIndex, state: SequenceState | None) -> Assigned:
    """Return the coordinates of tokens that contain images or videos."""
    valid = valid_tokens(index.ids, call.mask)
    coordinates, token_attributes = call.coordinates(index.ids, valid, state)
    after = replace(_state_after_images(coordinates, index, valid, state), shift=call.shift(state))
    return Assigned(coordinates.ids, after, token_attributes)


def of_table(
    call: LanguageCall,
    index: TokenIndex,
    state: SequenceState | None,
    prompt: PromptPositions,
    parallel: str | None,
) -> Assigned:
    """Return the coordinates of a call of `generate`, from the table of the prompt."""
    scheme, span, offset = call.model.vispe_scheme, prompt.span, prompt.offset
    # virtual tokens of prompt tuning precede the prompt
    beyond = torch.where(
        index.ids < span[:, :1],
        scheme.text(index.ids.double()),
        scheme.continue_text(index.ids, offset),
    )
    valid = valid_tokens(index.ids, call.mask)
    if state is None or state.prefix:
        after = SequenceState(offset, (~valid).sum(1))
    else:
        padded = _with_padding(state, index, valid)
        after = replace(padded, offset=offset, settled=None, shift=call.shift(state))
    ids, of_prompt = look_up(index.ids, prompt.table, span, beyond), prompt.token_attributes
    if of_prompt is None:
        return Assigned(ids, after)
    plain = text_attributes(scheme.axes, valid)
    # padding has the index of the first token
    token_attributes = torch.where(valid, look_up(index.ids, of_prompt, span, plain), plain)
    if parallel == "pine":
        check_complete_sets(token_attributes, of_prompt)
    return Assigned(ids, after, token_attributes)


def of_caller(
    call: LanguageCall, index: TokenIndex, ids: Tensor, position_ids: Tensor, state: SequenceState | None
) -> Assigned:
    """Return the coordinates that the caller passed to the model, after the checks that need images.

    Raises:
        ShapeError: the layout is (b, axes, s).
        InputError: the coordinates belong to another scheme.
    """
    scheme = call.model.vispe_scheme
    valid = valid_tokens(index.ids, call.mask)

    def text() -> Tensor | None:
        try:
            return call.types_of(index.ids) == 0
        except VispeError:
            return None

    def of_scheme(token_index: Tensor) -> Coordinates | None:
        start = call.start(token_index, valid, state)
        try:
            return scheme.coordinates(call.stream(token_index, valid), start=start)
        except VispeError:
            return None

    def expected(token_index: Tensor) -> Tensor | None:
        coordinates = of_scheme(token_index)
        return None if coordinates is None else coordinates.ids

    check_layout(scheme, position_ids, index.ids, text, expected, valid)
    if state is None and (stock := stock_scheme(call.model.config)) is not None:
        grids = any(call.kwargs.get(name) is not None for name in GRIDS[:2])
        stream = partial(call.stream, index.ids, valid) if grids else None
        check_given(scheme, stock, len(position_ids), ids, valid, stream)
    if not readable(ids):
        return Assigned(ids, _state_after_ids(scheme, index, ids, valid, state))
    if state is not None and _same_text(scheme, index, ids, valid, state):
        return Assigned(ids, _with_padding(state, index, valid))
    coordinates = of_scheme(index.ids)
    if coordinates is not None and same_ids(ids, coordinates.ids, valid):
        return Assigned(ids, _state_after_images(coordinates, index, valid, state))
    after = _state_after_ids(scheme, index, ids, valid, state)
    is_text = text()
    if is_text is not None and not bool(_last(is_text, valid)[valid.any(1)].all()):
        after = replace(after, ends_unknown=True)
    return Assigned(ids, after)


def of_caller_alone(
    call: LanguageCall, index: TokenIndex, ids: Tensor, position_ids: Tensor, state: SequenceState | None
) -> Assigned:
    """Return the coordinates that the caller passed to a language model without the model around it.

    Raises:
        ShapeError: the layout is (b, axes, s).
    """
    scheme = call.model.vispe_scheme

    def expected(token_index: Tensor) -> Tensor | None:
        return None if state is None else text_coordinates(scheme, token_index, state)

    valid = valid_tokens(index.ids, call.mask)
    check_layout(scheme, position_ids, index.ids, lambda: None, expected, valid)
    if state is not None and readable(ids) and _same_text(scheme, index, ids, valid, state):
        return Assigned(ids, _with_padding(state, index, valid))
    return Assigned(ids, _state_after_ids(scheme, index, ids, valid, state))


def _same_text(scheme: Scheme, index: TokenIndex, ids: Tensor, valid: Tensor, state: SequenceState) -> bool:
    """Return whether coordinates of the caller are those of text after cached tokens."""
    return not state.ends_unknown and same_ids(ids, text_coordinates(scheme, index.ids, state), valid)


def _with_padding(state: SequenceState, index: TokenIndex, valid: Tensor) -> SequenceState:
    """Return the state of a cache with the padding of a call, if its indices exclude it."""
    padding = state.padding + (~valid).sum(1) * index.without_padding
    return replace(state, padding=padding, by_mask=state.by_mask or index.without_padding)


def _state_after_images(
    coordinates: Coordinates, index: TokenIndex, valid: Tensor, state: SequenceState | None
) -> SequenceState:
    """Return the state after coordinates of the scheme."""
    after = state_after(coordinates, index.ids, valid)
    if state is None:
        return after
    padded = _with_padding(state, index, valid)
    return replace(after, padding=padded.padding, by_mask=padded.by_mask)


def _state_after_ids(
    scheme: Scheme, index: TokenIndex, ids: Tensor, valid: Tensor, state: SequenceState | None
) -> SequenceState:
    """Return the state after coordinates of the caller, whose last valid token in each row is text."""
    last_index = _last(index.ids, valid)
    offset = scheme.counter_after(scheme.counter(_last(ids, valid)), -last_index)
    if state is None:
        return SequenceState(offset, (~valid).sum(1))
    has_tokens = valid.any(1) if offset.ndim == 1 else valid.any(1)[:, None]
    before = state.offset if state.offset.ndim == offset.ndim else state.offset[:, None]
    offset = torch.where(has_tokens, offset, before)
    return replace(_with_padding(state, index, valid), offset=offset, settled=None, ends_unknown=False)


def _last(values: Tensor, valid: Tensor) -> Tensor:
    """Return the values (..., b) of the last valid token of each row, for values (..., b, s)."""
    index = torch.arange(valid.shape[1], device=valid.device)
    last = torch.where(valid, index, 0).amax(1)[:, None].expand(*values.shape[:-1], 1)
    return values.gather(-1, last)[..., 0]


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
