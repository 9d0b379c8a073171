"""One call of a converted model: the keys of its tokens, their coordinates, and what the cache must remember of them.

`place` is the whole of it; the four rules below it say where coordinates come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vispe.errors import InputError, VispeError
from vispe.hosts.transformers.language import traced_positions
from vispe.hosts.transformers.language.families import text_of
from vispe.hosts.transformers.language.image_placeholders import stream_of, token_types, types_by_embedding
from vispe.hosts.transformers.language.kv_cache import (
    SequenceState,
    check_filled_here,
    check_mask,
    documents,
    look_up,
    next_keys,
    prompt_keys,
    state_after,
    state_of_prefix,
    text_coordinates,
    valid_tokens,
)
from vispe.hosts.transformers.language.parallel_sets import (
    IDS,
    MARKS,
    RULES,
    check_whole,
    marks_of,
    members_of,
    plain_marks,
)
from vispe.hosts.transformers.language.position_ids import check_given, check_layout, split_ids, stock_scheme
from vispe.hosts.transformers.packed_samples import check_cache, check_call
from vispe.multimodal import Coordinates, Stream

# what to do with packed samples
PACKED = "pass position_ids (b, s) that restart at 0 in every sample, as those of vispe.train.vlm.packing.Packing do."
PIXELS = ("pixel_values", "pixel_values_videos", "mm_encoder_outputs")
GRIDS = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts", "video_second_per_grid", "tile_grids")
TABLE, SPAN, OFFSET = "vispe_table", "vispe_span", "vispe_offset"  # a prompt by key, while generating


def given(kwargs: dict[str, Any], *names: str) -> list[str]:
    """Return which of these arguments say something; `generate` passes an empty dict where there are no pictures."""
    values = ((name, kwargs.get(name)) for name in names)
    return [name for name, v in values if v is not None and not (isinstance(v, dict) and not v)]


@dataclass(eq=False)
class Call:
    """What a call says about its tokens.

    Attributes:
        model: the converted model inside.
        input_ids: (b, s), or None.
        inputs_embeds: (b, s, width), or None.
        types: (b, s), or None: read where there are no `input_ids`.
        mask: (b, all tokens so far), or None.
        cache: of what came before, or None.
        kwargs: the other keyword arguments.
        marks: what is said of tokens that stand side by side (rows, b, s), once their coordinates are known; None where
            none do.
        masked: whether there is a mask of any kind, 4-D ones included.
    """

    model: Any
    input_ids: Tensor | None
    inputs_embeds: Tensor | None
    types: Tensor | None
    mask: Tensor | None
    cache: Any
    kwargs: dict[str, Any]
    marks: Tensor | None = None
    masked: bool = False

    def __post_init__(self) -> None:
        if self.input_ids is None and self.inputs_embeds is None:
            raise InputError("The model needs input_ids or inputs_embeds; got neither.")

    def types_of(self, keys: Tensor) -> Tensor:
        """Return the type of every token (b, s): 0 text, 1 image, 2 video.

        Raises:
            InputError: there are pictures, but nothing says which tokens they are.
        """
        shape = (keys.shape[0], keys.shape[1])
        types = token_types(self.model.config, self.input_ids, self.types, shape)
        if types is None and self.inputs_embeds is not None:
            types = types_by_embedding(self.model, self.inputs_embeds)
            if (named := given(self.kwargs, *PIXELS, *GRIDS)) and not bool(types.any()):
                raise InputError(
                    f"inputs_embeds came with {named[0]}, but no token has the embedding of a picture's token and "
                    "mm_token_type_ids is missing, so nothing says which tokens are pictures; give mm_token_type_ids "
                    "(b, s)."
                )
        return torch.zeros_like(keys) if types is None else types

    def stream(self, keys: Tensor, valid: Tensor) -> Stream:
        """Return what stands where among tokens (b, s) that may contain pictures.

        Raises:
            InputError: grids and placeholders do not agree.
        """
        given = (self.model, self.types_of(keys), valid, documents(keys, valid), self.kwargs)
        beside: str | None = text_of(self.model).vispe_beside
        if beside is None:
            return stream_of(*given)
        members: Tensor | None = self.kwargs.get(IDS)
        if members is None:
            members = members_of(self.model.config, self.input_ids, stream_of(*given))
        see, align = RULES[beside]
        return stream_of(*given, members=members, see=see, align=align)

    def coordinates(self, keys: Tensor, valid: Tensor, state: SequenceState | None) -> Coordinates:
        """Return the coordinates of tokens (b, s) that may contain pictures."""
        scheme, start = self.model.vispe_scheme, None
        if state is not None:
            first = torch.where(valid, keys, keys.max()).amin(1)
            start = scheme.counted_on(state.offset, first)
        if text_of(self.model).vispe_beside is None and traced_positions.traceable(self.model, self.kwargs):
            tensors = (self.input_ids, self.inputs_embeds, self.types, keys, valid, start)
            return traced_positions.coordinates(self.model, tensors, self.kwargs)
        stream = self.stream(keys, valid)
        found = scheme.coordinates(stream, start=start, training=self.model.training)
        self.marks = marks_of(scheme, stream, found)
        return found


@traced_positions.runs
def _untraced(model: Any, tensors: Sequence[Tensor | None], kwargs: dict[str, Any]) -> Coordinates:
    """Return the coordinates of a call that a compiler handed on: the tensors and pictures of `Call.coordinates`."""
    ids, embeds, types, keys, valid, start = tensors
    if keys is None or valid is None:
        raise InputError(
            "The coordinates of a prompt need the key of every token, and which are not padding."
        )
    call = Call(model, ids, embeds, types, None, None, kwargs)
    return model.vispe_scheme.coordinates(call.stream(keys, valid), start=start)


@dataclass(eq=False)
class Placed:
    """Where the tokens of a call are.

    Attributes:
        keys: (b, s).
        ids: coordinates (axes, b, s).
        before: state of the cache before the call, or None.
        after: state after it.
        marks: what is said of tokens that stand side by side (rows, b, s); None where neither they nor those before do.
        packed: whether rows are packed samples that are isolated from each other.
    """

    keys: Tensor
    ids: Tensor
    before: SequenceState | None
    after: SequenceState
    marks: Tensor | None = None
    packed: bool = False


def place(call: Call, position_ids: Tensor | None) -> Placed:
    """Return where the tokens of a call are; what only says so is taken out of its keyword arguments.

    Raises:
        InputError: tokens are missing, a cache was filled by another model, or coordinates are those of another scheme.
        ShapeError: `position_ids` have another shape.
    """
    tokens = call.inputs_embeds if call.input_ids is None else call.input_ids
    state: SequenceState | None = getattr(call.cache, "vispe_state", None)
    check_cache(state)
    if (state is None or tokens.shape[1] > 1) and not torch.compiler.is_compiling():
        check_mask(call.mask, type(call.model).__name__, PACKED)
    table, span, offset, marks = (call.kwargs.get(name) for name in (TABLE, SPAN, OFFSET, MARKS))
    beside, axes = text_of(call.model).vispe_beside, call.model.vispe_scheme.axes
    _check_members(call, beside, tokens)
    pictures = bool(given(call.kwargs, *PIXELS, *(GRIDS if state is None else ()), IDS))
    pictures |= call.input_ids is None and call.types is not None
    if state is None:
        check_filled_here(call.cache)
        late = text_of(call.model).vispe_late
        state = state_of_prefix(call.cache, tokens, axes, late=late, by_mask=pictures)
    keys, ids = _split(call, tokens, position_ids)
    restarts = keys is not None
    keys, counted = keys_of(call, tokens, keys, state, pictures)
    packed = restarts and check_call(
        call.model, text_of(call.model), keys, call.mask, call.masked, state is not None
    )
    if ids is not None:
        _check_layout(call, position_ids, keys, state)  # type: ignore[arg-type]
        if state is None and (stock := stock_scheme(call.model.config)) is not None:
            valid = valid_tokens(keys, call.mask)
            grids = any(call.kwargs.get(name) is not None for name in GRIDS[:2])
            stream = partial(call.stream, keys, valid) if grids else None
            check_given(call.model.vispe_scheme, stock, len(position_ids), ids, valid, stream)  # type: ignore[arg-type]
        if beside is not None and pictures:
            call.coordinates(keys, valid_tokens(keys, call.mask), state)
        after = _after_ids(call, keys, ids, state)
    elif table is not None:
        ids, after = _from_table(call, keys, table, span, offset, state)
        if marks is not None:
            valid = valid_tokens(keys, call.mask)
            plain = plain_marks(axes, valid)
            # padding has the key of the first token
            call.marks = torch.where(valid, look_up(keys, marks, span, plain), plain)
            if beside == "pine":
                check_whole(call.marks, marks)
    elif pictures:
        ids, after = _of_pictures(call, keys, counted, state)
    else:
        ids, after = _of_text(call, keys, counted, state)
    if call.marks is None and state is not None and state.marks is not None:
        call.marks = plain_marks(axes, valid_tokens(keys, call.mask))
    elif call.marks is not None and state is not None and state.marks is None and state.ids is not None:
        past = state.ids[0]
        seen = (
            torch.ones_like(past, dtype=torch.bool)
            if call.mask is None
            else call.mask[:, : past.shape[1]].bool()
        )
        state.marks = plain_marks(axes, seen)
    if packed and beside is None and not torch.compiler.is_compiling():
        after = replace(after, packed=True)
    return Placed(keys, ids, state, after, call.marks, packed)


def place_text(call: Call, position_ids: Tensor | None) -> Placed:
    """Return where the tokens of a call of the language model alone are: all are text, unless coordinates are given.

    Raises:
        InputError: a cache was filled by another model.
        ShapeError: `position_ids` have another shape.
    """
    tokens = call.inputs_embeds if call.input_ids is None else call.input_ids
    state: SequenceState | None = getattr(call.cache, "vispe_state", None)
    if state is None:
        check_filled_here(call.cache)
    check_cache(state)
    keys, ids = _split(call, tokens, position_ids)
    restarts = keys is not None
    keys, counted = keys_of(call, tokens, keys, state, pictures=False)
    packed = restarts and check_call(call.model, call.model, keys, call.mask, call.masked, state is not None)
    if ids is None:
        ids, after = _of_text(call, keys, counted, state)
    else:
        _check_layout(call, position_ids, keys, state, alone=True)  # type: ignore[arg-type]
        after = _after_ids(call, keys, ids, state)
    marks = None
    if state is not None and state.marks is not None:
        marks = plain_marks(len(ids), valid_tokens(keys, call.mask))
    if packed and not torch.compiler.is_compiling():
        after = replace(after, packed=True)
    return Placed(keys, ids, state, after, marks, packed)


def _split(call: Call, tokens: Any, position_ids: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the keys and the coordinates that the caller gave, see `split_ids`."""
    if position_ids is None:
        return None, None
    return split_ids(position_ids, call.model.vispe_scheme.axes, (tokens.shape[0], tokens.shape[1]))


