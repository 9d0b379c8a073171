"""Training images: synthetic micrographs, images installed by scikit-image, and folders.

Except for the folders, the data are the same on all machines for one release of scikit-image. `ihc` and `cell` are
excluded because demonstrations and tests use them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vispe.train.data.synthetic import SIDE, synthetic_picture

INSTALLED = (
    "astronaut.png", "brick.png", "camera.png", "chelsea.png", "coffee.png", "coins.png", "grass.png", "gravel.png",
    "hubble_deep_field.jpg", "microaneurysms.png", "moon.png", "motorcycle_left.png", "retina.jpg", "rocket.jpg",
)  # fmt: skip


def synthetic(count: int, seed: int = 0) -> Iterator[Tensor]:
    """Yield synthetic micrographs (3, SIDE, SIDE) uint8; see `vispe.train.data.SyntheticSource`.

    Args:
        count: number of images.
        seed: seed of all images; image i does not depend on `count`.
    """
    for i in range(count):
        yield _to_uint8(synthetic_picture(i, seed, SIDE))


def installed() -> Iterator[Tensor]:
    """Yield the images of scikit-image (3, H, W) uint8 in the order of `INSTALLED`."""
    import skimage

    folder = Path(skimage.__file__).parent / "data"
    for name in INSTALLED:
        yield _read(folder / name)


def folders(paths: Sequence[str | Path]) -> Iterator[Tensor]:
    """Yield all images in the folders and their subfolders (3, H, W) uint8, sorted by path, page by page for stacks."""
    from vispe.images.file_search import find_images
    from vispe.images.normalize import normalize
    from vispe.images.read import read_image

    for path in paths:
        for file in find_images([path]):
            pages, _ = normalize(read_image(file))
            for page in pages:
                yield _to_uint8(
                    torch.from_numpy(np.ascontiguousarray(page)).permute(2, 0, 1)[:3].expand(3, -1, -1)
                )


def crops(images: Sequence[Tensor], count: int, side: int, generator: torch.Generator) -> Tensor:
    """Return random crops (count, 3, side, side) in [0, 1] with a random D4 transform.

    Images are sampled uniformly, independently of their size; images smaller than the crop are excluded.

    Args:
        images: (3, H, W) uint8.
        count: number of crops.
        side: crop size in pixels.
        generator: random generator.
    """
    large = [p for p in images if min(p.shape[1:]) >= side]
    batch = []
    for _ in range(count):
        image = large[int(torch.randint(len(large), (), generator=generator))]
        top, left = (int(torch.randint(n - side + 1, (), generator=generator)) for n in image.shape[1:])
        quarter_turns, flip = (int(torch.randint(n, (), generator=generator)) for n in (4, 2))
        crop = torch.rot90(image[:, top : top + side, left : left + side], quarter_turns, (1, 2))
        batch.append(crop.flip(-1) if flip else crop)
    return torch.stack(batch).float() / 255


def _read(file: Path) -> Tensor:
    from PIL import Image

    with Image.open(file) as image:
        return torch.from_numpy(np.asarray(image.convert("RGB")).copy()).permute(2, 0, 1)


def _to_uint8(image: Tensor) -> Tensor:
    return (image.clamp(0, 1) * 255).round().to(torch.uint8)
