"""FlexAttention backend: attention with a bias table, used on CUDA for calls that `triton` does not support.

A bias is one flat table, indexed by the difference of two integers per token, and causal masks and packed sequences are
one range of keys per query. All of these are tensors, so another grid does not recompile. FlexAttention is fused only
if it is compiled: otherwise, and after too many recompilations, torch silently materialises the n x n matrix of scores.
Here that raises an error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from vispe.attention.backends.triton.coords.operands import segments
from vispe.attention.backends.triton.device import device_unsupported_reason, failure_reason, record_failures
from vispe.attention.bias.lower_to_table import lower_to_table, shifted, table_unsupported_reason
from vispe.attention.call import Call
from vispe.attention.precision import differentiation_unsupported_reason, exporting
from vispe.attention.score_terms import cell_numbers, extended
from vispe.errors import BackendUnavailable, ShapeError
from vispe.utils.autocast import no_autocast

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256  # bounds of head_dim
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_Attend = Callable[..., Tensor]


def unsupported_reason(call: Call) -> str | None:
    """Return why this backend does not support `call`, or None."""
    q, k, v = call.q, call.k, call.v
    widths = q.shape[3], v.shape[3]
    # the CPU implementation of FlexAttention is forward-only
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    transforms = differentiation_unsupported_reason()
    for excluded, why in (
        (transforms is not None, f"FlexAttention is not used here: {transforms}"),
        (q.device.type not in ("cpu", "cuda"), f"FlexAttention is not used on {q.device}"),
        (not q.is_cuda and needs_grad, "FlexAttention has no gradients on CPU"),
        (call.replaces_product, "FlexAttention always multiplies queries and keys, which the bias replaces"),
        (call.value_term is not None, "a value term needs the attention weights, which are not materialised"),
        (call.attn_mask is not None, "an attn_mask is an n x m tensor"),
        (call.dropout_p > 0, "FlexAttention has no dropout"),
        (call.needs_lse, "return_lse and sinks are not implemented with FlexAttention"),
        (call.dtype not in _DTYPES, f"{call.dtype} is not float16, bfloat16 or float32"),
        (
            min(widths) < MIN_HEAD_DIM,
            f"FlexAttention needs head_dim >= {MIN_HEAD_DIM}, got {min(widths)}",
        ),
        (
            call.max_head_dim > MAX_HEAD_DIM,
            f"FlexAttention needs head_dim <= {MAX_HEAD_DIM}, got {call.max_head_dim}",
        ),
        (not all(q.shape) or not all(v.shape), "there is nothing to attend to"),
        (exporting(), "FlexAttention is not fused in exported programs"),
    ):
        if excluded:
            return why
    unavailable = (device_unsupported_reason(q) if q.is_cuda else None) or failure_reason(q, "flex")
    if unavailable:
        return unavailable
    # every supported bias is an offset table
    refusal = None if call.bias is None else table_unsupported_reason(call.bias)
    if refusal or not _learned(call):
        return refusal
    if not q.is_cuda:
        return "FlexAttention has no gradients on CPU"
    return (
        "the gradient of a bias is not deterministic in FlexAttention, and deterministic=True is set"
        if call.reproducible
        else None
    )


def discourages(call: Call) -> str | None:
    """Return why backend='auto' does not select this backend for a call that it supports, or None."""
    if not call.q.is_cuda:
        return "FlexAttention is slower than a dense mask on CPU"
    if _learned(call):
        return "FlexAttention adds the gradient of a learned bias one score at a time"
    if failure_reason(call.q):
        return "kernels compiled by Triton have failed on this device"
    return None


def run(call: Call) -> Tensor:
    """Return attention (b, h, n, d_v) in `Call.dtype`; the additional memory is linear in n.

    Raises:
        BackendUnavailable: torch would run it unfused.
    """
    q, k, v = (t.to(call.dtype) for t in call.transformed())
    with no_autocast(call.q.device):
        # float32 operands, outside of autocast
        table, numbers = _bias(call)
        span, dead = _span(call), None
        key_padding = call.key_padding_mask
        if key_padding is not None:
            dead = _rows_without_key(key_padding, span, q.shape[2])
        out = _compiled_attend(call, q, v)(
            q, k, v, table, numbers, span, key_padding, dead, call.factor, call.softcap
        )
    return call.finish(out if dead is None else out.masked_fill(dead[:, None, :, None], 0.0))


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    numbers: Tensor | None,
    span: Tensor | None,
    keep: Tensor | None,
    dead: Tensor | None,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Return attention (b, h, n, d_v); this function is compiled by torch.

    Args:
        q: queries (b, h, n, d).
        k: keys (b, h_kv, m, d).
        v: values (b, h_kv, m, d_v).
        table: (h, length) from `extended`.
        numbers: (2, n) from `cell_numbers`.
        span: (2, n), the range of keys of each query: the first key, and the first key after the range.
        keep: (b, m), True for real keys.
        dead: (b, n), queries without any key; they attend to all keys to avoid NaN.
        scale: factor of the logits.
        softcap: bound of the scaled product of queries and keys, or None.

    Raises:
        BackendUnavailable: torch does not compile this function.
    """
    from torch.nn.attention.flex_attention import flex_attention

    if not torch.compiler.is_dynamo_compiling():
        raise BackendUnavailable(
            "FlexAttention would materialise the n x m matrix of scores here, because torch does not compile it "
            "(torch.compiler.disable, a stance, or a suppressed error). Use backend='auto', or enable compilation."
        )

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if table is not None and numbers is not None:
            score = score + table[h, numbers[0, i] - numbers[1, j]]
        # causal and packed masks: one range of keys per query
        if span is not None:
            score = torch.where((span[0, i] <= j) & (j < span[1, i]), score, float("-inf"))
        # rows without any key attend to all keys, which avoids NaN; their output is set to 0 in `run`
        if keep is not None and dead is not None:
            score = torch.where(keep[b, j] | dead[b, i], score, float("-inf"))
        return score

    # without any modification the plain kernel is used
    plain = table is None and span is None and keep is None and softcap is None
    return flex_attention(q, k, v, None if plain else score_mod, scale=scale)


