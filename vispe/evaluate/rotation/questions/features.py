"""Equivariance of feature maps over D4: turn and mirror the image, bring the features back, compare.

Nothing is interpolated, so 0 is exact. A model breaks the symmetry in two places: its position code and its patch
kernel. `equivariance` measures both together on the moved image; `position_equivariance` moves the tokens after the
patch embedding and so measures the position code alone.

Memory: one batch of images, its maps at the identity and at one pose, and one sum of maps; results are numbers only.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from vispe.backbones.batches import FeatureFunction, batches, checked_maps, features_of
from vispe.backbones.maps import ModelFeatures
from vispe.errors import OptionError, ShapeError
from vispe.evaluate.rotation.compare import MEASURES, InvariantShare, check_measures
from vispe.evaluate.rotation.rows import Measurement
from vispe.symmetry.d4 import D4, IDENTITY, Element

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
    part: str = "full",
    seed: int = 0,
    first: int = 0,
) -> tuple[Measurement, ...]:
    """Measure f on turned and mirrored images.

    Args:
        f: images (b, c, H, W) -> maps (b, d, h, w). Both sides of the image must be multiples of the patch
            (`fit_to_patches`), or the grids of two poses are different places.
        images: (c, H, W) each.
        elements: poses; the identity is left out of rows and means.
        measures: of `vispe.evaluate.rotation.compare.MEASURES`, and 'invariant_share'.
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

    return _measured(f, posed, images, elements, measures, batch_size, controls, margin, part, [seed, first])


def position_equivariance(
    f: ModelFeatures,
    images: Iterable[Tensor],
    *,
    elements: Sequence[Element] = D4,
    measures: Sequence[str] = ("error", "error_uncentred"),
    batch_size: int = 1,
    margin: int = 0,
    part: str = "position code",
) -> tuple[Measurement, ...]:
    """Measure what the position code does, by moving the tokens after the patch embedding.

    About 1e-6 in float32 for every isotropic bias and for no position code at all; the arguments are those of
    `equivariance`.

    Raises:
        UnsupportedHost: the model's patch embedding cannot be told apart.
    """
    if not isinstance(f, ModelFeatures):
        raise OptionError(
            f"The position code can be told apart in a model only, got {type(f).__name__}; give ModelFeatures(model)."
        )

    def posed(batch: Tensor, g: Element) -> Tensor:
        with torch.no_grad():
            return checked_maps(f.permuted(batch, g), len(batch))

    return _measured(f, posed, images, elements, measures, batch_size, False, margin, part, [0, 0])


def raw_intensity(images: Tensor) -> Tensor:
    """Return the images themselves, the feature function that is equivariant exactly: (b, c, H, W) -> same."""
    return images


def orbit_average(f: FeatureFunction, elements: Sequence[Element] = D4) -> FeatureFunction:
    """Return f averaged over poses, features brought back: equivariant exactly, at the price of one run for each pose.

    Args:
        f: feature function.
        elements: poses; all of D4 makes the mean equivariant under D4.
    """

    def averaged(images: Tensor) -> Tensor:
        total = elements[0].undo(f(elements[0].apply(images)))
        for g in elements[1:]:
            total = total + g.undo(f(g.apply(images)))
        return total / len(elements)

    patch = getattr(f, "patch", None)
    if patch is not None:
        averaged.patch = patch
    return averaged


def label_of(elements: Sequence[Element]) -> str:
    """Return the name of the mean over poses: 'D4' for all of them."""
    kept = set(elements) - {IDENTITY}
    return "D4" if kept == set(D4) - {IDENTITY} else f"mean of {len(kept)} poses"


def _measured(
    f: FeatureFunction,
    posed: Callable[[Tensor, Element], Tensor],
    images: Iterable[Tensor],
    elements: Sequence[Element],
    measures: Sequence[str],
    batch_size: int,
    controls: bool,
    margin: int,
    part: str,
    seed: list[int],
) -> tuple[Measurement, ...]:
    check_measures(measures)
    poses = [g for g in dict.fromkeys(elements) if g != IDENTITY]
    if not poses:
        raise OptionError("Equivariance needs a pose besides the identity; give elements=D4.")
    number = seed[1]
    pairs = [m for m in measures if m in MEASURES]
    names = [*(g.name for g in poses), *(("identity", "shuffled") if controls else ())]
    found: dict[tuple[str, str], list[float]] = {(n, m): [] for n in names for m in pairs}
    shares: list[float] = []
    for batch in batches(images, batch_size):
        first = _inner(features_of(f, batch), margin)
        sums = [InvariantShare(one) for one in first] if "invariant_share" in measures else []
        for g in poses:
            back = _inner(g.undo(posed(batch, g)), margin)
            for k in range(len(batch)):
                for m in pairs:
                    found[g.name, m].append(MEASURES[m](first[k], back[k]))
                if sums:
                    sums[k].add(back[k])
        shares += [s.value() for s in sums]
        if controls:
            again = _inner(features_of(f, batch), margin)
            for k, one in enumerate(first):
                rng = np.random.default_rng([seed[0], number + k])
                order = torch.from_numpy(rng.permutation(one[0].numel())).to(one.device)
                mixed = one.flatten(1)[:, order].reshape(one.shape)
                for m in pairs:
                    found["identity", m].append(MEASURES[m](one, again[k]))
                    found["shuffled", m].append(MEASURES[m](one, mixed))
        number += len(batch)
    return _rows(found, [g.name for g in poses], pairs, shares, label_of(poses), part, controls)


def _inner(maps: Tensor, margin: int) -> Tensor:
    """Return maps (b, d, h, w) without `margin` tokens along the frame."""
    h, w = maps.shape[-2:]
    if margin < 0 or 2 * margin >= min(h, w):
        raise ShapeError(
            f"margin={margin} must be 0 or more tokens and leave some of a map of {h}x{w} tokens; choose another."
        )
    return maps[..., margin : h - margin, margin : w - margin]


def _rows(
    found: dict[tuple[str, str], list[float]],
    poses: list[str],
    pairs: list[str],
    shares: list[float],
    label: str,
    part: str,
    controls: bool,
) -> tuple[Measurement, ...]:
    """Rows of means over poses first, then of each pose, then controls."""
    rows = []
    for m in pairs:
        over = np.array([found[name, m] for name in poses])
        rows.append(Measurement(label, m, over.mean(0), part))
        if m == "error":
            rows.append(Measurement(f"{label} worst", m, over.max(0), part))
    if shares:
        rows.append(Measurement(label, "invariant_share", np.array(shares), part))
    rows += [Measurement(name, m, np.array(found[name, m]), part) for m in pairs for name in poses]
    if controls:
        rows += [
            Measurement(name, m, np.array(found[name, m]), part, control=True)
            for m in pairs
            for name in ("identity", "shuffled")
        ]
    return tuple(rows)
