"""Input images of an audit: centre crops of image files, noise, and textures, of one size, loaded one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset

from vispe.errors import OptionError
from vispe.evaluate.evaluated import EvaluatedModel
from vispe.images.sequences import FileImages
from vispe.images.textures.texture_images import TextureImages
from vispe.utils.options import NonNegativeInt, Seed, checked

PLAIN = 224  # side in pixels for subjects without an input size


class NoiseImages(Sequence[Tensor]):
    """Sequence of images of uniform noise, generated on access.

    Args:
        n: number of images.
        subject: source of the number of channels and the normalisation.
        side: side of the images in pixels.
        seed: random seed of the sequence.
    """

    def __init__(self, n: int, subject: EvaluatedModel, side: int, seed: int = 0) -> None:
        self.n, self.subject, self.side, self.seed = n, subject, side, seed

    def __len__(self) -> int:
        """Return the number of images."""
        return self.n

    def __getitem__(self, number: int) -> Tensor:
        """Return image number `number`, (c, side, side)."""
        if not 0 <= number < self.n:
            raise IndexError(number)
        page = np.random.default_rng([self.seed, number]).random(
            (self.side, self.side, self.subject.channels)
        )
        return self.subject.tensor(page.astype(np.float32))


@checked
def load_images(
    subject: EvaluatedModel,
    paths: Sequence[Path],
    *,
    noise: NonNegativeInt = 0,
    textures: NonNegativeInt = 0,
    seed: Seed = 0,
) -> tuple[Sequence[Tensor], tuple[str, ...], list[str]]:
    """Return images (c, side, side) for a subject, their names, and remarks that are appended while reading.

    Files are cropped to the centre square and resized (bicubic, antialiased) to the input size of the subject, or 224
    pixels.

    Raises:
        OptionError: there are no images, or a number is negative.
    """
    if not (paths or noise or textures):
        raise OptionError(
            "no images, got empty paths, noise=0 and textures=0. Pass paths, noise or textures."
        )
    side = subject.size or PLAIN

    def square(page: np.ndarray) -> Tensor:
        h, w = page.shape[:2]
        crop = min(h, w)
        top, left = (h - crop) // 2, (w - crop) // 2
        cropped = torch.from_numpy(np.ascontiguousarray(page[top : top + crop, left : left + crop])).float()
        if crop != side:
            cropped = torch.nn.functional.interpolate(
                cropped.permute(2, 0, 1)[None], size=(side, side), mode="bicubic", antialias=True
            )[0].permute(1, 2, 0)
        return subject.tensor(cropped.clamp(0, 1).numpy())

    files = FileImages(paths, square, subject.normalize, subject.clip)
    parts: list[Sequence[Tensor]] = [files, NoiseImages(noise, subject, side, seed)]
    names = (*files.names, *(f"noise {k}" for k in range(noise)))
    if textures:
        generated = TextureImages(textures, subject.tensor, side=side, seed=seed)
        parts, names = [*parts, generated], (*names, *generated.names)
    return ConcatDataset(parts), names, files.notes
