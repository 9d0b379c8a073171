"""ALiBi on a graph: a bias that decreases with the shortest-path length between two tokens."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.dense import DenseBias
from vispe.attention.bias.distance_bias import DistanceBias
from vispe.attention.precision import at_least_float32
from vispe.encodings.parts.bias.slopes import AlibiBase
from vispe.encodings.registry import register
from vispe.errors import ShapeError
from vispe.grid import PerToken, Positions

GIVEN, FAR = "distance", "distance of the unreachable"


@register
class AlibiGraph(AlibiBase):
    """Attention falls off linearly with the number of steps between tokens of a graph, supplied or from the grid.

    bias[h, i, j] = -slope[h] * (length of the shortest path from i to j)          ALiBi: arXiv 2108.12409

    The lengths are supplied with the positions, ``pos.replace(attrs={'distance': lengths})``, lengths (1 or b, n, n)
    with rows and columns for prefix tokens, which are ignored: neighbourhoods of superpixels, geodesic distances within
    a mask, cells of a tissue. A negative or infinite length means that there is no path. Without lengths, the graph is
    the grid, with an edge between neighbours.

    Args:
        num_heads: heads, h.
        depth: blocks of the model, to check `layers`.
        unreachable: 'far': one more than the largest length of the sample; 'mask': never attended, -inf.
        neighbours: of a patch if the grid is the graph: 'edges' (2 per axis) or 'corners' too
            (also diagonal).
        slopes: 'alibi' (the rule of arXiv 2108.12409), 'geometric' (2^(-8k/h)), 'constant' (all 1), 'harmonic'
            (steepest / k), 'radius' (steps within which the bias has 95 % of its weight on a grid) or 'learned' (h per
            layer, from U[0, 1)).
        softplus: apply softplus to learned slopes, so that they stay positive.
        layers: blocks with the bias; all by default.
        biased_heads: number of leading heads with a slope, the others have 0; all by default. 'mask' applies to all
            heads.
        steepest: c of slopes='harmonic', 1 by default.
        factor: multiplier of the slopes of 'alibi', 'geometric' and 'constant'.
        radius: r of slopes='radius', in steps: two numbers, for the first and the last head, with geometric
            logarithm, or one for each head.

    Shapes: pos (n, axes) -> bias (1 or b, h, n, n); prefix rows and columns are 0.
    New resolution: a step costs the same.   Cost: O(h) memory on a grid; supplied lengths need a dense bias, h n^2.
    Invariant to: symmetries of the graph; on a grid to translation, rotation by 90 degrees and flips.
    Raises: ShapeError without lengths for tokens that are not of a grid, if lengths are not (1 or b, n, n), or if
        tokens were dropped without their lengths (`prepare` drops them together).
    Differs from the reference: there is no public code; the form on grids is ours.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> ring = torch.tensor([[[0.0, 1, 2, 1], [1, 0, 1, 2], [2, 1, 0, 1], [1, 2, 1, 0]]])
        >>> pos = Grid((4,)).positions().replace(attrs={"distance": ring})
        >>> create_encoding("alibi_graph(slopes=constant)", num_heads=1).bias(pos, 0).dense()[0, 0, 0]
        tensor([-0., -1., -2., -1.])
    """

    name = "alibi_graph"
    paper = "Train Short, Test Long, https://arxiv.org/abs/2108.12409"
    year = 2021
    ndim = (1, 2, 3)
    fused = False
    encodes = ("distance",)
    invariant = ("translation", "quarter_turns", "reflection")
    formula = r"b_{hij} = -m_h \, \ell(i, j)"
    tested_options = (
        "unreachable=mask,neighbours=corners",
        "slopes=learned,softplus=true",
        "layers=[0,2],biased_heads=2",
    )

    unreachable: Literal["far", "mask"] = "far"
    neighbours: Literal["edges", "corners"] = "edges"

    def prepare(
        self, pos: Positions, generator: torch.Generator | None = None, draws: dict[str, Tensor] | None = None
    ) -> Positions:
        """Bind the lengths to their tokens, so that both are dropped together, and store the largest."""
        lengths = pos.attrs.get(GIVEN)
        if lengths is None or FAR in pos.attrs:
            return pos
        bound = lengths if isinstance(lengths, PerToken) else PerToken(lengths, (1, 2))
        values = self._lengths(pos, bound)
        # stored before tokens are dropped, which could remove the longest path
        return pos.replace(attrs={**pos.attrs, GIVEN: bound, FAR: _largest(values, _valid_pairs(pos)) + 1})

    def _lengths(self, pos: Positions, bound: PerToken) -> Tensor:
        """Return the checked path lengths of the positions."""
        values, n = bound.values, pos.tokens
        if values.ndim != 3 or tuple(values.shape[1:]) != (n, n):
            raise ShapeError(
                f"alibi_graph needs attrs['distance'] of shape (1 or b, {n}, {n}), prefix tokens included, got "
                f"{tuple(values.shape)}."
            )
        return at_least_float32(values)

    def _distance(self, pos: Positions) -> Bias:
        lengths = pos.attrs.get(GIVEN)
        if lengths is None and pos.grid is not None:
            # along edges, steps are horizontal or vertical; across corners also diagonal
            metric = "manhattan" if self.neighbours == "edges" else "chebyshev"
            # spacing 1: the length counts steps, not physical units
            return DistanceBias(self.head_slopes(), pos, metric=metric, spacing=(1.0,) * pos.axes)
        if lengths is None:
            raise ShapeError(
                f"alibi_graph needs path lengths for tokens that are not on a grid, got {pos}. Pass "
                "pos.replace(attrs={'distance': lengths})."
            )
        if FAR not in pos.attrs:
            if pos.index is not None:
                raise ShapeError(
                    f"alibi_graph needs prepare(pos) before tokens are dropped, got {pos}. Call prepare(pos) first."
                )
            pos = self.prepare(pos)
        return DenseBias(self._fall(pos), pos)

    def _fall(self, pos: Positions) -> Tensor:
        """Return the bias (1 or b, h, n, n) from path lengths."""
        values, valid = self._lengths(pos, pos.attrs[GIVEN]), _valid_pairs(pos)
        unreachable = _no_path(values)
        steps = torch.where(unreachable, pos.attrs[FAR] if self.unreachable == "far" else 0.0, values)
        # (1 or b, n, n) -> (1 or b, 1, n, n), for slopes (h, 1, 1)
        steps = steps.masked_fill(~valid, 0.0)[:, None]
        slopes = self.head_slopes()
        slopes = slopes if isinstance(slopes, Tensor) else steps.new_tensor(slopes)
        bias = steps * -slopes[:, None, None]
        return (
            bias.masked_fill((unreachable & valid)[:, None], -torch.inf)
            if self.unreachable == "mask"
            else bias
        )


def _valid_pairs(pos: Positions) -> Tensor:
    """Return the mask of pairs of tokens with positions, (b or 1, n, n)."""
    return pos.spatial[:, :, None] & pos.spatial[:, None]


def _no_path(lengths: Tensor) -> Tensor:
    # negative and infinite lengths mark pairs without a path
    return (lengths < 0) | lengths.isinf()


def _largest(lengths: Tensor, valid: Tensor) -> Tensor:
    """Return the largest length of each sample, (b or 1, 1, 1)."""
    return lengths.masked_fill(_no_path(lengths) | ~valid, 0.0).amax((1, 2), keepdim=True)
