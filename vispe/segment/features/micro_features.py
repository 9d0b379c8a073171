"""Pixel features of vispe_micro, the backbone shipped with the package, computed tile by tile on demand."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vispe.backbones.device import flush_denormals
from vispe.backbones.micro import PATCH, load_micro
from vispe.backbones.model_access import fingerprint
from vispe.errors import OptionError
from vispe.segment.features.coarse_features import CoarseMaps
from vispe.segment.features.spill_cache import SpillCache
from vispe.segment.features.threads import one_thread_each
from vispe.segment.features.tiles import even_tiles, padding

NAME = "vispe_micro"
TILE = 576
"""Largest side of a tile in pixels by default."""

_WHOLE = 1400  # pages with at most this number of patches are not tiled
# attention decays within a few patches: a larger overlap changes the class of no fewer pixels
_OVERLAP = 2 * PATCH


class DenseModel:
    """vispe_micro with its weights, frozen.

    Args:
        weights: safetensors file; the shipped one by default.
        device: torch device.
        half: run in bfloat16, to reduce memory.

    Raises:
        InputError: the file is missing or does not match the architecture.
    """

    flexible = True

    def __init__(self, weights: str | Path | None = None, device: str = "cpu", half: bool = False) -> None:
        with one_thread_each():  # many small operations
            self._model = load_micro(weights).to(device, memory_format=torch.channels_last)
        self.device, self.half, self.dim = torch.device(device), half, self._model.dim
        self._cache = SpillCache()

    def fingerprint(self) -> str:
        """Return the SHA-256 of all weights."""
        return fingerprint(self._model)

    @torch.inference_mode()
    def __call__(self, image: Tensor, again: bool = False) -> Tensor:
        """Return the features of an image, (dim, h / 2, w / 2) float32 on the CPU.

        Args:
            image: (3, h, w), or (1, h, w) for grey, in [0, 1]; contiguous, on the CPU, sides multiples of `PATCH`.
            again: the same image will be requested once more: its features are cached until then, within the limits
                of the cache (see `SpillCache`).
        """
        # content hash: equal tiles of the training and the prediction share features
        key = repr(tuple(image.shape)).encode() + hashlib.blake2b(image.numpy(), digest_size=16).digest()
        features = self._cache.take(key)
        if features is None:
            batch = image[None].to(self.device, memory_format=torch.channels_last)
            with flush_denormals(), torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
                features = self._model(batch)[0].float().contiguous().cpu()
        if again:
            self._cache.put(key, features)
        return features


class DenseMaps(CoarseMaps):
    """Features of one page, computed tile by tile on demand, so that memory does not grow with the page.

    Args:
        model: the backbone.
        page: (h, w, c) float32 in [0, 1], finite. One channel is passed to the model as grey, three as colour; with 2
            or more than 3 each channel is passed separately as grey, and the features are concatenated.
        tile: largest side of a tile in pixels, rounded down to a multiple of the patch; `TILE` by default.
    """

    def __init__(self, model: DenseModel, page: np.ndarray, tile: int | None) -> None:
        height, width, channels = page.shape
        pads = padding(height, width, PATCH)
        padded = height + pads[0] + pads[1], width + pads[2] + pads[3]
        untiled = tile is None and padded[0] * padded[1] <= _WHOLE * PATCH * PATCH
        most = max(padded) if untiled else max((tile or TILE) // PATCH, 1) * PATCH
        regions = even_tiles(*padded, most, PATCH, min(_OVERLAP, most - PATCH))
        notes = ()
        if min(height, width) < PATCH:
            notes = (
                f"the image is smaller than one patch of {PATCH} px ({height} x {width}): padded by reflection.",
            )
        super().__init__(regions, (pads[0], pads[2]), (height, width), notes)
        self._model, self._page = model, page
        self._groups = [range(3)] if channels == 3 else [[c] for c in range(channels)]
        self.width = model.dim * len(self._groups)

    def coarse(self, number: int, again: bool = False) -> Tensor:
        """Return the features of a tile, (f, rows, columns) float32."""
        inside, tile, (dy, dx) = self.inside(number), self.regions[number], self.offset
        pads = (
            (max(dy - tile.top, 0), tile.bottom - dy - inside.bottom),
            (max(dx - tile.left, 0), tile.right - dx - inside.right),
        )
        padded = np.pad(self._page[inside.slices], (*pads, (0, 0)), mode="symmetric")
        image = torch.from_numpy(padded).permute(2, 0, 1)
        return torch.cat([self._model(image[list(group)].contiguous(), again) for group in self._groups])


def check_options(pos_embed: str | None, of_tokens: Mapping[str, object]) -> None:
    """Check that options apply to vispe_micro.

    Raises:
        OptionError: a positional encoding, token density or layers are set, which vispe_micro does not
            support.
    """
    for name, value in of_tokens.items():
        raise OptionError(
            f"{name}={value!r} has no effect on {NAME}, whose features already have a stride of 2 px. Omit it, or use "
            "a timm model."
        )
    if pos_embed is not None:
        raise OptionError(
            f"pos_embed={pos_embed!r} is not supported by {NAME}, whose weights were trained with alibi2d. Omit it, or "
            "use a timm model."
        )
