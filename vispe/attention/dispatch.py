"""Attention with structured biases: the public function and the dispatch to a backend."""

from __future__ import annotations

from typing import Any, Literal, overload

from torch import Tensor

from vispe.attention.automatic_backend import BACKENDS, WITH_LSE, Explanation, select_backend
from vispe.attention.backend_selection import Backend, Selected, selected
from vispe.attention.backends import blocked, flex, sdpa, triton
from vispe.attention.backends.triton.device import KernelsFailed, warn_once
from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.dense import SumBias
from vispe.attention.bias.windows import WindowMask
from vispe.attention.call import Call
from vispe.attention.transform.abstract_transform import Transform
from vispe.attention.value_term import ValueTerm


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
    name, reason = select_backend(call, named)
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
    name = select_backend(call, named)[0]
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
