"""What a retrofit took and what it left: the same measurements on a model before and after, side by side.

A retrofit is good when position can no longer be read from the features *and* the features still say what they said. A
student that gives every patch the same feature has the first alone, so both are measured: readable position, the fixed
pattern and the response to turned images on one side; likeness to the teacher, effective rank and linear segmentation
on the other. Beside the two models stands the teacher with its positional channels blanked, which is what the student
was taught: it shows what blanking alone would have done.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from vispe.backbones.batches import FeatureFunction, features_of
from vispe.errors import InputError, OptionError, ShapeError
from vispe.evaluate.probe.averages import effective_rank, mean_cosine
from vispe.evaluate.probe.debias import blank_channels
from vispe.evaluate.probe.positional import ProbeResult, positional_probe
from vispe.evaluate.probe.sources import feature_function
from vispe.evaluate.rotation.measure import measure
from vispe.evaluate.rotation.questions.fingerprint import fingerprint
from vispe.train.evaluate.masks import FilterFeatures, score_masks
from vispe.train.evaluate.pictures import Noise, Settings, Textures, Windows, probe_step
from vispe.train.evaluate.result import RetrofitReport, Side

PROBED = 8
"""Noise images that the positional probe looks at, at most; the fingerprint takes all of them."""

TURNED = 8
"""Images that are turned and mirrored, at most."""

Progress = Callable[[str, float], None]
"""Is told what is being measured, and the share of it that is done."""


def evaluate(
    before: nn.Module | FeatureFunction,
    after: nn.Module | FeatureFunction,
    images: Sequence[Tensor] = (),
    *,
    channels: Sequence[int] = (),
    truths: Sequence[Any] | None = None,
    n_classes: int | None = None,
    classes: Sequence[str] | None = None,
    image_names: Sequence[str] | None = None,
    size: int | None = None,
    settings: Settings | None = None,
    noise: int = 32,
    textures: int = 9,
    step: int | None = None,
    rotation: bool = True,
    budget: int = 100,
    batch_size: int = 1,
    seed: int = 0,
    subject: str = "retrofit",
    facts: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
    progress: Progress = lambda what, share: None,
) -> RetrofitReport:
    """Measure a model before and after a retrofit.

    Images are never resized: of each, the middle window of at most `size` pixels a side is used, cut to whole patches.
    Noise and textures are drawn, so that a verdict needs no images; images and masks add what they alone can tell.

    Memory: one image and its maps for both models, and the textures; for segmentation, a few feature vectors of each
    image.

    Args:
        before: the teacher, in evaluation mode: a model of timm or open_clip, or a function from images (b, 3, H, W)
            to maps (b, d, h, w).
        after: the student; it takes the same images and gives maps of the same shape.
        images: (3, H, W) each, normalised; read when they are asked for, several times.
        channels: channels of the teacher that were blanked in the student's target.
        truths: labels (H, W) of each image, 1..K and 0 for what does not count: adds linear segmentation.
        n_classes: K; needed with truths.
        classes: their names.
        image_names: default 'image 0' ...
        size: side of the windows, of noise and of textures in pixels; default the size that the teacher was built for.
        settings: patch and normalisation, for functions; known for models.
        noise: noise images.
        textures: synthetic homogeneous textures.
        step: the probe fits one patch in step²; default 6 as in published tables, or less on grids of fewer than 32 x
            36 patches.
        rotation: turn and mirror up to `TURNED` images.
        budget: scribbled pixels of each class.
        batch_size: images that a model sees at once.
        seed: of all draws.
        subject: title.
        facts: kept with the settings, JSON-able.
        notes: kept with the results.
        progress: hears what is done.

    Raises:
        OptionError: too few pictures, or channels that the models do not have.
        InputError: names or masks that do not fit the images.
        ShapeError: the models give maps of different shapes.
    """
    if noise < 2 or textures < 1:
        raise OptionError(
            f"The evaluation needs noise=2 or more and textures=1 or more, got {noise} and {textures}."
        )
    f, g = feature_function(before), feature_function(after)
    known = settings or Settings.of(before)
    side = (size or known.size) // known.patch * known.patch
    windows = Windows(images, known.patch, side)
    _check(images, image_names, truths, n_classes)
    names = [f"image {k}" for k in range(len(images))] if image_names is None else list(image_names)
    made = Noise(noise, side, known, seed), Textures(textures, side, known, seed)
    width = _check_maps(f, g, made[0][0], channels)
    kept: Sequence[Tensor] = windows if len(images) else made[1]
    kept_names = names if len(images) else [f"texture {k}" for k in range(textures)]

    def blank(maps: Tensor) -> Tensor:
        return blank_channels(f(maps), list(channels)) if len(channels) else f(maps)

    probed = {"noise": made[0][:PROBED], "textures": made[1]} | ({"images": windows} if len(images) else {})
    asked = step or probe_step(side // known.patch)
    probes: dict[str, dict[str, ProbeResult]] = {}
    for what, function in (("before", f), ("blanked", blank), ("after", g)):
        progress(f"position, {what}", 0.0)
        probes[what] = {
            name: positional_probe(function, found, step=asked, generator=seed)
            for name, found in probed.items()
        }
    prints, turned = {}, {}
    for what, function in (("before", f), ("after", g)):
        progress(f"fixed pattern, {what}", 0.0)
        prints[what] = fingerprint(function, made[0], batch_size=batch_size)
        if rotation:
            progress(f"turned images, {what}", 0.0)
            turned[what] = measure(
                function,
                kept[:TURNED],
                metrics=("d4",),
                image_names=kept_names[:TURNED],
                patch=known.patch,
                batch_size=batch_size,
                seed=seed,
                subject=f"{subject}, {what}",
            )
    rank: dict[str, list[float]] = {"before": [], "blanked": [], "after": []}
    cosine, cosine_blanked = [], []
    for number, image in enumerate(kept):
        progress("likeness to the teacher", number / len(kept))
        own, new = features_of(f, image[None])[0].cpu(), features_of(g, image[None])[0].cpu()
        target = blank_channels(own, list(channels), axis=0) if len(channels) else own
        for what, maps in (("before", own), ("blanked", target), ("after", new)):
            rank[what].append(effective_rank(maps))
        cosine.append(mean_cosine(own, new))
        cosine_blanked.append(mean_cosine(target, new))
    masks = None
    if truths is not None:
        sources = {"before": f, "after": g, "filters": FilterFeatures(known.mean, known.std)}
        masks = score_masks(
            sources,
            windows,
            Windows(truths, known.patch, side),
            int(n_classes or 0),
            budget=budget,
            seed=seed,
            progress=lambda share: progress("segmentation", share),
        )

    def found(what: str) -> Side:
        return Side(probes[what], prints.get(what), turned.get(what), np.array(rank[what]))

    said = [*notes, *dict.fromkeys(windows.notes)]
    if not len(images):
        said.append("No images were given: likeness and rank were measured on synthetic textures.")
    if rotation and len(kept) > TURNED:
        said.append(f"The first {TURNED} of {len(kept)} images were turned and mirrored.")
    return RetrofitReport(
        subject,
        found("before"),
        found("blanked"),
        found("after"),
        tuple(int(c) for c in channels),
        width,
        np.array(cosine),
        np.array(cosine_blanked),
        tuple(kept_names),
        masks,
        tuple(classes or (f"class {k + 1}" for k in range(n_classes or 0))),
        {
            "size": side,
            "patch": known.patch,
            "noise": noise,
            "textures": textures,
            "probe_step": asked,
            "budget": budget,
            "seed": seed,
            **(facts or {}),
        },
        tuple(said),
    )


def _check(
    images: Sequence[Tensor],
    names: Sequence[str] | None,
    truths: Sequence[Any] | None,
    n_classes: int | None,
) -> None:
    for what, given in (("names", names), ("masks", truths)):
        if given is not None and len(given) != len(images):
            raise InputError(
                f"There are {len(given)} {what} for {len(images)} images; give one for each, in order."
            )
    if truths is not None and (n_classes is None or n_classes < 2):
        raise OptionError(f"Masks need n_classes, 2 or more, got {n_classes}.")


def _check_maps(f: FeatureFunction, g: FeatureFunction, image: Tensor, channels: Sequence[int]) -> int:
    """Return the number of channels, the same before and after."""
    first, second = (tuple(features_of(one, image[None]).shape) for one in (f, g))
    if first != second:
        raise ShapeError(
            f"The model before gives maps {first} and the one after {second}; a retrofit keeps the width and the patch."
        )
    if wrong := [c for c in channels if not 0 <= c < first[1]]:
        raise OptionError(f"The model has channels 0 to {first[1] - 1}, got blanked channels {wrong}.")
    return first[1]
