"""Names on which vispe relies in the classes of one model of transformers: its language model or its vision tower."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from vispe.hosts.contracts.contract import Contract, method_contract
from vispe.hosts.contracts.transformers import CACHE

# kind of a vision tower (`SWAPS`): keywords that its blocks pass to attention
_PASSED = {
    "packed": "cu_seqlens position_embeddings",
    "jepa": "position_mask",
    "clip": "attention_mask",
    "intern": "attention_mask",
    "patches": "attention_mask",
    "plain": "attention_mask",
    "sapiens": "attention_mask position_embeddings",
}
# kind of a vision tower: the first arguments of its forward pass
_INPUTS = {
    "packed": "hidden_states grid_thw",
    "patches": "pixel_values pixel_attention_mask spatial_shapes",
    "jepa": "pixel_values_videos",
    "masked": "pixel_values noise",
    "film": "pixel_values bool_masked_pos",
}


def language_contracts(model: Any, text: Any) -> Iterator[Contract]:
    """Yield the contracts of the classes of a vision-language model.

    Args:
        model: the model inside, without its head.
        text: its language model.
    """
    for part in (model, text):
        yield from method_contract(
            type(part),
            "forward",
            "coordinates can be passed as position_ids",
            keywords=f"input_ids attention_mask position_ids inputs_embeds {CACHE} **",
        )
    rotated = f"position_embeddings attention_mask {CACHE} **"
    for layer in {type(layer): layer for layer in getattr(text, "layers", ())}.values():
        yield from method_contract(
            type(layer), "forward", "the language model passes rotations to layers", keywords=rotated
        )
        if (attention := getattr(layer, "self_attn", None)) is not None:
            yield from method_contract(
                type(attention), "forward", "layers pass rotations to attention", keywords=rotated
            )
    if (rotary := getattr(text, "rotary_emb", None)) is not None:
        yield from method_contract(
            type(rotary), "forward", "it returns cosines and sines", positional="x position_ids"
        )


def vision_contracts(tower: Any, family: Any, attention: type) -> Iterator[Contract]:
    """Yield the contracts of the classes of a vision tower.

    Args:
        tower: the tower.
        family: its `VisionFamily`.
        attention: class of its attention layers.
    """
    kind, rotated = family.kind, family.kind == "grid" and family.rope
    passed = _PASSED.get(kind, "")
    if kind in ("grid", "masked") and "attention_mask" in inspect.signature(type(tower).forward).parameters:
        passed = "attention_mask"  # older versions of some models accept none
    passed += " position_embeddings" if rotated else ""
    yield from method_contract(
        attention,
        "forward",
        "blocks pass these arguments to attention",
        keywords=passed,
        positional="hidden_states",
    )
    yield from method_contract(
        type(tower),
        "forward",
        "further keywords are passed on to attention",
        keywords="**",
        positional=_INPUTS.get(kind, "pixel_values"),
    )
    purpose = "it rotates queries and keys"
    if kind == "packed":
        yield Contract(f"{family.path}:apply_rotary_pos_emb_vision", purpose, positional="q k cos sin")
    if rotated:
        yield Contract(f"{family.path}:apply_rotary_pos_emb", purpose, keywords="cos sin", positional="q k")
