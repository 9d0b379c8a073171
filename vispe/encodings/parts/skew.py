"""What `comrope_ap`, `comrope_ld` and `liere` share: rotations exp(sum_i x_i A_i) with learned skew generators."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from vispe.attention.precision import at_least_float32, exact_product, no_autocast
from vispe.attention.transform.base import Transform
from vispe.attention.transform.blocks import BlockTransform
from vispe.encodings.base import Rotary
from vispe.encodings.parts.kept import Kept
from vispe.errors import OptionError, ShapeError, is_whole
from vispe.grid import Positions

eigh = cast("Callable[[Tensor], tuple[Tensor, Tensor]]", torch.linalg.eigh)  # pyright: ignore[reportUnknownMemberType]


class SkewRotary(Rotary):
    """Rotates blocks of query and key channels by the exponential of learned skew-symmetric matrices.

    The numbers above the diagonal are the parameters: `skew` (heads or 1, axes or 1, blocks, block (block - 1) / 2).
    """

    skew: nn.Parameter
    width: int  # channels per block
    blocks: int  # blocks per head

    def __init__(self) -> None:
        super().__init__()
        self._kept = Kept()

    def generators(self) -> Tensor:
        """Return the generators (h or 1, axes, blocks, s, s), float32 or better."""
        raise NotImplementedError

    def places(self, pos: Positions) -> Tensor:
        """Return the coordinates (b or 1, n, axes) that the generators are multiplied with."""
        raise NotImplementedError

    def rotations(self, pos: Positions) -> Tensor:
        """Return the rotation matrices (b or 1, h or 1, n, blocks, s, s)."""
        return exponential(self.generators(), self.places(pos))

    def transform(self, pos: Positions, layer: int, x: Tensor | None = None) -> Transform:
        """Return the rotation of queries and keys by one and the same matrix per token."""
        need_axes(self.name, self.ndim[0], pos)
        turn = self._kept(self, pos, lambda: self.rotations(pos))
        return BlockTransform(q=turn, k=turn)


def exponential(generators: Tensor, places: Tensor) -> Tensor:
    """Return exp(sum_i x_i A_i) (b, h, n, blocks, s, s) for A (h, axes, blocks, s, s) and x (b, n, axes)."""
    total = exact_product(places[:, None], generators.flatten(2))
    total = total.reshape(*total.shape[:3], *generators.shape[2:])
    with no_autocast(total.device):
        return exp_by_products(total) if torch.onnx.is_in_onnx_export() else torch.matrix_exp(total)


def exp_by_products(total: Tensor) -> Tensor:
    """Return the matrix exponential from products alone, for ONNX, which has no operator for it.

    Scaling and squaring, (exp(A / 2^16))^(2^16), in float64: rotations keep every length, so sixteen squarings enlarge
    an error of 1e-16 to 1e-11 at most, whatever their angles.
    """
    squarings, terms = 16, 14
    small = total.double() / 2**squarings
    # Taylor series by Horner's rule
    eye = torch.eye(total.shape[-1], dtype=small.dtype, device=small.device)
    power = eye.expand_as(small)
    for k in range(terms, 0, -1):
        power = eye + small @ power / k
    for _ in range(squarings):
        power = power @ power
    return power.to(total.dtype)


def skew_matrix(upper: Tensor, size: int) -> Tensor:
    """Return skew-symmetric matrices (..., s, s) with the given entries above the diagonal (..., s (s - 1) / 2)."""
    count = upper.shape[-1]
    row, col = torch.triu_indices(size, size, 1, device=upper.device)
    index = torch.full((size, size), 2 * count, dtype=torch.int64, device=upper.device)
    order = torch.arange(count, device=upper.device)
    index = index.index_put((row, col), order).index_put((col, row), order + count)
    entries = torch.cat([upper, -upper, torch.zeros_like(upper[..., :1])], -1)
    return entries.index_select(-1, index.flatten()).reshape(*upper.shape[:-1], size, size)


def skew_upper(matrix: Tensor) -> Tensor:
    """Return what is above the diagonal of P - P^T, row by row, for P (..., s, s)."""
    row, col = torch.triu_indices(matrix.shape[-1], matrix.shape[-1], 1, device=matrix.device)
    return matrix[..., row, col] - matrix[..., col, row]


def plane_entries(size: int) -> list[int]:
    """Return where the entries (0, 1), (2, 3), ... of a matrix are among those above its diagonal."""
    return [2 * k * size - k * (2 * k + 1) for k in range(size // 2)]


def head_width(name: str, dim: int, num_heads: int) -> int:
    """Return the channels per head, checked."""
    if not is_whole(dim) or not is_whole(num_heads) or num_heads < 1 or dim < num_heads or dim % num_heads:
        raise OptionError(
            f"{name} needs a width that its heads divide, got dim={dim!r}, num_heads={num_heads!r}."
        )
    return dim // num_heads


def check_block(name: str, block: int | None, head: int, parts: int) -> int:
    """Return the block size: as asked, or 8, or what fits; `parts` blocks must fit into the `head` channels."""
    largest = head // parts
    if largest < 2 or (block is not None and not (is_whole(block) and 2 <= block <= largest)):
        raise OptionError(
            f"{name} needs a block of 2 to {largest} channels for {head} channels per head and {parts} part(s), got "
            f"block={block!r}."
        )
    return min(8, largest) if block is None else block


def check_number(option: str, value: object, low: float = 0.0, *, open_: bool = False) -> None:
    """Raise `OptionError` unless the value is a finite number of at least (`open_`: above) `low`."""
    number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not math.isfinite(number) or number < low or (open_ and number == low):
        raise OptionError(
            f"{option} needs a number {'above' if open_ else 'of at least'} {low:g}, got {option}={value!r}."
        )


def check_axes(name: str, axes: object) -> None:
    """Raise `OptionError` unless there are 1 to 3 axes."""
    if not is_whole(axes) or axes not in (1, 2, 3):
        raise OptionError(f"{name} is for 1 to 3 axes, got axes={axes!r}.")


def need_axes(name: str, axes: int, pos: Positions) -> None:
    """Raise `ShapeError` unless the positions have the number of axes that the encoding was made for."""
    if pos.axes != axes:
        raise ShapeError(
            f"{name} needs {axes}-axis positions, got {pos.axes} axes ({pos}); say {name}(axes={pos.axes})."
        )


def promoted(places: Tensor, like: Tensor) -> Tensor:
    """Return `places` in the better of the two precisions, float32 at least."""
    return at_least_float32(places.to(torch.promote_types(places.dtype, like.dtype)))
