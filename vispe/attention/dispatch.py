"""One function of attention, several backends: which of them serves a call, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vispe.attention.backend_selection import Backend, Selected, selected
from vispe.attention.backends import blocked as strip_gradient
from vispe.attention.backends import flex, lowrank, reference, sdpa
from vispe.attention.backends import triton as fused
from vispe.attention.backends.triton.device import KernelsFailed, say_once
from vispe.attention.bias import mask_cache
from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.dense import LowRankBias, SumBias
from vispe.attention.bias.distance_bias import DistanceBias
from vispe.attention.bias.value_term import ValueTerm
from vispe.attention.bias.windows import WindowMask
from vispe.attention.call import Call
from vispe.attention.transform.abstract_transform import Transform
from vispe.errors import BackendUnavailable

_Entry = tuple[Callable[[Call], str | None], Callable[[Call], Tensor]]
BACKENDS: dict[str, _Entry] = {
    "reference": (reference.refuses, reference.run),
    "sdpa": (sdpa.refuses, sdpa.run),
    "lowrank": (lowrank.refuses, lowrank.run),
    "triton": (fused.refuses, fused.run),
    "flex": (flex.refuses, flex.run),
}
LONG = 1024  # tokens from which extra columns beat a dense mask (CPU, measured)


@dataclass(frozen=True)
class Explanation:
    """Which backend a call takes and why; `str` of it is readable."""

    backend: str
    reason: str
    refused: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{self.backend}: {self.reason}"]
        return "\n".join(lines + [f"not {name}: {why}" for name, why in self.refused.items()])


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Bias | None = None,
    transform: Transform | None = None,
    value_term: ValueTerm | None = None,
    attn_mask: Tensor | WindowMask | None = None,
    key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    enable_gqa: bool = False,
    backend: Backend = "auto",
    deterministic: bool | None = None,
) -> Tensor:
    """Return ``softmax(scale * q k^T + bias) v`` (b, h, n, d_v) in q's dtype (under autocast, in its dtype).

    Args:
        q: queries (b, h, n, d), after qk-norm and before rotation.
        k: keys (b, h_kv, m, d).
        v: values (b, h_kv, m, d_v).
        bias: what an encoding's `bias()` returned.
        transform: what an encoding's `transform()` returned; applied to q, k, v and the output.
        value_term: relative values, added to the output.
        attn_mask: bool (True = attend) or additive float, broadcastable to (b, h, n, m); or that of shifted windows
            as a `WindowMask`, which fused kernels take as it is.
        key_padding_mask: bool (b, m), True = a real key. What padded keys and values hold is never read, NaN included.
        is_causal: key j is visible to query i when j <= i.
        cu_seqlens: (s + 1,) integer ends of sequences packed along n, starting with 0; needs b = 1.
        scale: factor of the logits, ``d ** -0.5`` by default.
        dropout_p: dropout of the attention weights; each backend draws its own from torch's generator.
        enable_gqa: heads of keys and values may be fewer, each serving as many query heads in a row. Fused kernels of
            one full grid read them as they are; other backends repeat them.
        backend: 'auto' takes what `use_backend` or the environment variable VISPE_BACKEND names, else the fastest that
            serves the call; a named one is obeyed or refused.
        deterministic: True takes kernels with a reproducible backward pass on CUDA (those of the CPU all are). False
            lets fused kernels of one full grid make the scores of the backward pass once instead of twice, and add
            gradients of queries in whatever order programs come. By default queries have a pass of their own, and
            only gradients of tables are added in any order. `torch.use_deterministic_algorithms` counts as True.

    Fully masked rows return 0, and their gradients are 0.

    Raises:
        ShapeError: shapes, dtypes or devices disagree.
        BackendUnavailable: the named backend cannot serve the call.
        UnknownName: there is no such backend.

    Example:
        >>> import torch
        >>> from vispe import Grid
        >>> from vispe.attention import DistanceBias
        >>> q = torch.randn(1, 2, 6, 8)
        >>> bias = DistanceBias((1.0, 0.5), Grid((2, 3)).positions())
        >>> attention(q, q, q, bias=bias).shape
        torch.Size([1, 2, 6, 8])
    """
    named = selected(backend)
    if isinstance(attn_mask, WindowMask):
        bias, attn_mask = _in_windows(bias, attn_mask, q, named)
    nothing = transform is value_term is attn_mask is key_padding_mask is cu_seqlens is None
    alone = nothing and not is_causal and dropout_p == 0.0 and named.backend == "auto"
    if alone and bias is not None:
        mask = sdpa.known(q, k, v, bias)
        if mask is not None:
            return sdpa.attend(q, k, v, mask, scale)
    call = Call(
        q, k, v, bias, transform, value_term, attn_mask, key_padding_mask, is_causal, cu_seqlens, scale, dropout_p,
        enable_gqa, deterministic,
    )  # fmt: skip
    name, out = _run(call, named)
    if alone and name == "sdpa":
        sdpa.know(call)
    return out


def explain(q: Tensor, k: Tensor, v: Tensor, *, backend: Backend = "auto", **arguments: Any) -> Explanation:
    """Return which backend `attention` would take, and why the others were not taken.

    Args:
        q: queries (b, h, n, d).
        k: keys (b, h_kv, m, d).
        v: values (b, h_kv, m, d_v).
        backend: 'auto', or the one to be asked.
        **arguments: the other arguments of `attention`.

    Example:
        >>> import torch
        >>> q = torch.randn(1, 2, 6, 8)
        >>> explain(q, q, q).backend
        'sdpa'
    """
    named = selected(backend)
    if isinstance(arguments.get("attn_mask"), WindowMask):
        bias, mask = _in_windows(arguments.get("bias"), arguments["attn_mask"], q, named)
        arguments |= {"bias": bias, "attn_mask": mask}
    call = Call(q, k, v, **arguments)
    name, reason = _choose(call, named)
    if name == "sdpa" and strip_gradient.taken(call):
        reason = "blocks of a mask, which is too large to keep or gets a gradient"
    refused = {other: refuses(call) for other, (refuses, _) in BACKENDS.items() if other != name}
    other_why = "not faster here, or less exact" if named.backend == "auto" else "not the one that is named"
    return Explanation(name, reason, {other: why or other_why for other, why in refused.items()})


def _in_windows(
    bias: Bias | None, mask: WindowMask, q: Tensor, named: Selected
) -> tuple[Bias | None, Tensor | None]:
    """Return bias and attn_mask of shifted windows: kernels read what the mask says, other backends the mask."""
    if not q.is_cuda and named.backend != "triton":
        return bias, mask.added()
    return mask if bias is None else SumBias([bias, mask]), None


def _run(call: Call, named: Selected) -> tuple[str, Tensor]:
    """Return the backend that served a call, and the output."""
    name = _choose(call, named)[0]
    try:
        out = BACKENDS[name][1](call)
    except KernelsFailed:
        if named.backend == name and name in ("triton", "flex"):
            raise
        return _run(call, named)  # without these kernels, which are refused from now on
    if named.backend == "auto":
        say_once(call.q)
    return name, out


def _choose(call: Call, named: Selected) -> tuple[str, str]:
    """Return a backend and why it is taken."""
    if named.backend != "auto":
        refusal = BACKENDS[named.backend][0](call)
        if refusal and named.by == "name":
            raise BackendUnavailable(
                f"backend={named.backend!r} cannot serve this call: {refusal}; use backend='auto'."
            )
        if refusal:
            raise BackendUnavailable(
                f"The backend {named.backend!r}, chosen by {named.by}, cannot serve this call: {refusal}; choose "
                "'auto' there, or name another backend for this call."
            )
        return named.backend, f"asked for by {named.by}"
    refusal = sdpa.refuses(call)
    if refusal:
        return "reference", refusal
    plain = call.bias is None and call.cu_seqlens is None
    if call.q.is_cuda and not plain and fused.refuses(call) is None:
        return "triton", "fused kernels add the bias and separate sequences without an n x n tensor"
    if call.bias is None:
        return "sdpa", "there is no bias"
    if _columns_pay(call):
        if call.whole:
            return "lowrank", "the columns of the bias are all that the logits are made of"
        keys = call.k.shape[2]
        return "lowrank", f"squared distance with {keys} keys is cheaper as extra columns than as a mask"
    if (flex.discourages(call) or flex.refuses(call)) is None:
        return "flex", f"FlexAttention makes no n x n tensor, and triton says: {fused.refuses(call)}"
    kept = "kept with its positions" if call.bias.key is not None else "made in each call"
    if mask_cache.keeps(call.bias, call.dtype, call.q.shape[1]):
        kept = "kept while its numbers stay the same"
    return "sdpa", f"one dense mask, {kept}"


def _columns_pay(call: Call) -> bool:
    """Whether extra columns are faster than a mask, and as exact."""
    bias = call.bias
    if isinstance(bias, LowRankBias) and bias.whole:
        return lowrank.refuses(call) is None
    if not isinstance(bias, DistanceBias) or call.k.shape[2] < LONG or lowrank.refuses(call) is not None:
        return False
    # float32 columns cancel: their error is 2^-24 of the largest distance, which a divisor keeps near 1
    return call.dtype == torch.bfloat16 or (call.dtype == torch.float32 and bias.normalize != "none")
