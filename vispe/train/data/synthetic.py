"""Synthetic micrographs by formula: nothing to download, and the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vispe.errors import InputError, OptionError
from vispe.files import atomic_path
from vispe.images import textures
from vispe.images.paths import expanded
from vispe.train.data.dataset import Source, digest, index, whole

VERSION = 1  # of the formulas; part of the fingerprint
SIDE = 256  # pixels
KEPT = 512  # pictures in memory; 134 MB at 256 pixels
KINDS = ("field", "discs", "grains", "boundaries", "layers")


class SyntheticSource(Source):
    """Random fields, disc packings, grains, grain boundaries and layers in turn, of many scales and directions.

    Picture i depends on (seed, i, side) only. At 256 pixels one takes from 0.05 to 3 seconds of one core, so the first
    `KEPT` that are read stay in memory, in each process, as one channel.

    Args:
        count: pictures.
        seed: of all of them.
        side: in pixels.
        cache: folder that pictures are kept in, one file of 4 side² bytes each, for later runs and other processes.

    Raises:
        OptionError: `count` or `side` below 1, or a negative `seed`.
    """

    def __init__(self, count: int, seed: int = 0, side: int = SIDE, cache: str | Path | None = None) -> None:
        self.count, self.seed = whole("synthetic", count, 1), whole("seed", seed, 0)
        self.side = whole("side", side, 1)
        self.cache = None if cache is None else expanded(cache)
        self._kept: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Tensor:
        i = index(i, self.count)
        grey = self._kept[i] if i in self._kept else self._made(i)
        if len(self._kept) < KEPT:
            self._kept[i] = grey
        return grey.expand(3, -1, -1)

    def _made(self, i: int) -> Tensor:
        """Return picture i as one channel, from the folder if it is there."""
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
            raise InputError(f"{file} cannot be written ({error}); give another cache=.") from error
        return grey

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": {}}

    def name(self, i: int) -> str:
        """Return seed and number of picture i."""
        return f"synthetic picture {i} of seed {self.seed}"

    def shape(self, i: int) -> tuple[int, int]:
        """Return the side, twice."""
        return self.side, self.side

    def describe(self) -> dict[str, Any]:
        """Return kind, count, where, licence, seed and side."""
        known = {"kind": "synthetic", "count": self.count, "where": "vispe.train.data.synthetic"}
        return {**known, "licence": "made by formula", "seed": self.seed, "side": self.side}

    def fingerprint(self) -> str:
        """Return a sha256 over version, count, seed and side."""
        return digest("synthetic", VERSION, self.count, self.seed, self.side)


def synthetic_picture(i: int, seed: int = 0, side: int = SIDE) -> Tensor:
    """Return synthetic micrograph i of a seed, (3, side, side) float32 in [0, 1], grey.

    Args:
        i: its number; the kind is `KINDS[i % 5]`.
        seed: of the series.
        side: in pixels. Details keep their size in pixels, so a larger picture shows more of them.
    """
    rng = np.random.default_rng([seed, i])
    scale, detail = float(np.exp(rng.uniform(np.log(6), np.log(48)))), float(rng.uniform(0, 0.06))
    low, high = sorted(rng.uniform(0.1, 0.9, 2).tolist())
    levels = (low, high) if rng.random() < 0.5 else (high, low)
    stretch = float(rng.choice([1.0, 1.0, rng.uniform(1.2, 3)]))
    along = {"stretch": stretch, "direction": float(rng.uniform(0, 180)), "detail": detail}
    drawn = int(rng.integers(2**31))
    kind = KINDS[i % 5]
    if kind == "field":
        contrast = float(rng.uniform(0.08, 0.25))
        texture = textures.random_field(drawn, wavelength=scale, contrast=contrast, **along)
    elif kind == "discs":
        coverage = float(rng.uniform(0.1, 0.5))
        texture = _discs(drawn, scale / 2, coverage, levels=levels, **along)
    elif kind == "layers":
        reach = 110 / 256 * side
        cuts = np.sort(rng.uniform(-reach, reach, int(rng.integers(1, 5)))).tolist()
        texture = textures.layered(drawn, interfaces=cuts, wavelength=2 * scale, detail=detail)
    else:
        labels = "phases" if kind == "grains" else "boundaries"
        texture = textures.voronoi(drawn, grain=max(scale, 12.0), labels=labels, **along)
    image, _ = texture.render(side, angle=float(rng.uniform(0, 360)))
    return image.clamp(0, 1)


def _discs(drawn: int, radius: float, coverage: float, **options: Any) -> textures.Texture:
    """Pack discs; where they find no room, nine tenths as many until they do."""
    while True:
        try:
            return textures.disc_packing(drawn, radius=radius, coverage=coverage, **options)
        except OptionError:
            if coverage < 0.05:
                raise
            coverage *= 0.9
