"""Families whose images are patches in a row: their positions, or the rows and columns of each image, are passed."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vispe.hosts.transformers.language.families.base import CallTokens, ImageBlocks, ImageRule, LanguageFamily
from vispe.multimodal import Image, Video


def _patch_positions(call: CallTokens) -> ImageBlocks:
    images, frames = (
        _pooled(call.config, call.arguments.get(f"{n}_position_ids")) for n in ("image", "video")
    )
    return ImageBlocks(call.types, [Image(h, w) for h, w in images], [Video(1, h, w) for h, w in frames])


def _pooled(config: Any, positions: Tensor | None) -> list[tuple[int, int]]:
    """Return rows and columns of the tokens of images, from the column and row of patches (n, patches, 2), or -1."""
    if positions is None:
        return []
    sizes = (positions.amax(1) + 1) // config.vision_config.pooling_kernel_size
    return [(int(h), int(w)) for w, h in sizes.tolist()]


def _model_patches(call: CallTokens) -> ImageBlocks:
    """Return the blocks of images and frames whose patches are tokens (Gemma 4 Unified)."""
    images, frames = (
        [] if ids is None else (ids.amax(1) + 1).tolist()
        for ids in (call.arguments.get(f"{n}_position_ids") for n in ("image", "video"))
    )
    return ImageBlocks(call.types, [Image(h, w) for w, h in images], [Video(1, h, w) for w, h in frames])


def _patches(call: CallTokens) -> ImageBlocks:
    config, arguments = call.config, call.arguments
    images, frames = (_merged(config, arguments.get(f"target_sizes{n}"), arguments) for n in ("", "_videos"))
    return ImageBlocks(call.types, [Image(h, w) for h, w in images], [Video(1, h, w) for h, w in frames])


def _merged(config: Any, patches: Any, arguments: dict[str, Any]) -> list[tuple[int, int]]:
    """Return rows and columns of the tokens of MiniCPM-V's images or frames, from those of patches (n, 2)."""
    mode = arguments.get("downsample_mode") or config.downsample_mode
    down, across = (n**config.merger_times * (1 if mode == "4x" else 2) for n in config.merge_kernel_size)
    return [] if patches is None else [(int(h) // down, int(w) // across) for h, w in patches]


def _spatial_shapes(call: CallTokens) -> ImageBlocks:
    shapes, factor = call.arguments.get("spatial_shapes"), int(call.config.downsample_factor)
    sizes = [] if shapes is None else shapes.tolist()
    return ImageBlocks(call.types, [Image(h // factor, w // factor) for h, w in sizes])


FRAMES = "frames with text timestamps"
PATCH_POSITIONS = ImageRule(
    _patch_positions,
    "positions of patches",
    FRAMES,
    {"image": "image_position_ids", "video": "video_position_ids"},
)
MODEL_PATCHES = ImageRule(
    _model_patches,
    "positions of patches",
    FRAMES,
    {"image": "image_position_ids", "video": "video_position_ids"},
)
PATCHES = ImageRule(
    _patches,
    "`target_sizes`; slices are images",
    FRAMES,
    {"image": "target_sizes", "video": "target_sizes_videos"},
)

SPATIAL_SHAPES = ImageRule(
    _spatial_shapes, "`spatial_shapes`; tiles are images", needed={"image": "spatial_shapes"}
)

PATCH_FAMILIES: dict[str, LanguageFamily] = {
    "gemma4": LanguageFamily(PATCH_POSITIONS, masks=True),
    "gemma4_unified": LanguageFamily(MODEL_PATCHES, masks=True),
    "lfm2_vl": LanguageFamily(SPATIAL_SHAPES),
    "minicpm_ocr": LanguageFamily(PATCHES),
    "minicpmv4_6": LanguageFamily(PATCHES),
}
