"""The teacher of a retrofit: a model of timm or open_clip, or its outline without weights."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from vispe.backbones.tokens import Backbone, blocks_of, has_class_token
from vispe.errors import InputError, OptionError, ShapeError, UnsupportedHost
from vispe.train.retrofit.config import Teacher


def load_teacher(config: Teacher, *, outline: bool = False, seed: int = 0) -> Backbone:
    """Build the teacher in evaluation mode, frozen.

    >>> load_teacher(Teacher("vit_tiny_patch16_224"), outline=True).channels
    192

    Args:
        config: name, weights and options.
        outline: build it without memory and weights (on torch's meta device), for checks.
        seed: of random weights.

    Raises:
        UnknownName, InputError, OptionError, UnsupportedHost: it cannot be found, loaded or used.
    """
    place, colon, _ = config.name.partition(":")
    build = _open_clip if colon and place == "open_clip" else _timm
    backbone = build(config, outline, seed)
    if backbone.size % backbone.patch and config.img_size:
        near = max(1, round(config.img_size / backbone.patch)) * backbone.patch
        raise OptionError(
            f"teacher.img_size={config.img_size} is no multiple of the patch of {config.name}, {backbone.patch} px; "
            f"choose {near}."
        )
    for key in ("mean", "std"):
        if (given := getattr(config, key)) is not None:
            backbone = replace(backbone, **{key: torch.tensor(given)[:, None, None]})
    backbone.model.requires_grad_(False)
    return backbone


def _timm(config: Teacher, outline: bool, seed: int) -> Backbone:
    from vispe.backbones.timm import input_settings, load_backbone

    weights = "random" if outline else config.weights
    if outline and config.weights not in (None, "random") and not Path(config.weights).is_file():
        raise InputError(f"teacher.weights={config.weights} is not a file; give a checkpoint, or 'random'.")
    with torch.device("meta" if outline else "cpu"):
        net = load_backbone(
            config.name,
            weights=weights,
            img_size=config.img_size,
            any_size=True,
            options=config.options,
            seed=seed,
        )
    blocks_of(net)
    with torch.device("cpu"):
        side, mean, std = input_settings(net)
    return _backbone(config.name, net, mean, std, side, not getattr(net, "dynamic_img_size", False))


def _open_clip(config: Teacher, outline: bool, seed: int) -> Backbone:
    from vispe.evaluate.subject import load_subject

    if outline:
        import open_clip

        plain = config.name.partition(":")[2].partition("/")[0]
        if plain in open_clip.list_models():
            vision = open_clip.get_model_config(plain)["vision_cfg"]
            if "patch_size" not in vision or "timm_model_name" in vision:
                raise UnsupportedHost(
                    f"{config.name} has no vision transformer of open_clip as image tower; give a timm model."
                )
        random = replace(config, name=f"open_clip:{plain}", weights="random")
        # without weights, the error of a model that has none
        if "/" not in config.name and config.weights is None:
            random = config
        # open_clip warns that the weights are random, which an outline needs
        logging.disable(logging.WARNING)
        try:
            return _open_clip(random, False, seed)
        finally:
            logging.disable(logging.NOTSET)
    subject = load_subject(
        config.name, weights=config.weights, img_size=config.img_size, seed=seed, device="cpu"
    )
    net, mean, std = subject.features.model, subject.mean, subject.std
    return _backbone(config.name, net, mean, std, subject.size, True)


def _backbone(name: str, net: nn.Module, mean: Tensor, std: Tensor, side: int, exact: bool) -> Backbone:
    from vispe.backbones.maps import patch_projection

    blocks_of(net)
    conv = patch_projection(net)
    if conv is None or conv.stride[0] != conv.stride[1]:
        raise UnsupportedHost(f"{name} has no projection of square patches, which a retrofit needs.")
    if conv.in_channels != 3:
        raise ShapeError(f"{name} takes images of {conv.in_channels} channels; a retrofit needs 3.")
    return Backbone(net, mean, std, conv.stride[0], side, exact, conv.out_channels, has_class_token(net))
