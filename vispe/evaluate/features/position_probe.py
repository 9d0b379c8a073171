"""Can place be read from features? The linear probe of `vispe probe`, after every layer and at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
from torch import Tensor

from vispe.errors import UnsupportedHost
from vispe.evaluate.audit.audited_model import Host, Need
from vispe.evaluate.audit.measure import Family, Kept, Measure, Outcome, View
from vispe.evaluate.probe.splits import Trials

if TYPE_CHECKING:
    from vispe.backbones.attention_recorder import Seen

TARGET = "lr+ud"
WORST = -1.0  # what R² below it says is no more than that nothing is read
ENOUGH, FEWEST = 12, 9  # fitted patches that are aimed at, and those without which there is no probe


def step_for(shape: tuple[int, int]) -> int | None:
    """Return the step with which a grid (h, w) is sampled, 6 or less; None where too few patches would be fitted.

    >>> step_for((37, 37)), step_for((7, 7)), step_for((4, 4))
    (6, 2, None)
    """
    patches = shape[0] * shape[1]
    step = next((s for s in range(6, 1, -1) if patches // s**2 >= ENOUGH), 2)
    return step if patches // step**2 >= FEWEST and min(shape) > 1 else None


class Probe(Measure):
    """Held-out R² of column and row: mean of four masks of the final features, one of each layer's input."""

    name: ClassVar[str] = "probe"
    family: ClassVar[Family] = "features"
    asks: ClassVar[str] = "Can place be read from the features?"
    number: ClassVar[str] = "held-out R² of column and row, at least -1 per image"
    misleads: ClassVar[str] = (
        "Pictures that change smoothly from side to side give place away too, and random weights often keep it."
    )
    needs: ClassVar[frozenset[Need]] = frozenset({"maps"})
    layered: ClassVar[bool] = True
    controls: ClassVar[tuple[View, ...]] = ("none",)
    beside: ClassVar[tuple[View, ...]] = ("random",)

    def see(self, kept: Kept, seen: Seen) -> None:
        """Probe the input of one layer with one mask."""
        if (step := step_for(seen.grid.shape)) is not None:
            feats = seen.x[0, seen.grid.prefix :].unflatten(0, seen.grid.shape)
            kept.layer(layers=_scores(feats, step, 1, kept.number)[0])

    def end(self, kept: Kept, maps: Tensor) -> None:
        """Probe the final features with four masks."""
        feats = maps.permute(1, 2, 0)
        kept.note(grid=tuple(feats.shape[:2]))
        if (step := step_for(tuple(feats.shape[:2]))) is not None:
            read, shuffled = _scores(feats, step, 4, kept.number)
            kept.note(r2=read, shuffled=shuffled)

    def finish(self, kept: Kept, host: Host) -> Outcome:
        """Return the mean over images of what is read, none of them counted below -1."""
        if "r2" not in kept.records[0]:
            h, w = kept.records[0]["grid"]
            raise UnsupportedHost(
                f"The probe fits one patch in four of two rows or more, at least {FEWEST} of them, but features have "
                f"{h}x{w} patches; use larger images."
            )
        raw = kept.column("r2")
        clipped, shuffled = (np.maximum(v, WORST) for v in (raw, kept.column("shuffled")))
        layers = np.maximum(kept.column("layers"), WORST).mean(0) if "layers" in kept.records[0] else ()
        low = int((raw < WORST).sum())
        note = f"R² of {low} image(s) lay below -1 and counts as -1." if low else ""
        details = {"unclipped": raw.mean()}
        # a probe that always answers with the mean place has 0
        control = {"mean place": 0.0, "shuffled positions": float(shuffled.mean())}
        return Outcome(clipped.mean(), clipped, layers, control, note=note, details=details)


def _scores(feats: Tensor, step: int, masks: int, seed: int) -> tuple[float, float]:
    """Return held-out R² of features (h, w, d), and that of shuffled positions; the same patches for every model."""
    h, w, _ = feats.shape
    trials = Trials((TARGET,), step, masks)
    read, shuffled = trials.scores(feats, trials.draw((h, w), np.random.default_rng(seed)))
    return float(read[0]), float(shuffled[0])
