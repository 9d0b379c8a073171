"""The question put to the features: does a linear classifier, taught by scribbles, find the phases of all pixels?"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Episode(nn.Module):
    """Ridge regression from scribbled pixels to phases in closed form; the loss is that of the other pixels.

    The classifier of each picture is solved anew, with weights that balance the phases, and gradients go through the
    solution (Bertinetto et al., arXiv 1805.08136), so features learn to be what a
    linear classifier with few labels needs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log_ridge = nn.Parameter(torch.tensor(-1.0))
        self.log_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, scribbled: Tensor, phases: Tensor, asked: Tensor) -> Tensor:
        """Return scores (m, K) of the asked pixels.

        Args:
            scribbled: (n, f) features of the scribbled pixels.
            phases: (n,) their phases, 0..K-1, each at least once.
            asked: (m, f) features.
        """
        answers = nn.functional.one_hot(phases).to(scribbled.dtype)
        weight = (1 / answers.sum(0))[phases] / answers.shape[1]  # sums to 1
        mean = (weight[:, None] * scribbled).sum(0)
        deviation = ((weight[:, None] * (scribbled - mean) ** 2).sum(0) + 1e-4).sqrt()
        x, y = (scribbled - mean) / deviation, answers - 1 / answers.shape[1]
        xw = x * weight[:, None]
        gram = xw.T @ x + self.log_ridge.exp() * torch.eye(x.shape[1])
        solved = torch.linalg.solve(gram, xw.T @ y)
        return self.log_scale.exp() * ((asked - mean) / deviation) @ solved


def sample(maps: Tensor, where: Tensor, stride: int) -> Tensor:
    """Read maps (c, h, w) at pixels (n,), counted row by row at full size, by bilinear interpolation -> (n, c)."""
    h, w = maps.shape[1:]
    width = w * stride
    at = torch.stack([where % width, where // width], -1).to(maps.dtype)
    grid = (at + 0.5) / torch.tensor([width, h * stride]) * 2 - 1
    read = nn.functional.grid_sample(maps[None], grid[None, None], padding_mode="border", align_corners=False)
    return read[0, :, 0].T


def intersection_over_union(found: Tensor, truth: Tensor) -> float:
    """Return the mean over phases of the IoU of labels (n,)."""
    scores = []
    for phase in range(int(truth.max()) + 1):
        one, other = found == phase, truth == phase
        scores.append(float((one & other).sum() / (one | other).sum().clamp_min(1)))
    return sum(scores) / len(scores)
