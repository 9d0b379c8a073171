"""Circle-RoPE: image patches on a circle around the text axis."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import torch
from torch import Tensor

from vispe.errors import OptionError
from vispe.multimodal import allocation
from vispe.multimodal.registry import register_scheme
from vispe.multimodal.scheme import Scheme
from vispe.multimodal.sections import Sections, sections_for
from vispe.multimodal.streams.attention_blocks import Blocks
from vispe.multimodal.streams.torch_typing import listed
from vispe.multimodal.streams.visual_tokens import VisualTokens
from vispe.utils.options import FiniteFloat, PositiveFloat, UnitInterval


@register_scheme
@dataclass(frozen=True)
class CircleRoPE(Scheme):
    """Patches on a circle in a plane normal to (1, 1, 1), all equally far from every text token (arXiv 2505.16416).

    The angle of a patch is ``alpha`` times its direction from the centre of the grid, with all directions
    stretched to a range of 2 pi, plus ``1 - alpha`` times its fraction of 2 pi in raster order. Stretching
    maps the smallest and the largest direction to the same point, so that with ``alpha=1`` some patches
    coincide. Frames of a video are consecutive circles. Text continues one step after the largest coordinate,
    usually a fraction; coordinates of patches may be negative.

    The paper uses plain MRoPE in every other layer: ``vispe.multimodal.alternating(['circlerope', 'mrope'], layers)``
    assigns schemes to layers for `vispe.convert`.

    Args:
        sections: pairs of channels of time, rows and columns; by default 1/4, 3/8, 3/8 of all.
        radius: radius of the circle, in counter steps. Negative values start on the opposite side.
        alpha: weight of the direction against the raster order, 0 to 1; values outside extrapolate.
        blend: weight of the grid, projected into the same plane, against the circle; 0 to 1.
        move_to_origin: whether directions are relative to the centre of the grid instead of its first patch.
        relative: whether `radius` is in units of the largest coordinate of the grid (after `move_to_origin`) instead
            of steps.
        offset: if set, shift each image along (1, 1, 1) by the absolute value of its smallest coordinate plus
            `offset`.
        stride: counter steps from one frame to the next, on all axes.
        precision: dtype of the points of an image and of the sums that give their coordinates and the counter. The
            authors' code has float32, which changes coordinates by about one millionth of their size.
    """

    name: ClassVar[str] = "circlerope"
    summary: ClassVar[str] = "Patches on a circle around the text axis, equidistant from all text."
    paper: ClassVar[str] = "Circle-RoPE, https://arxiv.org/abs/2505.16416"

    sections: Sections = None
    radius: FiniteFloat = 10.0
    alpha: FiniteFloat = 0.5
    blend: UnitInterval = 0.0
    move_to_origin: bool = True
    relative: bool = False
    offset: FiniteFloat | None = None
    stride: PositiveFloat = 1.0
    precision: Literal["float64", "float32"] = "float64"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.radius == 0:
            raise OptionError("radius=0 maps all patches of an image to one point. Use another radius.")

    def counter_step(self, blocks: Blocks, draws: Tensor | None) -> Tensor:
        """Return one more than the largest coordinate inside each block (m)."""
        grid, _, _, highest = self._grids(blocks)
        return highest[grid] + (blocks.size[:, 0] - 1) * self.stride + 1

    def local(self, tokens: VisualTokens, draws: Tensor | None) -> Tensor:
        """Return the point on the circle, shifted along (1, 1, 1) by the frame (3, k)."""
        grid, first, points, _ = self._grids(tokens.blocks)
        size = tokens.blocks.size
        patch = tokens.index % tokens.of(size[:, 1] * size[:, 2])
        return points.index_select(1, tokens.of(first[grid]) + patch) + tokens.frame * self.stride

    def moved(self, local: Tensor, at: Tensor, tokens: VisualTokens) -> Tensor:
        """Return the coordinates (3, k) of visual tokens whose blocks start at counters (k)."""
        if self.precision == "float64":
            return super().moved(local, at, tokens)
        text = tokens.of(tokens.blocks.text_before)
        # in the order of the authors' code: the text before the image first, then where that text starts
        return ((local.float() + text) + (at - text).float()).double()

    def counters(
        self, blocks: Blocks, draws: Tensor | None, start: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the counters at the start and end of each block (m), rounded after each image in float32."""
        at, after, extent = super().counters(blocks, draws, start)
        if self.precision == "float64":
            return at, after, extent
        largest = (after - at - 1).float()
        rounded_at, rounded_after = at.clone(), after.clone()
        # what rounding has added to the counter of each document
        added: dict[tuple[int, int], Tensor] = {}
        for k, document in enumerate(zip(listed(blocks.sample), listed(blocks.document), strict=True)):
            shift = added.get(document, at.new_zeros(()))
            rounded_at[k] = at[k] + shift
            if blocks.visual[k]:
                text = blocks.text_before[k]
                end = (largest[k] + text) + (rounded_at[k] - text).float() + 1
                shift = added[document] = end.double() - after[k]
            rounded_after[k] = after[k] + shift
        return rounded_at, rounded_after, extent

    def _grids(self, blocks: Blocks) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return grids of blocks (m), first patches of grids (g), all points (3, n), largest coordinates (g)."""
        unique = cast("Callable[..., tuple[Tensor, Tensor]]", torch.unique)  # untyped
        beyond = blocks.size[:, 2].max() + 1  # one integer per size: much faster than unique rows
        codes, grid = unique(blocks.size[:, 1] * beyond + blocks.size[:, 2], return_inverse=True)
        sizes = torch.stack([codes // beyond, codes % beyond], 1)
        count = sizes.prod(1)
        of = torch.arange(len(sizes), device=sizes.device).repeat_interleave(count)
        first = count.cumsum(0) - count
        if self.precision == "float64":
            points = self._points(sizes)
        else:  # in one array, some cosines have another last digit than in the authors' loop over images
            points = torch.cat([self._points(size[None]) for size in sizes.unbind()], 1)
        points = points.double()
        return grid, first, points, _extreme(points.amax(0), of, len(sizes), "amax")

    def _points(self, sizes: Tensor) -> Tensor:
        """Return the points of all patches of grids (g, 2) as time, rows and columns (3, n)."""
        count = sizes.prod(1)
        of = torch.arange(len(sizes), device=sizes.device).repeat_interleave(count)
        first = count.cumsum(0) - count
        index = torch.arange(len(of), device=sizes.device) - first[of]
        real = getattr(torch, self.precision)
        h, w = sizes.to(real).unbind(1)
        y, x = (index // sizes[of, 1]).to(real), (index % sizes[of, 1]).to(real)
        if self.move_to_origin:
            y, x = y - ((h - 1) / 2)[of], x - ((w - 1) / 2)[of]
        direction = _stretched(torch.atan2(y, x), of, len(sizes))
        turn = self.alpha * direction + (1 - self.alpha) * (index.to(real) / count[of] * (2 * math.pi))
        longest = (torch.maximum(h, w) - 1) / (2 if self.move_to_origin else 1)
        radius = self.radius * longest[of] if self.relative else self.radius
        points = _laid(radius * turn.cos(), radius * turn.sin())
        if self.blend:
            points = (1 - self.blend) * points + self.blend * _laid(x, y)
        if self.offset is not None:
            points = points + _extreme(points.amin(0), of, len(sizes), "amin").abs()[of] + self.offset
        return points

    def allocation(self, pairs: int, kv_heads: int = 1) -> Tensor:
        """Return chunks of pairs for time, rows and columns (pairs,)."""
        return allocation.chunked(sections_for(pairs, self.sections, 3 / 8))


def _stretched(angle: Tensor, of: Tensor, grids: int) -> Tensor:
    """Return angles (n), those of each grid stretched to the range 0 to 2 pi; a single angle is unchanged."""
    low, high = (_extreme(angle, of, grids, rule)[of] for rule in ("amin", "amax"))
    span = high - low
    return torch.where(span > 0, (angle - low) / span.masked_fill(span == 0, 1) * (2 * math.pi), angle)


def _extreme(values: Tensor, of: Tensor, grids: int, rule: str) -> Tensor:
    """Return the largest or smallest value of each grid (g)."""
    return values.new_empty(grids).scatter_reduce_(0, of, values, rule, include_self=False)


def _laid(across: Tensor, upright: Tensor) -> Tensor:
    """Return points of a plane (n) as time, rows and columns in the plane normal to (1, 1, 1) (3, n)."""
    normal = _unit(across.new_ones(3))
    u = _unit(torch.stack([-normal[1], normal[0], torch.zeros_like(normal[2])]))
    v = _unit(torch.cross(normal, u, dim=0))
    return (u[:, None] * across + v[:, None] * upright).flip(0)  # columns are x, rows y, and time z


def _unit(vector: Tensor) -> Tensor:
    return vector / vector.square().sum().sqrt()
