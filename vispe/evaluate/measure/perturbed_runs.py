"""Forward passes on perturbed images, cached so that measures share them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from vispe.errors import OptionError, UnsupportedHost

if TYPE_CHECKING:
    from vispe.evaluate.measure.audited_model import AuditedModel

ORIGINAL = "as it is"  # name of the unperturbed image


class CommonStep(NamedTuple):
    """The smallest shift by whole patches of an image and whole cells of its feature map.

    Attributes:
        pixels: shift of the image in pixels.
        cells: shift of the feature map in cells.
        grid: number of steps along height and width.
    """

    pixels: int
    cells: int
    grid: tuple[int, int]


class PerturbedRuns:
    """Features and descriptors of perturbed versions of one image, cached by name.

    Args:
        audited: the model.
        image: (c, H, W), normalised; None for measures that generate their own images.
        number: index of the image, or of the item of a measure.
        seed: seed of the audit; `generator` is seeded by it and by `number`.
    """

    def __init__(self, audited: AuditedModel, image: Tensor | None, number: int, seed: int = 0) -> None:
        self.audited, self.number, self.seed = audited, number, seed
        self._image = image
        self._maps: dict[str, Tensor] = {}
        self._pooled: dict[str, Tensor] = {}

    @property
    def image(self) -> Tensor:
        """The unperturbed image, (c, H, W)."""
        if self._image is None:
            raise OptionError(
                "PerturbedRuns: image is None for measures with items. Generate the images in the measure."
            )
        return self._image

    def generator(self, purpose: int = 0) -> torch.Generator:
        """Return a generator that depends only on the seed, the index of the image and the purpose."""
        return torch.Generator().manual_seed((self.seed * 1009 + self.number) * 101 + purpose)

    def maps(self, name: str = ORIGINAL, perturbed: Tensor | None = None) -> Tensor:
        """Return the final features (d, h, w) float32 of an image (c, H, W), cached by name.

        Args:
            name: name of the perturbation, such as "roll 0,2"; equal names must mean equal images.
            perturbed: the perturbed image; the original by default.
        """
        self._run(name, perturbed)
        return self._maps[name]

    def pooled(self, name: str = ORIGINAL, perturbed: Tensor | None = None) -> Tensor:
        """Return the descriptor (d,) float32 of an image: its class token, or the mean of its patches."""
        self._run(name, perturbed)
        return self._pooled[name]

    def step(self) -> CommonStep:
        """Return the smallest shift that maps patches onto patches, or cells of the feature map if patches are unknown.

        Raises:
            UnsupportedHost: patches or cells of the feature map do not divide the image.
        """
        (high, wide), (h, w) = self.image.shape[-2:], self.maps().shape[-2:]
        side = max(1, high // h)
        pixels = math.lcm(side, self.audited.patch_size or 1)
        if (h * side, w * side) != (high, wide) or high % pixels or wide % pixels:
            raise UnsupportedHost(
                "content can be shifted by whole patches only where patches and cells of the feature map divide the "
                f"image, but one of {high} x {wide} px has {h} x {w} cells and patches of {self.audited.patch_size} "
                "px; crop the image"
            )
        return CommonStep(pixels, pixels // side, (high // pixels, wide // pixels))

    def set_original(self, outputs: tuple[Tensor, Tensor] | None) -> None:
        """Cache features (1, d, h, w) and descriptor (1, d) of the original image from another pass, if available."""
        if outputs is not None:
            self._maps[ORIGINAL], self._pooled[ORIGINAL] = outputs[0][0], outputs[1][0]

    def _run(self, name: str, perturbed: Tensor | None) -> None:
        if name not in self._pooled:
            maps, pooled = self.audited.maps_and_pooled(
                (self.image if perturbed is None else perturbed)[None]
            )
            self._maps[name], self._pooled[name] = maps[0], pooled[0]
