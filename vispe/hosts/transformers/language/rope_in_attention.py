"""Rotation inside the attention of a language model: the cache then holds keys as they are, without positions.

It serves schemes with an axis for each head, and caches whose tokens may get other positions later (`reposition`).
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from vispe.attention.transform.abstract_transform import Layout
from vispe.attention.transform.pairs import PairRotation
from vispe.errors import ShapeError, UnsupportedHost
from vispe.hosts.transformers.language.kv_cache import SequenceState
from vispe.hosts.transformers.language.pairwise_scores import Apart, attend_apart
from vispe.multimodal import Coordinates

PREFIX = "vispe_"
BASES = ("sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3")
MASKED = ("sdpa", "eager")  # what takes a dense mask
LATE = "vispe_late"  # the keyword that carries the tables of queries and keys to the attention


class LateRotation(NamedTuple):
    """Tables of queries and of all keys up to them; a tuple, so that hooks move it to the device of a layer.

    Attributes:
        query: cosines and sines (b, h_kv or 1, s, pairs).
        key: cosines and sines (b, h_kv or 1, m, pairs).
        mask: which keys a query may attend to (b, 1, s, m) bool, in place of the host's mask; or None.
        apart: what logits are made of, in place of one rotation; or None.
        layout: which channels are pairs.
    """

    query: tuple[Tensor, Tensor]
    key: tuple[Tensor, Tensor]
    mask: Tensor | None = None
    apart: Apart | None = None
    layout: Layout = "half"


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *, base: str, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Turn queries and keys, then attend as `base` does; the signature is that of transformers' attention interface."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    late: LateRotation | None = kwargs.pop(LATE, None)
    if late is not None:
        if late.apart is not None:
            mask = attention_mask if late.mask is None else late.mask
            scale = kwargs.get("scaling")
            return attend_apart(module, late.apart, query, key, value, mask, scale), None
        if late.mask is not None:
            key, value = (x[:, :, : late.mask.shape[3]] for x in (key, value))
            least = torch.finfo(query.dtype).min
            attention_mask = torch.zeros_like(late.mask, dtype=query.dtype).masked_fill(~late.mask, least)
        room = key.shape[2] - late.key[0].shape[2]  # of a cache with fixed size
        query = PairRotation(*late.query, late.layout).query(query)
        cos, sin = (pad(t, (0, 0, 0, room)) if room else t for t in late.key)
        key = PairRotation(cos, sin, late.layout).key(key)
    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    function = ALL_ATTENTION_FUNCTIONS.get_interface(base, own)
    return function(module, query, key, value, attention_mask, **kwargs)


def switch_on(text: Any) -> None:
    """Make a language model turn queries and keys inside its attention.

    Raises:
        UnsupportedHost: its attention is of another kind, or keeps a window of keys only.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    check(text)
    base = str(text.config._attn_implementation).removeprefix(PREFIX)
    name = PREFIX + base
    AttentionInterface.register(name, partial(attend, base=base))
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[base])
    text.config._attn_implementation = name


def check_apart(text: Any, what: str) -> None:
    """Raise `UnsupportedHost` unless the attention of a language model takes any mask and any logits."""
    base = str(text.config._attn_implementation).removeprefix(PREFIX)
    if base not in MASKED:
        raise UnsupportedHost(
            f"{what} needs an attention that takes a mask of blocks, {' or '.join(MASKED)}; the model uses {base!r}. "
            "Call model.set_attn_implementation('sdpa') first."
        )


def keep_on(text: Any) -> None:
    """Go on turning inside the attention where the model has been given another implementation since.

    Raises:
        UnsupportedHost: that implementation is of another kind.
    """
    if not str(text.config._attn_implementation).startswith(PREFIX):
        switch_on(text)
    if text.vispe_beside is not None or text.vispe_extend is not None:
        check_apart(text, "parallel" if text.vispe_extend is None else "self_extend")


def check(text: Any) -> None:
    """Raise `UnsupportedHost` unless `switch_on` can do its work."""
    base = str(text.config._attn_implementation).removeprefix(PREFIX)
    if base not in BASES:
        raise UnsupportedHost(
            f"Rotation inside the attention goes with {', '.join(BASES)}; the model uses {base!r}."
        )
    if "sliding_attention" in (getattr(text.config, "layer_types", None) or ()):
        raise UnsupportedHost(
            "Rotation inside the attention needs all keys, but layers of this model keep a sliding window."
        )
    if getattr(text.config, "qk_rope_head_dim", None):
        raise UnsupportedHost(
            "Rotation inside the attention needs heads that begin with the channels that turn; here these come last, "
            "and the cache holds them apart (multi-head latent attention)."
        )


def switch_off(text: Any) -> None:
    """Give a language model its own attention back."""
    text.config._attn_implementation = str(text.config._attn_implementation).removeprefix(PREFIX)


def reposition(cache: Any, coordinates: Coordinates) -> None:
    """Give the tokens in a cache other positions, without computing them again.

    For dropped frames, another stride, or a sequence that moves to the start of a longer one; the cache must have been
    filled by a model converted with ``late_rotation=True``.

    Args:
        cache: of the model.
        coordinates: of the tokens in the cache, ids (axes, b, tokens); decoding goes on from its `next`.

    Raises:
        UnsupportedHost: the cache holds keys that are turned already.
        ShapeError: there are more or fewer tokens, rows or axes.
    """
    state: SequenceState | None = getattr(cache, "vispe_state", None)
    if state is None or state.ids is None:
        raise UnsupportedHost(
            "The keys of this cache are turned already; convert the model with late_rotation=True and fill it again."
        )
    if coordinates.ids.shape != state.ids.shape:
        raise ShapeError(
            f"The cache holds coordinates (axes, rows, tokens) {tuple(state.ids.shape)}, got "
            f"{tuple(coordinates.ids.shape)}."
        )
    seen = coordinates.mask.sum(1)
    ids = coordinates.ids.to(state.ids)
    offset = coordinates.next.to(state.offset) - coordinates.scheme.step * seen.to(state.offset)
    padding = torch.as_tensor(state.ids.shape[2], device=ids.device) - seen.to(ids.device)
    if state.marks is not None:
        raise UnsupportedHost("Tokens that stand side by side cannot be moved; fill the cache again.")
    cache.vispe_state = SequenceState(offset, padding, ids)
