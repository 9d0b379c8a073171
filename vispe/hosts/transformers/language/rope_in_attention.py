"""Rotation of queries and keys inside the attention of a language model, with unrotated keys in the KV cache.

It is needed for schemes with an axis per head, and for caches whose tokens get new positions later
(`reposition`).
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
from vispe.hosts.transformers.language.pairwise_scores import PairwiseLogits, attend_pairwise
from vispe.hosts.transformers.language.positions.kv_cache import settled_length
from vispe.hosts.transformers.language.positions.sequence_state import SequenceState
from vispe.hosts.transformers.language.positions.token_index import prompt_token_index
from vispe.multimodal import Coordinates

PREFIX = "vispe_"
BASES = ("sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3")
MASKED = ("sdpa", "eager")  # attention implementations that accept a dense mask
LATE = "vispe_late_rotation"  # keyword that passes the tables of queries and keys to the attention


class LateRotation(NamedTuple):
    """Tables of queries and of all keys so far; a tuple, so that hooks move it to the device of a layer.

    Attributes:
        query: cosines and sines (b, h_kv or 1, s, pairs).
        key: cosines and sines (b, h_kv or 1, m, pairs).
        mask: keys that each query attends to (b, 1, s, m) bool, replacing the host's mask; or None.
        pairwise: arguments of pairwise logits, replacing the rotation; or None.
        layout: which channels form a pair.
    """

    query: tuple[Tensor, Tensor]
    key: tuple[Tensor, Tensor]
    mask: Tensor | None = None
    pairwise: PairwiseLogits | None = None
    layout: Layout = "half"


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *, base: str, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Rotate queries and keys, then call the implementation `base`; the signature is transformers' interface."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    late: LateRotation | None = kwargs.pop(LATE, None)
    if late is not None:
        if late.pairwise is not None:
            mask = attention_mask if late.mask is None else late.mask
            scale = kwargs.get("scaling")
            return attend_pairwise(module, late.pairwise, query, key, value, mask, scale), None
        if late.mask is not None:
            key, value = (x[:, :, : late.mask.shape[3]] for x in (key, value))
            lowest = torch.finfo(query.dtype).min
            attention_mask = torch.zeros_like(late.mask, dtype=query.dtype).masked_fill(~late.mask, lowest)
        unused = key.shape[2] - late.key[0].shape[2]  # in a static cache
        query = PairRotation(*late.query, late.layout).query(query)
        cos, sin = (pad(t, (0, 0, 0, unused)) if unused else t for t in late.key)
        key = PairRotation(cos, sin, late.layout).key(key)
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    function = ALL_ATTENTION_FUNCTIONS.get_interface(base, eager)
    return function(module, query, key, value, attention_mask, **kwargs)


def enable_late_rotation(text: Any) -> None:
    """Select an attention implementation that rotates queries and keys inside the attention.

    Raises:
        UnsupportedHost: the attention implementation is not supported, or the cache contains a window of keys only.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    check_late_rotation(text)
    base = str(text.config._attn_implementation).removeprefix(PREFIX)
    name = PREFIX + base
    AttentionInterface.register(name, partial(attend, base=base))
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[base])
    text.config._attn_implementation = name


def check_pairwise(text: Any, what: str) -> None:
    """Raise `UnsupportedHost` unless the attention of a language model supports dense masks and pairwise logits."""
    base = str(text.config._attn_implementation).removeprefix(PREFIX)
    if base not in MASKED:
        raise UnsupportedHost(
            f"{what} needs the attention implementation {' or '.join(MASKED)}, with dense masks, got {base!r}. Call "
            "model.set_attn_implementation('sdpa') first."
        )


def ensure_late_rotation(text: Any) -> None:
    """Enable late rotation again if the attention implementation was changed after the conversion.

    Raises:
        UnsupportedHost: the new implementation is not supported.
    """
    if not str(text.config._attn_implementation).startswith(PREFIX):
        enable_late_rotation(text)
    if text.vispe_text.parallel is not None or text.vispe_text.self_extend is not None:
        check_pairwise(text, "parallel" if text.vispe_text.self_extend is None else "self_extend")


