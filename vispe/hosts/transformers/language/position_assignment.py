"""Where the tokens of a call get their coordinates, and what is kept of them.

That is before the model runs. In compiled programs it is where the language model starts, so that its graph computes
them: a graph of their own would be one piece more than the stock model has.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vispe.attention.precision import exporting
from vispe.hosts.transformers.language.call import (
    OFFSET,
    PIXELS,
    SPAN,
    TABLE,
    Call,
    Placed,
    given,
    keys_of,
    place,
)
from vispe.hosts.transformers.language.families import family_of, text_of
from vispe.hosts.transformers.language.kv_cache import (
    NextTokens,
    PositionedCache,
    SequenceState,
    remember,
    settled,
)
from vispe.hosts.transformers.language.parallel_sets import IDS, MARKS, joined
from vispe.hosts.transformers.packed_samples import isolates
from vispe.hosts.transformers.subclasses import positioned
from vispe.hosts.transformers.version import CACHE_NAMES, cache_of
from vispe.multimodal import Scheme

STEPS = 32  # tokens whose rotation is computed at once while single tokens are decoded
READ = ("input_ids", "inputs_embeds", "mm_token_type_ids", "attention_mask")
OWN = (TABLE, SPAN, OFFSET, MARKS, "tile_grids", IDS)  # keywords that the model of before does not take


@dataclass(eq=False)
class Waiting:
    """A call that the language model is to place, given to it as its position ids.

    Attributes:
        call: what is to be placed.
        position_ids: that the caller gave, or None.
        tried: whether the language model was reached.
    """

    call: Call
    position_ids: Tensor | None
    tried: bool = False

    def place(self) -> Placed:
        """Return where the tokens of the call are; raises as `place` does."""
        self.tried = True
        return place(self.call, self.position_ids)


@dataclass(eq=False)
class Step:
    """A call of one text token in each row after a cache, given to the language model as its position ids.

    Attributes:
        keys: (b, 1).
        offset: of the text, (b) or (b, k): that of the state, or of the prompt that `generate` handed on.
        length: how many tokens the cache has.
        state: of the cache.
        scheme: of the model.
    """

    keys: Tensor
    offset: Tensor
    length: int
    state: SequenceState
    scheme: Scheme

    def upcoming(self) -> NextTokens | None:
        """Return the rotation of this token and those after it where it was computed before, else None."""
        known = self.state.upcoming
        if known is None or known.scheme is not self.scheme:
            return None
        at = self.length - known.length
        fits = 0 <= at < known.keys.shape[1] and torch.equal(self.keys, known.keys[:, at : at + 1])
        same = self.offset is known.offset or torch.equal(self.offset, known.offset)
        return known if fits and same else None


def step_of(call: Call, position_ids: Tensor | None) -> Step | None:
    """Return a call of one text token after a cache, whose rotation needs no more than a look-up; None for others."""
    if torch.compiler.is_compiling() or exporting() or text_of(call.model).vispe_late:
        return None
    state: SequenceState | None = getattr(call.cache, "vispe_state", None)
    if (
        state is None
        or call.input_ids is None
        or call.input_ids.shape[1] != 1
        or state.packed
        or state.prefix
    ):
        return None
    shape = tuple(call.input_ids.shape)  # any other is checked where all calls are
    ordinary = position_ids is None or (
        isinstance(position_ids, Tensor)
        and tuple(position_ids.shape) == shape
        and position_ids.dtype == torch.long
    )
    if not ordinary or state.settled is None or given(call.kwargs, *PIXELS, IDS):
        return None
    length = call.cache.get_seq_length()
    if isinstance(length, Tensor) and length.device.type != "cpu":
        return None  # reading it would wait for the device
    keys, _ = keys_of(call, call.input_ids, position_ids, state, False)
    offset = call.kwargs.get(OFFSET)
    step = Step(keys, state.offset if offset is None else offset, int(length), state, call.model.vispe_scheme)
    if step.upcoming() is None:
        span = call.kwargs.get(SPAN)
        behind = span is None or bool((keys >= span.sum(1, keepdim=True)).all())
        if not behind or step.length < int(state.settled):
            return None
        state.upcoming = None
    return step


def call_of(model: Any, named: dict[str, Any]) -> Call:
    """Return the call of a model with these arguments, by name."""
    ids, embeds, types, mask = (named.get(name) for name in READ)
    masked = mask is not None
    if ids is None and _types_of_text_only(types, embeds):
        types = None
    mask = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
    others = {
        n: v for n, v in named.items() if n not in READ and n not in CACHE_NAMES and n != "position_ids"
    }
    return Call(model, ids, embeds, types, mask, cache_of(named), others, masked=masked)


def _types_of_text_only(types: Tensor | None, embeds: Tensor | None) -> bool:
    """Whether types of text came for a part of the embeddings: prompt tuning puts virtual tokens before the others."""
    if types is None or embeds is None or torch.compiler.is_compiling():
        return False
    return types.ndim == 2 and types.shape[1] < embeds.shape[1] and not bool(types.any())


def waits(call: Call, position_ids: Tensor | None) -> bool:
    """Whether the language model is to place a call: while compiling, where nothing before needs to know of places."""
    if not torch.compiler.is_compiling() or exporting():
        return False
    model = call.model
    ordinary = position_ids is None or (isinstance(position_ids, Tensor) and position_ids.ndim == 2)
    text = text_of(model)
    before = family_of(model.config).masks or text.vispe_beside is not None or model.training
    # whether packed samples can be isolated is known before the model runs only
    return ordinary and not before and (position_ids is None or isolates(text))


def kept_class(text: type) -> type | None:
    """Return the class of the caches that a language model opens, with where its rows stand; None for other kinds."""
    from transformers import DynamicCache

    opened = getattr(sys.modules[text.__module__], "DynamicCache", None)
    return positioned(DynamicCache, PositionedCache) if opened is DynamicCache else None


def open_cache(text: Any, kwargs: dict[str, Any]) -> Any:
    """Return the cache of a call; while compiling, one of its own where the host would make it: classes stay there."""
    cache, asked = cache_of(kwargs), kwargs.get("use_cache")
    if cache is not None or text.vispe_kept is None or not torch.compiler.is_compiling():
        return cache
    if text.config.use_cache if asked is None else asked:
        name = next(name for name in CACHE_NAMES if name in kwargs)
        cache = kwargs[name] = text.vispe_kept(config=text.config)
    return cache


def keep(text: Any, cache: Any, outputs: Any, placed: Placed) -> None:
    """Put where the sequences stand onto the cache of a call, or the one that came out, where it has changed.

    Args:
        text: the language model.
        cache: of the call, or None.
        outputs: of the model or its language model.
        placed: where the tokens of the call are.
    """
    if cache is None and hasattr(outputs, "get"):
        cache = cache_of(outputs)
    elif cache is None and isinstance(outputs, tuple):
        cache = next((x for x in outputs if hasattr(x, "get_seq_length")), None)
    after = placed.after
    if text.vispe_late:
        before = None if placed.before is None else placed.before.ids
        after = replace(after, ids=placed.ids if before is None else torch.cat([before, placed.ids], 2))
        if placed.marks is not None:
            past = None if placed.before is None else placed.before.marks
            after = replace(after, marks=joined(past, placed.marks))
    if cache is None or after is placed.before:
        return
    if after.settled is None:
        after.settled = settled(after, cache, placed.keys, placed.ids, text.vispe_scheme)
    remember(cache, after)
