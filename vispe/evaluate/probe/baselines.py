"""Post-hoc debiasing of features: remaining position, and cost.

Each method changes the features of an unmodified model. In addition to the remaining position (held-out R² of the
linear probe), the effective rank of the features, their cosine similarity to the original features, and the
number of forward passes per image are reported. These measure the cost: a method that makes all patches equal
also reduces R² to 0. The baselines follow dino-saw (arXiv 2603.16840).

Memory: the maps of one image, five of them while averaging; one channel curve per image while channels are selected.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vispe.backbones.batching import FeatureFunction, features_of
from vispe.errors import OptionError, ShapeError
from vispe.evaluate.probe.baseline_table import NAMES, BaselineRow, BaselineTable
from vispe.evaluate.probe.feature_sources import (
    Source,
    black_image,
    check_images,
    feature_function,
    is_features,
)
from vispe.evaluate.probe.group_averages import (
    effective_rank,
    forward_passes,
    mean_cosine,
    shift_lattice,
    transform_averages,
)
from vispe.evaluate.probe.linear_debiasing import blank_channels, svd_debias
from vispe.evaluate.probe.rasa.table_rows import ALPHA, MAX_IMAGES, FitMaps, RasaRows, fitted
from vispe.evaluate.probe.regression_data import Features, Fit, Regressor, to_numpy
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
    rounds: int | None = None,
    mixed: Iterable[Tensor] | Iterable[Features] | None = None,
    patch_size: int | None = None,
    targets: Sequence[str] = POSITIONS,
    step: int = 6,
    masks_per_image: int = 6,
    regressor: Regressor = "ridge",
    alpha: float = 1.0,
    generator: np.random.Generator | int = 0,
) -> BaselineTable:
    """Probe the position before and after channel blanking, SVD debiasing, transform averages and RASA.

    Forward passes with a model: 1 and 8 per shift for each scored image; 1 for each image on which channels
    are selected and RASA is fitted (at most 32 images, or 16 for RASA with `choose_on`), and 8 more for RASA
    after averages; 1 for a black image whenever the image size changes.

    Args:
        model_or_features: a model or function from images to maps; or features (h, w, C) of each image, for which
            there are no transform averages.
        images: (c, H, W) each, normalised, sides multiples of the patch size; None with features.
        blank: indices of channels to set to 0; or their number: channels are then selected by the best R² of any target
            except the first, if there are several. They are never selected on the evaluated image: channels for even
            images come from odd ones and vice versa, or all from `choose_on`.
        choose_on: images (or features) to select channels and to fit RASA on; the other half of the images by default.
        black: a black image, normalised, (c, 1, 1) or (c, H, W), for the SVD; known for models of timm and open_clip.
            With features: the features (h, w, C) of a black image.
        directions: number of directions removed by the SVD, clipped to the available ones.
        shifts: number along each side of the grid, for averages over shifts; 1 for none.
        rounds: number of rounds of RASA, clipped to the rank of the features; each round removes two
            directions. By default 32, but at most a quarter of the directions is removed.
        mixed: images (or features) of several kinds, to fit RASA on in an additional row.
        patch_size: patch size in pixels; known for models.
        targets: names of `vispe.evaluate.probe.targets.ramp`, the headline first.
        step: a fraction 1 / step² of the patches is used for training.
        masks_per_image: number of random training masks per image.
        regressor: `ridge`, or `linear` for min-norm least squares.
        alpha: ridge penalty.
        generator: a NumPy Generator, or a seed; used for masks and for the shuffled control.

    Raises:
        OptionError: channels must be selected, but there is only one image, or images can be read only once;
            or a channel does not exist.
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
            "probe_baselines: images can be read only once, but selecting channels needs two passes. Pass a list or "
            "tensor, choose_on, or the channels as blank."
        )
    side = getattr(f, "patch_size", None) if patch_size is None else patch_size
    # an iterator allows one pass only, which the scores need, so no images remain for channels and RASA
    others = choose_on if choose_on is not None else () if iter(scored) is scored else scored
    if not isinstance(blank, int):
        others = islice(others, 2 * MAX_IMAGES)
    fits = FitMaps(f, side, halves=choose_on is None)
    folds, chosen_on = _channels(fits.each(_each_map(f, others)), blank, choose_on is None, trials, rng)
    several = (
        None if mixed is None else fitted([m for _, m in islice(_each_map(f, mixed), MAX_IMAGES)], rounds)
    )
    rasa = [RasaRows(*fold, several, rounds) for fold in fits.folds()]
    if black is None and f is not None:
        black = black_image(model_or_features)
    scores: dict[str, list[tuple[np.ndarray, np.ndarray, float, float, float]]] = {}
    undefined = np.full(len(trials.targets), np.nan)
    details: dict[str, str] = {}
    passes: dict[str, int] = {}
    count, blacks = 1, {}
    for number, (image, original) in enumerate(_each_map(f, scored)):
        trial = trials.draw(tuple(original.shape[1:]), rng)
        maps: dict[str, Tensor | str] = {"none": original}
        maps["blank"] = blank_channels(original, folds[number % len(folds)], axis=0)
        size = None if image is None else tuple(image.shape)
        if size not in blacks:
            blacks = {size: _black_map(f, image, black)}
        maps["svd"] = _debiased(original, blacks[size], directions)
        if f is not None and side is not None:
            maps |= transform_averages(f, image, side, shifts)
            count = len(shift_lattice(tuple(original.shape[1:]), shifts))
            passes = forward_passes(tuple(original.shape[1:]), shifts)
            passes["d4_rasa"] = passes["d4_average"]
        maps |= dict(rasa[number % len(rasa)].apply(maps))
        for key, value in maps.items():
            row = scores.setdefault(key, [])
            if isinstance(value, str):
                details[key] = value
                row.append((undefined, undefined, np.nan, np.nan, np.nan))
                continue
            feats = value.permute(1, 2, 0)
            r2, control = trials.scores(feats, trial)
            row.append(
                (r2, control, trials.knn(feats, trial), effective_rank(value), mean_cosine(original, value))
            )
    if not scores:
        raise ShapeError("probe_baselines: no images, got an empty sequence. Pass at least one image.")
    details = {"blank": _channels_sentence(folds)} | rasa[0].details | details
    rows = []
    for key in (key for key in NAMES if key in scores):
        r2, control, knn, rank, cosine = (np.array(values) for values in zip(*scores[key], strict=True))
        name, cost = NAMES[key].format(n=count), passes.get(key, 1 if f is not None else 0)
        rows.append(BaselineRow(key, name, r2.T, control.T, knn, rank, cosine, cost, details.get(key, "")))
    settings = trials.to_dict() | {"directions": directions, "shifts": shifts, "chosen": chosen}
    settings |= {"rounds": rounds, "rasa_alpha": ALPHA}
    return BaselineTable(trials.targets, tuple(rows), len(scores["none"]), chosen_on, settings)


