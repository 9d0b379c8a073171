"""Closed-form linear regression from the features of one image to targets over its grid.

One singular value decomposition of the sampled features serves all targets; the probe of a single channel is a
quotient. Source of the protocol: the probe of dino-saw (tldr-group, arXiv 2603.16840).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from vispe.evaluate.probe.regression_data import (
    RIDGE,
    Features,
    Fit,
    flat_features,
    flat_target,
    sampled_mean,
)


@dataclass(frozen=True)
class ProbeFit:
    """One fitted target on one image.

    Attributes:
        prediction: predicted values of every patch, (h, w, n).
        r2: R² over all patches, including the sampled ones.
        r2_heldout: R² over the patches that were not sampled; NaN if there are none.
        n_nan: number of NaN feature values that were replaced by 0.
    """

    prediction: np.ndarray
    r2: float
    r2_heldout: float
    n_nan: int


def fit_probe(
    feats: Features, mask: Features, targets: Mapping[str, np.ndarray], fit: Fit = RIDGE
) -> dict[str, ProbeFit]:
    """Fit linear models from features to targets on the patches of a mask, and evaluate them on the grid.

    One singular value decomposition of the sampled features, (samples, C), serves all targets.

    Args:
        feats: features of one image, (h, w, C).
        mask: sampled patches, (h, w), bool or 0/1.
        targets: values (h, w, n) by name, such as those of `ramp`.
        fit: options of the regression.

    Returns:
        A `ProbeFit` per target name.

    Raises:
        ShapeError: shapes do not match, or no patch is sampled.
        InputError: infinite features, or NaN without `nan_to_zero`.

    >>> values = np.arange(12.0).reshape(3, 4, 1)
    >>> round(fit_probe(values, np.eye(3, 4), {"raster": values}, Fit(alpha=0))["raster"].r2_heldout, 6)
    1.0
    """
    x, chosen, shape, n_nan = flat_features(feats, mask, fit)
    x_mean = sampled_mean(x[chosen], fit)
    u, s, vt = np.linalg.svd(x[chosen] - x_mean, full_matrices=False)
    # zero weight for directions outside the span of the samples gives the min-norm solution
    if fit.regressor == "ridge":
        gain = np.divide(s, s**2 + fit.alpha, out=np.zeros_like(s), where=s > 0)
    else:
        nonzero = s > s.max(initial=0) * np.finfo(s.dtype).eps * max(len(u), x.shape[1])
        gain = np.divide(1, s, out=np.zeros_like(s), where=nonzero)
    # project all patches once for all targets, (p, C) -> (p, samples)
    scores = (x - x_mean) @ vt.T
    result = {}
    for name, target in targets.items():
        values = flat_target(name, target, shape)
        y_mean = sampled_mean(values[chosen], fit)
        prediction = scores @ (gain[:, None] * (u.T @ (values[chosen] - y_mean))) + y_mean
        heldout = r2_score(values[~chosen], prediction[~chosen])
        result[name] = ProbeFit(prediction.reshape(*shape, -1), r2_score(values, prediction), heldout, n_nan)
    return result


def channel_r2(
    feats: Features, mask: Features, target: np.ndarray, fit: Fit = RIDGE, *, held_out: bool = False
) -> np.ndarray:
    """Return the R² of single-channel probes, (C,).

    Channels with a high value are candidates for `vispe.evaluate.probe.linear_debiasing.blank_channels`.

    Args:
        feats: features of one image, (h, w, C).
        mask: sampled patches, (h, w).
        target: values (h, w, n).
        fit: options of the regression.
        held_out: evaluate only the patches that were not sampled.
    """
    return channels_r2(feats, mask, {"target": target}, fit, held_out=held_out)["target"]


def channels_r2(
    feats: Features,
    mask: Features,
    targets: Mapping[str, np.ndarray],
    fit: Fit = RIDGE,
    *,
    held_out: bool = False,
) -> dict[str, np.ndarray]:
    """Return `channel_r2` of several targets, (C,) by name, from one pass over the features.

    Args:
        feats: features of one image, (h, w, C).
        mask: sampled patches, (h, w).
        targets: values (h, w, n) by name.
        fit: options of the regression.
        held_out: evaluate only the patches that were not sampled.
    """
    x, chosen, shape, _ = flat_features(feats, mask, fit)
    x = x - sampled_mean(x[chosen], fit)
    # with a single channel the slope is cov / (var + alpha), vectorised over channels
    power = (x[chosen] ** 2).sum(0) + (fit.alpha if fit.regressor == "ridge" else 0.0)
    constant = np.ptp(x[chosen], axis=0) == 0 if fit.fit_intercept else power == 0
    scored = ~chosen if held_out else np.ones_like(chosen)
    evaluated, fitted = x[scored], x[chosen]
    squares = (evaluated**2).sum(0)[:, None]
    result = {}
    for name, target in targets.items():
        values = flat_target(name, target, shape)
        y_mean = sampled_mean(values[chosen], fit)
        true = values[scored]
        if len(true) == 0 or (np.ptp(true, axis=0) == 0).any():
            result[name] = np.full(x.shape[1], np.nan)
            continue
        covariance = fitted.T @ (values[chosen] - y_mean)
        slope = np.divide(covariance, power[:, None], out=np.zeros_like(covariance), where=~constant[:, None])
        # expand the squared error to avoid an array (patches, channels, outputs)
        centred = true - y_mean
        error = (centred**2).sum(0) - 2 * slope * (evaluated.T @ centred) + slope**2 * squares
        result[name] = (1 - error / ((true - true.mean(0)) ** 2).sum(0)).mean(1)
    return result


def knn_r2(
    feats: Features, mask: Features, target: np.ndarray, fit: Fit = RIDGE, neighbours: int = 5
) -> float:
    """Return the held-out R² of nearest neighbours among the patches of a mask, a non-linear probe.

    Args:
        feats: features of one image, (h, w, C).
        mask: sampled patches, (h, w).
        target: values (h, w, n).
        fit: standardisation of the features.
        neighbours: number of sampled patches whose values are averaged, clipped to their number.
    """
    x, chosen, shape, _ = flat_features(feats, mask, fit)
    values = flat_target("target", target, shape)
    train, test = x[chosen], x[~chosen]
    # |a - b|² without |a|², which is the same for all neighbours of a patch
    distances = (train**2).sum(1) - 2 * test @ train.T
    nearest = np.argsort(distances, axis=1, kind="stable")[:, :neighbours]
    return r2_score(values[~chosen], values[chosen][nearest].mean(1))


def r2_score(values: np.ndarray, prediction: np.ndarray) -> float:
    """Return R², averaged over outputs; NaN if a target is constant.

    Args:
        values: true values (p, n).
        prediction: predicted values (p, n).
    """
    if len(values) == 0:
        return float("nan")
    total = ((values - values.mean(0)) ** 2).sum(0)
    error = ((values - prediction) ** 2).sum(0)
    if (np.ptp(values, axis=0) == 0).any():
        return float("nan")
    return float((1 - error / total).mean())
