"""Triton backend: fused attention with a bias table, forward and backward passes without an n x n tensor (CUDA).

Every translation-invariant bias on a grid is one offset table, which `lower_to_table` computes. `strip` lays it out so
that the bias of a query is one contiguous read, `op` has the operators, and the kernels only read runs of numbers.
Tokens that are not one full grid in raster order have explicit cell indices or coordinates (`coords`). Triton is not
imported before the first call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vispe.attention.backends.triton.content.content_dispatch import (
    attend_decomposed,
    content_unsupported_reason,
    gates_of,
    reads_content,
)
from vispe.attention.backends.triton.coords.operands import attend_coords, coords_unsupported_reason
from vispe.attention.backends.triton.device import device_unsupported_reason, failure_reason
from vispe.attention.backends.triton.grid.operands import (
    layout_at,
    packed_bias,
    row_constants,
    run_starts,
    strip_options,
)
from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.cache.strips import find_strip
from vispe.attention.bias.content import GatedBias
from vispe.attention.bias.cross import CrossAttentionBias
from vispe.attention.bias.lower_to_table import causal_unsupported_reason, table_unsupported_reason
from vispe.attention.call import Call
from vispe.attention.precision import (
    compute_dtype,
    differentiation_unsupported_reason,
    forward_mode,
    is_eager,
)

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 128  # maximum head_dim


def unsupported_reason(call: Call) -> str | None:
    """Return why this backend does not support `call`, or None."""
    q, k, v = call.q, call.k, call.v
    unavailable = device_unsupported_reason(q) or differentiation_unsupported_reason()
    if unavailable:
        return unavailable
    cross = call.bias if isinstance(call.bias, CrossAttentionBias) else None
    for excluded, why in (
        (call.value_term is not None, "a value term needs the attention weights, which are not materialised"),
        (call.replaces_product, "a bias that replaces the product of queries and keys is not fused"),
        (call.attn_mask is not None, "an attn_mask is an n x m tensor"),
        (call.softcap is not None, "softcap is not fused"),
        (call.dtype not in _DTYPES, f"{call.dtype} is not float16, bfloat16 or float32"),
        (
            cross is not None and call.cu_seqlens is not None,
            "packed sequences are not fused with queries and keys at different positions",
        ),
        (
            cross is not None and (cross.pos_q.tokens, cross.pos_k.tokens) != (q.shape[2], k.shape[2]),
            "the bias is bound to other numbers of queries and keys",
        ),
        (
            cross is None and q.shape[2] != k.shape[2],
            f"the number of queries, {q.shape[2]}, is not that of the keys, {k.shape[2]}: they are not one grid",
        ),
        (
            call.max_head_dim > MAX_HEAD_DIM,
            f"the fused kernels support head_dim up to {MAX_HEAD_DIM}, got {call.max_head_dim}",
        ),
        (not all(q.shape) or not all(v.shape), "there is nothing to attend to"),
        (not call.factor > 0, f"the scale {call.factor} is not positive"),
    ):
        if excluded:
            return why
    # the causal mask is part of the table of offsets, which packed sequences do not have
    if call.is_causal and call.cu_seqlens is not None:
        return "is_causal is not fused with packed sequences"
    causal_reason = causal_unsupported_reason(call.bias) if call.is_causal else None
    if causal_reason:
        return causal_reason
    if call.dropout_p and (reads_content(call.bias) or _scattered(call)):
        return "dropout is fused only with biases on one full grid"
    if call.bias is not None and reads_content(call.bias):
        packed = "packed sequences are not fused with content-dependent biases"
        kernels = "gated" if isinstance(call.bias, GatedBias) else "decomposed"
        return (
            content_unsupported_reason(call.bias) if call.cu_seqlens is None else packed
        ) or failure_reason(q, kernels)
    if _scattered(call):
        return (None if call.bias is None else coords_unsupported_reason(call.bias)) or failure_reason(
            q, "coords"
        )
    return failure_reason(q, "table")


def run(call: Call) -> Tensor:
    """Return attention (b, h, n, d_v) in `Call.dtype`; the additional memory is linear in n."""
    return call.finish(_attend(call)[0])


def run_with_lse(call: Call) -> tuple[Tensor, Tensor]:
    """Return attention and the log-sum-exp (b, h, n) of the logits, including sinks; -inf in rows without a key."""
    out, lse = _attend(call)
    return call.finish_with_lse(out, lse())


def _attend(call: Call) -> tuple[Tensor, Callable[[], Tensor]]:
    """Return attention before the output part of the transform, and a function that returns the log-sum-exp."""
    from vispe.attention.backends.triton.grid.op import attend
    from vispe.attention.backends.triton.grid.row_sums import log_sum_exp

    content_dependent, is_gated = reads_content(call.bias), isinstance(call.bias, GatedBias)
    scattered = not content_dependent and _scattered(call)
    # the grid kernels support grouped key heads directly, unless there are gates; the others need repeated ones
    q, k, v = (
        _contiguous_channels(t.to(call.dtype))
        for t in call.transformed(repeated=content_dependent or scattered)
    )
    if content_dependent and not is_gated:
        out, sums = attend_decomposed(call, q, k, v)
        return out, lambda: log_sum_exp(sums)
    # coordinates of each token in place of a strip
    if scattered:
        out, sums, constant = attend_coords(call, q, k, v)
        return out, lambda: log_sum_exp(sums) + constant()
    # the gradients of gates need the separate pass of the queries
    once = call.deterministic is False and not call.reproducible and not is_gated
    # drawn from torch's generator, so that `manual_seed` and checkpointing reproduce it
    seed = torch.randint(2**62, (1,), device=q.device) if call.dropout_p else None
    dropout = seed, float(call.dropout_p)
    # no bias: the same kernels, without a strip
    if call.bias is None or call.bias.pos is None:
        out, sums = attend(
            q, k, v, None, None, None, None, call.key_padding_mask, None, None, 0, call.factor, 1, False, None, None,
            once, *dropout, None, None,
        )  # fmt: skip
        return out, lambda: log_sum_exp(sums)
    layout = layout_at(call.bias.pos, q.shape[2])
    address, base = run_starts(call.bias.pos, layout)
    (packed, edge, copy, visible), runs, prefix_runs = packed_bias(call, layout)
    out, sums = attend(
        q, k, v, packed, address, edge, base, call.key_padding_mask, runs, prefix_runs, layout.selected, call.factor,
        layout.sharers, call.reproducible, visible, copy, once, *dropout, *gates_of(call),
    )  # fmt: skip
    return out, lambda: log_sum_exp(sums, layout.selected) + row_constants(call, layout)


def attend_again(
    q: Tensor, k: Tensor, v: Tensor, bias: Bias, scale: float | None, deterministic: bool | None
) -> Tensor | None:
    """Return attention of a bias-only call if `record_call` validated one with equal shapes and dtypes, else None."""
    pos = bias.pos
    if pos is None or pos.memo is None or bias.replaces_product or not is_eager(q) or forward_mode():
        return None
    dtype, factor = compute_dtype(q), q.shape[-1] ** -0.5 if scale is None else scale
    signature = (q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device)
    options = strip_options(dtype, factor, False, q.shape[1])
    if bias.key is not None:
        # fixed bias: its strip is cached with the positions
        strip = pos.memo.get(("fused call", bias.key, options, signature))
    else:
        # learned bias: valid while its parameters are unchanged
        entry = find_strip(bias, options)
        strip = None if entry is None or signature not in entry.checked else entry.strip
    if strip is None or failure_reason(q) is not None:
        return None
    from vispe.attention.backends.triton.grid.op import attend

    layout = layout_at(pos, q.shape[2])
    (packed, edge, copy, visible), (address, base) = strip, run_starts(pos, layout)
    # autocast may have changed the dtype; kernels read channels with stride 1
    q, k, v = (_contiguous_channels(t if t.dtype == dtype else t.to(dtype)) for t in (q, k, v))
    reproducible = bool(deterministic) or torch.are_deterministic_algorithms_enabled()
    out, _ = attend(
        q, k, v, packed, address, edge, base, None, None, None, layout.selected, factor, layout.sharers, reproducible,
        visible, copy, deterministic is False and not reproducible, None, 0.0, None, None,
    )  # fmt: skip
    return out


def record_call(call: Call) -> None:
    """Record a bias-only call of `run` for `attend_again`."""
    q, k, v, bias = call.q, call.k, call.v, call.bias
    if (
        bias is None
        or bias.pos is None
        or bias.replaces_product
        or q.shape[1] != k.shape[1]
        or not is_eager(q)
    ):
        return
    # only grid kernels with one strip per bias are repeated without checks
    if reads_content(bias) or _scattered(call):
        return
    signature = (q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device)
    options = strip_options(call.dtype, call.factor, call.is_causal, q.shape[1])
    if bias.key is None:
        entry = find_strip(bias, options)
        if entry is not None:
            entry.checked.add(signature)
        return
    strip = packed_bias(call, layout_at(bias.pos, q.shape[2]))[0]
    bias.pos.remember(("fused call", bias.key, options, signature), lambda: strip)


def _scattered(call: Call) -> bool:
    """Whether the tokens are not one full grid in raster order, so that kernels need explicit coordinates."""
    return call.cu_seqlens is not None or (
        call.bias is not None and table_unsupported_reason(call.bias) is not None
    )


def _contiguous_channels(x: Tensor) -> Tensor:
    """Return `x` with contiguous channels."""
    return x if x.stride(-1) == 1 else x.contiguous()
