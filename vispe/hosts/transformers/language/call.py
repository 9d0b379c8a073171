"""Positions of one call of a converted model: token indices, coordinates, and the state stored with the KV cache.

`positions_of_call` is the entry point; the four functions at the end compute coordinates of the different kinds of
calls.
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
from vispe.hosts.transformers.language.families import language_model_of
from vispe.hosts.transformers.language.image_placeholders import stream_of, token_types, types_by_embedding
from vispe.hosts.transformers.language.kv_cache import (
    SequenceState,
    check_filled_here,
    check_mask,
    documents,
    look_up,
    next_token_index,
    prompt_token_index,
    state_after,
    state_of_prefix,
    text_coordinates,
    valid_tokens,
)
from vispe.hosts.transformers.language.parallel_sets import (
    ATTRIBUTES,
    IDS,
    RULES,
    check_complete_sets,
    members_of,
    text_attributes,
    token_attributes_of,
)
from vispe.hosts.transformers.language.position_ids import check_given, check_layout, split_ids, stock_scheme
from vispe.hosts.transformers.packed_samples import check_cache, check_call
from vispe.multimodal import Coordinates, Stream

# part of error messages: advice for packed samples
PACKED = "pass position_ids (b, s) that restart at 0 in every sample, as those of vispe.train.vlm.packing.Packing do."
# Video-LLaVA accepts images by another name as well, its only name before transformers 5.24
PIXELS = ("pixel_values", "pixel_values_images", "pixel_values_videos", "mm_encoder_outputs")
GRIDS = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts", "video_second_per_grid", "tile_grids")
TABLE, SPAN, OFFSET = (
    "vispe_table",
    "vispe_span",
    "vispe_offset",
)  # coordinates of the prompt, during generation


def passed(kwargs: dict[str, Any], *names: str) -> list[str]:
    """Return the names of arguments that are not empty; `generate` passes an empty dict without images."""
    values = ((name, kwargs.get(name)) for name in names)
    return [name for name, v in values if v is not None and not (isinstance(v, dict) and not v)]


@dataclass(eq=False)
class LanguageCall:
    """Arguments of a call that determine the positions of its tokens.

    Attributes:
        model: the converted model inside.
        input_ids: (b, s), or None.
        inputs_embeds: (b, s, width), or None.
        types: token types (b, s), or None; used if there are no `input_ids`.
        mask: padding mask (b, all tokens so far), or None.
        cache: KV cache, or None.
        kwargs: the other keyword arguments.
        token_attributes: attributes of parallel sets (k, b, s), set with the coordinates; None without sets.
        masked: whether there is a mask of any kind, including 4-D masks.
    """

    model: Any
    input_ids: Tensor | None
    inputs_embeds: Tensor | None
    types: Tensor | None
    mask: Tensor | None
    cache: Any
    kwargs: dict[str, Any]
    token_attributes: Tensor | None = None
    masked: bool = False

    def __post_init__(self) -> None:
        if self.input_ids is None and self.inputs_embeds is None:
            raise InputError("The model needs input_ids or inputs_embeds, got neither.")

    def types_of(self, token_index: Tensor) -> Tensor:
        """Return the type of every token (b, s): 0 text, 1 image, 2 video.

        Raises:
            InputError: there are images or videos, but their tokens cannot be determined.
        """
        shape = (token_index.shape[0], token_index.shape[1])
        types = token_types(self.model.config, self.input_ids, self.types, shape)
        if types is None and self.inputs_embeds is not None:
            types = types_by_embedding(self.model, self.inputs_embeds)
            if (named := passed(self.kwargs, *PIXELS, *GRIDS)) and not bool(types.any()):
                raise InputError(
                    f"The image tokens of inputs_embeds cannot be determined, got {named[0]} without "
                    "mm_token_type_ids, and no token with the embedding of an image token. Pass these types (b, s)."
                )
        return torch.zeros_like(token_index) if types is None else types

    def stream(self, token_index: Tensor, valid: Tensor) -> Stream:
        """Return the stream of text, images and videos of tokens (b, s).

        Raises:
            InputError: grids and placeholders differ.
        """
        arguments = (
            self.model,
            self.types_of(token_index),
            valid,
            documents(token_index, valid),
            self.kwargs,
        )
        parallel: str | None = language_model_of(self.model).vispe_text.parallel
        if parallel is None:
            return stream_of(*arguments)
        members: Tensor | None = self.kwargs.get(IDS)
        if members is None:
            members = members_of(self.model.config, self.input_ids, stream_of(*arguments))
        see, align = RULES[parallel]
        return stream_of(*arguments, members=members, see=see, align=align)

    def coordinates(self, token_index: Tensor, valid: Tensor, state: SequenceState | None) -> Coordinates:
        """Return the coordinates of tokens (b, s) that may contain images and videos."""
        scheme, start = self.model.vispe_scheme, None
        if state is not None:
            first = torch.where(valid, token_index, token_index.max()).amin(1)
            start = scheme.counter_after(state.offset, first)
        if language_model_of(self.model).vispe_text.parallel is None and traced_positions.traceable(
            self.model, self.kwargs
        ):
            tensors = (self.input_ids, self.inputs_embeds, self.types, token_index, valid, start)
            return traced_positions.coordinates(self.model, tensors, self.kwargs)
        stream = self.stream(token_index, valid)
        coordinates = scheme.coordinates(stream, start=start, training=self.model.training)
        self.token_attributes = token_attributes_of(scheme, stream, coordinates)
        return coordinates


@traced_positions.runs
def _untraced(model: Any, tensors: Sequence[Tensor | None], kwargs: dict[str, Any]) -> Coordinates:
    """Return the coordinates of a call, from the arguments of the custom operator in `traced_positions`."""
    ids, embeds, types, token_index, valid, start = tensors
    if token_index is None or valid is None:
        raise InputError(
            "The coordinates of a prompt need token indices and a mask of valid tokens, got None."
        )
    call = LanguageCall(model, ids, embeds, types, None, None, kwargs)
    return model.vispe_scheme.coordinates(call.stream(token_index, valid), start=start)


@dataclass(eq=False)
class CallPositions:
    """Positions of the tokens of a call.

    Attributes:
        token_index: ordinary position ids (b, s).
        ids: coordinates (axes, b, s).
        before: state of the cache before the call, or None.
        after: state of the cache after the call.
        token_attributes: attributes of parallel sets (k, b, s); None if neither the call nor the cache has sets.
        packed: whether rows are packed samples that are isolated from each other.
    """

    token_index: Tensor
    ids: Tensor
    before: SequenceState | None
    after: SequenceState
    token_attributes: Tensor | None = None
    packed: bool = False


def positions_of_call(call: LanguageCall, position_ids: Tensor | None) -> CallPositions:
    """Return the positions of the tokens of a call.

    Raises:
        InputError: tokens are missing, the cache was filled by another model, or coordinates belong to
            another scheme.
        ShapeError: `position_ids` have another shape.
    """
    tokens = call.inputs_embeds if call.input_ids is None else call.input_ids
    state: SequenceState | None = getattr(call.cache, "vispe_state", None)
    check_cache(state)
    if (state is None or tokens.shape[1] > 1) and not torch.compiler.is_compiling():
        check_mask(call.mask, type(call.model).__name__, PACKED)
    table, span, offset, token_attributes = (
        call.kwargs.get(name) for name in (TABLE, SPAN, OFFSET, ATTRIBUTES)
    )
    parallel, axes = language_model_of(call.model).vispe_text.parallel, call.model.vispe_scheme.axes
    _check_members(call, parallel, tokens)
    images = bool(passed(call.kwargs, *PIXELS, *(GRIDS if state is None else ()), IDS))
    images |= call.input_ids is None and call.types is not None
    if state is None:
        check_filled_here(call.cache)
        late = language_model_of(call.model).vispe_text.caches_coordinates
        state = state_of_prefix(call.cache, tokens, axes, late=late, by_mask=images)
    token_index, ids = _split(call, tokens, position_ids)
    # only ids of the caller can restart, which means that several samples are packed into a row
    restarts = token_index is not None
    token_index, counted = token_index_of(call, tokens, token_index, state, images)
    packed = restarts and check_call(
        call.model, language_model_of(call.model), token_index, call.mask, call.masked, state is not None
    )
    if ids is not None:
        _check_layout(call, position_ids, token_index, state)  # type: ignore[arg-type]
        if state is None and (stock := stock_scheme(call.model.config)) is not None:
            valid = valid_tokens(token_index, call.mask)
            grids = any(call.kwargs.get(name) is not None for name in GRIDS[:2])
            stream = partial(call.stream, token_index, valid) if grids else None
            check_given(call.model.vispe_scheme, stock, len(position_ids), ids, valid, stream)  # type: ignore[arg-type]
        if parallel is not None and images:  # for the attributes of parallel sets
            call.coordinates(token_index, valid_tokens(token_index, call.mask), state)
        after = _after_ids(call, token_index, ids, state)
    elif table is not None:
        ids, after = _from_table(call, token_index, table, span, offset, state)
        if token_attributes is not None:
            valid = valid_tokens(token_index, call.mask)
            plain = text_attributes(axes, valid)
            # padding has the index of the first token
            call.token_attributes = torch.where(
                valid, look_up(token_index, token_attributes, span, plain), plain
            )
            if parallel == "pine":
                check_complete_sets(call.token_attributes, token_attributes)
    elif images:
        ids, after = _of_images(call, token_index, counted, state)
    else:
        ids, after = _of_text(call, token_index, counted, state)
    if call.token_attributes is None and state is not None and state.token_attributes is not None:
        call.token_attributes = text_attributes(axes, valid_tokens(token_index, call.mask))
    elif (
        call.token_attributes is not None
        and state is not None
        and state.token_attributes is None
        and state.ids is not None
    ):
        past = state.ids[0]
        valid = (
            torch.ones_like(past, dtype=torch.bool)
            if call.mask is None
            else call.mask[:, : past.shape[1]].bool()
        )
        state.token_attributes = text_attributes(axes, valid)
    if packed and parallel is None and not torch.compiler.is_compiling():
        after = replace(after, packed=True)
    return CallPositions(token_index, ids, state, after, call.token_attributes, packed)


def text_call_positions(call: LanguageCall, position_ids: Tensor | None) -> CallPositions:
    """Return positions of a call of the language model alone; all tokens are text, unless coordinates are passed.

    Raises:
        InputError: the cache was filled by another model.
        ShapeError: `position_ids` have another shape.
    """
    tokens = call.inputs_embeds if call.input_ids is None else call.input_ids
    state: SequenceState | None = getattr(call.cache, "vispe_state", None)
    if state is None:
        check_filled_here(call.cache)
    check_cache(state)
    token_index, ids = _split(call, tokens, position_ids)
    restarts = token_index is not None
    token_index, counted = token_index_of(call, tokens, token_index, state, images=False)
    packed = restarts and check_call(
        call.model, call.model, token_index, call.mask, call.masked, state is not None
    )
    if ids is None:
        ids, after = _of_text(call, token_index, counted, state)
    else:
        _check_layout(call, position_ids, token_index, state, alone=True)  # type: ignore[arg-type]
        after = _after_ids(call, token_index, ids, state)
    token_attributes = None
    if state is not None and state.token_attributes is not None:
        token_attributes = text_attributes(len(ids), valid_tokens(token_index, call.mask))
    if packed and not torch.compiler.is_compiling():
        after = replace(after, packed=True)
    return CallPositions(token_index, ids, state, after, token_attributes, packed)


def _split(
    call: LanguageCall, tokens: Any, position_ids: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return token indices and coordinates from the position ids of the caller, see `split_ids`."""
    if position_ids is None:
        return None, None
    return split_ids(position_ids, call.model.vispe_scheme.axes, (tokens.shape[0], tokens.shape[1]))


