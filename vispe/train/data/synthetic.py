"""Image source of synthetic micrographs, reproducible and without download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vispe.errors import InputError, OptionError
from vispe.images import textures
from vispe.images.paths import expanded
from vispe.train.data.dataset import Source, check_integer, digest, index
from vispe.utils.files import atomic_path

VERSION = 1  # version of the formulas, part of the fingerprint
SIDE = 256  # pixels
KEPT = 512  # images cached in memory; 134 MB at 256 pixels
KINDS = ("field", "discs", "grains", "boundaries", "layers")


class SyntheticSource(Source):
    """Random fields, disc packings, grains, grain boundaries and layers, alternating, of many scales and directions.

    Image i depends on (seed, i, side) only. At 256 pixels, rendering takes 0.05 to 3 seconds on one core, so the first
    `KEPT` images are cached in memory, in each process, as one channel.

    Args:
        count: number of images.
        seed: seed of all images.
        side: side of the images in pixels.
        cache: folder that caches images, one file of 4 side² bytes each, across runs and processes.

    Raises:
        OptionError: `count` or `side` below 1, or a negative `seed`.
    """

    def __init__(self, count: int, seed: int = 0, side: int = SIDE, cache: str | Path | None = None) -> None:
        self.count, self.seed = check_integer("synthetic", count, 1), check_integer("seed", seed, 0)
        self.side = check_integer("side", side, 1)
        self.cache = None if cache is None else expanded(cache)
        self._cache: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Tensor:
        i = index(i, self.count)
        grey = self._cache[i] if i in self._cache else self._load_or_render(i)
        if len(self._cache) < KEPT:
            self._cache[i] = grey
        return grey.expand(3, -1, -1)

    def _load_or_render(self, i: int) -> Tensor:
        """Return image i as one channel (1, side, side), from the cache folder if it exists."""
        if self.cache is None:
            return synthetic_picture(i, self.seed, self.side)[:1].clone()
        file = self.cache / f"synthetic-{VERSION}-{self.seed}-{self.side}-{i}.npy"
        if file.is_file():
            return torch.from_numpy(np.load(file))
        grey = synthetic_picture(i, self.seed, self.side)[:1].clone()
        try:
            with atomic_path(file, force=True) as temporary:
                np.save(temporary, grey.numpy())
        except (OSError, InputError) as error:
            raise InputError(f"{file} cannot be written ({error}). Set another `cache`.") from error
        return grey

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": {}}

    def name(self, i: int) -> str:
        """Return seed and index of image i."""
        return f"synthetic image {i} of seed {self.seed}"

    def shape(self, i: int) -> tuple[int, int]:
        """Return (side, side)."""
        return self.side, self.side

    def describe(self) -> dict[str, Any]:
        """Return kind, count, location, licence, seed and side."""
        facts = {"kind": "synthetic", "count": self.count, "where": "vispe.train.data.synthetic"}
        return {**facts, "licence": "made by formula", "seed": self.seed, "side": self.side}

    def fingerprint(self) -> str:
        """Return a sha256 of version, count, seed and side."""
        return digest("synthetic", VERSION, self.count, self.seed, self.side)


def synthetic_picture(i: int, seed: int = 0, side: int = SIDE) -> Tensor:
    """Return synthetic micrograph i of a seed, (3, side, side) float32 in [0, 1], grey.

    Args:
        i: index of the image; the kind is `KINDS[i % 5]`.
        seed: seed of the series.
        side: side in pixels. The size of structures in pixels does not depend on it.
    """
    rng = np.random.default_rng([seed, i])
    scale, detail = float(np.exp(rng.uniform(np.log(6), np.log(48)))), float(rng.uniform(0, 0.06))
    low, high = sorted(rng.uniform(0.1, 0.9, 2).tolist())
    levels = (low, high) if rng.random() < 0.5 else (high, low)
    stretch = float(rng.choice([1.0, 1.0, rng.uniform(1.2, 3)]))
    options = {"stretch": stretch, "direction": float(rng.uniform(0, 180)), "detail": detail}
    texture_seed = int(rng.integers(2**31))
    kind = KINDS[i % 5]
    if kind == "field":
        contrast = float(rng.uniform(0.08, 0.25))
        texture = textures.random_field(texture_seed, wavelength=scale, contrast=contrast, **options)
    elif kind == "discs":
        coverage = float(rng.uniform(0.1, 0.5))
        texture = _discs(texture_seed, scale / 2, coverage, levels=levels, **options)
    elif kind == "layers":
        reach = 110 / 256 * side
        cuts = np.sort(rng.uniform(-reach, reach, int(rng.integers(1, 5)))).tolist()
        texture = textures.layered(texture_seed, interfaces=cuts, wavelength=2 * scale, detail=detail)
    else:
        labels = "phases" if kind == "grains" else "boundaries"
        texture = textures.voronoi(texture_seed, grain=max(scale, 12.0), labels=labels, **options)
    image, _ = texture.render(side, angle=float(rng.uniform(0, 360)))
    return image.clamp(0, 1)


def _discs(seed: int, radius: float, coverage: float, **options: Any) -> textures.Texture:
    """Pack discs; if they do not fit, reduce the coverage by 10 % until they do."""
    while True:
        try:
            return textures.disc_packing(seed, radius=radius, coverage=coverage, **options)
        except OptionError:
            if coverage < 0.05:
                raise
            coverage *= 0.9
