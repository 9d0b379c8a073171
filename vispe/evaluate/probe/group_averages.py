"""Features averaged over transformed copies of the image, with and without undoing the transform, and their cost.

Averaging is meant to cancel position when the image is reflected, rotated and shifted. The published form averages the
maps of four transformed images without undoing the transform, so every patch mixes the features of four positions. The
correct form undoes the transform of each map first: every patch is then averaged over positions. After
averaging over all eight poses, the only remaining positional information is the distance to the centre;
averaging over shifts removes it too.

Source of the published form: the baselines of dino-saw (tldr-group, arXiv 2603.16840).
"""

import numpy as np
import torch
from torch import Tensor

from vispe.backbones.batching import FeatureFunction, features_of
from vispe.errors import InputError, ShapeError
from vispe.evaluate.features.spectrum import rankme
from vispe.images.symmetry.d4 import D4, IDENTITY, Element, element
from vispe.utils.options import PositiveInt, checked

PUBLISHED = (IDENTITY, element("hflip"), element("vflip"), element("rot90"))
"""The poses of the published form: identity, horizontal flip, vertical flip, and rotation by 90 degrees."""

_UPRIGHT = tuple(g for g in D4 if g.turns % 2 == 0)
_ROTATED = tuple(g for g in D4 if g.turns % 2)


@checked
def shift_lattice(grid: tuple[int, int], shifts: PositiveInt) -> list[tuple[int, int]]:
    """Return shifts (rows, columns) in patches, evenly spaced over the grid, (0, 0) first.

    Args:
        grid: patches (h, w).
        shifts: number along each side, clipped to the number of patches.

    Raises:
        OptionError: `shifts` is below 1.

    >>> shift_lattice((4, 4), 2)
    [(0, 0), (0, 2), (2, 0), (2, 2)]
    """
    counts = [min(shifts, n) for n in grid]
    rows, cols = ([k * n // count for k in range(count)] for n, count in zip(grid, counts, strict=True))
    return [(row, col) for row in rows for col in cols]


def transform_averages(
    f: FeatureFunction, image: Tensor, patch_size: int, shifts: int = 4
) -> dict[str, Tensor | str]:
    """Return all transform averages of one image, computed from the same forward passes.

    The image is rolled by whole patches and transformed to all eight poses: 8 forward passes per shift, in batches of
    four. Memory: five maps and the four of a batch.

    Args:
        f: images (b, c, H, W) -> maps (b, d, h, w).
        image: (c, H, W), both sides multiples of the patch.
        patch_size: patch size in pixels.
        shifts: number along each side, evenly spaced; 1 for none.

    Returns:
        Maps (d, h, w) float64 on the CPU: `published_average`; `d4_average`; with shifts `shift_average`, over shifts
        only, and `d4_shift_average`, over both. If an average does not exist, its value is the reason as a
        string.

    Raises:
        ShapeError: the sides of the image are not multiples of the patch size.
    """
    size = tuple(image.shape[-2:])
    grid = (size[0] // patch_size, size[1] // patch_size)
    if size != (grid[0] * patch_size, grid[1] * patch_size):
        raise ShapeError(
            f"transform_averages: image sides must be multiples of patch_size={patch_size}, got {size} px. Crop the "
            "image."
        )
    lattice = shift_lattice(grid, shifts)
    rotates, refused = True, ""
    sums: dict[str, Tensor] = {}

    # running sums, so that memory does not grow with the number of passes
    def add(name: str, value: Tensor, parts: int) -> None:
        sums[name] = sums[name] + value / parts if name in sums else value / parts

    for row, col in lattice:
        moved = torch.roll(image, (row * patch_size, col * patch_size), (-2, -1))
        poses = dict(zip(_UPRIGHT, _maps(f, moved, _UPRIGHT, grid), strict=True))
        if rotates:
            try:
                rotated = _maps(f, moved, _ROTATED, grid[::-1])
            except (InputError, ShapeError) as error:
                if grid[0] == grid[1]:
                    raise
                rotates, refused = False, str(error)
            else:
                poses |= dict(zip(_ROTATED, rotated, strict=True))
        for g, pose in poses.items():
            if (row, col) == (0, 0) and g in PUBLISHED and grid[0] == grid[1]:
                add("published_average", pose, len(PUBLISHED))
            # undo pose and shift, so that every patch is aligned with itself
            back = torch.roll(g.undo(pose), (-row, -col), (-2, -1))
            if (row, col) == (0, 0):
                add("d4_average", back, len(D4))
            if len(lattice) > 1 and g == IDENTITY:
                add("shift_average", back, len(lattice))
            if len(lattice) > 1:
                add("d4_shift_average", back, len(D4) * len(lattice))
    result: dict[str, Tensor | str] = {name: total.cpu() for name, total in sums.items()}
    if grid[0] != grid[1]:
        result["published_average"] = (
            f"does not exist on a {grid[0]}x{grid[1]} grid, whose rotation by 90 degrees has another shape"
        )
    if not rotates:
        for name in {"d4_average", "d4_shift_average"} & set(result):
            result[name] = f"needs the image rotated by 90 degrees, which the model rejects: {refused}"
    return result


def effective_rank(feats: Tensor) -> float:
    """Return the effective rank of the patches of one image: exp of the entropy of the normalised singular values.

    RankMe (arXiv 2210.02885); 1 if all patches are equal up to scale, at most min(h·w, C). NaN if all features are 0.

    Args:
        feats: feature map (C, h, w).

    >>> round(effective_rank(torch.eye(3)[:, :, None]), 6)
    3.0
    """
    x = feats.flatten(1).T
    return rankme(x, eps=0.0) if x.any() else float("nan")


def mean_cosine(first: Tensor, second: Tensor) -> float:
    """Return the cosine similarity of two maps (C, h, w), averaged over patches."""
    return float(torch.nn.functional.cosine_similarity(first.double(), second.double(), dim=0).mean())


def _maps(f: FeatureFunction, image: Tensor, poses: tuple[Element, ...], grid: tuple[int, int]) -> Tensor:
    """Return the maps (poses, d, h, w) of an image in several poses of one shape."""
    maps = features_of(f, torch.stack([g.apply(image) for g in poses]))
    if tuple(maps.shape[-2:]) != grid:
        raise ShapeError(
            f"transform_averages: expected a map of {grid} patches, got {tuple(maps.shape[-2:])}. Check patch."
        )
    return maps


def forward_passes(grid: tuple[int, int], shifts: int) -> dict[str, int]:
    """Return the number of forward passes per image of each average alone."""
    n = int(np.prod([min(shifts, side) for side in grid]))
    passes = {"published_average": len(PUBLISHED), "d4_average": len(D4)}
    return passes | ({"shift_average": n, "d4_shift_average": n * len(D4)} if n > 1 else {})
