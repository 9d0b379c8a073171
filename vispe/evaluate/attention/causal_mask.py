"""What a causal mask does to logits without any encoding (arXiv 2509.21042), and how averaging shows in variances.

Behind the mask a token holds a mean of the tokens before it, so logits depend on places without an encoding. A relative
encoding adds to logits what depends on the offset alone: what is left of mean logits without the mean of every
diagonal is not of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from vispe.backbones.attention_recorder import Seen, attention_map
from vispe.errors import OptionError, ShapeError
from vispe.evaluate.audit.measure import Kept, Measure, Outcome

if TYPE_CHECKING:
    from vispe.evaluate.audit.audited_model import Host

MOST = 128
"""Patches of which logits are kept; of larger grids every second, every third and so on."""
FIRST = 4
"""Patches at the start that are left out beside."""


def stack_scores(
    x: Tensor, layers: int, norm: Literal["l2", "layer"] = "l2", *, causal: bool = True
) -> Tensor:
    """Return mean logits of attention layers without parameters, (layers, s, s) float64, 0 above the diagonal.

    Each layer adds attention of its normalised tokens on x itself: x + softmax(h h^T) x.

    Args:
        x: (b, s, d).
        layers: how many.
        norm: 'l2', to length 1, or 'layer', without affine part, with logits over sqrt(d).
        causal: whether tokens see those before them alone.

    Raises:
        OptionError: an unknown norm.
        ShapeError: x is not (b, s, d).
    """
    if norm not in ("l2", "layer"):
        raise OptionError(f"The stack normalises by 'l2' or 'layer', got norm={norm!r}.")
    if x.ndim != 3:
        raise ShapeError(f"The stack needs tokens (b, s, d), got {tuple(x.shape)}.")
    x, (s, d), found = x.double(), x.shape[1:], []
    ahead = torch.ones(s, s, dtype=torch.bool, device=x.device).triu(1)
    for _ in range(layers):
        h = x / x.norm(dim=-1, keepdim=True) if norm == "l2" else layer_norm(x, (d,), eps=1e-12)
        logits = h @ h.mT / (1.0 if norm == "l2" else d**0.5)
        found.append(logits.mean(0).tril())
        attn = (logits.masked_fill(ahead, -torch.inf) if causal else logits).softmax(-1)
        x = x + attn @ h
    return torch.stack(found)


def without_offsets(scores: Tensor) -> Tensor:
    """Return scores (..., s, s) less the mean of each diagonal; 0 above the main one.

    >>> without_offsets(torch.tensor([[1.0, 9.0], [5.0, 3.0]], dtype=torch.float64)).tolist()
    [[-1.0, 0.0], [0.0, 1.0]]
    """
    s = scores.shape[-1]
    token = torch.arange(s, device=scores.device)
    offset = token[:, None] - token
    low = offset >= 0
    values = scores[..., low]
    # entries of an offset, summed and spread again
    total = values.new_zeros(*values.shape[:-1], s).index_add_(-1, offset[low], values)
    rest = torch.zeros_like(scores)
    rest[..., low] = values - (total / (s - token))[..., offset[low]]
    return rest


def variance_slope(variance: Tensor) -> Tensor:
    """Return the slope of ln variance over ln (m + 1), m = 0, 1, ..., of variances (..., s).

    -1 where token m is the mean of m + 1 independent ones, as behind a causal mask; 0 where places are alike.

    >>> variance_slope(1 / torch.arange(1, 9, dtype=torch.float64)).round(decimals=6)
    tensor(-1., dtype=torch.float64)
    """
    x = torch.arange(1, variance.shape[-1] + 1, dtype=torch.float64, device=variance.device).log()
    x = x - x.mean()
    return variance.double().log() @ x / (x @ x)


@dataclass(frozen=True)
class Mask(Measure):
    """How much of the mean logits of a causal model depends on places and not on offsets."""

    name = "mask"
    family = "attention"
    asks = "Does the causal mask bring places into the logits?"
    number = "share of the variance of mean logits that offsets leave"
    misleads = (
        "An absolute encoding, sinks on the first tokens and layouts that images share leave a share as well."
    )
    needs = frozenset({"attention", "causal"})

    def see(self, kept: Kept, seen: Seen) -> None:
        """Add the logits of a layer between patches, mean over its heads."""
        heads, patches = seen.call.q.shape[1], seen.grid.patches
        step = -(-patches // MOST)
        some = slice(seen.grid.prefix, None, step)
        total = torch.zeros(-(-patches // step), -(-patches // step), dtype=torch.float64)
        for head in range(heads):
            logits = attention_map(seen.call, slice(head, head + 1))[0][0, 0, some, some]
            total += logits.tril().double().cpu() / heads
        kept.add(f"layer {seen.layer}", total, groups=True)
        if seen.layer == 0:
            kept.add("images", torch.ones((), dtype=torch.float64), groups=True)
            kept.note(step=step)

    def finish(self, kept: Kept, host: Host) -> Outcome:
        """Return the share that groups of images agree on."""
        count = kept.sums["images"]
        layers = [kept.sums[f"layer {k}"] for k in range(len(kept.sums) - 1)]
        means = [(s / count.clamp(min=1)[:, None, None])[count > 0] for s in layers]
        # sinks of many models
        late = -(-FIRST // int(kept.records[0]["step"]))
        products, later = (torch.stack([_products(m[:, k:, k:]) for m in means]) for k in (0, late))
        every = np.arange(len(means[0]))
        shares = _shares(products, every)
        return Outcome(
            value=float(shares.mean()),
            per_layer=shares.tolist(),
            control={"bidirectional": 0.0},
            statistic=lambda picks: float(_shares(products, picks).mean()),
            units=len(every) if len(every) > 1 else 0,
            note="" if len(every) > 1 else "One image does not tell places from content; give several.",
            details={"without_first": float(_shares(later, every).mean()), "images": int(count.sum())},
        )


def _products(means: Tensor) -> Tensor:
    """Return inner products of mean logits of groups (2, groups, groups): without offsets, and without their mean."""
    low = torch.ones(means.shape[-2:], dtype=torch.bool).tril()
    whole = means[:, low]
    parts = (without_offsets(means)[:, low], whole - whole.mean(1, keepdim=True))
    return torch.stack([part @ part.T for part in parts])


def _shares(products: Tensor, picks: np.ndarray) -> np.ndarray:
    """Return the share of every layer (layers,) for groups that were drawn; NaN where all are one.

    What images have in common is in products of different groups alone; the whole includes what they have not.
    """
    rows = torch.from_numpy(picks)
    drawn = products[:, :, rows][..., rows]
    other = rows[:, None] != rows
    return (drawn[:, 0, other].mean(-1) / drawn[:, 1].mean((-2, -1)).clamp(min=1e-30)).numpy()
