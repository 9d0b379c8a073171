"""Families whose images have a size in pixels or in tokens, with an optional token after each row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vispe.errors import InputError
from vispe.hosts.transformers.language.families.base import CallTokens, ImageBlocks, ImageRule, LanguageFamily
from vispe.hosts.transformers.language.families.patches import FRAMES
from vispe.hosts.transformers.language.families.row_ends import with_row_ends
from vispe.hosts.transformers.language.families.squares import squares
from vispe.multimodal import Image, Video
from vispe.multimodal.streams.segments import IMAGE, VIDEO


def _blocks_by_size(call: CallTokens) -> ImageBlocks:
    """Return the blocks of images from `image_sizes`; squares of the configured size without them."""
    pixels = call.arguments.get("image_sizes")
    if pixels is None and not hasattr(call.config, "spatial_merge_size"):
        return squares(call)
    sizes = _sizes(call.model, pixels, call.types[call.mask])
    types, sizes = with_row_ends(call.types, call.mask, call.documents, IMAGE, sizes, [0] * len(sizes))
    return ImageBlocks(types, [Image(h, w) for h, w in sizes])


def _sizes(model: Any, pixels: Any, kinds: Tensor) -> list[tuple[int, int]]:
    """Return rows and columns of the tokens of images, from their height and width in pixels."""
    if pixels is None and bool((kinds == IMAGE).any()):
        raise InputError(
            f"The rows and columns of {int((kinds == IMAGE).sum())} image placeholders are unknown, got no "
            "image_sizes. Pass image_sizes, or coordinates as position_ids."
        )
    tower = getattr(model, "vision_tower", None) or model.vision_encoder
    patch = tower.patch_size * getattr(model.config, "spatial_merge_size", 1)
    return [(int(h) // patch, int(w) // patch) for h, w in (() if pixels is None else pixels)]


def _regions(call: CallTokens) -> ImageBlocks:
    """Return the blocks of Molmo 2, which has one placeholder for both; a call has images or videos only.

    An image is a thumbnail followed by the image itself; a video is a sequence of frames, with text between them.
    """
    arguments = call.arguments
    clips = arguments.get("video_grids")
    kind = IMAGE if clips is None else VIDEO
    types = torch.where(call.types > 0, kind, call.types)
    if clips is not None:
        sizes = [(int(h), int(w)) for t, h, w in clips for _ in range(int(t))]
        views = [0] * len(sizes)
    else:
        grids = arguments.get("image_grids")
        four = [] if grids is None else torch.as_tensor(grids).tolist()
        sizes = [(h, w) for grid in four for h, w in (grid[:2], grid[2:]) if h * w]
        views = [n for grid in four for n in (0, 1) if grid[2 * n] * grid[2 * n + 1]]
    types, sizes = with_row_ends(types, call.mask, call.documents, kind, sizes, views)
    if clips is not None:
        return ImageBlocks(types, [], [Video(1, h, w) for h, w in sizes])
    return ImageBlocks(types, [Image(h, w) for h, w in sizes], [])


SIZES = ImageRule(
    _blocks_by_size,
    "`image_sizes`, row ends; else squares",
    needed={"image": "image_sizes"},
    fixed=lambda config: config.vision_config.model_type != "pixtral",
    tiles=True,
)
REGIONS = ImageRule(
    _regions,
    "`image_grids`: thumbnail, full image, row ends",
    FRAMES,
    {"image": "image_grids", "video": "video_grids"},
    marked=True,
)

SIZE_FAMILIES: dict[str, LanguageFamily] = {
    "llava": LanguageFamily(SIZES),
    "lighton_ocr": LanguageFamily(SIZES),
    "mistral3": LanguageFamily(SIZES),
    "mistral_large4": LanguageFamily(SIZES),
    "molmo2": LanguageFamily(REGIONS, masks=True),
}
