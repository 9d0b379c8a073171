"""Position ids: those of the caller, checked against the tokens, and those that a model hands to its language model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from vispe.errors import InputError, ShapeError
from vispe.hosts.transformers.language.families import family_of
from vispe.multimodal import Scheme, Stream
from vispe.multimodal.layered import Layered

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, torch.float64)


class TokenPositions:
    """Keys and coordinates of the tokens of a call, on the way from the model to its language model.

    A type of its own, so that no caller's tensor is mistaken for it. It is neither a tensor nor a container that
    wrappers look into: FSDP casts floating-point inputs to the dtype of its parameters, which would round coordinates.

    Attributes:
        keys: ordinary position ids (b, s), int64.
        coordinates: (axes, b, s), float64.
        marks: members of parallel sets (rows, b, s), float64, or None.
    """

    __slots__ = ("coordinates", "keys", "marks")

    def __init__(self, keys: Tensor, coordinates: Tensor, marks: Tensor | None = None) -> None:
        self.keys = keys.long()
        self.coordinates = coordinates
        self.marks = marks

    def to(self, device: Any, non_blocking: bool = False) -> TokenPositions:
        """Return the same positions on another device; their dtypes are kept."""
        if isinstance(device, torch.dtype):
            return self
        moved = (
            None if x is None else x.to(device=device, non_blocking=non_blocking)
            for x in (self.keys, self.coordinates, self.marks)
        )
        return TokenPositions(*moved)  # type: ignore[arg-type]


def split_ids(position_ids: Any, axes: int, tokens: tuple[int, int]) -> tuple[Tensor | None, Tensor | None]:
    """Return the keys (b, s) and the coordinates (axes, b, s) that a user gave, either or both.

    Args:
        position_ids: (b, s), (axes, b, s) or (1 + axes, b, s); b may be 1 for a batch whose rows are all numbered so.
        axes: coordinates of a token.
        tokens: b and s, of the tokens of this call.

    Raises:
        ShapeError: the shape is none of these.
        InputError: the values are not positions: of another dtype, not finite, or fractions as ordinary ids.
    """
    _check_dtype(position_ids)
    rows, length = tokens
    shape = tuple(position_ids.shape)
    fits = len(shape) in (2, 3) and shape[-1] == length and shape[-2] in (rows, 1)
    if not fits or (len(shape) == 3 and shape[0] not in (axes, axes + 1)):
        raise ShapeError(_wrong_shape(shape, axes, rows, length))
    position_ids = position_ids.expand(*shape[:-2], rows, length)
    if len(shape) == 2:
        return _whole(position_ids), None
    if len(position_ids) == axes:
        return None, position_ids.double()
    return _whole(position_ids[0]), position_ids[1:].double()


def _check_dtype(position_ids: Any) -> None:
    """Raise `InputError` unless these are numbers of a dtype that keeps positions, all of them finite."""
    if not isinstance(position_ids, Tensor):
        raise InputError(
            f"position_ids must be a tensor, got {type(position_ids).__name__}. Convert it with torch.as_tensor."
        )
    dtype = position_ids.dtype
    if dtype in HALVES:
        raise InputError(
            f"position_ids came as {dtype}, which does not tell positions beyond "
            f"{256 if dtype == torch.bfloat16 else 2048} apart; give whole numbers, float32 or float64."
        )
    if dtype == torch.bool or dtype.is_complex or (dtype.is_floating_point and dtype not in FLOATS):
        raise InputError(
            f"position_ids must be integers, float32 or float64, got {dtype}. Number the tokens from 0."
        )
    if dtype in FLOATS and _readable(position_ids) and not bool(position_ids.isfinite().all()):
        raise InputError(
            "position_ids must be finite, got NaN or infinity. Give every token a number, 0 for padding."
        )


def _whole(keys: Tensor) -> Tensor:
    """Return ordinary ids (b, s) as int64; raises `InputError` where they are fractions."""
    if keys.dtype in FLOATS and _readable(keys) and not bool((keys == keys.round()).all()):
        found = float(keys[keys != keys.round()][0])
        raise InputError(
            f"Ordinary ids in position_ids, (b, s), number the tokens and must be whole, got {found:g}. Give fractions "
            "as coordinates, (axes, b, s)."
        )
    return keys.long()


def _readable(x: Tensor) -> bool:
    """Whether a tensor has values that Python code may branch on."""
    return not (x.is_meta or torch.compiler.is_compiling() or isinstance(x, FakeTensor))


def _wrong_shape(shape: tuple[int, ...], axes: int, rows: int, length: int) -> str:
    """Return the message for position ids of a shape that does not fit the tokens."""
    wanted = (
        f"position_ids needs the shape (b, s) of ordinary ids, ({axes}, b, s) of coordinates or ({axes + 1}, b, s) of "
        f"both, where (b, s) is ({rows}, {length}), the tokens of this call; got {shape}. "
    )
    if _transposed(shape, axes, rows, length):
        return wanted + f"{_LAYOUT}: use position_ids.movedim(1, 0)."
    if len(shape) in (2, 3) and shape[-1] != length:
        return wanted + (
            f"Give one position for each of the {length} tokens, without those that are in the cache already."
        )
    if len(shape) in (2, 3) and shape[-2] not in (rows, 1):
        return wanted + f"Give positions of {rows} sequences, or of 1 for all of them."
    return wanted + "Leave it out to have it computed, or take it from get_rope_index of the converted model."


_LAYOUT = "The layout is (axes, b, s), not (b, axes, s)"


def _transposed(shape: tuple[int, ...], axes: int, rows: int, length: int) -> bool:
    """Whether a shape is (b, axes, s) or (b, 1 + axes, s)."""
    return len(shape) == 3 and shape[0] in (rows, 1) and shape[1] in (axes, axes + 1) and shape[2] == length


def check_layout(
    scheme: Scheme,
    position_ids: Tensor,
    keys: Tensor,
    text: Callable[[], Tensor | None],
    expected: Callable[[Tensor], Tensor | None],
    valid: Tensor,
) -> None:
    """Raise `ShapeError` where ids fit as (axes, b, s) and as (b, axes, s), and are known to be the latter.

    That is known where they equal the scheme's coordinates if transposed; or where the axes of text tokens agree with
    each other only if transposed, and number the tokens where nothing says which of them are text. Other ids are taken
    as (axes, b, s).

    Args:
        scheme: that of the model.
        position_ids: (axes, b, s) or (1 + axes, b, s), as the caller gave them.
        keys: of the tokens (b, s), for ids without keys of their own.
        text: returns which tokens (b, s) are text; None where that is not known.
        expected: returns the coordinates (axes, b, s) of the scheme for keys (b, s); None where they are not known.
        valid: which tokens (b, s) are not padding.
    """
    rows, length = keys.shape
    shape = tuple(position_ids.shape)
    if rows == 1 or shape[0] != rows or not _transposed(shape, scheme.axes, rows, length):
        return
    moved = position_ids.movedim(1, 0)
    if not _readable(position_ids) or (shape[0] == shape[1] and torch.equal(position_ids, moved)):
        return
    own, direct = split_ids(position_ids, scheme.axes, (rows, length))
    try:
        other, across = split_ids(moved, scheme.axes, (rows, length))
    except InputError:  # the first row of each sequence would be ordinary ids, but has fractions
        return
    own, other = (keys if x is None else x for x in (own, other))
    if (known := expected(own)) is not None and _same(direct, known, valid):  # type: ignore[arg-type]
        return
    known = expected(other)
    wrong = known is not None and _same(across, known, valid)  # type: ignore[arg-type]
    if not wrong:
        where = text()
        likely = where is not None or _numbered(scheme, across, valid)  # type: ignore[arg-type]
        where = valid if where is None else where & valid
        wrong = likely and _as_text(scheme, across, where) and not _as_text(scheme, direct, where)  # type: ignore[arg-type]
        wrong |= _counts(other, valid) and not _counts(own, valid)
    if wrong:
        raise ShapeError(
            f"position_ids has the shape {shape} for {rows} sequences of {length} tokens and {scheme.axes} axes of "
            f"{scheme.name}. {_LAYOUT}: use position_ids.movedim(1, 0)."
        )
    if shape[1] != rows:
        raise ShapeError(
            f"position_ids of shape {shape} are either ids of 1 sequence for all {rows}, or laid out as (b, axes, s). "
            f"{_LAYOUT}: give ({shape[0]}, {rows}, {length}) or ({scheme.axes}, {rows}, {length})."
        )


def _numbered(scheme: Scheme, ids: Tensor, valid: Tensor) -> bool:
    """Whether coordinates (axes, b, s) move by one text token from each token to the next."""
    part = scheme.parts[0][0] if isinstance(scheme, Layered) else scheme
    return part.levels == 1 and _counts(part.counter(ids[: part.axes]) / part.step, valid)


def _as_text(scheme: Scheme, ids: Tensor, where: Tensor) -> bool:
    """Whether coordinates (axes, b, s) of these tokens (b, s) are some that the scheme gives to text."""
    parts = scheme.parts if isinstance(scheme, Layered) else ((scheme, 0),)
    for part, first in parts:
        own = ids[first : first + part.axes]
        if part.levels == 1 and not _same(own, part.text(part.counter(own)), where):
            return False
    return True


def stock_scheme(config: Any) -> Scheme | None:
    """Return the scheme that gives the coordinates of a model with grids before it was converted; None for others."""
    family = family_of(config)
    return family.own(config) if family.pictures == "grids" else None


def check_given(
    scheme: Scheme, stock: Scheme, rows: int, ids: Tensor, valid: Tensor, stream: Callable[[], Stream] | None
) -> None:
    """Raise `InputError` where coordinates (axes, b, s) are known not to be those of the model's scheme.

    That is known where the call says what is in the sequence and the coordinates are, number for number, those of
    before the conversion; and where four rows for four axes have ordinary ids in the first.

    Args:
        scheme: that of the model.
        stock: that of before the conversion.
        rows: how many rows were given.
        ids: the coordinates among them.
        valid: which tokens (b, s) are not padding.
        stream: returns what stands in the sequence; None where the call does not say so.
    """
    four = rows == scheme.axes == 4
    if four and (not _counts(ids[0], valid) or _one_row(ids, valid)):
        return
    if not four and (scheme.axes != stock.axes or stream is None):
        return
    if stream is not None:
        content = stream()
        if _same(ids, scheme.coordinates(content).ids, valid):
            return
        if not four and not _same(ids, stock.coordinates(content).ids, valid):
            return
    if four:
        raise InputError(
            f"position_ids has 4 rows, the first of which numbers the tokens: ordinary ids before three axes; "
            f"{scheme.name} has 4 axes. Give (5, b, s), ordinary ids before its four, or take them from get_rope_index "
            "of the converted model."
        )
    raise InputError(
        f"position_ids are those that the model had before it was converted to {scheme}; leave them out, or take them "
        "from get_rope_index of the converted model."
    )


def _same(ids: Tensor, others: Tensor, valid: Tensor) -> bool:
    """Whether coordinates (axes, b, s) agree, but for rounding to float32."""
    return bool(torch.isclose(ids, others.to(ids), rtol=1e-6, atol=1e-6)[:, valid].all())


def _one_row(ids: Tensor, valid: Tensor) -> bool:
    """Whether all axes are the same, so that it does not matter which rows are taken."""
    return bool((ids == ids[:1])[:, valid].all())


def _counts(row: Tensor, valid: Tensor) -> bool:
    """Whether every token (b, s) is numbered one more than the one before it, or 0, where a sample starts."""
    on = (row[:, 1:] == row[:, :-1] + 1) | (row[:, 1:] == 0) | ~valid[:, 1:] | ~valid[:, :-1]
    return bool(on.all())
