"""Positional information from the causal mask alone, in attention logits and in variances.

Follows "Behind RoPE: How Does Causal Mask Encode Positional Information?" (arXiv 2509.21042) for the logits, and
"Latent Positional Information is in the Self-Attention Variance of Transformer Language Models Without Positional
Embeddings" for `variance_slope`. With a causal mask, each token becomes a mean over previous tokens, so
logits depend on absolute positions even without an encoding. A relative encoding adds a function of the
offset only. Therefore the residual of mean logits after subtracting the mean of each diagonal cannot be due
to a relative encoding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from vispe.backbones.attention_recorder import LayerAttention, attention_map
from vispe.errors import ShapeError
from vispe.evaluate.measure.base import Accumulator, Measure, Outcome
from vispe.utils.options import checked

if TYPE_CHECKING:
    from vispe.evaluate.measure.audited_model import AuditedModel

MOST = 128
"""Max number of patches whose logits are stored; larger grids are subsampled by an integer step."""
FIRST = 4
"""Number of initial patches excluded from the detail `without_first`."""


@checked
def stack_scores(
    x: Tensor, layers: int, norm: Literal["l2", "layer"] = "l2", *, causal: bool = True
) -> Tensor:
    """Return mean logits of parameter-free attention layers, (layers, s, s) float64, 0 above the diagonal.

    Each layer adds attention over its normalised tokens h: x + softmax(h h^T) h.

    Args:
        x: (b, s, d).
        layers: number of layers.
        norm: 'l2' (unit length) or 'layer' (LayerNorm without affine parameters, logits divided by sqrt(d)).
        causal: whether tokens attend to previous tokens only.

    Raises:
        OptionError: the norm is unknown.
        ShapeError: x is not (b, s, d).
    """
    if x.ndim != 3:
        raise ShapeError(f"stack_scores: x must be (b, s, d), got {tuple(x.shape)}. Add a batch dimension.")
    x, (s, d), means = x.double(), x.shape[1:], []
    future = torch.ones(s, s, dtype=torch.bool, device=x.device).triu(1)
    for _ in range(layers):
        h = x / x.norm(dim=-1, keepdim=True) if norm == "l2" else layer_norm(x, (d,), eps=1e-12)
        logits = h @ h.mT / (1.0 if norm == "l2" else d**0.5)
        means.append(logits.mean(0).tril())
        attn = (logits.masked_fill(future, -torch.inf) if causal else logits).softmax(-1)
        x = x + attn @ h
    return torch.stack(means)


def without_offsets(scores: Tensor) -> Tensor:
    """Subtract the mean of each diagonal from scores (..., s, s); 0 above the main diagonal.

    >>> without_offsets(torch.tensor([[1.0, 9.0], [5.0, 3.0]], dtype=torch.float64)).tolist()
    [[-1.0, 0.0], [0.0, 1.0]]
    """
    s = scores.shape[-1]
    token = torch.arange(s, device=scores.device)
    offset = token[:, None] - token
    lower = offset >= 0
    values = scores[..., lower]
    # sum over the entries of each offset, then broadcast the mean back
    total = values.new_zeros(*values.shape[:-1], s).index_add_(-1, offset[lower], values)
    rest = torch.zeros_like(scores)
    rest[..., lower] = values - (total / (s - token))[..., offset[lower]]
    return rest


def variance_slope(variance: Tensor) -> Tensor:
    """Return the slope of ln variance over ln (m + 1), m = 0, 1, ..., of variances (..., s).

    -1 if token m is the mean of m + 1 independent tokens, as behind a causal mask; 0 if all positions have the same
    variance.

    >>> variance_slope(1 / torch.arange(1, 9, dtype=torch.float64)).round(decimals=6)
    tensor(-1., dtype=torch.float64)
    """
    x = torch.arange(1, variance.shape[-1] + 1, dtype=torch.float64, device=variance.device).log()
    x = x - x.mean()
    return variance.double().log() @ x / (x @ x)


class CausalMask(Measure):
    """Fraction of the variance of mean logits of a causal model that is not explained by offsets.

    Follows "Behind RoPE: How Does Causal Mask Encode Positional Information?" (arXiv 2509.21042).
    """

    name = "mask"
    family = "attention"
    order = 4
    limit = 0.1
    question = "Does the causal mask bring absolute positions into the logits?"
    number = "fraction of the variance of mean logits not explained by offsets"
    misleads = (
        "Absolute encodings, sinks on the first tokens and layouts common to all images also increase it."
    )
    papers = (
        (
            "Behind RoPE: How Does Causal Mask Encode Positional Information?, "
            "https://arxiv.org/abs/2509.21042"
        ),
        (
            "Latent Positional Information is in the Self-Attention Variance of Transformer Language "
            "Models Without Positional Embeddings"
        ),
    )
    needs = frozenset({"attention", "causal"})

    def on_layer(self, acc: Accumulator, captured: LayerAttention) -> None:
        """Add the logits between patches of a layer, averaged over heads."""
        heads, patches = captured.call.q.shape[1], captured.grid.patches
        step = -(-patches // MOST)
        sampled = slice(captured.grid.prefix, None, step)
        total = torch.zeros(-(-patches // step), -(-patches // step), dtype=torch.float64)
        for head in range(heads):
            logits = attention_map(captured.call, slice(head, head + 1))[0][0, 0, sampled, sampled]
            total += logits.tril().double().cpu() / heads
        acc.add(f"layer {captured.layer}", total, groups=True)
        if captured.layer == 0:
            acc.add("images", torch.ones((), dtype=torch.float64), groups=True)
            acc.note(step=step)

    def summarize(self, acc: Accumulator, audited: AuditedModel) -> Outcome:
        """Return the fraction common to different groups of images."""
        count = acc.sums["images"]
        layers = [acc.sums[f"layer {k}"] for k in range(len(acc.sums) - 1)]
        means = [(s / count.clamp(min=1)[:, None, None])[count > 0] for s in layers]
        # many models have a sink on the first tokens, so report the value without them as well
        late = -(-FIRST // int(acc.records[0]["step"]))
        products, later = (torch.stack([_products(m[:, k:, k:]) for m in means]) for k in (0, late))
        every = np.arange(len(means[0]))
        shares = _shares(products, every)
        return Outcome(
            value=float(shares.mean()),
            per_layer=shares.tolist(),
            control={"bidirectional": 0.0},
            statistic=lambda picks: float(_shares(products, picks).mean()),
            units=len(every) if len(every) > 1 else 0,
            note=""
            if len(every) > 1
            else "One image cannot separate positions from content; pass several images.",
            details={"without_first": float(_shares(later, every).mean()), "images": int(count.sum())},
        )


def _products(means: Tensor) -> Tensor:
    """Return inner products of mean logits of groups (2, groups, groups): of the residuals, and of centred logits."""
    lower = torch.ones(means.shape[-2:], dtype=torch.bool).tril()
    flat = means[:, lower]
    parts = (without_offsets(means)[:, lower], flat - flat.mean(1, keepdim=True))
    return torch.stack([part @ part.T for part in parts])


def _shares(products: Tensor, picks: np.ndarray) -> np.ndarray:
    """Return the fraction of every layer (layers,) for a draw of groups; NaN if all draws are the same group.

    Products of different groups contain only what the images have in common; the denominator contains all pairs.
    """
    rows = torch.from_numpy(picks)
    resampled = products[:, :, rows][..., rows]
    other = rows[:, None] != rows
    return (resampled[:, 0, other].mean(-1) / resampled[:, 1].mean((-2, -1)).clamp(min=1e-30)).numpy()
