"""timm models by name with their weights, and their patch features."""

from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from vispe.backbones.hub import cached, check_reach, downloaded, repositories, with_safe
from vispe.backbones.local.timm_weights import built_with
from vispe.backbones.vision_model import VisionModel
from vispe.errors import (
    InputError,
    OptionError,
    UnknownName,
    VispeError,
    did_you_mean,
    is_out_of_memory,
    short,
)

_FILE = "pytorch_model.bin"
_ELSEWHERE = ("local-dir:", "hf-hub:", "hf_hub:")


def load_backbone(
    name: str,
    *,
    pos_embed: str | None = None,
    weights: str | None = None,
    img_size: int | None = None,
    any_size: bool = False,
    options: dict[str, Any] | None = None,
    seed: int = 0,
) -> nn.Module:
    """Build a timm model in evaluation mode, without a classifier.

    Args:
        name: timm model name, with or without a tag; or `local-dir:FOLDER`, or `hf-hub:OWNER/NAME`.
        pos_embed: spec of a positional encoding that replaces the model's own.
        weights: `None` for the pretrained weights, from disk or else downloaded; `random` for a seeded random
            initialisation; else a checkpoint file, in the layout of timm or of the authors.
        img_size: image size in pixels, for models that are built for one size.
        any_size: build the model for images of any size, if its class supports this (`dynamic_img_size`).
        options: further arguments of `timm.create_model`.
        seed: seed of the random initialisation, including new parameters of `pos_embed`.

    Raises:
        UnknownName: timm has no such model.
        InputError: weights are missing, cannot be downloaded or do not match the model.
        OptionError: the model does not support an option or the image size.

    >>> type(load_backbone("test_vit", weights="random", img_size=64)).__name__
    'VisionTransformer'
    """
    _check_name(name)
    weights = _located(name, weights)
    extra = {"pos_embed": pos_embed} if pos_embed else {}
    extra |= {"img_size": img_size} if img_size else {}
    extra |= options or {}

    def make() -> nn.Module:
        try:
            return _created(name, any_size, pretrained=weights is None, num_classes=0, **extra)
        except (TypeError, AssertionError) as error:
            shown = ", ".join(f"{key}={value}" for key, value in extra.items()) or "no options"
            raise OptionError(f"{name} cannot be built with {shown}: {error}.") from error
        except Exception as error:
            # a damaged or foreign file can fail anywhere in torch, timm or safetensors; weights=FILE has its own check
            if weights is not None or isinstance(error, VispeError) or is_out_of_memory(error):
                raise
            raise InputError(f"the weights of {name} cannot be loaded ({short(error)}).") from error

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make() if weights in (None, "random") else built_with(weights, name, make)
    return model.eval()


def _check_name(name: str) -> None:
    """Raise `UnknownName` unless timm has such a model and weights, or the name is a folder or repository."""
    plain, _, tag = name.partition(".")
    if name.startswith(_ELSEWHERE):
        return
    if not timm.is_model(plain):
        known = did_you_mean(plain, timm.list_models())
        raise UnknownName(f"timm has no model {name!r}.{known} `timm.list_models()` lists them.")
    tags = timm.list_pretrained(f"{plain}.*")
    if tag and name not in tags:
        raise UnknownName(
            f"timm has no weights {tag!r} for {plain}.{did_you_mean(name, tags)} Its weights: "
            f"{', '.join(tags) or 'none'}."
        )


def _located(name: str, weights: str | None) -> str | None:
    """Return the source of the weights: `weights`, or the file on disk; None if timm downloads them.

    Raises:
        InputError: the model has no pretrained weights, or they are not on disk and cannot be downloaded.
    """
    what = f"the pretrained weights of {name} are"
    scheme, _, repo = name.partition(":")
    if repo:
        # folders are always local; repositories may be missing in the cache
        if scheme != "local-dir" and not (cached(repo, "config.json") and cached(repo, *with_safe(_FILE))):
            check_reach(what, models_on_disk)
        return weights
    if weights is not None:
        return weights
    config = timm.get_pretrained_cfg(name)
    if config is None or not config.has_weights:
        raise InputError(
            f"timm has no pretrained weights for {name}. Use another model, pass a checkpoint file with `weights`, or "
            "use `weights=random` for a trial."
        )
    path = weights_on_disk(name)
    if path is None:
        check_reach(what, models_on_disk)
    return path and str(path)


def weights_on_disk(name: str) -> Path | None:
    """Return the file on disk with the pretrained weights of a timm model; None if there is none."""
    config = timm.get_pretrained_cfg(name)
    if config is None:
        return None
    path = cached(config.hf_hub_id, *with_safe(config.hf_hub_filename or _FILE)) if config.hf_hub_id else None
    return path or downloaded(config.url, Path(torch.hub.get_dir()) / "checkpoints")


def models_on_disk() -> list[str]:
    """Return the names of timm's models whose weights are on disk."""
    repos = (repo.repo_id for repo in repositories())
    return [repo.removeprefix("timm/") for repo in repos if repo.startswith("timm/")]


def _created(name: str, any_size: bool, **options: Any) -> nn.Module:
    """Build a timm model, for any image size if `any_size` and its class supports it."""
    try:
        return timm.create_model(name, **options, **({"dynamic_img_size": True} if any_size else {}))
    except TypeError as error:
        if not any_size or "dynamic_img_size" not in str(error):
            raise
    return timm.create_model(name, **options)


@torch.no_grad()
def patch_features(model: nn.Module, images: Tensor) -> Tensor:
    """Return the final, normalised patch features of images, (b, h, w, C) float32 on the CPU.

    Class and register tokens are not included.

    Args:
        model: model in evaluation mode.
        images: normalised, (b, 3, H, W).

    Raises:
        UnsupportedHost: the model cannot return feature maps.
        OptionError: the model is in training mode.

    >>> model = load_backbone("test_vit", weights="random")
    >>> patch_features(model, torch.zeros(1, 3, 160, 160)).shape
    torch.Size([1, 10, 10, 64])
    """
    return VisionModel(model)(images).permute(0, 2, 3, 1).float().cpu()