def _check_layout(
    call: LanguageCall,
    position_ids: Tensor,
    token_index: Tensor,
    state: SequenceState | None,
    alone: bool = False,
) -> None:
    """Raise `ShapeError` if coordinates certainly have the layout (b, axes, s), see `check_layout`."""
    scheme = call.model.vispe_scheme
    valid = valid_tokens(token_index, call.mask)

    def text() -> Tensor | None:
        try:
            return None if alone else call.types_of(token_index) == 0
        except VispeError:
            return None

    def expected(token_index: Tensor) -> Tensor | None:
        if alone:
            return None if state is None else text_coordinates(scheme, token_index, state)
        first = torch.where(valid, token_index, token_index.max()).amin(1)
        start = None if state is None else scheme.counter_after(state.offset, first)
        try:
            return scheme.coordinates(call.stream(token_index, valid), start=start).ids
        except VispeError:
            return None

    check_layout(scheme, position_ids, token_index, text, expected, valid)


def _check_members(call: LanguageCall, parallel: str | None, tokens: Tensor) -> None:
    """Raise `InputError` if `parallel_ids` have no effect or another shape than the tokens."""
    members = call.kwargs.get(IDS)
    if members is None:
        return
    if parallel is None:
        raise InputError(
            f"{IDS} needs a model converted with parallel, got one whose images are ordered. Convert it with "
            "parallel='graph_kv' or 'pine'."
        )
    if members.shape != tokens.shape[:2]:
        raise InputError(
            f"{IDS} must have one member per token, shape {tuple(tokens.shape[:2])}, got {tuple(members.shape)}."
        )


