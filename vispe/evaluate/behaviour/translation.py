"""Shift equivariance: change of features when an image is rolled by whole patches.

Our image form of position-shift tests for language models, which move the same content to other positions. A roll by
whole patches permutes the patches, so only positions differ: a transformer without an encoding gives exactly the same
features. A roll adds a seam where opposite sides of the image meet; patches near the seam and near the border, whose
neighbours change, are excluded from the headline.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vispe.evaluate.behaviour.rolls import Offset, raise_if_refused, rolled, rolls, step_or_refusal
from vispe.evaluate.measure.audited_model import AuditedModel
from vispe.evaluate.measure.base import Accumulator, Measure, Outcome
from vispe.evaluate.measure.perturbed_runs import PerturbedRuns
from vispe.evaluate.rotation.feature_similarity import cosine, cosine_centred


def inside_margin(grid: Offset, offset: Offset, margin: int) -> Tensor:
    """Return a mask (h, w) of patches at least `margin` from the border, before and after a roll.

    >>> inside_margin((1, 6), (0, 2), 0).sum(), inside_margin((6, 6), (0, 2), 1)[2].int().tolist()
    (tensor(6), [0, 1, 1, 0, 0, 0])
    """
    inner = [(torch.arange(n) >= margin) & (torch.arange(n) < n - margin) for n in grid]
    rows, cols = (one & one.roll(-o) for one, o in zip(inner, offset, strict=True))
    return rows[:, None] & cols[None, :]


class TranslationChange(Measure):
    """Largest change of features over three rolls: three forward passes in addition to the original image.

    Our image form of position-shift tests for language models: the same content at other positions. `papers` is empty
    because the measure is vispe's own.
    """

    name = "shift"
    family = "behaviour"
    order = 0
    limit = 0.05
    question = "Do features change when the same content is shifted?"
    number = "largest 1 - cosine over three rolls by whole patches, away from the seam"
    misleads = (
        "A roll joins opposite sides of an image, so a model with relative positions changes slightly without any "
        "bias; homogeneous images have a negligible seam."
    )
    papers = ()
    needs = frozenset({"maps"})

    def rerun(self, acc: Accumulator, runs: PerturbedRuns) -> None:
        """Roll the image by about one, two and three quarters of its height and width."""
        step = step_or_refusal(acc, runs)
        if step is None:
            return
        first, margin = runs.maps(), min(2, min(step.grid) // 8)
        offsets = [offset for offset in rolls(runs.number, step) if any(offset)]
        values = []
        for offset in offsets:
            moved = runs.maps(*rolled(runs.image, step, offset))
            back = moved.roll([-o * step.cells for o in offset], (-2, -1))
            valid = inside_margin(step.grid, offset, margin)
            valid = valid.repeat_interleave(step.cells, 0).repeat_interleave(step.cells, 1)
            values.append(
                (cosine(first, back, valid), cosine(first, back), cosine_centred(first, back, valid))
            )
        inner, everywhere, centred = np.nan_to_num(np.array(values)).T
        acc.note(
            offsets=offsets,
            distances=inner,
            worst=inner.max(),
            everywhere=everywhere.max(),
            centred=centred.max(),
        )

    def summarize(self, acc: Accumulator, audited: AuditedModel) -> Outcome:
        """Return the mean over images of the largest change."""
        raise_if_refused(acc)
        worst = acc.column("worst")
        details = {
            "mean over rolls": acc.column("distances").mean(),
            "with the seam": acc.column("everywhere").mean(),
            "without the mean feature": acc.column("centred").mean(),
        }
        note = (
            ""
            if audited.patch_size
            else "The patch size is unknown, so shifts may be by fractions of a patch."
        )
        return Outcome(
            float(worst.mean()), worst.tolist(), control={"no encoding": 0.0}, note=note, details=details
        )
