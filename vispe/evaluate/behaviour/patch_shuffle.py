"""Patch shuffling: change of features when blocks of patches are permuted, after undoing the permutation.

Follows "Intriguing Properties of Vision Transformers" (shuffled patches) and "Shaking Syntactic Trees on the Sesame
Street: Multilingual Probing with Controllable Perturbations" (word order perturbed at several granularities).
"""

from __future__ import annotations

import numpy as np
import torch

from vispe.evaluate.behaviour.rolls import raise_if_refused, shuffled, step_or_refusal
from vispe.evaluate.measure.audited_model import AuditedModel
from vispe.evaluate.measure.base import Accumulator, Measure, Outcome
from vispe.evaluate.measure.perturbed_runs import PerturbedRuns
from vispe.evaluate.rotation.feature_similarity import cosine

BLOCKS = (1, 2, 4, 8)


class PatchShuffle(Measure):
    """Change of features when blocks of g x g patches are shuffled: one forward pass per g, at most four.

    Follows "Intriguing Properties of Vision Transformers" and "Shaking Syntactic Trees on the Sesame Street".
    """

    name = "shuffle"
    family = "behaviour"
    question = "Do features depend on the arrangement of the patches?"
    number = "1 - cosine when single patches are shuffled; 0 for a bag of patches"
    misleads = "Shuffling destroys objects too, so a model that uses the layout of a scene is expected to score high."
    papers = (
        "Intriguing Properties of Vision Transformers",
        (
            "Shaking Syntactic Trees on the Sesame Street: Multilingual Probing with Controllable "
            "Perturbations"
        ),
    )
    needs = frozenset({"maps"})
    default = False

    def rerun(self, acc: Accumulator, runs: PerturbedRuns) -> None:
        """Shuffle blocks of the image, for block sizes with at least two blocks per side."""
        step = step_or_refusal(acc, runs)
        if step is None:
            return
        first = runs.maps()
        h, w = first.shape[-2:]
        for g in (g for g in BLOCKS if 2 * g <= min(step.grid)):
            image = shuffled(runs.image, g * step.pixels, runs.generator(g))
            moved = runs.maps(f"shuffle {g}", image).flatten(1)
            # shuffling the indices of cells with the same generator gives the permutation to undo
            cells = torch.arange(h * w).reshape(1, h, w)
            order = shuffled(cells, g * step.cells, runs.generator(g)).flatten()
            back = torch.empty_like(moved)
            back[:, order] = moved
            acc.layer(distances=cosine(first, back.reshape(first.shape)))

    def summarize(self, acc: Accumulator, audited: AuditedModel) -> Outcome:
        """Return the mean over images for single patches; the details have the curve over block sizes."""
        raise_if_refused(acc)
        curve = np.nan_to_num(acc.column("distances"))
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
