"""LookHere: heads that look in one direction, attention falling off with distance (arXiv 2405.13985)."""

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
from vispe.errors import OptionError
from vispe.grid import Grid, Positions
from vispe.options import NotNegative, Positive, Whole, check_per_axis

Sees = Callable[[Tensor, Tensor], Tensor]  # steps down and right from the query to the key -> is it seen

# sides of a half plane that hold the query's own row or column
HALVES: dict[str, Sees] = {
    "up": lambda y, x: y <= 0,
    "down": lambda y, x: y >= 0,
    "left": lambda y, x: x <= 0,
    "right": lambda y, x: x >= 0,
}
# quarters around an axis that hold both of their diagonals
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


# fields of view of four heads in turn
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
    """Every head looks in one direction only, and attention falls off with distance there.

    bias[h, i, j] = -g * l_layer * m_h * d(p_i, p_j) where head h sees key j, else -inf          arXiv 2405.13985

    Heads come in groups, one for each name of `directions`, and the heads of a group look up, down, left and right in
    turn (corners: up-left, up-right, down-left, down-right). m_h is 1/2 for the first four heads of a group, 1/4 for
    the next four, and so on; 1/4, 1/16, 1/64, 1/256 for heads that see everything.

    Args:
        num_heads: heads, h.
        depth: blocks of the model, supplied by the host; a layer on its own has the mean of `layer_slopes`.
        directions: names joined by hyphens: 'halves' (180 degrees), 'corners' and 'triangles' (90 degrees between and
            around the axes), 'diagonals' (two triangles each), 'eighths1' and 'eighths2' (45 degrees on either side of
            an axis), 'none' (all keys). Groups have four heads each, what is left goes to the first ones; too
            few heads for that are dealt out evenly.
        distance: 'linear' (euclidean), 'sqrt' (its root) or 'square'.
        layer_slopes: l of the first and of the last block; in even steps between them.
        global_slope: g.
        spacing: distance between neighbouring patches per axis, in place of `Grid.spacing`.

    Presets: ``lookhere.halves``, ``lookhere.corners`` and ``lookhere.eighths`` have eight heads in twelve with a field
        of view of 180, 90 and 45 degrees and four that see everything; ``lookhere.released`` is a released model.

    Shapes: pos of a grid (n, 2) -> bias (1, h, n, n) with -inf; prefix rows and columns are 0.
    New resolution: no resampling needed; a step costs the same.   Cost: no parameters, O(1) per score; fused kernels
        pass over rows that a head does not see.
    Invariant to: translation; rotation by 90 degrees and flips of a square grid permute heads.
    Raises: ShapeError if `pos` is not of a 2-axis grid; OptionError for directions that do not exist, fewer heads than
        names, or a block beyond the depth.
    Differs from the reference: float32 with -inf, where the reference stores bfloat16 with its largest number; grids of
        any shape, where its triangles need a square; with fewer than four heads for a name, groups are smaller.

    Not near the identity: a pretrained model needs training with it.

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
    knows = ("distance", "direction")
    invariant = ("translation",)

    num_heads: Whole
    depth: Whole | None = None
    directions: str = "corners-none"
    distance: Literal["linear", "sqrt", "square"] = "linear"
    layer_slopes: tuple[NotNegative, NotNegative] = (1.5, 0.5)
    global_slope: NotNegative = 1.0
    spacing: tuple[Positive, ...] | None = None

    def __post_init__(self) -> None:
        check_per_axis("spacing", self.spacing, 2)
        names = self.directions.split("-")
        unknown = [name for name in names if name not in DIRECTIONS]
        if unknown:
            raise OptionError(
                f"lookhere: directions are names of {', '.join(DIRECTIONS)}, joined by hyphens, got "
                f"directions={self.directions!r}."
            )
        if len(names) > self.num_heads:
            raise OptionError(
                f"lookhere needs a head for each of the directions {self.directions}, got num_heads="
                f"{self.num_heads}; use at most {self.num_heads} of them, such as "
                f"directions={'-'.join(names[-self.num_heads :])!r}."
            )

    def heads(self) -> list[tuple[Sees, float]]:
        """Return the field of view and the slope m of every head."""
        names, made = self.directions.split("-"), []
        for name, size in zip(names, _group_sizes(self.num_heads, len(names)), strict=True):
            views = DIRECTIONS[name]
            for i in range(size):
                far = i if size <= 4 else i * 4 // size
                slope = 4.0 ** -(far + 1) if name == "none" else 2.0 ** -(i // 4 + 1)
                made.append((views[i % len(views)], slope))
        return made

    def layer_slope(self, layer: int) -> float:
        """Return g * l of block `layer`."""
        first, last = self.layer_slopes
        if self.depth is None:
            return self.global_slope * (first + last) / 2
        if not 0 <= layer < self.depth:
            raise OptionError(f"lookhere was made for depth={self.depth} blocks, got block {layer}.")
        return self.global_slope * (first + (last - first) * layer / max(self.depth - 1, 1))

    def bias(self, pos: Positions, layer: int, x: Tensor | None = None) -> Bias | None:
        """Return the bias of block `layer`."""
        grid = self._need_grid(pos)
        key = ("lookhere", self.num_heads, self.directions, self.distance, self.spacing)
        # what heads see and how far it is does not depend on the layer
        far = pos.remember(key, lambda: self._far(grid, pos.coords.device))
        slope = self.layer_slope(layer)
        # 0 times infinity is no number
        values = far * -slope if slope else torch.where(far.isinf(), -torch.inf, 0.0)
        return TableBias(values, pos, one_grid=False, hides=True)

    def _far(self, grid: Grid, device: torch.device) -> Tensor:
        """Return m_h * d of every offset (h, 2 n_1 - 1, 2 n_2 - 1), infinite where a head does not see the key."""
        spaced = grid if self.spacing is None else replace(grid, spacing=self.spacing)
        distance = offsets(spaced, "euclidean", False, "none", device=device)
        if self.distance != "linear":
            distance = distance.sqrt() if self.distance == "sqrt" else distance.square()
        # tables are read at query minus key, directions are from the query to the key
        steps = [
            torch.arange(n - 1, -n, -1, device=device) * s
            for n, s in zip(grid.shape, spaced.spacing or (1.0, 1.0), strict=True)
        ]
        down, right = steps[0][:, None].float(), steps[1].float()
        far = [torch.where(sees(down, right), slope * distance, math.inf) for sees, slope in self.heads()]
        return torch.stack(far)


def _group_sizes(heads: int, groups: int) -> list[int]:
    """Return how many heads each group has: fours, what is left goes to the first groups."""
    fours = -(-heads // 4)
    if fours < groups:
        return [heads // groups + (i < heads % groups) for i in range(groups)]
    # the last four may not be full
    sizes = [4 * (fours // groups + (i < fours % groups)) for i in range(groups)]
    sizes[-1] -= 4 * fours - heads
    return sizes
