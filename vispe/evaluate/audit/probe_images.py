"""What an audit looks at: squares of image files, noise, and textures, all of one size, read one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vispe.errors import OptionError
from vispe.evaluate.evaluated import Subject
from vispe.evaluate.image_sources import Joined
from vispe.images.sequences import FileImages, TextureImages

PLAIN = 224  # side in pixels for subjects that name none


class Made(Sequence[Tensor]):
    """Images of uniform noise, each made when it is asked for.

    Args:
        n: how many.
        subject: whose channels and normalisation they get.
        side: in pixels.
        seed: of all of them.
    """

    def __init__(self, n: int, subject: Subject, side: int, seed: int = 0) -> None:
        self.n, self.subject, self.side, self.seed = n, subject, side, seed

    def __len__(self) -> int:
        """Return the number of images."""
        return self.n

    def __getitem__(self, number: int) -> Tensor:
        """Return one image (c, side, side)."""
        if not 0 <= number < self.n:
            raise IndexError(number)
        page = np.random.default_rng([self.seed, number]).random(
            (self.side, self.side, self.subject.channels)
        )
        return self.subject.tensor(page.astype(np.float32))


def pictures_of(
    subject: Subject, paths: Sequence[Path], *, noise: int = 0, textures: int = 0, seed: int = 0
) -> tuple[Sequence[Tensor], tuple[str, ...], list[str]]:
    """Return images (c, side, side) as a subject wants them, their names, and remarks that grow while they are read.

    Files are cropped to the centre square and resized (bicubic, antialiased) to the side for which the subject was
    built, or 224 px.

    Raises:
        OptionError: there is nothing to look at.
    """
    if not paths and noise < 1 and textures < 1:
        raise OptionError("audit needs something to look at: give images, --noise N or --textures N.")
    side = subject.size or PLAIN

    def square(page: np.ndarray) -> Tensor:
        h, w = page.shape[:2]
        crop = min(h, w)
        top, left = (h - crop) // 2, (w - crop) // 2
        cut = torch.from_numpy(np.ascontiguousarray(page[top : top + crop, left : left + crop])).float()
        if crop != side:
            cut = torch.nn.functional.interpolate(
                cut.permute(2, 0, 1)[None], size=(side, side), mode="bicubic", antialias=True
            )[0].permute(1, 2, 0)
        return subject.tensor(cut.clamp(0, 1).numpy())

    files = FileImages(paths, square, subject.normalize, subject.clip)
    parts: list[Sequence[Tensor]] = [files, Made(noise, subject, side, seed)]
    names = (*files.names, *(f"noise {k}" for k in range(noise)))
    if textures:
        made = TextureImages(textures, subject.tensor, side=side, seed=seed)
        parts, names = [*parts, made], (*names, *made.names)
    return Joined(*parts), names, files.notes