def _check_layout(
    call: Call, position_ids: Tensor, keys: Tensor, state: SequenceState | None, alone: bool = False
) -> None:
    """Raise `ShapeError` where coordinates are known to be laid out as (b, axes, s), see `check_layout`."""
    scheme = call.model.vispe_scheme
    valid = valid_tokens(keys, call.mask)

    def text() -> Tensor | None:
        try:
            return None if alone else call.types_of(keys) == 0
        except VispeError:
            return None

    def expected(keys: Tensor) -> Tensor | None:
        if alone:
            return None if state is None else text_coordinates(scheme, keys, state)
        first = torch.where(valid, keys, keys.max()).amin(1)
        start = None if state is None else scheme.counted_on(state.offset, first)
        try:
            return scheme.coordinates(call.stream(keys, valid), start=start).ids
        except VispeError:
            return None

    check_layout(scheme, position_ids, keys, text, expected, valid)


def _check_members(call: Call, beside: str | None, tokens: Tensor) -> None:
    """Raise `InputError` where the call says what stands side by side in vain, or not of its tokens."""
    members = call.kwargs.get(IDS)
    if members is None:
        return
    if beside is None:
        raise InputError(
            f"{IDS} was given to a model whose images stand in order; convert it with parallel='graph_kv' or 'pine'."
        )
    if members.shape != tokens.shape[:2]:
        raise InputError(
            f"{IDS} needs the member of each token, shape {tuple(tokens.shape[:2])}, got {tuple(members.shape)}."
        )