def check_late_rotation(text: Any) -> None:
    """Raise `UnsupportedHost` unless a language model supports late rotation."""
    base = str(text.config._attn_implementation).removeprefix(PREFIX)
    if base not in BASES:
        raise UnsupportedHost(
            f"late_rotation supports the attention implementations {', '.join(BASES)}, got {base!r}. Call "
            "model.set_attn_implementation('sdpa') first."
        )
    if any("sliding" in kind for kind in getattr(text.config, "layer_types", None) or ()):
        raise UnsupportedHost(
            "late_rotation needs all keys in the cache, got a model with sliding windows. Use late_rotation=False."
        )
    # layers with linear attention have no self_attn
    if any(hasattr(getattr(layer, "self_attn", None), "query_layernorm") for layer in text.layers):
        raise UnsupportedHost(
            "late_rotation needs queries and keys that are normalised before their rotation, got "
            f"{type(text).__name__}, which normalises them after it. Use late_rotation=False."
        )
    if any(getattr(getattr(layer, "self_attn", None), "indexer", None) is not None for layer in text.layers):
        raise UnsupportedHost(
            f"late_rotation needs attention over all keys, got {type(text).__name__}, whose indexers select keys by "
            "rotated keys of their own. Use late_rotation=False."
        )
    if getattr(text.config, "qk_rope_head_dim", None):
        raise UnsupportedHost(
            "late_rotation needs heads whose first channels are rotated, got multi-head latent attention, where the "
            "rotated channels are last and cached separately. Use late_rotation=False."
        )


def disable_late_rotation(text: Any) -> None:
    """Restore the original attention implementation of a language model."""
    text.config._attn_implementation = str(text.config._attn_implementation).removeprefix(PREFIX)


def reposition(cache: Any, coordinates: Coordinates) -> None:
    """Change the positions of cached tokens, without computing their keys again.

    Use it after dropping frames, for another stride, or if a sequence becomes the start of a longer sequence.
    The cache must have been filled by a model converted with ``late_rotation=True``.

    Args:
        cache: KV cache of the model.
        coordinates: new coordinates of the cached tokens, ids (axes, b, tokens); decoding continues from its `next`.

    Raises:
        UnsupportedHost: the keys in the cache are already rotated, or belong to parallel sets.
        ShapeError: the number of tokens, rows or axes differs.
    """
    state: SequenceState | None = getattr(cache, "vispe_state", None)
    if state is None or state.ids is None or state.rotated:
        raise UnsupportedHost(
            "reposition: the keys in the cache are already rotated. Convert the model with late_rotation=True and fill "
            "the cache again."
        )
    if coordinates.ids.shape != state.ids.shape:
        raise ShapeError(
            f"reposition: coordinates must have the shape (axes, rows, tokens) of the cache, "
            f"{tuple(state.ids.shape)}, got {tuple(coordinates.ids.shape)}."
        )
    ids, mask = coordinates.ids.to(state.ids), coordinates.mask.to(state.ids.device)
    offset = coordinates.scheme.counter_after(coordinates.next.to(state.offset), -mask.sum(1))
    if state.token_attributes is not None:
        raise UnsupportedHost("reposition: tokens of parallel sets cannot be moved. Fill the cache again.")
    conversion = None if state.conversion is None else (None, *state.conversion[1:])
    padded = ((0, ~mask),)
    after = SequenceState(
        offset, (~mask).sum(1), ids, packed=state.packed, conversion=conversion, padded=padded
    )
    index = prompt_token_index(ids.shape[2], len(mask), mask, ids.device)
    after.settled = settled_length(after, None, cache, index, ids, coordinates.scheme, mask)
    # coordinates do not state which tokens are images, but these are still the same tokens
    after.settled = max(int(after.settled), int(state.settled or 0))
    cache.vispe_state = after
