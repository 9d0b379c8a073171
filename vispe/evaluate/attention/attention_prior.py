"""Where attention looks when there is nothing to see: the prior of places.

A slot of a ViT is a patch, and its content-free item a picture of one colour or of noise (after arXiv 2406.16008).
Which places get most and least is found on all dummies but one and read from that one: without a prior nothing is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vispe.backbones.attention_recorder import Seen, attention_map, prefix_names
from vispe.evaluate.attention.head_statistics import groups, rows_of
from vispe.evaluate.audit.measure import Kept, Measure, Outcome
from vispe.grid import Grid
from vispe.hosts.slot_calibration import psi, slot_spread
from vispe.symmetry.d4 import D4

if TYPE_CHECKING:
    from vispe.evaluate.audit.audited_model import Host
    from vispe.evaluate.behaviour.perturbed_runs import Reruns

DUMMIES = 6
"""Pictures without content: one of the mean colour, the others of noise."""


def held_out_spread(maps: Tensor) -> Tensor:
    """Return for each dummy its attention at the place that the others find highest less lowest, over its mean.

    Args:
        maps: (dummies, ..., places); at least two dummies.

    Returns:
        (dummies, ...): `slot_spread` where all dummies agree, about 0 where they have nothing in common.

    >>> held_out_spread(torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]))
    tensor([1., 1.])
    """
    others = maps.sum(0) - maps
    top, low = (maps.gather(-1, at(-1, keepdim=True))[..., 0] for at in (others.argmax, others.argmin))
    return (top - low) / maps.mean(-1)


def asymmetry(table: Tensor) -> float:
    """Return the share of the variance of a table (h, w) that turns and mirrorings do not leave as it is."""
    h, w = table.shape
    poses = [e.apply(table) for e in D4 if h == w or e.turns % 2 == 0]
    variance = float(table.var(correction=0))
    kept = float(torch.stack(poses).mean(0).var(correction=0))
    return 1 - kept / variance if variance > 1e-12 * float(table.mean()) ** 2 else 0.0


@dataclass(frozen=True)
class Prior(Measure):
    """How unevenly places are looked at by themselves."""

    name = "prior"
    family = "attention"
    asks = "Are some places looked at more than others when there is nothing to see?"
    number = "attention on the place that gets most minus that on the least, in means over places"
    misleads = (
        "Pictures without content are unlike any other, and attention rests on sinks there; what is looked at need "
        "not be used."
    )
    needs = frozenset({"attention"})

    def see(self, kept: Kept, seen: Seen) -> None:
        """Add a layer to the map of the image."""
        kept.scratch.setdefault("layers", []).append(received(seen))

    def ask(self, kept: Kept, reruns: Reruns) -> None:
        """Keep the size of the image and what its map adds to sums; nothing is run again."""
        own, whole = torch.stack(kept.scratch["layers"]).mean(0)
        own = own / own.mean(-1, keepdim=True) - 1
        kept.note(size=list(reruns.image.shape), prefix_share=1 - whole.sum(-1))
        kept.add("maps", own)
        kept.add("squares", own.square().sum(-1))

    def finish(self, kept: Kept, host: Host) -> Outcome:
        """Return the held-out spread over dummies of the size of the images."""
        generator, size = torch.Generator().manual_seed(0), kept.records[0]["size"]
        layers: list[Tensor] = []
        grids: list[Grid] = []

        def on_layer(seen: Seen) -> None:
            layers.append(received(seen))
            grids.append(seen.grid)

        for k in range(DUMMIES):
            # after normalisation the mean colour is 0, and an ordinary picture has variance 1
            noise = torch.rand(1, *size, generator=generator).sub(0.5).mul(12**0.5)
            host.watch(noise * (k > 0), on_layer)
        assert host.model is not None
        grid = grids[0]
        query = 0 if prefix_names(host.model, grid.prefix)[:1] == ("class",) else 1
        # kind, dummy, layer, place
        found = torch.stack(layers)[:, :, query].unflatten(0, (DUMMIES, -1)).permute(2, 0, 1, 3)
        own, whole = found.mean(2)
        spreads = held_out_spread(own).numpy()
        prior = own.mean(0) / own.mean()
        centred, sums = prior - 1, kept.sums["maps"][query]
        # one slope for all images: their maps beside the prior, over what both vary
        shared = float((sums @ centred).clamp(min=0)) ** 2
        power = len(kept.records) * float(centred.square().sum() * kept.sums["squares"][query])
        return Outcome(
            value=float(spreads.mean()),
            per_layer=held_out_spread(found[0]).mean(0).tolist(),
            control={"uniform": 0.0},
            statistic=lambda picks: float(spreads[picks].mean()),
            units=DUMMIES,
            details={
                "query": ("class token", "mean over patches")[query],
                "by_dummy": spreads.tolist(),
                "mean_colour": float(slot_spread(own[0])),
                "noise": float(held_out_spread(own[1:]).mean()),
                "with_prefix": float(held_out_spread(whole).mean()),
                "psi": float(psi(prior)),
                "prefix_share": float(1 - whole.sum(-1).mean()),
                "prefix_share_of_images": float(kept.column("prefix_share")[:, query].mean()),
                "asymmetry": asymmetry(prior.unflatten(0, grid.shape)),
                "explains": shared / power if power else 0.0,
                "map": prior.unflatten(0, grid.shape).round(decimals=4).tolist(),
            },
        )


def received(seen: Seen) -> Tensor:
    """Return the attention of a layer to its patches (2, 2, places) float64, mean over images and heads.

    First as shares of what patches get, then as it is; each from the first token, and from patches in the mean.
    """
    rows = (rows_of(attention_map(seen.call, some)[1], seen.grid.prefix) for some in groups(seen))
    whole = seen.remember("rows", lambda: torch.cat(list(rows), 1))
    # heads that rest on prefix tokens count as much as others
    own = whole / whole.sum(-1, keepdim=True).clamp(min=1e-30)
    return torch.stack([own, whole]).mean((1, 2))
