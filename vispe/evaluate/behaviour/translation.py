"""Do features change when the same patches stand at another place?

An image is rolled around by whole patches, so that the model gets the same set of patches and places alone differ: a
transformer without an encoding gives the same features exactly. What a roll adds is a seam where the image's sides
meet; patches next to the seam and to the frame, whose neighbours change, are left out of the headline.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from vispe.evaluate.audit.audited_model import Host
from vispe.evaluate.audit.measure import Family, Kept, Measure, Need, Outcome
from vispe.evaluate.behaviour.perturbed_runs import Reruns
from vispe.evaluate.behaviour.rolls import Offset, refuse, rolled, rolls, step_or_note
from vispe.evaluate.rotation.comparison import cosine, cosine_centred


def away(grid: Offset, offset: Offset, margin: int) -> Tensor:
    """Return the patches (h, w) that are `margin` or more from the frame, before and after a roll.

    >>> away((1, 6), (0, 2), 0).sum(), away((6, 6), (0, 2), 1)[2].int().tolist()
    (tensor(6), [0, 1, 1, 0, 0, 0])
    """
    inner = [(torch.arange(n) >= margin) & (torch.arange(n) < n - margin) for n in grid]
    rows, cols = (one & one.roll(-o) for one, o in zip(inner, offset, strict=True))
    return rows[:, None] & cols[None, :]


class Shift(Measure):
    """Worst change of features over three rolls: three passes beside that of the image as it is."""

    name: ClassVar[str] = "shift"
    family: ClassVar[Family] = "behaviour"
    asks: ClassVar[str] = "Do features change when the same content stands elsewhere?"
    number: ClassVar[str] = "worst 1 - cosine over three rolls by whole patches, away from the seam"
    misleads: ClassVar[str] = (
        "A roll brings opposite sides of a picture together, so a model that looks at surroundings through relative "
        "places changes a little without any bias; homogeneous pictures have no seam to speak of."
    )
    needs: ClassVar[frozenset[Need]] = frozenset({"maps"})

    def ask(self, kept: Kept, reruns: Reruns) -> None:
        """Roll the image by about one, two and three quarters of its sides."""
        step = step_or_note(kept, reruns)
        if step is None:
            return
        first, margin = reruns.maps(), min(2, min(step.grid) // 8)
        offsets = [offset for offset in rolls(reruns.number, step) if any(offset)]
        values = []
        for offset in offsets:
            moved = reruns.maps(*rolled(reruns.image, step, offset))
            back = moved.roll([-o * step.cells for o in offset], (-2, -1))
            valid = away(step.grid, offset, margin)
            valid = valid.repeat_interleave(step.cells, 0).repeat_interleave(step.cells, 1)
            values.append(
                (cosine(first, back, valid), cosine(first, back), cosine_centred(first, back, valid))
            )
        inner, everywhere, centred = np.nan_to_num(np.array(values)).T
        kept.note(
            offsets=offsets,
            distances=inner,
            worst=inner.max(),
            everywhere=everywhere.max(),
            centred=centred.max(),
        )

    def finish(self, kept: Kept, host: Host) -> Outcome:
        """Return the mean over images of the worst roll."""
        refuse(kept)
        worst = kept.column("worst")
        details = {
            "mean over rolls": kept.column("distances").mean(),
            "with the seam": kept.column("everywhere").mean(),
            "without the mean feature": kept.column("centred").mean(),
        }
        note = (
            "" if host.patch else "The side of its patches is not known: shifts may be by parts of a patch."
        )
        return Outcome(
            float(worst.mean()), worst.tolist(), control={"no encoding": 0.0}, note=note, details=details
        )
