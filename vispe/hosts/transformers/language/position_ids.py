"""Position ids that a caller gives: which rows they are, and whose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vispe.errors import InputError, ShapeError
from vispe.hosts.transformers.language.families import family_of
from vispe.multimodal import Scheme, Stream

HALVES = (torch.float16, torch.bfloat16)


def split_ids(position_ids: Tensor, axes: int) -> tuple[Tensor | None, Tensor | None]:
    """Return the keys (b, s) and the coordinates (axes, b, s) that a user gave, either or both.

    Raises:
        ShapeError: the shape is neither (b, s), (axes, b, s) nor (1 + axes, b, s).
        InputError: they are of half precision, which does not keep them.
    """
    if position_ids.dtype in HALVES:
        raise InputError(
            f"position_ids came as {position_ids.dtype}, which does not tell positions beyond "
            f"{256 if position_ids.dtype == torch.bfloat16 else 2048} apart; give whole numbers, float32 or float64."
        )
    if position_ids.ndim == 2:
        return position_ids, None
    if position_ids.ndim == 3 and len(position_ids) == axes:
        return None, position_ids.double()
    if position_ids.ndim == 3 and len(position_ids) == axes + 1:
        return position_ids[0].long(), position_ids[1:].double()
    raise ShapeError(
        f"position_ids needs the shape (b, s) of ordinary ids, ({axes}, b, s) of coordinates or ({axes + 1}, b, s) of "
        f"both, got {tuple(position_ids.shape)}; leave it out to have it computed, or take it from get_rope_index of "
        "the converted model."
    )


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
