"""Features and targets of one image as flat arrays for a linear regression, and the options of the regression."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from vispe.errors import InputError, ShapeError, counted
from vispe.utils.options import NonNegativeFloat, Options

Features = np.ndarray | Tensor
Regressor = Literal["ridge", "linear"]


@dataclass(frozen=True)
class Fit(Options):
    """Options of the linear regression; the defaults are those of the published tables.

    Attributes:
        regressor: `ridge`, or `linear`: least squares, the min-norm solution if it is not unique.
        alpha: ridge penalty on the weights; the intercept is not penalised. Ignored by `linear`.
        standardize: subtract the mean and divide by the population standard deviation of the *sampled* patches;
            constant channels are not divided.
        fit_intercept: whether to fit an intercept.
        nan_to_zero: replace NaN by 0; otherwise NaN raises an error.

    Raises:
        OptionError: unknown regressor or negative alpha.

    >>> Fit(alpha=0.1).regressor
    'ridge'
    """

    regressor: Regressor = "ridge"
    alpha: NonNegativeFloat = 1.0
    standardize: bool = True
    fit_intercept: bool = True
    nan_to_zero: bool = True


RIDGE = Fit()


def flat_features(
    feats: Features, mask: Features, fit: Fit
) -> tuple[np.ndarray, np.ndarray, tuple[int, int], int]:
    """Return float64 features (p, C) of all patches, the mask (p,), the grid (h, w) and the number of NaN.

    Raises:
        ShapeError: shapes do not match, or no patch is sampled.
        InputError: infinite features, or NaN without `nan_to_zero`.
    """
    x = to_numpy(feats)
    chosen = to_numpy(mask) != 0
    if x.ndim != 3 or chosen.shape != x.shape[:2] or 0 in x.shape:
        raise ShapeError(
            f"fit_probe: expected feats (h, w, C) and mask (h, w), got {x.shape} and {chosen.shape}. Use one grid."
        )
    if not chosen.any():
        raise ShapeError(
            f"fit_probe: mask samples no patch, got a {x.shape[0]}x{x.shape[1]} grid. Use a smaller step."
        )
    shape = x.shape[:2]
    x, chosen = x.reshape(-1, x.shape[2]), chosen.reshape(-1)
    n_nan, n_infinite = int(np.isnan(x).sum()), int(np.isinf(x).sum())
    if n_nan and not fit.nan_to_zero:
        raise InputError(
            f"fit_probe: feats must be finite, got {n_nan} NaN. Set nan_to_zero=True, or fix the features."
        )
    if n_infinite:
        raise InputError(
            f"fit_probe: feats must be finite, got {counted(n_infinite, 'infinite value')}. Fix the features."
        )
    x = np.nan_to_num(x)
    if fit.standardize:
        sampled = x[chosen]
        # do not divide constant channels by the rounding error of their mean
        std = np.where(np.ptp(sampled, axis=0) == 0, 1.0, sampled.std(0))
        x = (x - sampled.mean(0)) / std
    return x, chosen, shape, n_nan


def sampled_mean(sampled: np.ndarray, fit: Fit) -> np.ndarray:
    """Return the mean over the sampled patches, which the intercept fits; zeros without an intercept."""
    return sampled.mean(0) if fit.fit_intercept else np.zeros(sampled.shape[1])


def flat_target(name: str, target: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Return a target (h, w, n) as float64 values of all patches, (p, n)."""
    values = to_numpy(target)
    if values.ndim != 3 or values.shape[:2] != tuple(shape):
        raise ShapeError(
            f"fit_probe: target {name!r} must have shape {(*shape, 'n')}, got {values.shape}. Use `ramp`."
        )
    return values.reshape(-1, values.shape[2])


def to_numpy(values: Features) -> np.ndarray:
    """Return a tensor or array as a float64 array (bfloat16 and half precision included)."""
    if isinstance(values, Tensor):
        values = values.detach().to("cpu", torch.float64).numpy()
    return np.asarray(values, dtype=np.float64)
