"""Do features turn with the image? The errors of `vispe rotate`, for three of its poses.

Where tokens can be moved after the patch embedding, the error of the encoding alone is the headline: patch kernels
have a direction as well, and theirs is no matter of places.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch

from vispe.backbones.model_access import patch_projection
from vispe.backbones.vision_model import VisionModel
from vispe.evaluate.audit.audited_model import Host
from vispe.evaluate.audit.measure import Family, Kept, Measure, Need, Outcome
from vispe.evaluate.behaviour.perturbed_runs import Reruns
from vispe.evaluate.rotation.comparison import error
from vispe.symmetry.d4 import element

POSES = ("rot90", "rot180", "hflip")
LEVEL = ("rot180", "hflip")  # of images that are not square, whose quarter turns have another size


class Turn(Measure):
    """Equivariance error of features: three passes, and three more where the encoding can be moved alone."""

    name: ClassVar[str] = "turn"
    family: ClassVar[Family] = "behaviour"
    asks: ClassVar[str] = "Do features change when the image is turned or mirrored?"
    number: ClassVar[str] = "error over two turns and a mirror image, of the encoding alone where it is known"
    misleads: ClassVar[str] = (
        "Pictures with an upright, such as photographs, are no longer what the model knows when they are turned; the "
        "number then holds what it learnt of the world as well."
    )
    needs: ClassVar[frozenset[Need]] = frozenset({"maps"})

    def ask(self, kept: Kept, reruns: Reruns) -> None:
        """Turn the image, and its tokens, and bring the features back."""
        f, image, first = reruns.host.f, reruns.image, reruns.maps()
        apart = f if isinstance(f, VisionModel) and patch_projection(f.model) is not None else None
        poses = POSES if image.shape[-1] == image.shape[-2] else LEVEL
        for g in map(element, poses):
            kept.layer(everything=error(first, g.undo(reruns.maps(g.name, g.apply(image)))))
            if apart is not None:
                with torch.no_grad():
                    moved = apart.permuted(image[None], g)[0].float().cpu()
                kept.layer(encoding=error(first, g.undo(moved)))
        kept.note(poses=poses)

    def finish(self, kept: Kept, host: Host) -> Outcome:
        """Return the mean over images and poses."""
        apart = "encoding" in kept.records[0]
        whole = kept.column("everything")
        # features that do not vary over places have no error
        known = np.isfinite(whole).all(1)
        whole, headline = whole[known], kept.column("encoding" if apart else "everything")[known]
        notes = [] if apart else ["The part of the encoding is not known; patch kernels count as well."]
        if not known.all():
            notes.append(f"{(~known).sum()} image(s) have the same features everywhere: left out.")
        if not known.any():
            return Outcome(float("nan"), control={"floor": 0.0}, note=" ".join(notes))
        details = {"everything": whole.mean()} | dict(
            zip(kept.records[0]["poses"], headline.mean(0), strict=True)
        )
        per_image = headline.mean(1)
        return Outcome(
            per_image.mean(), per_image, control={"floor": 0.0}, note=" ".join(notes), details=details
        )
