"""Auxiliary losses of SeqPE and samplers of the positions for them (arXiv 2506.13277)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from vispe.errors import OptionError, ShapeError, counted


def contrastive_loss(
    pivot: Tensor,
    candidates: Tensor,
    labels: Tensor,
    *,
    heads: int | None = None,
    logit_scale: float = 1.0,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the cross entropy of identifying the nearest candidate by dot product.

    Args:
        pivot: vectors (b, d).
        candidates: vectors (b * n, d), those of the first pivot first.
        labels: (b,) int64, index of the nearest of the n candidates of each pivot.
        heads: split the channels into heads and average their losses; None takes all channels as one.
        logit_scale: factor of the dot products, which are not normalised.
        label_smoothing: of the cross entropy.
    """
    b, d = pivot.shape
    if candidates.ndim != 2 or candidates.shape[1] != d or candidates.shape[0] % b or d % (heads or 1):
        raise ShapeError(
            f"contrastive_loss needs candidates (b * n, d) for pivots (b, d) and heads that divide d, got "
            f"{tuple(candidates.shape)}, {tuple(pivot.shape)} and heads={heads}."
        )
    a = pivot.reshape(b, heads or 1, 1, -1)
    # (b n, d) -> (b, h, n, d / h)
    c = candidates.reshape(b, -1, heads or 1, a.shape[-1]).transpose(1, 2)
    logits = (a @ c.transpose(-1, -2)).squeeze(2) * logit_scale  # (b, h, n)
    label = labels[:, None].expand(-1, logits.shape[1])
    return F.cross_entropy(logits.flatten(0, 1), label.flatten(), label_smoothing=label_smoothing)


