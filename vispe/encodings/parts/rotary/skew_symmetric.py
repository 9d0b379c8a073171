"""Rotations exp(sum_i x_i A_i) with learned skew-symmetric generators A_i."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, cast

import torch
from torch import Tensor, nn

from vispe.attention.precision import at_least_float32, exact_product
from vispe.attention.transform.abstract_transform import Transform
from vispe.attention.transform.blocks import BlockTransform
from vispe.encodings.base import Rotary
from vispe.errors import OptionError, counted
from vispe.grid import Positions
from vispe.utils.autocast import no_autocast
from vispe.utils.interval import Interval
from vispe.utils.options import Axes, PositiveInt

Block = Annotated[int, Interval(least=2)]
eigh = cast("Callable[[Tensor], tuple[Tensor, Tensor]]", torch.linalg.eigh)  # pyright: ignore[reportUnknownMemberType]


class SkewRotary(Rotary):
    """Rotates blocks of query and key channels by matrix exponentials of learned skew-symmetric generators.

    The entries above the diagonal are the parameters: `skew` (heads or 1, axes or 1, blocks, block (block - 1) / 2).
    """

    ndim = (1, 2, 3)

    dim: PositiveInt
    num_heads: PositiveInt
    head_dim: PositiveInt | None = None
    axes: Axes = 2

    def __post_init__(self) -> None:
        self._accept(self.axes)
        self.head = self._resolve_head_dim()

    def _set_blocks(self, block: int | None, parts: int) -> None:
        """Set the channels per block (at most 8 by default) and the blocks per head, in `parts` equal groups."""
        largest = self.head // parts
        if largest < 2 or (block is not None and block > largest):
            raise OptionError(
                f"{self.name} needs a block of 2 to {largest} channels for {counted(self.head, 'channel')} per head "
                f"and {counted(parts, 'part')}, got block={block!r}."
            )
        self.width = min(8, largest) if block is None else block
        # complete blocks in equal groups; remaining channels are not rotated
        self.blocks = self.head // (parts * self.width) * parts

    def _set_skew(self, heads: int, axes: int) -> None:
        self.skew = nn.Parameter(torch.empty(heads, axes, self.blocks, self.width * (self.width - 1) // 2))

    def generators(self) -> Tensor:
        """Return the generators (h or 1, axes, blocks, s, s), float32 or better."""
        raise NotImplementedError

    def coordinates(self, pos: Positions) -> Tensor:
        """Return the coordinates (b or 1, n, axes) that multiply the generators."""
        raise NotImplementedError

    def rotations(self, pos: Positions) -> Tensor:
        """Return the rotation matrices (b or 1, h or 1, n, blocks, s, s)."""
        return exponential(self.generators(), self.coordinates(pos))

    def transform(self, pos: Positions, layer: int, x: Tensor | None = None) -> Transform:
        """Return the rotation of queries and keys, by the same matrix per token."""
        self._need_axes(pos)
        rotations = self._eval_cache(self, pos, lambda: self.rotations(pos))
        return BlockTransform(q=rotations, k=rotations)


def exponential(generators: Tensor, coordinates: Tensor) -> Tensor:
    """Return exp(sum_i x_i A_i) (b, h, n, blocks, s, s) for A (h, axes, blocks, s, s) and x (b, n, axes)."""
    # (b, 1, n, axes) @ (h, axes, blocks s s) -> (b, h, n, blocks s s)
    total = exact_product(coordinates[:, None], generators.flatten(2))
    total = total.reshape(*total.shape[:3], *generators.shape[2:])
    return matrix_exponential(total)


def matrix_exponential(total: Tensor) -> Tensor:
    """Return the exponentials of skew-symmetric matrices (..., s, s), outside of autocast."""
    with no_autocast(total.device):
        return exp_by_products(total) if torch.onnx.is_in_onnx_export() else torch.matrix_exp(total)


def exp_by_products(total: Tensor) -> Tensor:
    """Return the matrix exponential by products only, since ONNX has no operator for it.

    Scaling and squaring, (exp(A / 2^16))^(2^16), in float64: rotations keep every length, so sixteen squarings enlarge
    an error of 1e-16 to 1e-11 at most, whatever their angles.
    """
    squarings, terms = 16, 14
    # scaled so that the series converges after a few terms
    small = total.double() / 2**squarings
    # Taylor series by Horner's rule
    eye = torch.eye(total.shape[-1], dtype=small.dtype, device=small.device)
    power = eye.expand_as(small)
    for k in range(terms, 0, -1):
        power = eye + small @ power / k
    # undo the scaling: exp(A / 2^k) squared k times
    for _ in range(squarings):
        power = power @ power
    return power.to(total.dtype)


def skew_matrix(upper: Tensor, size: int) -> Tensor:
    """Return skew-symmetric matrices (..., s, s) with the entries `upper` above the diagonal (..., s (s - 1) / 2)."""
    count = upper.shape[-1]
    row, col = torch.triu_indices(size, size, 1, device=upper.device)
    # index of each entry into [upper, -upper, 0]: one gather, exact and cheap to differentiate
    index = torch.full((size, size), 2 * count, dtype=torch.int64, device=upper.device)
    order = torch.arange(count, device=upper.device)
    index = index.index_put((row, col), order).index_put((col, row), order + count)
    entries = torch.cat([upper, -upper, torch.zeros_like(upper[..., :1])], -1)
    return entries.index_select(-1, index.flatten()).reshape(*upper.shape[:-1], size, size)


def skew_upper(matrix: Tensor) -> Tensor:
    """Return the entries above the diagonal of P - P^T, row by row, for P (..., s, s)."""
    row, col = torch.triu_indices(matrix.shape[-1], matrix.shape[-1], 1, device=matrix.device)
    return matrix[..., row, col] - matrix[..., col, row]


def plane_entries(size: int) -> list[int]:
    """Return the indices of the entries (0, 1), (2, 3), ... among those above the diagonal."""
    # row r starts at r s - r (r + 1) / 2 with the entry (r, r + 1); here r = 2 k
    return [2 * k * size - k * (2 * k + 1) for k in range(size // 2)]


def promoted(coordinates: Tensor, like: Tensor) -> Tensor:
    """Return `coordinates` in the higher of the two precisions, at least float32."""
    return at_least_float32(coordinates.to(torch.promote_types(coordinates.dtype, like.dtype)))
