"""How much of the attention of a head goes to one token: `vispe health` as a measure among others."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from vispe.backbones.attention_recorder import Seen, prefix_names
from vispe.errors import UnsupportedHost
from vispe.evaluate.attention.head_result import PATTERNS, Thresholds
from vispe.evaluate.attention.head_statistics import local_mass, reach, sums_of
from vispe.evaluate.audit.audited_model import Host
from vispe.evaluate.audit.measure import Kept, Measure, Outcome


@dataclass(frozen=True)
class Heads(Measure):
    """The largest share of attention that one token receives, mean over heads."""

    name = "heads"
    family = "attention"
    asks = "Do heads collapse onto one token?"
    number = "attention on the strongest token"
    misleads = "Attention that must go somewhere is parked on a token; a sink on a class or register token is harmless."
    needs = frozenset({"attention"})

    def see(self, kept: Kept, seen: Seen) -> None:
        """Keep where the attention of a layer goes."""
        sums, grid, at = sums_of(seen), seen.grid, seen.layer
        attention = sums.attention / grid.patches
        local, far = local_mass(attention, grid), reach(attention, 0.05)
        kind = torch.nn.functional.one_hot(Thresholds().classify(sums.peak, local), len(PATTERNS)).double()
        kept.layer(peak=float(sums.peak.mean()))
        kept.note(uniform=1 / grid.tokens)
        prefix, patches = sums.winners.split([grid.prefix, grid.patches], 1)
        kept.add(f"where {at}", torch.cat([prefix, patches.sum(1, keepdim=True)], 1))
        kept.add(
            f"heads {at}", torch.stack([sums.peak, sums.entropy / math.log(grid.tokens), local, far, *kind.T])
        )

    def finish(self, kept: Kept, host: Host) -> Outcome:
        """Return the mean of the largest shares, beside that of uniform attention."""
        if not kept.records or "peak" not in kept.records[0]:
            raise UnsupportedHost("No attention was seen.")
        peak, n = kept.column("peak"), len(kept.records)
        layers = range(peak.shape[1])
        heads = torch.stack([kept.sums[f"heads {i}"] / n for i in layers])
        where = torch.stack([kept.sums[f"where {i}"] / n for i in layers]).mean((0, 1)).tolist()
        names = () if host.model is None else prefix_names(host.model, len(where) - 1)
        words = ("sink_mass", "entropy", "local_mass", "reach")
        return Outcome(
            float(peak.mean()),
            per_image=peak.mean(1).tolist(),
            per_layer=peak.mean(0).tolist(),
            control={"uniform": float(kept.column("uniform").mean())},
            details={
                **{word: heads[:, k].tolist() for k, word in enumerate(words)},
                "classes": dict(zip(PATTERNS, heads[:, 4:].mean((0, 2)).tolist(), strict=True)),
                "strongest": dict(zip((*names, "patch"), where, strict=True)),
            },
        )
