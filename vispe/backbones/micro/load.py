"""Loading of vispe_micro with the weights shipped in the package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vispe.backbones.device import flush_denormals
from vispe.backbones.micro.model import PATCH, STRIDE, Micro
from vispe.errors import InputError, short

WEIGHTS = Path(__file__).with_name("vispe_micro.safetensors")
"""The shipped weights, float16; `vispe_micro.json` in the same folder is their card: data, licences, recipe, scores."""


def load_micro(weights: str | Path | None = None) -> Micro:
    """Return vispe_micro in evaluation mode, float32, on the CPU.

    Args:
        weights: safetensors file written by `models/micro/train.py`; default: the file shipped with vispe.

    Raises:
        InputError: the file is missing, is not a safetensors file, or does not match the model.

    >>> load_micro().dim
    32
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(weights or WEIGHTS)
    if not path.is_file():
        raise InputError(
            f"weights must be a file with weights of vispe_micro, got {path}. Omit it for the shipped ones."
        )
    try:
        state = {name: value.float() for name, value in load_file(path).items()}
        model = Micro(**sizes(state))
        model.load_state_dict(state)
    except (SafetensorError, RuntimeError, KeyError, TypeError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else short(error)
        raise InputError(
            f"{path} does not fit vispe_micro ({reason}). Omit weights for the shipped ones."
        ) from error
    return model.eval().requires_grad_(False)


def sizes(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the constructor arguments of `Micro` from its state dict."""
    return {
        "dim": len(state["head.1.weight"]),
        "widths": tuple(len(state[f"stem.{i}.mix.weight"]) for i in range(3)),
        "width": len(state["trunk.entry.weight"]),
        "depth": sum(name.endswith(".slope") and name.startswith("trunk.blocks") for name in state),
        "heads": len(state["trunk.blocks.0.slope"]),
    }


@lru_cache(maxsize=1)
def _shipped() -> Micro:
    return load_micro()


def patch_means(model: Micro) -> Callable[[Tensor], Tensor]:
    """Return a function from images (b, 3, h, w) to the mean of the features over each patch.

    For evaluators that need one vector per patch: images in [0, 1] give maps (b, dim, h / 16, w / 16).
    """

    @torch.inference_mode()
    def function(images: Tensor) -> Tensor:
        with flush_denormals():
            maps = model(images.to(next(model.parameters()).device))
        return torch.nn.functional.avg_pool2d(maps, PATCH // STRIDE)

    function.patch_size = PATCH  # type: ignore[attr-defined]
    return function


@torch.inference_mode()
def features(images: Tensor) -> Tensor:
    """Return the features of the shipped model: (b, 3, h, w) in [0, 1], or (b, 1, h, w) grey -> (b, 32, h / 2, w / 2).

    Raises:
        ShapeError: h and w are not multiples of 16.

    >>> features(torch.zeros(1, 1, 32, 48)).shape
    torch.Size([1, 32, 16, 24])
    """
    with flush_denormals():
        return _shipped().to(images.device)(images)


def patch_features(images: Tensor) -> Tensor:
    """Return the mean of the features over each patch of 16 pixels: (b, 3, h, w) -> (b, 32, h / 16, w / 16).

    >>> patch_features(torch.zeros(1, 3, 32, 48)).shape
    torch.Size([1, 32, 2, 3])
    """
    return torch.nn.functional.avg_pool2d(features(images), PATCH // STRIDE)


patch_features.patch_size = PATCH  # type: ignore[attr-defined]
