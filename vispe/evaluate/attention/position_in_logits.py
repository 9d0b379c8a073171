"""How much of what queries and keys say to each other is where they are: by offset, by rotary pair, by distance."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vispe.attention.transform.abstract_transform import Layout
from vispe.backbones.attention_recorder import Seen
from vispe.errors import UnsupportedHost
from vispe.evaluate.attention.head_statistics import by_distance, logit_sums_of, pairs, position_share
from vispe.evaluate.attention.rotary_bands import band_shares, pairs_of, rotated, turning
from vispe.evaluate.audit.audited_model import Host
from vispe.evaluate.audit.measure import Kept, Measure, Outcome
from vispe.grid import Grid


def quarters(shares: Tensor, speed: Tensor) -> Tensor:
    """Return what the fastest and the slowest quarter of pairs hold of shares (h, pairs), (h, 2).

    Args:
        shares: by pair.
        speed: of each pair, (h, pairs) or with fewer heads that all serve as many, in any unit.
    """
    order = speed.repeat_interleave(len(shares) // len(speed), 0).argsort(
        dim=-1, descending=True, stable=True
    )
    count = max(1, shares.shape[-1] // 4)
    ranked = shares.gather(-1, order)
    return torch.stack([ranked[..., :count].sum(-1), ranked[..., -count:].sum(-1)], -1)


def pair_tables(q: Tensor, k: Tensor, grid: Grid, layout: Layout) -> Tensor:
    """Return the products of queries and keys of each rotary pair, summed by offset: (h, pairs, 2 gh - 1, 2 gw - 1).

    Args:
        q: rotated queries of the patches (h, N, d).
        k: keys likewise.
        grid: of the patches.
        layout: which channels are a pair.
    """
    h, w = grid.shape
    # sums over all places at equal offset are a correlation, on a field so wide that its ends do not meet; transforms
    # are slow for sides that are prime
    size = [-(-(2 * n - 1) // 16) * 16 for n in grid.shape]
    of_q, of_k = (torch.fft.rfft2(pairs_of(x, layout).mT.unflatten(-1, (h, w)), s=size) for x in (q, k))
    table = torch.fft.irfft2((of_q.conj() * of_k).sum(2), s=size)
    return table.roll((h - 1, w - 1), (-2, -1))[..., : 2 * h - 1, : 2 * w - 1]


def distance_rho(tables: Tensor, grid: Grid) -> Tensor:
    """Return Spearman's rho of the mean product at a distance with that distance, (h, pairs).

    Args:
        tables: of `pair_tables`.
        grid: of the patches.

    >>> table = torch.tensor([[1.0, 4, 9, 4, 1]])
    >>> distance_rho(table[None, None], Grid((1, 3))).tolist()
    [[-1.0]]
    """
    mean = by_distance(tables.flatten(0, 1), grid) / by_distance(pairs(grid)[None].to(tables), grid)
    rank = mean.argsort(-1).argsort(-1).to(mean)
    step = torch.arange(rank.shape[-1]).to(rank)
    rank, step = rank - rank.mean(-1, keepdim=True), step - step.mean()
    return ((rank @ step) / (step @ step)).unflatten(0, tables.shape[:2])


@dataclass(frozen=True)
class PlaceInLogits(Measure):
    """The share of the variance of logits that the offset between patches explains."""

    name = "place_in_logits"
    family = "attention"
    asks = "Do heads look at places rather than at things?"
    number = "R2 of the logits from the offset"
    misleads = (
        "Neighbouring patches look alike, so content has an offset too: what is left without the encoding."
    )
    needs = frozenset({"attention"})
    controls = ("none",)  # places stay where they are when patches are shuffled: that is no control of place

    def see(self, kept: Kept, seen: Seen) -> None:
        """Keep what the offset explains, and what rotary pairs do."""
        share = position_share(logit_sums_of(seen), seen.x.shape[0], seen.grid)
        kept.layer(r2=float(share.mean()))
        kept.add(f"r2 {seen.layer}", share)
        found = rotated(seen)
        if found is None:
            return
        q, k, rotation = found
        shares = band_shares(q, k, rotation.layout).double()
        speed = turning(rotation, seen.grid).norm(dim=-1)
        rho = distance_rho(pair_tables(q, k, seen.grid, rotation.layout), seen.grid).double()
        # the same keys and queries in other places: what is left is chance
        generator = torch.Generator().manual_seed(1009 * kept.number + seen.layer)
        mixed = torch.randperm(seen.grid.patches, generator=generator).to(q.device)
        chance = distance_rho(
            pair_tables(q[:, mixed], k[:, mixed], seen.grid, rotation.layout), seen.grid
        ).double()
        kept.add(f"bands {seen.layer}", shares)
        kept.add(f"quarters {seen.layer}", quarters(shares, speed))
        kept.add(f"rho {seen.layer}", rho)
        kept.layer(by_distance=(rho.abs() * shares).sum(1).cpu(), chance=(chance.abs() * shares).sum(1).cpu())

    def finish(self, kept: Kept, host: Host) -> Outcome:
        """Return the share of variance, mean over layers and heads."""
        if not kept.records or "r2" not in kept.records[0]:
            raise UnsupportedHost("No attention was seen.")
        r2, n = torch.from_numpy(kept.column("r2")), len(kept.records)
        if r2.isnan().all():
            raise UnsupportedHost("Masks keep patches from each other, so their offsets cannot be compared.")
        means = {
            word: [
                (kept.sums[name] / n).round(decimals=4).tolist()
                for name in kept.sums
                if name.startswith(f"{word} ")
            ]
            for word in ("r2", "bands", "quarters", "rho")
        }
        if "chance" in kept.records[0]:
            limit = float(np.percentile(kept.column("chance"), 95))
            scores = kept.column("by_distance").mean(0)
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
