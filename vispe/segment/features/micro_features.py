"""Pixel features of vispe_micro, the backbone that comes with the package, tile by tile as they are asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vispe.backbones.device import flushed
from vispe.backbones.micro import PATCH, load_micro
from vispe.errors import OptionError
from vispe.segment.features.coarse_features import CoarseMaps
from vispe.segment.features.spill_cache import Shelf
from vispe.segment.features.threads import one_thread_each
from vispe.segment.features.tiles import even_tiles, fingerprint, padding

NAME = "vispe_micro"
TILE = 576
"""Largest side of a tile in pixels where none is given."""

_WHOLE = 1400  # patches of a page that is not cut into tiles
_OVERLAP = 2 * PATCH  # attention fades within a few patches: with twice as much, as many pixels change class


class DenseModel:
    """vispe_micro with its weights, frozen.

    Args:
        weights: safetensors file; the shipped one by default.
        device: torch device.
        half: run in bfloat16 (a way out of memory trouble).

    Raises:
        InputError: the file is missing or does not fit.
    """

    flexible = True

    def __init__(self, weights: str | Path | None = None, device: str = "cpu", half: bool = False) -> None:
        with one_thread_each():  # many small operations
            self._model = load_micro(weights).to(device, memory_format=torch.channels_last)
        self.device, self.half, self.dim = torch.device(device), half, self._model.dim
        self._shelf = Shelf()

    def fingerprint(self) -> str:
        """Return the SHA-256 of all weights."""
        return fingerprint(self._model)

    @torch.inference_mode()
    def __call__(self, image: Tensor, again: bool = False) -> Tensor:
        """Return the features of an image, (dim, h / 2, w / 2) float32 on the CPU.

        Args:
            image: (3, h, w), or (1, h, w) for grey, in [0, 1]; contiguous, on the CPU, sides multiples of `PATCH`.
            again: the same image will be asked for once more: its features are kept until then, as far as there is
                room (see `Shelf`).
        """
        key = repr(tuple(image.shape)).encode() + hashlib.blake2b(image.numpy(), digest_size=16).digest()
        found = self._shelf.take(key)
        if found is None:
            batch = image[None].to(self.device, memory_format=torch.channels_last)
            with flushed(), torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
                found = self._model(batch)[0].float().contiguous().cpu()
        if again:
            self._shelf.put(key, found)
        return found


class DenseMaps(CoarseMaps):
    """Features of one page, computed when a tile is asked for, so that memory does not grow with the page.

    Args:
        model: what computes them.
        page: (h, w, c) float32 in [0, 1], finite. One channel is shown to the model as grey, three as colour; with 2
            or more than 3 each is run alone as grey, and their features are put side by side.
        tile: largest side of a tile in pixels, rounded down to whole patches; `TILE` by default.
    """

    def __init__(self, model: DenseModel, page: np.ndarray, tile: int | None) -> None:
        height, width, channels = page.shape
        pads = padding(height, width, PATCH)
        padded = height + pads[0] + pads[1], width + pads[2] + pads[3]
        whole = tile is None and padded[0] * padded[1] <= _WHOLE * PATCH * PATCH
        most = max(padded) if whole else max((tile or TILE) // PATCH, 1) * PATCH
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
        rim = (
            (max(dy - tile.top, 0), tile.bottom - dy - inside.bottom),
            (max(dx - tile.left, 0), tile.right - dx - inside.right),
        )
        cut = np.pad(self._page[inside.slices], (*rim, (0, 0)), mode="symmetric")
        image = torch.from_numpy(cut).permute(2, 0, 1)
        return torch.cat([self._model(image[list(group)].contiguous(), again) for group in self._groups])


def check_options(pos_embed: str | None, of_tokens: Mapping[str, object]) -> None:
    """Raise where an option does not fit vispe_micro.

    Raises:
        OptionError: another positional encoding was asked for, or more tokens, or other layers.
    """
    for name, value in of_tokens.items():
        raise OptionError(
            f"{name}={value!r} has no effect on {NAME}, whose features lie 2 px apart already; leave it out, or choose "
            "a timm model with --model."
        )
    if pos_embed is not None:
        raise OptionError(
            f"pos_embed={pos_embed!r} cannot be given to {NAME}, whose weights were learned with alibi2d; leave it "
            "out, or choose a timm model with --model."
        )
