"""What a retrofit took and what it left: the same measurements on a model before and after, side by side.

A retrofit is good when position can no longer be read from the features *and* the features still say what they said. A
student that gives every patch the same feature has the first alone, so both are measured: readable position, the fixed
pattern and the response to turned images on one side; likeness to the teacher, effective rank and linear segmentation
on the other. Beside the two models stands the teacher with its positional channels blanked, which is what the student
learnt: it shows what blanking alone would have done.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from vispe.backbones.batching import FeatureFunction, features_of
from vispe.errors import InputError, OptionError, ShapeError
from vispe.evaluate.probe.feature_sources import feature_function
from vispe.evaluate.probe.positional import positional_probe
from vispe.evaluate.rotation.evaluation import measure
from vispe.evaluate.rotation.metrics.fingerprint import fingerprint
from vispe.train.evaluate.mask_scores import FilterFeatures, score_masks
from vispe.train.evaluate.model_pair import SIDES, Pair, likeness
from vispe.train.evaluate.probe_images import Noise, Settings, Textures, Windows, probe_step
from vispe.train.evaluate.result import RetrofitReport, Side

PROBED = 8
"""Noise images that the positional probe looks at, at most; the fingerprint takes all of them."""

TURNED = 8
"""Images that are turned and mirrored, at most."""

Progress = Callable[[str, float], None]
"""Called with what is being measured, and the share of it that is done."""


@dataclass(frozen=True, kw_only=True)
class Extent:
    """How much is measured.

    Attributes:
        noise: noise images.
        textures: synthetic homogeneous textures.
        step: the probe fits one patch in step²; default 6 as in published tables, or less on grids of fewer than 32 x
            36 patches.
        rotation: turn and mirror up to `TURNED` images.
        budget: scribbled pixels of each class.
        batch_size: images that a model sees at once.
        seed: of all draws.

    Raises:
        OptionError: too few pictures.
    """

    noise: int = 32
    textures: int = 9
    step: int | None = None
    rotation: bool = True
    budget: int = 100
    batch_size: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.noise < 2 or self.textures < 1:
            raise OptionError(
                f"The evaluation needs noise=2 or more and textures=1 or more, got {self.noise} and {self.textures}."
            )


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
    subject: str = "retrofit",
    facts: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
    progress: Progress = lambda part, share: None,
    **extent: Any,
) -> RetrofitReport:
    """Measure a model before and after a retrofit.

    Images are never resized: of each, the middle window of at most `size` pixels a side is used, cut to whole patches.
    Noise and textures are drawn, so that a verdict needs no images; images and masks add what they alone can show.

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
        subject: title.
        facts: kept with the settings, JSON-able.
        notes: kept with the results.
        progress: called before each part.
        **extent: the attributes of `Extent`: noise, textures, step, rotation, budget, batch_size and seed.

    Raises:
        OptionError: too few pictures, or channels that the models do not have.
        InputError: names or masks that do not fit the images.
        ShapeError: the models give maps of different shapes.
    """
    much = Extent(**extent)
    known = settings or Settings.of(before)
    patch = known.patch
    side = (size or known.size) // patch * patch
    _check(images, image_names, truths, n_classes)
    windows = Windows(images, patch, side)
    noise = Noise(much.noise, side, known, much.seed)
    textures = Textures(much.textures, side, known, much.seed)
    pair = Pair(feature_function(before), feature_function(after), list(channels))
    width = _check_maps(pair, noise[0])

    kinds: dict[str, Sequence[Tensor]] = {"noise": noise[:PROBED], "textures": textures}
    kept, names = textures, [f"texture {k}" for k in range(much.textures)]
    if len(images):
        kinds["images"] = kept = windows
        names = [f"image {k}" for k in range(len(images))] if image_names is None else list(image_names)
    step = much.step or probe_step(side // patch)
    functions, sides = pair.functions(), {key: {} for key in SIDES}
    for key, function in functions.items():
        progress(f"position, {key}", 0.0)
        sides[key]["probes"] = {
            kind: positional_probe(function, pictures, step=step, generator=much.seed)
            for kind, pictures in kinds.items()
        }
    for key in ("before", "after"):
        progress(f"fixed pattern, {key}", 0.0)
        sides[key]["fingerprint"] = fingerprint(functions[key], noise, batch_size=much.batch_size)
        if much.rotation:
            progress(f"turned images, {key}", 0.0)
            how = {"metrics": ("d4",), "patch": patch, "batch_size": much.batch_size, "seed": much.seed}
            shown = {"image_names": names[:TURNED], "subject": f"{subject}, {key}"}
            sides[key]["rotation"] = measure(functions[key], kept[:TURNED], **how, **shown)

    def maps() -> Iterator[dict[str, Tensor]]:
        for number, image in enumerate(kept):
            progress("likeness to the teacher", number / len(kept))
            yield pair.maps(image)

    alike = likeness(maps())
    segmentation = None
    if truths is not None:
        segmentation = score_masks(
            {"before": pair.teacher, "after": pair.student, "filters": FilterFeatures(known.mean, known.std)},
            windows,
            Windows(truths, patch, side),
            int(n_classes or 0),
            budget=much.budget,
            seed=much.seed,
            progress=lambda share: progress("segmentation", share),
        )
    remarks = [*notes, *dict.fromkeys(windows.notes)]
    if not len(images):
        remarks.append("No images were given: likeness and rank were measured on synthetic textures.")
    if much.rotation and len(kept) > TURNED:
        remarks.append(f"The first {TURNED} of {len(kept)} images were turned and mirrored.")
    return RetrofitReport(
        subject,
        **{key: Side(**sides[key], rank=alike.rank[key]) for key in SIDES},
        channels=tuple(int(c) for c in channels),
        width=width,
        cosine=alike.cosine,
        cosine_blanked=alike.cosine_blanked,
        image_names=tuple(names),
        segmentation=segmentation,
        classes=tuple(classes or (f"class {k + 1}" for k in range(n_classes or 0))),
        settings={
            "size": side,
            "patch": patch,
            "noise": much.noise,
            "textures": much.textures,
            "probe_step": step,
            "budget": much.budget,
            "seed": much.seed,
            **(facts or {}),
        },
        notes=tuple(remarks),
    )


def _check(
    images: Sequence[Tensor], names: Sequence[str] | None, truths: Sequence[Any] | None, n_classes: int | None
) -> None:
    for word, given in (("names", names), ("masks", truths)):
        if given is not None and len(given) != len(images):
            raise InputError(
                f"There are {len(given)} {word} for {len(images)} images; give one for each, in order."
            )
    if truths is not None and (n_classes is None or n_classes < 2):
        raise OptionError(f"Masks need n_classes, 2 or more, got {n_classes}.")


def _check_maps(pair: Pair, image: Tensor) -> int:
    """Return the number of channels, the same before and after."""
    before, after = (tuple(features_of(f, image[None]).shape) for f in (pair.teacher, pair.student))
    if before != after:
        raise ShapeError(
            f"The model before gives maps {before} and the one after {after}; a retrofit keeps the width and the patch."
        )
    if wrong := [c for c in pair.channels if not 0 <= c < before[1]]:
        raise OptionError(f"The model has channels 0 to {before[1] - 1}, got blanked channels {wrong}.")
    return before[1]
