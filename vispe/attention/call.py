"""Validated arguments of one attention call, and the masks that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.cache.masks import mask
from vispe.attention.precision import check_floating, compute_dtype, readable
from vispe.attention.transform.abstract_transform import Transform
from vispe.attention.value_term import ValueTerm
from vispe.errors import OptionError, ShapeError, UnsupportedCombination, counted
from vispe.utils.autocast import autocast_on, no_autocast

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # of queries, keys and values


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
        q, k, v = self.q, self.k, self.v
        if not (q.ndim == k.ndim == v.ndim == 4):
            raise ShapeError(
                "attention needs q, k, v of shape (b, h, n, d), got "
                f"q={tuple(q.shape)}, k={tuple(k.shape)}, v={tuple(v.shape)}."
            )
        if any(t.dtype not in DTYPES for t in (q, k, v)):
            raise ShapeError(
                "attention: q, k, v must be float16, bfloat16, float32 or float64, got "
                f"q={q.dtype}, k={k.dtype}, v={v.dtype}. Convert them first."
            )
        if not (q.shape[1] and k.shape[1] and v.shape[1]):
            raise ShapeError(
                "attention: q, k, v must have at least one head, got "
                f"q={tuple(q.shape)}, k={tuple(k.shape)}, v={tuple(v.shape)}. Pass tensors (b, h, n, d) with h >= 1."
            )
        # under autocast a norm returns q and k in float32
        same_dtype = q.dtype == k.dtype == v.dtype or autocast_on(q.device)
        if not (same_dtype and q.device == k.device == v.device):
            raise ShapeError(
                "attention needs q, k, v with one dtype on one device, got "
                f"q={q.dtype}/{q.device}, k={k.dtype}/{k.device}, v={v.dtype}/{v.device}."
            )
        if not (
            q.shape[0] == k.shape[0] == v.shape[0]
            and k.shape[1:3] == v.shape[1:3]
            and q.shape[3] == k.shape[3]
        ):
            raise ShapeError(
                "attention needs equal batch sizes, as many keys as values, and q and k of equal head_dim, got "
                f"q={tuple(q.shape)}, k={tuple(k.shape)}, v={tuple(v.shape)}."
            )
        if q.shape[1] != k.shape[1] and not (self.enable_gqa and q.shape[1] % k.shape[1] == 0):
            raise ShapeError(
                f"attention got {counted(q.shape[1], 'query head')} and {counted(k.shape[1], 'key head')}. Pass "
                "enable_gqa=True, which requires the number of query heads to be a multiple of the number of key heads."
            )
        if self.scale is None and not q.shape[3]:
            raise ShapeError(
                "attention: the default scale head_dim ** -0.5 needs head_dim >= 1, got "
                f"q={tuple(q.shape)}, k={tuple(k.shape)}. Pass scale, or queries and keys with channels."
            )
        if not 0.0 <= self.dropout_p < 1.0:
            raise OptionError(f"dropout_p must be in [0, 1), got {self.dropout_p}.")
        # a bias of other positions would broadcast silently if its shape fits
        pos = None if self.bias is None else self.bias.pos
        if pos is not None and (pos.tokens != q.shape[2] or pos.tokens != k.shape[2]):
            raise ShapeError(
                f"The bias is defined for {counted(pos.tokens, 'token')} ({pos}), got {counted(q.shape[2], 'query')} "
                f"and {counted(k.shape[2], 'key')}. Create the bias from the positions of this input."
            )
        transform = self.transform or Transform()
        if self.whole and type(transform) is not Transform and not transform.changes_values:
            raise UnsupportedCombination(
                f"The bias {type(self.bias).__name__} replaces the product of queries and keys, so "
                f"{type(transform).__name__} would have no effect. Omit one of them."
            )
        self._check_sinks_and_softcap()
        self._check_masks()
        padding = None if self.attn_mask is None else _as_key_padding(self.attn_mask, q.shape[0], k.shape[2])
        # all backends support key padding, few support additive masks
        if padding is not None:
            key_padding = self.key_padding_mask
            object.__setattr__(self, "attn_mask", None)
            object.__setattr__(
                self, "key_padding_mask", padding if key_padding is None else key_padding & padding
            )

    def _check_sinks_and_softcap(self) -> None:
        sinks, softcap, heads = self.sinks, self.softcap, self.q.shape[1]
        if sinks is not None:
            if sinks.shape != (heads,) or sinks.device != self.q.device:
                raise ShapeError(
                    f"attention: sinks must have shape ({heads},), one logit per query head, on {self.q.device}, got "
                    f"{tuple(sinks.shape)} on {sinks.device}."
                )
            check_floating("attention", sinks=sinks)
        if softcap is not None and not 0.0 < softcap < float("inf"):
            raise OptionError(
                f"attention: softcap must be positive and finite, got {softcap}. Use None for none."
            )
        # softcap acts on the product of queries and keys, which such a bias replaces
        if softcap is not None and self.whole:
            raise UnsupportedCombination(
                f"The bias {type(self.bias).__name__} replaces the product of queries and keys, so softcap={softcap} "
                "would have no effect. Omit one of them."
            )

    def _check_masks(self) -> None:
        q, k, mask, key_padding, cu_seqlens = (
            self.q,
            self.k,
            self.attn_mask,
            self.key_padding_mask,
            self.cu_seqlens,
        )
        if mask is not None:
            if mask.dtype != torch.bool and not mask.is_floating_point():
                raise ShapeError(
                    f"attn_mask must be bool (True = attend) or floating point (added), got {mask.dtype}."
                )
            self._check_shape("attn_mask", _as_4d(mask).shape, q.shape[1])
        if key_padding is not None and (
            key_padding.dtype != torch.bool or key_padding.shape != (k.shape[0], k.shape[2])
        ):
            raise ShapeError(
                f"key_padding_mask must be bool (True = real key) of shape {(k.shape[0], k.shape[2])}, got "
                f"{key_padding.dtype} {tuple(key_padding.shape)}."
            )
        # lengths are cumulative over one axis of tokens
        if cu_seqlens is not None and (q.shape[0] != 1 or q.shape[2] != k.shape[2]):
            raise ShapeError(
                "cu_seqlens packs sequences along one token axis, so it needs batch size 1 and as many queries as "
                f"keys, got q={tuple(q.shape)}, k={tuple(k.shape)}."
            )
        if cu_seqlens is not None and (
            cu_seqlens.ndim != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64)
        ):
            raise ShapeError(
                "cu_seqlens must be int32 or int64 of shape (sequences + 1,), got "
                f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)}."
            )
        values = (
            [int(length) for length in cu_seqlens]
            if cu_seqlens is not None and readable(cu_seqlens)
            else None
        )
        if values is not None and not _is_cumulative(values, q.shape[2]):
            raise ShapeError(f"cu_seqlens must increase from 0 to {q.shape[2]} tokens, got {values}.")
        for name, tensor in (("attn_mask", mask), ("key_padding_mask", key_padding)):
            if tensor is not None and tensor.device != q.device:
                raise ShapeError(f"{name} must be on the device of q, {q.device}, got {tensor.device}.")

    def _check_shape(self, name: str, shape: torch.Size, heads: int) -> None:
        expected = (self.q.shape[0], heads, self.q.shape[2], self.k.shape[2])
        if any(size not in (1, full) for size, full in zip(shape, expected, strict=True)):
            raise ShapeError(
                f"{name} has shape {tuple(shape)}, which does not broadcast to (b, h, n, m) = {expected}."
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
    def whole(self) -> bool:
        """Whether the bias replaces the product of queries and keys."""
        return self.bias is not None and self.bias.whole

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
        if self.whole:
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
            share = (lse.where(open_rows, 0.0) - sinks).sigmoid().where(open_rows, 0.0)
            out, lse = (out * share[..., None]).to(out.dtype), torch.logaddexp(lse, sinks)
        return self.finish(out), lse

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
            groups = self.q.shape[1] // self.k.shape[1]
            # content-dependent biases read the keys before rotation
            k = self.zero_padding(self.k) if self.bias.per_sample else self.k
            k = k.repeat_interleave(groups, 1) if groups > 1 and self.bias.per_sample else k
            with no_autocast(self.q.device):
                dense = self.bias.dense(q=self.q, k=k, scale=self.factor, heads=heads)
        count = self.q.shape[1]
        self._check_shape("The bias", dense.shape, count if heads is None else len(range(count)[heads]))
        return dense

    def allowed(self) -> Tensor | None:
        """Return the pairs that may attend, bool (b or 1, h or 1, n, m), or None for all."""
        n, m, device = self.q.shape[2], self.k.shape[2], self.q.device
        masks: list[Tensor] = []
        if self.attn_mask is not None and self.attn_mask.dtype == torch.bool:
            masks.append(_as_4d(self.attn_mask))
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
        return None if mask is None or mask.dtype == torch.bool else _as_4d(mask)


def combine_masks(
    bias: Tensor | None, added: Tensor | None, keep: Tensor | None, finite: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return one additive mask, and the rows without any key (bool, (b, h, n, 1)) or None.

    Rows without any key get a mask of zeros, so that softmax gives no NaN; the caller sets their output to 0.

    Args:
        bias: (b or 1, h or 1, n, m), or None.
        added: additive mask, likewise.
        keep: bool mask, likewise, True for pairs that may attend.
        finite: whether neither `bias` nor `added` can contain -inf.
    """
    # sizes of 1 broadcast, as in (b or 1, h or 1, n, m)
    total = bias if added is None else added if bias is None else bias + added
    if not finite and total is not None:
        attended = total != float("-inf")
        keep = attended if keep is None else keep & attended
    if keep is None:
        return total, None
    # rows (b or 1, h or 1, n, 1) without any key
    dead = ~keep.any(-1, keepdim=True)
    if total is None:
        total = torch.zeros((), device=keep.device)
    elif not finite:
        total = total.masked_fill(dead, 0.0)
    return total.masked_fill(~(keep | dead), float("-inf")), dead


def _is_cumulative(lengths: list[int], tokens: int) -> bool:
    return len(lengths) > 1 and lengths[0] == 0 and lengths[-1] == tokens and lengths == sorted(lengths)


def _as_key_padding(mask: Tensor, batch: int, keys: int) -> Tensor | None:
    """Return a mask that is equal for all heads and queries as key padding (b, m), True for real keys, or None.

    A mask shared by all samples is expanded. Additive masks are converted only if their values can be read without a
    device sync, have no gradient, and are all 0 or -inf.
    """
    mask_4d = _as_4d(mask)
    # different for heads or queries
    if mask_4d.shape[1] != 1 or mask_4d.shape[2] != 1:
        return None
    # (b or 1, 1, 1, m) -> (b, m)
    if mask.dtype != torch.bool:
        if mask.requires_grad or not readable(mask):
            return None
        attended = mask == 0
        if not bool((attended | (mask == float("-inf"))).all()):
            return None
        mask_4d = _as_4d(attended)
    return mask_4d[:, 0, 0].expand(batch, keys)


def _as_4d(mask: Tensor) -> Tensor:
    if mask.ndim > 4:
        raise ShapeError(f"attn_mask must broadcast to (b, h, n, m), got {tuple(mask.shape)}.")
    return mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
