"""Fit of RASA on features.

The loss of every round is minimised over all tokens at once by L-BFGS, from zero and preconditioned: the fit is
deterministic. As the fit starts from zero, the weights of a round have no component along the planes of
earlier rounds. So both orders of `RasaProjection` give equal results; they differ for weights from stochastic
training.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vispe.errors import InputError, OptionError, ShapeError, counted
from vispe.evaluate.probe.rasa.optimisation import fit_rounds
from vispe.evaluate.probe.rasa.projection import RasaProjection, floating
from vispe.evaluate.probe.rasa.rounds import Activation, Order, grid_coords
from vispe.evaluate.probe.regression_data import Features
from vispe.utils.options import NonNegativeFloat, NonNegativeInt, checked


class Rasa:
    """Iterative removal of linear position from features, with `fit` and `transform` as in scikit-learn.

    Args:
        rounds: number of rounds; each removes one direction per coordinate.
        order: how rounds are combined, see `RasaProjection`.
        activation: activation of the regression: `sigmoid`, `tanh` or `none`.
        standardize: subtract the mean and divide by the standard deviation of every channel before the fit and the
            projection, and undo both afterwards. Without it, a constant offset of the features takes part in the fit.
        alpha: ridge penalty; alpha |W|² / outputs is added to the loss of every round (ours). Without a penalty the fit
            prefers directions of small variance, which a regularised probe hardly uses, so that many rounds are needed.

    Attributes:
        projection_: the fitted `RasaProjection`.
        losses_: loss of the fit of every round, without penalty, (rounds,).

    Raises:
        OptionError: an unknown order or activation, or a negative number of rounds or penalty.

    Example:
        >>> maps = torch.randn(8, 4, 6, 7, generator=torch.Generator().manual_seed(0))
        >>> Rasa(rounds=1).fit(maps).transform(maps).shape
        torch.Size([8, 4, 6, 7])
    """

    @checked
    def __init__(
        self,
        rounds: NonNegativeInt = 9,
        order: Order = "joint",
        activation: Activation = "sigmoid",
        standardize: bool = False,
        alpha: NonNegativeFloat = 0.0,
    ) -> None:
        self.rounds, self.order = rounds, order
        self.activation, self.standardize, self.alpha = activation, standardize, float(alpha)

    def fit(self, features: Features | Sequence[Features], coords: Features | None = None) -> Rasa:
        """Fit the directions of every round; fit on images that are not scored.

        Args:
            features: maps (b, C, h, w) or (h, w, C), or a list of maps (h, w, C) of any sizes; or tokens (tokens, C),
                which need `coords`. Without a penalty more tokens than channels are required; ten times as many are
                advisable.
            coords: targets (tokens, outputs) of the tokens; of one map, in row-major order, where features are maps. By
                default `grid_coords`, row and column from 0 to 1. They are required for 3D grids.

        Returns:
            The estimator itself.

        Raises:
            ShapeError: shapes do not match, or tokens without coordinates.
            InputError: values that are not finite, too few tokens, or a round without variation left.
            OptionError: more directions than channels.
        """
        x, t = _tokens_and_targets(features, coords)
        if not (torch.isfinite(x).all() and torch.isfinite(t).all()):
            raise InputError(
                "Rasa: features and coords must be finite, got NaN or infinity. Check model and images."
            )
        (n, c), outputs = x.shape, t.shape[1]
        if self.rounds * outputs >= c:
            raise OptionError(
                f"Rasa: rounds must be below {c / outputs:g} for {counted(c, 'channel')} and "
                f"{counted(outputs, 'coordinate')}, got {self.rounds}. Use fewer rounds."
            )
        if n <= c and not self.alpha:
            raise InputError(
                f"Rasa: features must have more tokens than channels without a penalty, got {counted(n, 'token')} of "
                f"{c}. Use more images or alpha > 0."
            )
        mean = std = None
        if self.standardize:
            mean, std = x.mean(0), x.std(0, correction=0)
            # do not divide constant channels by the rounding error of their mean
            std = torch.where(x.amax(0) == x.amin(0), 1.0, std)
            x = (x - mean) / std
        weights, losses = fit_rounds(x, t, self.rounds, self.activation, self.alpha)
        self.projection_ = RasaProjection(weights, self.order, mean, std)
        self.losses_ = losses
        return self

    def transform(self, features: Features) -> Features:
        """Return features without the fitted directions, see `RasaProjection.apply`.

        Raises:
            OptionError: `fit` was not called.
        """
        if not hasattr(self, "projection_"):
            raise OptionError("Rasa: transform needs fitted directions, got none. Call fit first.")
        return self.projection_.apply(features)

    def fit_transform(self, features: Features, coords: Features | None = None) -> Features:
        """Return `fit(features, coords).transform(features)`."""
        return self.fit(features, coords).transform(features)


def fit_rasa(
    features: Features | Sequence[Features],
    rounds: int = 9,
    order: Order = "joint",
    activation: Activation = "sigmoid",
    coords: Features | None = None,
) -> RasaProjection:
    """Return the fitted projection of features that are not standardised; arguments as in `Rasa`.

    Raises:
        OptionError: an option has an invalid value, or there are too many rounds for the channels.
        ShapeError: features or coordinates have the wrong shape.
        InputError: values are not finite, or there are too few tokens or directions.

    Example:
        >>> features = torch.rand(4, 3, 8, 8)
        >>> fit_rasa(features, rounds=1).apply(features).shape
        torch.Size([4, 3, 8, 8])
    """
    return Rasa(rounds, order, activation).fit(features, coords).projection_


def _tokens_and_targets(
    features: Features | Sequence[Features], coords: Features | None
) -> tuple[Tensor, Tensor]:
    """Return tokens (n, C) and targets (n, outputs), float64."""
    t = None if coords is None else torch.as_tensor(coords).double()
    if isinstance(features, list | tuple):
        if coords is not None or not features or any(one.ndim != 3 for one in features):
            shapes = [tuple(one.shape) for one in features]
            raise ShapeError(
                f"Rasa: a list must have maps (h, w, C) and no coords, got shapes {shapes}. Pass tokens (tokens, C) "
                "and coords otherwise."
            )
        pairs = [_tokens_and_targets(one, None) for one in features]
        if len({x.shape[1] for x, _ in pairs}) > 1:
            raise ShapeError(
                f"Rasa: all maps must have the same channels, got {[x.shape[1] for x, _ in pairs]}. Use one model."
            )
        return torch.cat([x for x, _ in pairs]), torch.cat([t for _, t in pairs])
    x = floating(features).detach().double()
    if x.ndim not in (2, 3, 4) or 0 in x.shape or (x.ndim == 2 and t is None):
        raise ShapeError(
            f"Rasa: features must be maps (b, C, h, w) or (h, w, C), or tokens (n, C) with coords, got "
            f"{tuple(x.shape)}. Reshape them."
        )
    if x.ndim == 2:
        count = 1
    else:
        shape = x.shape[2:] if x.ndim == 4 else x.shape[:2]
        count = len(x) if x.ndim == 4 else 1
        t = grid_coords(shape, x.device) if t is None else t
        x = x.movedim(1, -1).flatten(0, 2) if x.ndim == 4 else x.flatten(0, 1)
    if t.ndim != 2 or len(t) * count != len(x) or t.shape[1] == 0:
        raise ShapeError(
            f"Rasa: coords must be ({len(x) // count}, outputs) for {counted(len(x), 'token')}, got "
            f"{tuple(t.shape)}. Pass one row per token of a map."
        )
    return x, t.to(x.device).repeat(count, 1)
