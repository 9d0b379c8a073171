"""Attention with structured biases: the public function and the dispatch to a backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
from torch import Tensor

from vispe.attention.backend_selection import Backend, Selected, selected
from vispe.attention.backends import blocked, flex, lowrank, reference, sdpa, triton
from vispe.attention.backends.triton.device import KernelsFailed, warn_once
from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.cache.masks import is_cached
from vispe.attention.bias.dense import LowRankBias, SumBias
from vispe.attention.bias.distance_bias import DistanceBias
from vispe.attention.bias.windows import WindowMask
from vispe.attention.call import Call
from vispe.attention.transform.abstract_transform import Transform
from vispe.attention.value_term import ValueTerm
from vispe.errors import BackendUnavailable

_Entry = tuple[Callable[[Call], str | None], Callable[[Call], Tensor]]
BACKENDS: dict[str, _Entry] = {
    "reference": (reference.unsupported_reason, reference.run),
    "sdpa": (sdpa.unsupported_reason, sdpa.run),
    "lowrank": (lowrank.unsupported_reason, lowrank.run),
    "triton": (triton.unsupported_reason, triton.run),
    "flex": (flex.unsupported_reason, flex.run),
}
# of the backends that return the log-sum-exp of the rows
WITH_LSE: dict[str, Callable[[Call], tuple[Tensor, Tensor]]] = {
    "reference": reference.run_with_lse,
    "triton": triton.run_with_lse,
}
MIN_LOWRANK_KEYS = 1024  # keys from which low-rank columns are faster than a dense mask (measured on CPU)


@dataclass(frozen=True)
class Explanation:
    """The selected backend and the reasons; `str` of it is human-readable.

    Attributes:
        backend: name of the selected backend.
        reason: why it was selected.
        unsupported: the reason against each other backend, by name.

    Example:
        >>> print(Explanation("sdpa", "there is no bias", {"flex": "slower on CPU"}))
        sdpa: there is no bias
        not flex: slower on CPU
    """

    backend: str
    reason: str
    unsupported: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{self.backend}: {self.reason}"]
        return "\n".join(lines + [f"not {name}: {why}" for name, why in self.unsupported.items()])


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **arguments: Any
) -> tuple[Tensor, Tensor]: ...


@overload
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
    sinks: Tensor | None = None,
    softcap: float | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...


def attention(  # pyright: ignore[reportInconsistentOverload] (the first overload does not repeat all arguments)
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
    sinks: Tensor | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return ``softmax(scale * q k^T + bias) v`` (b, h, n, d_v) in q's dtype (under autocast, in its dtype).

    Args:
        q: queries (b, h, n, d), after qk-norm and before rotation.
        k: keys (b, h_kv, m, d).
        v: values (b, h_kv, m, d_v).
        bias: the result of an encoding's `bias()`.
        transform: the result of an encoding's `transform()`; applied to q, k, v and the output.
        value_term: relative values, added to the output.
        attn_mask: bool (True = attend) or additive float, broadcastable to (b, h, n, m); or the mask of shifted windows
            as a `WindowMask`, which the fused kernels support directly.
        key_padding_mask: bool (b, m), True = a real key. Padded keys and values are never read, even if they are NaN.
        is_causal: key j is visible to query i if j <= i.
        cu_seqlens: (s + 1,) int32 or int64, cumulative lengths of sequences packed along n, from 0; requires b = 1.
        scale: factor of the logits, ``d ** -0.5`` by default.
        dropout_p: dropout probability of the attention weights; each backend draws its own random numbers from torch's
            generator.
        enable_gqa: allow fewer heads of keys and values, each shared by consecutive query heads. The fused kernels for
            one full grid read shared heads directly; other backends repeat them.
        backend: 'auto' uses the selection of `use_backend` or of the environment variable VISPE_BACKEND, else the
            fastest backend that supports the call. A named backend is used or raises.
        deterministic: True selects kernels with a reproducible backward pass on CUDA (on the CPU all are). False allows
            the fused kernels for one full grid to compute the scores of the backward pass once instead of twice, with
            atomic additions to the gradient of the queries. By default (None) queries have a separate pass, and only
            gradients of bias tables use atomic additions. `torch.use_deterministic_algorithms` implies True.
        sinks: (h,), one more logit per head, to which the rows attend without a value (`s_aux` of transformers). With
            dropout, sinks are not dropped.
        softcap: c, which replaces ``scale * q k^T`` by ``c tanh(scale * q k^T / c)`` before the bias and masks are
            added, as in Gemma 2 and FlexAttention. Only the reference and FlexAttention implement it.
        return_lse: whether to return the log-sum-exp (b, h, n) of the logits as well, including bias, masks and sinks,
            in float32 (float64 for float64 inputs). It merges attention over several sets of keys. The reference and
            the fused kernels compute it, with its gradient.

    Fully masked rows return 0, with a log-sum-exp of -inf without sinks, and their gradients are 0.

    Raises:
        ShapeError: shapes, dtypes or devices disagree; there are no heads; a dtype is complex, integer or not
            supported; or head_dim is 0 and no `scale` is given.
        OptionError: `dropout_p` is outside of [0, 1), or `softcap` is not positive.
        UnsupportedCombination: the bias replaces the product of queries and keys, and `transform` or `softcap` only
            acts on these.
        BackendUnavailable: the named backend does not support the call.
        UnknownName: `backend` is not the name of a backend.

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
    # a WindowMask becomes a bias or a dense mask, depending on the backend
    if isinstance(attn_mask, WindowMask):
        bias, attn_mask = _split_window_mask(bias, attn_mask, q, named)
    # calls that have nothing but a bias may skip all checks if an equal call was validated before
    no_other_inputs = transform is value_term is attn_mask is key_padding_mask is cu_seqlens is None
    plain_softmax = sinks is softcap is None and not return_lse
    bias_only = (
        no_other_inputs and plain_softmax and not is_causal and dropout_p == 0.0 and named.backend == "auto"
    )
    if bias_only and bias is not None:
        if q.is_cuda:
            out = triton.attend_again(q, k, v, bias, scale, deterministic)
            if out is not None:
                return out
        else:
            mask = sdpa.cached_mask(q, k, v, bias)
            if mask is not None:
                return sdpa.attend(q, k, v, mask, scale)
    # kernels of transforms follow the selection, too; on the CPU there are none unless they are interpreted
    if transform is not None and (named.backend != "auto" or not q.is_cpu):
        transform = transform.with_backend(named.backend)
    call = Call(
        q, k, v, bias, transform, value_term, attn_mask, key_padding_mask, is_causal, cu_seqlens, scale, dropout_p,
        enable_gqa, deterministic, return_lse, sinks, softcap,
    )  # fmt: skip
    name, out, lse = _run(call, named)
    # calls with a log-sum-exp are not repeated without checks
    if return_lse and lse is not None:
        return out, lse
    if bias_only and name == "sdpa":
        sdpa.cache_mask(call)
    elif bias_only and name == "triton":
        triton.record_call(call)
    return out


def explain(q: Tensor, k: Tensor, v: Tensor, *, backend: Backend = "auto", **arguments: Any) -> Explanation:
    """Return the backend that `attention` would use, and why the others were not selected.

    Args:
        q: queries (b, h, n, d).
        k: keys (b, h_kv, m, d).
        v: values (b, h_kv, m, d_v).
        backend: 'auto', or the name of a backend.
        **arguments: the other arguments of `attention`.

    Raises:
        ShapeError: shapes, dtypes or devices disagree.
        BackendUnavailable: the named backend does not support the call.
        UnknownName: `backend` is not the name of a backend.

    Example:
        >>> import torch
        >>> q = torch.randn(1, 2, 6, 8)
        >>> explain(q, q, q).backend
        'sdpa'
    """
    named = selected(backend)
    if isinstance(arguments.get("attn_mask"), WindowMask):
        bias, mask = _split_window_mask(arguments.get("bias"), arguments["attn_mask"], q, named)
        arguments |= {"bias": bias, "attn_mask": mask}
    call = Call(q, k, v, **arguments)
    name, reason = _select_backend(call, named)
    if name == "sdpa" and blocked.applies(call):
        reason = (
            "the mask is computed in blocks, because it is too large to cache or needs a gradient; the backward pass "
            "computes it again"
        )
    is_auto = named.backend == "auto"
    default_reason = "not faster here, or less exact" if is_auto else "another backend is selected"
    reasons: dict[str, str] = {}
    for other, (unsupported_reason, _) in BACKENDS.items():
        if other != name:
            discouraged = flex.discourages(call) if other == "flex" and is_auto else None
            reasons[other] = unsupported_reason(call) or discouraged or default_reason
    return Explanation(name, reason, reasons)


def _split_window_mask(
    bias: Bias | None, mask: WindowMask, q: Tensor, named: Selected
) -> tuple[Bias | None, Tensor | None]:
    """Return bias and attn_mask for shifted windows: the mask is a bias for fused kernels, else a dense attn_mask."""
    if not q.is_cuda and named.backend != "triton":
        return bias, mask.added()
    return mask if bias is None else SumBias([bias, mask]), None


def _run(call: Call, named: Selected) -> tuple[str, Tensor, Tensor | None]:
    """Return the backend that computed a call, the output (b, h, n, d_v), and log-sum-exp (b, h, n) if needed."""
    name = _select_backend(call, named)[0]
    lse = None
    try:
        if call.needs_lse:
            out, lse = WITH_LSE[name](call)
        else:
            out = BACKENDS[name][1](call)
    except KernelsFailed:
        if named.backend == name and name in ("triton", "flex"):
            raise
        # failed kernels are recorded, so the second attempt selects another backend
        return _run(call, named)
    if named.backend == "auto":
        warn_once(call.q)
    return name, out, lse


def _select_backend(call: Call, named: Selected) -> tuple[str, str]:
    """Return the selected backend and the reason.

    Raises:
        BackendUnavailable: a backend was named that does not support the call.
    """
    if named.backend != "auto":
        # a named backend never gives way to another one
        refusal = BACKENDS[named.backend][0](call)
        if refusal and named.by == "name":
            raise BackendUnavailable(
                f"backend={named.backend!r} does not support this call: {refusal}. Use backend='auto'."
            )
        if refusal:
            raise BackendUnavailable(
                f"The backend {named.backend!r}, selected by {named.by}, does not support this call: {refusal}. "
                "Select 'auto' there, or pass another backend to this call."
            )
        return named.backend, f"selected by {named.by}"
    # order of preference: fused kernels, plain SDPA, low-rank columns, FlexAttention, dense mask
    sdpa_suffices = call.bias is None and call.cu_seqlens is None and not call.needs_lse
    if call.q.is_cuda and not sdpa_suffices and triton.unsupported_reason(call) is None:
        returned = ", and return the log-sum-exp" if call.needs_lse else ""
        return (
            "triton",
            f"fused kernels apply the bias and packed sequences without an n x n tensor{returned}",
        )
    # value terms need the attention weights, which only the reference has
    refusal = sdpa.unsupported_reason(call)
    if (
        refusal
        and call.softcap is not None
        and (flex.discourages(call) or flex.unsupported_reason(call)) is None
    ):
        return "flex", f"FlexAttention needs no n x n tensor; {refusal}"
    if refusal:
        return "reference", refusal
    # torch selects its own kernel, fused where possible
    if call.bias is None:
        return "sdpa", "there is no bias"
    if _lowrank_is_faster(call):
        if call.whole:
            return "lowrank", "the logits are the product of the columns of the bias"
        keys = call.k.shape[2]
        return (
            "lowrank",
            f"squared distance is cheaper as extra columns than as a dense mask (number of keys: {keys})",
        )
    if (flex.discourages(call) or flex.unsupported_reason(call)) is None:
        return (
            "flex",
            f"FlexAttention needs no n x n tensor; triton is unavailable: {triton.unsupported_reason(call)}",
        )
    heads, group = call.q.shape[1], sdpa.heads_per_group(call)
    if group < heads:
        return "sdpa", (
            f"one dense mask for a part of the heads at a time ({group} of {heads}), since all together exceed "
            f"{sdpa.MASK_LIMIT / 2**30:.3g} GiB; computed in each call and again in the backward pass"
        )
    caching = "cached with its positions" if call.bias.key is not None else "computed in each call"
    # in evaluation, from the second call on
    if is_cached(call.bias, call.dtype, call.q.shape[1]):
        caching = "cached until its parameters change"
    return "sdpa", f"one dense mask, {caching}"


def _lowrank_is_faster(call: Call) -> bool:
    """Whether low-rank columns are faster than a dense mask and as exact."""
    bias = call.bias
    if isinstance(bias, LowRankBias) and bias.whole:
        return lowrank.unsupported_reason(call) is None
    if (
        not isinstance(bias, DistanceBias)
        or call.k.shape[2] < MIN_LOWRANK_KEYS
        or lowrank.unsupported_reason(call) is not None
    ):
        return False
    # in float32 the products of the columns cancel: the error is 2^-24 of the largest distance, about 1 if normalised
    return call.dtype == torch.bfloat16 or (call.dtype == torch.float32 and bias.normalize != "none")
