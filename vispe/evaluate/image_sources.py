"""Input images of an evaluation: image files, their masks, and synthetic micrographs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np
from torch import Tensor
from torch.utils.data import ConcatDataset

from vispe.errors import OptionError, counted
from vispe.evaluate.evaluated import EvaluatedModel
from vispe.images.sequences import FileImages, FileMasks
from vispe.images.textures.texture_images import TextureImages
from vispe.utils.options import NonNegativeInt, Seed, checked


@dataclass(frozen=True, eq=False)
class ImageSources:
    """Images with their annotations.

    Attributes:
        images: tensors (c, H, W).
        truths: label maps (H, W) of each image, or None.
        names: names of the images.
        class_names: or None if unknown.
        n_classes: K, or None if unknown.
        notes: remarks, appended while images are read.
    """

    images: Sequence[Tensor]
    truths: Sequence[np.ndarray] | None
    names: tuple[str, ...]
    class_names: tuple[str, ...] | None
    n_classes: int | None
    notes: Iterable[str]


@checked
def load_sources(
    subject: EvaluatedModel,
    paths: Sequence[Path],
    masks: Sequence[Path] = (),
    *,
    zero: Literal["class", "ignore"] = "class",
    names: Sequence[str] | None = None,
    textures: NonNegativeInt = 0,
    seed: Seed = 0,
) -> ImageSources:
    """Collect images, masks and textures for a subject; only headers of stacks, and masks, are read.

    Args:
        subject: the evaluated model.
        paths: image files.
        masks: their masks, matched by name or otherwise by order.
        zero: whether 0 in a mask is the first 'class', or ignored ('ignore').
        names: names of the classes.
        textures: number of additional synthetic images.
        seed: random seed of the synthetic images.

    Raises:
        InputError: masks do not match the images.
        OptionError: the number of class names differs from the segmenter, or a number is negative.
    """
    if names is not None and subject.names is not None and len(names) != len(subject.names):
        raise OptionError(
            f"{subject.title}: `names` must have {counted(len(subject.names), 'entry')} ({', '.join(subject.names)}), "
            f"got {len(names)}. Omit `names`."
        )
    class_names = tuple(names) if names is not None else subject.names
    n_classes = None if class_names is None else len(class_names)
    files = FileImages(paths, subject.tensor, subject.normalize, subject.clip)
    truths = FileMasks(files, masks, zero, n_classes) if masks else None
    remarks: list[str] = []
    notes = chain(files.notes, truths.notes if truths else (), remarks)
    n_classes = n_classes if truths is None else truths.n_classes
    if not textures:
        return ImageSources(files, truths, files.names, class_names, n_classes, notes)
    generated = TextureImages(textures, subject.tensor, seed=seed)
    masks_: Sequence[np.ndarray] | None = None
    if subject.segmenter is not None:
        remarks.append(
            "The masks of the textures were ignored: their phases are not the classes of the segmenter."
        )
    elif paths and truths is None:
        remarks.append("The images have no masks, so those of the textures were ignored as well.")
    else:
        masks_, n_classes = (
            ConcatDataset([*([truths] if paths else []), generated.masks]),
            max(n_classes or 2, 2),
        )
        class_names = class_names or (None if paths else generated.classes)
    names = (*files.names, *generated.names)
    return ImageSources(ConcatDataset([files, generated]), masks_, names, class_names, n_classes, notes)
