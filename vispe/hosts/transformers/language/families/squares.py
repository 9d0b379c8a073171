"""Families whose images, or tiles of images, are squares: of the configured size, or by the number of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vispe.errors import InputError
from vispe.hosts.transformers.language.families.base import CallTokens, ImageBlocks, ImageRule, LanguageFamily
from vispe.multimodal import Image, Video
from vispe.multimodal.streams.segments import IMAGE


def squares(call: CallTokens) -> ImageBlocks:
    """Return the blocks of images that are squares of the configured size, or have tiles of this size.

    Raises:
        InputError: images are not squares.
    """
    side, tiles = _side(call.model, call.arguments), call.arguments.get("tile_grids")
    if tiles is not None:
        return ImageBlocks(call.types, [_tiled(side, int(r), int(c)) for r, c in tiles])
    return ImageBlocks(call.types, square_grids(side, math.ceil(count_of(call) / side**2)))


def count_of(call: CallTokens) -> int:
    """Return the number of image placeholders."""
    return int((call.types[call.mask] == IMAGE).sum())


def square_grids(side: int, number: int) -> Tensor:
    """Return the grids (number, 3) of images of side x side tokens."""
    return torch.tensor([[1, side, side]] * number, dtype=torch.long).reshape(-1, 3)


def of_side(side_of: Callable[[Any], int]) -> Callable[[CallTokens], ImageBlocks]:
    """Return the function for images, or tiles, of equal squares, whose side is determined by the configuration."""

    def blocks(call: CallTokens) -> ImageBlocks:
        side = side_of(call.config)
        return _equal(call, side**2)

    return blocks


def _counted(call: CallTokens) -> ImageBlocks:
    """Return the blocks of square tiles of equal size, from the number of tokens and tiles."""
    tokens, pixels = count_of(call), call.arguments.get("pixel_values")
    if pixels is None and tokens:
        raise InputError(
            f"The number of tiles of {tokens} image placeholders is unknown, got no pixel_values. Pass pixel_values, "
            "or coordinates as position_ids."
        )
    return _equal(call, tokens / max(1, 0 if pixels is None else len(pixels)))


def _equal(call: CallTokens, tile: float) -> ImageBlocks:
    """Return the blocks of square tiles of `tile` tokens.

    Raises:
        InputError: the number of tokens is not that of equal squares.
    """
    tokens, side = count_of(call), math.isqrt(int(tile))
    if side**2 != tile or tokens % max(1, int(tile)):
        raise InputError(
            f"The image placeholders must form equal squares, one per tile, got {tokens} placeholders. Pass as many as "
            "the model's processor."
        )
    return ImageBlocks(call.types, square_grids(side, tokens // max(1, side**2)))


def _tiled(side: int, rows: int, cols: int) -> Image:
    """Return a tiled image, with a thumbnail after the tiles unless there is only one."""
    return Image(side, side) if rows * cols == 1 else Image(side, side, tiles=(rows, cols), thumbnail="last")


def _side(model: Any, arguments: dict[str, Any]) -> int:
    """Return the number of tokens along each axis of an image or a tile."""
    config = model.config.vision_config
    tower = getattr(model, "vision_tower", None)
    if hasattr(tower, "timm_model"):
        patch: Any = tower.timm_model.patch_embed.patch_size
        size: Any = tower.timm_model.patch_embed.img_size
    else:
        patch, size = config.patch_size, config.image_size
    pixels = arguments.get("pixel_values")
    rows, cols = pixels.shape[-2:] if pixels is not None else _pair(size)
    h, w = _pair(patch)
    if rows // h != cols // w:
        raise InputError(
            f"The grid of images must be square, got images of {rows} x {cols} pixels. Pass image_sizes."
        )
    return round(rows // h * float(getattr(model.config, "downsample_ratio", 1.0)))


def _pair(value: Any) -> tuple[int, int]:
    return (int(value), int(value)) if isinstance(value, int) else (int(value[0]), int(value[1]))


def _scaled_side(config: Any) -> int:
    """Return the side of a tile of Idefics 3, which pads the images of a row, so `pixel_values` do not count them."""
    vision = config.vision_config
    return int(vision.image_size) // int(vision.patch_size) // int(config.scale_factor)


def _video_llava(call: CallTokens) -> ImageBlocks:
    """Return the blocks of images, and of frames with the class token before each."""
    vision = call.config.vision_config
    side = int(vision.image_size) // int(vision.patch_size)
    images, clips = _equal(call, side**2), call.arguments.get("pixel_values_videos")
    frames = 0 if clips is None else clips.shape[0] * clips.shape[1]
    return ImageBlocks(call.types, images.images, [Video(1, 1, 1), Video(1, side, side)] * frames)


def _pooled_tiles(call: CallTokens) -> ImageBlocks:
    """Return the blocks of tiles, and of videos, whose patches are pooled (Perception LM)."""
    pooling, arguments = int(call.config.projector_pooling_ratio), call.arguments
    clips = arguments.get("pixel_values_videos")
    tile = _side(call.model, arguments) // pooling
    frame = _side(call.model, {"pixel_values": clips}) // pooling
    images = _equal(call, tile**2).images
    return ImageBlocks(
        call.types, images, [] if clips is None else [Video(clips.shape[1], frame, frame)] * len(clips)
    )


def _latents(number_of: Callable[[CallTokens], int]) -> Callable[[CallTokens], ImageBlocks]:
    """Return the function for images of learned queries, which have no rows: each image is one row of tokens."""

    def blocks(call: CallTokens) -> ImageBlocks:
        tokens = count_of(call)
        number = number_of(call) if tokens else 1
        if tokens % number:
            raise InputError(
                f"The image placeholders must be {number} for each image, got {tokens}. Pass as many as the model's "
                "processor."
            )
        return ImageBlocks(call.types, [Image(1, number)] * (tokens // number))

    return blocks


def _aria_queries(call: CallTokens) -> int:
    """Return the number of queries of an image, which depends on its size in patches."""
    patch, pixels = int(call.config.vision_config.patch_size), call.arguments.get("pixel_values")
    queries = {int(patches): int(n) for patches, n in call.config.projector_patch_to_query_dict.items()}
    if pixels is None:
        raise InputError(
            "The number of tokens of an image is unknown, got no pixel_values. Pass pixel_values, or coordinates as "
            "position_ids."
        )
    patches = (pixels.shape[-2] // patch) * (pixels.shape[-1] // patch)
    if patches not in queries:
        raise InputError(f"Images must have one of {sorted(queries)} patches, got {patches}. Resize them.")
    return queries[patches]


def _docling(call: CallTokens) -> ImageBlocks:
    """Return the blocks of Granite Docling's tiles, with twice the side if the processor asked for the fine route."""
    vision = call.config.vision_config
    side = int(vision.image_size) // int(vision.patch_size) // int(vision.scale_factor)
    return _equal(call, (side * (1 if call.arguments.get("tile_fine_mask") is None else 2)) ** 2)


