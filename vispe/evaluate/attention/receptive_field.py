"""Theoretical receptive field of attention biases, and the reach of heads relative to it.

Follows "Exploring Transformer Extrapolation" (arXiv 2307.10156). The receptive field of a bias b is the distance that
contains all but a fraction eps of the sum of exp(b). On an infinite grid this sum converges for every linear bias, and
for a power law of the distance only if the exponent exceeds the number of axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vispe.backbones.attention_recorder import LayerAttention
from vispe.errors import UnsupportedHost
from vispe.evaluate.attention.head_statistics import bias_tables, sums_of
from vispe.evaluate.attention.offset_tables import radii, reach
from vispe.evaluate.measure.audited_model import AuditedModel
from vispe.evaluate.measure.base import Accumulator, Measure, Outcome
from vispe.grid import Grid
from vispe.utils.options import checked

Form = Literal["alibi", "power"]


@checked
def decay(form: Form, parameter: float, distance: Tensor) -> Tensor:
    """Return exp of a bias at distances d: -parameter * d ('alibi') or -parameter * ln(1 + d) ('power').

    Raises:
        OptionError: an unknown form.
    """
    return (-parameter * (distance if form == "alibi" else distance.log1p())).exp()


def one_sided(form: Form, parameter: float, eps: Sequence[float], distances: int) -> list[int]:
    """Return the receptive field of a bias on one side of a sequence of `distances` tokens, for every eps.

    >>> one_sided("alibi", 0.5, [0.5, 0.05], 400)
    [1, 5]
    """
    table = decay(form, parameter, torch.arange(distances, dtype=torch.float64))
    table = torch.cat([torch.zeros(distances - 1), table])[None, None]
    return [int(reach(table, e)) for e in eps]


def plane(form: Form, parameter: float, eps: Sequence[float], radius: int) -> list[float]:
    """Return the receptive field of a bias in the plane, over offsets up to `radius` per axis, for every eps.

    >>> plane("alibi", 0.5, [0.5], 60)
    [3.1622776601683795]
    """
    table = decay(form, parameter, radii(Grid((radius + 1, radius + 1))))[None]
    return [float(reach(table, e)) for e in eps]


@dataclass(frozen=True)
class ReceptiveField(Measure):
    """Reach of heads relative to the reach of their bias alone.

    Follows "Exploring Transformer Extrapolation" (theoretical receptive field, arXiv 2307.10156).

    Attributes:
        eps: fraction of the attention outside of the reach.
    """

    name = "trf"
    family = "attention"
    question = "Is the reach of heads larger than that of their bias alone?"
    number = "reach of heads divided by the reach of their bias"
    misleads = (
        "A distant sink counts as reach; on grids smaller than the receptive field the border limits both."
    )
    papers = ("Exploring Transformer Extrapolation, https://arxiv.org/abs/2307.10156",)
    needs = frozenset({"attention"})
    default = False

    eps: float = 0.05

    def on_layer(self, acc: Accumulator, captured: LayerAttention) -> None:
        """Add the reach of the heads of a layer and of their bias."""
        name = f"alone {captured.layer}"
        if name not in acc.sums:
            bias, prior = bias_tables(captured)
            if bias.isnan().all():
                return
            # once per process, as a fixed bias is equal for all images; the sum of ones counts processes
            fields = [reach(t, self.eps) for t in (bias, prior)]
            acc.add(name, torch.stack([*fields, torch.ones_like(fields[0])]))
        heads = reach(sums_of(captured).attention, self.eps)
        acc.add(f"heads {captured.layer}", heads)
        _, prior_reach, count = acc.sums[name]
        acc.layer(ratio=float((heads * count / prior_reach).nanmean()))

    def summarize(self, acc: Accumulator, audited: AuditedModel) -> Outcome:
        """Return the reach of heads relative to that of their bias, averaged over heads and layers."""
        layers = sorted(int(name.split()[1]) for name in acc.sums if name.startswith("alone"))
        if not layers:
            raise UnsupportedHost("No layer has an attention bias that is equal for all images.")
        ratio, n = acc.column("ratio"), len(acc.records)
        fields, prior_reach, count = torch.stack([acc.sums[f"alone {i}"] for i in layers], 1)
        fields, prior_reach = fields / count, prior_reach / count
        heads = torch.stack([acc.sums[f"heads {i}"] / n for i in layers])
        return Outcome(
            float(ratio.mean()),
            per_image=ratio.mean(1).tolist(),
            per_layer=ratio.mean(0).tolist(),
            control={"bias alone": 1.0},
            details={
                "theoretical": fields.tolist(),
                "of_bias": prior_reach.tolist(),
                "of_heads": heads.tolist(),
                "ratio": (heads / prior_reach).tolist(),
            },
        )
