"""Probe images of an evaluation: windows of images, noise and textures, as lazy sequences."""

import copy
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vispe.backbones.model_access import input_settings
from vispe.backbones.vision_model import VisionModel
from vispe.errors import OptionError
from vispe.evaluate.rotation.plan import center_crop
from vispe.images.textures import disc_packing, random_field, voronoi

_ENOUGH = 32  # patches required for a fit


@dataclass(frozen=True, eq=False)
class Settings:
    """Input settings of a model.

    Attributes:
        patch_size: patch size in pixels.
        size: side of the images in pixels.
        mean: (3, 1, 1), subtracted from images in [0, 1].
        std: (3, 1, 1), by which images are divided.
    """

    patch_size: int
    size: int
    mean: Tensor
    std: Tensor

    @classmethod
    def of(cls, model: Any) -> "Settings":
        """Return the settings of a model of timm or open_clip.

        Raises:
            OptionError: `model` is a function, whose settings are unknown.
        """
        model = model.model if isinstance(model, VisionModel) else model
        tower = getattr(model, "visual", model)
        patch_size = VisionModel(tower).patch_size if isinstance(tower, nn.Module) else None
        if patch_size is None:
            raise OptionError(
                f"patch, size and normalisation of a {type(model).__name__} are unknown. Set `settings`."
            )
        return cls(patch_size, *input_settings(tower))

    def normalized(self, image: Tensor) -> Tensor:
        """Return an image (1 or 3, H, W) in [0, 1] as the normalised input of the model, (3, H, W)."""
        return (image.expand(3, -1, -1) - self.mean) / self.std


def probe_step(patches: int) -> int:
    """Return the step of the probe on a square grid: at most 6, and small enough for 32 fitted patches if possible.

    >>> [probe_step(n) for n in (4, 16, 37)]
    [2, 2, 6]

    Args:
        patches: number of patches along one side of the grid.
    """
    return max(2, min(6, int((patches**2 / _ENOUGH) ** 0.5)))


class _Lazy(Sequence[Tensor]):
    """Lazy sequence of images; slices are lazy sequences too."""

    def __init__(self, numbers: range) -> None:
        self._numbers = numbers

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._numbers)

    def __getitem__(self, number: Any) -> Any:
        """Return the image of an index, or the lazy sequence of a slice."""
        if isinstance(number, int):
            return self._make(self._numbers[number])
        part = copy.copy(self)
        part._numbers = self._numbers[number]
        return part

    @abstractmethod
    def _make(self, number: int) -> Tensor:
        """Return the image of an index."""


class _Synthetic(_Lazy):
    """Images without positional cue, (3, side, side) each, normalised.

    Args:
        count: number of images.
        side: side in pixels.
        settings: input settings of the model.
        seed: seed of the images.
    """

    def __init__(self, count: int, side: int, settings: Settings, seed: int = 0) -> None:
        super().__init__(range(count))
        self._side, self._settings, self._seed = side, settings, seed


class Noise(_Synthetic):
    """Uniform noise in [0, 1]."""

    def _make(self, number: int) -> Tensor:
        rng = np.random.default_rng([self._seed, 0, number])
        image = rng.random((3, self._side, self._side), dtype=np.float32)
        return self._settings.normalized(torch.from_numpy(image))


class Textures(_Synthetic):
    """Homogeneous isotropic textures: random fields, discs and grains, alternating.

    Rendering a texture takes about a second, so rendered textures are cached.
    """

    def __init__(self, count: int, side: int, settings: Settings, seed: int = 0) -> None:
        super().__init__(count, side, settings, seed)
        self._cache: dict[int, Tensor] = {}

    def _make(self, number: int) -> Tensor:
        if number not in self._cache:
            kind = (random_field, disc_packing, voronoi)[number % 3]
            image, _ = kind(np.random.default_rng([self._seed, 1, number])).render(self._side)
            self._cache[number] = self._settings.normalized(image.clamp(0, 1))
        return self._cache[number]


class CentreWindows(_Lazy):
    """Central window of images or label maps, cropped to complete patches without resizing.

    Args:
        images: (..., H, W) each, tensors or arrays.
        patch_size: patch size in pixels.
        side: largest side of a window in pixels.

    Attributes:
        notes: notes on cropping, added when images are read.
    """

    def __init__(self, images: Sequence[Any], patch_size: int, side: int) -> None:
        super().__init__(range(len(images)))
        self._images, self._patch, self._side = images, patch_size, side
        self.notes: list[str] = []

    def _make(self, number: int) -> Tensor:
        image = torch.as_tensor(self._images[number])
        window, note = center_crop(image, self._patch, self._side)
        if note:
            self.notes.append(f"Images of {image.shape[-2]} x {image.shape[-1]} px: {note}")
        return window
