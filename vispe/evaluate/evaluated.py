"""Evaluated models, loaded by name: backbones, retrofits, saved segmenters and Python callables."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from vispe.backbones.batching import FeatureFunction, Segmenter
from vispe.backbones.device import choose_device
from vispe.backbones.load_model import load_model
from vispe.backbones.micro import patch_means
from vispe.backbones.model_names import kind_of, refuse_options
from vispe.backbones.user_callables import D4Segmenter
from vispe.backbones.vision_model import VisionModel
from vispe.errors import OptionError, ShapeError, counted
from vispe.evaluate.saved_segmenter import SavedSegmenter
from vispe.images.symmetry.symmetrization import D4Features, symmetrize

Kind = Literal["features", "segmenter"]


@dataclass(frozen=True, eq=False)
class EvaluatedModel:
    """A model under evaluation, and the preprocessing of its images.

    Attributes:
        title: human-readable name.
        features: images (b, c, H, W) -> maps (b, d, h, w); None for a segmenter.
        segmenter: image (c, H, W) -> labels (H, W); None for features.
        channels: number of channels of the images.
        mean: (c, 1, 1), subtracted from images in [0, 1].
        std: (c, 1, 1), divides the centred images.
        normalize: mode of `vispe.images.normalize.normalize`.
        clip: percentiles of the normalisation.
        patch_size: patch size in pixels; None if unknown.
        size: input size in pixels; None if the model has no fixed input size.
        exact: whether only images of that size are accepted.
        names: names of the classes; None if unknown.
        whole: the text-aligned model that contains this image tower; None without one.
        reader: called without arguments, returns the tokenizer (open_clip) or the processor (transformers) of `whole`.
    """

    title: str
    features: FeatureFunction | None = None
    segmenter: Segmenter | None = None
    channels: int = 3
    mean: Tensor | None = None
    std: Tensor | None = None
    normalize: str = "stack"
    clip: tuple[float, float] = (0.5, 99.5)
    patch_size: int | None = None
    size: int | None = None
    exact: bool = False
    names: tuple[str, ...] | None = None
    whole: nn.Module | None = None
    reader: Callable[[], Any] | None = None

    def tensor(self, page: np.ndarray) -> Tensor:
        """Normalise an image (H, W, c) in [0, 1] for the model, (channels, H, W); grey images are repeated.

        Raises:
            ShapeError: the number of channels of the image is not that of the model.
        """
        if page.ndim != 3 or page.shape[2] not in (1, self.channels):
            raise ShapeError(
                f"{self.title}: images must have {counted(self.channels, 'channel')}, got {page.shape}. Convert the "
                "image first."
            )
        image = torch.from_numpy(np.ascontiguousarray(page)).float().permute(2, 0, 1)
        image = image.expand(self.channels, -1, -1)
        return (image if self.mean is None else (image - self.mean) / self.std).contiguous()

    def window(self, crop: int | None) -> int | None:
        """Return the side in pixels of the evaluated window, None for full images.

        Raises:
            OptionError: the model accepts only images of another size.
        """
        window = crop if crop is not None else self.size if self.exact else None
        if self.exact and window != self.size:
            raise OptionError(
                f"{self.title}: crop must be {self.size}, the only input size of the model, got {crop}. Omit crop, or "
                f"load the model with img_size={crop}."
            )
        return window

    def picture(self, image: Tensor) -> np.ndarray:
        """Return a normalised image (channels, H, W) as an RGB image (H, W, 3) in [0, 1]."""
        denormalised = image if self.mean is None or self.std is None else image * self.std + self.mean
        denormalised = denormalised.double().clamp(0, 1)
        rgb = (
            denormalised[:3]
            if len(denormalised) >= 3
            else denormalised.mean(0, keepdim=True).expand(3, -1, -1)
        )
        return np.ascontiguousarray(rgb.permute(1, 2, 0).numpy())


def load_evaluated_model(
    text: str,
    *,
    pos_embed: str | None = None,
    weights: str | None = None,
    img_size: int | None = None,
    d4: bool = False,
    symmetric: bool = False,
    layer: int | None = None,
    seed: int = 0,
    device: str = "auto",
    patch_size: int | None = None,
    kind: Kind | None = None,
) -> EvaluatedModel:
    """Load a model for evaluation by name.

    Args:
        text: every name of `vispe.backbones.load_model.load_model`, or a model file of `vispe segment` (`.vispe`).
        pos_embed: positional encoding that replaces that of the model.
        weights: checkpoint file or 'random'; the pretrained weights by default.
        img_size: input size in pixels.
        d4: average features, or probabilities of a segmenter, over the eight poses of D4.
        symmetric: average the patch kernel of the model over D4.
        layer: index of the block whose features are used, negative from the end; the last by default.
        seed: seed of random weights.
        device: 'auto', 'cpu', 'cuda', 'cuda:1' ...; ignored for callables.
        patch_size: patch size in pixels, for callables without an attribute `patch_size`.
        kind: type of a callable: 'features', images (b, 3, H, W) in [0, 1] -> maps (b, d, h, w), the default; or
            'segmenter', one image (3, H, W) in [0, 1] -> labels (H, W).

    Raises:
        OptionError: an option has no effect on this kind of model.
        UnknownName, InputError, UnsupportedHost: the model cannot be found, loaded or used.
    """
    model_options = {"pos_embed": pos_embed, "weights": weights, "img_size": img_size}
    network_options = {"layer": layer, "symmetric": symmetric or None}
    function_options = {"patch_size": patch_size, "kind": kind}
    without_effect = {
        "segmenter": model_options | network_options | function_options,
        "callable": network_options,
        "micro": network_options | function_options,
    }
    origin = kind_of(text)
    refuse_options(text, without_effect.get(origin, function_options))
    if origin == "segmenter":
        return _saved(text, d4, device)
    loaded = load_model(text, **model_options, any_size=True, seed=seed)
    if origin == "micro":
        return _called(text, patch_means(loaded.model.to(choose_device(device))), d4, patch_size, kind)
    if origin == "callable":
        return _called(text, loaded.model, d4, patch_size, kind)
    title = text.replace(":", " ", 1) if origin == "open_clip" else text
    title = f"{title} + {pos_embed}" if pos_embed else title
    remarks = ["random weights"] if weights == "random" else []
    subject = _of_model(loaded.model, title, remarks, d4, symmetric, layer, device, **loaded.settings)
    return replace(subject, whole=loaded.whole, reader=loaded.reader)


def _of_model(
    net: nn.Module, title: str, remarks: list[str], d4: bool, symmetric: bool, layer: int | None, device: str,
    **settings: Any,
) -> EvaluatedModel:  # fmt: skip
    if symmetric:
        symmetrize(net)
    f = VisionModel(net.to(choose_device(device)), layer=-1 if layer is None else layer, **settings)
    remarks = [*remarks, *["symmetric patch kernel"] * symmetric]
    remarks += [f"block {layer}"] if layer is not None else []
    attributes = {key: getattr(f, key) for key in ("mean", "std", "patch_size", "size", "exact")}
    return EvaluatedModel(_titled(title, remarks, d4), D4Features(f) if d4 else f, **attributes)


def _titled(name: str, remarks: Sequence[str], d4: bool) -> str:
    remarks = [*remarks, "averaged over eight poses"] if d4 else remarks
    return f"{name} ({', '.join(remarks)})" if remarks else name


def _saved(text: str, d4: bool, device: str) -> EvaluatedModel:
    s = SavedSegmenter(text, device=device)
    settings = {"channels": s.channels, "normalize": s.normalize, "clip": s.clip, "names": tuple(s.names)}
    return EvaluatedModel(
        _titled(text, (), d4), segmenter=D4Segmenter(s.probabilities) if d4 else s, **settings
    )


def _called(
    text: str, function: Callable[..., Any], d4: bool, patch_size: int | None, kind: Kind | None
) -> EvaluatedModel:
    title = _titled(text, (), d4)
    patch_size = patch_size or getattr(function, "patch_size", None)
    if kind == "segmenter":
        if d4 and not callable(getattr(function, "probabilities", None)):
            raise OptionError(
                f"load_evaluated_model: d4 averages class probabilities, but {text} returns only labels. Add a method "
                "probabilities(image) -> (K, H, W), or omit d4."
            )
        names = getattr(function, "names", None)
        s = D4Segmenter(function.probabilities) if d4 else function
        return EvaluatedModel(
            title, segmenter=s, patch_size=patch_size, names=None if names is None else tuple(names)
        )
    return EvaluatedModel(title, D4Features(function, patch_size) if d4 else function, patch_size=patch_size)
