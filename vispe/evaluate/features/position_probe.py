"""Linear probe of position in features, the audit's view of `vispe probe`: every layer and the final features.

Follows the linear probe of dino-saw ("What DINO saw: ALiBi positional encoding reduces positional bias", arXiv
2603.16840).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from vispe.errors import UnsupportedHost, counted
from vispe.evaluate.measure.audited_model import AuditedModel
from vispe.evaluate.measure.base import Accumulator, Measure, Outcome
from vispe.evaluate.probe.splits import Trials

if TYPE_CHECKING:
    from vispe.backbones.attention_recorder import LayerAttention

TARGET = "lr+ud"
WORST = -1.0  # lower bound of R²: smaller values carry no more information
ENOUGH, FEWEST = 12, 9  # preferred and minimum number of training patches


def step_for(shape: tuple[int, int]) -> int | None:
    """Return the sampling step of a grid (h, w), at most 6; None if too few training patches would remain.

    >>> step_for((37, 37)), step_for((7, 7)), step_for((4, 4))
    (6, 2, None)
    """
    patches = shape[0] * shape[1]
    step = next((s for s in range(6, 1, -1) if patches // s**2 >= ENOUGH), 2)
    return step if patches // step**2 >= FEWEST and min(shape) > 1 else None


class PositionProbe(Measure):
    """Held-out R² of column and row: four sampling masks for the final features, one for the input of each layer.

    Follows the linear probe of dino-saw ("What DINO saw", arXiv 2603.16840).
    """

    name = "probe"
    family = "features"
    order = 0
    limit = 0.1
    question = "Can the position be decoded from the features?"
    number = "held-out R² of column and row, clipped at -1 per image"
    misleads = (
        "Smooth gradients across an image reveal the position too, and random weights often preserve it."
    )
    papers = (
        (
            "What DINO saw: ALiBi positional encoding reduces positional bias, "
            "https://arxiv.org/abs/2603.16840"
        ),
    )
    needs = frozenset({"maps"})
    layered = True
    controls = ("none",)
    reported_controls = ("random",)

    def on_layer(self, acc: Accumulator, captured: LayerAttention) -> None:
        """Probe the input of one layer with one sampling mask."""
        if (step := step_for(captured.grid.shape)) is not None:
            feats = captured.x[0, captured.grid.prefix :].unflatten(0, captured.grid.shape)
            acc.layer(layers=_scores(feats, step, 1, acc.number)[0])

    def on_features(self, acc: Accumulator, maps: Tensor) -> None:
        """Probe the final features with four sampling masks."""
        feats = maps.permute(1, 2, 0)
        acc.note(grid=tuple(feats.shape[:2]))
        if (step := step_for(tuple(feats.shape[:2]))) is not None:
            r2, shuffled = _scores(feats, step, 4, acc.number)
            acc.note(r2=r2, shuffled=shuffled)

    def summarize(self, acc: Accumulator, audited: AuditedModel) -> Outcome:
        """Return the mean R² over images, each clipped at -1."""
        if "r2" not in acc.records[0]:
            h, w = acc.records[0]["grid"]
            raise UnsupportedHost(
                f"The probe needs at least {FEWEST} training patches, a quarter of the grid, but features have {h}x{w} "
                "patches; use larger images."
            )
        raw = acc.column("r2")
        clipped, shuffled = (np.maximum(v, WORST) for v in (raw, acc.column("shuffled")))
        layers = np.maximum(acc.column("layers"), WORST).mean(0) if "layers" in acc.records[0] else ()
        low = int((raw < WORST).sum())
        note = f"R² of {counted(low, 'image')} was below -1 and was clipped." if low else ""
        details = {"unclipped": raw.mean()}
        # predicting the mean position gives R² = 0
        control = {"mean position": 0.0, "shuffled positions": float(shuffled.mean())}
        return Outcome(clipped.mean(), clipped, layers, control, note=note, details=details)


def _scores(feats: Tensor, step: int, masks: int, seed: int) -> tuple[float, float]:
    """Return held-out R² of features (h, w, d), and of shuffled positions; the same patches for every model."""
    h, w, _ = feats.shape
    trials = Trials((TARGET,), step, masks)
    r2, shuffled = trials.scores(feats, trials.draw((h, w), np.random.default_rng(seed)))
    return float(r2[0]), float(shuffled[0])
