"""Pictures to learn from: synthetic micrographs by formula, what scikit-image installs, and folders of one's own.

Everything but the folders is the same everywhere: seeds make the textures, and a release of scikit-image has its
pictures. `ihc` and `cell` are left out, for they are what demonstrations and tests look at.
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
    """Yield synthetic micrographs (3, SIDE, SIDE) uint8, see `vispe.train.data.SyntheticSource`.

    Args:
        count: how many.
        seed: of all of them; picture i is the same whatever the count.
    """
    for i in range(count):
        yield _bytes(synthetic_picture(i, seed, SIDE))


def installed() -> Iterator[Tensor]:
    """Yield the pictures of scikit-image (3, H, W) uint8, in the order of `INSTALLED`."""
    import skimage

    folder = Path(skimage.__file__).parent / "data"
    for name in INSTALLED:
        yield _read(folder / name)


def folders(paths: Sequence[str | Path]) -> Iterator[Tensor]:
    """Yield every picture below the folders (3, H, W) uint8, sorted by path; stacks give their pages."""
    from vispe.images.file_search import find_images
    from vispe.images.normalize import normalize
    from vispe.images.read import read_image

    for path in paths:
        for file in find_images([path]):
            pages, _ = normalize(read_image(file))
            for page in pages:
                yield _bytes(
                    torch.from_numpy(np.ascontiguousarray(page)).permute(2, 0, 1)[:3].expand(3, -1, -1)
                )


def crops(pictures: Sequence[Tensor], count: int, side: int, generator: torch.Generator) -> Tensor:
    """Return random windows of random pictures (count, 3, side, side) in [0, 1], turned and mirrored at random.

    Pictures are chosen alike often, whatever their size; those that are smaller than the window are never chosen.

    Args:
        pictures: (3, H, W) uint8.
        count: windows.
        side: of a window in pixels.
        generator: source of all randomness.
    """
    large = [p for p in pictures if min(p.shape[1:]) >= side]
    found = []
    for _ in range(count):
        picture = large[int(torch.randint(len(large), (), generator=generator))]
        top, left = (int(torch.randint(n - side + 1, (), generator=generator)) for n in picture.shape[1:])
        turns, mirror = (int(torch.randint(n, (), generator=generator)) for n in (4, 2))
        window = torch.rot90(picture[:, top : top + side, left : left + side], turns, (1, 2))
        found.append(window.flip(-1) if mirror else window)
    return torch.stack(found).float() / 255


def _read(file: Path) -> Tensor:
    from PIL import Image

    with Image.open(file) as image:
        return torch.from_numpy(np.asarray(image.convert("RGB")).copy()).permute(2, 0, 1)


def _bytes(image: Tensor) -> Tensor:
    return (image.clamp(0, 1) * 255).round().to(torch.uint8)
