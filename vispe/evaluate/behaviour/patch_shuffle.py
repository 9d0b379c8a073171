"""Is a model a bag of patches? Features of an image whose blocks of patches stand in random order, brought back."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch

from vispe.evaluate.audit.audited_model import Host
from vispe.evaluate.audit.measure import Family, Kept, Measure, Need, Outcome
from vispe.evaluate.behaviour.perturbed_runs import Reruns
from vispe.evaluate.behaviour.rolls import refuse, shuffled, step_or_note
from vispe.evaluate.rotation.comparison import cosine

BLOCKS = (1, 2, 4, 8)


class Shuffle(Measure):
    """Change of features when blocks of g x g patches are shuffled: a pass for each g, at most four."""

    name: ClassVar[str] = "shuffle"
    family: ClassVar[Family] = "behaviour"
    asks: ClassVar[str] = "Do features depend on how the patches are arranged?"
    number: ClassVar[str] = "1 - cosine when single patches are shuffled; 0 for a bag of patches"
    misleads: ClassVar[str] = (
        "Shuffling destroys objects as well, so a model that uses the layout of a scene rightly scores high."
    )
    needs: ClassVar[frozenset[Need]] = frozenset({"maps"})
    default: ClassVar[bool] = False

    def ask(self, kept: Kept, reruns: Reruns) -> None:
        """Shuffle the image in blocks, as long as there are two a side."""
        step = step_or_note(kept, reruns)
        if step is None:
            return
        first = reruns.maps()
        h, w = first.shape[-2:]
        for g in (g for g in BLOCKS if 2 * g <= min(step.grid)):
            picture = shuffled(reruns.image, g * step.pixels, reruns.generator(g))
            moved = reruns.maps(f"shuffle {g}", picture).flatten(1)
            # the same draw moves the numbers of cells, which says where each went
            cells = torch.arange(h * w).reshape(1, h, w)
            order = shuffled(cells, g * step.cells, reruns.generator(g)).flatten()
            back = torch.empty_like(moved)
            back[:, order] = moved
            kept.layer(distances=cosine(first, back.reshape(first.shape)))

    def finish(self, kept: Kept, host: Host) -> Outcome:
        """Return the mean over images for single patches, and the curve over blocks."""
        refuse(kept)
        curve = np.nan_to_num(kept.column("distances"))
        cosines = {
            f"blocks of {g}": float(1 - curve[:, k].mean()) for k, g in enumerate(BLOCKS[: curve.shape[1]])
        }
        singles = curve[:, 0]
        return Outcome(
            float(singles.mean()),
            singles.tolist(),
            control={"bag of patches": 0.0},
            details={"cosine": cosines},
        )