def _compiled_attend(call: Call, q: Tensor, v: Tensor) -> _Attend:
    """Return `_attend` compiled for calls of one structure; uncompiled inside of a program that is being compiled."""
    if torch.compiler.is_dynamo_compiling():
        return _attend
    has_span = call.is_causal or call.cu_seqlens is not None
    return _compiled(
        call.bias is None, has_span, call.key_padding_mask is None, call.softcap, q.device.type, q.dtype, q.shape[1],
        q.shape[3], v.shape[3], call.factor, torch.is_grad_enabled(), _learned(call),
    )  # fmt: skip


@cache
def _compiled(*structure: object) -> _Attend:
    """Return `_attend` compiled with a separate code object, as torch limits recompilations per code object."""
    from torch._dynamo.exc import FailOnRecompileLimitHit

    # a copy of the function with a new code object has a separate recompilation limit
    code = _attend.__code__.replace(co_name=f"attend_{_compiled.cache_info().misses}")
    compiled = torch.compile(FunctionType(code, _attend.__globals__), fullgraph=True)

    @record_failures("flex")
    def attend(*arguments: Any) -> Tensor:
        try:
            return compiled(*arguments)
        except FailOnRecompileLimitHit as error:
            raise BackendUnavailable(
                f"FlexAttention reached the recompilation limit for the structure {structure}, after which torch would "
                "run it unfused. Use backend='sdpa', or raise torch._dynamo.config.recompile_limit."
            ) from error

    return attend


def _bias(call: Call) -> tuple[Tensor | None, Tensor | None]:
    """Return the table (h, length) float32 and the integers (2, n) of the tokens that index it, or None."""
    bias, heads = call.bias, call.q.shape[1]
    if bias is None or bias.pos is None:
        return None, None
    pos = bias.pos

    def compute() -> Tensor:
        table = extended(*shifted(*lower_to_table(bias), True)).to(call.q.device, torch.float32)
        if table.shape[0] not in (1, heads):
            raise ShapeError(f"The bias must have 1 or {heads} heads, got {table.shape[0]}.")
        return table.expand(heads, -1).contiguous()

    table = compute() if bias.key is None else pos.remember(("flat table", bias.key, heads), compute)
    return table, pos.remember("cell numbers", lambda: cell_numbers(pos))[0]


def _span(call: Call) -> Tensor | None:
    """Return the first key of each query and the end of its range (2, n) int32, or None for all keys."""
    n, m, device = call.q.shape[2], call.k.shape[2], call.q.device
    if call.cu_seqlens is not None:
        span = segments(call.cu_seqlens.to(device), n)
    elif call.is_causal:
        span = torch.tensor([[0], [m]], dtype=torch.int32, device=device).expand(2, n)
    else:
        return None
    if call.is_causal:
        after = torch.arange(1, n + 1, dtype=torch.int32, device=device)
        span = torch.stack([span[0], torch.minimum(span[1], after)])
    return span


def _rows_without_key(keep: Tensor, span: Tensor | None, n: int) -> Tensor:
    """Return the queries without any real key, bool (b, n)."""
    if span is None:
        return ~keep.any(1, keepdim=True).expand(-1, n)
    # number of real keys before each key, so that ranges without real keys have equal bounds
    real_before = torch.cat([keep.new_zeros(keep.shape[0], 1, dtype=torch.int64), keep.cumsum(1)], 1)
    # cumulative counts at both bounds of each range
    first, end = span.long()
    return real_before[:, first] >= real_before[:, end]


def _learned(call: Call) -> bool:
    """Whether the bias needs a gradient."""
    if call.bias is None or call.bias.key is not None or not torch.is_grad_enabled():
        return False
    table, edge = lower_to_table(call.bias)
    return table.requires_grad or (edge is not None and edge.requires_grad)
