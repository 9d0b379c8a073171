"""Equivariance of feature maps over D4: transform the image, undo the transform on the features, compare.

Nothing is interpolated, so 0 is exact. A model breaks the symmetry by its position code and by its patch kernel.
`equivariance` measures both together on the transformed image; `position_equivariance` permutes the tokens after the
patch embedding, which isolates the position code.

Memory: one batch of images, its maps at the identity and at one pose, and one sum of maps.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from vispe.backbones.batching import FeatureFunction, checked_maps, features_of
from vispe.backbones.vision_model import VisionModel
from vispe.errors import OptionError, ShapeError
from vispe.evaluate.rotation.comparison import Pair, compared, label_of, poses_of, shuffled
from vispe.evaluate.rotation.feature_similarity import MEASURES, InvariantShare, measures_named
from vispe.evaluate.rotation.record_key import FULL, IDENTICAL, POSITION_CODE, SHUFFLED, Key
from vispe.evaluate.rotation.records import Measurement
from vispe.images.symmetry.d4 import D4, Element

ALL = (*MEASURES, "invariant_share")


def equivariance(
    f: FeatureFunction,
    images: Iterable[Tensor],
    *,
    elements: Sequence[Element] = D4,
    measures: Sequence[str] = ALL,
    batch_size: int = 1,
    controls: bool = True,
    margin: int = 0,
    part: str = FULL,
    seed: int = 0,
    first: int = 0,
) -> tuple[Measurement, ...]:
    """Measure the equivariance of f to rotations by 90 degrees and reflections.

    Args:
        f: images (b, c, H, W) -> maps (b, d, h, w). Both sides of the image must be multiples of the patch size
            (`fit_to_patches`), so that the grids of all poses coincide.
        images: (c, H, W) each.
        elements: poses; the identity is excluded from records and means.
        measures: names in `vispe.evaluate.rotation.feature_similarity.MEASURES`, and 'invariant_share'.
        batch_size: max number of images of equal size per batch.
        controls: add the records 'identity' (f evaluated twice: must be 0) and 'shuffled' (shuffled tokens: chance).
        margin: tokens excluded at the border, for models with special border handling.
        part: part of the records, see `Measurement`.
        seed: random seed of the shuffled tokens.
        first: index of the first image in a larger list; random numbers depend on the index of the image.

    Returns:
        For each measure a record for each pose, and one for the mean over poses, 'D4' for all of them; the invariant
        share has only the latter. 'D4 worst' is the error of the worst pose of each image.

    Raises:
        OptionError: a measure is unknown, there is no pose besides the identity, or `batch_size` is below 1.
        InputError: there are no images, or an image or a map has values that are not finite.
        ShapeError: an image is not (c, H, W), or maps have different shapes at different poses.

    Example:
        >>> rows = equivariance(torch.nn.AvgPool2d(4), torch.rand(2, 3, 16, 16), controls=False)
        >>> [(row.transform, row.metric, row.summary().mean < 1e-6) for row in rows][:2]
        [('D4', 'error', True), ('D4 worst', 'error', True)]
    """

    def posed(batch: Tensor, g: Element) -> Tensor:
        return features_of(f, g.apply(batch))

    known = (seed, first) if controls else None
    return _measured(f, posed, images, elements, measures, batch_size, margin, part, known)


def position_equivariance(
    f: VisionModel,
    images: Iterable[Tensor],
    *,
    elements: Sequence[Element] = D4,
    measures: Sequence[str] = ("error", "error_uncentred"),
    batch_size: int = 1,
    margin: int = 0,
    part: str = POSITION_CODE,
) -> tuple[Measurement, ...]:
    """Measure the equivariance of the position code alone, by permuting the tokens after the patch embedding.

    About 1e-6 in float32 for every isotropic bias and without a position code; the arguments are those of
    `equivariance`.

    Raises:
        OptionError: f is not a `VisionModel`.
        UnsupportedHost: the patch embedding of the model is unknown.
        InputError: there are no images, or an image or a map has values that are not finite.
        ShapeError: an image is not (c, H, W).

    Example:
        >>> import timm
        >>> model = timm.create_model("test_vit", pos_embed="alibi2d", num_classes=0).eval()
        >>> rows = position_equivariance(VisionModel(model), torch.rand(1, 3, 160, 160), elements=D4[:2])
        >>> rows[0].transform, rows[0].metric, rows[0].summary().mean < 1e-4
        ('mean of 1 pose', 'error', True)
    """
    if not isinstance(f, VisionModel):
        raise OptionError(
            f"position_equivariance: f must be a ModelFeatures, got {type(f).__name__}. Pass ModelFeatures(model)."
        )

    def posed(batch: Tensor, g: Element) -> Tensor:
        with torch.no_grad():
            return checked_maps(f.permuted(batch, g), len(batch))

    return _measured(f, posed, images, elements, measures, batch_size, margin, part)


def raw_intensity(images: Tensor) -> Tensor:
    """Return the images unchanged, an exactly equivariant feature function, (b, c, H, W) -> (b, c, H, W).

    Example:
        >>> raw_intensity(torch.ones(1, 1, 2, 2)).shape
        torch.Size([1, 1, 2, 2])
    """
    return images


def orbit_average(f: FeatureFunction, elements: Sequence[Element] = D4) -> FeatureFunction:
    """Return f averaged over poses with the pose undone: exactly equivariant, with one forward pass per pose.

    Args:
        f: feature function.
        elements: poses; all of D4 makes the mean equivariant under D4.

    Raises:
        ZeroDivisionError: there are no poses.

    Example:
        >>> averaged = orbit_average(lambda images: images * torch.arange(3.0))
        >>> averaged(torch.ones(1, 1, 3, 3))[0, 0, 0]
        tensor([1., 1., 1.])
    """

    def averaged(images: Tensor) -> Tensor:
        return sum(g.undo(f(g.apply(images))) for g in elements) / len(elements)

    patch_size = getattr(f, "patch_size", None)
    if patch_size is not None:
        averaged.patch_size = patch_size
    return averaged


def _measured(
    f: FeatureFunction,
    posed: Callable[[Tensor, Element], Tensor],
    images: Iterable[Tensor],
    elements: Sequence[Element],
    measures: Sequence[str],
    batch_size: int,
    margin: int,
    part: str,
    controls: tuple[int, int] | None = None,
) -> tuple[Measurement, ...]:
    """Compare maps of transformed images with the original ones; `controls` are seed and index of the first image."""
    scores = measures_named(measures)
    poses = poses_of(elements, "Equivariance")
    shares: list[float] = []
    number = 0

    def pairs(batch: Tensor) -> Iterator[Pair]:
        nonlocal number
        first = _inner(features_of(f, batch), margin)
        sums = [InvariantShare(one) for one in first] if "invariant_share" in measures else []
        for g in poses:
            back = _inner(g.undo(posed(batch, g)), margin)
            yield g.name, first, back
            for total, one in zip(sums, back, strict=False):
                total.add(one)
        shares.extend(total.value() for total in sums)
        if controls is not None:
            yield IDENTICAL, first, _inner(features_of(f, batch), margin)
            # random numbers depend on the index of the image, not on the batch
            seed, at = controls[0], controls[1] + number
            draws = (np.random.default_rng([seed, at + k]) for k in range(len(batch)))
            yield SHUFFLED, first, (shuffled(one, rng) for one, rng in zip(first, draws, strict=True))
        number += len(batch)

    values = compared(images, pairs, scores, batch_size)
    names, label = [g.name for g in poses], label_of(poses)
    rows = []
    for m in scores:
        over = np.array([values[name, m] for name in names])
        rows.append(Measurement.of(Key(label, m, part), over.mean(0)))
        if m == "error":
            rows.append(Measurement.of(Key(f"{label} worst", m, part), over.max(0)))
    if shares:
        rows.append(Measurement.of(Key(label, "invariant_share", part), shares))
    rows += [Measurement.of(Key(name, m, part), values[name, m]) for m in scores for name in names]
    known = (IDENTICAL, SHUFFLED) if controls is not None else ()
    rows += [Measurement.of(Key(c, m, part), values[c, m], control=True) for m in scores for c in known]
    return tuple(rows)


def _inner(maps: Tensor, margin: int) -> Tensor:
    """Return maps (b, d, h, w) without `margin` tokens at the border."""
    h, w = maps.shape[-2:]
    if margin < 0 or 2 * margin >= min(h, w):
        raise ShapeError(
            f"equivariance: margin must be at least 0 and below half of {h}x{w} tokens, got {margin}. Use another one."
        )
    return maps[..., margin : h - margin, margin : w - margin]
