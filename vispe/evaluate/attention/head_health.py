"""Health of attention heads: dead heads, attention sinks, local and distributed heads.

A head is dead if one token receives more than 95 % of its attention, a sink above 50 %, otherwise local if more than
60 % of the attention is on neighbours, otherwise distributed. `language_scores` follows the definition for causal
language models (the code of bloom-head-surgery); `head_health` transfers it to images: the sink is the token
with the most attention, averaged over images, and the neighbours are the 3 x 3 patches around the query. A
sink by itself is not a defect: the weights of a softmax must sum to 1 even if no token is relevant
("Efficient Streaming Language Models with Attention Sinks").
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from vispe.backbones.attention_recorder import prefix_names, record_attention
from vispe.errors import ShapeError
from vispe.evaluate.attention.head_result import PATTERNS as PATTERNS
from vispe.evaluate.attention.head_result import HeadHealth, Thresholds
from vispe.evaluate.attention.head_statistics import CLAMP, HeadSums, LayerSums, entropy, position_share
from vispe.evaluate.attention.offset_tables import by_distance, local_mass, pairs, reach
from vispe.grid import Grid
from vispe.utils.options import PositiveInt, checked

MASSIVE = 5.0  # limit of massive channels, in units of the mean norm of the channels of a head
DRIFT = 0.05  # change of sink mass that `drifted` reports


@dataclass(frozen=True)
class LanguageScores:
    """Scores of the heads of a language model, (L, H) each."""

    sink_mass: Tensor
    entropy: Tensor
    local_mass: Tensor
    pattern: Tensor


@checked
def language_scores(
    attn: Tensor,
    thresholds: Thresholds | None = None,
    *,
    sink: int = 0,
    window: PositiveInt = 3,
    clamp: float = CLAMP,
) -> LanguageScores:
    """Return the scores of attention maps of sequences, as defined by bloom-head-surgery.

    Args:
        attn: (L, H, T, T), rows sum to 1.
        thresholds: lower bounds of the classes.
        sink: index of the token that may be the sink.
        window: number of local tokens, the query included.
        clamp: lower bound of probabilities in the entropy, which is in nats.

    Raises:
        ShapeError: the maps are not (L, H, T, T), or have no token `sink`.
        OptionError: the window is empty.

    >>> language_scores(torch.eye(4).expand(1, 2, 4, 4)).local_mass.tolist()
    [[1.0, 1.0]]
    """
    if attn.ndim != 4 or attn.shape[2] != attn.shape[3] or not 0 <= sink < attn.shape[3]:
        raise ShapeError(
            f"language_scores: attn must be (L, H, T, T) with T > sink={sink}, got {tuple(attn.shape)}. Pass maps of "
            "all layers, or another sink."
        )
    attn = attn.double()
    near = torch.ones(attn.shape[2:], device=attn.device).tril().triu(1 - window)
    mass, local = attn[..., sink].mean(-1), (attn * near).sum(-1).mean(-1)
    pattern = (thresholds or Thresholds()).classify(mass, local)
    return LanguageScores(mass, entropy(attn, clamp), local, pattern)


@checked
def head_health(
    model: nn.Module,
    images: Tensor | Iterable[Tensor],
    *,
    batch_size: PositiveInt = 1,
    thresholds: Thresholds | None = None,
) -> HeadHealth:
    """Compute statistics of the attention heads of a ViT on images; the model is not modified.

    Memory does not grow with the number of images, see `vispe.evaluate.attention.head_statistics`.

    Args:
        model: a ViT of timm or open_clip, converted or not, in evaluation mode.
        images: normalised images (b, 3, H, W), or an iterable of (3, H, W), all of one size.
        batch_size: batch size.
        thresholds: lower bounds of the classes.

    Raises:
        ShapeError: there are no images, or they differ in size.
        OptionError: `batch_size` is below 1, or the model is in training mode.
        UnsupportedHost: the attention of the model cannot be read.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    sums = HeadSums()
    for stacked in _batches(images, batch_size):
        record_attention(model, stacked.to(device), sums.add)
    if sums.grid is None:
        raise ShapeError("head_health: no images, got an empty sequence. Pass at least one image.")
    return _finish(sums, sums.grid, prefix_names(model, sums.grid.prefix), thresholds or Thresholds())


def drifted(
    before: HeadHealth, after: HeadHealth, touched: Sequence[tuple[int, int]] = (), limit: float = DRIFT
) -> list[tuple[int, int, float]]:
    """Return (layer, head, change) of heads outside `touched` whose sink mass changed by more than `limit`.

    The sink mass is that of the strongest token, which may differ between the two reports.

    Raises:
        ShapeError: the reports have different numbers of layers or heads.
    """
    if before.sink_mass.shape != after.sink_mass.shape:
        raise ShapeError(
            f"drifted: both reports must have the same layers and heads, got {before.sink_mass.shape} and "
            f"{after.sink_mass.shape}. Compare reports of one model."
        )
    change = after.sink_mass - before.sink_mass
    return [
        (i, j, float(change[i, j]))
        for i, j in np.argwhere(np.abs(change) > limit).tolist()
        if (i, j) not in set(touched)
    ]


