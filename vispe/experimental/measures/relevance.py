"""Attribution of an output to content and positions."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Relevance:
    """Attribution of an output to content and positions; all float64 on the CPU.

    Attributes:
        output: the propagated output.
        tokens: relevance of content, (n,): prefix tokens first, then the patches row-major.
        positions: relevance of positions, (1 + layers, n): of the additive table, then of the attention of each layer,
            by the rotated token, or by the key of a bias.
        offsets: relevance of biases between patches, (2 h - 1, 2 w - 1), query minus key; 0 without a bias.
        leaks: relevance absorbed by layers, by kind.
        grid: patches (h, w).
    """

    output: float
    tokens: Tensor
    positions: Tensor
    offsets: Tensor
    leaks: dict[str, float]
    grid: tuple[int, int]

    @property
    def shares(self) -> Tensor:
        """Absolute relevance of positions relative to that of positions and content, (1 + layers,).

        Prefix tokens are constants, neither content nor position, and are excluded.
        """
        sizes = self.positions.abs().sum(1)
        total = self.tokens[-self.grid[0] * self.grid[1] :].abs().sum() + sizes.sum()
        return sizes / total if total else sizes

    @property
    def gap(self) -> float:
        """Relative conservation error due to rounding: |output - total relevance| / |output|."""
        total = float(self.tokens.sum() + self.positions.sum()) + sum(self.leaks.values())
        return abs(self.output - total) / max(abs(self.output), 1e-30)
