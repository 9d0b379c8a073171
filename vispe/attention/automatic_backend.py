"""Backends by name, and the selection of the fastest one that supports a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vispe.attention.backend_selection import Selected
from vispe.attention.backends import flex, lowrank, reference, sdpa, triton
from vispe.attention.bias.cache.masks import is_cached
from vispe.attention.bias.dense import LowRankBias
from vispe.attention.bias.distance_bias import DistanceBias
from vispe.attention.call import Call
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


def select_backend(call: Call, named: Selected) -> tuple[str, str]:
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
        and (flex.unsupported_reason(call) or flex.discourages(call)) is None
    ):
        return "flex", f"FlexAttention needs no n x n tensor; {refusal}"
    if refusal:
        return "reference", refusal
    # torch selects its own kernel, fused where possible
    if call.bias is None:
        return "sdpa", "there is no bias"
    if _lowrank_is_faster(call):
        if call.replaces_product:
            return "lowrank", "the logits are the product of the columns of the bias"
        keys = call.k.shape[2]
        return (
            "lowrank",
            f"squared distance is cheaper as extra columns than as a dense mask (number of keys: {keys})",
        )
    if (flex.unsupported_reason(call) or flex.discourages(call)) is None:
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
    if isinstance(bias, LowRankBias) and bias.replaces_product:
        return lowrank.unsupported_reason(call) is None
    if (
        not isinstance(bias, DistanceBias)
        or call.k.shape[2] < MIN_LOWRANK_KEYS
        or lowrank.unsupported_reason(call) is not None
    ):
        return False
    # in float32 the products of the columns cancel: the error is 2^-24 of the largest distance, about 1 if normalised
    return call.dtype == torch.bfloat16 or (call.dtype == torch.float32 and bias.normalize != "none")
