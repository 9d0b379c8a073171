"""What a subject looks at: image files, their masks, synthetic micrographs, or all of them one after another."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from torch import Tensor

from vispe.errors import OptionError
from vispe.evaluate.evaluated import Subject
from vispe.images.sequences import FileImages, FileMasks, TextureImages


class Joined(Sequence):
    """One sequence after another, without reading them.

    >>> Joined("ab", [1, 2])[2]
    1
    """

    def __init__(self, *parts: Sequence) -> None:
        self._parts = parts

    def __len__(self) -> int:
        """Return the number of all items."""
        return sum(map(len, self._parts))

    def __getitem__(self, number: int):
        """Return one item."""
        for part in self._parts:
            if number < len(part):
                return part[number]
            number -= len(part)
        raise IndexError(number)


@dataclass(frozen=True, eq=False)
class Sources:
    """Images, and what is known about them.

    Attributes:
        images: tensors (c, H, W).
        truths: labels (H, W) of each image, or None.
        names: of the images.
        class_names: or None where they have no names.
        n_classes: K, or None where it is not known.
        notes: what was noticed; it grows while images are read.
    """

    images: Sequence[Tensor]
    truths: Sequence[np.ndarray] | None
    names: tuple[str, ...]
    class_names: tuple[str, ...] | None
    n_classes: int | None
    notes: Iterable[str]


def load_sources(
    subject: Subject,
    paths: Sequence[Path],
    masks: Sequence[Path] = (),
    *,
    zero: str = "class",
    names: Sequence[str] | None = None,
    textures: int = 0,
    seed: int = 0,
) -> Sources:
    """Find the images, masks and textures for a subject; nothing but stacks and masks is read yet.

    Args:
        subject: what is measured.
        paths: image files.
        masks: their masks, matched by name or else by order.
        zero: whether 0 in a mask is the first 'class', or is left out ('ignore').
        names: of the classes.
        textures: number of synthetic images beside them.
        seed: of these.

    Raises:
        InputError: masks that do not fit.
        OptionError: class names that are not those of the segmenter.
    """
    if names is not None and subject.names is not None and len(names) != len(subject.names):
        raise OptionError(
            f"{len(names)} class names were given, but {subject.title} knows {len(subject.names)} classes "
            f"({', '.join(subject.names)}); leave --classes out."
        )
    class_names = tuple(names) if names is not None else subject.names
    n_classes = None if class_names is None else len(class_names)
    files = FileImages(paths, subject.tensor, subject.normalize, subject.clip)
    truths = FileMasks(files, masks, zero, n_classes) if masks else None
    remarks: list[str] = []
    notes = chain(files.notes, truths.notes if truths else (), remarks)
    n_classes = n_classes if truths is None else truths.n_classes
    if not textures:
        return Sources(files, truths, files.names, class_names, n_classes, notes)
    made = TextureImages(textures, subject.tensor, seed=seed)
    known: Sequence[np.ndarray] | None = None
    if subject.segmenter is not None:
        remarks.append(
            "The masks of the textures were not used: their phases are not the classes of the segmenter."
        )
    elif paths and truths is None:
        remarks.append("The images have no masks, so those of the textures were not used either.")
    else:
        known, n_classes = Joined(*([truths] if paths else []), made.masks), max(n_classes or 2, 2)
        class_names = class_names or (None if paths else made.classes)
    names = (*files.names, *made.names)
    return Sources(Joined(files, made), known, names, class_names, n_classes, notes)