def _each_map(f: FeatureFunction | None, source: Iterable[Any]) -> Iterator[tuple[Any, Tensor]]:
    """Yield the image (None with features) and its map (C, h, w) float64."""
    for item in source:
        if f is None:
            yield None, torch.from_numpy(to_numpy(item)).permute(2, 0, 1)
        else:
            yield item, features_of(f, item[None])[0].cpu()


def _channels(
    others: Iterable[Tensor],
    blank: int | Sequence[int],
    halves: bool,
    trials: Trials,
    rng: np.random.Generator,
) -> tuple[list[list[int]], str]:
    """Return the channels to blank in images 0, 2, ... and 1, 3, ... (or in all), and how they were selected."""
    if isinstance(blank, int) and blank < 0:
        raise OptionError(
            f"probe_baselines: blank must be a list or at least 0, got {blank}. Use 0 for none."
        )
    curves = []
    for original in others:
        if isinstance(blank, int):
            curve = trials.channels(original.permute(1, 2, 0), trials.draw(tuple(original.shape[1:]), rng))
            curves.append(curve[1:] if len(curve) > 1 else curve)
    if not isinstance(blank, int):
        return [[int(c) for c in blank]], "given"
    if halves and len(curves) < 2:
        raise OptionError(
            f"probe_baselines: selecting channels needs at least 2 images, got {len(curves)}. Pass more images, "
            "choose_on, or the channels as blank."
        )
    if not curves:
        raise ShapeError(
            "probe_baselines: choose_on has no images, got an empty sequence. Pass at least one image."
        )

    def best(selected: Sequence[np.ndarray]) -> list[int]:
        r2 = np.nan_to_num(np.mean(selected, axis=0), nan=-np.inf).max(0)
        return [int(c) for c in np.argsort(-r2, kind="stable")[:blank]]

    if not halves:
        return [best(curves)], f"chosen on {len(curves)} other image{'s' * (len(curves) > 1)}"
    return [best(curves[1::2]), best(curves[::2])], "chosen on the other half of the images"


def _black_map(f: FeatureFunction | None, image: Any, black: Any) -> Tensor | None:
    """Return the map (C, h, w) of a black image of the size of an image, None if black is unknown."""
    if black is None:
        return None
    if f is None:
        return torch.from_numpy(to_numpy(black)).permute(2, 0, 1)
    return features_of(f, black.to(image).expand(image.shape)[None])[0].cpu()


def _debiased(original: Tensor, black: Tensor | None, directions: int) -> Tensor | str:
    """Return the map debiased by `svd_debias` with the map of a black image, or the reason if it is unavailable."""
    if black is None:
        return "needs a black image, which is unknown for this model; pass black"
    k = min(directions, black.shape[0], black[0].numel())
    return svd_debias(original[None], black[None], k=k)[0]


def _channels_sentence(folds: list[list[int]]) -> str:
    lists = [", ".join(map(str, fold)) or "none" for fold in folds]
    if len(lists) == 1 or lists[0] == lists[1]:
        return f"channels {lists[0]} were set to 0"
    return f"channels {lists[0]} were set to 0 in one half of the images and {lists[1]} in the other"
