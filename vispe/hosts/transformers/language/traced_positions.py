"""Coordinates of a prompt with pictures in compiled programs: one operator, which no compiler looks into.

Where pictures stand depends on the values of tokens and grids, so a compiler that follows the code breaks its graph at
each of these values. As one operator it is a call like any other, and runs as it does without a compiler.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vispe.attention.precision import exporting
from vispe.multimodal import Coordinates

# what a call says of its pictures; other arguments are not read, but that they are there may be asked for
READ = (
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
)
WORDS = ("vision_aspect_ratio", "downsample_mode", "use_audio_in_video")  # said in words, or as yes and no
_MODELS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_Find = Callable[[Any, Sequence[Tensor | None], dict[str, Any]], Coordinates]
_FIND: dict[str, _Find] = {}  # what the operator runs; `call` stands above this file


def runs(function: _Find) -> _Find:
    """Name the function that the operator runs: it takes a model, tensors, and arguments about pictures."""
    _FIND["call"] = function
    return function


def traceable(model: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a compiler is at work, and the operator takes all that the call says of its pictures."""
    if not torch.compiler.is_compiling() or exporting() or model.training:
        return False
    given = [v for name, v in kwargs.items() if name in READ or name == "mm_encoder_outputs"]
    words = all(kwargs.get(name) is None or isinstance(kwargs[name], str | bool) for name in WORDS)
    return all(v is None or isinstance(v, Tensor) for v in given) and words


def coordinates(model: Any, tensors: Sequence[Tensor | None], kwargs: dict[str, Any]) -> Coordinates:
    """Return the coordinates of a call as one operator.

    Args:
        model: the converted model inside.
        tensors: input_ids or None, embeddings or None, types or None, keys (b, s), valid (b, s), start (b) or None.
        kwargs: other arguments of the call, of which `READ` and `WORDS` are looked at.
    """
    named = [name for name in READ if kwargs.get(name) is not None]
    said = [f"{name}={kwargs[name]}" for name in WORDS if kwargs.get(name) is not None]
    scheme = model.vispe_scheme
    known = "".join("1" if t is not None else "0" for t in tensors)
    given = [t for t in tensors if t is not None]
    ids, following = _coordinates(
        given,
        [kwargs[name] for name in named],
        known,
        ",".join(named + said),
        scheme.axes,
        scheme.counts,
        model.vispe_number,
    )
    return Coordinates(ids, tensors[4], following, scheme)  # type: ignore[arg-type]


def numbered(model: Any) -> None:
    """Give a model the number by which the operator finds it."""
    model.vispe_number = id(model)
    _MODELS[id(model)] = model


@torch.library.custom_op("vispe::coordinates", mutates_args=())
def _coordinates(
    tensors: Sequence[Tensor],
    pictures: Sequence[Tensor],
    known: str,
    named: str,
    axes: int,
    counts: int,
    model: int,
) -> tuple[Tensor, Tensor]:
    rest = iter(tensors)
    given = [next(rest) if one == "1" else None for one in known]
    names = [name for name in named.split(",") if name and "=" not in name]
    kwargs: dict[str, Any] = dict(zip(names, pictures, strict=True))
    for name, word in (one.split("=") for one in named.split(",") if "=" in one):
        kwargs[name] = {"True": True, "False": False}.get(word, word)
    found = _FIND["call"](_MODELS[model], given, kwargs)
    return found.ids.clone(), found.next.clone()


@_coordinates.register_fake
def _(
    tensors: Sequence[Tensor],
    pictures: Sequence[Tensor],
    known: str,
    named: str,
    axes: int,
    counts: int,
    model: int,
) -> tuple[Tensor, Tensor]:
    keys = tensors[sum(one == "1" for one in known[:3])]
    rows, length = keys.shape
    following = (rows,) if counts == 1 else (rows, counts)
    return keys.new_empty(axes, rows, length, dtype=torch.float64), keys.new_empty(
        following, dtype=torch.float64
    )
