"""Episodic training objective: accuracy of a linear classifier that is fitted to scribbles."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Episode(nn.Module):
    """Closed-form ridge regression from scribbled pixels to phases, evaluated at other pixels.

    The classifier is solved for each image with class-balanced weights, and gradients are propagated through the
    solution (Bertinetto et al., arXiv 1805.08136), which optimizes the features for linear classification with few
    labels.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log_ridge = nn.Parameter(torch.tensor(-1.0))
        self.log_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, scribbled: Tensor, phases: Tensor, queries: Tensor) -> Tensor:
        """Return scores (m, K) of the query pixels.

        Args:
            scribbled: (n, f) features of the scribbled pixels.
            phases: (n,) phases of the scribbled pixels, 0..K-1, each at least once.
            queries: (m, f) features of the query pixels.
        """
        one_hot = nn.functional.one_hot(phases).to(scribbled.dtype)
        weight = (1 / one_hot.sum(0))[phases] / one_hot.shape[1]  # sums to 1
        mean = (weight[:, None] * scribbled).sum(0)
        deviation = ((weight[:, None] * (scribbled - mean) ** 2).sum(0) + 1e-4).sqrt()
        x, y = (scribbled - mean) / deviation, one_hot - 1 / one_hot.shape[1]
        xw = x * weight[:, None]
        gram = xw.T @ x + self.log_ridge.exp() * torch.eye(x.shape[1])
        solution = torch.linalg.solve(gram, xw.T @ y)
        return self.log_scale.exp() * ((queries - mean) / deviation) @ solution


def sample(maps: Tensor, pixels: Tensor, stride: int) -> Tensor:
    """Interpolate maps (c, h, w) bilinearly at flat pixel indices (n,) of the full image -> (n, c)."""
    h, w = maps.shape[1:]
    width = w * stride
    xy = torch.stack([pixels % width, pixels // width], -1).to(maps.dtype)
    grid = (xy + 0.5) / torch.tensor([width, h * stride]) * 2 - 1
    values = nn.functional.grid_sample(
        maps[None], grid[None, None], padding_mode="border", align_corners=False
    )
    return values[0, :, 0].T


def intersection_over_union(predicted: Tensor, truth: Tensor) -> float:
    """Return the mean IoU over the phases of labels (n,)."""
    scores = []
    for phase in range(int(truth.max()) + 1):
        p, t = predicted == phase, truth == phase
        scores.append(float((p & t).sum() / (p | t).sum().clamp_min(1)))
    return sum(scores) / len(scores)
