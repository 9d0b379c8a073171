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
from vispe.hosts.transformers.classes import positioned
from vispe.hosts.transformers.language.beside import IDS, MARKS, joined
from vispe.hosts.transformers.language.call import OFFSET, SPAN, TABLE, Call, Placed, place
from vispe.hosts.transformers.language.families import family_of, text_of
from vispe.hosts.transformers.language.state import PositionedCache, remember, settled
from vispe.hosts.transformers.packed import isolates
from vispe.hosts.transformers.version import CACHE_NAMES, cache_of

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


def call_of(model: Any, given: dict[str, Any]) -> Call:
    """Return the call of a model with these arguments, by name."""
    ids, embeds, types, mask = (given.get(name) for name in READ)
    masked = mask is not None
    if ids is None and _types_of_text_only(types, embeds):
        types = None
    mask = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
    others = {
        n: v for n, v in given.items() if n not in READ and n not in CACHE_NAMES and n != "position_ids"
    }
    return Call(model, ids, embeds, types, mask, cache_of(given), others, masked=masked)


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
