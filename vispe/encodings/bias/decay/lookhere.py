"""LookHere: directed attention heads with distance decay (arXiv 2405.13985)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.distance_metrics import offsets
from vispe.attention.bias.table import TableBias
from vispe.encodings.base import Biased
from vispe.encodings.registry import register
from vispe.errors import OptionError, counted
from vispe.grid import Grid, Positions
from vispe.utils.options import NonNegativeFloat, PositiveFloat, PositiveInt, check_per_axis

Sees = Callable[[Tensor, Tensor], Tensor]  # (row, column) offsets from query to key -> mask of visible keys

# half planes that contain the query's row or column
HALVES: dict[str, Sees] = {
    "up": lambda y, x: y <= 0,
    "down": lambda y, x: y >= 0,
    "left": lambda y, x: x <= 0,
    "right": lambda y, x: x >= 0,
}
# quadrants around an axis, both diagonals included
TRIANGLES: dict[str, Sees] = {
    "up": lambda y, x: y <= -x.abs(),
    "down": lambda y, x: y >= x.abs(),
    "left": lambda y, x: x <= -y.abs(),
    "right": lambda y, x: x >= y.abs(),
}


def _both(*sides: Sees) -> Sees:
    return lambda y, x: sides[0](y, x) & sides[1](y, x)


def _either(*sides: Sees) -> Sees:
    return lambda y, x: sides[0](y, x) | sides[1](y, x)


def _eighth(triangle: str, half: str) -> Sees:
    return _both(TRIANGLES[triangle], HALVES[half])


# fields of view, assigned to heads cyclically
DIRECTIONS: dict[str, tuple[Sees, ...]] = {
    "halves": tuple(HALVES.values()),
    "triangles": tuple(TRIANGLES.values()),
    "corners": tuple(_both(HALVES[a], HALVES[b]) for a in ("up", "down") for b in ("left", "right")),
    "diagonals": tuple(
        _either(TRIANGLES[a], TRIANGLES[b]) for a in ("up", "down") for b in ("right", "left")
    ),
    "eighths1": tuple(
        _eighth(*pair) for pair in (("up", "left"), ("down", "left"), ("left", "up"), ("right", "up"))
    ),
    "eighths2": tuple(
        _eighth(*pair) for pair in (("up", "right"), ("down", "right"), ("left", "down"), ("right", "down"))
    ),
    "none": (lambda y, x: torch.ones_like(y * x, dtype=torch.bool),),
}


@register
class LookHere(Biased):
    """Every head attends in one direction only, with attention falling off with distance.

    bias[h, i, j] = -g * l_layer * m_h * d(p_i, p_j) where head h sees key j, else -inf          arXiv 2405.13985

    Heads come in groups, one per name in `directions`, and the heads of a group face up, down, left and right
    cyclically (corners: up-left, up-right, down-left, down-right). m_h is 1/2 for the first four heads of a group, 1/4
    for the next four, and so on; 1/4, 1/16, 1/64, 1/256 for heads with a full field of view.

    Args:
        num_heads: heads, h.
        depth: blocks of the model, supplied by the host; without it, the mean of `layer_slopes` is used.
        directions: names joined by hyphens: 'halves' (180 degrees), 'corners' and 'triangles' (90 degrees between and
            around the axes), 'diagonals' (two triangles each), 'eighths1' and 'eighths2' (45 degrees on either side of
            an axis), 'none' (all keys). Groups have four heads each, the first groups get the remainder; fewer
            heads than that are divided evenly.
        distance: 'linear' (euclidean), 'sqrt' (its root) or 'square'.
        layer_slopes: l of the first and of the last block, linear in between.
        global_slope: g.
        spacing: distance between neighbouring patches per axis, instead of `Grid.spacing`.

    Presets: ``lookhere.halves``, ``lookhere.corners`` and ``lookhere.eighths`` have eight heads in twelve with a field
        of view of 180, 90 and 45 degrees and four with a full field of view; ``lookhere.released`` is a released model.

    Shapes: pos of a grid (n, 2) -> bias (1, h, n, n) with -inf; prefix rows and columns are 0.
    New resolution: no resampling needed; a step costs the same.   Cost: no parameters, O(1) per score; fused kernels
        skip rows outside of a head's field of view.
    Invariant to: translation; rotation by 90 degrees and flips of a square grid permute heads.
    Raises: ShapeError if `pos` is not of a 2-axis grid; OptionError for directions that do not exist, fewer heads than
        names, or a block beyond the depth.
    Differs from the reference: float32 with -inf, while the reference stores bfloat16 with its largest number; grids of
        any shape, while its triangles need a square; with fewer than four heads per name, groups are smaller.

    Pretrained models need fine-tuning with it.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("lookhere(directions=halves)", num_heads=4, depth=2)
        >>> encoding.bias(Grid((2, 1)).positions(), 0).dense()[0, 0]  # looks up
        tensor([[-0.0000,    -inf],
                [-0.7500, -0.0000]])
    """

    name = "lookhere"
    paper = (
        "LookHere: Vision Transformers with Directed Attention Generalize and Extrapolate, "
        "https://arxiv.org/abs/2405.13985"
    )
    year = 2024
    ndim = (2,)
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "halves": {"directions": "halves-none"},
        "corners": {"directions": "corners-none"},
        "eighths": {"directions": "eighths1-eighths2-none"},
        "released": {"directions": "corners-triangles-none", "global_slope": 2.0},
    }
    fused = True
    encodes = ("distance", "direction")
    invariant = ("translation",)
    formula = (
        r"b_{hij} = -g \, l \, m_h \, d(p_i, p_j) \text{ where head } h \text{ sees key } j, \quad "
        r"-\infty \text{ elsewhere}"
    )
    tested_options = (
        "directions=eighths2-none,distance=sqrt",
        "directions=diagonals,layer_slopes=[1,0]",
        "spacing=[2,0.5],distance=square",
    )

    num_heads: PositiveInt
    depth: PositiveInt | None = None
    directions: str = "corners-none"
    distance: Literal["linear", "sqrt", "square"] = "linear"
    layer_slopes: tuple[NonNegativeFloat, NonNegativeFloat] = (1.5, 0.5)
    global_slope: NonNegativeFloat = 1.0
    spacing: tuple[PositiveFloat, ...] | None = None

    def __post_init__(self) -> None:
        check_per_axis("spacing", self.spacing, 2)
        names = self.directions.split("-")
        unknown = [name for name in names if name not in DIRECTIONS]
        if unknown:
            raise OptionError(
                f"lookhere: directions must be names of {', '.join(DIRECTIONS)}, joined by hyphens, got "
                f"directions={self.directions!r}."
            )
        if len(names) > self.num_heads:
            raise OptionError(
                f"lookhere needs at least one head for each of the directions {self.directions}, got num_heads="
                f"{self.num_heads}. Use at most {self.num_heads} of them, such as "
                f"directions={'-'.join(names[-self.num_heads :])!r}."
            )

    def heads(self) -> list[tuple[Sees, float]]:
        """Return the field of view and the slope m of every head."""
        names, views_and_slopes = self.directions.split("-"), []
        for name, size in zip(names, _group_sizes(self.num_heads, len(names)), strict=True):
            views = DIRECTIONS[name]
            for i in range(size):
                far = i if size <= 4 else i * 4 // size
                slope = 4.0 ** -(far + 1) if name == "none" else 2.0 ** -(i // 4 + 1)
                views_and_slopes.append((views[i % len(views)], slope))
        return views_and_slopes

    def layer_slope(self, layer: int) -> float:
        """Return g * l of block `layer`."""
        first, last = self.layer_slopes
        if self.depth is None:
            return self.global_slope * (first + last) / 2
        if not 0 <= layer < self.depth:
            raise OptionError(
                f"lookhere was made for a depth of {counted(self.depth, 'block')}, got block {layer}."
            )
        # linear from the first to the last block; a single block has the first slope
        return self.global_slope * (first + (last - first) * layer / max(self.depth - 1, 1))

    def bias(self, pos: Positions, layer: int, x: Tensor | None = None) -> Bias | None:
        """Return the bias of block `layer`."""
        grid = self._need_grid(pos)
        key = ("lookhere", self.num_heads, self.directions, self.distance, self.spacing)
        # fields of view and distances do not depend on the layer
        far = pos.remember(key, lambda: self._far(grid, pos.coords.device))
        slope = self.layer_slope(layer)
        # 0 * inf would be NaN
        values = far * -slope if slope else torch.where(far.isinf(), -torch.inf, 0.0)
        return TableBias(values, pos, one_grid=False, is_sparse=True, depends_on=((*key, slope), (far,)))

    def _far(self, grid: Grid, device: torch.device) -> Tensor:
        """Return m_h * d of every offset (h, 2 n_1 - 1, 2 n_2 - 1), infinite outside of the head's field of view."""
        spaced = grid if self.spacing is None else replace(grid, spacing=self.spacing)
        distance = offsets(spaced, "euclidean", False, "none", device=device)
        if self.distance != "linear":
            distance = distance.sqrt() if self.distance == "sqrt" else distance.square()
        # tables are indexed by query minus key, directions point from query to key
        steps = [
            torch.arange(n - 1, -n, -1, device=device) * s
            for n, s in zip(grid.shape, spaced.spacing or (1.0, 1.0), strict=True)
        ]
        down, right = steps[0][:, None].float(), steps[1].float()
        far = [torch.where(sees(down, right), slope * distance, math.inf) for sees, slope in self.heads()]
        return torch.stack(far)


def _group_sizes(heads: int, groups: int) -> list[int]:
    """Return the number of heads per group: multiples of four, the first groups get the remainder."""
    fours = -(-heads // 4)
    if fours < groups:
        return [heads // groups + (i < heads % groups) for i in range(groups)]
    # the last group may be incomplete
    sizes = [4 * (fours // groups + (i < fours % groups)) for i in range(groups)]
    sizes[-1] -= 4 * fours - heads
    return sizes
