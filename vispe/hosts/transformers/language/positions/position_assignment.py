"""Assignment of coordinates to the tokens of a call, and storage of the state on the KV cache.

Coordinates are computed before the model runs. In compiled programs they are deferred to the language model and become
part of its graph, which avoids a graph break.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vispe.attention.precision import exporting
from vispe.hosts.transformers.language.families import family_of, language_model_of
from vispe.hosts.transformers.language.parallel_sets import IDS, append_attributes
from vispe.hosts.transformers.language.positions.cache_checks import check_conversion
from vispe.hosts.transformers.language.positions.call import PIXELS, LanguageCall, passed
from vispe.hosts.transformers.language.positions.kv_cache import PositionedCache, set_state, settled_length
from vispe.hosts.transformers.language.positions.pipeline import CallPositions, positions_of_call
from vispe.hosts.transformers.language.positions.prompt import CHUNKED, MASK, PROMPT
from vispe.hosts.transformers.language.positions.sequence_state import NextTokens, SequenceState
from vispe.hosts.transformers.language.positions.token_index import index_tokens
from vispe.hosts.transformers.packed_samples import isolates
from vispe.hosts.transformers.subclasses import converted_subclass
from vispe.hosts.transformers.version import CACHE_NAMES, cache_of
from vispe.multimodal import Scheme

STEPS = 32  # number of tokens whose rotation is computed at once during decoding of single tokens
READ = ("input_ids", "inputs_embeds", "mm_token_type_ids", "attention_mask")
OWN = (PROMPT, MASK, CHUNKED, "tile_grids", IDS)  # keywords that the stock model does not accept


@dataclass(eq=False)
class DeferredPositions:
    """Positions that are computed by the language model, passed to it as its position ids.

    Attributes:
        call: the call.
        position_ids: position ids of the caller, or None.
        computed: whether they were computed, successfully or not.
    """

    call: LanguageCall
    position_ids: Tensor | None
    computed: bool = False

    def compute(self) -> CallPositions:
        """Return the positions of the call; errors as in `positions_of_call`."""
        self.computed = True
        return positions_of_call(self.call, self.position_ids)


@dataclass(eq=False)
class DecodingStep:
    """A decoding step with one text token per row, passed to the language model as its position ids.

    Attributes:
        token_index: token indices (b, 1).
        offset: offset of the text, (b) or (b, k): the offset of the state, or of the prompt during
            generation.
        length: number of cached tokens.
        state: state of the cache.
        scheme: scheme of the model.
    """

    token_index: Tensor
    offset: Tensor
    length: int
    state: SequenceState
    scheme: Scheme

    def upcoming(self) -> NextTokens | None:
        """Return the precomputed rotation of this token and the next ones, None if there is none."""
        cached = self.state.upcoming
        if cached is None or cached.scheme is not self.scheme:
            return None
        index = self.length - cached.length
        fits = 0 <= index < cached.token_index.shape[1] and torch.equal(
            self.token_index, cached.token_index[:, index : index + 1]
        )
        same = self.offset is cached.offset or torch.equal(self.offset, cached.offset)
        return cached if fits and same else None


def step_of(call: LanguageCall, position_ids: Tensor | None) -> DecodingStep | None:
    """Return a decoding step of one text token per row, whose rotation can be precomputed; None for other calls."""
    if (
        torch.compiler.is_compiling()
        or exporting()
        or language_model_of(call.model).vispe_text.caches_coordinates
    ):
        return None
    state: SequenceState | None = getattr(call.cache, "vispe_state", None)
    if (
        state is None
        or call.input_ids is None
        or call.input_ids.shape[1] != 1
        or state.packed
        or state.prefix
        or state.ends_unknown
    ):
        return None
    check_conversion(state, language_model_of(call.model).vispe_text.of_keys)
    shape = tuple(call.input_ids.shape)  # other shapes are checked in `positions_of_call`
    ordinary = position_ids is None or (
        isinstance(position_ids, Tensor)
        and tuple(position_ids.shape) == shape
        and position_ids.dtype == torch.long
    )
    if not ordinary or state.settled is None or passed(call.kwargs, *PIXELS, IDS):
        return None
    length = call.cache.get_seq_length()
    if isinstance(length, Tensor) and length.device.type != "cpu":
        return None  # reading the value would synchronise the device
    if call.state_by_mask(position_ids) is not state:
        return None
    token_index = index_tokens(
        call.input_ids, position_ids, cache=call.cache, state=state, mask=call.mask, images=False
    ).ids
    prompt = call.prompt
    offset = state.offset if prompt is None else prompt.offset
    step = DecodingStep(token_index, offset, int(length), state, call.model.vispe_scheme)
    if step.upcoming() is None:
        after_prompt = prompt is None or bool((token_index >= prompt.span.sum(1, keepdim=True)).all())
        if not after_prompt or step.length < int(state.settled):
            return None
        # padding is counted in the state
        if call.mask is not None and not bool(call.mask[:, -1].all()):
            return None
        state.upcoming = None
    return step


def call_of(model: Any, named: dict[str, Any]) -> LanguageCall:
    """Return the `LanguageCall` of a model, from its arguments by name."""
    ids, embeds, types, mask = (named.get(name) for name in READ)
    masked = mask is not None
    if ids is None and _types_of_text_only(types, embeds):
        types = None
    # generate with a static cache passes a mask for each type of layers; those of linear attention are padding masks
    masks = mask.values() if isinstance(mask, dict) else (mask,)
    mask = next((m for m in masks if isinstance(m, Tensor) and m.ndim == 2), named.get(MASK))
    tokens, cache = embeds if ids is None else ids, cache_of(named)
    if mask is not None and mask is named.get(MASK):
        if named.get(CHUNKED):
            mask = mask[:, : cache.get_seq_length() + tokens.shape[1]]
        if mask.shape[1] < tokens.shape[1]:
            mask = None  # virtual tokens of prompt tuning are not in this mask
    others = {
        n: v for n, v in named.items() if n not in READ and n not in CACHE_NAMES and n != "position_ids"
    }
    return LanguageCall(model, ids, embeds, types, mask, cache, others, masked=masked)


def _types_of_text_only(types: Tensor | None, embeds: Tensor | None) -> bool:
    """Return whether types cover the text only, without the virtual tokens that prompt tuning puts in front."""
    if types is None or embeds is None or torch.compiler.is_compiling():
        return False
    return types.ndim == 2 and types.shape[1] < embeds.shape[1] and not bool(types.any())


def is_deferred(call: LanguageCall, position_ids: Tensor | None) -> bool:
    """Return whether the language model computes the positions: while compiling, if nothing else needs them."""
    if not torch.compiler.is_compiling() or exporting():
        return False
    model = call.model
    ordinary = position_ids is None or (isinstance(position_ids, Tensor) and position_ids.ndim == 2)
    text = language_model_of(model)
    needed = family_of(model.config).masks or text.vispe_text.parallel is not None or model.training
    # errors for packed samples that cannot be isolated are raised before the model runs
    return ordinary and not needed and (position_ids is None or isolates(text))


def cache_class(text: type) -> type | None:
    """Return the class of the caches that a language model creates, with a state; None for unsupported classes."""
    from transformers import DynamicCache

    stock = getattr(sys.modules[text.__module__], "DynamicCache", None)
    return converted_subclass(DynamicCache, PositionedCache) if stock is DynamicCache else None


def open_cache(text: Any, kwargs: dict[str, Any]) -> Any:
    """Return the cache of a call; while compiling, create the one that the host would create, with a state."""
    cache, use_cache = cache_of(kwargs), kwargs.get("use_cache")
    if cache is not None or text.vispe_cache_class is None or not torch.compiler.is_compiling():
        return cache
    # a compiled program cannot change the class of the host's cache later
    if text.config.use_cache if use_cache is None else use_cache:
        name = next(name for name in CACHE_NAMES if name in kwargs)
        cache = kwargs[name] = text.vispe_cache_class(config=text.config)
    return cache


def store_state(text: Any, cache: Any, outputs: Any, positions: CallPositions) -> None:
    """Store the state after a call on its cache, or on the cache in its outputs, if the state has changed.

    Args:
        text: the language model.
        cache: KV cache of the call, or None.
        outputs: outputs of the model or its language model.
        positions: positions of the tokens of the call.
    """
    if cache is None and hasattr(outputs, "get"):
        cache = cache_of(outputs)
    elif cache is None and isinstance(outputs, tuple):
        cache = next((x for x in outputs if hasattr(x, "get_seq_length")), None)
    after = positions.after
    if text.vispe_text.caches_coordinates:
        before = None if positions.before is None else positions.before.ids
        after = replace(after, ids=positions.ids if before is None else torch.cat([before, positions.ids], 2))
        after = replace(after, rotated=not text.vispe_text.late_rotation)
        if positions.token_attributes is not None:
            past = None if positions.before is None else positions.before.token_attributes
            after = replace(after, token_attributes=append_attributes(past, positions.token_attributes))
    if cache is None or after is positions.before:
        return
    after.conversion = text.vispe_text.of_keys
    if after.settled is None:
        of_call = positions.token_index, positions.ids, text.vispe_scheme, positions.valid, positions.visual
        after.settled = settled_length(after, positions.before, cache, *of_call)
    set_state(cache, after)
