"""Models of other libraries that vispe does not convert, and which model of timm takes their place."""

from __future__ import annotations

import timm
from torch import nn

_SIZES = {192: "tiny", 384: "small", 768: "base", 1024: "large", 1280: "huge", 1536: "giant"}

# start of the class name: timm's name, with the size where timm has several, and what it is when there is none
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
    "Sam2": ("samvit_{size}_patch16", "samvit_base_patch16"),  # whose encoder is Hiera
    "VitPose": ("vit_{size}_patch16_224", "vit_base_patch16_224"),
    "Yolos": ("deit_{size}_patch16_224", "deit_small_patch16_224"),
}
ELSEWHERE: dict[str, tuple[str, str]] = {
    "DinoVisionTransformer": ("vit_{size}_patch14_dinov2", "vit_base_patch14_dinov2"),
    "ImageEncoderViT": ("samvit_{size}_patch16", "samvit_base_patch16"),  # of segment-anything
    "MaskedAutoencoderViT": ("vit_{size}_patch16_224", "vit_base_patch16_224"),
}


def twin_of(model: nn.Module) -> str | None:
    """Return the name of timm's model with the architecture of `model`, or None where none is known."""
    cls = type(model)
    library = cls.__module__.partition(".")[0]
    if library == "transformers":
        starts = [start for start in TRANSFORMERS if cls.__name__.startswith(start)]
        return _sized(TRANSFORMERS[max(starts, key=len)], _width(model)) if starts else None
    if library != "timm" and cls.__name__ in ELSEWHERE:
        return _sized(ELSEWHERE[cls.__name__], _width(model))
    return None


def advice(model: nn.Module) -> str | None:
    """Return the sentence that names the twin of a model, or None."""
    twin = twin_of(model)
    if twin is None:
        return None
    return (
        f"timm has this architecture, or the nearest one, in a form that takes an encoding: "
        f"timm.create_model({twin!r}, pos_embed='alibi2d')."
    )


def _width(model: nn.Module) -> int | None:
    """Return the width of the tokens, where the model or its configuration says it."""
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
