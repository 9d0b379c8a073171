"""Runner of `vispe rotate`: all applicable metrics of a model or segmenter, batch by batch, in one report."""

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import numpy as np
from torch import Tensor

from vispe.backbones.batching import FeatureFunction, Segmenter
from vispe.backbones.distributed import Processes
from vispe.backbones.model_access import reinitialized_copy
from vispe.backbones.vision_model import VisionModel
from vispe.errors import InputError, counted
from vispe.evaluate.rotation.distributed import Piece, filled
from vispe.evaluate.rotation.figures.examples import Shown, example_labels, example_maps, rescale_to_rgb
from vispe.evaluate.rotation.metrics import measure_step
from vispe.evaluate.rotation.metrics.fingerprint import ENOUGH, Fingerprint, fingerprint, random_crops
from vispe.evaluate.rotation.plan import GROUPS, OF_LABELS, ImageBatch, Measured, RotationPlan
from vispe.evaluate.rotation.plan_options import (
    all_angles,
    all_shifts,
    applicable_metrics,
    class_count,
    inferred_patch_size,
)
from vispe.evaluate.rotation.report import RotationReport
from vispe.evaluate.rotation.result import RotationResult, notes_on_scale
from vispe.utils.interval import Interval
from vispe.utils.options import PositiveInt, Seed, checked

MOST_WINDOWS = 64
"""Max number of images of the fingerprint."""

Progress = Callable[[str, float], None]
"""Called with a description of the current metric, and the completed fraction of the work of this process."""


@checked
def measure(
    f: FeatureFunction | None,
    images: Sequence[Tensor],
    *,
    segmenter: Segmenter | None = None,
    truths: Sequence[Any] | None = None,
    n_classes: PositiveInt | None = None,
    names: Sequence[str] | None = None,
    image_names: Sequence[str] | None = None,
    metrics: Sequence[str] | None = None,
    quick: bool = False,
    angles: Sequence[float] | None = None,
    patch_size: PositiveInt | None = None,
    size: PositiveInt | None = None,
    exact: bool = False,
    batch_size: PositiveInt = 1,
    clusters: Annotated[int, Interval(least=2)] = 3,
    budget: PositiveInt = 100,
    seed: Seed = 0,
    subject: str = "",
    show: Shown | None = None,
    settings: dict[str, Any] | None = None,
    notes: Iterable[str] = (),
    processes: Processes | None = None,
    progress: Progress | None = None,
) -> RotationReport:
    """Measure how features, segmentations or both change when images are rotated, reflected and shifted.

    Images are never resized: each is centre-cropped to a multiple of the patch size, once, before any pose; crops are
    listed in the notes. For features with truths, a segmenter is trained by logistic regression on random pixels of
    each image's own truth (`budget` per class), in the original pose and, as a second set of records, in all eight
    poses.

    Memory: `batch_size` images and their maps at two poses in float64, for the layer curve the maps of all blocks; a
    copy of the model with random weights. Images are loaded lazily if `images` does so. Under `torchrun` every process
    takes a consecutive part of the images and returns the same report.

    Args:
        f: images (b, c, H, W) -> maps (b, d, h, w), preferably a `VisionModel`; None for a segmenter only.
        images: (c, H, W) each, floating point, normalised for f; iterated more than once.
        segmenter: image (c, H, W) -> labels (H, W), 1 to K and 0 for no data; None trains one if there are truths.
        truths: labels (H, W) of each image, 1 to K and 0 for ignored pixels.
        n_classes: K; by default that of `segmenter`, the number of `names`, or the maximum of `truths`.
        names: names of the classes; 'class 1' ... by default.
        image_names: 'image 0' ... by default.
        metrics: names of `vispe.evaluate.rotation.plan.GROUPS`; all applicable ones by default.
        quick: fewer metrics and angles, and, without `size`, a window of 14 patches per side.
        angles: degrees, counter-clockwise; every 15 by default.
        patch_size: patch size in pixels; by default that of f, otherwise inferred from its first map.
        size: max side in pixels of the central window of each image; the full image by default.
        exact: f accepts only images of `size`.
        batch_size: batch size.
        clusters: number of clusters of features.
        budget: training pixels per class.
        seed: seed of all random numbers.
        subject: title of the report.
        show: converts an image (c, H, W) to RGB (H, W, 3) in [0, 1]; rescales its range by default.
        settings: JSON values that are stored with the results.
        notes: notes that are stored with the results; read at the end, so that notes may be appended during
            the run.
        processes: rank and number of processes; a single process by default.
        progress: called with a description and the completed fraction.

    Raises:
        OptionError: neither features nor segmenter, a metric that is not applicable, or a number out of range.
        InputError: images, truths or names do not match.
        ShapeError: an image is not (c, H, W), or maps or labels have the wrong shape.
        UnsupportedHost: the patch embedding of the model is unknown, and a metric needs it.
        UnknownName: an unknown metric.

    Example:
        >>> import torch
        >>> report = measure(torch.nn.AvgPool2d(4), torch.rand(2, 3, 32, 32), metrics=["d4"], patch_size=4)
        >>> report.result.find("D4", "error").summary().mean < 1e-6
        True
    """
    processes = processes or Processes()
    if len(images) == 0:
        raise InputError("measure: no images, got an empty sequence. Pass at least one image.")
    image_names = [f"image {k}" for k in range(len(images))] if image_names is None else list(image_names)
    for word, values in (("image_names", image_names), ("truths", truths)):
        if values is not None and len(values) != len(images):
            raise InputError(
                f"measure: `{word}` must have one entry per image, got {len(values)} for "
                f"{counted(len(images), 'image')}. Pass one for each, in order."
            )
    groups, skipped = applicable_metrics(metrics, quick, f, segmenter, truths)
    if f is not None:
        patch_size = patch_size or getattr(f, "patch_size", None) or inferred_patch_size(f, images[0], size)
    size = 14 * (patch_size or 16) if quick and size is None else size
    n_classes = class_count(n_classes, names, segmenter, truths)
    names = [f"class {k + 1}" for k in range(n_classes or 0)] if names is None else list(names)
    plan = RotationPlan(
        groups=groups,
        angles=all_angles(angles, quick),
        patch_size=patch_size,
        size=size,
        exact=exact,
        shifts=all_shifts(images[0], patch_size, size, quick),
        n_classes=n_classes,
        names=tuple(names),
        batch_size=batch_size,
        clusters=clusters,
        budget=budget,
        phases=3 if quick else 8,
        seed=seed,
    )
    random_copy = (
        reinitialized_copy(f.model, seed + 1) if isinstance(f, VisionModel) and "d4" in groups else None
    )
    measured = Measured(f, segmenter, random_copy)
    pieces, remarks, pattern, examples, error = {}, [], None, None, None
    try:
        pieces, remarks = _steps(measured, plan, images, truths, processes, progress)
        # in the process with the fewest images
        if f is not None and "fingerprint" in groups and processes.rank == processes.count - 1:
            pattern, more = _fingerprint(f, plan, images)
            remarks += more
        if processes.rank == 0:
            examples = _examples(measured, plan, images, truths, show or rescale_to_rgb)
    except Exception as raised:  # all processes raise the error, as they would otherwise wait forever
        error = raised
    parts = processes.joined((pieces, remarks, pattern, examples, list(notes)), error)
    together: dict[str, list[Piece]] = {}
    for part, *_ in parts:
        for key, more in part.items():
            together.setdefault(key, []).extend(more)
    rows = tuple(row for joined in together.values() for row in filled(joined))
    every_note = [*skipped, *(n for s in parts for n in s[4]), *(n for s in parts for n in s[1])]
    result = RotationResult(
        rows,
        tuple(image_names),
        {**(settings or {}), **plan.to_dict(), "quick": quick},
        tuple(dict.fromkeys([*every_note, *notes_on_scale(rows)])),
    )
    return RotationReport(subject, result, parts[-1][2], *parts[0][3], tuple(names))