def _batches(images: Tensor | Iterable[Tensor], batch_size: int) -> Iterator[Tensor]:
    pending: list[Tensor] = []
    for image in images:
        if image.ndim != 3:
            raise ShapeError(
                f"head_health: images must be (3, H, W) or (b, 3, H, W), got {tuple(image.shape)} for one image. Pass "
                "normalised tensors."
            )
        if pending and image.shape != pending[0].shape:
            raise ShapeError(
                f"head_health: images must have one size, got {tuple(pending[0].shape)} and {tuple(image.shape)}. "
                "Resize or crop them."
            )
        pending.append(image)
        if len(pending) == batch_size:
            yield torch.stack(pending)
            pending = []
    if pending:
        yield torch.stack(pending)


def _finish(sums: HeadSums, grid: Grid, prefix: tuple[str, ...], thresholds: Thresholds) -> HeadHealth:
    h, w = grid.shape
    n, layers = sums.images, sums.layers
    received = torch.stack([s.received for s in layers]) / n
    mass, token = received.max(-1)
    winners = torch.stack([s.winners for s in layers]) / n
    attention = torch.stack([s.attention for s in layers]) / (n * grid.patches)
    local = local_mass(attention, grid)
    patch_names = [f"patch {i // w},{i % w}" for i in range(grid.patches)]
    return HeadHealth(
        paths=tuple(s.path for s in layers),
        tokens=(*prefix, *patch_names),
        grid=(h, w),
        images=n,
        sink_token=token.numpy(),
        sink_mass=mass.numpy(),
        sink_agreement=winners.gather(-1, token[..., None])[..., 0].numpy(),
        peak_mass=(torch.stack([s.peak for s in layers]) / n).numpy(),
        entropy=(torch.stack([s.entropy for s in layers]) / (n * math.log(grid.tokens))).numpy(),
        local_mass=local.numpy(),
        pattern=thresholds.classify(mass, local).numpy(),
        position_share=torch.stack([position_share(s, n, grid) for s in layers]).numpy(),
        reach=_reaches(list(attention)),
        bias_reach=_reaches([s.prior for s in layers]),
        receptive_field=_reaches([s.bias for s in layers]),
        profile=np.stack([_profile(a, grid) for a in attention]),
        bias_profile=np.stack([_profile(s.prior, grid) for s in layers]),
        uniform_profile=_profile(pairs(grid)[None], grid)[0],
        massive=tuple(massive([(s.q, s.k) for s in layers])),
        position_r2=np.stack([_position_r2(s, n) for s in layers]),
        thresholds=thresholds,
    )


def _reaches(tables: list[Tensor]) -> np.ndarray:
    return np.stack([np.stack([reach(t, eps).numpy() for t in tables]) for eps in (0.5, 0.05)])


def _profile(table: Tensor, grid: Grid) -> np.ndarray:
    """Return the fraction of a table by offset at each rounded distance, (h, distances)."""
    mass = by_distance(table, grid)
    return (mass / mass.sum(1, keepdim=True)).numpy()


def _position_r2(sums: LayerSums, images: int) -> np.ndarray:
    """Return the adjusted R² (d,) of each channel predicted by the patch position (one-way analysis of variance)."""
    n = len(sums.inputs)
    if images < 2:
        return np.full(len(sums.energy), math.nan)
    mean = sums.inputs.sum(0) ** 2 / (n * images)
    total, between = sums.energy - mean, sums.inputs.square().sum(0) / images - mean
    within = (total - between) / (n * (images - 1))
    r2 = 1 - within / (total / (n * images - 1))
    return torch.where(total > 1e-12 * sums.energy, r2, 0.0).numpy()


def massive(energies: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[int, int, str, int, float]]:
    """Yield (layer, head, "q" or "k", channel, norm relative to the mean of the head) of channels above 5.

    Massive values as in "Massive Values in Self-Attention Modules are the Key to Contextual Knowledge Understanding".

    Args:
        energies: squared queries and keys of every layer, summed over tokens (h, d_h).

    >>> [entry[:4] for entry in massive([(torch.ones(1, 8), torch.tensor([[1.0] * 7 + [400.0]]))])]
    [(0, 0, 'k', 7)]
    """
    for i, both in enumerate(energies):
        for kind, energy in zip("qk", both, strict=True):
            norm = energy.sqrt()
            ratio = norm / norm.mean(1, keepdim=True).clamp(min=1e-30)
            for head, channel in (ratio > MASSIVE).nonzero().tolist():
                yield i, head, kind, channel, float(ratio[head, channel])
