"""Fraction of the variance of attention logits explained by position: by offset, by rotary pair, by distance.

Follows "Round and Round We Go! What makes Rotary Positional Encodings useful?" for the frequencies of positional heads;
the correlation of each rotary pair with the distance and the R² by offset are our 2D form.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vispe.attention.transform.abstract_transform import Layout
from vispe.backbones.attention_recorder import LayerAttention
from vispe.errors import UnsupportedHost
from vispe.evaluate.attention.head_statistics import logit_sums_of, position_share
from vispe.evaluate.attention.offset_tables import by_distance, pairs
from vispe.evaluate.attention.rotary_bands import band_shares, pairs_of, rotated, turning
from vispe.evaluate.measure.audited_model import AuditedModel
from vispe.evaluate.measure.base import Accumulator, Measure, Outcome
from vispe.grid import Grid


def quarters(shares: Tensor, speed: Tensor) -> Tensor:
    """Return the sums of fractions (h, pairs) over the quarters of highest and lowest frequencies, (h, 2).

    Args:
        shares: fraction of each pair.
        speed: frequency of each pair in any unit, (h, pairs), or with fewer heads, each for a group of heads.
    """
    order = speed.repeat_interleave(len(shares) // len(speed), 0).argsort(
        dim=-1, descending=True, stable=True
    )
    count = max(1, shares.shape[-1] // 4)
    ranked = shares.gather(-1, order)
    return torch.stack([ranked[..., :count].sum(-1), ranked[..., -count:].sum(-1)], -1)


def pair_tables(q: Tensor, k: Tensor, grid: Grid, layout: Layout) -> Tensor:
    """Sum the products of queries and keys of each rotary pair by offset, (h, pairs, 2 gh - 1, 2 gw - 1).

    Args:
        q: rotated queries of the patches (h, N, d).
        k: rotated keys of the patches (h, N, d).
        grid: grid of the patches.
        layout: which channels form a pair.
    """
    h, w = grid.shape
    # sums over all positions with equal offset are a cross-correlation, zero-padded against wrap-around; sizes are
    # multiples of 16 because FFTs are slow for prime sizes
    size = [-(-(2 * n - 1) // 16) * 16 for n in grid.shape]
    q_spectrum, k_spectrum = (
        torch.fft.rfft2(pairs_of(x, layout).mT.unflatten(-1, (h, w)), s=size) for x in (q, k)
    )
    table = torch.fft.irfft2((q_spectrum.conj() * k_spectrum).sum(2), s=size)
    return table.roll((h - 1, w - 1), (-2, -1))[..., : 2 * h - 1, : 2 * w - 1]


def distance_rho(tables: Tensor, grid: Grid) -> Tensor:
    """Return Spearman's rho between the mean product at each distance and the distance, (h, pairs).

    Args:
        tables: return value of `pair_tables`.
        grid: grid of the patches.

    >>> table = torch.tensor([[1.0, 4, 9, 4, 1]])
    >>> distance_rho(table[None, None], Grid((1, 3))).tolist()
    [[-1.0]]
    """
    mean = by_distance(tables.flatten(0, 1), grid) / by_distance(pairs(grid)[None].to(tables), grid)
    rank = mean.argsort(-1).argsort(-1).to(mean)
    step = torch.arange(rank.shape[-1]).to(rank)
    rank, step = rank - rank.mean(-1, keepdim=True), step - step.mean()
    return ((rank @ step) / (step @ step)).unflatten(0, tables.shape[:2])


class PositionInLogits(Measure):
    """Fraction of the variance of logits explained by the offset between patches.

    Follows "Round and Round We Go! What makes Rotary Positional Encodings useful?" (positional and semantic bands); the
    R² by offset is ours.
    """

    name = "place_in_logits"
    family = "attention"
    order = 1
    limit = 0.05
    question = "Do heads attend by position rather than by content?"
    number = "R2 of the logits from the offset"
    misleads = (
        "Neighbouring patches are similar, so content depends on the offset too: compare with the model without its "
        "encoding."
    )
    papers = (
        "Round and Round We Go! What makes Rotary Positional Encodings useful?, https://arxiv.org/abs/2410.06205",
    )
    needs = frozenset({"attention"})
    controls = ("none",)  # shuffled patches have the same positions, so they are not a control here

    def on_layer(self, acc: Accumulator, captured: LayerAttention) -> None:
        """Add the R² by offset of a layer, and the statistics of its rotary pairs."""
        r2 = position_share(logit_sums_of(captured), captured.x.shape[0], captured.grid)
        acc.layer(r2=float(r2.mean()))
        acc.add(f"r2 {captured.layer}", r2)
        qk = rotated(captured)
        if qk is None:
            return
        q, k, rotation = qk
        shares = band_shares(q, k, rotation.layout).double()
        speed = turning(rotation, captured.grid).norm(dim=-1)
        rho = distance_rho(pair_tables(q, k, captured.grid, rotation.layout), captured.grid).double()
        # the same queries and keys at shuffled positions give the chance level
        generator = torch.Generator().manual_seed(1009 * acc.number + captured.layer)
        permutation = torch.randperm(captured.grid.patches, generator=generator).to(q.device)
        shuffled = distance_rho(
            pair_tables(q[:, permutation], k[:, permutation], captured.grid, rotation.layout), captured.grid
        ).double()
        acc.add(f"bands {captured.layer}", shares)
        acc.add(f"quarters {captured.layer}", quarters(shares, speed))
        acc.add(f"rho {captured.layer}", rho)
        acc.layer(
            by_distance=(rho.abs() * shares).sum(1).cpu(), chance=(shuffled.abs() * shares).sum(1).cpu()
        )

    def summarize(self, acc: Accumulator, audited: AuditedModel) -> Outcome:
        """Return the fraction of variance, averaged over layers and heads."""
        if not acc.records or "r2" not in acc.records[0]:
            raise UnsupportedHost("No attention layer was captured.")
        r2, n = torch.from_numpy(acc.column("r2")), len(acc.records)
        if r2.isnan().all():
            raise UnsupportedHost(
                "Attention masks exclude pairs of patches, so logits cannot be compared by offset."
            )
        means = {
            word: [
                (acc.sums[name] / n).round(decimals=4).tolist()
                for name in acc.sums
                if name.startswith(f"{word} ")
            ]
            for word in ("r2", "bands", "quarters", "rho")
        }
        if "chance" in acc.records[0]:
            limit = float(np.percentile(acc.column("chance"), 95))
            scores = acc.column("by_distance").mean(0)
            means |= {
                "by_distance": scores.tolist(),
                "chance": limit,
                "positional": float((scores > limit).mean()),
            }
        return Outcome(
            float(r2.nanmean()),
            per_image=r2.nanmean(1).tolist(),
            per_layer=r2.nanmean(0).tolist(),
            details={name: value for name, value in means.items() if len(np.shape(value)) == 0 or value},
        )