def token_index_of(
    call: LanguageCall, tokens: Tensor, token_index: Tensor | None, state: SequenceState | None, images: bool
) -> tuple[Tensor, bool]:
    """Return the token indices (b, s), and whether they exclude padding."""
    rows, length = tokens.shape[:2]
    counted = token_index is not None
    if token_index is None and state is not None:
        token_index = next_token_index(length, call.cache, state, call.mask)
        counted = call.mask is not None and state.by_mask
    elif token_index is None:  # prompts without images are counted with their padding, as in the stock model
        token_index = prompt_token_index(length, rows, call.mask if images else None, tokens.device)
    return token_index.expand(rows, length), counted


def _after_ids(
    call: LanguageCall, token_index: Tensor, ids: Tensor, state: SequenceState | None
) -> SequenceState:
    """Return the state after coordinates of the caller."""
    if state is not None:
        return state
    scheme = call.model.vispe_scheme
    offset = scheme.counter_after(scheme.counter(ids[..., -1]), -token_index[:, -1])
    return SequenceState(offset, (~valid_tokens(token_index, call.mask)).sum(1))


def _from_table(
    call: LanguageCall,
    token_index: Tensor,
    table: Tensor,
    span: Tensor,
    offset: Tensor,
    state: SequenceState | None,
) -> tuple[Tensor, SequenceState]:
    """Return the coordinates of a call of `generate`, from the table of the prompt."""
    scheme = call.model.vispe_scheme
    # virtual tokens of prompt tuning precede the prompt
    beyond = torch.where(
        token_index < span[:, :1],
        scheme.text(token_index.double()),
        scheme.continue_text(token_index, offset),
    )
    ids = look_up(token_index, table, span, beyond)
    if state is None or state.prefix:
        state = SequenceState(offset, (~valid_tokens(token_index, call.mask)).sum(1))
    return ids, state


