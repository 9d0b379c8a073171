"""Validated arguments of one attention call, and the masks that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from vispe.attention.arguments import check_broadcast, check_masks, check_sinks, check_tensors
from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.cache.masks import mask
from vispe.attention.bias.dense_request import DenseRequest
from vispe.attention.masks import as_4d, as_key_padding
from vispe.attention.precision import compute_dtype
from vispe.attention.transform.abstract_transform import Transform
from vispe.attention.value_term import ValueTerm
from vispe.errors import OptionError, ShapeError, UnsupportedCombination, counted
from vispe.utils.autocast import no_autocast


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of `vispe.attention.attention`, validated.

    Raises:
        ShapeError: shapes, dtypes or devices disagree; there are no heads; or a dtype is not supported.
        OptionError: `dropout_p` is outside of [0, 1), or `softcap` is not positive.
        UnsupportedCombination: the bias replaces the product of queries and keys, and `transform` or `softcap` only
            acts on these.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Bias | None = None
    transform: Transform | None = None
    value_term: ValueTerm | None = None
    attn_mask: Tensor | None = None
    key_padding_mask: Tensor | None = None
    is_causal: bool = False
    cu_seqlens: Tensor | None = None
    scale: float | None = None
    dropout_p: float = 0.0
    enable_gqa: bool = False
    deterministic: bool | None = None
    return_lse: bool = False
    sinks: Tensor | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        q, k = self.q, self.k
        check_tensors(q, k, self.v, self.enable_gqa, self.scale)
        # a rotation per query head gives the keys of a group different values
        if self.transform is not None and k.shape[1] < self.transform.key_heads == q.shape[1]:
            groups = q.shape[1] // k.shape[1]
            object.__setattr__(self, "k", k.repeat_interleave(groups, 1))
            object.__setattr__(self, "v", self.v.repeat_interleave(groups, 1))
            k = self.k
        if not 0.0 <= self.dropout_p < 1.0:
            raise OptionError(f"dropout_p must be in [0, 1), got {self.dropout_p}.")
        # a bias of other positions would broadcast silently if its shape fits
        pos = None if self.bias is None else self.bias.pos
        if pos is not None and (pos.tokens != q.shape[2] or pos.tokens != k.shape[2]):
            raise ShapeError(
                f"The bias is defined for {counted(pos.tokens, 'token')} ({pos}), got {counted(q.shape[2], 'query')} "
                f"and {counted(k.shape[2], 'key')}. Create the bias from the positions of this input."
            )
        if self.replaces_product:
            self._check_replaced_product()
        check_sinks(self.sinks, q)
        if self.softcap is not None and not 0.0 < self.softcap < float("inf"):
            raise OptionError(
                f"attention: softcap must be positive and finite, got {self.softcap}. Use None for none."
            )
        check_masks(q, k, self.attn_mask, self.key_padding_mask, self.cu_seqlens)
        padding = None if self.attn_mask is None else as_key_padding(self.attn_mask, q.shape[0], k.shape[2])
        # all backends support key padding, few support additive masks
        if padding is not None:
            key_padding = self.key_padding_mask
            object.__setattr__(self, "attn_mask", None)
            object.__setattr__(
                self, "key_padding_mask", padding if key_padding is None else key_padding & padding
            )

    def _check_replaced_product(self) -> None:
        """Raise if an argument acts only on the product of queries and keys, which the bias replaces."""
        bias, transform = type(self.bias).__name__, self.transform or Transform()
        without_effect = None if self.softcap is None else f"softcap={self.softcap}"
        if type(transform) is not Transform and not transform.changes_values:
            without_effect = type(transform).__name__
        if without_effect is not None:
            raise UnsupportedCombination(
                f"The bias {bias} replaces the product of queries and keys, so {without_effect} would have no effect. "
                "Omit one of them."
            )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the output and of masks: that of q, or that of autocast."""
        return compute_dtype(self.q)

    @property
    def factor(self) -> float:
        """The factor of the logits."""
        return self.q.shape[-1] ** -0.5 if self.scale is None else self.scale

    @property
    def reproducible(self) -> bool:
        """Whether the backward pass must be reproducible: `deterministic`, or the global setting of torch."""
        return bool(self.deterministic) or torch.are_deterministic_algorithms_enabled()

    @property
    def needs_lse(self) -> bool:
        """Whether the log-sum-exp of the rows is returned, or needed for sinks."""
        return self.return_lse or self.sinks is not None

    @property
    def max_head_dim(self) -> int:
        """The largest head_dim that a kernel reads: that of queries and keys after the transform, or of values."""
        extra = 0 if self.transform is None else self.transform.extra
        return max(self.q.shape[3] + extra, self.v.shape[3])

    @property
    def replaces_product(self) -> bool:
        """Whether the bias replaces the product of queries and keys."""
        return self.bias is not None and self.bias.replaces_product

    def zero_padding(self, x: Tensor) -> Tensor:
        """Return keys or values `x` (b, h, m, d) with padded tokens, which may be NaN, set to 0."""
        keep = self.key_padding_mask
        return x if keep is None else x.masked_fill(~keep[:, None, :, None], 0.0)

    def transformed(self, repeated: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v after the transform; `repeated` expands grouped keys and values to the query heads."""
        q, k, v = self.q, self.zero_padding(self.k), self.zero_padding(self.v)
        if self.transform is not None:
            q, k, v = self.transform.inputs(q, k, v)
        # q = 0 makes the product 0 exactly; subtracting the product from the logits would leave rounding errors
        if self.replaces_product:
            q = q.masked_fill(torch.ones((), dtype=torch.bool, device=q.device), 0.0)
        # expand key heads to consecutive query heads
        groups = q.shape[1] // k.shape[1]
        if repeated and groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        return q, k, v

    def finish(self, out: Tensor) -> Tensor:
        """Return the output (b, h, n, d_v) after the output part of the transform."""
        return out if self.transform is None else self.transform.output(out)

    def finish_with_lse(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output and the log-sum-exp of the rows (b, h, n) including the sinks.

        Args:
            out: (b, h, n, d_v) of attention without sinks, before the output part of the transform.
            lse: (b, h, n) of the logits without sinks, float32 or better; -inf for rows without any key.
        """
        if self.sinks is not None:
            sinks = self.sinks.to(lse.dtype)[:, None]
            # a sink of -inf and a row without any key would give NaN
            open_rows = lse > -torch.inf
            # sigmoid, whose own gradient y * (1 - y) is inexact for the small probability 1 - y of a sink
            share = logsigmoid(lse.where(open_rows, 0.0) - sinks).exp().where(open_rows, 0.0)
            out, lse = (out * share[..., None]).to(out.dtype), torch.logaddexp(lse, sinks)
        return self.finish(out), lse

    def request(self) -> DenseRequest:
        """Return the request of a dense bias: queries and keys before the transform, keys for each query head."""
        groups, keys = self.q.shape[1] // self.k.shape[1], self.zero_padding(self.k)
        keys = keys.repeat_interleave(groups, 1) if groups > 1 else keys
        return DenseRequest(None, None, self.q, keys, self.factor, None)

    def dense_bias(self, heads: slice | None = None, cache_dtype: torch.dtype | None = None) -> Tensor | None:
        """Return the dense bias (b or 1, h or 1, n, m) in float32 or better, or None without a bias.

        Args:
            heads: heads to return; all by default.
            cache_dtype: if given, a mask that can be cached is returned from the cache, in this dtype.

        Raises:
            ShapeError: the bias does not broadcast to (b, h, n, m).
        """
        if self.bias is None:
            return None
        dense = None
        if cache_dtype is not None and heads is None and self.bias.pos is not None:
            # fixed biases are cached by key, learned ones by the values of their parameters
            is_learned = self.bias.key is None
            dense = (
                mask(self.bias, cache_dtype, self.q.shape[1]) if is_learned else self.bias.mask(cache_dtype)
            )
        if dense is None:
            # only content-dependent biases read the keys
            k = self.request().k if self.bias.per_sample else self.k
            with no_autocast(self.q.device):
                dense = self.bias.dense(q=self.q, k=k, scale=self.factor, heads=heads)
        count = self.q.shape[1] if heads is None else len(range(self.q.shape[1])[heads])
        check_broadcast("The bias", dense, (self.q.shape[0], count, self.q.shape[2], self.k.shape[2]))
        return dense

    def allowed(self) -> Tensor | None:
        """Return the pairs that may attend, bool (b or 1, h or 1, n, m), or None for all."""
        n, m, device = self.q.shape[2], self.k.shape[2], self.q.device
        masks: list[Tensor] = []
        if self.attn_mask is not None and self.attn_mask.dtype == torch.bool:
            masks.append(as_4d(self.attn_mask))
        if self.key_padding_mask is not None:
            # (b or 1, m) -> (b or 1, 1, 1, m)
            keys = self.key_padding_mask
            masks.append((keys if self.padding_per_sample else keys[:1])[:, None, None])
        if self.is_causal:
            # query i attends to the keys 0 to i, also if there are more keys than queries
            masks.append(torch.ones(n, m, dtype=torch.bool, device=device).tril()[None, None])
        if self.cu_seqlens is not None:
            token = torch.arange(n, device=device)
            # index of the packed sequence of each token, (n,)
            segment = torch.bucketize(token, self.cu_seqlens.to(device, torch.int64), right=True)
            masks.append((segment[:, None] == segment[None])[None, None])
        if not masks:
            return None
        allowed = masks[0]
        for other in masks[1:]:
            allowed = allowed & other
        return allowed

    @property
    def padding_per_sample(self) -> bool:
        """Whether there is a key padding mask that may differ between samples."""
        keys = self.key_padding_mask
        # an expanded mask has stride 0: all samples have the same padding
        return keys is not None and not (keys.shape[0] > 1 and keys.stride(0) == 0)

    @property
    def finite(self) -> bool:
        """Whether neither the bias nor the additive mask contains -inf, as far as is known without a device sync."""
        return self.added() is None and (self.bias is None or self.bias.finite)

    def added(self) -> Tensor | None:
        """Return the user's additive mask as (b or 1, h or 1, n, m), or None."""
        mask = self.attn_mask
        return None if mask is None or mask.dtype == torch.bool else as_4d(mask)
