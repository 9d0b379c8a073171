"""Windows of images and masks for linear segmentation: what step s sees depends on the seed and on s alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vispe.errors import InputError, OptionError
from vispe.images.file_search import find_images
from vispe.images.sequences import FileImages, FileMasks
from vispe.symmetry.d4 import D4

IGNORE = -1
"""Class number of pixels that do not count; the others are 0..K-1."""

_KEPT = 64  # images that are kept in memory after they were read


class Pairs:
    """Images (3, H, W), normalised, and their masks (H, W) int64, 0..K-1 or `IGNORE`.

    Args:
        images: files, folders or wildcards; every page of a stack is an image.
        masks: their masks, matched by name or else by order.
        tensor: page (H, W, c) in [0, 1] -> image (3, H, W).
        zero: whether the value 0 in a mask is the first class, or does not count.
        n_classes: K where it is known.

    Raises:
        InputError: a mask is missing, or does not fit its image.
    """

    def __init__(
        self,
        images: Sequence[str],
        masks: Sequence[str],
        tensor: Callable[[np.ndarray], Tensor],
        zero: str = "class",
        n_classes: int | None = None,
    ) -> None:
        paths: list[Path] = find_images(images)
        self._images = FileImages(paths, tensor)
        self._masks = FileMasks(self._images, find_images(masks), zero, n_classes)
        self.names = self._images.names
        self.n_classes = int(self._masks.n_classes or 0)
        self.read = lru_cache(_KEPT)(self._read)

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._images)

    @property
    def notes(self) -> tuple[str, ...]:
        """What was noticed so far."""
        return (*self._images.notes, *self._masks.notes)

    def _read(self, number: int) -> tuple[Tensor, Tensor]:
        mask = torch.from_numpy(self._masks[number].astype(np.int64)) - 1
        return self._images[number], mask


@dataclass(frozen=True, eq=False)
class Part:
    """Some of the images and masks, such as those to learn from.

    Attributes:
        pairs: images and masks.
        numbers: of the images that are used.
    """

    pairs: Pairs
    numbers: Sequence[int]

    @property
    def names(self) -> list[str]:
        """Names of the images that are used."""
        return [self.pairs.names[number] for number in self.numbers]


def batch_at(
    part: Part, step: int, *, batch: int, size: int, poses: bool, seed: int
) -> tuple[Tensor, Tensor]:
    """Return the windows of one update, (batch, 3, size, size) and (batch, size, size).

    Every image is seen once before any is seen again, in an order that is drawn anew each time.

    Args:
        part: images and masks to learn from.
        step: number of the update, from 0.
        batch: windows.
        size: their side in pixels.
        poses: put each window into one of the eight poses of a square, at random.
        seed: of everything drawn.

    Raises:
        InputError: an image is smaller than the window.
    """
    images, masks = [], []
    for place in range(step * batch, (step + 1) * batch):
        # a new permutation of all images in each turn
        turn, within = divmod(place, len(part.numbers))
        order = np.random.default_rng([seed, 0, turn]).permutation(len(part.numbers))
        number = part.numbers[int(order[within])]
        image, mask = part.pairs.read(number)
        h, w = image.shape[-2:]
        if min(h, w) < size:
            raise InputError(
                f"{part.pairs.names[number]} has {h} x {w} px, less than windows of {size} px; give larger images or a "
                "smaller size."
            )
        # where the window lies and how it is turned, the same for image and mask
        rng = np.random.default_rng([seed, 1, place])
        top, left = int(rng.integers(h - size + 1)), int(rng.integers(w - size + 1))
        pose = D4[int(rng.integers(len(D4)))] if poses else D4[0]
        where = (..., slice(top, top + size), slice(left, left + size))
        images.append(pose.apply(image[where]))
        masks.append(pose.apply(mask[where]))
    return torch.stack(images), torch.stack(masks)


def split(count: int, every: int) -> tuple[list[int], list[int]]:
    """Return the numbers of the images to learn from and of those held out: every `every`-th, the last of each run.

    >>> split(6, 3)
    ([0, 1, 3, 4], [2, 5])

    Raises:
        OptionError: nothing would be held out, or nothing left.
    """
    held = list(range(every - 1, count, every))
    if every < 2 or not held:
        raise OptionError(
            f"Of {count} images every {every}-th would be held out, which leaves {len(held)} to score and "
            f"{count - len(held)} to learn from; give val_images, or another val_every."
        )
    return sorted({*range(count)} - {*held}), held
