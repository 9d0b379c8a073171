"""Image towers of open_clip models by name, beside the timm models of `vispe.backbones.timm`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import open_clip
import torch
from torch import nn

from vispe.backbones.clip_weights import Checkpoint, find_weights
from vispe.backbones.hub import short
from vispe.errors import InputError, OptionError, UnknownName, did_you_mean
from vispe.hosts.convert import convert


def load_tower(
    name: str, *, pos_embed: str | None, weights: str | None, img_size: int | None, seed: int
) -> nn.Module:
    """Return the image tower of an open_clip model in evaluation mode, or the trunk of one that is timm's.

    Args:
        name: MODEL or MODEL/TAG.
        pos_embed: positional encoding that replaces the tower's own.
        weights: checkpoint file, or random; needed where there is no tag.
        img_size: side of the images in pixels.
        seed: of random weights.

    Raises:
        UnknownName: open_clip has no such model, or the model no such tag.
        InputError: weights that are not there, cannot be fetched or do not fit.
        OptionError: no source of weights, or two.
    """
    plain, _, tag = name.partition("/")
    if plain not in open_clip.list_models():
        hint = did_you_mean(plain, open_clip.list_models())
        raise UnknownName(f"open_clip has no model {plain!r}.{hint} `open_clip.list_models()` lists them.")
    if bool(tag) == bool(weights):
        tags = ", ".join(open_clip.list_pretrained_tags_by_model(plain)[:4]) or "none"
        raise OptionError(
            f"open_clip:{name} needs one source of weights, got {'two' if tag else 'none'}; write "
            f"open_clip:{plain}/TAG (known: {tags} ...), or --weights FILE, or --weights random."
        )
    checkpoint = find_weights(plain, tag or weights)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build(checkpoint, force_image_size=img_size)
        if pos_embed is not None:
            convert(model, pos_embed)
    tower = model.visual
    if not isinstance(getattr(tower, "trunk", None), nn.Module):
        return tower.eval()
    # everything here reads models of timm; the tower around one says how images are prepared
    for key in ("image_size", "image_mean", "image_std"):
        setattr(tower.trunk, key, getattr(tower, key))
    return tower.trunk.eval()


def build(checkpoint: Checkpoint, *, load: bool = True, **options: Any) -> nn.Module:
    """Build an open_clip model on the CPU, as the tag of its weights says, and load them.

    Args:
        checkpoint: the weights.
        load: load them; else it is left to `load_checkpoint`.
        options: more arguments for `open_clip.create_model`.

    Raises:
        InputError: the model cannot be built, or the weights do not fit.
    """
    config, path = checkpoint.config, checkpoint.path if load else None
    with quiet():
        try:
            return open_clip.create_model(
                checkpoint.name,
                None if path is None else str(path),
                load_weights=load,
                pretrained_text=False,
                force_quick_gelu=bool(config.get("quick_gelu", False)),
                force_preprocess_cfg={key: config[key] for key in ("mean", "std") if key in config} or None,
                **options,
            )
        # a damaged or foreign file can fail anywhere in torch, zipfile, pickle or safetensors
        except Exception as error:
            if path is not None:
                raise _unfit(checkpoint, error) from error
            raise InputError(f"open_clip cannot build {checkpoint.name} ({short(error)}).") from error


def load_checkpoint(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Load weights; each must have its place, and nothing in the file is executed.

    Raises:
        InputError: they do not fit.
    """
    try:
        open_clip.load_checkpoint(model, str(checkpoint.path), strict=True, weights_only=True)
    except Exception as error:
        raise _unfit(checkpoint, error) from error


def _unfit(checkpoint: Checkpoint, error: Exception) -> InputError:
    return InputError(
        f"{checkpoint.path} does not fit the model ({short(error)}); check the name of the model, {checkpoint.name}."
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what open_clip writes to the root logger, which would set up logging for the whole process, to itself."""
    root, silent = logging.getLogger(), logging.NullHandler()
    root.addHandler(silent)
    try:
        yield
    finally:
        root.removeHandler(silent)
