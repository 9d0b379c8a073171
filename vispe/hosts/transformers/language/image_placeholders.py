"""Image placeholders of a call: token types, and the stream of text, images and videos."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vispe.errors import InputError
from vispe.hosts.transformers.language.families import family_of
from vispe.hosts.transformers.language.families.base import CallTokens
from vispe.multimodal import Stream
from vispe.multimodal.streams.segments import IMAGE, VIDEO


def token_types(
    config: Any, input_ids: Tensor | None, types: Tensor | None, shape: tuple[int, int]
) -> Tensor | None:
    """Return the type of every token (b, s), 0 text, 1 image, 2 video; None if it is unknown."""
    if input_ids is None:  # Molmo's types include the markers around images
        return None if family_of(config).images.marked else types
    if tuple(input_ids.shape) != shape:
        raise InputError(
            f"input_ids must have the shape {shape} of the tokens, got {tuple(input_ids.shape)}."
        )
    types = torch.zeros_like(input_ids)
    for kind, token in _placeholders(config):
        types = types.masked_fill(input_ids == token, kind)
    if family_of(config).framed:
        start, end = (
            (input_ids == getattr(config, f"video_{n}_token_id")).cumsum(1) for n in ("start", "end")
        )
        types = types.masked_fill((types == IMAGE) & (start > end), VIDEO)
    return types


def types_by_embedding(model: Any, embeds: Tensor) -> Tensor:
    """Return the type of every token (b, s), by comparison of embeddings (b, s, width) with those of placeholders."""
    types = torch.zeros(embeds.shape[:2], dtype=torch.long, device=embeds.device)
    with torch.no_grad():
        for kind, token in _placeholders(model.config):
            placeholder = model.get_input_embeddings()(torch.tensor(token, device=embeds.device))
            types = types.masked_fill((embeds == placeholder.to(embeds.device)).all(-1), kind)
    return types


def _placeholders(config: Any) -> list[tuple[int, int]]:
    """Return (type, token id) of the placeholders of images and videos."""
    named = ((IMAGE, "image_token_id"), (VIDEO, "video_token_id"))
    return [(kind, token) for kind, name in named if (token := getattr(config, name, None)) is not None]


def stream_of(
    model: Any, types: Tensor, mask: Tensor, documents: Tensor, arguments: dict[str, Any], **options: Any
) -> Stream:
    """Return the stream of a call; `arguments` are the keyword arguments of the model, `options` those of the stream.

    Raises:
        InputError: placeholders and sizes of images differ, or sizes are missing.
    """
    config = model.config
    family = family_of(config)
    if arguments.get("tile_grids") is not None and not family.images.tiles:
        raise InputError(
            f"tile_grids is not supported by {config.model_type}, where tiles are determined from other arguments. "
            "Omit it."
        )
    _check_encoded(config, arguments)
    blocks = family.images.blocks(CallTokens(model, types, mask, documents, arguments))
    common = {
        "mask": mask,
        "documents": documents,
        "separate_frames": family.separate_frames,
        **blocks.options,
    }
    return Stream.from_ids(*blocks[:3], **common, **options)


def _check_encoded(config: Any, arguments: dict[str, Any]) -> None:
    """Raise `InputError` if images or videos are encoded before the call, and their sizes are not passed."""
    encoded = arguments.get("mm_encoder_outputs") or {}
    rule = family_of(config).images
    for kind, name in ({} if rule.fixed(config) else rule.needed).items():
        if encoded.get(kind) is None or arguments.get(name) is not None:
            continue
        instead = f"{name} in place of mm_encoder_outputs" if name.startswith("pixel_values") else name
        raise InputError(
            f"mm_encoder_outputs needs {name}, the sizes of {kind}s, got None. If generate() called the model, only "
            "the model inside was converted: call vispe.convert with the complete model, head included. Otherwise pass "
            f"{instead}."
        )
