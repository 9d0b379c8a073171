"""Teacher of a retrofit: a model of timm or open_clip, with or without weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vispe.backbones.load_model import load_model
from vispe.backbones.local.debiased import DebiasedModel, Debiasing
from vispe.backbones.local.debiased_folder import read_debiased
from vispe.backbones.model_access import blocks_of, patch_projection
from vispe.backbones.model_names import CLIP, kind_of
from vispe.backbones.vision_model import VisionModel
from vispe.errors import InputError, OptionError, ShapeError, UnsupportedHost
from vispe.train.retrofit.config import Teacher


def load_teacher(config: Teacher, *, outline: bool = False, seed: int = 0) -> VisionModel:
    """Build the teacher, frozen and in evaluation mode.

    Args:
        config: settings of the teacher.
        outline: build the teacher without weights, and timm models on torch's meta device, for checks.
        seed: seed of random weights.

    Raises:
        UnknownName: unknown model.
        InputError: the weights cannot be loaded.
        OptionError: an invalid image size or option.
        UnsupportedHost: not a vision transformer with square patches.
        ShapeError: the model does not have 3 input channels.

    >>> load_teacher(Teacher("vit_tiny_patch16_224"), outline=True).channels
    192
    """
    config, debiasing = base_teacher(config)
    name, is_open_clip = config.name, config.name.startswith(CLIP)
    model_config = _without_weights(config) if outline else config
    with torch.device("meta" if outline and not is_open_clip else "cpu"):
        options = {"weights": model_config.weights, "img_size": config.img_size, "options": config.options}
        options |= {"kinds": ("timm", "open_clip", "debiased"), "parameter": "teacher.name"}
        net = load_model(model_config.name, any_size=True, seed=seed, **options).model
    blocks_of(net)
    conv = patch_projection(net)
    if conv is None or conv.stride[0] != conv.stride[1]:
        raise UnsupportedHost(f"{name} has no patch projection with square patches, which a retrofit needs.")
    if conv.in_channels != 3:
        raise ShapeError(f"{name}: a retrofit needs 3 input channels, got {conv.in_channels}.")
    model = VisionModel(net.requires_grad_(False), mean=_column(config.mean), std=_column(config.std))
    if debiasing is not None:
        model = VisionModel(DebiasedModel(net, debiasing), mean=model.mean, std=model.std, exact=model.exact)
    if model.size % model.patch_size and config.img_size:
        raise OptionError(
            f"teacher.img_size must be a multiple of the patch size of {name}, {model.patch_size} px, got "
            f"{config.img_size}. Use {max(1, round(config.img_size / model.patch_size)) * model.patch_size}."
        )
    return model


def base_teacher(config: Teacher) -> tuple[Teacher, Debiasing | None]:
    """Return the settings of the model inside a folder of `vispe debias`, and what is done to its features.

    For other names, return the settings themselves and None.

    Raises:
        InputError: the folder is damaged.
        UnsupportedHost: the encoding of the debiased model was replaced.
    """
    if kind_of(config.name) != "debiased":
        return config, None
    model, debiasing = read_debiased(config.name)
    if model["pos_embed"] is not None:
        raise UnsupportedHost(
            f"teacher.name: {config.name} is a model with pos_embed={model['pos_embed']}, which a retrofit cannot "
            "use. Debias the model without pos_embed."
        )
    weights, size = config.weights or model["weights"], config.img_size or model["img_size"]
    return replace(config, name=model["name"], weights=weights, img_size=size), debiasing


def _without_weights(config: Teacher) -> Teacher:
    """Return the teacher with random weights, after checking its configured weights.

    Raises:
        InputError: the weights file does not exist.
        UnsupportedHost: an open_clip model in a folder, or one whose image tower is not a vision transformer of
            open_clip.
    """
    if not config.name.startswith(CLIP):
        if config.weights not in (None, "random") and not Path(config.weights).is_file():
            raise InputError(
                f"teacher.weights must be a checkpoint file or 'random', got {config.weights}, which does not exist."
            )
        return replace(config, weights="random")
    import open_clip

    from vispe.backbones.local.clip_checkpoints import split_name

    plain, tag = split_name(config.name.removeprefix(CLIP))
    if ":" in plain:
        raise UnsupportedHost(
            f"{config.name}: a retrofit is loaded without the weights of its teacher, so the teacher must be a model "
            "that open_clip knows by name. Use open_clip:MODEL/TAG, or open_clip:MODEL with weights."
        )
    if plain in open_clip.list_models():
        vision = open_clip.get_model_config(plain)["vision_cfg"]
        if "patch_size" not in vision or "timm_model_name" in vision:
            raise UnsupportedHost(
                f"{config.name}: the image tower is not a vision transformer of open_clip. Use a timm model."
            )
    # without a tag or weights the name is unchanged, so that loading raises the error
    return replace(config, name=f"{CLIP}{plain}", weights="random") if tag or config.weights else config


def _column(values: Any) -> torch.Tensor | None:
    return None if values is None else torch.tensor(values)[:, None, None]
