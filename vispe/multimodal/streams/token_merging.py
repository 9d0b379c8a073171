"""Merging of visual tokens, with the positions of several members per cluster."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vispe.errors import InputError, OptionError, ShapeError, counted, is_integer
from vispe.multimodal.streams.torch_typing import unfolded


@dataclass(frozen=True, eq=False)
class Merged:
    """Merged tokens and their positions.

    Attributes:
        tokens: (b, m, c), mean of each cluster, in the dtype of the tokens.
        ids: (axes * members, b, m), float64: the first axis of all members, then the second, and so on.
        weight: (b, m), sum of the weights of each cluster; pass it as `weights` to merge again.
        mask: (b, m) bool, false where a cluster has no tokens; its token and positions are 0.

    Example:
        >>> ids = torch.arange(3.0).expand(3, 1, 3)
        >>> merged = merge_tokens(torch.ones(1, 3, 2), torch.tensor([[0, 0, 1]]), ids)
        >>> merged.weight.tolist(), merged.mask.tolist()
        ([[2.0, 1.0]], [[True, True]])
    """

    tokens: Tensor
    ids: Tensor
    weight: Tensor
    mask: Tensor


def merge_tokens(
    tokens: Tensor,
    labels: Tensor,
    ids: Tensor,
    *,
    members: int = 1,
    axes: int = 3,
    clusters: int | None = None,
    weights: Tensor | None = None,
    epsilon: float = 0.0,
) -> Merged:
    """Replace the tokens of each cluster by their mean, with the positions of `members` of them.

    The members are the last token of the cluster, the previous one, and so on, cyclically if there are
    too few; a cluster of one token repeats that token's position. Any method can provide the labels, also for
    text: a token with a unique label is unchanged (arXiv 2510.22936).

    Tokens that were merged before have several positions each, axes * n rows of `ids`; then ``members / n`` of them are
    used, with all their positions.

    Args:
        tokens: (b, n, c).
        labels: (b, n), integers from 0 on, index of the merged token; below 0 for tokens to drop.
        ids: coordinates (rows, b, n), a multiple of `axes` rows.
        members: number of positions of a merged token, K.
        axes: number of coordinates of a position.
        clusters: number of clusters, m; the largest label plus one by default.
        weights: (b, n), above 0; equal by default.
        epsilon: added to the divisor, the sum of weights. The authors' code adds 1e-6, which makes the means
            smaller by about this fraction.

    Raises:
        ShapeError: shapes of tensors do not match.
        OptionError: `members` is not a multiple of the positions per token.
        InputError: a label is not below `clusters`.

    Example:
        >>> tokens = torch.tensor([[[1.0], [3.0], [7.0]]])
        >>> ids = torch.arange(3.0).expand(3, 1, 3)
        >>> merged = merge_tokens(tokens, torch.tensor([[0, 0, 1]]), ids)
        >>> merged.tokens.flatten().tolist(), merged.ids[0].tolist()
        ([2.0, 7.0], [[1.0, 2.0]])
    """
    _check(tokens, labels, ids, weights, members, axes)
    b, n, c = tokens.shape
    largest = int(labels.max()) if labels.numel() else -1
    m = largest + 1 if clusters is None else clusters
    if largest >= m:
        raise InputError(f"labels must be below clusters={m}, counted from 0, got {largest}.")
    row = torch.arange(b, device=labels.device)[:, None]
    label = torch.where(labels < 0, m, labels)  # dropped tokens form an extra cluster, which is cut off
    cluster = (row * (m + 1) + label).flatten()
    wide = tokens.dtype if tokens.dtype == torch.float64 else torch.float32
    ones = torch.ones(b * n, dtype=wide, device=tokens.device)
    weight = ones if weights is None else weights.to(wide).flatten()
    total = weight.new_zeros(b * (m + 1)).index_add_(0, cluster, weight)
    fraction = weight / (total + epsilon).index_select(0, cluster)
    source = tokens.to(wide).flatten(0, 1) * fraction[:, None]
    mean = source.new_zeros(b * (m + 1), c).index_add_(0, cluster, source)
    count = cluster.new_zeros(b * (m + 1)).index_add_(0, cluster, torch.ones_like(cluster))
    order = cluster.argsort(stable=True)
    pick = torch.arange(members * axes // len(ids), device=cluster.device)[:, None] % count.clamp(min=1)
    chosen = order[(count.cumsum(0) - 1 - pick).clamp(min=0)]  # (picks, b * (m + 1)), numbers of tokens
    merged_ids = ids.double().flatten(1)[:, chosen].flatten(0, 1)  # every row of ids with all its picks
    merged_ids = torch.where(count > 0, merged_ids, 0.0)
    mean, merged_ids, total, count = (
        unfolded(x, at, (b, m + 1)).narrow(at + 1, 0, m)
        for x, at in ((mean, 0), (merged_ids, 1), (total, 0), (count, 0))
    )
    return Merged(mean.to(tokens.dtype), merged_ids, total, count > 0)


def _check(
    tokens: Tensor, labels: Tensor, ids: Tensor, weights: Tensor | None, members: int, axes: int
) -> None:
    if tokens.ndim != 3 or not tokens.is_floating_point():
        raise ShapeError(
            f"tokens needs the shape (b, n, c) and floating point, got {tuple(tokens.shape)} of {tokens.dtype}."
        )
    for name, other in (("labels", labels), ("weights", weights)):
        if other is not None and other.shape != tokens.shape[:2]:
            raise ShapeError(
                f"{name} needs the shape {tuple(tokens.shape[:2])} of tokens, got {tuple(other.shape)}."
            )
    if labels.dtype not in (torch.int64, torch.int32):
        raise ShapeError(f"labels needs integers, got {labels.dtype}.")
    if ids.ndim != 3 or ids.shape[1:] != tokens.shape[:2]:
        raise ShapeError(
            f"ids needs the shape (rows, {tokens.shape[0]}, {tokens.shape[1]}), got {tuple(ids.shape)}."
        )
    if not is_integer(members) or members < 1 or len(ids) % axes or members * axes % len(ids):
        raise OptionError(
            f"members={members!r} positions of {counted(axes, 'coordinate')} cannot be made of the "
            f"{counted(len(ids), 'row')} of ids; let members be a multiple of the positions that a token has, "
            f"{len(ids) / axes:g}."
        )
