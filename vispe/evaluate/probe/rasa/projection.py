"""Linear map that removes the directions of RASA from features."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from vispe.errors import InputError, OptionError, ShapeError, counted
from vispe.evaluate.probe.rasa.rounds import (
    Order,
    authors_projector,
    joint_projector,
    round_directions,
)
from vispe.evaluate.probe.regression_data import Features
from vispe.utils.options import checked


class RasaProjection:
    """Linear map that removes the directions of all rounds from features.

    Args:
        weights: (rounds, outputs, C), of standardised features where `mean` and `std` are set.
        order: `joint`, one orthogonal projection; or `authors`, the product of the projections of the rounds.
        mean: (C,), subtracted before the projection and added afterwards.
        std: (C,), by which features are divided before the projection and multiplied afterwards.

    Attributes:
        weights: (rounds, outputs, C) float64.
        directions: orthonormal directions of every round, (rounds, outputs, C) float64.
        matrix: A of x_out = x Aᵀ + bias, (C, C) float64.
        bias: (C,) float64; zeros without `mean`.

    Raises:
        OptionError: unknown order.
        ShapeError: wrong number of axes.
        InputError: linearly dependent weight vectors within a round.

    Example:
        >>> RasaProjection(torch.eye(3)[None, :2]).apply(torch.ones(1, 3))
        tensor([[0., 0., 1.]])
    """

    @checked
    def __init__(
        self, weights: Tensor, order: Order = "joint", mean: Tensor | None = None, std: Tensor | None = None
    ) -> None:
        self.weights, self.order, self.mean, self.std = weights.detach().double(), order, mean, std
        self.directions = round_directions(self.weights)
        make = joint_projector if order == "joint" else authors_projector
        self.matrix = make(self.directions)
        if std is not None:
            self.matrix = std[:, None] * self.matrix / std
        self.bias = torch.zeros_like(self.matrix[0])
        if mean is not None:
            self.bias = mean - self.matrix @ mean

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return len(self.weights)

    def first(self, rounds: int) -> RasaProjection:
        """Return the projection of the first rounds only; rounds are fitted one after the other.

        Raises:
            OptionError: there are fewer rounds.
        """
        if not 0 <= rounds <= self.rounds:
            raise OptionError(
                f"RasaProjection.first: rounds must be in 0 to {self.rounds}, got {rounds}. Fit more rounds."
            )
        return RasaProjection(self.weights[:rounds], self.order, self.mean, self.std)

    def apply(self, features: Features) -> Features:
        """Return features without the directions, with the type, dtype, shape and device of `features`.

        Args:
            features: floating point, (b, C, h, w), or channels last with another number of axes: (tokens, C), (h, w, C)
                or (b, tokens, C). Computed in float64.

        Raises:
            ShapeError: the number of channels of `features` differs.
            InputError: integers.
        """
        x, axis = floating(features), _channel_axis(features)
        if x.shape[axis] != len(self.matrix):
            raise ShapeError(
                f"RasaProjection: features must have {counted(len(self.matrix), 'channel')} along axis {axis}, got "
                f"{tuple(x.shape)}. Use features of the model that was fitted."
            )
        if self.rounds == 0:
            result = x.clone()
        else:
            matrix, bias = self.matrix.to(x.device), self.bias.to(x.device)
            result = (x.double().movedim(axis, -1) @ matrix.mT + bias).movedim(-1, axis).to(x.dtype)
        return result.numpy() if isinstance(features, np.ndarray) else result

    def as_linear(self, dtype: torch.dtype | None = None) -> nn.Linear:
        """Return the map as one layer (C, C) for channels-last features, with a bias only if features are standardised.

        Args:
            dtype: dtype of the weights; the default is torch's default dtype.
        """
        c = len(self.matrix)
        layer = nn.utils.skip_init(nn.Linear, c, c, bias=self.mean is not None, dtype=dtype)
        with torch.no_grad():
            layer.weight.copy_(self.matrix)
            if layer.bias is not None:
                layer.bias.copy_(self.bias)
        return layer


def floating(features: Features) -> Tensor:
    """Return features as a tensor, InputError for integers."""
    x = torch.as_tensor(features)
    if not x.is_floating_point():
        raise InputError(f"Rasa: features must be floating point, got {x.dtype}. Convert them first.")
    return x


def _channel_axis(features: Features) -> int:
    return 1 if features.ndim == 4 else -1
