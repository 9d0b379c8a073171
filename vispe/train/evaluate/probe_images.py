"""The pictures of an evaluation: windows of given images, noise and textures, made when they are asked for."""

import copy
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vispe.backbones.model_access import input_settings
from vispe.backbones.vision_model import ModelFeatures
from vispe.errors import OptionError
from vispe.evaluate.rotation.plan import fitted_image
from vispe.images.textures import disc_packing, random_field, voronoi

_ENOUGH = 32  # patches that a fit should see


@dataclass(frozen=True, eq=False)
class Settings:
    """What images a model takes.

    Attributes:
        patch: side of a patch in pixels.
        size: side of the images in pixels.
        mean: (3, 1, 1), taken from images in [0, 1].
        std: (3, 1, 1), by which they are then divided.
    """

    patch: int
    size: int
    mean: Tensor
    std: Tensor

    @classmethod
    def of(cls, model: Any) -> "Settings":
        """Return the settings of a model of timm or open_clip.

        Raises:
            OptionError: a function, of which they are not known.
        """
        model = model.model if isinstance(model, ModelFeatures) else model
        tower = getattr(model, "visual", model)
        patch = ModelFeatures(tower).patch if isinstance(tower, nn.Module) else None
        if patch is None:
            raise OptionError(
                "Patch, size and normalisation are known for models of timm and open_clip only; give settings=."
            )
        return cls(patch, *input_settings(tower))

    def normalized(self, image: Tensor) -> Tensor:
        """Return an image (1 or 3, H, W) in [0, 1] as the model gets it, (3, H, W)."""
        return (image.expand(3, -1, -1) - self.mean) / self.std


def probe_step(patches: int) -> int:
    """Return the step of the probe on a grid of patches x patches: at most 6, with at least 32 patches where it can.

    >>> [probe_step(n) for n in (4, 16, 37)]
    [2, 2, 6]

    Args:
        patches: along one side of the grid.
    """
    return max(2, min(6, int((patches**2 / _ENOUGH) ** 0.5)))


class _Made(Sequence[Tensor]):
    """Pictures that are made by number, of which slices are sequences too."""

    def __init__(self, numbers: range) -> None:
        self._numbers = numbers

    def __len__(self) -> int:
        """Return the number of pictures."""
        return len(self._numbers)

    def __getitem__(self, number: Any) -> Any:
        """Make the picture of a number, or return the pictures of a slice, which are made later."""
        if isinstance(number, int):
            return self._make(self._numbers[number])
        part = copy.copy(self)
        part._numbers = self._numbers[number]
        return part

    @abstractmethod
    def _make(self, number: int) -> Tensor:
        """Make a picture by its number."""


class _Drawn(_Made):
    """Pictures that show no place, (3, side, side) each, normalised.

    Args:
        count: number of pictures.
        side: in pixels.
        settings: of the model.
        seed: of the pictures.
    """

    def __init__(self, count: int, side: int, settings: Settings, seed: int = 0) -> None:
        super().__init__(range(count))
        self._side, self._settings, self._seed = side, settings, seed


class Noise(_Drawn):
    """Uniform noise in [0, 1]."""

    def _make(self, number: int) -> Tensor:
        rng = np.random.default_rng([self._seed, 0, number])
        image = rng.random((3, self._side, self._side), dtype=np.float32)
        return self._settings.normalized(torch.from_numpy(image))


class Textures(_Drawn):
    """Homogeneous isotropic textures: random fields, discs and grains in turn.

    They are asked for often and take a second each, so those that were made are kept.
    """

    def __init__(self, count: int, side: int, settings: Settings, seed: int = 0) -> None:
        super().__init__(count, side, settings, seed)
        self._kept: dict[int, Tensor] = {}

    def _make(self, number: int) -> Tensor:
        if number not in self._kept:
            kind = (random_field, disc_packing, voronoi)[number % 3]
            image, _ = kind(np.random.default_rng([self._seed, 1, number])).render(self._side)
            self._kept[number] = self._settings.normalized(image.clamp(0, 1))
        return self._kept[number]


class Windows(_Made):
    """The middle window of images or label maps, cut to whole patches; nothing is resized.

    Args:
        images: (..., H, W) each, tensors or arrays.
        patch: side of a patch in pixels.
        side: largest side of a window in pixels.

    Attributes:
        notes: what was cut; it grows while images are read.
    """

    def __init__(self, images: Sequence[Any], patch: int, side: int) -> None:
        super().__init__(range(len(images)))
        self._images, self._patch, self._side = images, patch, side
        self.notes: list[str] = []

    def _make(self, number: int) -> Tensor:
        image = torch.as_tensor(self._images[number])
        window, note = fitted_image(image, self._patch, self._side)
        if note:
            self.notes.append(f"Images of {image.shape[-2]} x {image.shape[-1]} px: {note}")
        return window
