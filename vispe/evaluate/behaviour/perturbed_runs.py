"""The model again on changed pictures, each of them run once however many measures ask for it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from vispe.errors import OptionError, UnsupportedHost

if TYPE_CHECKING:
    from vispe.evaluate.audit.audited_model import Host

AS_IT_IS = "as it is"  # the image without a change


class Step(NamedTuple):
    """The least move by whole patches of an image and whole cells of its map.

    Attributes:
        pixels: of the image.
        cells: of the map.
        grid: steps down and across the image.
    """

    pixels: int
    cells: int
    grid: tuple[int, int]


class Reruns:
    """What a model makes of changed versions of one image; kept by name until the image is over.

    Args:
        host: the model.
        image: (c, H, W), normalised; None for measures that bring their own pictures.
        number: of the image, or of the picture that a measure brings.
        seed: of the audit; `generator` follows from it and from `number`.
    """

    def __init__(self, host: Host, image: Tensor | None, number: int, seed: int = 0) -> None:
        self.host, self.number, self.seed = host, number, seed
        self._image = image
        self._maps: dict[str, Tensor] = {}
        self._pooled: dict[str, Tensor] = {}

    @property
    def image(self) -> Tensor:
        """The image as it is, (c, H, W)."""
        if self._image is None:
            raise OptionError("This measure brings its own pictures; there is no image to change.")
        return self._image

    def generator(self, purpose: int = 0) -> torch.Generator:
        """Return a generator that depends on the seed, on the number of the image and on the purpose alone."""
        return torch.Generator().manual_seed((self.seed * 1009 + self.number) * 101 + purpose)

    def maps(self, name: str = AS_IT_IS, picture: Tensor | None = None) -> Tensor:
        """Return the final features (d, h, w) float32 of a picture (c, H, W), kept under a name.

        Args:
            name: what was done to the image, such as "turn 1" or "shift 0,2": the same name, the same picture.
            picture: the changed image; the image itself by default.
        """
        self._run(name, picture)
        return self._maps[name]

    def pooled(self, name: str = AS_IT_IS, picture: Tensor | None = None) -> Tensor:
        """Return the descriptor (d,) float32 of a picture: its class token, or the mean of its patches."""
        self._run(name, picture)
        return self._pooled[name]

    def step(self) -> Step:
        """Return the least move that brings patches onto patches; of cells of the map where patches are not known.

        Raises:
            UnsupportedHost: patches or cells of the map do not divide the image.
        """
        (high, wide), (h, w) = self.image.shape[-2:], self.maps().shape[-2:]
        side = max(1, high // h)
        pixels = math.lcm(side, self.host.patch or 1)
        if (h * side, w * side) != (high, wide) or high % pixels or wide % pixels:
            raise UnsupportedHost(
                f"content can be moved by whole patches only where patches and cells of the map divide the image, but "
                f"one of {high} x {wide} px has a map of {h} x {w} cells and patches of {self.host.patch} px; crop it"
            )
        return Step(pixels, pixels // side, (high // pixels, wide // pixels))

    def know(self, found: tuple[Tensor, Tensor] | None) -> None:
        """Take features (1, d, h, w) and descriptor (1, d) of the image as it is from another pass, if it has them."""
        if found is not None:
            self._maps[AS_IT_IS], self._pooled[AS_IT_IS] = found[0][0], found[1][0]

    def _run(self, name: str, picture: Tensor | None) -> None:
        if name not in self._pooled:
            maps, pooled = self.host.both((self.image if picture is None else picture)[None])
            self._maps[name], self._pooled[name] = maps[0], pooled[0]