def _of_text(
    call: LanguageCall, token_index: Tensor, counted: bool, state: SequenceState | None
) -> tuple[Tensor, SequenceState]:
    """Return the coordinates of text, at the start of a sequence or after cached tokens."""
    after = state
    if after is None:
        padding = (
            (~valid_tokens(token_index, call.mask)).sum(1)
            if counted
            else token_index.new_zeros(len(token_index))
        )
        after = SequenceState(torch.zeros_like(padding, dtype=torch.float64), padding, by_mask=counted)
    elif counted and token_index.shape[1] > 1:  # a further turn of a dialogue
        after = replace(after, padding=after.padding + (~valid_tokens(token_index, call.mask)).sum(1))
    return text_coordinates(call.model.vispe_scheme, token_index, after), after


def _of_images(
    call: LanguageCall, token_index: Tensor, counted: bool, state: SequenceState | None
) -> tuple[Tensor, SequenceState]:
    """Return the coordinates of tokens that contain images or videos."""
    valid = valid_tokens(token_index, call.mask)
    coordinates = call.coordinates(token_index, valid, state)
    after = state_after(coordinates, token_index, valid)
    if state is not None:
        padding = after.padding * counted + state.padding  # indices that include padding need no correction
        after = replace(after, padding=padding, by_mask=state.by_mask)
    return coordinates.ids, after
