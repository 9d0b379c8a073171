"""Custom operator for the coordinates of prompts with images in compiled programs.

The positions of images depend on the values of tokens and grids. A compiler would break its graph at each use
of such a value. A custom operator is opaque to the compiler, and runs as in eager mode.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vispe.attention.precision import exporting
from vispe.multimodal import Coordinates

# arguments with images and their sizes
TENSORS = (
    "pixel_values",
    "pixel_values_videos",
    "image_grid_thw",
    "video_grid_thw",
    "second_per_grid_ts",
    "video_second_per_grid",
    "tile_grids",
    "image_sizes",
    "image_position_ids",
    "video_position_ids",
    "image_grids",
    "video_grids",
    "target_sizes",
    "target_sizes_videos",
    "batch_num_images",
    "image_merge_sizes",
    "video_merge_sizes",
    "video_compression_mask",
    "spatial_shapes",
    "pixel_values_local",
    "num_local_patches",
    "tile_fine_mask",
)
OPTIONS = ("vision_aspect_ratio", "downsample_mode", "use_audio_in_video")  # text or booleans
_MODELS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_Function = Callable[[Any, Sequence[Tensor | None], dict[str, Any]], Coordinates]
_IMPLEMENTATION: dict[str, _Function] = {}  # registered by `call`, which imports this file


def runs(function: _Function) -> _Function:
    """Register the implementation of the operator: a function of a model, tensors, and arguments with images."""
    _IMPLEMENTATION["call"] = function
    return function


def traceable(model: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether a compiler is running, and the operator supports all arguments with images of the call."""
    if not torch.compiler.is_compiling() or exporting() or model.training:
        return False
    values = [v for name, v in kwargs.items() if name in TENSORS or name == "mm_encoder_outputs"]
    options = all(kwargs.get(name) is None or isinstance(kwargs[name], str | bool) for name in OPTIONS)
    return all(v is None or isinstance(v, Tensor) for v in values) and options


def coordinates(model: Any, tensors: Sequence[Tensor | None], kwargs: dict[str, Any]) -> Coordinates:
    """Return the coordinates of a call as one operator.

    Args:
        model: the converted model inside.
        tensors: input_ids, embeddings, types (each or None), token indices (b, s), valid (b, s), start (b) or None.
        kwargs: other arguments of the call, of which `TENSORS` and `OPTIONS` are used.
    """
    named = [name for name in TENSORS if kwargs.get(name) is not None]
    options = [f"{name}={kwargs[name]}" for name in OPTIONS if kwargs.get(name) is not None]
    scheme = model.vispe_scheme
    # operators accept no optional tensors in a list, so a string of 0 and 1 marks the tensors that exist
    known = "".join("1" if t is not None else "0" for t in tensors)
    existing = [t for t in tensors if t is not None]
    ids, following = _coordinates(
        existing,
        [kwargs[name] for name in named],
        known,
        ",".join(named + options),
        scheme.axes,
        scheme.counts,
        model.vispe_number,
    )
    return Coordinates(ids, tensors[4], following, scheme)  # type: ignore[arg-type]


def numbered(model: Any) -> None:
    """Set the number of a model, by which the operator looks it up."""
    model.vispe_number = id(model)
    _MODELS[id(model)] = model


@torch.library.custom_op("vispe::coordinates", mutates_args=())
def _coordinates(
    tensors: Sequence[Tensor],
    grids: Sequence[Tensor],
    known: str,
    named: str,
    axes: int,
    counts: int,
    model: int,
) -> tuple[Tensor, Tensor]:
    remaining = iter(tensors)
    optional = [next(remaining) if flag == "1" else None for flag in known]
    names = [name for name in named.split(",") if name and "=" not in name]
    kwargs: dict[str, Any] = dict(zip(names, grids, strict=True))
    for name, value in (item.split("=") for item in named.split(",") if "=" in item):
        kwargs[name] = {"True": True, "False": False}.get(value, value)
    result = _IMPLEMENTATION["call"](_MODELS[model], optional, kwargs)
    # outputs of an operator must not alias its inputs
    return result.ids.clone(), result.next.clone()


@_coordinates.register_fake
def _(
    tensors: Sequence[Tensor],
    grids: Sequence[Tensor],
    known: str,
    named: str,
    axes: int,
    counts: int,
    model: int,
) -> tuple[Tensor, Tensor]:
    token_index = tensors[sum(flag == "1" for flag in known[:3])]
    rows, length = token_index.shape
    following = (rows,) if counts == 1 else (rows, counts)
    return token_index.new_empty(axes, rows, length, dtype=torch.float64), token_index.new_empty(
        following, dtype=torch.float64
    )
