"""PRoPE: queries, keys and values in the coordinates of their camera's projection (arXiv 2507.10496)."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from vispe.attention.precision import at_least_float32, readable
from vispe.attention.transform.abstract_transform import Transform
from vispe.attention.transform.blocks import BlockTransform
from vispe.attention.transform.pairs import PairRotation
from vispe.attention.transform.sections import Sections
from vispe.encodings.base import Rotary
from vispe.encodings.parts.rotary.cameras import (
    EXTRINSIC,
    IMAGE_SIZE,
    INTRINSIC,
    inverse,
    normalized,
    per_token,
    projection,
)
from vispe.encodings.registry import register
from vispe.errors import OptionError, ShapeError, counted
from vispe.grid import PerToken, Positions
from vispe.utils.options import PositiveFloat, PositiveInt

CAMERAS = {EXTRINSIC: ("prope", "poses", 4), INTRINSIC: ("prope", "intrinsics", 3)}


@register
class PRoPE(Rotary):
    """Expresses tokens in the projection of their camera and at the row and column of their patch.

    q' = [P^T q, R(-x) q, R(-y) q], k' = [P^-1 k, R(-x) k, R(-y) k], v' likewise, out = [P out', R(x) out', R(y) out']
    with P = K E, so that logits depend on P_i P_j^-1                                arXiv 2507.10496

    The first half of the d channels of a head is multiplied by P in groups of 4, a quarter is rotated by the column x
    of the patch and a quarter by its row y, each in pairs (i, i + d / 8).

    Poses are read from ``Positions.attrs['extrinsic']``: E, camera from world, (b or 1, views, 4, 4) with tokens in
    view-major order, or `PerToken` with (b or 1, n, 4, 4). Without poses all tokens belong to one view and P cancels.
    Divide translations by their mean length first: P is not a rotation, so the unit of length scales the logits.

    ``Positions.attrs['intrinsic']`` has the intrinsics K in pixels, (b or 1, views, 3, 3) or `PerToken`, and
    ``Positions.attrs['image_size']`` the (height, width) of every view in pixels; (1, 1) if K is already divided by it.
    Crops and flips of the images change K. Without intrinsics P = E, as in `gta`.

    Several views have the positions of ``Grid((views, rows, columns))``, or free coordinates (row, column) within each
    view.

    Args:
        dim: width of the tokens; its channels per head are d, a multiple of 8 in the paper. Other widths of 4 or more
            have d // 8 pairs (at least 1) of columns and of rows, the other groups of 4 are those of cameras.
        num_heads: heads, h.
        head_dim: channels of a head, d_h; dim / num_heads by default.
        base: ratio of the highest frequency (one radian per unit of the spacing) to just below the lowest.

    Shapes: pos (n, 2), or a grid of views, rows and columns with cameras -> matrices (b, 1, n, groups, 4, 4) and tables
        (1, 1, n, pairs) of columns and rows.
    New resolution: no resampling needed; new offsets are extrapolated.   Cost: no parameters; a product with 4 x 4
        matrices and a rotation of queries, keys, values and the output.
    Invariant to: translation in coordinates; a common change of the world frame of all cameras (E -> E G).
    Raises: OptionError if d is below 4; ShapeError if `pos` has other axes, or camera matrices are
        incomplete, singular or do not fit the tokens.
    Differs from the reference: the inverse of P is exact for every invertible matrix, also if E is not rigid; a skew of
        the camera is part of K; d need not be a multiple of 8; prefix tokens are unchanged.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("prope", dim=16, num_heads=2)
        >>> encoding.transform(Grid((2, 3)).positions(), 0).query(torch.ones(1, 2, 6, 8)).shape
        torch.Size([1, 2, 6, 8])
    """

    name = "prope"
    paper = "Cameras as Relative Positional Encoding, https://arxiv.org/abs/2507.10496"
    year = 2025
    encodes = ("distance", "direction")
    invariant = ("translation",)
    formula = (
        r"a_{ij} \propto q_i^\top (P_i P_j^{-1} \oplus R_{x_i - x_j} \oplus R_{y_i - y_j}) \, k_j, \quad o_i = "
        r"\sum_j w_{ij} (P_i P_j^{-1} \oplus R_{x_i - x_j} \oplus R_{y_i - y_j}) \, v_j"
    )
    tested_options = ("base=7",)

    dim: PositiveInt
    num_heads: PositiveInt
    head_dim: PositiveInt | None = None
    base: PositiveFloat = 100.0

    def __post_init__(self) -> None:
        head = self._resolve_head_dim()
        if head < 4:
            raise OptionError(
                f"prope: head_dim must be at least 4, got {head}. Change num_heads or pass head_dim."
            )
        # a multiple of 8 has exactly a quarter for each axis; other widths leave the remainder to the cameras
        self.pairs = max(1, head // 8)
        self.groups = (head - 4 * self.pairs) // 4

    def prepare(
        self, pos: Positions, generator: torch.Generator | None = None, draws: dict[str, Tensor] | None = None
    ) -> Positions:
        """Assign to every token the camera of its view, so that both are dropped together."""
        if not any(isinstance(pos.attrs.get(name), Tensor) for name in CAMERAS):
            return pos
        return pos.replace(attrs=self._assigned(pos))

    def _assigned(self, pos: Positions) -> dict[str, Any]:
        """Return the attributes with one matrix per token instead of one per view."""
        attrs: dict[str, Any] = dict(pos.attrs)
        views: list[int] = []
        for name, facts in CAMERAS.items():
            matrices = attrs.get(name)
            if isinstance(matrices, Tensor):
                attrs[name] = per_token(pos, matrices, *facts)
                _check_invertible(name, matrices)
                views.append(matrices.shape[1])
        count = views[0] if views else 1
        if views and views[-1] != count:
            raise ShapeError(
                f"prope needs one pose and one intrinsic matrix per view, got {EXTRINSIC} and {INTRINSIC} of "
                f"{count} and {counted(views[-1], 'view')}."
            )
        rows_per_view = pos.grid is None or pos.grid.shape[0] == count if pos.axes == 3 else pos.grid is None
        if count > 1 and not rows_per_view:
            raise ShapeError(
                f"prope counts rows and columns within each of {counted(count, 'view')}, got {pos}. Use the "
                f"positions of Grid(({count}, rows, columns))."
            )
        return attrs

    def projections(self, pos: Positions) -> Tensor | None:
        """Return P of every token (b or 1, n, 4, 4), the identity for tokens without a position; None without cameras.

        Raises:
            ShapeError: intrinsics come without poses or without the size of the images, or shapes do not fit.
        """
        attrs = self._assigned(pos)
        extrinsic, intrinsic = attrs.get(EXTRINSIC), attrs.get(INTRINSIC)
        if extrinsic is None:
            if intrinsic is not None:
                raise ShapeError(
                    f"prope needs the poses of cameras with intrinsics, got none. Put (b, views, 4, 4) matrices into "
                    f"Positions.attrs[{EXTRINSIC!r}]."
                )
            return None
        if not (isinstance(extrinsic, PerToken) and (intrinsic is None or isinstance(intrinsic, PerToken))):
            raise ShapeError(
                f"prope needs camera matrices as tensors or PerToken, got {type(extrinsic).__name__} and "
                f"{type(intrinsic).__name__}."
            )
        if not self.groups:
            raise ShapeError(
                f"prope needs head_dim of 8 or more for cameras, got {self._resolve_head_dim()}. Change num_heads or "
                "pass head_dim."
            )
        pose = at_least_float32(extrinsic.values)
        camera = None
        if intrinsic is not None:
            camera = normalized(at_least_float32(intrinsic.values), *_image_size(pos))
        # P = K E of every token, (b or 1, n, 4, 4)
        matrices = projection(pose, camera)
        eye = torch.eye(4, dtype=matrices.dtype, device=matrices.device)
        return torch.where(pos.spatial[..., None, None], matrices, eye)

    def angles(self, pos: Positions) -> tuple[Tensor, Tensor]:
        """Return the angles of columns and rows, (b or 1, n, pairs) each, 0 for tokens without a position."""
        index = torch.arange(self.pairs, dtype=pos.coords.dtype, device=pos.coords.device)
        # base^(-i / pairs) radians per unit of the coordinates
        freqs = torch.exp(index * (-math.log(self.base) / self.pairs))
        # rows and columns are the last two axes, also after an axis of views
        rows, columns = (pos.coords[..., -2:] * pos.spatial[..., None]).unbind(-1)
        return columns[..., None] * freqs, rows[..., None] * freqs

    def transform(self, pos: Positions, layer: int, x: Tensor | None = None) -> Transform:
        """Return the transform of queries, keys, values and outputs."""
        matrices = self.projections(pos)
        # the first axis of three counts views, which nothing but their cameras distinguishes
        if pos.axes != 3 or matrices is None:
            self._need_axes(pos)
        x_rotation, y_rotation = pos.remember(
            (self.name, self.pairs, self.base), lambda: self._rotations(pos)
        )
        camera = Transform() if matrices is None else _camera_blocks(matrices, self.groups)
        # two channels per pair; channels of the camera come first, then columns, then rows
        size = 2 * self.pairs
        return Sections((4 * self.groups, camera), (size, x_rotation), (size, y_rotation))

    def _rotations(self, pos: Positions) -> tuple[PairRotation, PairRotation]:
        # rotated by minus the angle, which values and the output show
        columns, rows = (
            PairRotation(angles[:, None].cos(), -angles[:, None].sin(), "half", values=True)
            for angles in self.angles(pos)
        )
        return columns, rows


def _camera_blocks(matrices: Tensor, groups: int) -> BlockTransform:
    """Return the transform of `groups` groups of 4 channels by projections (b or 1, n, 4, 4)."""
    # (b or 1, n, 4, 4) -> (b or 1, 1, n, groups, 4, 4)
    forward, backward = (
        m[:, None, :, None].expand(-1, -1, -1, groups, -1, -1) for m in (matrices, inverse(matrices))
    )
    # P^T for queries and P^-1 for keys and values, so that logits depend on P_i P_j^-1
    return BlockTransform(q=forward.mT, k=backward, v=backward, out=forward)


def _check_invertible(name: str, matrices: Tensor) -> None:
    """Raise `ShapeError` for matrices without an inverse, where their values can be read for free."""
    if readable(matrices) and not bool(torch.linalg.det(matrices.detach().double()).abs().gt(0).all()):
        raise ShapeError(
            f"prope needs invertible matrices as Positions.attrs[{name!r}], got a singular or non-finite one."
        )


def _image_size(pos: Positions) -> tuple[float, float]:
    """Return height and width of the images in pixels."""
    size: Any = pos.attrs.get(IMAGE_SIZE)
    is_pair = isinstance(size, list | tuple) and len(size) == 2
    if not is_pair or not all(isinstance(n, Real) and 0 < float(n) < math.inf for n in size):
        raise ShapeError(
            f"prope needs the size of the images for intrinsics in pixels, got {size!r}. Put (height, width) into "
            f"Positions.attrs[{IMAGE_SIZE!r}]."
        )
    return float(size[0]), float(size[1])
