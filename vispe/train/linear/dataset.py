"""Windows of images and masks for linear segmentation; the batch of a step depends on the seed and the step only."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from vispe.errors import InputError, OptionError, counted
from vispe.images.file_search import find_images
from vispe.images.sequences import FileImages, FileMasks
from vispe.images.symmetry.d4 import D4
from vispe.train.data.dataset import digest

IGNORE = -1
"""Class number of ignored pixels; the classes are 0..K-1."""

_CACHED = 64  # images in memory


class Pairs:
    """Images (3, H, W), normalised, and their masks (H, W) int64, 0..K-1 or `IGNORE`.

    Args:
        images: files, folders or wildcards; every page of a stack is an image.
        masks: masks of the images, matched by name, otherwise by order.
        tensor: converts a page (H, W, c) in [0, 1] to an image (3, H, W).
        zero: whether the value 0 in a mask is the first class, or ignored.
        n_classes: K, or None to infer it from the masks.
        others: further masks with the same classes, see `FileMasks`.

    Raises:
        InputError: a mask is missing, or does not match its image.
    """

    def __init__(
        self,
        images: Sequence[str],
        masks: Sequence[str],
        tensor: Callable[[np.ndarray], Tensor],
        zero: Literal["class", "ignore"] = "class",
        n_classes: int | None = None,
        others: Sequence[str] = (),
    ) -> None:
        paths: list[Path] = find_images(images)
        mask_paths, other_masks = find_images(masks), find_images(others) if others else ()
        self._images = FileImages(paths, tensor)
        self._masks = FileMasks(self._images, mask_paths, zero, n_classes, other_masks)
        self._files = [*paths, *mask_paths]
        self.names = self._images.names
        self.n_classes = int(self._masks.n_classes or 0)
        self.read = lru_cache(_CACHED)(self._read)

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._images)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes of the files that were read so far."""
        return (*self._images.notes, *self._masks.notes)

    def fingerprint(self) -> str:
        """Return a sha256 of names and sizes in bytes of images and masks."""
        return digest("pairs", *((path.name, path.stat().st_size) for path in self._files))

    def check(
        self, size: int | None = None, numbers: Collection[int] = (), other: "Pairs | None" = None
    ) -> None:
        """Read every image and mask once, to find those that cannot be used.

        Args:
            size: side of the windows in pixels.
            numbers: indices of the images from which windows are cropped.
            other: pairs that were checked, whose masks must have the same classes.

        Raises:
            InputError: a mask does not match its image, a value is another class in another mask, or an image is
                smaller than the windows.
        """
        if other is not None:
            self._masks.compare(other._masks)
        for number, (path, _) in enumerate(self._images.pages):
            _ = self._masks[number]
            if size is not None and number in numbers:
                check_window(self.names[number], self._images.shape(path)[1:], size)

    def _read(self, number: int) -> tuple[Tensor, Tensor]:
        mask = torch.from_numpy(self._masks[number].astype(np.int64)) - 1
        return self._images[number], mask


@dataclass(frozen=True, eq=False)
class Part:
    """Subset of the images and masks, such as the training set.

    Attributes:
        pairs: images and masks.
        numbers: indices of the images in the subset.
    """

    pairs: Pairs
    numbers: Sequence[int]

    @property
    def names(self) -> list[str]:
        """Names of the images in the subset."""
        return [self.pairs.names[number] for number in self.numbers]


def batch_at(
    part: Part, step: int, *, batch: int, size: int, poses: bool, seed: int
) -> tuple[Tensor, Tensor]:
    """Return the windows of one training step, (batch, 3, size, size) and (batch, size, size).

    Epochs are random permutations of the images.

    Args:
        part: training images and masks.
        step: index of the step, from 0.
        batch: number of windows.
        size: side of the windows in pixels.
        poses: transform each window to a random pose (rotation by 90 degrees and reflection).
        seed: seed of all random numbers.

    Raises:
        InputError: an image is smaller than the window.
    """
    images, masks = [], []
    for row in range(step * batch, (step + 1) * batch):
        # a new permutation of all images in each epoch
        epoch, within = divmod(row, len(part.numbers))
        order = np.random.default_rng([seed, 0, epoch]).permutation(len(part.numbers))
        number = part.numbers[int(order[within])]
        image, mask = part.pairs.read(number)
        h, w = image.shape[-2:]
        check_window(part.pairs.names[number], (h, w), size)
        # position and pose of the window, equal for image and mask
        rng = np.random.default_rng([seed, 1, row])
        top, left = int(rng.integers(h - size + 1)), int(rng.integers(w - size + 1))
        pose = D4[int(rng.integers(len(D4)))] if poses else D4[0]
        region = (..., slice(top, top + size), slice(left, left + size))
        images.append(pose.apply(image[region]))
        masks.append(pose.apply(mask[region]))
    return torch.stack(images), torch.stack(masks)


def check_window(name: str, shape: tuple[int, int], size: int) -> None:
    """Raise `InputError` if an image of this height and width is smaller than a window of `size` pixels per side."""
    if min(shape) < size:
        raise InputError(
            f"{name}: images must be at least {size} px, the size of the windows, got {shape[0]} x {shape[1]} px. Use "
            "larger images or reduce `img_size`."
        )


def split(count: int, every: int) -> tuple[list[int], list[int]]:
    """Return the indices of the training and the validation images; every `every`-th image is held out.

    >>> split(6, 3)
    ([0, 1, 3, 4], [2, 5])

    Raises:
        OptionError: one of the sets would be empty.
    """
    validation = list(range(every - 1, count, every))
    if every < 2 or not validation:
        raise OptionError(
            f"val_every={every} splits {counted(count, 'image')} into {count - len(validation)} for "
            f"training and {len(validation)} for validation, but both need 1 or more. Set `val_images`, or another "
            "`val_every`."
        )
    return sorted({*range(count)} - {*validation}), validation
