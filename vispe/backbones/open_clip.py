"""Vision models by name: of timm, or image towers of open_clip.

Libraries are imported on demand, as importing timm takes seconds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vispe.errors import OptionError, UnknownName, UnsupportedHost, did_you_mean

PREFIX = "open_clip:"


def load_model(
    name: str,
    *,
    pos_embed: str | None = None,
    weights: str | None = None,
    img_size: Any = None,
    any_size: bool = False,
    options: dict[str, Any] | None = None,
    seed: int = 0,
) -> nn.Module:
    """Build a timm model, or the image tower of an open_clip model, in evaluation mode.

    Args:
        name: a timm model, `local-dir:FOLDER` or `hf-hub:OWNER/NAME`; or `open_clip:MODEL` or `open_clip:MODEL/TAG`.
        pos_embed: positional encoding that replaces the model's own.
        weights: checkpoint file, or 'random'; default: the pretrained weights; for open_clip models, the
            weights of the tag.
        img_size: image size in pixels.
        any_size: let a timm model accept images of any size, if its class supports it.
        options: further arguments of `timm.create_model`.
        seed: seed of random weights.

    Raises:
        UnknownName: there is no such model.
        InputError: weights are missing, cannot be downloaded or do not match the model.
        OptionError: the model does not support the image size, or an open_clip model has no source of
            weights, or two.

    >>> type(load_model("test_vit", weights="random")).__name__
    'VisionTransformer'
    """
    shared = {"pos_embed": pos_embed, "weights": weights, "img_size": img_size, "seed": seed}
    if name.startswith(PREFIX):
        return tower_of(load_clip(name.removeprefix(PREFIX), **shared))
    from vispe.backbones.timm import load_backbone

    return load_backbone(name, any_size=any_size, options=options, **shared)


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
        name: MODEL or MODEL/TAG.
        pos_embed: positional encoding that replaces the tower's own.
        weights: checkpoint file, or 'random'; required without a tag.
        img_size: image size in pixels.
        seed: seed of random weights.
        load: whether to load the weights; if false, weights are random, and the tag determines only the
            preprocessing.

    Raises:
        UnknownName: open_clip has no such model, or the model no such tag.
        InputError: weights are missing, cannot be downloaded or do not match the model.
        OptionError: no source of weights, or two.
    """
    import open_clip

    from vispe.backbones.clip_weights import build, find_weights, without_weights
    from vispe.hosts.convert import convert

    plain, _, tag = name.partition("/")
    if plain not in open_clip.list_models():
        hint = did_you_mean(plain, open_clip.list_models())
        raise UnknownName(f"open_clip has no model {plain!r}.{hint} `open_clip.list_models()` lists them.")
    if load and bool(tag) == bool(weights):
        tags = ", ".join(open_clip.list_pretrained_tags_by_model(plain)[:4]) or "none"
        raise OptionError(
            f"open_clip:{name} needs one source of weights, got {'two' if tag else 'none'}. Use open_clip:{plain}/TAG "
            f"(tags: {tags} ...), or pass a checkpoint file or 'random' as weights."
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
    import open_clip

    try:
        return open_clip.get_tokenizer(name.partition("/")[0])
    except (OSError, ValueError, ImportError) as error:
        raise UnsupportedHost(
            f"the tokenizer of {name} cannot be loaded: {' '.join(str(error).split())[:200]}"
        ) from error


def names_weights(name: str) -> bool:
    """Return whether a model name includes its weights, as in `open_clip:MODEL/TAG`.

    >>> names_weights("open_clip:ViT-B-32/openai"), names_weights("vit_small_patch14_dinov2")
    (True, False)
    """
    return name.startswith(PREFIX) and "/" in name
