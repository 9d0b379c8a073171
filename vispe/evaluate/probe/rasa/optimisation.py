"""Minimisation of the loss of every round of RASA, over all tokens at once, by preconditioned L-BFGS from zero."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vispe.errors import InputError, counted
from vispe.evaluate.probe.rasa.rounds import Activation, gram_schmidt, predict_coords, rasa_loss

# value and slope of the activation at 0
_AT_ZERO = {"sigmoid": (0.5, 0.25), "tanh": (0.0, 1.0), "none": (0.0, 1.0)}
NULL = 1e-12  # variance relative to the largest one, below which a direction is rounding error
_ITERATIONS, _MEMORY = 100, 10  # iterations of L-BFGS in each round; 5 to 30 are usually sufficient
_TOLERANCE = 1e-9  # relative decrease of the loss at which a fit ends


def fit_rounds(
    x: Tensor, t: Tensor, rounds: int, activation: Activation, alpha: float
) -> tuple[Tensor, list[float]]:
    """Return the weights (rounds, outputs, C) of all rounds, and the loss of each without penalty.

    Args:
        x: features (n, C), float64.
        t: targets (n, outputs).
        rounds: number of rounds.
        activation: activation of the regression.
        alpha: ridge penalty.

    Raises:
        InputError: the features of a round vary in fewer directions than there are outputs.
    """
    moment = x.mT @ x / len(x)
    largest = float(torch.linalg.eigvalsh(moment)[-1])
    eye = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    slope = _AT_ZERO[activation][1]
    fitted, losses, removed = [], [], eye[:0]
    for number in range(1, rounds + 1):
        # principal axes of the remaining features; they exclude the planes of earlier rounds
        projector = eye - removed.mT @ removed
        values, vectors = torch.linalg.eigh(projector @ moment @ projector)
        nonzero = values > NULL * largest
        if int(nonzero.sum()) < t.shape[1]:
            raise InputError(
                f"Rasa: round {number} needs features that vary in {counted(t.shape[1], 'direction')}, got "
                f"{int(nonzero.sum())}. Use fewer rounds."
            )
        # coordinates in which the penalised loss has nearly the same curvature in all directions
        axes = vectors[:, nonzero] / (slope**2 * values[nonzero] + alpha).sqrt()
        weights = _minimise(x, t, axes, activation, alpha)
        fitted.append(weights)
        losses.append(float(rasa_loss(x, weights, t, activation)))
        # a second orthogonalisation against earlier rounds removes rounding errors
        directions = gram_schmidt(weights, number)
        directions = directions - (directions @ removed.mT) @ removed
        removed = torch.cat([removed, torch.linalg.qr(directions.mT)[0].mT])
    empty = x.new_zeros(0, t.shape[1], x.shape[1])
    return (torch.stack(fitted) if rounds else empty), losses


def _minimise(x: Tensor, t: Tensor, axes: Tensor, activation: Activation, alpha: float) -> Tensor:
    """Return the weights (outputs, C) of the smallest penalised loss, as combinations of axes (C, r)."""
    z = x @ axes
    # one Newton step from zero, the solution without activation, which exists for any remaining position
    value, slope = _AT_ZERO[activation]
    start = slope * (t - value).mT @ z / len(z)
    if activation == "none":
        return start @ axes.mT
    outputs = len(start)

    def loss_and_gradient(weights: Tensor) -> tuple[float, Tensor]:
        prediction = predict_coords(z, weights, activation)
        error = prediction - t
        derivative = prediction * (1 - prediction) if activation == "sigmoid" else 1 - prediction**2
        penalised = weights @ axes.mT
        loss = error.square().mean() + alpha * penalised.square().sum() / outputs
        gradient = (error * derivative).mT @ z * (2 / t.numel()) + penalised @ axes * (2 * alpha / outputs)
        return float(loss), gradient

    return _lbfgs(loss_and_gradient, start, outputs / 2) @ axes.mT


def _lbfgs(loss_and_gradient: Callable[[Tensor], tuple[float, Tensor]], x: Tensor, scale: float) -> Tensor:
    """Minimise a loss by L-BFGS with backtracking.

    `torch.optim.LBFGS` would import the compiler of torch, which takes seconds.

    Args:
        loss_and_gradient: function that returns the loss and its gradient.
        x: starting point.
        scale: inverse of the curvature at the start.
    """
    loss, gradient = loss_and_gradient(x)
    pairs: list[tuple[Tensor, Tensor]] = []
    for _ in range(_ITERATIONS):
        # two-loop recursion: product of the inverse curvature with the gradient
        direction, coefficients = gradient, []
        for s, y in reversed(pairs):
            coefficients.append((s * direction).sum() / (s * y).sum())
            direction = direction - coefficients[-1] * y
        direction = scale * direction
        for (s, y), coefficient in zip(pairs, reversed(coefficients), strict=True):
            direction = direction + (coefficient - (y * direction).sum() / (s * y).sum()) * s
        decrease, step = float((gradient * direction).sum()), 1.0
        new, (new_loss, new_gradient) = x - direction, loss_and_gradient(x - direction)
        while not new_loss <= loss - 1e-4 * step * decrease and step > 1e-6:
            step /= 2
            new = x - step * direction
            new_loss, new_gradient = loss_and_gradient(new)
        if not new_loss < loss:
            break
        s, y = new - x, new_gradient - gradient
        if float((s * y).sum()) > 1e-12 * float(y.square().sum()):
            pairs = [*pairs[-_MEMORY + 1 :], (s, y)]
            scale = float((s * y).sum() / y.square().sum())
        converged = loss - new_loss <= _TOLERANCE * loss
        x, loss, gradient = new, new_loss, new_gradient
        if converged:
            break
    return x
