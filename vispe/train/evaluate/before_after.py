"""Before/after evaluation of a retrofit.

A retrofit is successful if position can no longer be decoded from the features *and* the features are
preserved. A student with constant features satisfies the first condition only, so both conditions are
measured: decodable position, the fixed pattern
and the response to rotated images; and similarity to the teacher, effective rank and linear segmentation. The teacher
with ablated positional channels, the target of the student, is included to show the effect of ablation alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from torch import Tensor, nn

from vispe.backbones.batching import FeatureFunction, features_of
from vispe.errors import InputError, OptionError, ShapeError, counted
from vispe.evaluate.probe.feature_sources import feature_function
from vispe.evaluate.probe.positional import positional_probe
from vispe.evaluate.rotation.evaluation import measure
from vispe.evaluate.rotation.metrics.fingerprint import fingerprint
from vispe.train.evaluate.mask_scores import FilterFeatures, score_masks
from vispe.train.evaluate.model_pair import SIDES, ModelPair, feature_similarity
from vispe.train.evaluate.probe_images import CentreWindows, Noise, Settings, Textures, probe_step
from vispe.train.evaluate.result import ModelMeasurements, RetrofitReport
from vispe.utils.interval import Interval
from vispe.utils.options import Options, PositiveInt, Seed

MAX_PROBED = 8
"""Largest number of noise images for the positional probe; the fingerprint uses all of them."""

MAX_ROTATED = 8
"""Largest number of images that are rotated and mirrored."""

Progress = Callable[[str, float], None]
"""Called with the current measurement and its completed fraction."""


@dataclass(frozen=True, kw_only=True)
class Extent(Options):
    """Extent of an evaluation.

    Attributes:
        noise: number of noise images.
        textures: number of synthetic homogeneous textures.
        step: the probe is fitted on one patch in step²; default 6 as in published tables, or less on grids of fewer
            than 32 x 36 patches.
        rotation: rotate and mirror up to `MAX_ROTATED` images.
        budget: labelled pixels per class.
        batch_size: images per forward pass.
        seed: seed of all random numbers.

    Raises:
        OptionError: too few noise images or textures.
    """

    noise: Annotated[int, Interval(least=2)] = 32
    textures: PositiveInt = 9
    step: PositiveInt | None = None
    rotation: bool = True
    budget: PositiveInt = 100
    batch_size: PositiveInt = 1
    seed: Seed = 0


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
    img_size: int | None = None,
    settings: Settings | None = None,
    subject: str = "retrofit",
    facts: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
    progress: Progress = lambda part, share: None,
    **extent: Any,
) -> RetrofitReport:
    """Evaluate a model before and after a retrofit.

    Images are not resized: the central window of at most `img_size` pixels per side is used, cropped to complete
    patches. Noise and textures are generated, so images are optional; images and masks add further measurements.

    Memory: one image and its maps for both models, and the textures; for segmentation, a few feature vectors per image.

    Args:
        before: the teacher, in evaluation mode: a model of timm or open_clip, or a function from images (b, 3, H, W)
            to maps (b, d, h, w).
        after: the student, with the same input and output shapes.
        images: (3, H, W) each, normalised; read lazily, several times.
        channels: channels of the teacher that were ablated in the student's target.
        truths: labels (H, W) of each image, 1..K and 0 for ignored pixels; they enable linear segmentation.
        n_classes: K; required with `truths`.
        classes: names of the classes.
        image_names: names of the images; default 'image 0' ...
        img_size: side of the windows, noise and textures in pixels; default the input size of the teacher.
        settings: patch size and normalisation; required for functions.
        subject: title.
        facts: JSON-serialisable entries that are stored with the settings.
        notes: notes that are stored with the results.
        progress: called before each part.
        **extent: attributes of `Extent`: noise, textures, step, rotation, budget, batch_size and seed.

    Returns:
        The measurements of teacher, ablated teacher and student.

    Raises:
        OptionError: too few noise images or textures, or channels that do not exist.
        InputError: names or masks that do not match the images.
        ShapeError: the models return maps of different shapes.
    """
    amount = Extent(**extent)
    input_settings = settings or Settings.of(before)
    patch_size = input_settings.patch_size
    side = (img_size or input_settings.size) // patch_size * patch_size
    _check(images, image_names, truths, n_classes)
    windows = CentreWindows(images, patch_size, side)
    noise = Noise(amount.noise, side, input_settings, amount.seed)
    textures = Textures(amount.textures, side, input_settings, amount.seed)
    pair = ModelPair(feature_function(before), feature_function(after), list(channels))
    width = _check_maps(pair, noise[0])

    kinds: dict[str, Sequence[Tensor]] = {"noise": noise[:MAX_PROBED], "textures": textures}
    content, names = textures, [f"texture {k}" for k in range(amount.textures)]
    if len(images):
        kinds["images"] = content = windows
        names = [f"image {k}" for k in range(len(images))] if image_names is None else list(image_names)
    step = amount.step or probe_step(side // patch_size)
    functions, sides = pair.functions(), {key: {} for key in SIDES}
    for key, function in functions.items():
        progress(f"position, {key}", 0.0)
        sides[key]["probes"] = {
            kind: positional_probe(function, images, step=step, generator=amount.seed)
            for kind, images in kinds.items()
        }
    for key in ("before", "after"):
        progress(f"fixed pattern, {key}", 0.0)
        sides[key]["fingerprint"] = fingerprint(functions[key], noise, batch_size=amount.batch_size)
        if amount.rotation:
            progress(f"rotated images, {key}", 0.0)
            options = {
                "metrics": ("d4",),
                "patch_size": patch_size,
                "batch_size": amount.batch_size,
                "seed": amount.seed,
            }
            titles = {"image_names": names[:MAX_ROTATED], "subject": f"{subject}, {key}"}
            sides[key]["rotation"] = measure(functions[key], content[:MAX_ROTATED], **options, **titles)

    def maps() -> Iterator[dict[str, Tensor]]:
        for number, image in enumerate(content):
            progress("similarity to the teacher", number / len(content))
            yield pair.maps(image)

    similarity = feature_similarity(maps())
    segmentation = None
    if truths is not None:
        segmentation = score_masks(
            {
                "before": pair.teacher,
                "after": pair.student,
                "filters": FilterFeatures(input_settings.mean, input_settings.std),
            },
            windows,
            CentreWindows(truths, patch_size, side),
            int(n_classes or 0),
            budget=amount.budget,
            seed=amount.seed,
            progress=lambda share: progress("segmentation", share),
        )
    remarks = [*notes, *dict.fromkeys(windows.notes)]
    if not len(images):
        remarks.append("No images: similarity and rank were measured on synthetic textures.")
    if amount.rotation and len(content) > MAX_ROTATED:
        remarks.append(
            f"The first {MAX_ROTATED} of {counted(len(content), 'image')} were rotated and mirrored."
        )
    return RetrofitReport(
        subject,
        **{key: ModelMeasurements(**sides[key], rank=similarity.rank[key]) for key in SIDES},
        channels=tuple(int(c) for c in channels),
        width=width,
        cosine=similarity.cosine,
        cosine_blanked=similarity.cosine_blanked,
        image_names=tuple(names),
        segmentation=segmentation,
        classes=tuple(classes or (f"class {k + 1}" for k in range(n_classes or 0))),
        settings={
            "size": side,
            "patch": patch_size,
            "noise": amount.noise,
            "textures": amount.textures,
            "probe_step": step,
            "budget": amount.budget,
            "seed": amount.seed,
            **(facts or {}),
        },
        notes=tuple(remarks),
    )


def _check(
    images: Sequence[Tensor], names: Sequence[str] | None, truths: Sequence[Any] | None, n_classes: int | None
) -> None:
    for word, values in (("names", names), ("masks", truths)):
        if values is not None and len(values) != len(images):
            raise InputError(
                f"evaluate: {word} must have one entry per image ({len(images)}), got {len(values)}."
            )
    if truths is not None and (n_classes is None or n_classes < 2):
        raise OptionError(f"evaluate: `truths` needs n_classes=2 or more, got {n_classes}.")


def _check_maps(pair: ModelPair, image: Tensor) -> int:
    """Return the number of channels.

    Raises:
        ShapeError: the maps of teacher and student differ in shape.
        OptionError: an ablated channel does not exist.
    """
    before, after = (tuple(features_of(f, image[None]).shape) for f in (pair.teacher, pair.student))
    if before != after:
        raise ShapeError(
            f"evaluate: teacher and student must return maps of equal shape, got {before} and {after}."
        )
    if wrong := [c for c in pair.channels if not 0 <= c < before[1]]:
        raise OptionError(f"evaluate: channels must be 0 to {before[1] - 1}, got {wrong}.")
    return before[1]