def transfer_loss(
    main: Tensor,
    main_indices: Tensor,
    transfer: Tensor,
    *,
    samples: int = 1,
    beta: float = 1.0,
    metric: Literal["kl_div", "mse"] = "kl_div",
    heads: int | None = None,
    logit_scale: float = 1.0,
) -> Tensor:
    """Return the difference in self-similarity between a far window and the training window.

    With S = log_softmax(scale * e e^T) of teacher and student rows, 'kl_div' is the symmetric KL divergence, averaged
    over all elements of S (not over rows). The teacher gets no gradient; with beta < 1, a second term of weight
    1 - beta has the student detached instead.

    Args:
        main: vectors of the training window (m, d).
        main_indices: (samples * n,) int64, indices of the teacher rows in `main`.
        transfer: vectors of the same cells of a far window (samples * n, d).
        samples: independent groups of n cells.
        beta: weight of the main term.
        metric: 'kl_div', or 'mse' between the two S.
        heads: split the channels into heads; None takes all channels as one.
        logit_scale: factor of the dot products.
    """
    if metric not in ("kl_div", "mse"):
        raise OptionError(f"metric must be kl_div or mse, got {metric!r}.")
    d = main.shape[-1]
    if transfer.shape != (len(main_indices), d) or len(main_indices) % samples or d % (heads or 1):
        raise ShapeError(
            f"transfer_loss needs one row of transfer per index, in {counted(samples, 'equal group')}, and heads "
            f"that divide d, got main {tuple(main.shape)}, {counted(len(main_indices), 'index')}, transfer "
            f"{tuple(transfer.shape)} and heads={heads}."
        )

    def similarity(rows: Tensor) -> Tensor:
        # (n, d) -> (samples, h, n / samples, d / h)
        e = rows.reshape(samples, -1, heads or 1, d // (heads or 1)).transpose(1, 2)
        return (e @ e.transpose(-1, -2) * logit_scale).log_softmax(-1)

    teacher, student = similarity(main.index_select(0, main_indices)), similarity(transfer)
    measure = _symmetric_kl if metric == "kl_div" else F.mse_loss
    # the first term moves the far window towards the training window, the second one vice versa
    loss = beta * measure(teacher.detach(), student)
    return loss if beta >= 1 else loss + (1 - beta) * measure(teacher, student.detach())


def _symmetric_kl(a: Tensor, b: Tensor) -> Tensor:
    # KL(a, b) + KL(b, a) of log-probabilities: (p - q) (log p - log q)
    return ((a.exp() - b.exp()) * (a - b)).mean()


def nearest(pivot: Tensor, candidates: Tensor) -> Tensor:
    """Return the index of the candidate (b, n, a) nearest to its pivot (b, a) by squared distance; first of ties."""
    return (candidates - pivot[:, None]).square().sum(-1).argmin(1)


def contrastive_positions(
    axes: int,
    max_digits: int,
    pivots: int,
    candidates: int,
    generator: torch.Generator | None = None,
    *,
    window: int | None = None,
    base: int = 10,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw pivots (b, a), candidates (b, n, a) and labels (b,) for `contrastive_loss`; candidates exclude the pivot.

    Half of the pivots have uniformly random candidates. For 30 %, a fifth of these are replaced by hard negatives:
    the digits of one of the pivot's numbers with one digit inserted, deleted, swapped or changed, unless that is
    nearer than the nearest random candidate. For 20 %, all candidates are in one window around the pivot.

    Args:
        axes: numbers per position.
        max_digits: digits per number.
        pivots: b.
        candidates: n.
        generator: source of the draws.
        window: side of the local window; by default 14, or 196 in 1D.
        base: base of the digits.
    """
    # uniform pivots, with uniform candidates (half of the pivots) or candidates in a window around the pivot (a fifth)
    side = base**max_digits
    window = min(window or (196 if axes == 1 else 14), side)
    if window**axes < 2:
        raise OptionError(
            f"contrastive_positions needs candidates besides the pivot, got window={window}. Use a larger window."
        )
    pivot = torch.randint(side, (pivots, axes), generator=generator)
    origin = pivot.new_zeros(pivots, axes)
    uniform_candidates = _others(pivot, origin, side, candidates, generator)
    low, high = (pivot - window + 1).clamp(min=0), pivot.clamp(max=side - window)
    fraction = torch.rand(pivots, axes, generator=generator)
    corner = low + (fraction * (high - low + 1)).long().clamp(max=high - low)
    local = _others(pivot, corner, window, candidates, generator)
    kind = torch.rand(pivots, generator=generator)[:, None, None]
    # for the rest, a fifth of the candidates are edited pivots, unless nearer than the nearest random candidate
    hard = _edited(pivot, candidates, max_digits, base, generator)
    reach = (uniform_candidates - pivot[:, None]).square().sum(-1).amin(1)
    hard_distance = (hard - pivot[:, None]).square().sum(-1)
    chosen = torch.rand(pivots, candidates, generator=generator).argsort(1) < round(0.2 * candidates)
    mixed = torch.where((chosen & (hard_distance >= reach[:, None]))[..., None], hard, uniform_candidates)
    positions = torch.where(kind < 0.5, uniform_candidates, torch.where(kind < 0.8, mixed, local))
    return pivot, positions, nearest(pivot, positions)


def _others(
    pivot: Tensor, corner: Tensor, side: int, count: int, generator: torch.Generator | None
) -> Tensor:
    """Return uniform draws (b, count, a) from a window of `side` cells per axis at `corner`, never the pivot."""
    b, axes = pivot.shape
    powers = side ** torch.arange(axes - 1, -1, -1)
    # row-major index of the pivot in the window
    pivot_index = ((pivot - corner) * powers).sum(1, keepdim=True)
    flat = torch.randint(side**axes - 1, (b, count), generator=generator)
    # skip the pivot: indices from it on move up by one
    flat = flat + (flat >= pivot_index)
    return flat[..., None].div(powers, rounding_mode="floor") % side + corner[:, None]


def _edited(
    pivot: Tensor, count: int, max_digits: int, base: int, generator: torch.Generator | None
) -> Tensor:
    """Return pivots (b, count, a) with one number changed as a string: changed, swapped, deleted or inserted digit."""
    b, axes = pivot.shape
    many = pivot[:, None].expand(-1, count, -1)

    def draw(high: int) -> Tensor:
        return torch.randint(high, (b, count), generator=generator)

    axis, at, new, action = draw(axes)[..., None], draw(max_digits), draw(base), draw(4)
    value = many.gather(-1, axis).squeeze(-1)
    unit = base**at
    digit, left_digit = value // unit % base, value // (unit * base) % base
    changed = value + (new - digit) * unit
    swapped = value + (digit - left_digit) * (base - 1) * unit  # with its left neighbour
    deleted = value // (unit * base) * unit + value % unit
    inserted = value // unit * (unit * base) + new * unit + value % unit
    # an insertion can exceed `max_digits`: the leading digit is dropped
    edits = torch.stack([changed, swapped, deleted, inserted], -1) % base**max_digits
    return many.scatter(-1, axis, edits.gather(-1, action[..., None]))


def transfer_positions(
    shape: tuple[int, ...],
    max_digits: int,
    count: int,
    generator: torch.Generator | None = None,
    *,
    base: int = 10,
) -> tuple[Tensor, Tensor]:
    """Draw random cells of the training window, as row indices (n,), and the same cells of a far window (n, a).

    The far window does not overlap the training window, which starts at 0, if the number of digits permits.
    """
    side = base**max_digits
    size = torch.tensor(shape)
    # the far window starts after the training window where the range of positions permits it
    low = torch.where(2 * size <= side, size, torch.zeros_like(size))
    offset = low + (torch.rand(len(shape), generator=generator) * (side - size - low + 1)).long()
    total = int(size.prod())
    index = torch.randperm(total, generator=generator)[:count]
    strides = torch.tensor([int(size[i + 1 :].prod()) for i in range(len(shape))])
    return index, index[:, None].div(strides, rounding_mode="floor") % size + offset
