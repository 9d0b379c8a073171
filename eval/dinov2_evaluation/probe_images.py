"""Evaluation images of students and teachers, and their numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vispe.images.normalize import normalize
from vispe.images.read import read_image
from vispe.train.data import FolderSource, SyntheticSource
from vispe.train.evaluate.probe_images import CentreWindows, Noise, Settings, Textures

KINDS = ("noise", "textures", "micrographs", "synthetic", "pool")
"""Uniform noise; generated homogeneous textures; homogeneous micrographs; synthetic images such as students learn
from, of another seed; images that students may have learnt from."""

PLACELESS = KINDS[:3]
"""Kinds that show no position: what is read there comes from the model."""

ANOTHER_SEED = 2_000  # students learn from seed 0
_LARGE_ENOUGH = 0.9  # of the size that is requested: smaller windows are omitted


@dataclass(frozen=True)
class Extent:
    """Numbers of images, sizes and repetitions of an evaluation.

    Attributes:
        noise: noise images.
        textures: generated textures.
        synthetic: synthetic images of another seed.
        pool: images of the pool, evenly over all of them.
        each: micrographs of each set, the first by name; None for all.
        sets: sets of micrographs, the first by name; None for all.
        rotated: textures that are rotated and mirrored, and as many micrographs, from different sets.
        masks: choices of patches that the probe learns from, for each image.
        budget: scribbled pixels of each class.
        sizes: sides of images in pixels; scribbles are drawn at the last one.
    """

    noise: int = 8
    textures: int = 9
    synthetic: int = 12
    pool: int = 24
    each: int | None = None
    sets: int | None = None
    rotated: int = 4
    masks: int = 6
    budget: int = 100
    sizes: tuple[int, ...] = (224, 518)


QUICK = Extent(noise=2, textures=3, synthetic=2, pool=2, each=1, sets=3, rotated=1, masks=2)


@dataclass(frozen=True, eq=False)
class Frame:
    """A micrograph with its truth.

    Attributes:
        group: name of its set.
        name: of the image.
        image: (1 or 3, H, W) in [0, 1].
        truth: labels (H, W), from 1.
        homogeneous: whether its set is the same everywhere: those have scribbles in a corner.
    """

    group: str
    name: str
    image: Tensor
    truth: np.ndarray
    homogeneous: bool


def frames_of(folder: Path, extent: Extent) -> list[Frame]:
    """Return the micrographs of all sets of a folder, each with `images` and `masks`.

    Raises:
        SystemExit: the folder has no such set.
    """
    result: list[Frame] = []
    sets = sorted(path.parent for path in folder.glob("*/masks"))
    for place in sets[: extent.sets]:
        homogeneous = (place / "scribbles_corner").is_dir()
        for path in sorted((place / "images").glob("*.png"))[: extent.each]:
            image = torch.from_numpy(normalize(read_image(path))[0][0]).permute(2, 0, 1)
            truth = read_image(place / "masks" / path.name).pages[0][..., 0].astype(np.int64) + 1
            result.append(Frame(place.name, path.stem, image, truth, homogeneous))
    if not any(frame.homogeneous for frame in result):
        raise SystemExit(
            f"{folder} has no homogeneous set; give a folder of sets with images, masks and scribbles_corner."
        )
    return result


def load_images(
    kind: str, size: int, settings: Settings, extent: Extent, frames: Sequence[Frame], pool: Path | None
) -> Sequence[Tensor]:
    """Return the images of a kind, (3, h, w) each, normalised; sides are whole patches, at most `size` pixels.

    Nothing is resized. Windows of micrographs and of the pool that are much smaller than `size` are omitted.

    Args:
        kind: one of `KINDS`.
        size: in pixels.
        settings: of the teacher.
        extent: how many.
        frames: micrographs.
        pool: folder of unlabelled images; None gives no images of that kind.
    """
    if kind == "noise":
        return Noise(extent.noise, size, settings)
    if kind == "textures":
        return Textures(extent.textures, size, settings)
    if kind == "synthetic":
        unseen = SyntheticSource(extent.synthetic, seed=ANOTHER_SEED, side=size)
        return [settings.normalized(one) for one in unseen]
    least = _LARGE_ENOUGH * size
    if kind == "micrographs":
        images = [f.image for f in frames if f.homogeneous and min(f.image.shape[1:]) >= least]
    else:
        images = [] if pool is None else list(_some(FolderSource(pool), extent.pool, least))
    return list(CentreWindows([settings.normalized(one) for one in images], settings.patch_size, size))


def rotated_of(size: int, settings: Settings, extent: Extent, frames: Sequence[Frame]) -> list[Tensor]:
    """Return the images that are rotated: textures, and the first micrograph of each homogeneous set."""
    first = {f.group: f for f in reversed(frames) if f.homogeneous and min(f.image.shape[1:]) >= size}
    groups = sorted(first)[: extent.rotated]
    windows = CentreWindows([settings.normalized(first[g].image) for g in groups], settings.patch_size, size)
    return [*Textures(extent.rotated, size, settings), *windows]


def _some(source: FolderSource, count: int, least: float) -> Iterator[Tensor]:
    """Yield images of which both sides are large enough, evenly over all of them."""
    large = [i for i in range(len(source)) if min(source.shape(i)) >= least]
    for k in np.unique(np.linspace(0, len(large) - 1, min(count, len(large))).round().astype(int)):
        yield source[large[int(k)]]
