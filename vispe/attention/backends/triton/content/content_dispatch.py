"""Fused content-dependent biases: decomposed ones, with kernels of their own, and gates of the grid kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.attention.backends.triton.content.axis_tables import Slots, lay_out, slot_index
from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.content import ContextBias, GatedBias
from vispe.attention.bias.decomposed import DecomposedBias
from vispe.attention.bias.dense import SumBias
from vispe.attention.bias.dense_request import DenseRequest
from vispe.attention.bias.lower_to_table import table_unsupported_reason
from vispe.attention.call import Call
from vispe.utils.autocast import no_autocast


def reads_content(bias: Bias | None) -> bool:
    """Whether a bias, or one of its terms, depends on the content of the tokens."""
    if isinstance(bias, SumBias):
        return any(map(reads_content, bias.terms))
    return isinstance(bias, ContextBias | DecomposedBias | GatedBias)


def content_unsupported_reason(bias: Bias) -> str | None:
    """Return why a content-dependent bias is neither a gated table nor a sum of decomposed biases, or None."""
    if isinstance(bias, GatedBias):
        reason = table_unsupported_reason(bias.profile)
        return None if reason is None else f"the gated profile is not a table: {reason}"
    terms = bias.terms if isinstance(bias, SumBias) else (bias,)
    for term in terms:
        if isinstance(term, ContextBias):
            return "ContextBias is fused only with separate terms for rows and columns (irpe: method='cross')"
        if not isinstance(term, DecomposedBias):
            return f"the sum of {type(term).__name__} and content-dependent terms is not fused"
        if term.pos is None or not term.pos.regular:
            return "the tokens are not a full grid in raster order"
    # all terms share one layout of slots
    grids = {(term.pos.grid.shape, term.pos.grid.prefix) for term in terms if term.pos and term.pos.grid}
    return "the terms of the bias are on different grids" if len(grids) > 1 else None


def attend_decomposed(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention (b, h, n, d_v) with a decomposed bias or a sum of these, and the row sums of `sums_of`.

    Args:
        call: the call.
        q: transformed queries.
        k: transformed keys.
        v: transformed values.
    """
    from vispe.attention.backends.triton.content.decomposed_op import attend, slots_for

    bias, request = call.bias, call.request()
    terms = bias.terms if isinstance(bias, SumBias) else (bias,)
    grid = None if bias is None or bias.pos is None else bias.pos.grid
    shape, prefix = (
        (1, 1) if grid is None else (grid.shape[0], grid.shape[-1]),
        0 if grid is None else grid.prefix,
    )
    # terms of all decomposed biases are summed in one layout, separately for queries and keys
    slots = slots_for(q, v, shape, prefix)
    terms_by_side: dict[str, Tensor] = {}
    with no_autocast(q.device):
        for term in terms:
            if isinstance(term, DecomposedBias):
                term_slots = _laid_out(term, request, slots, q)
                terms_by_side[term.dot] = (
                    terms_by_side[term.dot] + term_slots if term.dot in terms_by_side else term_slots
                )
    return attend(
        q, k, v, terms_by_side.get("query"), terms_by_side.get("key"), call.key_padding_mask, *shape, prefix,
        slots.width, slots.high, call.factor,
    )  # fmt: skip


def _laid_out(term: DecomposedBias, request: DenseRequest, slots: Slots, q: Tensor) -> Tensor:
    rows, cols = (term_tensor.expand(*q.shape[:2], -1, -1) for term_tensor in term.lookups(request))
    key = "slots", slots.width, slots.high
    index = None if term.pos is None else term.pos.remember(key, lambda: slot_index(slots, q.device))
    return lay_out(rows, cols, slots, 1.0 if request.scale is None else request.scale, index)


def gates_of(call: Call) -> tuple[Tensor | None, Tensor | None]:
    """Return the gates of queries and keys (b, h, n), float32; None unless the bias is gated."""
    if not isinstance(call.bias, GatedBias):
        return None, None
    with no_autocast(call.q.device):
        row, col = (_gate(gate, call.q) for gate in call.bias.gates(call.request()))
    return row, col


def _gate(gate: Tensor | None, q: Tensor) -> Tensor:
    """Return a gate (b, h, n) float32 for all samples and heads, zeros if it is None."""
    if gate is None:
        # one kernel for both sides: a missing gate adds nothing
        return torch.zeros(q.shape[:3], dtype=torch.float32, device=q.device)
    return gate.float().expand(q.shape[:3]).contiguous()