SQUARES = ImageRule(squares, "squares of the configured size", tiles=True)
COUNTED = ImageRule(_counted, "equal squares, counted", needed={"image": "pixel_values"})
VIDEO_LLAVA = ImageRule(
    _video_llava,
    "equal squares, counted",
    "frames, each after its class token",
    {"video": "pixel_values_videos"},
)
POOLED_TILES = ImageRule(
    _pooled_tiles, "equal squares, counted", "one block", {"video": "pixel_values_videos"}
)
DOCLING = ImageRule(_docling, "equal squares, counted")
LATENTS = ImageRule(
    _latents(lambda call: int(call.config.perceiver_config.resampler_n_latents)), "one row of learned queries"
)
ARIA_QUERIES = ImageRule(
    _latents(_aria_queries), "one row of learned queries", needed={"image": "pixel_values"}
)
SCALED = ImageRule(of_side(_scaled_side), "equal squares, counted")

SQUARE_FAMILIES: dict[str, LanguageFamily] = {
    "vipllava": LanguageFamily(SQUARES),
    "internvl": LanguageFamily(SQUARES),
    "aya_vision": LanguageFamily(COUNTED),
    "cohere2_vision": LanguageFamily(COUNTED),
    "deepseek_vl": LanguageFamily(COUNTED),
    "deepseek_vl_hybrid": LanguageFamily(COUNTED),
    "fast_vlm": LanguageFamily(COUNTED),
    "got_ocr2": LanguageFamily(COUNTED),
    "idefics3": LanguageFamily(SCALED),
    "janus": LanguageFamily(COUNTED),
    "ovis2": LanguageFamily(COUNTED),
    "pp_chart2table": LanguageFamily(COUNTED),
    "qianfan_ocr": LanguageFamily(COUNTED),
    "smolvlm": LanguageFamily(SCALED),
    "gemma3": LanguageFamily(COUNTED, masks=True),
    "gemma3n": LanguageFamily(COUNTED),
    "shieldgemma2": LanguageFamily(COUNTED, masks=True),
    "paligemma": LanguageFamily(COUNTED, first=1, prefix_lm=True, masks=True),
    "video_llava": LanguageFamily(VIDEO_LLAVA),
    "perception_lm": LanguageFamily(POOLED_TILES),
    "granite_docling": LanguageFamily(DOCLING),
    "idefics2": LanguageFamily(LATENTS),
    "aria": LanguageFamily(ARIA_QUERIES),
}
