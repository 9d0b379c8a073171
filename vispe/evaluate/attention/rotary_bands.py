"""Rotary bands: low-frequency channel pairs whose keys share one direction and cause attention sinks.

Follows DoPE (denoising rotary position embedding): the truncated matrix entropy of rotated keys. The keys of a pair
with a high frequency spread over all directions, and their 2 x 2 Gram matrix has two equal eigenvalues. For
pairs whose angle stays below pi / 2 over the full image (the bound on the rotary base in "Base of RoPE Bounds
Context Length"; RoFormer), keys with a common component add up, and a query in that direction attends to all
of them: the rank is low. `vispe.evaluate.attention.band_ablation` runs a model with such pairs left
unrotated.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from vispe.attention.transform.abstract_transform import Layout
from vispe.attention.transform.chain import Chain
from vispe.attention.transform.pairs import PairRotation
from vispe.backbones.attention_recorder import LayerAttention
from vispe.errors import UnsupportedHost
from vispe.evaluate.attention.head_health import massive
from vispe.evaluate.attention.head_statistics import sums_of
from vispe.evaluate.measure.audited_model import AuditedModel
from vispe.evaluate.measure.base import Accumulator, Measure, Outcome
from vispe.grid import Grid
from vispe.utils.options import PositiveInt, checked

TOP = 8  # largest eigenvalues per head; with a single one the effective rank is always 1


@checked
def effective_rank(keys: Tensor, top: PositiveInt = TOP) -> Tensor:
    """Return exp of the entropy of the largest eigenvalues of K^T K, (...): 1 if all keys are collinear.

    Args:
        keys: (..., n, d), rotated, not centred.
        top: number of eigenvalues that are normalised to a sum of 1; all of them if d is smaller.

    Raises:
        OptionError: `top` is below 1.

    >>> round(float(effective_rank(torch.eye(4).double(), 3)), 6)
    3.0
    """
    values = torch.linalg.eigvalsh(keys.mT @ keys).clamp(min=0)[..., -top:]
    total = values.sum(-1, keepdim=True)
    # keys that are all 0 have no direction: 0 / 0 gives NaN
    return torch.special.entr(values / total).sum(-1).exp()


def pairs_of(x: Tensor, layout: Layout) -> Tensor:
    """Return channels (..., n, d) as pairs (..., pairs, n, 2)."""
    both = x.unflatten(-1, (2, -1)).mT if layout == "half" else x.unflatten(-1, (-1, 2))
    return both.transpose(-3, -2)


def band_ranks(keys: Tensor, layout: Layout) -> Tensor:
    """Return the effective rank of every rotary pair (..., pairs), from 1 (collinear keys) to 2 (isotropic keys).

    Args:
        keys: (..., n, d), rotated.
        layout: which channels form a pair.

    >>> keys = torch.tensor([[1.0, 0, 1, 1], [0.0, 1, 2, 2]]).double()
    >>> [round(rank, 3) for rank in band_ranks(keys, "interleaved").tolist()]
    [2.0, 1.0]
    """
    return effective_rank(pairs_of(keys, layout), 2)


def band_shares(q: Tensor, k: Tensor, layout: Layout) -> Tensor:
    """Return the fraction of each rotary pair in the upper bound of the logits, (..., pairs).

    By Cauchy-Schwarz the logit of a pair is at most |q_pair| |k_pair|; the norms are averaged over tokens and
    multiplied (Round and Round We Go!, "What makes rotary positional encodings useful").

    Args:
        q: (..., n, d), rotated or not.
        k: keys, as `q`.
        layout: which channels form a pair.
    """
    q_norms, k_norms = (torch.hypot(*pairs_of(x, layout).unbind(-1)).mean(-1) for x in (q, k))
    bound = q_norms * k_norms
    return bound / bound.sum(-1, keepdim=True)


def rotated(captured: LayerAttention) -> tuple[Tensor, Tensor, PairRotation] | None:
    """Return rotated queries and keys of the patches (h, N, rotated channels) and their rotation.

    None if the layer does not rotate pairs of channels.
    """
    transform = captured.call.transform
    links = transform.links if isinstance(transform, Chain) else (transform,)
    rotation = next((link for link in links if isinstance(link, PairRotation)), captured.rotation)
    if rotation is None or captured.call.replaces_product:
        return None
    prefix, channels = captured.grid.prefix, 2 * rotation.cos.shape[-1]
    q, k, _ = captured.remember("qkv", captured.call.transformed)
    return q[0, :, prefix:, :channels], k[0, :, prefix:, :channels], rotation


def turning(rotation: PairRotation, grid: Grid) -> Tensor:
    """Return the rotation in radians from a patch to the one below and to the right, (h or 1, pairs, 2)."""
    tables = rotation.of_keys
    angle = torch.complex(tables.cos[0].double(), tables.sin[0].double())[:, -grid.patches :]
    angle = angle.unflatten(1, grid.shape)
    # the sum of unit phasors gives the mean step, so wrapped angles do not matter
    down = (angle[:, 1:] * angle[:, :-1].conj()).sum((1, 2)).angle()
    right = (angle[:, :, 1:] * angle[:, :, :-1].conj()).sum((1, 2)).angle()
    return torch.stack([down, right], -1)


class RotaryBands(Measure):
    """Ranks of rotary pairs, nearly unrotated pairs, and massive channels.

    Follows DoPE (truncated matrix entropy of rotary bands) and "Massive Values in Self-Attention Modules are the Key to
    Contextual Knowledge Understanding" (massive channels of queries and keys); weights of pairs by their logit bound.
    """

    name = "bands"
    family = "attention"
    order = 2
    limit = 0.2
    question = "Do low-frequency rotary bands cause an attention sink?"
    number = "fraction of the logit bound in bands with collinear keys, in the head where it is largest"
    misleads = (
        "Collinear keys cause a sink only where queries share their direction; on small grids some pairs are nearly "
        "unrotated for any weights."
    )
    papers = (
        "DoPE (denoising rotary position embedding)",
        "Massive Values in Self-Attention Modules are the Key to Contextual Knowledge Understanding",
        "RoFormer, https://arxiv.org/abs/2104.09864",
        "Base of RoPE Bounds Context Length",
    )
    needs = frozenset({"attention"})
    controls = ("random",)

    def on_layer(self, acc: Accumulator, captured: LayerAttention) -> None:
        """Add ranks, angles and norms of a layer with rotated keys."""
        qk = rotated(captured)
        if qk is None:
            return
        queries, keys, rotation = qk
        keys = keys.double()
        ranks = band_ranks(keys, rotation.layout)
        # 2 - rank is 1 for collinear and 0 for isotropic keys; the lowest rank alone is close to 1 in any large model,
        # so pairs are weighted by their bound on the logit
        collinear = ((2 - ranks) * band_shares(queries.double(), keys, rotation.layout)).nansum(1)
        acc.layer(alike=float(collinear.max()), lowest=float(np.nanmin(ranks.cpu())))
        sums = sums_of(captured)
        shape = torch.tensor(captured.grid.shape, dtype=torch.float64)
        angles = turning(rotation, captured.grid).cpu().abs() @ shape
        acc.add(f"ranks {captured.layer}", ranks)
        acc.add(f"turn {captured.layer}", angles.repeat_interleave(len(ranks) // len(angles), 0))
        acc.add(f"head {captured.layer}", effective_rank(keys))
        acc.add(f"q {captured.layer}", sums.q)
        acc.add(f"k {captured.layer}", sums.k)

    def summarize(self, acc: Accumulator, audited: AuditedModel) -> Outcome:
        """Return the largest collinear fraction of a head, and the bands that cause it."""
        if not any("alike" in record for record in acc.records):
            raise UnsupportedHost(
                "No layer rotates pairs of key channels, so there are no rotary bands to measure."
            )
        collinear, n = acc.column("alike"), len(acc.records)
        layers = sorted(int(name.split()[1]) for name in acc.sums if name.startswith("ranks"))
        ranks, rotation, head = (
            torch.stack([acc.sums[f"{name} {i}"] for i in layers]) / n for name in ("ranks", "turn", "head")
        )
        channels = list(massive((acc.sums[f"q {i}"], acc.sums[f"k {i}"]) for i in layers))
        flat_lowest = ranks.flatten().nan_to_num(math.inf).argsort()[:5]
        lowest = np.stack(np.unravel_index(flat_lowest.numpy(), tuple(ranks.shape)), 1).tolist()
        unrotated = rotation < math.pi / 2
        return Outcome(
            float(collinear.max(1).mean()),
            per_image=collinear.max(1).tolist(),
            per_layer=collinear.mean(0).tolist(),
            details={
                "lowest_rank": float(acc.column("lowest").min(1).mean()),
                "lowest": [
                    {"layer": layers[i], "head": j, "pair": p, "rank": float(ranks[i, j, p])}
                    | {"radians_over_the_picture": float(rotation[i, j, p])}
                    for i, j, p in lowest
                ],
                "still": [row.all(0).nonzero().flatten().tolist() for row in unrotated],
                "rank_of_still": float(ranks[unrotated].nanmean()),
                "rank_of_turning": float(ranks[~unrotated].nanmean()),
                "head_rank": head.mean(1).tolist(),
                "massive": len(channels),
                "massive_turning": sum(channel < 2 * ranks.shape[-1] for *_, channel, _ in channels),
            },
        )
