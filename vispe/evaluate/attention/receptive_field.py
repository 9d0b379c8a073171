"""How far a bias lets attention look by itself, and how far heads look (theoretical receptive field, arXiv 2307.10156).

The field of a bias b is the distance within which all but a share eps of the sum of exp(b) lies. That sum exists on
an endless grid for every linear fall-off, and for a power of the distance only above the number of axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vispe.backbones.attention_recorder import Seen
from vispe.errors import OptionError, UnsupportedHost
from vispe.evaluate.attention.head_statistics import alone, radii, reach, sums_of
from vispe.evaluate.audit.audited_model import Host
from vispe.evaluate.audit.measure import Kept, Measure, Outcome
from vispe.grid import Grid

Form = Literal["alibi", "power"]


def fall(form: Form, parameter: float, distance: Tensor) -> Tensor:
    """Return exp of a bias at distances: -parameter * d ('alibi') or -parameter * ln(1 + d) ('power')."""
    if form not in ("alibi", "power"):
        raise OptionError(f"form must be 'alibi' or 'power', got {form!r}.")
    return (-parameter * (distance if form == "alibi" else distance.log1p())).exp()


def one_sided(form: Form, parameter: float, eps: Sequence[float], distances: int) -> list[int]:
    """Return the field of a bias on a line to one side, of `distances` tokens, for every eps.

    >>> one_sided("alibi", 0.5, [0.5, 0.05], 400)
    [1, 5]
    """
    table = fall(form, parameter, torch.arange(distances, dtype=torch.float64))
    table = torch.cat([torch.zeros(distances - 1), table])[None, None]
    return [int(reach(table, share)) for share in eps]


def plane(form: Form, parameter: float, eps: Sequence[float], radius: int) -> list[float]:
    """Return the field of a bias in the plane, over offsets up to `radius` per axis, whole rings, for every eps.

    >>> plane("alibi", 0.5, [0.5], 60)
    [3.1622776601683795]
    """
    table = fall(form, parameter, radii(Grid((radius + 1, radius + 1))))[None]
    return [float(reach(table, share)) for share in eps]


@dataclass(frozen=True)
class Trf(Measure):
    """The reach of heads beside that of their bias alone.

    Attributes:
        eps: share of attention that is left out.
    """

    name = "trf"
    family = "attention"
    asks = "Do heads look farther than their bias alone would let them?"
    number = "reach of heads in reaches of their bias"
    misleads = (
        "A sink far away is reach as well; where the grid is smaller than the field, both end at its rim."
    )
    needs = frozenset({"attention"})
    default = False

    eps: float = 0.05

    def see(self, kept: Kept, seen: Seen) -> None:
        """Keep how far heads and their bias reach."""
        name = f"alone {seen.layer}"
        if name not in kept.sums:
            bias, prior = alone(seen)
            if bias.isnan().all():
                return
            # of a fixed bias once: it is the same in every image; ones count how often, where processes join
            fields = [reach(t, self.eps) for t in (bias, prior)]
            kept.add(name, torch.stack([*fields, torch.ones_like(fields[0])]))
        heads = reach(sums_of(seen).attention, self.eps)
        kept.add(f"heads {seen.layer}", heads)
        _, alike, count = kept.sums[name]
        kept.layer(ratio=float((heads * count / alike).nanmean()))

    def finish(self, kept: Kept, host: Host) -> Outcome:
        """Return the ratio of both, mean over heads and layers."""
        layers = sorted(int(name.split()[1]) for name in kept.sums if name.startswith("alone"))
        if not layers:
            raise UnsupportedHost("No layer has a bias that is the same for all images.")
        ratio, n = kept.column("ratio"), len(kept.records)
        fields, alike, count = torch.stack([kept.sums[f"alone {i}"] for i in layers], 1)
        fields, alike = fields / count, alike / count
        heads = torch.stack([kept.sums[f"heads {i}"] / n for i in layers])
        return Outcome(
            float(ratio.mean()),
            per_image=ratio.mean(1).tolist(),
            per_layer=ratio.mean(0).tolist(),
            control={"bias alone": 1.0},
            details={
                "theoretical": fields.tolist(),
                "of_bias": alike.tolist(),
                "of_heads": heads.tolist(),
                "ratio": (heads / alike).tolist(),
            },
        )
