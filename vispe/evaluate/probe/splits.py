"""Train/test splits of the positional probe: sampled patches, ramps and shuffled ramps of one image.

Splits are drawn once per image and shared by layers and debiasing methods, so that these are comparable.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vispe.errors import OptionError, ShapeError
from vispe.evaluate.probe.fit import channels_r2, fit_probe, knn_r2
from vispe.evaluate.probe.regression_data import RIDGE, Features, Fit
from vispe.evaluate.probe.targets import check_target, ramp, sample_mask, sample_region
from vispe.utils.options import Options, PositiveInt

POSITIONS = ("lr+ud", "lr", "ud", "diag", "radial", "raster")
"""Targets of the comparisons: column and row together, column, row, diagonal, distance to the centre, raster order."""


@dataclass(frozen=True)
class Trial:
    """One split into training and test patches.

    Attributes:
        mask: training patches, (h, w).
        ramps: values (h, w, n) of the targets with the same sampling region, by name.
        mixed: the same values with shuffled patches, the control.
    """

    mask: np.ndarray
    ramps: dict[str, np.ndarray]
    mixed: dict[str, np.ndarray]


@dataclass(frozen=True)
class Trials(Options):
    """Options of the splits and of the regression.

    Attributes:
        targets: names, the headline first.
        step: a fraction 1 / step² of the patches is used for training.
        masks_per_image: number of splits per image.
        fit: options of the regression.

    Raises:
        OptionError: an unknown target, no targets, or no masks.
    """

    targets: tuple[str, ...]
    step: PositiveInt = 6
    masks_per_image: PositiveInt = 6
    fit: Fit = RIDGE

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.targets:
            check_target(name)
        if not self.targets or "random" in self.targets:
            raise OptionError(
                f"Trials: targets must be positional, got {list(self.targets)}. Omit 'random'; the control is the "
                "shuffled position."
            )

    def draw(self, shape: tuple[int, int], rng: np.random.Generator) -> list[Trial]:
        """Draw the splits of an image with a grid of `shape`."""
        trials = []
        for _ in range(self.masks_per_image):
            for group in same_region(self.targets, shape, 1.0):
                mask = sample_mask(group[0], shape, step=self.step, generator=rng)
                check_sampled(mask, self.step, 1.0)
                ramps = {name: ramp(name, shape) for name in group}
                trials.append(Trial(mask, ramps, mixed(ramps, rng)))
        return trials

    def scores(self, feats: Features, trials: Sequence[Trial]) -> tuple[np.ndarray, np.ndarray]:
        """Return held-out R², and that of the shuffled control, each (targets,), averaged over splits.

        Args:
            feats: (h, w, C).
            trials: splits of the same grid.
        """
        scores: dict[str, list[tuple[float, float]]] = {name: [] for name in self.targets}
        for trial in trials:
            both = trial.ramps | {f"shuffled {name}": values for name, values in trial.mixed.items()}
            fits = fit_probe(feats, trial.mask, both, self.fit)
            for name in trial.ramps:
                scores[name].append((fits[name].r2_heldout, fits[f"shuffled {name}"].r2_heldout))
        means = np.array([np.mean(scores[name], axis=0) for name in self.targets])
        return means[:, 0], means[:, 1]

    def knn(self, feats: Features, trials: Sequence[Trial]) -> float:
        """Return the held-out R² of a non-linear probe of the headline target, averaged over splits.

        It predicts the mean position of the 5 training patches with the nearest standardised features. It may
        still decode position that a linear method has removed for every linear model.

        Args:
            feats: (h, w, C).
            trials: splits of the same grid.
        """
        scores = []
        for trial in trials:
            if self.targets[0] not in trial.ramps:
                continue
            scores.append(knn_r2(feats, trial.mask, trial.ramps[self.targets[0]]))
        return float(np.mean(scores))

    def channels(self, feats: Features, trials: Sequence[Trial]) -> np.ndarray:
        """Return the held-out R² of single channels, (targets, C), averaged over splits."""
        curves: dict[str, list[np.ndarray]] = {name: [] for name in self.targets}
        for trial in trials:
            for name, curve in channels_r2(feats, trial.mask, trial.ramps, self.fit, held_out=True).items():
                curves[name].append(curve)
        return np.array([np.mean(curves[name], axis=0) for name in self.targets])

    def to_dict(self) -> dict[str, Any]:
        """Return the options as JSON values."""
        sampling = {"step": self.step, "masks_per_image": self.masks_per_image}
        return sampling | {"regressor": self.fit.regressor, "alpha": self.fit.alpha}


def same_region(names: Sequence[str], shape: tuple[int, int], cutoff: float) -> list[list[str]]:
    """Group the targets with the same sampling region."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for name in names:
        groups.setdefault(sample_region(name, shape, cutoff), []).append(name)
    return list(groups.values())


def mixed(ramps: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return the ramps with shuffled patches, in the same order for all."""
    shape = next(iter(ramps.values())).shape[:2]
    order = rng.permutation(shape[0] * shape[1])
    return {name: v.reshape(len(order), -1)[order].reshape(v.shape) for name, v in ramps.items()}


def follower(rng: np.random.Generator) -> np.random.Generator:
    """Return a generator seeded from the state of `rng` without advancing it."""
    return np.random.default_rng(copy.deepcopy(rng).integers(2**63))


def check_sampled(mask: np.ndarray, step: int, cutoff: float) -> None:
    """Raise ShapeError if the mask has fewer than two training patches: then every prediction is constant."""
    if mask.sum() < 2:
        h, w = mask.shape
        largest = max(1, int(cutoff * min(h, w) / 2))
        raise ShapeError(
            f"probe: step must be at most {largest} for a {h}x{w} grid, got {step}. Use a smaller step."
        )


def cell(value: float) -> str:
    """Format an R² for a table, clipped at -10."""
    return "< -10" if value < -10 else f"{value:.2f}"
