"""The teacher of a retrofit: a model of timm or open_clip, or its outline without weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vispe.backbones.model_access import blocks_of, patch_projection
from vispe.backbones.open_clip import PREFIX, load_model
from vispe.backbones.vision_model import VisionModel
from vispe.errors import InputError, OptionError, ShapeError, UnsupportedHost
from vispe.train.retrofit.config import Teacher


def load_teacher(config: Teacher, *, outline: bool = False, seed: int = 0) -> VisionModel:
    """Build the teacher in evaluation mode, frozen.

    Args:
        config: what it is.
        outline: build it without weights, and a timm model without memory (on torch's meta device), for checks.
        seed: of random weights.

    Raises:
        UnknownName, InputError, OptionError, UnsupportedHost: it cannot be found, loaded or used.

    >>> load_teacher(Teacher("vit_tiny_patch16_224"), outline=True).channels
    192
    """
    name, of_clip = config.name, config.name.startswith(PREFIX)
    built = _without_weights(config) if outline else config
    with torch.device("meta" if outline and not of_clip else "cpu"):
        asked = {"weights": built.weights, "img_size": config.img_size, "options": config.options}
        net = load_model(built.name, any_size=True, seed=seed, **asked)
    blocks_of(net)
    conv = patch_projection(net)
    if conv is None or conv.stride[0] != conv.stride[1]:
        raise UnsupportedHost(f"{name} has no projection of square patches, which a retrofit needs.")
    if conv.in_channels != 3:
        raise ShapeError(f"{name} takes images of {conv.in_channels} channels; a retrofit needs 3.")
    model = VisionModel(net.requires_grad_(False), mean=_column(config.mean), std=_column(config.std))
    if model.size % model.patch and config.img_size:
        raise OptionError(
            f"teacher.img_size={config.img_size} is no multiple of the patch of {name}, {model.patch} px; "
            f"choose {max(1, round(config.img_size / model.patch)) * model.patch}."
        )
    return model


def _without_weights(config: Teacher) -> Teacher:
    """Return the teacher with random weights, after a look at what its own would be.

    Raises:
        InputError: a file of weights that is not there.
        UnsupportedHost: an open_clip model without a vision transformer of open_clip.
    """
    if not config.name.startswith(PREFIX):
        if config.weights not in (None, "random") and not Path(config.weights).is_file():
            raise InputError(
                f"teacher.weights={config.weights} is not a file; give a checkpoint, or 'random'."
            )
        return replace(config, weights="random")
    import open_clip

    plain, _, tag = config.name.removeprefix(PREFIX).partition("/")
    if plain in open_clip.list_models():
        vision = open_clip.get_model_config(plain)["vision_cfg"]
        if "patch_size" not in vision or "timm_model_name" in vision:
            raise UnsupportedHost(
                f"{config.name} has no vision transformer of open_clip as image tower; give a timm model."
            )
    # without a tag or weights it is left as it is: loading it says what is missing
    return replace(config, name=f"{PREFIX}{plain}", weights="random") if tag or config.weights else config


def _column(values: Any) -> torch.Tensor | None:
    return None if values is None else torch.tensor(values)[:, None, None]
