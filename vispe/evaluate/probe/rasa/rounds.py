"""Algorithms of RASA: iterative removal of linear position from patch features.

Each round fits a linear regression from features to coordinates, and projects its weight vectors out of the features.
Source: Franca (arXiv 2507.14137). Projections of several rounds combine in two ways:

- `authors`: the product of the projections of the rounds. It is a projection only if the planes of different rounds are
  orthogonal, which no step enforces.
- `joint` (ours): one orthogonal projection onto the complement of all weight vectors, independent of their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from vispe.errors import InputError, ShapeError
from vispe.utils.options import checked

Activation = Literal["sigmoid", "tanh", "none"]
Order = Literal["joint", "authors"]

_PARALLEL = 1e-12  # smaller remaining norm of a unit vector: combination of earlier vectors


def grid_coords(shape: Sequence[int], device: torch.device | str | None = None) -> Tensor:
    """Return the regression targets of a grid, (tokens, axes) float64 in row-major order.

    Every axis increases from 0 to 1 over its own length; an axis of length 1 is 0.

    Args:
        shape: number of tokens along each axis, such as (h, w) or (depth, h, w).
        device: device of the result.

    Raises:
        ShapeError: an axis has no tokens.

    >>> grid_coords((2, 2)).tolist()
    [[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]
    """
    if len(shape) == 0 or min(shape) < 1:
        raise ShapeError(
            f"grid_coords: shape must have at least one token per axis, got {tuple(shape)}. Use (h, w)."
        )
    lines = [torch.arange(n, dtype=torch.float64, device=device) / max(n - 1, 1) for n in shape]
    return torch.stack(torch.meshgrid(*lines, indexing="ij"), dim=-1).flatten(0, -2)


@checked
def predict_coords(x: Tensor, regressor: Tensor, activation: Activation = "sigmoid") -> Tensor:
    """Return the predicted coordinates activation(x Wᵀ), (..., outputs), without bias.

    Args:
        x: features (..., C).
        regressor: W, (outputs, C).
        activation: `sigmoid`, `tanh` or `none`.

    Raises:
        OptionError: unknown activation.
    """
    logits = x @ regressor.mT
    return logits if activation == "none" else getattr(torch, activation)(logits)


def rasa_loss(x: Tensor, regressor: Tensor, coords: Tensor, activation: Activation = "sigmoid") -> Tensor:
    """Return the squared error of predicted coordinates, averaged over images, tokens and outputs.

    Args:
        x: features (..., tokens, C), after the removal of earlier rounds.
        regressor: W of the round that is fitted, (outputs, C).
        coords: targets (tokens, outputs), such as those of `grid_coords`.
        activation: activation of the prediction.

    Raises:
        ShapeError: features and targets have different numbers of tokens, or outputs differ.
    """
    if tuple(coords.shape) != (x.shape[-2], len(regressor)):
        raise ShapeError(
            f"rasa_loss: coords must be (tokens, outputs) = {(x.shape[-2], len(regressor))}, got "
            f"{tuple(coords.shape)}. Use grid_coords of the grid of the features."
        )
    return (predict_coords(x, regressor, activation) - coords).square().mean()


def round_directions(weights: Tensor) -> Tensor:
    """Return the orthonormal directions of every round, by Gram-Schmidt of its weight vectors in order.

    Directions of different rounds are not orthogonal to each other.

    Args:
        weights: (rounds, outputs, C).

    Returns:
        Directions (rounds, outputs, C).

    Raises:
        ShapeError: wrong number of axes.
        InputError: within a round, a weight vector is zero, not finite, or linearly dependent on earlier
            vectors.
    """
    _check_rounds("weights", weights)
    rounds = [gram_schmidt(rows, number) for number, rows in enumerate(weights, 1)]
    return torch.stack(rounds) if rounds else weights


def gram_schmidt(rows: Tensor, number: int) -> Tensor:
    """Return the orthonormal directions (outputs, C) of one round.

    Args:
        rows: weight vectors (outputs, C).
        number: number of the round, from 1, for the message.

    Raises:
        InputError: a weight vector is zero, not finite, or linearly dependent on the earlier ones.
    """
    basis: list[Tensor] = []
    for row in rows:
        norm = row.norm()
        # normalised first, so that the limit does not depend on the scale of the weights
        unit = row / norm
        for direction in basis:
            unit = unit - (unit @ direction) * direction
        rest = unit.norm()
        # a comparison with NaN is False, hence `not ... >`
        if not (norm > 0 and rest > _PARALLEL):
            raise InputError(
                f"rasa: the weight vectors of round {number} must be linearly independent, got norms "
                f"{[float(f'{float(r.detach().norm()):.3g}') for r in rows]}. Use fewer rounds or outputs."
            )
        basis.append(unit / rest)
    return torch.stack(basis) if basis else rows


def remove_rounds(x: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
    """Remove the directions of every round from features, round after round (`authors`).

    Args:
        x: features (..., C).
        directions: (rounds, outputs, C), orthonormal within each round.

    Returns:
        The remaining features, and the component that the last round removed; both (..., C). Without rounds, the
        features and zeros.

    Raises:
        ShapeError: wrong number of axes, or different numbers of channels.
    """
    _check_rounds("directions", directions, x.shape[-1])
    last = torch.zeros_like(x)
    for basis in directions:
        # all components are computed before any is removed; within a round, this equals removal one by one
        last = (x @ basis.mT) @ basis
        x = x - last
    return x, last


def authors_projector(directions: Tensor) -> Tensor:
    """Return P = P_K ... P_1 with P_k = I - Σ d dᵀ over the directions of round k, (C, C); x_out = x Pᵀ.

    P is neither symmetric nor idempotent if directions of different rounds are not orthogonal.

    Args:
        directions: (rounds, outputs, C), orthonormal within each round.
    """
    _check_rounds("directions", directions)
    eye = torch.eye(directions.shape[-1], dtype=directions.dtype, device=directions.device)
    return remove_rounds(eye, directions)[0].mT


def joint_projector(weights: Tensor) -> Tensor:
    """Return I - Q Qᵀ, (C, C), with Q an orthonormal basis of the weight vectors of all rounds together.

    It is symmetric and idempotent, and does not depend on the order of the rounds.

    Args:
        weights: (rounds, outputs, C), or directions.
    """
    _check_rounds("weights", weights)
    rows = weights.flatten(0, 1)
    eye = torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
    norms = rows.norm(dim=1, keepdim=True)
    rows = rows / torch.where(norms > 0, norms, 1)
    if len(rows) == 0:
        return eye
    if int(torch.linalg.matrix_rank(rows.detach())) == len(rows):
        q = torch.linalg.qr(rows.mT)[0]
    else:
        # QR would complete dependent vectors by arbitrary directions
        _, s, vt = torch.linalg.svd(rows, full_matrices=False)
        q = vt[s > s[0] * max(rows.shape) * torch.finfo(rows.dtype).eps].mT
    return eye - q @ q.mT


def _check_rounds(name: str, values: Tensor, channels: int | None = None) -> None:
    if values.ndim != 3 or (channels is not None and values.shape[-1] != channels):
        width = "C" if channels is None else channels
        raise ShapeError(
            f"rasa: {name} must be (rounds, outputs, {width}), got {tuple(values.shape)}. Stack one matrix per round."
        )
