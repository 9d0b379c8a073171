"""Families whose calls contain the grid of each image and video: `image_grid_thw` and `video_grid_thw`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vispe.errors import InputError
from vispe.hosts.transformers.language.families.base import CallTokens, ImageBlocks, ImageRule, LanguageFamily
from vispe.multimodal import Image, Scheme, Video, create_scheme, newline_images


def _grids(call: CallTokens) -> ImageBlocks:
    vision, arguments = call.config.vision_config, call.arguments
    clips: Tensor | None = arguments.get("video_grid_thw")
    if clips is not None and (frames := getattr(vision, "temporal_merge_size", 1)) != 1:
        clips = torch.cat([clips[:, :1] // frames, clips[:, 1:]], 1)
    options = {"merge": _merge_of(vision), "seconds": _seconds(arguments)}
    return ImageBlocks(call.types, arguments.get("image_grid_thw"), clips, options)


def _merge_of(vision: Any) -> int:
    """Return the number of patches along each axis that are merged into a token."""
    for name in ("spatial_merge_size", "merge_size"):
        if hasattr(vision, name):
            return int(getattr(vision, name))
    rows, columns = vision.merge_kernel_size
    if rows != columns:
        raise InputError(
            f"Patches must be merged in squares, got merge_kernel_size={(rows, columns)}. Use equal numbers."
        )
    return int(rows)


def _pooled_grids(call: CallTokens) -> ImageBlocks:
    """Return the blocks of images, and of clips whose frames are pooled into one."""
    types, images, clips, options = _grids(call)
    clips = None if clips is None else torch.cat([torch.ones_like(clips[:, :1]), clips[:, 1:]], 1)
    return ImageBlocks(types, images, clips, options)


def _merged_grids(call: CallTokens) -> ImageBlocks:
    """Return the blocks of images and frames, with a merge size for each (VideoLLaMA 3).

    Raises:
        InputError: merge sizes are missing, or tokens of a video are dropped.
    """
    dropped = call.arguments.get("video_compression_mask")
    if dropped is not None and not bool(dropped.all()):
        raise InputError(
            f"Position schemes need all tokens of a video, got video_compression_mask without "
            f"{int((~dropped.bool()).sum())} of {dropped.numel()}. Call the processor with use_token_compression=False."
        )
    images, clips = (_merged(call, name) for name in ("image", "video"))
    frames = [Video(1, h, w) for t, h, w in clips for _ in range(t)]
    return ImageBlocks(call.types, [Image(h, w) for _, h, w in images], frames)


def _merged(call: CallTokens, name: str) -> list[tuple[int, int, int]]:
    """Return frames, rows and columns of the tokens of images or videos."""
    grid, merges = call.arguments.get(f"{name}_grid_thw"), call.arguments.get(f"{name}_merge_sizes")
    if grid is None:
        return []
    if merges is None or len(merges) != len(grid):
        count = None if merges is None else len(merges)
        raise InputError(
            f"{name}_merge_sizes must have a number for each of {len(grid)} {name}s, got {count}. Pass the output of "
            "the model's processor."
        )
    return [(t, h // m, w // m) for (t, h, w), m in zip(grid.tolist(), merges.tolist(), strict=True)]


def _row_end_grids(call: CallTokens) -> ImageBlocks:
    """Return the blocks of images and frames whose rows end with a token of the image (HY V4 VL)."""
    merge = _merge_of(call.config.vision_config)
    grids = (call.arguments.get(f"{name}_grid_thw") for name in ("image", "video"))
    images, clips = (
        [] if grid is None else [(t, h // merge, w // merge + 1) for t, h, w in grid.tolist()]
        for grid in grids
    )
    frames = [Video(1, h, w) for t, h, w in clips for _ in range(t)]
    return ImageBlocks(call.types, [Image(h, w) for _, h, w in images], frames)


def _newline_grids(call: CallTokens) -> ImageBlocks:
    grids: Tensor | None = call.arguments.get("image_grid_thw")
    merge = call.config.vision_config.spatial_merge_size
    return ImageBlocks(*newline_images(call.types, grids, merge=merge, mask=call.mask))


def _seconds(arguments: dict[str, Any]) -> Any:
    """Return the seconds between frames of each video; None if they are not passed, or the call has no videos.

    Raises:
        InputError: audio is interleaved with the videos, which streams do not support.
    """
    if arguments.get("video_grid_thw") is None:
        return None
    if arguments.get("use_audio_in_video"):
        raise InputError(
            "use_audio_in_video interleaves audio with the frames of a video, which position schemes do not support, "
            "got True. Pass audio and videos separately, or restore the model."
        )
    named = (arguments.get(name) for name in ("second_per_grid_ts", "video_second_per_grid"))
    return next((seconds for seconds in named if seconds is not None), None)


NEEDED = {"image": "image_grid_thw", "video": "video_grid_thw"}
GRIDS = ImageRule(_grids, "grids of the call", "one block", NEEDED)
# of models that count tokens one by one
PLAIN_GRIDS = ImageRule(_grids, "grids of the call", "one block", NEEDED)
POOLED_GRIDS = ImageRule(_pooled_grids, "grids of the call", "frames with text timestamps", NEEDED)
MERGED_GRIDS = ImageRule(
    _merged_grids, "grids and merge sizes of the call", "frames with text timestamps", NEEDED
)
ROW_END_GRIDS = ImageRule(_row_end_grids, "grids of the call, row ends", "one block for each frame", NEEDED)
# a token after each row and at both ends of an image
NEWLINE_GRIDS = ImageRule(_newline_grids, "grids of the call, row ends", needed={"image": "image_grid_thw"})


def _of(name: str) -> Callable[[Any], Scheme]:
    return lambda config: create_scheme(name, after="side")


def _timed(config: Any) -> Scheme:
    rate = float(config.vision_config.tokens_per_second)
    return create_scheme("mrope", after="side", tokens_per_second=rate)


def _ernie(config: Any) -> Scheme:
    rows, columns, time = config.text_config.rope_parameters.get("mrope_section", (22, 22, 20))
    return create_scheme("ernie_vl", after="side", sections=(time, rows, columns))


def _hunyuan(config: Any) -> Scheme:
    sections = (config.text_config.rope_parameters or {}).get("mrope_section")
    sections = None if sections is None else tuple(sections)
    return create_scheme("xdrope", sections=sections, layout="elementwise", image_index="batch")


def _clocked(name: str) -> Callable[[Any], Scheme]:
    return lambda config: create_scheme(name, tokens_per_second=float(config.position_id_per_seconds))


_QWEN3 = LanguageFamily(GRIDS, _of("mrope_i"), separate_frames=True)
_GLM = LanguageFamily(GRIDS, _of("mrope"), separate_frames=True, framed=True)

GRID_FAMILIES: dict[str, LanguageFamily] = {
    "qwen2_vl": LanguageFamily(GRIDS, _of("mrope")),
    "qwen2_5_vl": LanguageFamily(GRIDS, _timed),
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
    "qwen4_exp": replace(_QWEN3, since="5.24.0"),
    "glm4v": _GLM,
    "glm4v_moe": _GLM,
    "glm46v": _GLM,
    "glmga": _GLM,
    "glm_ocr": _GLM,
    "ernie4_5_vl_moe": LanguageFamily(GRIDS, _ernie),
    "paddleocr_vl": LanguageFamily(GRIDS, _of("mrope")),
    "hy_v4_vl": LanguageFamily(ROW_END_GRIDS, _of("mrope_i")),
    "hunyuan_vl": LanguageFamily(NEWLINE_GRIDS, _hunyuan),
    "cosmos3_edge": replace(_QWEN3, since="5.24.0"),
    "cosmos3_omni": _QWEN3,
    "exaone4_5": LanguageFamily(PLAIN_GRIDS),
    "hyperclovax_vision_v2": LanguageFamily(PLAIN_GRIDS),
    "minimax_m3_vl": LanguageFamily(PLAIN_GRIDS, separate_frames=True),
    "muse_glimmer": LanguageFamily(PLAIN_GRIDS, separate_frames=True),
    "muse_spark": LanguageFamily(PLAIN_GRIDS, separate_frames=True),
    "kimi_k25": LanguageFamily(POOLED_GRIDS),
    "video_llama_3": LanguageFamily(MERGED_GRIDS),
    "qwen2_5_omni_thinker": LanguageFamily(GRIDS, _clocked("tmrope")),
    "qwen3_omni_moe_thinker": LanguageFamily(GRIDS, _clocked("tmrope_i")),
}
