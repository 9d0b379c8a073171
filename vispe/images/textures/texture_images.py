"""Lazy sequence of synthetic micrographs and their exact classes."""

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from vispe.errors import OptionError
from vispe.images.textures import Texture, disc_packing, random_field, voronoi

TEXTURE_SIDE = 320
"""Side of the synthetic images in pixels: 14 patches of 16 pixels, with a margin for rotations."""


class TextureImages(Sequence[Tensor]):
    """Sequence of isotropic synthetic micrographs of two phases: random fields, discs in a matrix, grains, alternating.

    Args:
        count: number of images.
        tensor: converts a page (H, W, 1) in [0, 1] to an image (c, H, W).
        side: side of the images in pixels.
        seed: seed of the textures.

    Attributes:
        names: names of the images.
        masks: lazy sequence of the exact classes (H, W), 1 or 2.
        classes: names of the classes.

    Raises:
        OptionError: `count` is below 1.
    """

    def __init__(
        self, count: int, tensor: Callable[[np.ndarray], Tensor], side: int = TEXTURE_SIDE, seed: int = 0
    ) -> None:
        if count < 1:
            raise OptionError(f"`textures` must be 1 or more, got {count}.")
        self._tensor, self._side = tensor, side
        kinds: tuple[tuple[str, Callable[[int], Texture]], ...] = (
            ("random field", lambda k: random_field(k, wavelength=32.0)),
            ("discs", lambda k: disc_packing(k, radius=14.0)),
            ("grains", lambda k: voronoi(k, grain=40.0)),
        )
        self._textures = [kinds[k % 3][1](seed * 1000 + k) for k in range(count)]
        self.names = tuple(f"texture {k}, {kinds[k % 3][0]}" for k in range(count))
        self.masks = _TextureMasks(self._textures, side)
        self.classes = ("phase 0", "phase 1")

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._textures)

    def __getitem__(self, number: int) -> Tensor:
        """Return one image (c, side, side)."""
        grey = self._textures[number].render(self._side)[0][0]
        return self._tensor(grey.clamp(0, 1).numpy()[..., None])


class _TextureMasks(Sequence[np.ndarray]):
    """Lazy sequence of the classes of textures (H, W), from 1."""

    def __init__(self, made: Sequence[Texture], side: int) -> None:
        self._textures, self._side = made, side

    def __len__(self) -> int:
        return len(self._textures)

    def __getitem__(self, number: int) -> np.ndarray:
        return self._textures[number].render(self._side)[1].numpy() + 1
