"""One call of attention: the arguments, checked in one place, and the masks that they amount to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.mask_cache import mask
from vispe.attention.bias.value_term import ValueTerm
from vispe.attention.precision import autocast_on, compute_dtype, no_autocast, readable
from vispe.attention.transform.abstract_transform import Transform
from vispe.errors import OptionError, ShapeError, UnsupportedCombination


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of `vispe.attention`; see there."""

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

    def __post_init__(self) -> None:
        q, k, v = self.q, self.k, self.v
        if not (q.ndim == k.ndim == v.ndim == 4):
            raise ShapeError(
                "attention needs q, k, v of shape (b, h, n, d), got "
                f"q={tuple(q.shape)}, k={tuple(k.shape)}, v={tuple(v.shape)}."
            )
        alike = q.dtype == k.dtype == v.dtype or autocast_on(q.device)  # a norm under autocast widens q and k
        if not (alike and q.device == k.device == v.device):
            raise ShapeError(
                "attention needs q, k, v of one dtype on one device, got "
                f"q={q.dtype}/{q.device}, k={k.dtype}/{k.device}, v={v.dtype}/{v.device}."
            )
        if not (
            q.shape[0] == k.shape[0] == v.shape[0]
            and k.shape[1:3] == v.shape[1:3]
            and q.shape[3] == k.shape[3]
        ):
            raise ShapeError(
                "attention needs one batch size, as many keys as values and q as wide as k, got "
                f"q={tuple(q.shape)}, k={tuple(k.shape)}, v={tuple(v.shape)}."
            )
        if q.shape[1] != k.shape[1] and not (self.enable_gqa and q.shape[1] % k.shape[1] == 0):
            raise ShapeError(
                f"attention got {q.shape[1]} query heads and {k.shape[1]} key heads; pass enable_gqa=True, which "
                "needs query heads to be a multiple of key heads."
            )
        if not 0.0 <= self.dropout_p < 1.0:
            raise OptionError(f"dropout_p must be in [0, 1), got {self.dropout_p}.")
        pos = None if self.bias is None else self.bias.pos
        if pos is not None and (pos.tokens != q.shape[2] or pos.tokens != k.shape[2]):
            raise ShapeError(
                f"The bias describes {pos.tokens} tokens ({pos}), but there are {q.shape[2]} queries and "
                f"{k.shape[2]} keys; make the bias from the positions of this input."
            )
        turn = self.transform or Transform()
        if self.whole and type(turn) is not Transform and not turn.changes_values:
            raise UnsupportedCombination(
                f"The bias {type(self.bias).__name__} takes the place of the product of queries and keys, so that "
                f"{type(turn).__name__} beside it would have no effect; leave one of them out."
            )
        self._check_masks()
        padding = None if self.attn_mask is None else _padding(self.attn_mask, q.shape[0], k.shape[2])
        if padding is not None:  # which all backends know
            given = self.key_padding_mask
            object.__setattr__(self, "attn_mask", None)
            object.__setattr__(self, "key_padding_mask", padding if given is None else given & padding)

    def _check_masks(self) -> None:
        q, k, mask, keep, ends = self.q, self.k, self.attn_mask, self.key_padding_mask, self.cu_seqlens
        if mask is not None:
            if mask.dtype != torch.bool and not mask.is_floating_point():
                raise ShapeError(
                    f"attn_mask must be bool (True = keep) or floating point (added), got {mask.dtype}."
                )
            self._check_shape("attn_mask", _four(mask).shape, q.shape[1])
        if keep is not None and (keep.dtype != torch.bool or keep.shape != (k.shape[0], k.shape[2])):
            raise ShapeError(
                f"key_padding_mask must be bool (True = keep) of shape {(k.shape[0], k.shape[2])}, got "
                f"{keep.dtype} {tuple(keep.shape)}."
            )
        if ends is not None and (q.shape[0] != 1 or q.shape[2] != k.shape[2]):
            raise ShapeError(
                "cu_seqlens packs sequences along one token axis, so it needs batch 1 and as many queries as "
                f"keys, got q={tuple(q.shape)}, k={tuple(k.shape)}."
            )
        if ends is not None and (ends.ndim != 1 or ends.dtype not in (torch.int32, torch.int64)):
            raise ShapeError(
                f"cu_seqlens must be int32 or int64 (sequences + 1,), got {ends.dtype} {tuple(ends.shape)}."
            )
        values = [int(end) for end in ends] if ends is not None and readable(ends) else None
        if values is not None and not _rises(values, q.shape[2]):
            raise ShapeError(f"cu_seqlens must rise from 0 to {q.shape[2]} tokens, got {values}.")
        for name, given in (("attn_mask", mask), ("key_padding_mask", keep)):
            if given is not None and given.device != q.device:
                raise ShapeError(f"{name} must be on the device of q, {q.device}, got {given.device}.")

    def _check_shape(self, name: str, shape: torch.Size, heads: int) -> None:
        wanted = (self.q.shape[0], heads, self.q.shape[2], self.k.shape[2])
        if any(size not in (1, full) for size, full in zip(shape, wanted, strict=True)):
            raise ShapeError(
                f"{name} has shape {tuple(shape)}, which does not broadcast to (b, h, n, m) = {wanted}."
            )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the output and of masks: q's, or that of autocast."""
        return compute_dtype(self.q)

    @property
    def factor(self) -> float:
        """The factor of the logits."""
        return self.q.shape[-1] ** -0.5 if self.scale is None else self.scale

    @property
    def widest(self) -> int:
        """The columns of the widest head that a kernel is given: queries and keys after the transform, or values."""
        gained = 0 if self.transform is None else self.transform.extra
        return max(self.q.shape[3] + gained, self.v.shape[3])

    @property
    def whole(self) -> bool:
        """Whether the bias takes the place of the product of queries and keys."""
        return self.bias is not None and self.bias.whole

    def real(self, x: Tensor) -> Tensor:
        """Return `x` of keys (b, h, m, d) with 0 where they are padding: what is there, NaN too, is never read."""
        keep = self.key_padding_mask
        return x if keep is None else x.masked_fill(~keep[:, None, :, None], 0.0)

    def transformed(self, repeated: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v after the transform, grouped keys and values `repeated` for their query heads, or not."""
        q, k, v = self.q, self.real(self.k), self.real(self.v)
        if self.transform is not None:
            q, k, v = self.transform.inputs(q, k, v)
        # the product must be 0: taken off afterwards, it would leave the rounding of both. Gradients of q are then 0
        if self.whole:
            q = q.masked_fill(torch.ones((), dtype=torch.bool, device=q.device), 0.0)
        groups = q.shape[1] // k.shape[1]
        if repeated and groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        return q, k, v

    def finish(self, out: Tensor) -> Tensor:
        """Return the output after the transform's part on it."""
        return out if self.transform is None else self.transform.output(out)

    def dense_bias(self, heads: slice | None = None, kept: torch.dtype | None = None) -> Tensor | None:
        """Return the bias made dense, float32 or better; what can be kept in dtype `kept`, if that is given."""
        if self.bias is None:
            return None
        dense = None
        if kept is not None and heads is None and self.bias.pos is not None:
            learned = self.bias.key is None
            dense = mask(self.bias, kept, self.q.shape[1]) if learned else self.bias.mask(kept)
        if dense is None:
            groups = self.q.shape[1] // self.k.shape[1]
            k = self.real(self.k) if self.bias.per_sample else self.k
            k = k.repeat_interleave(groups, 1) if groups > 1 and self.bias.per_sample else k
            with no_autocast(self.q.device):
                dense = self.bias.dense(q=self.q, k=k, scale=self.factor, heads=heads)
        count = self.q.shape[1]
        self._check_shape("The bias", dense.shape, count if heads is None else len(range(count)[heads]))
        return dense

    def allowed(self) -> Tensor | None:
        """Return which pairs may attend, bool (b or 1, h or 1, n, m), or None for all."""
        n, m, device = self.q.shape[2], self.k.shape[2], self.q.device
        parts: list[Tensor] = []
        if self.attn_mask is not None and self.attn_mask.dtype == torch.bool:
            parts.append(_four(self.attn_mask))
        if self.key_padding_mask is not None:
            keys = self.key_padding_mask
            parts.append((keys if self.padding_per_sample else keys[:1])[:, None, None])
        if self.is_causal:
            parts.append(torch.ones(n, m, dtype=torch.bool, device=device).tril()[None, None])
        if self.cu_seqlens is not None:
            token = torch.arange(n, device=device)
            segment = torch.bucketize(token, self.cu_seqlens.to(device, torch.int64), right=True)
            parts.append((segment[:, None] == segment[None])[None, None])
        if not parts:
            return None
        keep = parts[0]
        for part in parts[1:]:
            keep = keep & part
        return keep

    @property
    def padding_per_sample(self) -> bool:
        """Whether there is a key padding mask that may differ between samples."""
        keys = self.key_padding_mask
        return keys is not None and not (keys.shape[0] > 1 and keys.stride(0) == 0)

    @property
    def finite(self) -> bool:
        """Whether neither bias nor additive mask holds -inf, as far as is known without a cost."""
        return self.added() is None and (self.bias is None or self.bias.finite)

    def added(self) -> Tensor | None:
        """Return the user's additive mask as (b or 1, h or 1, n, m), or None."""
        mask = self.attn_mask
        return None if mask is None or mask.dtype == torch.bool else _four(mask)


def combine(
    bias: Tensor | None, added: Tensor | None, keep: Tensor | None, finite: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the one additive mask, and which rows have no key at all (bool, (b, h, n, 1)) or None.

    Rows without any key get a mask of zeros, so that no NaN arises; the caller sets their output to 0.
    `finite` says that neither bias nor added mask can hold -inf.
    """
    total = bias if added is None else added if bias is None else bias + added
    if not finite and total is not None:
        open_ = total != float("-inf")
        keep = open_ if keep is None else keep & open_
    if keep is None:
        return total, None
    dead = ~keep.any(-1, keepdim=True)
    if total is None:
        total = torch.zeros((), device=keep.device)
    elif not finite:
        total = total.masked_fill(dead, 0.0)
    return total.masked_fill(~(keep | dead), float("-inf")), dead


def _rises(ends: list[int], tokens: int) -> bool:
    return len(ends) > 1 and ends[0] == 0 and ends[-1] == tokens and ends == sorted(ends)


def _padding(mask: Tensor, batch: int, keys: int) -> Tensor | None:
    """Return a mask that is the same for all heads and queries as key padding (b, m), True for real keys, or None.

    One mask for all samples is expanded. The values of an additive mask decide, so it is looked at only where that
    costs nothing; elsewhere, and where it has a gradient or other values than 0 and -inf, it remains additive.
    """
    four = _four(mask)
    if four.shape[1] != 1 or four.shape[2] != 1:
        return None
    if mask.dtype != torch.bool:
        if mask.requires_grad or not readable(mask):
            return None
        open_ = mask == 0
        if not bool((open_ | (mask == float("-inf"))).all()):
            return None
        four = _four(open_)
    return four[:, 0, 0].expand(batch, keys)


def _four(mask: Tensor) -> Tensor:
    if mask.ndim > 4:
        raise ShapeError(f"attn_mask must broadcast to (b, h, n, m), got {tuple(mask.shape)}.")
    return mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
