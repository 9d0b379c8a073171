"""What post-hoc remedies leave of position in the features, and what they cost.

Each remedy changes the features of a model that stays as it is. Beside the readable position (held-out R² of the
linear probe) stand the effective rank of the features, the cosine to the untouched ones, and the forward passes for
each image: a remedy that makes all patches alike also brings R² to 0.

Memory: the maps of one image, five of them while averaging; one channel curve for each image while channels are
chosen.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vispe.backbones.batching import FeatureFunction, features_of
from vispe.errors import OptionError, ShapeError
from vispe.evaluate.probe.baseline_table import NAMES, BaselineRow, BaselineTable
from vispe.evaluate.probe.debias import blank_channels, svd_debias
from vispe.evaluate.probe.feature_sources import (
    Source,
    black_image,
    check_images,
    feature_function,
    is_features,
)
from vispe.evaluate.probe.fit import Features, Fit, Regressor, to_numpy
from vispe.evaluate.probe.group_averages import (
    effective_rank,
    forward_passes,
    mean_cosine,
    shift_lattice,
    transform_averages,
)
from vispe.evaluate.probe.splits import POSITIONS, Trials


def probe_baselines(
    model_or_features: Source,
    images: Iterable[Tensor] | None = None,
    *,
    blank: int | Sequence[int] = 4,
    choose_on: Iterable[Tensor] | Iterable[Features] | None = None,
    black: Tensor | Features | None = None,
    directions: int = 16,
    shifts: int = 4,
    patch: int | None = None,
    targets: Sequence[str] = POSITIONS,
    step: int = 6,
    masks_per_image: int = 6,
    regressor: Regressor = "ridge",
    alpha: float = 1.0,
    generator: np.random.Generator | int = 0,
) -> BaselineTable:
    """Measure readable position before and after channel blanking, SVD debias and transform averages.

    With a model, each image takes 1 forward pass for itself, 1 for choosing channels, and 8 for each shift; a black
    image takes 1 whenever the size changes.

    Args:
        model_or_features: a model or function from images to maps; or features (h, w, C) of each image, for which
            there are no transform averages.
        images: (c, H, W) each, normalised, sides multiples of the patch; None with features.
        blank: channels to set to 0; or how many: the most telling ones are chosen, by the best R² of any target but
            the first where there are several. They are never chosen on the image that is scored: those of the first,
            third, ... image come from the others, and the other way round; or all from `choose_on`.
        choose_on: images (or features) to choose channels on.
        black: a black image, normalised, (c, 1, 1) or (c, H, W), for the SVD; known for models of timm and open_clip.
            With features: the features (h, w, C) of a black image.
        directions: that the SVD removes; at most as many as there are.
        shifts: along each side of the grid, for the averages over shifts; 1 for none.
        patch: side of a patch in pixels; known for models.
        targets: names of `vispe.evaluate.probe.targets.ramp`, the headline first.
        step: one patch in step² is fitted.
        masks_per_image: random choices of these patches for each image.
        regressor: `ridge`, or `linear` for least squares of least norm.
        alpha: penalty of ridge.
        generator: a numpy Generator, or a seed for one; draws masks and the order of the shuffled control.

    Raises:
        OptionError: channels are to be chosen and there is one image only, or images that can be read only once; or
            channels that do not exist.
        ShapeError: no images, or too few patches for the step.
    """
    rng = np.random.default_rng(generator)
    blank = int(blank) if isinstance(blank, np.integer) else blank
    trials = Trials(tuple(dict.fromkeys(targets)), step, masks_per_image, Fit(regressor, alpha))
    f = None if is_features(model_or_features) else feature_function(model_or_features)
    scored = model_or_features if f is None else images
    check_images(f is None, images)
    chosen = isinstance(blank, int) and choose_on is None
    if chosen and iter(scored) is scored:
        raise OptionError(
            "The images can be read only once, and choosing channels on other images than those scored takes two "
            "rounds; give a list or tensor, or choose_on=, or the channels as blank=."
        )
    side = getattr(f, "patch", None) if patch is None else patch
    folds, chosen_on = _channels(f, scored, blank, choose_on, trials, rng)
    if black is None and f is not None:
        black = black_image(model_or_features)
    scores: dict[str, list[tuple[np.ndarray, np.ndarray, float, float]]] = {}
    nothing = np.full(len(trials.targets), np.nan)
    why: dict[str, str] = {}
    passes: dict[str, int] = {}
    count, blacks = 1, {}
    for number, (image, own) in enumerate(_each_map(f, scored)):
        trial = trials.draw(tuple(own.shape[1:]), rng)
        maps: dict[str, Tensor | str] = {"none": own}
        maps["blank"] = blank_channels(own, folds[number % len(folds)], axis=0)
        size = None if image is None else tuple(image.shape)
        if size not in blacks:
            blacks = {size: _black_map(f, image, black)}
        maps["svd"] = _debiased(own, blacks[size], directions)
        if f is not None and side is not None:
            maps |= transform_averages(f, image, side, shifts)
            count = len(shift_lattice(tuple(own.shape[1:]), shifts))
            passes = forward_passes(tuple(own.shape[1:]), shifts)
        for key, value in maps.items():
            row = scores.setdefault(key, [])
            if isinstance(value, str):
                why[key] = value
                row.append((nothing, nothing, np.nan, np.nan))
                continue
            r2, control = trials.scores(value.permute(1, 2, 0), trial)
            row.append((r2, control, effective_rank(value), mean_cosine(own, value)))
    if not scores:
        raise ShapeError("The probe got no images; give at least one.")
    why.setdefault("blank", _words(folds))
    rows = []
    for key in (key for key in NAMES if key in scores):
        r2, control, rank, cosine = (np.array(values) for values in zip(*scores[key], strict=True))
        name, cost = NAMES[key].format(n=count), passes.get(key, 1 if f is not None else 0)
        rows.append(BaselineRow(key, name, r2.T, control.T, rank, cosine, cost, why.get(key, "")))
    settings = trials.to_dict() | {"directions": directions, "shifts": shifts, "chosen": chosen}
    return BaselineTable(trials.targets, tuple(rows), len(scores["none"]), chosen_on, settings)


def _each_map(f: FeatureFunction | None, source: Iterable[Any]) -> Iterator[tuple[Any, Tensor]]:
    """Yield the image (None with features) and its map (C, h, w) float64."""
    for item in source:
        if f is None:
            yield None, torch.from_numpy(to_numpy(item)).permute(2, 0, 1)
        else:
            yield item, features_of(f, item[None])[0].cpu()


def _channels(
    f: FeatureFunction | None,
    scored: Iterable[Any],
    blank: int | Sequence[int],
    choose_on: Iterable[Any] | None,
    trials: Trials,
    rng: np.random.Generator,
) -> tuple[list[list[int]], str]:
    """Return the channels to blank in images 0, 2, ... and 1, 3, ... (or in all), and where they come from."""
    if not isinstance(blank, int):
        return [[int(c) for c in blank]], "given"
    if blank < 0:
        raise OptionError(f"The channels to blank are a list, or a number from 0 up, got blank={blank}.")
    curves = []
    for _, own in _each_map(f, scored if choose_on is None else choose_on):
        curve = trials.channels(own.permute(1, 2, 0), trials.draw(tuple(own.shape[1:]), rng))
        curves.append(curve[1:] if len(curve) > 1 else curve)
    if choose_on is None and len(curves) < 2:
        raise OptionError(
            f"Channels are chosen on other images than those scored, and there is {len(curves)}; give two or more, or "
            "choose_on=, or the channels as blank=."
        )
    if not curves:
        raise ShapeError("The probe got no images to choose channels on; give at least one.")

    def best(some: Sequence[np.ndarray]) -> list[int]:
        telling = np.nan_to_num(np.mean(some, axis=0), nan=-np.inf).max(0)
        return [int(c) for c in np.argsort(-telling, kind="stable")[:blank]]

    if choose_on is not None:
        return [best(curves)], f"chosen on {len(curves)} other image{'s' * (len(curves) > 1)}"
    return [best(curves[1::2]), best(curves[::2])], "chosen on the other half of the images"


def _black_map(f: FeatureFunction | None, image: Any, black: Any) -> Tensor | None:
    """Return the map (C, h, w) of a black image of the size of an image, None where black is not known."""
    if black is None:
        return None
    if f is None:
        return torch.from_numpy(to_numpy(black)).permute(2, 0, 1)
    return features_of(f, black.to(image).expand(image.shape)[None])[0].cpu()


def _debiased(own: Tensor, black: Tensor | None, directions: int) -> Tensor | str:
    """Return the map without the directions in which a black image's map varies, or why there is none."""
    if black is None:
        return "needs a black image, which the model does not describe; give black="
    k = min(directions, black.shape[0], black[0].numel())
    return svd_debias(own[None], black[None], k=k)[0]


def _words(folds: list[list[int]]) -> str:
    words = [", ".join(map(str, fold)) or "none" for fold in folds]
    if len(words) == 1 or words[0] == words[1]:
        return f"channels {words[0]} were set to 0"
    return f"channels {words[0]} were set to 0 in one half of the images and {words[1]} in the other"
