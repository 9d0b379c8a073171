"""Dispatch of content-dependent biases to the kernels of decomposed and gated biases."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.attention.backends.triton.content.axis_tables import Slots, lay_out
from vispe.attention.bias.abstract_bias import Bias, DenseRequest
from vispe.attention.bias.content import ContextBias, GatedBias
from vispe.attention.bias.decomposed import DecomposedBias
from vispe.attention.bias.dense import SumBias
from vispe.attention.bias.lower_to_table import lower_to_table, table_unsupported_reason
from vispe.attention.bias.strip import Layout, build, layout_of, pack
from vispe.attention.call import Call
from vispe.attention.precision import no_autocast
from vispe.errors import ShapeError
from vispe.grid import Positions


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


def run(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return attention (b, h, n, d_v) with a content-dependent bias, row sums of `sums_of`, and their `prefix`.

    `prefix` is the number of tokens that the sums have at the end instead of in front.

    Args:
        call: the call.
        q: transformed queries.
        k: transformed keys.
        v: transformed values.
    """
    from vispe.attention.backends.triton.content.decomposed_op import attend, slots_for

    bias = call.bias
    groups = call.q.shape[1] // call.k.shape[1]
    # biases read the untransformed keys, with padding set to 0
    keys = call.zero_padding(call.k)
    keys = keys.repeat_interleave(groups, 1) if groups > 1 else keys
    # the same request as for the dense bias, so that both paths read equal vectors
    request = DenseRequest(None, None, call.q, keys, call.factor, None)
    if isinstance(bias, GatedBias):
        return _gated(call, bias, request, q, k, v)
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
    out, sums = attend(
        q, k, v, terms_by_side.get("query"), terms_by_side.get("key"), call.key_padding_mask, *shape, prefix,
        slots.width, slots.high, call.factor,
    )  # fmt: skip
    return out, sums, 0


def _laid_out(term: DecomposedBias, request: DenseRequest, slots: Slots, q: Tensor) -> Tensor:
    rows, cols = (term_tensor.expand(*q.shape[:2], -1, -1) for term_tensor in term.lookups(request))
    return lay_out(rows, cols, slots, 1.0 if request.scale is None else request.scale)


def _gated(
    call: Call, bias: GatedBias, request: DenseRequest, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, int]:
    from vispe.attention.backends.triton.grid.op import attend

    profile, heads = bias.profile, q.shape[1]
    pos = profile.pos
    if pos is None or pos.grid is None:
        raise ShapeError(
            "The triton backend needs a gated bias with positions, got pos=None. Bind its profile to positions."
        )
    layout = layout_of(pos.grid.shape, pos.grid.prefix)

    def build_runs() -> tuple[Tensor, Tensor]:
        table, edge = lower_to_table(profile)
        if table.shape[0] not in (1, heads):
            raise ShapeError(f"The bias must have 1 or {heads} heads, got {table.shape[0]}.")
        return build(table.to(q.device, torch.float32), edge, layout)

    def pack_runs(runs: Tensor, prefix_runs: Tensor) -> tuple[Tensor, Tensor]:
        return pack(runs, prefix_runs, layout, call.factor, torch.float32, shift=False, lead=layout.lead)

    runs: Tensor | None = None
    prefix_runs: Tensor | None = None
    with no_autocast(q.device):
        row, col = (_gate(gate, q) for gate in bias.gates(request))
        # a fixed profile is packed once, a learned one in every call
        if profile.key is not None:
            cache_key = ("packed profile", profile.key, call.factor, layout.rows)
            strip, edge = pos.remember(cache_key, lambda: pack_runs(*build_runs()))
        else:
            runs, prefix_runs = build_runs()
            strip, edge = pack_runs(runs, prefix_runs)
    # without a gradient the profile must not be an input of the operator
    if not (
        torch.is_grad_enabled()
        and runs is not None
        and prefix_runs is not None
        and (runs.requires_grad or prefix_runs.requires_grad)
    ):
        runs = prefix_runs = None
    address, base = run_starts(pos, layout)
    deterministic = bool(call.deterministic) or torch.are_deterministic_algorithms_enabled()
    out, sums = attend(
        q, k, v, strip, address, edge, base, call.key_padding_mask, runs, prefix_runs, layout.selected, call.factor,
        layout.sharers, deterministic, None, None, False, None, 0.0, row, col,
    )  # fmt: skip
    return out, sums, layout.selected


def run_starts(pos: Positions, layout: Layout) -> tuple[Tensor, Tensor]:
    """Return `Layout.patches_first`, cached with the positions."""
    return pos.remember(
        ("run starts, patches first", layout.rows), lambda: layout.patches_first(pos.coords.device)
    )


def _gate(gate: Tensor | None, q: Tensor) -> Tensor:
    """Return a gate (b, h, n) float32 for all samples and heads, zeros if it is None."""
    if gate is None:
        # one kernel for both sides: a missing gate adds nothing
        return torch.zeros(q.shape[:3], dtype=torch.float32, device=q.device)
    return gate.float().expand(q.shape[:3]).contiguous()
