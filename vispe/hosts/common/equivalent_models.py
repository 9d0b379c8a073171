"""Equivalent timm models for architectures of other libraries that vispe does not convert."""

from __future__ import annotations

import timm
from torch import nn

_SIZES = {192: "tiny", 384: "small", 768: "base", 1024: "large", 1280: "huge", 1536: "giant"}

# prefix of the class name: name pattern of the timm model, and the default if no such model exists
TRANSFORMERS: dict[str, tuple[str, str]] = {
    "Aimv2": ("aimv2_{size}_patch14_224", "aimv2_large_patch14_224"),
    "Blip": ("vit_{size}_patch16_224", "vit_base_patch16_224"),
    "CLIPSeg": ("vit_{size}_patch16_clip_224", "vit_base_patch16_clip_224"),
    "ChineseCLIP": ("vit_{size}_patch16_clip_224", "vit_base_patch16_clip_224"),
    "DPT": ("vit_{size}_patch16_384", "vit_base_patch16_384"),
    "Data2VecVision": ("vit_{size}_patch16_224", "vit_base_patch16_224"),
    "DepthAnything": ("vit_{size}_patch14_dinov2", "vit_small_patch14_dinov2"),
    "EdgeTam": ("samvit_{size}_patch16", "samvit_base_patch16"),
    "Hiera": ("vit_{size}_patch16_224", "vit_base_patch16_224"),
    "Owl": ("vit_{size}_patch16_clip_224", "vit_base_patch32_clip_224"),
    "Sam2": ("samvit_{size}_patch16", "samvit_base_patch16"),  # its encoder is Hiera
    "VitPose": ("vit_{size}_patch16_224", "vit_base_patch16_224"),
    "Yolos": ("deit_{size}_patch16_224", "deit_small_patch16_224"),
}
ELSEWHERE: dict[str, tuple[str, str]] = {
    "DinoVisionTransformer": ("vit_{size}_patch14_dinov2", "vit_base_patch14_dinov2"),
    "ImageEncoderViT": ("samvit_{size}_patch16", "samvit_base_patch16"),  # of segment-anything
    "MaskedAutoencoderViT": ("vit_{size}_patch16_224", "vit_base_patch16_224"),
}


def equivalent_model(model: nn.Module) -> str | None:
    """Return the name of the timm model with the architecture of `model`; None if there is none."""
    cls = type(model)
    library = cls.__module__.partition(".")[0]
    if library == "transformers":
        prefixes = [prefix for prefix in TRANSFORMERS if cls.__name__.startswith(prefix)]
        return _sized(TRANSFORMERS[max(prefixes, key=len)], _width(model)) if prefixes else None
    if library != "timm" and cls.__name__ in ELSEWHERE:
        return _sized(ELSEWHERE[cls.__name__], _width(model))
    return None


def advice(model: nn.Module) -> str | None:
    """Return a sentence that names the equivalent timm model; None if there is none."""
    name = equivalent_model(model)
    if name is None:
        return None
    return (
        f"timm has this architecture, or the nearest one, with support for encodings: "
        f"timm.create_model({name!r}, pos_embed='alibi2d')."
    )


def _width(model: nn.Module) -> int | None:
    """Return the width of the tokens from the model or its configuration; None if neither names it."""
    config = getattr(model, "config", None)
    config = getattr(config, "vision_config", config)
    for holder, name in ((config, "hidden_size"), (model, "embed_dim")):
        if isinstance(width := getattr(holder, name, None), int):
            return width
    return None


def _sized(names: tuple[str, str], width: int | None) -> str:
    pattern, default = names
    name = pattern.format(size=_SIZES.get(width or 0, ""))
    return name if timm.is_model(name) else default
