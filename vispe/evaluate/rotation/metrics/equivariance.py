"""Equivariance of feature maps over D4: turn and mirror the image, bring the features back, compare.

Nothing is interpolated, so 0 is exact. A model breaks the symmetry in two places: its position code and its patch
kernel. `equivariance` measures both together on the moved image; `position_equivariance` moves the tokens after the
patch embedding and so measures the position code alone.

Memory: one batch of images, its maps at the identity and at one pose, and one sum of maps; results are numbers only.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from vispe.backbones.batching import FeatureFunction, checked_maps, features_of
from vispe.backbones.vision_model import ModelFeatures
from vispe.errors import OptionError, ShapeError
from vispe.evaluate.rotation.comparison import (
    MEASURES,
    InvariantShare,
    Pair,
    compared,
    label_of,
    measures_named,
    poses_of,
    shuffled,
)
from vispe.evaluate.rotation.record_key import FULL, IDENTICAL, POSITION_CODE, SHUFFLED, Key
from vispe.evaluate.rotation.records import Measurement
from vispe.symmetry.d4 import D4, Element

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
    """Measure f on turned and mirrored images.

    Args:
        f: images (b, c, H, W) -> maps (b, d, h, w). Both sides of the image must be multiples of the patch
            (`fit_to_patches`), or the grids of two poses are different places.
        images: (c, H, W) each.
        elements: poses; the identity is left out of rows and means.
        measures: of `vispe.evaluate.rotation.comparison.MEASURES`, and 'invariant_share'.
        batch_size: images of equal size that f sees at once.
        controls: add the rows 'identity' (f a second time: must be 0) and 'shuffled' (tokens in random order: chance).
        margin: tokens along the frame that do not count, for models that treat borders in their own way.
        part: name of the rows.
        seed: of the shuffled tokens.
        first: number of the first image in a larger list; every image has its own draw.

    Returns:
        For each measure a row for each pose, and one for their mean over poses, 'D4' when all are there; the
        invariant share has only the latter. 'D4 worst' is the error of each image's worst pose.
    """

    def posed(batch: Tensor, g: Element) -> Tensor:
        return features_of(f, g.apply(batch))

    known = (seed, first) if controls else None
    return _measured(f, posed, images, elements, measures, batch_size, margin, part, known)


def position_equivariance(
    f: ModelFeatures,
    images: Iterable[Tensor],
    *,
    elements: Sequence[Element] = D4,
    measures: Sequence[str] = ("error", "error_uncentred"),
    batch_size: int = 1,
    margin: int = 0,
    part: str = POSITION_CODE,
) -> tuple[Measurement, ...]:
    """Measure what the position code does, by moving the tokens after the patch embedding.

    About 1e-6 in float32 for every isotropic bias and for no position code at all; the arguments are those of
    `equivariance`.

    Raises:
        UnsupportedHost: the model's patch embedding is not known.
    """
    if not isinstance(f, ModelFeatures):
        raise OptionError(
            f"The position code can be measured in a model only, got {type(f).__name__}; give ModelFeatures(model)."
        )

    def posed(batch: Tensor, g: Element) -> Tensor:
        with torch.no_grad():
            return checked_maps(f.permuted(batch, g), len(batch))

    return _measured(f, posed, images, elements, measures, batch_size, margin, part)


def raw_intensity(images: Tensor) -> Tensor:
    """Return the images themselves, the feature function that is equivariant exactly: (b, c, H, W) -> same.

    >>> raw_intensity(torch.ones(1, 1, 2, 2)).shape
    torch.Size([1, 1, 2, 2])
    """
    return images


def orbit_average(f: FeatureFunction, elements: Sequence[Element] = D4) -> FeatureFunction:
    """Return f averaged over poses, features brought back: equivariant exactly, at the price of one run for each pose.

    Args:
        f: feature function.
        elements: poses; all of D4 makes the mean equivariant under D4.

    >>> averaged = orbit_average(lambda images: images * torch.arange(3.0))
    >>> averaged(torch.ones(1, 1, 3, 3))[0, 0, 0]
    tensor([1., 1., 1.])
    """

    def averaged(images: Tensor) -> Tensor:
        return sum(g.undo(f(g.apply(images))) for g in elements) / len(elements)

    patch = getattr(f, "patch", None)
    if patch is not None:
        averaged.patch = patch
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
    """Compare maps of posed images, brought back, with those at rest; `controls` are seed and number of the first."""
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
            # every image has its own draw, whatever the batches
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
    """Return maps (b, d, h, w) without `margin` tokens along the frame."""
    h, w = maps.shape[-2:]
    if margin < 0 or 2 * margin >= min(h, w):
        raise ShapeError(
            f"margin={margin} must be 0 or more tokens and leave some of a map of {h}x{w} tokens; choose another."
        )
    return maps[..., margin : h - margin, margin : w - margin]
