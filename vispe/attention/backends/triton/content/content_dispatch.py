"""From biases that depend on what tokens hold to the kernels of decomposed and of gated ones."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.attention.backends.triton.content.axis_tables import Slots, lay_out
from vispe.attention.bias.abstract_bias import Bias, Request
from vispe.attention.bias.content import ContextBias, GatedBias
from vispe.attention.bias.decomposed import DecomposedBias
from vispe.attention.bias.dense import SumBias
from vispe.attention.bias.lower_to_table import not_a_table, table_of
from vispe.attention.bias.strip import Layout, build, layout_of, pack
from vispe.attention.call import Call
from vispe.attention.precision import no_autocast
from vispe.errors import ShapeError
from vispe.grid import Positions


def reads_content(bias: Bias | None) -> bool:
    """Whether a bias, or one of its terms, depends on what tokens hold."""
    if isinstance(bias, SumBias):
        return any(map(reads_content, bias.terms))
    return isinstance(bias, ContextBias | DecomposedBias | GatedBias)


def not_decomposed(bias: Bias) -> str | None:
    """Return why a bias that `reads_content` is neither a gated table nor a sum of decomposed ones, or None."""
    if isinstance(bias, GatedBias):
        reason = not_a_table(bias.profile)
        return None if reason is None else f"in the profile that is gated, {reason}"
    terms = bias.terms if isinstance(bias, SumBias) else (bias,)
    for term in terms:
        if isinstance(term, ContextBias):
            return (
                "what a token reads for every bucket is fused only by rows and columns (irpe: method='cross')"
            )
        if not isinstance(term, DecomposedBias):
            return f"the sum of {type(term).__name__} and of what tokens read is not fused"
        if term.pos is None or not term.pos.regular:
            return "the tokens are not a full grid in order"
    fields = {(term.pos.grid.shape, term.pos.grid.prefix) for term in terms if term.pos and term.pos.grid}
    return "the terms of the bias are on different grids" if len(fields) > 1 else None


def run(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return attention (b, h, n, d_v) of tensors that the kernels can read, with a bias that `reads_content`."""
    from vispe.attention.backends.triton.content.decomposed_op import decomposed_attention, slots_for

    bias = call.bias
    groups = call.q.shape[1] // call.k.shape[1]
    content = call.real(call.k)
    content = content.repeat_interleave(groups, 1) if groups > 1 else content
    ask = Request(None, None, call.q, content, call.factor, None)
    if isinstance(bias, GatedBias):
        return call.finish(_gated(call, bias, ask, q, k, v))
    terms = bias.terms if isinstance(bias, SumBias) else (bias,)
    grid = None if bias is None or bias.pos is None else bias.pos.grid
    shape, prefix = (
        (1, 1) if grid is None else (grid.shape[0], grid.shape[-1]),
        0 if grid is None else grid.prefix,
    )
    slots = slots_for(q, v, shape, prefix)
    read: dict[str, Tensor] = {}
    with no_autocast(q.device):
        for term in terms:
            if isinstance(term, DecomposedBias):
                laid = _laid_out(term, ask, slots, q)
                read[term.dot] = read[term.dot] + laid if term.dot in read else laid
    out, _ = decomposed_attention(
        q, k, v, read.get("query"), read.get("key"), call.key_padding_mask, *shape, prefix, slots.width, slots.high,
        call.factor,
    )  # fmt: skip
    return call.finish(out)


def _laid_out(term: DecomposedBias, ask: Request, slots: Slots, q: Tensor) -> Tensor:
    rows, cols = (read.expand(*q.shape[:2], -1, -1) for read in term.lookups(ask))
    return lay_out(rows, cols, slots, 1.0 if ask.scale is None else ask.scale)


def _gated(call: Call, bias: GatedBias, ask: Request, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from vispe.attention.backends.triton.content.gated_op import gated_attention

    profile, heads = bias.profile, q.shape[1]
    pos = profile.pos
    if pos is None or pos.grid is None:
        raise ShapeError(
            "A gated bias without positions was given to the kernels; bind its profile to positions."
        )
    layout = layout_of(pos.grid.shape, pos.grid.prefix)

    def made() -> tuple[Tensor, Tensor]:
        table, edge = table_of(profile)
        if table.shape[0] not in (1, heads):
            raise ShapeError(
                f"The bias has {table.shape[0]} heads, but there are {heads}; give 1 or {heads}."
            )
        return build(table.to(q.device, torch.float32), edge, layout)

    def packed(runs: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        return pack(runs, ends, layout, call.factor, torch.float32, shift=False)

    runs: Tensor | None = None
    ends: Tensor | None = None
    with no_autocast(q.device):
        row, col = (_gate(gate, q) for gate in bias.gates(ask))
        if profile.key is not None:
            kept = ("packed profile", profile.key, call.factor, layout.rows)
            strip, edge = pos.remember(kept, lambda: packed(*made()))
        else:
            runs, ends = made()
            strip, edge = packed(runs, ends)
    if not (
        torch.is_grad_enabled()
        and runs is not None
        and ends is not None
        and (runs.requires_grad or ends.requires_grad)
    ):
        runs = ends = None
    address, base = _places(pos, layout)
    steady = bool(call.deterministic) or torch.are_deterministic_algorithms_enabled()
    sharers = 1 if layout.rows else layout.shape[0]
    out, _ = gated_attention(
        q, k, v, row, col, strip, address, edge, base, call.key_padding_mask, runs, ends, layout.selected, call.factor,
        sharers, steady,
    )  # fmt: skip
    return out


def _places(pos: Positions, layout: Layout) -> tuple[Tensor, Tensor]:
    device = pos.coords.device
    return pos.remember(("run starts", layout.rows), lambda: (layout.address(device), layout.base(device)))


def _gate(gate: Tensor | None, q: Tensor) -> Tensor:
    """Return a gate for all samples and heads, zeros if there is none."""
    if gate is None:
        return torch.zeros(q.shape[:3], dtype=torch.float32, device=q.device)
    return gate.float().expand(q.shape[:3]).contiguous()