def keys_of(
    call: Call, tokens: Tensor, keys: Tensor | None, state: SequenceState | None, pictures: bool
) -> tuple[Tensor, bool]:
    """Return the keys (b, s), and whether padding was left out when they were counted."""
    rows, length = tokens.shape[:2]
    counted = keys is not None
    if keys is None and state is not None:
        keys = next_keys(length, call.cache, state, call.mask)
        counted = call.mask is not None and state.by_mask
    elif keys is None:  # text alone is counted with its padding, as the model of before does
        keys = prompt_keys(length, rows, call.mask if pictures else None, tokens.device)
    return keys.expand(rows, length), counted


def _after_ids(call: Call, keys: Tensor, ids: Tensor, state: SequenceState | None) -> SequenceState:
    """Return what follows coordinates that were given."""
    if state is not None:
        return state
    scheme = call.model.vispe_scheme
    offset = scheme.counted_on(scheme.counter(ids[..., -1]), -keys[:, -1])
    return SequenceState(offset, (~valid_tokens(keys, call.mask)).sum(1))


def _from_table(
    call: Call, keys: Tensor, table: Tensor, span: Tensor, offset: Tensor, state: SequenceState | None
) -> tuple[Tensor, SequenceState]:
    """Return coordinates out of the table of the prompt, while `generate` runs."""
    scheme = call.model.vispe_scheme
    # virtual tokens of prompt tuning come before the prompt
    beyond = torch.where(keys < span[:, :1], scheme.text(keys.double()), scheme.going_on(keys, offset))
    ids = look_up(keys, table, span, beyond)
    if state is None or state.prefix:
        state = SequenceState(offset, (~valid_tokens(keys, call.mask)).sum(1))
    return ids, state


def _of_text(
    call: Call, keys: Tensor, counted: bool, state: SequenceState | None
) -> tuple[Tensor, SequenceState]:
    """Return coordinates of text, at the start or after what is in the cache."""
    after = state
    if after is None:
        padding = (~valid_tokens(keys, call.mask)).sum(1) if counted else keys.new_zeros(len(keys))
        after = SequenceState(torch.zeros_like(padding, dtype=torch.float64), padding, by_mask=counted)
    elif counted and keys.shape[1] > 1:  # another turn
        after = replace(after, padding=after.padding + (~valid_tokens(keys, call.mask)).sum(1))
    return text_coordinates(call.model.vispe_scheme, keys, after), after


def _of_pictures(
    call: Call, keys: Tensor, counted: bool, state: SequenceState | None
) -> tuple[Tensor, SequenceState]:
    """Return coordinates of tokens among which are pictures."""
    valid = valid_tokens(keys, call.mask)
    coordinates = call.coordinates(keys, valid, state)
    after = state_after(coordinates, keys, valid)
    if state is not None:
        padding = after.padding * counted + state.padding  # else keys were counted with padding
        after = replace(after, padding=padding, by_mask=state.by_mask)
    return coordinates.ids, after
