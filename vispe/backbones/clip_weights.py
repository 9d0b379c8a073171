"""open_clip models by name, with weights from disk, or downloaded if a hub is reachable."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import open_clip
import torch
from torch import nn

from vispe.backbones.local.clip_checkpoints import (
    FOLDER,
    HUB,
    Checkpoint,
    find_weights,
    split_name,
    without_weights,
)
from vispe.errors import InputError, OptionError, UnknownName, UnsupportedHost, did_you_mean, short
from vispe.hosts.convert import convert


def load_clip(
    name: str,
    *,
    pos_embed: str | None,
    weights: str | None,
    img_size: int | None,
    seed: int,
    load: bool = True,
) -> nn.Module:
    """Return an open_clip model, both towers, in evaluation mode.

    Args:
        name: MODEL or MODEL/TAG, `local-dir:FOLDER` or `hf-hub:OWNER/NAME`.
        pos_embed: positional encoding that replaces the tower's own.
        weights: checkpoint file, or 'random'; required for MODEL without a tag.
        img_size: image size in pixels.
        seed: seed of random weights.
        load: whether to load the weights; if false, weights are random, and the tag determines only the preprocessing.

    Raises:
        UnknownName: open_clip has no such model, or the model no such tag.
        InputError: weights are missing, cannot be downloaded or do not match the model.
        OptionError: no source of weights, or two.
    """
    plain, tag = split_name(name)
    # a folder contains its own weights; without weights only names that open_clip knows are built
    in_folder = load and plain.startswith((FOLDER, HUB))
    if not in_folder and plain not in open_clip.list_models():
        hint = did_you_mean(plain, open_clip.list_models())
        raise UnknownName(f"open_clip has no model {plain!r}.{hint} `open_clip.list_models()` lists them.")
    if load and not in_folder and bool(tag) == bool(weights):
        tags = ", ".join(open_clip.list_pretrained_tags_by_model(plain)[:4]) or "none"
        raise OptionError(
            f"open_clip:{name} needs one source of weights, got {'two' if tag else 'none'}. Use open_clip:{plain}/TAG "
            f"(tags: {tags} ...), or pass a checkpoint file or 'random' with `weights`."
        )
    checkpoint = find_weights(plain, tag or weights) if load else without_weights(plain, tag)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build(checkpoint, load=load, force_image_size=img_size)
        if pos_embed is not None:
            convert(model, pos_embed)
    return model.eval()


def tower_of(model: Any) -> nn.Module:
    """Return the image tower of an open_clip model; for towers of timm, the timm model."""
    tower = model.visual
    if not isinstance(getattr(tower, "trunk", None), nn.Module):
        return tower
    # the preprocessing is stored on the tower around the timm model
    for key in ("image_size", "image_mean", "image_std"):
        setattr(tower.trunk, key, getattr(tower, key))
    return tower.trunk


def tokenizer_of(name: str) -> Any:
    """Return the tokenizer of an open_clip model, MODEL or MODEL/TAG.

    Raises:
        UnsupportedHost: the tokenizer cannot be loaded, for example because a download fails.
    """
    try:
        return open_clip.get_tokenizer(split_name(name)[0])
    except (OSError, ValueError, ImportError) as error:
        raise UnsupportedHost(f"the tokenizer of {name} cannot be loaded: {short(error)}") from error


def build(checkpoint: Checkpoint, *, load: bool = True, **options: Any) -> nn.Module:
    """Build an open_clip model on the CPU, with the settings of its tag, and load its weights.

    Args:
        checkpoint: location of the weights.
        load: whether to load the weights; if false, call `load_checkpoint` later.
        options: further arguments of `open_clip.create_model`.

    Raises:
        InputError: the model cannot be built, or the weights do not match it.
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
    """Load weights strictly, without executing code from the file.

    Raises:
        InputError: the weights do not match the model.
    """
    try:
        open_clip.load_checkpoint(model, str(checkpoint.path), strict=True, weights_only=True)
    except Exception as error:
        raise _unfit(checkpoint, error) from error


def _unfit(checkpoint: Checkpoint, error: Exception) -> InputError:
    return InputError(
        f"{checkpoint.path} does not fit the model ({short(error)}). Check the name of the model, {checkpoint.name}."
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Prevent open_clip's messages to the root logger from configuring logging for the whole process."""
    root, silent = logging.getLogger(), logging.NullHandler()
    root.addHandler(silent)
    try:
        yield
    finally:
        root.removeHandler(silent)
