"""What `vispe rotate` measures, found by its name: a timm or open_clip model, a saved segmenter, a Python callable."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from vispe.backbones.batches import FeatureFunction, Segmenter
from vispe.backbones.callables import D4Segmenter, named_callable
from vispe.backbones.maps import ModelFeatures
from vispe.errors import OptionError, ShapeError
from vispe.evaluate.saved import SavedSegmenter
from vispe.symmetry.remedies import D4Features, symmetrize

Kind = Literal["features", "segmenter"]
_TIMM_PLACES = ("hf-hub", "hf_hub", "local-dir")


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

    def picture(self, image: Tensor) -> np.ndarray:
        """Return an image as the model gets it, (channels, H, W), as a picture (H, W, 3) in [0, 1]."""
        plain = image if self.mean is None or self.std is None else image * self.std + self.mean
        plain = plain.double().clamp(0, 1)
        shown = plain[:3] if len(plain) >= 3 else plain.mean(0, keepdim=True).expand(3, -1, -1)
        return np.ascontiguousarray(shown.permute(1, 2, 0).numpy())


@dataclass(frozen=True)
class _Options:
    """What was asked of a subject, see `load_subject`."""

    pos_embed: str | None = None
    weights: str | None = None
    img_size: int | None = None
    layer: int | None = None
    symmetric: bool = False
    d4: bool = False
    seed: int = 0
    device: str = "auto"

    def title(self, name: str, random: bool = False) -> str:
        said = [
            *(["random weights"] if random else []),
            *(["symmetric patch kernel"] if self.symmetric else []),
            *([f"block {self.layer}"] if self.layer is not None else []),
            *(["averaged over eight poses"] if self.d4 else []),
        ]
        name = f"{name} + {self.pos_embed}" if self.pos_embed else name
        return f"{name} ({', '.join(said)})" if said else name


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
        text: a timm model; `open_clip:MODEL` or `open_clip:MODEL/TAG`; a model file of `vispe segment` (`.vispe`); or
            a Python callable, `package.module:name` or `folder/file.py:name`.
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
    given = {"--pos-embed": pos_embed, "--weights": weights, "--img-size": img_size, "--layer": layer}
    of_model = {**given, "--symmetrize": symmetric or None}
    of_callable = {"--patch": patch, "--kind": kind}
    place, colon, name = text.rpartition(":")
    options = _Options(pos_embed, weights, img_size, layer, symmetric, d4, seed, device)
    if text.endswith(".vispe"):
        _refuse(text, "a saved segmentation model", {**of_model, **of_callable})
        return _saved(text, d4, device)
    if colon and place == "open_clip":
        _refuse(text, "an open_clip model", of_callable)
        return _open_clip(name, options)
    if colon and place.partition(":")[0] not in _TIMM_PLACES:
        _refuse(text, "a Python callable", of_model)
        return _called(text, place, name, d4, patch, kind)
    _refuse(text, "a timm model", of_callable)
    return _timm(text, options)


def _timm(name: str, given: _Options) -> Subject:
    from vispe.backbones.timm import input_settings, load_backbone

    net = load_backbone(
        name,
        pos_embed=given.pos_embed,
        weights=given.weights,
        img_size=given.img_size,
        any_size=True,
        seed=given.seed,
    )
    side, mean, std = input_settings(net)
    exact = hasattr(net, "patch_embed") and not getattr(net, "dynamic_img_size", False)
    return _model(given.title(name, given.weights == "random"), net, mean, std, side, exact, given)


def _open_clip(name: str, given: _Options) -> Subject:
    from vispe.backbones.open_clip import load_tower
    from vispe.backbones.timm import input_settings

    tower = load_tower(
        name, pos_embed=given.pos_embed, weights=given.weights, img_size=given.img_size, seed=given.seed
    )
    side, mean, std = input_settings(tower)
    title = given.title(f"open_clip {name}", given.weights == "random")
    return _model(title, tower, mean, std, side, given.pos_embed is None, given)


def _model(
    title: str, net: nn.Module, mean: Tensor, std: Tensor, side: int, exact: bool, given: _Options
) -> Subject:
    from vispe.backbones.device import choose_device

    if given.symmetric:
        symmetrize(net)
    net.to(choose_device(given.device))
    f = ModelFeatures(net, layer=-1 if given.layer is None else given.layer)
    features = D4Features(f) if given.d4 else f
    return Subject(title, features, mean=mean, std=std, patch=f.patch, size=side, exact=exact)


def _saved(text: str, d4: bool, device: str) -> Subject:
    s = SavedSegmenter(text, device=device)
    return Subject(
        _Options(d4=d4).title(text),
        segmenter=D4Segmenter(s.probabilities) if d4 else s,
        channels=s.channels,
        normalize=s.normalize,
        clip=s.clip,
        names=tuple(s.names),
    )


def _called(text: str, place: str, name: str, d4: bool, patch: int | None, kind: Kind | None) -> Subject:
    found = named_callable(text, place, name)
    title = _Options(d4=d4).title(text)
    if isinstance(found, nn.Module):
        found = found.eval()
    patch = patch or getattr(found, "patch", None)
    if kind == "segmenter":
        if d4 and not callable(getattr(found, "probabilities", None)):
            raise OptionError(
                f"--d4 averages class probabilities over the poses, and {text} gives labels only; give it a method "
                "probabilities(image) -> (K, H, W), or leave --d4 out."
            )
        names = getattr(found, "names", None)
        s = D4Segmenter(found.probabilities) if d4 else found
        return Subject(title, segmenter=s, patch=patch, names=None if names is None else tuple(names))
    return Subject(title, D4Features(found, patch) if d4 else found, patch=patch)


def _refuse(text: str, what: str, options: dict[str, Any]) -> None:
    """Raise OptionError for an option that has no effect on a subject."""
    named = next((key for key, value in options.items() if value is not None), None)
    if named is not None:
        raise OptionError(f"{named} has no effect on {text}, which is taken for {what}; leave it out.")
