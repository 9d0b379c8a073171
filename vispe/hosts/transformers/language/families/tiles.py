"""Families whose images are tiled by their size, after a thumbnail, with a token after each row."""

from __future__ import annotations

import math
import sys
from fractions import Fraction
from typing import Any

import torch

from vispe.errors import InputError, counted
from vispe.hosts.transformers.language.families.base import CallTokens, ImageBlocks, ImageRule, LanguageFamily
from vispe.hosts.transformers.subclasses import stock_of
from vispe.multimodal import Image, Video
from vispe.multimodal.streams.segments import VIDEO


def _tiles(call: CallTokens) -> ImageBlocks:
    return ImageBlocks(call.types, _any_resolution(call.model, call.arguments))


def _tiles_and_frames(call: CallTokens) -> ImageBlocks:
    images, clips = _any_resolution(call.model, call.arguments), call.arguments.get("pixel_values_videos")
    vision = call.config.vision_config
    side = vision.image_size // vision.patch_size // call.config.spatial_pool_stride
    videos = [] if clips is None else [Video(clips.shape[1], side, side)] * len(clips)
    return ImageBlocks(call.types, images, videos)


def _one_vision(call: CallTokens) -> ImageBlocks:
    types, arguments = call.types, call.arguments
    if arguments.get("pixel_values_videos") is None:  # video tokens are then text, as in the host
        types = types.masked_fill(types == VIDEO, 0)
    return ImageBlocks(types, _any_resolution(call.model, arguments), _frames(call.config, arguments))


def _any_resolution(model: Any, arguments: dict[str, Any]) -> list[Image]:
    """Return the blocks of images of LLaVA-NeXT and OneVision: the thumbnail, then the tiles or one token."""
    config, llava = model.config, sys.modules[(stock_of(type(model)) or type(model)).__module__]
    sizes = [] if arguments.get("image_sizes") is None else list(arguments["image_sizes"])
    counts = arguments.get("batch_num_images")
    side = _side_of_tile(config)
    tiled = [True] * len(sizes)
    if counts is not None:  # an image is only tiled if its sample has no other image
        tiled = [int(n) == 1 for n in counts for _ in range(int(n))]
    if len(tiled) != len(sizes):
        raise InputError(
            f"batch_num_images must add up to the {counted(len(sizes), 'image')} of image_sizes, got {len(tiled)}."
        )
    aspect = arguments.get("vision_aspect_ratio") or getattr(config, "vision_aspect_ratio", None)
    limit = math.inf if aspect is None else int(aspect.removeprefix("anyres_max_"))
    blocks: list[Image] = []
    for size, is_tiled in zip(sizes, tiled, strict=True):
        blocks.append(Image(side, side))
        if not is_tiled:
            blocks.append(Image(1, 1))  # the token after the image
            continue
        pixels, tile = torch.as_tensor(size).tolist(), config.vision_config.image_size
        rows, cols = llava.get_anyres_image_grid_shape(pixels, config.image_grid_pinpoints, tile)
        # tokens of padding are removed, then the image is downsampled to at most `limit` tiles
        canvas = torch.empty(1, rows * side, cols * side, device="meta")
        _, h, w = llava.unpad_image(canvas, pixels).shape
        ratio = math.sqrt(h * w / (limit * side**2))
        h, w = (int(h // ratio), int(w // ratio)) if ratio > 1.1 else (h, w)
        blocks.append(Image(h, w + 1))  # each row ends with a token
    return blocks


def _side_of_tile(config: Any) -> int:
    """Return the number of tokens along each axis of a tile, which some models downsample (Granite 4 Vision)."""
    side = int(config.vision_config.image_size) // int(config.vision_config.patch_size)
    return int(side * Fraction(getattr(config, "downsample_rate", None) or 1))


def _frames(config: Any, arguments: dict[str, Any]) -> list[Video]:
    """Return the blocks of LLaVA-OneVision's videos: the pooled frames and the token after them."""
    pixels = arguments.get("pixel_values_videos")
    if pixels is None:
        return []
    side = math.ceil(config.vision_config.image_size // config.vision_config.patch_size / 2)
    return [v for _ in range(len(pixels)) for v in (Video(pixels.shape[1], side, side), Video(1, 1, 1))]


TILES = ImageRule(_tiles, "`image_sizes`: thumbnail, tiles, row ends", needed={"image": "image_sizes"})
TILES_AND_FRAMES = ImageRule(
    _tiles_and_frames,
    "`image_sizes`: thumbnail, tiles, row ends",
    "one block",
    {"image": "image_sizes", "video": "pixel_values_videos"},
)
ONE_VISION = ImageRule(
    _one_vision,
    "`image_sizes`: thumbnail, tiles up to a limit",
    "one block for all frames",
    {"image": "image_sizes", "video": "pixel_values_videos"},
    pieces=2,  # the thumbnail and the tiles
)

TILE_FAMILIES: dict[str, LanguageFamily] = {
    "granite4_vision": LanguageFamily(TILES),
    "llava_next": LanguageFamily(TILES),
    "llava_next_video": LanguageFamily(TILES_AND_FRAMES),
    "llava_onevision": LanguageFamily(ONE_VISION),
}
