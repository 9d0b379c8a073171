"""Position ids: their shape and dtype, and the type that the model passes to its language model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from vispe.errors import InputError, ShapeError, counted

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, torch.float64)
LAYOUT = "The layout is (axes, b, s), not (b, axes, s)"  # of coordinates, for messages


class TokenPositions:
    """Token indices and coordinates of a call, passed from the model to its language model.

    This is a separate type, so that the value cannot be confused with a tensor of the caller. It is neither a
    tensor nor a container that wrappers inspect, because FSDP casts floating-point inputs to the dtype of its
    parameters, which would round coordinates.

    Attributes:
        token_index: ordinary position ids (b, s), int64.
        coordinates: (axes, b, s), float64.
        token_attributes: attributes of parallel sets (k, b, s), float64, or None.
    """

    __slots__ = ("coordinates", "token_attributes", "token_index")

    def __init__(
        self, token_index: Tensor, coordinates: Tensor, token_attributes: Tensor | None = None
    ) -> None:
        self.token_index = token_index.long()
        self.coordinates = coordinates
        self.token_attributes = token_attributes

    def to(self, device: Any, non_blocking: bool = False) -> TokenPositions:
        """Return the same positions on another device; dtypes are not changed."""
        if isinstance(device, torch.dtype):
            return self
        moved = (
            None if x is None else x.to(device=device, non_blocking=non_blocking)
            for x in (self.token_index, self.coordinates, self.token_attributes)
        )
        return TokenPositions(*moved)  # type: ignore[arg-type]


def split_ids(position_ids: Any, axes: int, tokens: tuple[int, int]) -> tuple[Tensor | None, Tensor | None]:
    """Split position ids of the caller into token indices (b, s) and coordinates (axes, b, s), either or both.

    Args:
        position_ids: (b, s), (axes, b, s) or (1 + axes, b, s); b may be 1 for equal rows.
        axes: number of coordinates of a token.
        tokens: b and s of the tokens of the call.

    Raises:
        ShapeError: the shape of `position_ids` is none of the shapes above.
        InputError: the dtype is not supported, values are not finite, or ordinary ids are fractions.
    """
    _check_dtype(position_ids)
    rows, length = tokens
    shape = tuple(position_ids.shape)
    fits = len(shape) in (2, 3) and shape[-1] == length and shape[-2] in (rows, 1)
    if not fits or (len(shape) == 3 and shape[0] not in (axes, axes + 1)):
        raise ShapeError(_wrong_shape(shape, axes, rows, length))
    position_ids = position_ids.expand(*shape[:-2], rows, length)
    if len(shape) == 2:
        return _as_integers(position_ids), None
    if len(position_ids) == axes:
        return None, position_ids.double()
    return _as_integers(position_ids[0]), position_ids[1:].double()


def _check_dtype(position_ids: Any) -> None:
    """Raise `InputError` unless position ids are finite numbers of a dtype that represents positions exactly."""
    if not isinstance(position_ids, Tensor):
        raise InputError(
            f"position_ids must be a tensor, got {type(position_ids).__name__}. Convert it with torch.as_tensor."
        )
    dtype = position_ids.dtype
    if dtype in HALVES:
        raise InputError(
            f"position_ids must be integers, float32 or float64, got {dtype}, which rounds positions above "
            f"{256 if dtype == torch.bfloat16 else 2048}. Pass them in another dtype."
        )
    if dtype == torch.bool or dtype.is_complex or (dtype.is_floating_point and dtype not in FLOATS):
        raise InputError(
            f"position_ids must be integers, float32 or float64, got {dtype}. Number the tokens from 0."
        )
    if dtype in FLOATS and readable(position_ids) and not bool(position_ids.isfinite().all()):
        raise InputError(
            "position_ids must be finite, got NaN or infinity. Pass one number per token, 0 for padding."
        )


def _as_integers(token_index: Tensor) -> Tensor:
    """Return ordinary ids (b, s) as int64; raise `InputError` for fractions."""
    if (
        token_index.dtype in FLOATS
        and readable(token_index)
        and not bool((token_index == token_index.round()).all())
    ):
        fraction = float(token_index[token_index != token_index.round()][0])
        raise InputError(
            f"Ordinary ids in position_ids, (b, s), must be integers, got {fraction:g}. Pass fractions as coordinates, "
            "(axes, b, s)."
        )
    return token_index.long()


def readable(x: Tensor) -> bool:
    """Return whether Python code may branch on the values of a tensor."""
    return not (x.is_meta or torch.compiler.is_compiling() or isinstance(x, FakeTensor))


def _wrong_shape(shape: tuple[int, ...], axes: int, rows: int, length: int) -> str:
    """Return the message for position ids whose shape does not match the tokens."""
    text = (
        f"position_ids must have the shape (b, s) of ordinary ids, ({axes}, b, s) of coordinates or ({axes + 1}, b, s) "
        f"of both, where (b, s) is ({rows}, {length}), the tokens of this call, got {shape}. "
    )
    if is_transposed(shape, axes, rows, length):
        return text + f"{LAYOUT}: use position_ids.movedim(1, 0)."
    if len(shape) in (2, 3) and shape[-1] != length:
        return (
            text
            + f"Pass one position for each of the {counted(length, 'token')}, without those already in the cache."
        )
    if len(shape) in (2, 3) and shape[-2] not in (rows, 1):
        return text + f"Pass positions of {counted(rows, 'sequence')}, or of 1 for all of them."
    return text + "Omit it to have it computed, or use get_rope_index of the converted model."


def is_transposed(shape: tuple[int, ...], axes: int, rows: int, length: int) -> bool:
    """Return whether a shape is (b, axes, s) or (b, 1 + axes, s)."""
    return len(shape) == 3 and shape[0] in (rows, 1) and shape[1] in (axes, axes + 1) and shape[2] == length
