"""Linear probe of the position of patches from their features.

The patches of *one* image are split into a few training patches, on which ridge regression fits a ramp over the grid,
and test patches. A high R² means that the features encode position linearly; an R² of about 0 or below means
that they do not. Reports lead with R² over the test patches (`r2_heldout`), the unbiased score; published
tables show R² over all patches (`r2`). Two controls validate the probe: the target `random`, and every target
with shuffled patches; neither may be predictable.

`vispe.evaluate.probe.layer_probe` probes every block, `vispe.evaluate.probe.baselines` debiased features.

Source: the probe of dino-saw (tldr-group, arXiv 2603.16840).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from vispe.errors import ShapeError, counted
from vispe.evaluate.probe.feature_sources import Source, each_features
from vispe.evaluate.probe.fit import channel_r2, fit_probe
from vispe.evaluate.probe.regression_data import Fit, Regressor
from vispe.evaluate.probe.splits import check_sampled, follower, mixed, same_region
from vispe.evaluate.probe.targets import TARGETS, check_target, ramp, sample_mask
from vispe.utils.options import PositiveInt, checked
from vispe.utils.report.result import Grades, Result
from vispe.utils.report.table import json_entries, json_list

GRADES = Grades(0.1, 0.5, ("no linear position", "position can partly be read", "position can be read"))
"""Verdict on the median held-out R²; the limits are chosen by us."""


@dataclass(frozen=True)
class ProbeRow:
    """Scores of one target.

    Attributes:
        target: name of the target.
        r2: R² over all patches, (images, masks).
        r2_heldout: R² over the patches that were not sampled, (images, masks).
        shuffled: held-out R² for the target with shuffled patches, the control, (images, masks).

    Example:
        >>> row = ProbeRow("row", np.ones((1, 2)), np.array([[0.8, 0.6]]), np.zeros((1, 2)))
        >>> round(row.to_dict()["r2_heldout"]["mean"], 2)
        0.7
    """

    target: str
    r2: np.ndarray
    r2_heldout: np.ndarray
    shuffled: np.ndarray

    def to_dict(self) -> dict[str, Any]:
        """Return target, mean, median and standard deviation of the scores, and all values by image and mask."""
        entries: dict[str, Any] = {"target": self.target}
        for key in ("r2_heldout", "r2", "shuffled"):
            values = getattr(self, key)
            mean, median, std = json_list([np.mean(values), np.median(values), np.std(values)])
            entries[key] = {"mean": mean, "median": median, "std": std, "per_image": json_list(values)}
        return entries


@dataclass(frozen=True)
class ProbeResult(Result):
    """Result of the probe for one model or feature set.

    Attributes:
        rows: scores by target, the headline target first, `random` last.
        grid: patches (h, w) of the first image.
        n_images: number of images.
        n_samples: number of training patches of the headline target, for the first image.
        n_nan: number of NaN feature values replaced by 0, over all images.
        channel_r2: held-out R² of single channels for the headline target, mean over images and masks, (C,).
        settings: options that affect the numbers.
        example: headline ramp, mask and prediction of the first image and mask, for figures.

    Example:
        >>> import torch
        >>> result = positional_probe(torch.rand(1, 8, 6, 6), step=2)
        >>> result.grid, [row.target for row in result.rows][-1], result.channel_r2.shape
        ((8, 6), 'random', (6,))
    """

    rows: tuple[ProbeRow, ...]
    grid: tuple[int, int]
    n_images: int
    n_samples: int
    n_nan: int
    channel_r2: np.ndarray
    settings: dict[str, Any]
    example: dict[str, np.ndarray] = field(repr=False)

    @property
    def headline(self) -> float:
        """Median held-out R² of the first target."""
        return float(np.median(self.rows[0].r2_heldout))

    @property
    def verdict(self) -> str:
        """Verdict in one sentence."""
        if np.isnan(self.headline):
            h, w = self.grid
            return f"cannot be judged: {self.rows[0].target} is constant on a {h}x{w} grid"
        return f"{GRADES.word(self.headline)}: held-out R² {self.headline:.2f}"

    @property
    def notes(self) -> tuple[str, ...]:
        """Caveats of the verdict, one sentence each."""
        notes = []
        if self.n_samples < 16:
            notes.append(
                f"Only {counted(self.n_samples, 'training patch')}, which is few; use larger images or a smaller step."
            )
        if np.median(self.rows[-1].r2_heldout) > 0.1:
            notes.append("Random noise can be predicted too, so the scores are invalid.")
        if np.median(self.rows[0].shuffled) > 0.1:
            notes.append("Shuffled positions can be read too, so the scores are invalid.")
        if self.n_nan:
            notes.append(f"{self.n_nan} NaN feature values were replaced by 0.")
        return tuple(notes)

    def top_channels(self, n: int = 6) -> list[int]:
        """Return the `n` channels with the highest R² for the headline target, best first."""
        return [int(c) for c in np.argsort(-self.channel_r2, kind="stable")[:n]]

    def to_dict(self) -> dict[str, Any]:
        """Return all fields except the example as JSON values; NaN becomes `None`."""
        facts = json_entries(
            self, "verdict", "notes", "rows", "grid", "n_images", "n_samples", "n_nan", "settings"
        )
        return facts | {"top_channels": self.top_channels(), "channel_r2": json_list(self.channel_r2)}

    def table(self) -> list[list[str]]:
        """Return the table of scores as text, header first."""
        table = [["target", "held-out R² mean", "median", "std", "all patches R² mean", "median", "std"]]
        table[0].append("shuffled mean")
        for row in self.rows:
            cells = [f(v) for v in (row.r2_heldout, row.r2) for f in (np.mean, np.median, np.std)]
            table.append([row.target, *(f"{value:.3f}" for value in (*cells, np.mean(row.shuffled)))])
        return table


@checked
def positional_probe(
    model_or_features: Source,
    images: Tensor | Iterable[Tensor] | None = None,
    *,
    targets: Sequence[str] = TARGETS,
    step: int = 6,
    cutoff: float = 1.0,
    random_mask: bool = True,
    masks_per_image: PositiveInt = 6,
    regressor: Regressor = "ridge",
    alpha: float = 1.0,
    standardize: bool = True,
    generator: np.random.Generator | int = 0,
) -> ProbeResult:
    """Probe the position of patches linearly from the features of a model.

    The defaults are the settings of the published tables. Each image is probed separately; targets with the same
    sampling region share the mask and the factorisation.

    Args:
        model_or_features: a model of timm or open_clip (converted or not); or a function from images (b, c, H, W)
            to maps (b, C, h, w); or features (h, w, C) of each image, or (b, h, w, C).
        images: normalised images (b, 3, H, W), or an iterable of (3, H, W), for a model; `None` with features.
        targets: the first is the headline; `random`, the sanity check, is appended.
        step: a fraction 1 / step² of the patches is used for training.
        cutoff: fraction of each side of the grid that is sampled.
        random_mask: random training patches; otherwise a regular grid with one mask per image.
        masks_per_image: number of masks per image.
        regressor: `ridge`, or `linear` for min-norm least squares.
        alpha: ridge penalty.
        standardize: standardise each channel by the training patches.
        generator: a NumPy Generator, or a seed; used for masks and the random target. The order of the shuffled
            control depends on it without advancing it.

    Raises:
        ShapeError: no images, or no training patch for this step.
        OptionError: unknown target, or images without a model.
        InputError: features are infinite, or NaN without `nan_to_zero`.

    Example:
        >>> noise = np.random.default_rng(0).normal(size=(12, 12, 8))
        >>> positional_probe([noise], targets=["lr"], step=2).verdict.split(":")[0]
        'no linear position'
    """
    rng = np.random.default_rng(generator)
    # the control has a separate generator, so that masks match the published code
    order = follower(rng)
    names = [*(name for name in dict.fromkeys(targets) if name != "random"), "random"]
    for name in names:
        check_target(name)
    draws = masks_per_image if random_mask else 1
    fit = Fit(regressor, alpha, standardize)
    sampling = {"step": step, "cutoff": cutoff, "random_mask": random_mask, "masks_per_image": draws}
    scores: dict[str, list[list[tuple[float, float, float]]]] = {name: [] for name in names}
    curves, first, n_nan = [], {}, 0
    for feats in each_features(model_or_features, images):
        shape = feats.shape[:2]
        for name in names:
            scores[name].append([])
        for draw in range(draws):
            values = {name: ramp(name, shape, rng) for name in names}
            for group in same_region(names, shape, cutoff):
                mask = sample_mask(
                    group[0], shape, step=step, cutoff=cutoff, random=random_mask, generator=rng
                )
                check_sampled(mask, step, cutoff)
                group_values = {name: values[name] for name in group}
                control = {f"shuffled {name}": v for name, v in mixed(group_values, order).items()}
                fits = fit_probe(feats, mask, group_values | control, fit)
                for name in group:
                    one, shuffled = fits[name], fits[f"shuffled {name}"]
                    scores[name][-1].append((one.r2, one.r2_heldout, shuffled.r2_heldout))
                if names[0] in group:
                    n_nan += fits[names[0]].n_nan if draw == 0 else 0
                    curves.append(channel_r2(feats, mask, values[names[0]], fit, held_out=True))
                    example = {
                        "ramp": values[names[0]],
                        "mask": mask,
                        "prediction": fits[names[0]].prediction,
                    }
                    first = first or example
    if not curves:
        raise ShapeError("positional_probe: no images, got an empty sequence. Pass at least one image.")
    if len({len(curve) for curve in curves}) > 1:
        raise ShapeError(
            f"positional_probe: images must have equal channels, got {sorted({len(c) for c in curves})}. Probe one "
            "model at a time."
        )
    arrays = {name: np.array(values) for name, values in scores.items()}
    return ProbeResult(
        rows=tuple(ProbeRow(name, *np.moveaxis(arrays[name], -1, 0)) for name in names),
        grid=first["mask"].shape,
        n_images=len(arrays[names[0]]),
        n_samples=int(first["mask"].sum()),
        n_nan=n_nan,
        channel_r2=np.mean(curves, axis=0),
        settings=sampling | {"regressor": regressor, "alpha": alpha, "standardize": standardize},
        example=first,
    )
