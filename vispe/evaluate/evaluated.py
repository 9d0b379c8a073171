"""What is measured, found by its name: a model, a retrofit, a saved segmenter, a callable."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from vispe.backbones.batching import FeatureFunction, Segmenter
from vispe.backbones.device import choose_device
from vispe.backbones.local.retrofitted import is_retrofitted, load_retrofitted
from vispe.backbones.local.transformers_model import (
    PREFIX,
    TransformersModel,
    colours,
    load_transformers,
    processor_of,
)
from vispe.backbones.open_clip import load_clip, load_model, tokenizer_of, tower_of
from vispe.backbones.user_callables import D4Segmenter, named_callable
from vispe.backbones.vision_model import VisionModel
from vispe.errors import OptionError, ShapeError
from vispe.evaluate.saved_segmenter import SavedSegmenter
from vispe.symmetry.symmetrization import D4Features, symmetrize

Kind = Literal["features", "segmenter"]
_MODELS = ("open_clip", "hf", "hf-hub", "hf_hub", "local-dir")


@dataclass(frozen=True, eq=False)
class Subject:
    """What is measured, and what images it wants.

    Attributes:
        title: in words.
        features: images (b, c, H, W) -> maps (b, d, h, w); None for a segmenter.
        segmenter: image (c, H, W) -> labels (H, W); None for features.
        channels: of the images.
        mean: (c, 1, 1), taken from images in [0, 1].
        std: (c, 1, 1), by which they are then divided.
        normalize: mode of `vispe.images.normalize.normalize`.
        clip: its percentiles.
        patch: side of a patch in pixels; None where it is not known.
        size: side in pixels of the images that the model was built for; None if it was for none.
        exact: whether it takes images of that size only.
        names: of the classes; None where they are not known.
        whole: the model with words, of which this is the part that sees images, where there is one.
        reader: called without arguments, gives the tokenizer (open_clip) or the processor (transformers) of it.
    """

    title: str
    features: FeatureFunction | None = None
    segmenter: Segmenter | None = None
    channels: int = 3
    mean: Tensor | None = None
    std: Tensor | None = None
    normalize: str = "stack"
    clip: tuple[float, float] = (0.5, 99.5)
    patch: int | None = None
    size: int | None = None
    exact: bool = False
    names: tuple[str, ...] | None = None
    whole: nn.Module | None = None
    reader: Callable[[], Any] | None = None

    def tensor(self, page: np.ndarray) -> Tensor:
        """Return a page (H, W, c) in [0, 1] as the model gets it, (channels, H, W); grey is repeated.

        Raises:
            ShapeError: the page has another number of channels.
        """
        if page.ndim != 3 or page.shape[2] not in (1, self.channels):
            raise ShapeError(
                f"{self.title} takes images of {self.channels} channel(s), got a page of {page.shape}; "
                "convert it first."
            )
        image = torch.from_numpy(np.ascontiguousarray(page)).float().permute(2, 0, 1)
        image = image.expand(self.channels, -1, -1)
        return (image if self.mean is None else (image - self.mean) / self.std).contiguous()

    def window(self, crop: int | None) -> int | None:
        """Return the side in pixels of the window that is measured, None for whole images.

        Raises:
            OptionError: the model takes images of another size only.
        """
        window = crop or (self.size if self.exact else None)
        if self.exact and window != self.size:
            raise OptionError(
                f"--crop {crop} does not suit {self.title}, which takes images of {self.size} px only; leave it out, "
                f"or build the model for that size with --img-size {crop}."
            )
        return window

    def picture(self, image: Tensor) -> np.ndarray:
        """Return an image as the model gets it, (channels, H, W), as a picture (H, W, 3) in [0, 1]."""
        plain = image if self.mean is None or self.std is None else image * self.std + self.mean
        plain = plain.double().clamp(0, 1)
        shown = plain[:3] if len(plain) >= 3 else plain.mean(0, keepdim=True).expand(3, -1, -1)
        return np.ascontiguousarray(shown.permute(1, 2, 0).numpy())


def load_subject(
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
    patch: int | None = None,
    kind: Kind | None = None,
) -> Subject:
    """Find what is to be measured.

    Args:
        text: a timm model; `open_clip:MODEL` or `open_clip:MODEL/TAG`; `hf:FOLDER` or `hf:OWNER/NAME`, a
            vision model of transformers or one with an image tower; the folder of a finished `vispe retrofit`; a
            model file of `vispe segment` (`.vispe`); or a Python callable, `package.module:name` or
            `folder/file.py:name`.
        pos_embed: positional encoding that replaces the model's own.
        weights: checkpoint file or 'random'; default the pretrained weights.
        img_size: side in pixels that the model is built for.
        d4: average over the eight poses: features, or probabilities of a segmenter.
        symmetric: average the patch kernel of the model over them.
        layer: block whose features are taken, negative from the end; default the last.
        seed: of random weights.
        device: 'auto', 'cpu', 'cuda', 'cuda:1' ...; callables bring their own.
        patch: side of a patch in pixels, for callables that do not say it.
        kind: what a callable gives: 'features', images (b, 3, H, W) in [0, 1] -> maps (b, d, h, w), the default; or
            'segmenter', one image (3, H, W) in [0, 1] -> labels (H, W).

    Raises:
        OptionError: an option that has no effect on such a subject.
        UnknownName, InputError, UnsupportedHost: it cannot be found, loaded or used.
    """
    of_model = {"--pos-embed": pos_embed, "--weights": weights, "--img-size": img_size, "--layer": layer}
    of_model |= {"--symmetrize": symmetric or None}
    of_callable = {"--patch": patch, "--kind": kind}
    place, colon, name = text.rpartition(":")
    if text.endswith(".vispe"):
        _refuse(text, "a saved segmentation model", {**of_model, **of_callable})
        return _saved(text, d4, device)
    if colon and place.partition(":")[0] not in _MODELS:
        _refuse(text, "a Python callable", of_model)
        return _called(text, place, name, d4, patch, kind)
    if is_retrofitted(text):
        of_weights = {"--pos-embed": pos_embed, "--weights": weights, "--img-size": img_size}
        _refuse(text, "a retrofit", {**of_weights, **of_callable})
        f = load_retrofitted(text)
        own = {"mean": f.mean, "std": f.std, "exact": f.exact}
        return _of_model(f.model, text, [], d4, symmetric, layer, device, **own)
    if text.startswith(PREFIX):
        of_weights = {"--pos-embed": pos_embed, "--weights": weights, "--img-size": img_size}
        _refuse(text, "a model of transformers", {**of_weights, **of_callable})
        net = load_transformers(text)
        found = _of_model(
            TransformersModel(net, *colours(text)).eval(), text, [], d4, symmetric, layer, device
        )
        return replace(found, whole=net, reader=partial(processor_of, text))
    remarks, shared = ["random weights"] if weights == "random" else [], {"pos_embed": pos_embed}
    shared |= {"weights": weights, "img_size": img_size, "seed": seed}
    _refuse(text, "an open_clip model" if place == "open_clip" else "a timm model", of_callable)
    if place == "open_clip":
        whole = load_clip(name, **shared)
        title = f"open_clip {name} + {pos_embed}" if pos_embed else f"open_clip {name}"
        found = _of_model(tower_of(whole), title, remarks, d4, symmetric, layer, device)
        return replace(found, whole=whole, reader=partial(tokenizer_of, name))
    net = load_model(text, any_size=True, **shared)
    return _of_model(
        net, f"{text} + {pos_embed}" if pos_embed else text, remarks, d4, symmetric, layer, device
    )


def _of_model(
    net: nn.Module, title: str, remarks: list[str], d4: bool, symmetric: bool, layer: int | None, device: str,
    **own: Any,
) -> Subject:  # fmt: skip
    if symmetric:
        symmetrize(net)
    f = VisionModel(net.to(choose_device(device)), layer=-1 if layer is None else layer, **own)
    remarks = [*remarks, *["symmetric patch kernel"] * symmetric]
    remarks += [f"block {layer}"] if layer is not None else []
    known = {key: getattr(f, key) for key in ("mean", "std", "patch", "size", "exact")}
    return Subject(_titled(title, remarks, d4), D4Features(f) if d4 else f, **known)


def _titled(name: str, remarks: Sequence[str], d4: bool) -> str:
    remarks = [*remarks, "averaged over eight poses"] if d4 else remarks
    return f"{name} ({', '.join(remarks)})" if remarks else name


def _saved(text: str, d4: bool, device: str) -> Subject:
    s = SavedSegmenter(text, device=device)
    known = {"channels": s.channels, "normalize": s.normalize, "clip": s.clip, "names": tuple(s.names)}
    return Subject(_titled(text, (), d4), segmenter=D4Segmenter(s.probabilities) if d4 else s, **known)


def _called(text: str, place: str, name: str, d4: bool, patch: int | None, kind: Kind | None) -> Subject:
    function = named_callable(text, place, name)
    title = _titled(text, (), d4)
    if isinstance(function, nn.Module):
        function = function.eval()
    patch = patch or getattr(function, "patch", None)
    if kind == "segmenter":
        if d4 and not callable(getattr(function, "probabilities", None)):
            raise OptionError(
                f"--d4 averages class probabilities over the poses, and {text} gives labels only; give it a method "
                "probabilities(image) -> (K, H, W), or leave --d4 out."
            )
        names = getattr(function, "names", None)
        s = D4Segmenter(function.probabilities) if d4 else function
        return Subject(title, segmenter=s, patch=patch, names=None if names is None else tuple(names))
    return Subject(title, D4Features(function, patch) if d4 else function, patch=patch)


def _refuse(text: str, what: str, options: dict[str, Any]) -> None:
    """Raise OptionError for an option that has no effect on a subject."""
    named = next((key for key, value in options.items() if value is not None), None)
    if named is not None:
        raise OptionError(f"{named} has no effect on {text}, which is taken for {what}; leave it out.")
