"""Checks of coordinates that the caller passes as position ids: their layout, and the scheme that they belong to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vispe.errors import InputError, ShapeError, counted
from vispe.hosts.transformers.language.families import family_of
from vispe.hosts.transformers.language.families.grids import GRIDS, NEWLINE_GRIDS, ROW_END_GRIDS
from vispe.hosts.transformers.language.positions.position_ids import (
    LAYOUT,
    is_transposed,
    readable,
    split_ids,
)
from vispe.multimodal import Scheme, Stream
from vispe.multimodal.concatenated_scheme import ConcatenatedScheme


def check_layout(
    scheme: Scheme,
    position_ids: Tensor,
    token_index: Tensor,
    text: Callable[[], Tensor | None],
    expected: Callable[[Tensor], Tensor | None],
    valid: Tensor,
) -> None:
    """Raise `ShapeError` if the shape allows both (axes, b, s) and (b, axes, s), and the layout is (b, axes, s).

    The layout is (b, axes, s) if ids equal the scheme's coordinates only when transposed; or if the axes of
    text tokens are equal only when transposed. If text tokens are unknown, the axes must also count the
    tokens. Other ids are treated as (axes, b, s).

    Args:
        scheme: scheme of the model.
        position_ids: (axes, b, s) or (1 + axes, b, s), from the caller.
        token_index: token indices (b, s), for ids without indices.
        text: function that returns the mask of text tokens (b, s); None if it is unknown.
        expected: function from token indices (b, s) to the scheme's coordinates (axes, b, s); None if unknown.
        valid: mask of tokens (b, s) that are not padding.

    Raises:
        ShapeError: the layout is (b, axes, s), or ids of one sequence are passed for several sequences.
    """
    rows, length = token_index.shape
    shape = tuple(position_ids.shape)
    if rows == 1 or shape[0] != rows or not is_transposed(shape, scheme.axes, rows, length):
        return
    moved = position_ids.movedim(1, 0)
    if not readable(position_ids) or (shape[0] == shape[1] and torch.equal(position_ids, moved)):
        return
    direct_index, direct = split_ids(position_ids, scheme.axes, (rows, length))
    try:
        transposed_index, transposed = split_ids(moved, scheme.axes, (rows, length))
    except InputError:  # transposed, the ordinary ids would have fractions
        return
    direct_index, transposed_index = (
        token_index if x is None else x for x in (direct_index, transposed_index)
    )
    if (scheme_ids := expected(direct_index)) is not None and same_ids(direct, scheme_ids, valid):  # type: ignore[arg-type]
        return
    scheme_ids = expected(transposed_index)
    wrong = scheme_ids is not None and same_ids(transposed, scheme_ids, valid)  # type: ignore[arg-type]
    if not wrong:
        of_text = text()
        likely = of_text is not None or _numbered(scheme, transposed, valid)  # type: ignore[arg-type]
        of_text = valid if of_text is None else of_text & valid
        wrong = likely and _as_text(scheme, transposed, of_text) and not _as_text(scheme, direct, of_text)  # type: ignore[arg-type]
        wrong |= _counts(transposed_index, valid) and not _counts(direct_index, valid)
    if wrong:
        raise ShapeError(
            f"position_ids has the shape {shape} for {counted(rows, 'sequence')} of {counted(length, 'token')} and "
            f"{counted(scheme.axes, 'axis')} of {scheme.name}. {LAYOUT}: use position_ids.movedim(1, 0)."
        )
    if shape[1] != rows:
        raise ShapeError(
            f"position_ids of shape {shape} are ambiguous: ids of 1 sequence for all {rows}, or the layout (b, axes, "
            f"s). {LAYOUT}: pass ({shape[0]}, {rows}, {length}) or ({scheme.axes}, {rows}, {length})."
        )


def _numbered(scheme: Scheme, ids: Tensor, valid: Tensor) -> bool:
    """Return whether coordinates (axes, b, s) increase by one text token from each token to the next."""
    part = scheme.parts[0][0] if isinstance(scheme, ConcatenatedScheme) else scheme
    return part.levels == 1 and _counts(part.counter(ids[: part.axes]) / part.step, valid)


def _as_text(scheme: Scheme, ids: Tensor, tokens: Tensor) -> bool:
    """Return whether coordinates (axes, b, s) of some tokens (mask (b, s)) are possible coordinates of text."""
    parts = scheme.parts if isinstance(scheme, ConcatenatedScheme) else ((scheme, 0),)
    for part, first in parts:
        of_part = ids[first : first + part.axes]
        if part.levels == 1 and not same_ids(of_part, part.text(part.counter(of_part)), tokens):
            return False
    return True


def stock_scheme(config: Any) -> Scheme | None:
    """Return the scheme of a stock model with image grids; None for other models."""
    family = family_of(config)
    return family.own(config) if family.images in (GRIDS, ROW_END_GRIDS, NEWLINE_GRIDS) else None


def check_given(
    scheme: Scheme, stock: Scheme, rows: int, ids: Tensor, valid: Tensor, stream: Callable[[], Stream] | None
) -> None:
    """Raise `InputError` if coordinates (axes, b, s) are certainly not those of the model's scheme.

    This is certain in two cases: the coordinates equal those of the stock model and differ from the scheme's;
    or there are four rows for four axes, and the first contains ordinary ids, which the stock model accepts
    before its three axes.

    Args:
        scheme: scheme of the model.
        stock: scheme of the stock model.
        rows: number of rows passed.
        ids: coordinates among them.
        valid: mask of tokens (b, s) that are not padding.
        stream: function that returns the stream of the call; None if it is unknown.
    """
    four = rows == scheme.axes == stock.axes + 1 == 4 and not scheme.numbers_tokens
    if four and (not _counts(ids[0], valid) or _one_row(ids, valid)):
        return
    # if the first axis of a stock model counts all tokens, its rows look like ordinary ids plus one axis less
    numbered = rows == stock.axes == scheme.axes + 1 and stock.numbers_tokens
    if not four and ((scheme.axes != stock.axes and not numbered) or stream is None):
        return
    if stream is not None:
        content = stream()
        if same_ids(ids, scheme.coordinates(content).ids, valid):
            return
        if not four and not same_ids(ids, stock.coordinates(content).ids[-scheme.axes :], valid):
            return
    if four:
        raise InputError(
            f"position_ids must have 4 axes for {scheme.name}, got ordinary ids and three axes. Pass (5, b, s), "
            "ordinary ids before four axes, or use get_rope_index of the converted model."
        )
    raise InputError(
        f"position_ids must be coordinates of {scheme}, got those of the stock model. Omit them, or use get_rope_index "
        "of the converted model."
    )


def same_ids(ids: Tensor, others: Tensor, valid: Tensor) -> bool:
    """Return whether coordinates (axes, b, s) are equal up to rounding to float32."""
    return bool(torch.isclose(ids, others.to(ids), rtol=1e-6, atol=1e-6)[:, valid].all())


def _one_row(ids: Tensor, valid: Tensor) -> bool:
    """Return whether all axes are equal, so that the selection of rows has no effect."""
    return bool((ids == ids[:1])[:, valid].all())


def _counts(row: Tensor, valid: Tensor) -> bool:
    """Return whether every index (b, s) is the previous plus 1, or 0 at the start of a sample."""
    on = (row[:, 1:] == row[:, :-1] + 1) | (row[:, 1:] == 0) | ~valid[:, 1:] | ~valid[:, :-1]
    return bool(on.all())
