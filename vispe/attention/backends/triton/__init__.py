"""Fused attention with a bias table: forward and backward passes without an n x n tensor (CUDA).

Every translation-invariant bias on a grid is one table, of any origin. `lower` makes the table, `strip` lays it out so
that the bias of a query is one contiguous read, `op` holds the operators, and the kernels know nothing but runs of
numbers. Tokens that are not one full grid in order say where they are by numbers of their own (`places`). Nothing
of Triton is imported before the first call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.attention.backends.triton.content import content_dispatch
from vispe.attention.backends.triton.content.content_dispatch import not_decomposed, reads_content
from vispe.attention.backends.triton.coords.operands import not_placed, placed_attention
from vispe.attention.backends.triton.device import failed
from vispe.attention.backends.triton.device import no_device as _no_device
from vispe.attention.bias.content import GatedBias
from vispe.attention.bias.float16_strip import fits_half, pack_both
from vispe.attention.bias.lower_to_table import behind, not_a_table, not_causal, table_of
from vispe.attention.bias.strip import Layout, build, layout_of, pack, sight_of
from vispe.attention.call import Call
from vispe.attention.precision import exporting, no_autocast
from vispe.errors import ShapeError
from vispe.grid import Positions

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WIDEST = 128  # columns of a head


def refuses(call: Call) -> str | None:
    """Return why this backend cannot serve `call`, or None."""
    q, k, v = call.q, call.k, call.v
    device = _no_device(q)
    if device:
        return device
    for given, why in (
        (call.value_term is not None, "a value term needs the attention weights, which are never made"),
        (call.whole, "a bias that takes the place of the product of queries and keys is not fused"),
        (call.attn_mask is not None, "an attn_mask is an n x m tensor"),
        (call.dtype not in _DTYPES, f"{call.dtype} is not float16, bfloat16 or float32"),
        (q.shape[2] != k.shape[2], f"{q.shape[2]} queries and {k.shape[2]} keys are not one grid"),
        (call.widest > WIDEST, f"heads are wider than {WIDEST}"),
        (not all(q.shape) or not all(v.shape), "there is nothing to attend to"),
        (not call.factor > 0, f"the scale {call.factor} is not positive"),
    ):
        if given:
            return why
    if call.is_causal and call.cu_seqlens is not None:
        return "is_causal is not fused with packed sequences"
    unfit = not_causal(call.bias) if call.is_causal else None
    if unfit:
        return unfit
    if call.dropout_p and (reads_content(call.bias) or _scattered(call)):
        return "dropout is fused with biases on one full grid only"
    if call.bias is not None and reads_content(call.bias):
        packed = "packed sequences are not fused with a bias that reads content"
        kernels = "gated" if isinstance(call.bias, GatedBias) else "decomposed"
        return (not_decomposed(call.bias) if call.cu_seqlens is None else packed) or failed(q, kernels)
    if _scattered(call):
        return (None if call.bias is None else not_placed(call.bias)) or failed(q, "coords")
    return failed(q, "table")


def run(call: Call) -> Tensor:
    """Return attention (b, h, n, d_v) in `Call.dtype`; the memory beside the output is linear in n."""
    from vispe.attention.backends.triton.grid.op import table_attention

    content_read, scattered = reads_content(call.bias), _scattered(call)
    # kernels of grids read the one head of keys that a group of query heads has
    q, k, v = (_rows(t.to(call.dtype)) for t in call.transformed(repeated=content_read or scattered))
    if content_read:
        return content_dispatch.run(call, q, k, v)
    if scattered:
        return call.finish(placed_attention(call, q, k, v))
    keep = call.key_padding_mask
    steady = bool(call.deterministic) or torch.are_deterministic_algorithms_enabled()
    once = call.deterministic is False and not steady
    luck: tuple[Tensor | None, float] = (None, 0.0)
    if call.dropout_p:
        # from the generator of torch: `manual_seed` and checkpointing repeat it
        luck = torch.randint(2**62, (1,), device=q.device), call.dropout_p
    if call.bias is None or call.bias.pos is None:
        return call.finish(
            table_attention(
                q, k, v, *[None] * 4, keep, None, None, 0, call.factor, 1, False, None, None, once, *luck
            )[0]
        )
    grid = call.bias.pos.grid
    layout = layout_of(*((q.shape[2],), 0) if grid is None else (grid.shape, grid.prefix))
    address, base = _places(call.bias.pos, layout)
    (packed, edge, copy, sight), runs, ends = _bias(call, layout)
    sharers = 1 if layout.rows else layout.shape[0]
    out, _ = table_attention(
        q, k, v, packed, address, edge, base, keep, runs, ends, layout.selected, call.factor, sharers, steady, sight,
        copy, once, *luck,
    )  # fmt: skip
    return call.finish(out)


def _scattered(call: Call) -> bool:
    """Whether the tokens are not one full grid in order, so that each has to say where it is."""
    return call.cu_seqlens is not None or (call.bias is not None and not_a_table(call.bias) is not None)


_Packed = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # runs, numbers of prefix keys, copy, sight


def _bias(call: Call, layout: Layout) -> tuple[_Packed, Tensor | None, Tensor | None]:
    """Return the packed bias, and what it was made from where that has a gradient."""
    bias, heads = call.bias, call.q.shape[1]
    if bias is None or bias.pos is None or bias.pos.grid is None:
        raise ShapeError("A bias without positions was given to the kernels; bind it to positions.")
    half = call.dtype != torch.float32
    grid = bias.pos.grid
    narrow = half and fits_half(bias, grid, call.factor)
    stored = torch.float16 if narrow else torch.float32
    both = half and not narrow and not exporting()

    def made() -> tuple[Tensor, Tensor, Tensor | None]:
        with no_autocast(call.q.device):
            table, edge = table_of(bias)
            if table.shape[0] not in (1, heads):
                raise ShapeError(
                    f"The bias has {table.shape[0]} heads, but there are {heads}; give 1 or {heads}."
                )
            table = table.to(call.q.device, torch.float32)
            if call.is_causal:
                table, edge = behind(table, edge, grid)
            # rows of small grids lie in one or two tiles
            sight = sight_of(table, heads) if (bias.hides or call.is_causal) and not layout.rows else None
            return *build(table, edge, layout), sight

    def packed(runs: Tensor, ends: Tensor, sight: Tensor | None) -> _Packed:
        if both:
            return *pack_both(runs, ends, layout, call.factor, call.dtype, lead=layout.lead), sight
        return *pack(runs, ends, layout, call.factor, stored, lead=layout.lead), None, sight

    if bias.key is not None:
        of = call.dtype if both else stored
        key = ("packed bias", bias.key, call.factor, of, layout.rows, call.is_causal)
        return bias.pos.remember(key, lambda: packed(*made())), None, None
    runs, ends, sight = made()
    graded = torch.is_grad_enabled() and (runs.requires_grad or ends.requires_grad)
    return packed(runs, ends, sight), runs if graded else None, ends if graded else None


def _places(pos: Positions, layout: Layout) -> tuple[Tensor, Tensor]:
    """Return `Layout.patches_first`, kept with the positions."""
    return pos.remember(
        ("run starts, patches first", layout.rows), lambda: layout.patches_first(pos.coords.device)
    )


def _rows(x: Tensor) -> Tensor:
    """Return `x` with the columns of a token side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()
