"""Families whose images are local views, followed by the whole image."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vispe.errors import InputError, counted
from vispe.hosts.transformers.language.families.base import CallTokens, ImageBlocks, ImageRule, LanguageFamily
from vispe.multimodal import Image

# from rows and columns of the whole image, of a local view, and of the grid of views, to the blocks of an image
_BlocksOfImage = Callable[[tuple[int, int], tuple[int, int], int, Any], list[Image]]


def _views(patch_of: Callable[[Any], int], blocks_of: _BlocksOfImage) -> Callable[[CallTokens], ImageBlocks]:
    """Return the function for images with local views, whose patches are downsampled by two convolutions."""

    def blocks(call: CallTokens) -> ImageBlocks:
        pixels, local, counts, grids = (
            call.arguments.get(name)
            for name in ("pixel_values", "pixel_values_local", "num_local_patches", "patches_grid")
        )
        if pixels is None:
            return ImageBlocks(call.types, [])
        patch = patch_of(call.config.vision_config)
        full_size, local_size = (_downsampled(p, patch) for p in (pixels, pixels if local is None else local))
        numbers = [0] * len(pixels) if counts is None else [int(n) for n in counts]
        if len(numbers) != len(pixels):
            raise InputError(
                f"num_local_patches must have a number for each of {counted(len(pixels), 'image')}, got "
                f"{len(numbers)}. Pass the output of the model's processor."
            )
        images: list[Image] = []
        for index, number in enumerate(numbers):
            images += blocks_of(full_size, local_size, number, None if grids is None else grids[index])
        return ImageBlocks(call.types, images)

    return blocks


def _downsampled(pixels: Any, patch: int) -> tuple[int, int]:
    """Return rows and columns of the tokens of images (..., h, w); two convolutions of stride 2 round up."""
    rows, columns = (-(-(int(n) // patch) // 4) for n in pixels.shape[-2:])
    return rows, columns


def _separate_views(whole: tuple[int, int], view: tuple[int, int], number: int, grid: Any) -> list[Image]:
    return [Image(*view)] * number + [Image(*whole)]


def _queries(whole: tuple[int, int], view: tuple[int, int], number: int, grid: Any) -> list[Image]:
    """Return the blocks of DeepSeek-OCR 2: one row of learned queries for each view, and a separator."""
    (row, of_view) = (Image(1, 144 if h * w <= 144 else 256) for h, w in (whole, view))
    return [of_view] * number + [row, Image(1, 1)]


def _joined_views(whole: tuple[int, int], view: tuple[int, int], number: int, grid: Any) -> list[Image]:
    """Return the blocks of Unlimited-OCR: the joined views and the whole image, with row ends, and a separator."""
    columns, rows = (0, 0) if grid is None else (int(n) for n in grid)
    joined = [Image(rows * view[0], columns * view[1] + 1)] if number else []
    return [*joined, Image(whole[0], whole[1] + 1), Image(1, 1)]


NEEDED = {"image": "pixel_values"}
LOCAL_VIEWS = ImageRule(
    _views(lambda vision: int(vision.patch_size), _separate_views),
    "local views, then the whole image",
    needed=NEEDED,
)
QUERY_VIEWS = ImageRule(
    _views(lambda vision: int(vision.sam_config.patch_size), _queries),
    "local views, then the whole image: one row of learned queries each",
    needed=NEEDED,
)
JOINED_VIEWS = ImageRule(
    _views(lambda vision: int(vision.sam_config.patch_size), _joined_views),
    "joined local views, then the whole image, row ends",
    needed=NEEDED,
)

VIEW_FAMILIES: dict[str, LanguageFamily] = {
    "step3p7": LanguageFamily(LOCAL_VIEWS),
    "deepseek_ocr2": LanguageFamily(QUERY_VIEWS),
    "unlimited_ocr": LanguageFamily(JOINED_VIEWS),
}
