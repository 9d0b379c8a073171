"""Attention prior over positions, measured on content-free images.

Follows "Found in the Middle: Calibrating Positional Attention Bias Improves Long Context Utilization" (arXiv
2406.16008) and "Attention Basin: Why Contextual Position Matters in Large Language Models" (arXiv
2508.05128): a slot of a ViT is a patch, and content-free items are images of one colour or of noise (dummy
images). The positions with the most and the least attention are selected on all dummy images except one, and
evaluated on the remaining one. So the expected spread without a prior is 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vispe.backbones.attention_recorder import LayerAttention, attention_map, prefix_names
from vispe.evaluate.attention.head_statistics import groups, rows_of
from vispe.evaluate.measure.base import Accumulator, Measure, Outcome
from vispe.grid import Grid
from vispe.hosts.slot_calibration import psi, slot_spread
from vispe.images.symmetry.d4 import D4

if TYPE_CHECKING:
    from vispe.evaluate.measure.audited_model import AuditedModel
    from vispe.evaluate.measure.perturbed_runs import PerturbedRuns

DUMMIES = 6
"""Number of content-free images: one of the mean colour, the others of noise."""


def held_out_spread(maps: Tensor) -> Tensor:
    """Return the relative spread of each map between the argmax and the argmin of the sum of the other maps.

    Args:
        maps: (dummies, ..., positions); at least two dummies.

    Returns:
        (dummies, ...): equal to `slot_spread` if all dummies agree, about 0 if they have nothing in common.

    >>> held_out_spread(torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]))
    tensor([1., 1.])
    """
    others = maps.sum(0) - maps
    top, low = (maps.gather(-1, at(-1, keepdim=True))[..., 0] for at in (others.argmax, others.argmin))
    return (top - low) / maps.mean(-1)


def asymmetry(table: Tensor) -> float:
    """Return the fraction of the variance of a table (h, w) that is not invariant to rotations and reflections."""
    h, w = table.shape
    poses = [e.apply(table) for e in D4 if h == w or e.turns % 2 == 0]
    variance = float(table.var(correction=0))
    invariant = float(torch.stack(poses).mean(0).var(correction=0))
    return 1 - invariant / variance if variance > 1e-12 * float(table.mean()) ** 2 else 0.0


class AttentionPrior(Measure):
    """Spread of the attention over positions on content-free images.

    Follows "Found in the Middle" (arXiv 2406.16008) and "Attention Basin" (arXiv 2508.05128).
    """

    name = "prior"
    family = "attention"
    order = 3
    limit = 0.1
    question = "Is attention uneven over positions when the image has no content?"
    number = "attention on the strongest position minus that on the weakest, relative to the mean"
    misleads = (
        "Images without content are out of distribution, and attention concentrates on sinks there; attention to a "
        "position does not imply that it is used."
    )
    papers = (
        (
            "Found in the Middle: Calibrating Positional Attention Bias Improves Long Context "
            "Utilization, https://arxiv.org/abs/2406.16008"
        ),
        (
            "Attention Basin: Why Contextual Position Matters in Large Language Models, "
            "https://arxiv.org/abs/2508.05128"
        ),
    )
    needs = frozenset({"attention"})

    def on_layer(self, acc: Accumulator, captured: LayerAttention) -> None:
        """Store the attention of one layer on the patches."""
        acc.scratch.setdefault("layers", []).append(received(captured))

    def rerun(self, acc: Accumulator, runs: PerturbedRuns) -> None:
        """Add the size and the attention map of the image to the sums; the model is not run again."""
        relative, absolute = torch.stack(acc.scratch["layers"]).mean(0)
        relative = relative / relative.mean(-1, keepdim=True) - 1
        acc.note(size=list(runs.image.shape), prefix_share=1 - absolute.sum(-1))
        acc.add("maps", relative)
        acc.add("squares", relative.square().sum(-1))

    def summarize(self, acc: Accumulator, audited: AuditedModel) -> Outcome:
        """Return the held-out spread over content-free images of the same size."""
        generator, size = torch.Generator().manual_seed(0), acc.records[0]["size"]
        layers: list[Tensor] = []
        grids: list[Grid] = []

        def on_layer(captured: LayerAttention) -> None:
            layers.append(received(captured))
            grids.append(captured.grid)

        for k in range(DUMMIES):
            # after normalisation the mean colour is 0, and a natural image has variance 1
            noise = torch.rand(1, *size, generator=generator).sub(0.5).mul(12**0.5)
            audited.watch(noise * (k > 0), on_layer)
        assert audited.model is not None
        grid = grids[0]
        query = 0 if prefix_names(audited.model, grid.prefix)[:1] == ("class",) else 1
        # (dummies * layers, 2, 2, patches) -> (relative or absolute, dummies, layers, patches)
        maps = torch.stack(layers)[:, :, query].unflatten(0, (DUMMIES, -1)).permute(2, 0, 1, 3)
        relative, absolute = maps.mean(2)
        spreads = held_out_spread(relative).numpy()
        prior = relative.mean(0) / relative.mean()
        centred, sums = prior - 1, acc.sums["maps"][query]
        # R² of the maps of all images regressed on the prior with one common slope
        shared = float((sums @ centred).clamp(min=0)) ** 2
        power = len(acc.records) * float(centred.square().sum() * acc.sums["squares"][query])
        return Outcome(
            value=float(spreads.mean()),
            per_layer=held_out_spread(maps[0]).mean(0).tolist(),
            control={"uniform": 0.0},
            statistic=lambda picks: float(spreads[picks].mean()),
            units=DUMMIES,
            details={
                "query": ("class token", "mean over patches")[query],
                "by_dummy": spreads.tolist(),
                "mean_colour": float(slot_spread(relative[0])),
                "noise": float(held_out_spread(relative[1:]).mean()),
                "with_prefix": float(held_out_spread(absolute).mean()),
                "psi": float(psi(prior)),
                "prefix_share": float(1 - absolute.sum(-1).mean()),
                "prefix_share_of_images": float(acc.column("prefix_share")[:, query].mean()),
                "asymmetry": asymmetry(prior.unflatten(0, grid.shape)),
                "explains": shared / power if power else 0.0,
                "map": prior.unflatten(0, grid.shape).round(decimals=4).tolist(),
            },
        )


def received(captured: LayerAttention) -> Tensor:
    """Return the attention of a layer on its patches (2, 2, patches) float64, averaged over images and heads.

    First axis: relative to the attention on all patches, and absolute; second: of the first token, and averaged over
    patches as queries.
    """
    rows = (rows_of(attention_map(captured.call, part)[1], captured.grid.prefix) for part in groups(captured))
    absolute = captured.remember("rows", lambda: torch.cat(list(rows), 1))
    # relative to all patches, so that heads with a sink on prefix tokens have the same weight as others
    relative = absolute / absolute.sum(-1, keepdim=True).clamp(min=1e-30)
    return torch.stack([relative, absolute]).mean((1, 2))
