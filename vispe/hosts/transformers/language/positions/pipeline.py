"""Positions of one call, in four steps: split position ids, index tokens, assign coordinates, state after the call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vispe.errors import InputError, UnsupportedCombination
from vispe.hosts.transformers.language.families import language_model_of
from vispe.hosts.transformers.language.parallel_sets import IDS, text_attributes
from vispe.hosts.transformers.language.positions import coordinates
from vispe.hosts.transformers.language.positions.cache_checks import (
    check_conversion,
    check_end,
    check_filled_here,
)
from vispe.hosts.transformers.language.positions.call import PACKED, PIXELS, LanguageCall, passed
from vispe.hosts.transformers.language.positions.coordinates import Assigned
from vispe.hosts.transformers.language.positions.kv_cache import state_of_prefix, text_coordinates, text_state
from vispe.hosts.transformers.language.positions.position_ids import TokenPositions, split_ids
from vispe.hosts.transformers.language.positions.sequence_state import SequenceState
from vispe.hosts.transformers.language.positions.token_index import (
    TokenIndex,
    check_mask,
    index_tokens,
    valid_tokens,
)
from vispe.hosts.transformers.packed_samples import check_cache, check_call


@dataclass(eq=False)
class CallPositions:
    """Positions of the tokens of a call.

    Attributes:
        token_index: ordinary position ids (b, s).
        ids: coordinates (axes, b, s).
        before: state of the cache before the call, or None.
        after: state of the cache after the call.
        valid: tokens that are not padding (b, s).
        token_attributes: attributes of parallel sets (k, b, s); None if neither the call nor the cache has sets.
        packed: whether rows are packed samples that are isolated from each other.
        visual: tokens of images and videos (b, s); None if there are none, or if they are unknown.
    """

    token_index: Tensor
    ids: Tensor
    before: SequenceState | None
    after: SequenceState
    valid: Tensor
    token_attributes: Tensor | None = None
    packed: bool = False
    visual: Tensor | None = None

    @property
    def of_tokens(self) -> TokenPositions:
        """Positions that the model passes to its language model."""
        return TokenPositions(self.token_index, self.ids, self.token_attributes)


def positions_of_call(call: LanguageCall, position_ids: Tensor | None) -> CallPositions:
    """Return the positions of the tokens of a call.

    Raises:
        InputError: tokens are missing, the cache was filled by another model, or coordinates belong to
            another scheme.
        ShapeError: `position_ids` have another shape.
    """
    text, images = language_model_of(call.model), call.has_images
    parallel = text.vispe_text.parallel
    # chunks of a prompt with images may contain text only
    by_mask = images or call.prompt is not None
    check_cache(call.state)
    check_conversion(call.state, text.vispe_text.of_keys)
    _check_members(call, parallel)
    if (call.state is None or call.tokens.shape[1] > 1) and not torch.compiler.is_compiling():
        check_mask(call.mask, type(call.model).__name__, PACKED)
    before = call.state_by_mask(position_ids)
    if before is None:
        check_filled_here(call.cache)
        axes, late = call.model.vispe_scheme.axes, text.vispe_text.caches_coordinates
        before = state_of_prefix(call.cache, call.tokens, axes, late=late, by_mask=by_mask)
    index, ids = _split(call, position_ids, before, by_mask)
    packed = _packed(call, text, index, before)
    if ids is None:
        check_end(before)
    if ids is not None:
        assigned = coordinates.of_caller(call, index, ids, position_ids, before)  # type: ignore[arg-type]
        if parallel is not None and images:  # for the attributes of parallel sets
            _, attributes = call.coordinates(index.ids, valid_tokens(index.ids, call.mask), before)
            assigned = assigned._replace(token_attributes=attributes)
    elif call.prompt is not None:
        assigned = coordinates.of_table(call, index, before, call.prompt, parallel)
    elif images:
        assigned = coordinates.of_images(call, index, before)
    else:
        assigned = coordinates.of_text(call, index, before)
    # rows with parallel sets are isolated by the mask of the sets, which the cache stores
    positions = _positions(call, index, before, assigned, packed, continued=parallel is not None)
    return replace(positions, visual=call.visual_tokens(index.ids))


def text_call_positions(call: LanguageCall, position_ids: Tensor | None) -> CallPositions:
    """Return positions of a call of the language model alone; all tokens are text, unless coordinates are passed.

    Raises:
        InputError: the cache was filled by another model.
        ShapeError: `position_ids` have another shape.
    """
    before = call.state_by_mask(position_ids)
    if before is None:
        check_filled_here(call.cache)
    check_cache(before)
    check_conversion(before, call.model.vispe_text.of_keys)
    index, ids = _split(call, position_ids, before, images=False)
    packed = _packed(call, call.model, index, before)
    if ids is None:
        check_end(before)
        assigned = coordinates.of_text(call, index, before)
    else:
        assigned = coordinates.of_caller_alone(call, index, ids, position_ids, before)  # type: ignore[arg-type]
    return _positions(call, index, before, assigned, packed, continued=False)


def is_paged(cache: Any) -> bool:
    """Return whether a cache is that of continuous batching, which stores tokens of many requests in pages."""
    return cache is not None and not hasattr(cache, "get_seq_length")


def paged_positions(call: LanguageCall, position_ids: Tensor) -> TokenPositions:
    """Return positions of a call of `generate_batch`, whose row contains text of many requests.

    Raises:
        UnsupportedCombination: the coordinates of cached tokens are needed.
        InputError: the call has images.
    """
    settings = language_model_of(call.model).vispe_text
    if settings.caches_coordinates:
        raise UnsupportedCombination(
            "generate_batch: continuous batching does not store the coordinates of cached tokens, got a model that "
            f"needs them: {settings.scheme} with late rotation or an indexer. Use generate, or convert the model "
            "without late_rotation, parallel and self_extend."
        )
    if named := passed(call.kwargs, *PIXELS):
        raise InputError(f"generate_batch: only text is supported, got {named[0]}. Use generate.")
    state = text_state(len(position_ids), position_ids.device)
    return TokenPositions(position_ids, text_coordinates(settings.scheme, position_ids, state))


def _split(
    call: LanguageCall, position_ids: Tensor | None, before: SequenceState | None, images: bool
) -> tuple[TokenIndex, Tensor | None]:
    """Return the token indices, and the coordinates (axes, b, s) of the caller, None if there are none."""
    token_index = ids = None
    if position_ids is not None:
        rows, length = call.tokens.shape[:2]
        token_index, ids = split_ids(position_ids, call.model.vispe_scheme.axes, (rows, length))
    # indices of coordinates exclude padding, as those of images
    images = images or ids is not None
    index = index_tokens(
        call.tokens, token_index, cache=call.cache, state=before, mask=call.mask, images=images
    )
    return index, ids


def _packed(call: LanguageCall, text: object, index: TokenIndex, before: SequenceState | None) -> bool:
    """Return whether rows are packed samples to be isolated; only indices of the caller can restart."""
    return index.restarts and check_call(
        call.model, text, index.ids, call.mask, call.masked, before is not None
    )


def _positions(
    call: LanguageCall,
    index: TokenIndex,
    before: SequenceState | None,
    assigned: Assigned,
    packed: bool,
    continued: bool,
) -> CallPositions:
    """Return the positions, with the attributes of parallel sets for the call and for the cache, or for neither."""
    ids, after, attributes = assigned
    valid = valid_tokens(index.ids, call.mask)
    after = after.with_padding(valid, before, call.cache)
    if before is not None and attributes is None and before.token_attributes is not None:
        attributes = text_attributes(len(ids), valid)
    elif before is not None and attributes is not None:
        before.add_text_attributes(call.mask)
    if packed and not continued and not torch.compiler.is_compiling():
        after = replace(after, packed=True)
    return CallPositions(index.ids, ids, before, after, valid, attributes, packed)


def _check_members(call: LanguageCall, parallel: str | None) -> None:
    """Raise `InputError` if `parallel_ids` have no effect or another shape than the tokens."""
    members, shape = call.kwargs.get(IDS), call.tokens.shape[:2]
    if members is None:
        return
    if parallel is None:
        raise InputError(
            f"{IDS} needs a model converted with parallel, got one whose images are ordered. Convert it with "
            "parallel='graph_kv' or 'pine'."
        )
    if members.shape != shape:
        raise InputError(
            f"{IDS} must have one member per token, shape {tuple(shape)}, got {tuple(members.shape)}."
        )