def _steps(
    measured: Measured,
    plan: RotationPlan,
    images: Sequence[Tensor],
    truths: Sequence[Any] | None,
    processes: Processes,
    progress: Progress | None,
) -> tuple[dict[str, list[Piece]], list[str]]:
    """Measure the images of this process batch by batch; pieces do not depend on the number of processes."""
    starts = range(0, len(images), plan.batch_size)
    batch_numbers = processes.share(len(starts))
    groups = [g for g in plan.groups if g != "fingerprint"]
    progress = progress or (lambda word, part: None)
    answers: dict[str, list[Piece]] = {}
    notes: list[str] = []
    for done, start in enumerate(starts[k] for k in batch_numbers):
        step = ImageBatch.of(images, truths, range(start, min(start + plan.batch_size, len(images))), plan)
        for k, group in enumerate(groups):
            progress(GROUPS[group], (done + k / len(groups)) / len(batch_numbers))
            for key, pieces in measure_step(measured, plan, step, group).items():
                answers.setdefault(f"{group}: {key}", []).extend(pieces)
        notes += step.notes
    progress("", 1.0)
    return answers, notes


def _fingerprint(
    f: FeatureFunction, plan: RotationPlan, images: Sequence[Tensor]
) -> tuple[Fingerprint | None, list[str]]:
    """Return the fingerprint of random windows of the images, and notes."""
    patch_size = plan.patch_size or 1
    numbers = np.unique(np.linspace(0, len(images) - 1, min(len(images), MOST_WINDOWS)).round().astype(int))
    shapes = np.array([images[int(n)].shape[-2:] for n in numbers])
    each = -(-ENOUGH // len(numbers))
    low = shapes.min(0)
    if plan.size is not None:
        low = np.minimum(low, plan.size)
    if each > 1 and not plan.exact:
        # smaller windows allow several positions per image
        low = np.minimum(low, np.maximum(3 * low // 4, 3 * patch_size))
    h, w = (int(n) // patch_size * patch_size for n in low)
    if min(h, w) < patch_size or (plan.exact and {h, w} != {plan.size}):
        return None, ["The images are too small for a fingerprint."]
    if (shapes == (h, w)).all():
        each = 1
    if len(numbers) * each < 2:
        return None, [
            "A fingerprint needs several images, or one that is larger than the input size of the model."
        ]
    windows = random_crops((images[int(n)] for n in numbers), (h, w), each, seed=plan.seed)
    pattern = fingerprint(f, windows, batch_size=plan.batch_size)
    return pattern, [
        f"The fingerprint is the mean of {counted(len(numbers) * each, 'window')} of {h} x {w} px."
    ]


def _examples(
    measured: Measured,
    plan: RotationPlan,
    images: Sequence[Tensor],
    truths: Sequence[Any] | None,
    show: Shown,
) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the first image, its feature maps and its labels in all poses, for figures."""
    step = ImageBatch.of(images, truths, range(1), plan)
    image = step.fitted[0]
    poses = {} if measured.f is None else example_maps(measured.f, image)
    labels = {} if set(plan.groups).isdisjoint(OF_LABELS) else example_labels(measured, plan, step)
    return show(image), poses, labels
