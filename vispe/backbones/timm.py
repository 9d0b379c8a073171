"""Models and images for the evaluators: a timm model by name, its patch features, and images it accepts."""

import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from torch import Tensor, nn

from vispe.backbones.weights import built_with
from vispe.errors import InputError, OptionError, ShapeError, UnknownName, UnsupportedHost, did_you_mean

_WEIGHT_FILES = (
    "model.safetensors",
    "open_clip_model.safetensors",
    "pytorch_model.bin",
    "open_clip_pytorch_model.bin",
)


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
        name: timm model name, with or without a tag.
        pos_embed: spec of a positional encoding that replaces the model's own.
        weights: `None` for the pretrained weights, from disk or else downloaded; `random` for a seeded random
            initialisation; else a checkpoint file, see `vispe.backbones.weights`.
        img_size: side of the images in pixels, for models that are built for one size.
        any_size: build it so that it takes images of any size, where its class can (`dynamic_img_size`).
        options: more arguments for `timm.create_model`.
        seed: of the random initialisation, of what is new with `pos_embed` included.

    Raises:
        UnknownName: timm has no such model.
        InputError: weights that are not there, cannot be fetched or do not fit.
        OptionError: an image size that the model refuses.
    """
    plain = name.partition(".")[0]
    if ":" not in name and not timm.is_model(plain):
        known = did_you_mean(plain, timm.list_models())
        raise UnknownName(f"timm has no model {name!r}.{known} `timm.list_models()` lists them.")
    tag, tags = name.partition(".")[2], timm.list_pretrained(f"{plain}.*")
    if ":" not in name and tag and name not in tags:
        raise UnknownName(
            f"timm has no weights {tag!r} for {plain}.{did_you_mean(name, tags)} "
            f"It has {', '.join(tags) or 'none'}."
        )
    if weights is None:
        _check_obtainable(name)
    extra = {"pos_embed": pos_embed} if pos_embed else {}
    extra |= {"img_size": img_size} if img_size else {}
    extra |= options or {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)

        def make() -> nn.Module:
            try:
                return _created(name, weights is None, extra, any_size)
            except (TypeError, AssertionError) as error:
                asked = ", ".join(f"{key}={value}" for key, value in extra.items()) or "no options"
                raise OptionError(f"{name} cannot be built with {asked}: {error}.") from error

        model = make() if weights in (None, "random") else built_with(weights, name, make)
    return model.eval()


def _created(name: str, pretrained: bool, extra: dict[str, Any], any_size: bool) -> nn.Module:
    """Build a timm model, for any size of image where that is asked and its class knows the option."""
    if any_size:
        try:
            return timm.create_model(
                name, pretrained=pretrained, num_classes=0, dynamic_img_size=True, **extra
            )
        except TypeError as error:
            if "dynamic_img_size" not in str(error):
                raise
    return timm.create_model(name, pretrained=pretrained, num_classes=0, **extra)


@torch.no_grad()
def patch_features(model: nn.Module, images: Tensor) -> Tensor:
    """Return the final, normed patch features of images, (b, h, w, C) float32 on the CPU.

    Class and register tokens are left out.

    Args:
        model: a timm model in evaluation mode.
        images: normalised images (b, 3, H, W).

    Raises:
        UnsupportedHost: the model cannot return feature maps.
        OptionError: the model is in training mode.
    """
    if not hasattr(model, "forward_intermediates"):
        raise UnsupportedHost(
            f"{type(model).__name__} has no forward_intermediates, from which patch features are read; "
            f"use a timm model or give features (h, w, C)."
        )
    if model.training:
        raise OptionError(
            "The model is in training mode, where its features are random; call model.eval() first."
        )
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    maps = model.forward_intermediates(
        images.to(device), indices=1, norm=True, output_fmt="NCHW", intermediates_only=True
    )
    return maps[-1].permute(0, 2, 3, 1).float().cpu()


def input_settings(model: nn.Module) -> tuple[int, Tensor, Tensor]:
    """Return the image side in pixels, mean and standard deviation (3, 1, 1) that a model expects.

    Args:
        model: a timm model, or the image tower of an open_clip model.
    """
    if hasattr(model, "image_mean"):  # open_clip
        mean, std = (torch.tensor(values)[:, None, None] for values in (model.image_mean, model.image_std))
        side = model.image_size
        return int(side if isinstance(side, int) else side[0]), mean, std
    config = timm.data.resolve_model_data_config(model)
    size = getattr(getattr(model, "patch_embed", None), "img_size", None) or config["input_size"][1:]
    mean, std = (torch.tensor(config[key])[:, None, None] for key in ("mean", "std"))
    return int(size[0]), mean, std


def square_images(pages: np.ndarray, model: nn.Module) -> Tensor:
    """Return pages as normalised square images for a model, (z, 3, side, side).

    The shorter side is resized to the model's image size (bicubic, antialiased), then the centre is cropped.

    Args:
        pages: values in [0, 1], (z, h, w, c) with 1 or 3 channels; grey is repeated.
        model: a timm model; see `input_settings`.
    """
    if pages.ndim != 4 or pages.shape[3] not in (1, 3):
        raise ShapeError(
            f"The model needs pages (z, h, w, c) with 1 or 3 channels, got {pages.shape}; "
            f"choose channels first."
        )
    side, mean, std = input_settings(model)
    h, w = pages.shape[1:3]
    crop = min(h, w)
    top, left = (h - crop) // 2, (w - crop) // 2
    square = torch.from_numpy(np.ascontiguousarray(pages[:, top : top + crop, left : left + crop])).float()
    square = square.permute(0, 3, 1, 2).expand(-1, 3, -1, -1)
    if crop != side:
        square = nn.functional.interpolate(square, size=(side, side), mode="bicubic", antialias=True)
    return (square.clamp(0, 1) - mean) / std


def read_squares(paths: Iterable[str | Path], model: nn.Module) -> Iterator[Tensor]:
    """Read image files one by one and yield every page as a normalised square image (3, side, side).

    Intensities are scaled between the 0.5 and 99.5 percentiles of the file; what was noticed while reading is
    given as a warning.
    """
    from vispe.images.normalize import normalize
    from vispe.images.read import read_image

    for path in paths:
        image = read_image(path)
        pages, notes = normalize(image)
        for note in (*image.notes, *notes):
            warnings.warn(note, stacklevel=2)
        yield from square_images(pages, model)


def noise_images(n: int, model: nn.Module, generator: np.random.Generator) -> Tensor:
    """Return n normalised images of uniform noise in [0, 1], (n, 3, side, side): they show no place."""
    side, mean, std = input_settings(model)
    return (torch.from_numpy(generator.random((n, 3, side, side), dtype=np.float32)) - mean) / std


def weights_on_disk(name: str) -> Path | None:
    """Return the file in the Hugging Face cache that holds the pretrained weights of a timm model, if any."""
    from huggingface_hub import try_to_load_from_cache

    config = timm.get_pretrained_cfg(name)
    if config is None or not config.hf_hub_id:
        return None
    for file in filter(None, (config.hf_hub_filename, *_WEIGHT_FILES)):
        if isinstance(found := try_to_load_from_cache(config.hf_hub_id, file), str):
            return Path(found)
    return None


def _check_obtainable(name: str) -> None:
    """Raise InputError when pretrained weights are neither on disk nor within reach, without long retries."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    if ":" in name:
        return
    hint = "give weights=FILE or weights=random"
    config = timm.get_pretrained_cfg(name)
    if config is None or not config.has_weights:
        raise InputError(f"timm has no pretrained weights for {name}; choose another model, or {hint}.")
    if not config.hf_hub_id or weights_on_disk(name):
        return
    url = hf_hub_url(config.hf_hub_id, config.hf_hub_filename or _WEIGHT_FILES[0])
    try:
        get_hf_file_metadata(url, timeout=5)
    except HfHubHTTPError:
        return  # the server answers: timm knows which of several files to take
    except Exception as error:  # no connection: the class depends on the HTTP library that is installed
        raise InputError(
            f"The weights of {name} are not on disk, and {url.split('/')[2]} cannot be reached "
            f"({' '.join(str(error).split())}); {hint}."
        ) from error
