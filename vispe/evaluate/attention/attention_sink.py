"""Attention sinks: fraction of the attention of a head on one token, the audit's view of `vispe health`."""

from __future__ import annotations

import math

import torch

from vispe.backbones.attention_recorder import LayerAttention, prefix_names
from vispe.errors import UnsupportedHost
from vispe.evaluate.attention.head_result import PATTERNS, Thresholds
from vispe.evaluate.attention.head_statistics import sums_of
from vispe.evaluate.attention.offset_tables import local_mass, reach
from vispe.evaluate.measure.audited_model import AuditedModel
from vispe.evaluate.measure.base import Accumulator, Measure, Outcome


class AttentionSink(Measure):
    """Largest fraction of attention on one token, averaged over heads.

    Follows the head statistics of the code of bloom-head-surgery, for attention sinks as in "Efficient Streaming
    Language Models with Attention Sinks"; the 2D form is described in `vispe.evaluate.attention.head_health`.
    """

    name = "heads"
    family = "attention"
    order = 0
    limit = 0.1
    question = "Do heads collapse onto one token?"
    number = "attention on the strongest token"
    misleads = "A softmax has to put its mass somewhere; a sink on a class or register token is harmless."
    papers = ("Efficient Streaming Language Models with Attention Sinks",)
    needs = frozenset({"attention"})

    def on_layer(self, acc: Accumulator, captured: LayerAttention) -> None:
        """Add sink, local mass and reach of the heads of a layer."""
        sums, grid, index = sums_of(captured), captured.grid, captured.layer
        attention = sums.attention / grid.patches
        local, far = local_mass(attention, grid), reach(attention, 0.05)
        kind = torch.nn.functional.one_hot(Thresholds().classify(sums.peak, local), len(PATTERNS)).double()
        acc.layer(peak=float(sums.peak.mean()))
        acc.note(uniform=1 / grid.tokens)
        prefix, patches = sums.winners.split([grid.prefix, grid.patches], 1)
        acc.add(f"where {index}", torch.cat([prefix, patches.sum(1, keepdim=True)], 1))
        acc.add(
            f"heads {index}",
            torch.stack([sums.peak, sums.entropy / math.log(grid.tokens), local, far, *kind.T]),
        )

    def summarize(self, acc: Accumulator, audited: AuditedModel) -> Outcome:
        """Return the mean of the largest fractions; the control is uniform attention."""
        if not acc.records or "peak" not in acc.records[0]:
            raise UnsupportedHost("No attention layer was captured.")
        peak, n = acc.column("peak"), len(acc.records)
        layers = range(peak.shape[1])
        heads = torch.stack([acc.sums[f"heads {i}"] / n for i in layers])
        where = torch.stack([acc.sums[f"where {i}"] / n for i in layers]).mean((0, 1)).tolist()
        names = () if audited.model is None else prefix_names(audited.model, len(where) - 1)
        words = ("sink_mass", "entropy", "local_mass", "reach")
        return Outcome(
            float(peak.mean()),
            per_image=peak.mean(1).tolist(),
            per_layer=peak.mean(0).tolist(),
            control={"uniform": float(acc.column("uniform").mean())},
            details={
                **{word: heads[:, k].tolist() for k, word in enumerate(words)},
                "classes": dict(zip(PATTERNS, heads[:, 4:].mean((0, 2)).tolist(), strict=True)),
                "strongest": dict(zip((*names, "patch"), where, strict=True)),
            },
        )
