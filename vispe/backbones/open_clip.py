"""Image towers of open_clip models by name, beside the timm models of `vispe.backbones.timm`."""

from __future__ import annotations

import torch
from torch import nn

from vispe.backbones.timm import load_backbone
from vispe.errors import InputError, OptionError, UnknownName, did_you_mean
from vispe.hosts.convert import convert

PREFIX = "open_clip:"


def load_model(
    name: str,
    *,
    pos_embed: str | None = None,
    weights: str | None = None,
    img_size: int | None = None,
    seed: int = 0,
) -> nn.Module:
    """Build a timm model, or the image tower of an open_clip model, in evaluation mode.

    Args:
        name: a timm model, see `load_backbone`, or `open_clip:MODEL` or `open_clip:MODEL/TAG`.
        pos_embed: positional encoding that replaces the model's own.
        weights: a file or 'random'; for an open_clip model without a tag one of them is needed.
        img_size: side of the images in pixels.
        seed: of random weights.

    Raises:
        UnknownName: there is no such model.
        InputError: weights that are not there, cannot be fetched or do not fit.
        OptionError: see `load_backbone`; an open_clip model with no or two sources of weights.
    """
    options = {"pos_embed": pos_embed, "weights": weights, "img_size": img_size, "seed": seed}
    if name.startswith(PREFIX):
        return load_tower(name.removeprefix(PREFIX), **options)
    return load_backbone(name, **options)


def load_tower(
    name: str, *, pos_embed: str | None, weights: str | None, img_size: int | None, seed: int
) -> nn.Module:
    """Return the image tower of an open_clip model (the trunk of one that is timm's); see `load_model`.

    Args:
        name: MODEL or MODEL/TAG.
        pos_embed: see there.
        weights: see there.
        img_size: see there.
        seed: see there.
    """
    import open_clip

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
    chosen = tag or (None if weights == "random" else weights)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = open_clip.create_model(plain, chosen, force_image_size=img_size)
        except (RuntimeError, OSError) as error:
            reason = " ".join(str(error).split())[:200]
            raise InputError(
                f"The weights {chosen} of open_clip:{plain} cannot be loaded ({reason}); give --weights FILE or random."
            ) from error
        if pos_embed is not None:
            convert(model, pos_embed)
    tower = model.visual
    if not isinstance(getattr(tower, "trunk", None), nn.Module):
        return tower.eval()
    # one of timm, which is what everything here reads; how images are prepared is said by the tower around it
    for key in ("image_size", "image_mean", "image_std"):
        setattr(tower.trunk, key, getattr(tower, key))
    return tower.trunk.eval()
