"""Attention with a bias table by FlexAttention of torch: the second choice on CUDA, for what `triton` refuses.

A bias is one flat table, which a score reads at the difference of two numbers of its tokens, and causal masks and
packed sequences are one range of keys per query. All of them are tensors, so another grid compiles nothing new.
FlexAttention is fused only where it is compiled: elsewhere, and after too many recompilations, torch runs it on the
whole n x n matrix of scores without an error. Here that is one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from vispe.attention.backends.triton.coords.operands import cell_numbers, extended, segments
from vispe.attention.backends.triton.device import failed, no_device, watched
from vispe.attention.bias.lower_to_table import not_a_table, table_of
from vispe.attention.call import Call
from vispe.attention.precision import exporting, no_autocast
from vispe.errors import BackendUnavailable, ShapeError

NARROWEST, WIDEST = 16, 256  # columns of a head
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_Attend = Callable[..., Tensor]


def refuses(call: Call) -> str | None:
    """Return why this backend cannot serve `call`, or None."""
    q, k, v = call.q, call.k, call.v
    widths = q.shape[3], v.shape[3]
    graded = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    for given, why in (
        (q.device.type not in ("cpu", "cuda"), f"FlexAttention is not used on {q.device}"),
        (not q.is_cuda and graded, "FlexAttention has no gradients on CPU"),
        (call.whole, "FlexAttention always multiplies queries and keys, whose place the bias takes"),
        (call.value_term is not None, "a value term needs the attention weights, which are never made"),
        (call.attn_mask is not None, "an attn_mask is an n x m tensor"),
        (call.dropout_p > 0, "FlexAttention has no dropout"),
        (call.dtype not in _DTYPES, f"{call.dtype} is not float16, bfloat16 or float32"),
        (
            min(widths) < NARROWEST,
            f"FlexAttention needs heads of {NARROWEST} or more columns, got {min(widths)}",
        ),
        (call.widest > WIDEST, f"heads are wider than {WIDEST}"),
        (not all(q.shape) or not all(v.shape), "there is nothing to attend to"),
        (exporting(), "FlexAttention is not fused in exported programs"),
    ):
        if given:
            return why
    missing = (no_device(q) if q.is_cuda else None) or failed(q, "flex")
    if missing:
        return missing
    refusal = None if call.bias is None else not_a_table(call.bias)
    if refusal or not _learned(call):
        return refusal
    if not q.is_cuda:
        return "FlexAttention has no gradients on CPU"
    steady = call.deterministic or torch.are_deterministic_algorithms_enabled()
    return (
        "FlexAttention adds the gradient of a bias in any order, and a reproducible one is wanted"
        if steady
        else None
    )


def discourages(call: Call) -> str | None:
    """Return why only those who ask for this backend get it for a call that it does not refuse, or None."""
    if not call.q.is_cuda:
        return "FlexAttention is slower than a dense mask on CPU"
    if _learned(call):
        return "FlexAttention adds the gradient of a learned bias score by score"
    if failed(call.q):
        return "kernels that Triton compiles failed here before"
    return None


def run(call: Call) -> Tensor:
    """Return attention (b, h, n, d_v) in `Call.dtype`; the memory beside the output is linear in n.

    Raises:
        BackendUnavailable: torch would run it unfused.
    """
    q, k, v = (t.to(call.dtype) for t in call.transformed())
    with no_autocast(call.q.device):
        table, numbers = _bias(call)
        span, dead = _span(call), None
        keep = call.key_padding_mask
        if keep is not None:
            dead = _dead(keep, span, q.shape[2])
        out = _attend_of(call, q, v)(q, k, v, table, numbers, span, keep, dead, call.factor)
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
) -> Tensor:
    """Return attention; what torch compiles.

    Args:
        q: queries, likewise keys and values.
        k: keys.
        v: values.
        table: (h, length) of `extended`.
        numbers: (2, n) of `cell_numbers`.
        span: (2, n), the first key that each query sees and the first that it does not see any more.
        keep: (b, m), real keys.
        dead: (b, n), queries without any key; they see all, so that no NaN arises.
        scale: factor of the logits.
    """
    from torch.nn.attention.flex_attention import flex_attention

    if not torch.compiler.is_dynamo_compiling():
        raise BackendUnavailable(
            "FlexAttention would run unfused here, on the whole n x m matrix of scores, because torch does not compile "
            "it (torch.compiler.disable, a stance, or an error that was suppressed); use backend='auto' or compile."
        )

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if table is not None and numbers is not None:
            score = score + table[h, numbers[0, i] - numbers[1, j]]
        if span is not None:
            score = torch.where((span[0, i] <= j) & (j < span[1, i]), score, float("-inf"))
        if keep is not None and dead is not None:
            score = torch.where(keep[b, j] | dead[b, i], score, float("-inf"))
        return score

    plain = table is None and span is None and keep is None
    return flex_attention(q, k, v, None if plain else score_mod, scale=scale)


def _attend_of(call: Call, q: Tensor, v: Tensor) -> _Attend:
    """Return `_attend` compiled for all calls of one structure; a compiler that is at work compiles it itself."""
    if torch.compiler.is_dynamo_compiling():
        return _attend
    ranged = call.is_causal or call.cu_seqlens is not None
    return _compiled(
        call.bias is None, ranged, call.key_padding_mask is None, q.device.type, q.dtype, q.shape[1], q.shape[3],
        v.shape[3], call.factor, torch.is_grad_enabled(), _learned(call),
    )  # fmt: skip


@cache
def _compiled(*structure: object) -> _Attend:
    """Return `_attend` compiled, with a code object of its own: torch limits the recompilations of each."""
    from torch._dynamo.exc import FailOnRecompileLimitHit

    code = _attend.__code__.replace(co_name=f"attend_{_compiled.cache_info().misses}")
    compiled = torch.compile(FunctionType(code, _attend.__globals__), fullgraph=True)  # no graph, no result

    @watched("flex")
    def attend(*arguments: Any) -> Tensor:
        try:
            return compiled(*arguments)
        except FailOnRecompileLimitHit as error:
            raise BackendUnavailable(
                f"FlexAttention was compiled too often for one structure {structure}, after which torch would run it "
                "unfused; use backend='sdpa', or raise torch._dynamo.config.recompile_limit."
            ) from error

    return attend


def _bias(call: Call) -> tuple[Tensor | None, Tensor | None]:
    """Return the table (h, length) float32 and the numbers (2, n) of the tokens that read it."""
    bias, heads = call.bias, call.q.shape[1]
    if bias is None or bias.pos is None:
        return None, None
    pos = bias.pos

    def make() -> Tensor:
        table = extended(*table_of(bias)).to(call.q.device, torch.float32)
        if table.shape[0] not in (1, heads):
            raise ShapeError(
                f"The bias has {table.shape[0]} heads, but there are {heads}; give 1 or {heads}."
            )
        return table.expand(heads, -1).contiguous()

    table = make() if bias.key is None else pos.remember(("flat table", bias.key, heads), make)
    return table, pos.remember("cell numbers", lambda: cell_numbers(pos))[0]


def _span(call: Call) -> Tensor | None:
    """Return the first key of each query and the end of its keys (2, n) int32, or None for all keys."""
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


def _dead(keep: Tensor, span: Tensor | None, n: int) -> Tensor:
    """Return which queries have no real key (b, n)."""
    if span is None:
        return ~keep.any(1, keepdim=True).expand(-1, n)
    before = torch.cat([keep.new_zeros(keep.shape[0], 1, dtype=torch.int64), keep.cumsum(1)], 1)
    first, end = span.long()
    return before[:, first] >= before[:, end]


def _learned(call: Call) -> bool:
    """Whether the bias gets a gradient."""
    if call.bias is None or call.bias.key is not None or not torch.is_grad_enabled():
        return False
    table, edge = table_of(call.bias)
    return table.requires_grad or (edge is not None and edge.requires_grad)
