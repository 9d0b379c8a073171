"""Rotations of three-channel blocks about several axes, which do not commute (Spherical RoPE, QuatRo, GeoPE)."""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import Tensor, nn

from vispe.attention.precision import at_least_float32, exact_product, readable
from vispe.attention.transform.abstract_transform import Transform
from vispe.attention.transform.blocks import BlockTransform
from vispe.encodings.base import Rotary
from vispe.encodings.registry import register
from vispe.errors import OptionError
from vispe.grid import Positions
from vispe.grid.frequencies import inverse_frequencies
from vispe.utils.constants import constant
from vispe.utils.options import Axes, PositiveFloat, PositiveInt, Spacing, check_per_axis

Order = Literal["euler", "quaternion", "mean"]
EULER_AXES = ((1.0, 0.0, 0.0), (0.0, 0.0, 1.0), (0.0, 1.0, 0.0))  # x, z, y for grid axes 0, 1, 2


@register
class RopeSphere(Rotary):
    """Rotates blocks of three query and key channels in space, about one axis per axis of the grid.

    q' = R(p) q, k' = R(p) k, R(p) = R(u_A, p_A w_A) ... R(u_1, p_1 w_1), R(u, t) = exp(t [u]x)       arXiv 2511.08368

    Rotations about different axes do not commute, so attention depends on absolute positions, not only on offsets.
    Spherical RoPE (arXiv 2511.08368) has ``order=euler``, QuatRo (arXiv 2511.11665) ``order=quaternion`` and GeoPE
    (arXiv 2512.04963) ``order=mean``.

    Args:
        dim: width of the tokens; its channels per head are d_h.
        num_heads: heads, h.
        head_dim: channels of a head, d_h; dim / num_heads by default.
        axes: number of axes of the grid, 1 to 3.
        order: 'euler' rotates about fixed axes, grid axis 0 about x, then 1 about z, then 2 about y; 'quaternion' does
            so about learned axes u; 'mean' is one rotation by the mean of the rotation vectors t_a u_a, in which no
            axis of the grid is first.
        temperature: ratio of the highest to just below the lowest initial frequency; block p of P starts with
            w = temperature^(-p / P) for every axis.
        spacing: distance between neighbouring patches per axis, instead of `Grid.spacing`.

    Shapes: pos (n, axes) -> matrices (1 or b, h, n, d_h // 3, 3, 3). One or two remaining channels are not rotated.
    New resolution: coordinates are extrapolated, in patches; scaled coordinates change the relative rotations of two
        patches nonlinearly.
    Cost: h (d_h // 3) axes frequencies per layer, and three times as many for u; 3 n d_h products per head for q and k.
    Invariant to: nothing (translation with one axis, or with parallel u); norms are preserved.
    Raises: ShapeError if `pos` has other axes; OptionError for heads of fewer than 3 channels, or u of length 0.
    Differs from the reference: written from the abstracts, so the order of axes, the initial values and the
        frequencies per head are ours; angles of 'mean' are not wrapped to (-pi, pi] before they are averaged.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("rope_sphere", dim=24, num_heads=2)
        >>> encoding.transform(Grid((2, 3)).positions(), 0).query(torch.ones(1, 2, 6, 12)).shape
        torch.Size([1, 2, 6, 12])
    """

    name = "rope_sphere"
    paper = "Spherical Rotary Position Embedding (with QuatRo and GeoPE), https://arxiv.org/abs/2511.08368"
    year = 2025
    ndim = (1, 2, 3)
    encodes = ("distance", "direction", "position")
    formula = (
        r"q' = R(p) \, q, \quad k' = R(p) \, k, \quad R(p) = e^{p_A w_A [u_A]_\times} \cdots "
        r"e^{p_1 w_1 [u_1]_\times}"
    )
    tested_options = (
        "order=quaternion",
        "order=mean",
        "axes=1",
        "axes=3",
        "order=quaternion,axes=3,temperature=10",
        "order=mean,spacing=[2,0.5]",
    )

    dim: PositiveInt
    num_heads: PositiveInt
    head_dim: PositiveInt | None = None
    axes: Axes = 2
    order: Order = "euler"
    temperature: PositiveFloat = 100.0
    spacing: Spacing | None = None

    def __post_init__(self) -> None:
        head = self._resolve_head_dim()
        if head < 3:
            raise OptionError(
                f"rope_sphere needs 3 channels per head or more, got head_dim={head}. Choose a smaller num_heads."
            )
        check_per_axis("spacing", self.spacing, self.axes)
        self._accept(self.axes)
        self.freqs = nn.Parameter(torch.empty(self.num_heads, head // 3, self.axes))
        if self.order != "euler":
            self.directions = nn.Parameter(torch.empty(*self.freqs.shape, 3))
        self.reset_parameters()

    @property
    def per_layer(self) -> bool:
        """True: every layer has its own frequencies."""
        return True

    def reset_parameters(self) -> None:
        """Set geometric frequencies, equal for all axes, and draw u from random orthonormal frames."""
        with torch.no_grad():
            blocks = self.freqs.shape[1]
            self.freqs.copy_(inverse_frequencies(2 * blocks, self.temperature)[:, None])
            if self.order != "euler":
                gaussian = torch.randn(*self.freqs.shape[:2], 3, 3, device=self.directions.device)
                frames = cast("tuple[Tensor, Tensor]", torch.linalg.qr(gaussian))[0]  # pyright: ignore[reportUnknownMemberType]
                self.directions.copy_(frames[..., : self.axes, :])

    def transform(self, pos: Positions, layer: int, x: Tensor | None = None) -> Transform:
        """Return the rotation of queries and keys, by the same matrix per token."""
        self._need_axes(pos)
        rotations = self._eval_cache(self, pos, lambda: self.rotations(pos))
        return BlockTransform(q=rotations, k=rotations)

    def rotations(self, pos: Positions) -> Tensor:
        """Return the rotation matrices (b or 1, h, n, blocks, 3, 3), float32 or better.

        Raises:
            OptionError: a learned axis has length 0.
        """
        scaled = pos if self.spacing is None else pos.with_spacing(self.spacing)
        freqs, directions = at_least_float32(self.freqs), self._directions()
        # radians about each axis, of shape (b, h, n, blocks, axes)
        angles = scaled.coords[:, None, :, None] * freqs[:, None]
        vectors = angles[..., None] * directions[:, None]  # rotation vectors
        if self.order == "mean":
            matrix = rotation_of(vectors.mean(-2))
        else:
            matrix = rotation_of(vectors[..., 0, :])
            for axis in range(1, self.axes):  # the first axis of the grid acts first
                matrix = exact_product(rotation_of(vectors[..., axis, :]), matrix)
        # exactly the identity for tokens without a position
        eye = torch.eye(3, dtype=matrix.dtype, device=matrix.device)
        return torch.where(pos.spatial[:, None, :, None, None, None], matrix, eye)

    def _directions(self) -> Tensor:
        """Return the unit vectors u (h or 1, blocks or 1, axes, 3)."""
        if self.order == "euler":
            freqs = at_least_float32(self.freqs)
            return constant(EULER_AXES[: self.axes], freqs.dtype, freqs.device)[None, None]
        directions = at_least_float32(self.directions)
        length = torch.linalg.vector_norm(directions, dim=-1, keepdim=True)
        if readable(directions) and not bool(length.all()):
            head, block, axis, _ = (length == 0).nonzero()[0].tolist()
            raise OptionError(
                f"rope_sphere: rotation axes need a length above 0, got 0 for head {head}, block {block}, axis {axis}. "
                f"Set directions[{head}, {block}, {axis}] to another vector."
            )
        return directions / length


def rotation_of(vectors: Tensor) -> Tensor:
    """Return the rotation matrices (..., 3, 3) about rotation vectors (..., 3), right-handed, by their length.

    exp([v]x) = 1 + a [v]x + b [v]x [v]x, a = sin|v| / |v|, b = (1 - cos|v|) / |v|^2; smooth at v = 0.
    """
    square = vectors.square().sum(-1)
    # series near 0, where the length has no gradient; its error is below the precision of the dtype
    near = square < torch.finfo(vectors.dtype).eps ** 0.5
    length = torch.where(near, 1.0, square).sqrt()
    a = torch.where(near, 1 - square / 6, length.sin() / length)
    # 1 - cos t = 2 sin(t / 2)^2, without cancellation
    b = torch.where(near, 0.5 - square / 24, 2 * ((length / 2).sin() / length).square())
    x, y, z = vectors.unbind(-1)
    zero = torch.zeros_like(x)
    cross = torch.stack([zero, -z, y, z, zero, -x, -y, x, zero], -1).unflatten(-1, (3, 3))
    # [v]x [v]x = v v^T - |v|^2
    eye = torch.eye(3, dtype=vectors.dtype, device=vectors.device)
    twice = vectors[..., :, None] * vectors[..., None, :] - square[..., None, None] * eye
    return eye + a[..., None, None] * cross + b[..., None, None] * twice
