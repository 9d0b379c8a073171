"""Features averaged over transforms of the image, as published and correctly, and what an average costs.

A transform average hopes that position cancels when the image is mirrored, turned and shifted. The published form
averages the maps of the four transformed images as they come, so every patch mixes the features of four places. The
correct form brings each map back first: then every patch averages itself as seen at other places. What is left of
position after all eight poses is what they have in common, the distance to the centre; shifts remove that too.

Source of the published form: the baselines of dino-saw (tldr-group, arXiv 2603.16840).
"""

import numpy as np
import torch
from torch import Tensor

from vispe.backbones.batching import FeatureFunction, features_of
from vispe.errors import InputError, OptionError, ShapeError
from vispe.evaluate.features.spectrum import rankme
from vispe.symmetry.d4 import D4, IDENTITY, Element, element

PUBLISHED = (IDENTITY, element("hflip"), element("vflip"), element("rot90"))
"""The poses of the published form: as it is, mirrored left to right, top to bottom, and a quarter turn."""

_UPRIGHT = tuple(g for g in D4 if g.turns % 2 == 0)
_TURNED = tuple(g for g in D4 if g.turns % 2)


def shift_lattice(grid: tuple[int, int], shifts: int) -> list[tuple[int, int]]:
    """Return shifts (rows, columns) in patches, evenly over the grid, none first.

    Args:
        grid: patches (h, w).
        shifts: along each side; more than it has patches means every patch.

    >>> shift_lattice((4, 4), 2)
    [(0, 0), (0, 2), (2, 0), (2, 2)]
    """
    if shifts < 1:
        raise OptionError(f"The shifts along a side are a number from 1 (none) up, got shifts={shifts}.")
    counts = [min(shifts, n) for n in grid]
    rows, cols = ([k * n // count for k in range(count)] for n, count in zip(grid, counts, strict=True))
    return [(row, col) for row in rows for col in cols]


def transform_averages(
    f: FeatureFunction, image: Tensor, patch: int, shifts: int = 4
) -> dict[str, Tensor | str]:
    """Return every transform average of one image, from the same forward passes.

    The image is shifted around itself by whole patches and put into all eight poses; 8 forward passes for each shift,
    four images at a time. Memory: five maps and the four of a pass.

    Args:
        f: images (b, c, H, W) -> maps (b, d, h, w).
        image: (c, H, W), both sides multiples of the patch.
        patch: side of a patch in pixels.
        shifts: along each side, evenly over the grid; 1 for none.

    Returns:
        Maps (d, h, w) float64 on the CPU: `published_average`; `d4_average`; with shifts `shift_average`, over shifts
        alone, and `d4_shift_average`, over both. A sentence in place of a map says why an average does not exist.

    Raises:
        ShapeError: the sides are no multiples of the patch.
    """
    size = tuple(image.shape[-2:])
    grid = (size[0] // patch, size[1] // patch)
    if size != (grid[0] * patch, grid[1] * patch):
        raise ShapeError(f"An image of {size} px is no multiple of patches of {patch} px; cut it to one.")
    lattice = shift_lattice(grid, shifts)
    turns, refused = True, ""
    sums: dict[str, Tensor] = {}

    # a sum is kept for each average, so that memory does not grow with the number of passes
    def add(name: str, value: Tensor, parts: int) -> None:
        sums[name] = sums[name] + value / parts if name in sums else value / parts

    for row, col in lattice:
        moved = torch.roll(image, (row * patch, col * patch), (-2, -1))
        poses = dict(zip(_UPRIGHT, _maps(f, moved, _UPRIGHT, grid), strict=True))
        if turns:
            try:
                turned = _maps(f, moved, _TURNED, grid[::-1])
            except (InputError, ShapeError) as error:
                if grid[0] == grid[1]:
                    raise
                turns, refused = False, str(error)
            else:
                poses |= dict(zip(_TURNED, turned, strict=True))
        for g, pose in poses.items():
            if (row, col) == (0, 0) and g in PUBLISHED and grid[0] == grid[1]:
                add("published_average", pose, len(PUBLISHED))
            # turned back and shifted back: every patch lies on itself again
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
            f"does not exist on a {grid[0]}x{grid[1]} grid, whose quarter turn has another shape"
        )
    if not turns:
        for name in {"d4_average", "d4_shift_average"} & set(result):
            result[name] = f"needs the image in a quarter turn, which the model refuses: {refused}"
    return result


def effective_rank(feats: Tensor) -> float:
    """Return the effective rank of the patches of one image: exp of the entropy of the normalised singular values.

    RankMe (arXiv 2210.02885); 1 if all patches are alike up to scale, at most min(h·w, C). NaN where all is 0.

    Args:
        feats: map (C, h, w).

    >>> round(effective_rank(torch.eye(3)[:, :, None]), 6)
    3.0
    """
    x = feats.flatten(1).T
    return rankme(x, eps=0.0) if x.any() else float("nan")


def mean_cosine(first: Tensor, second: Tensor) -> float:
    """Return the cosine between two maps (C, h, w) patch by patch, mean over patches."""
    return float(torch.nn.functional.cosine_similarity(first.double(), second.double(), dim=0).mean())


def _maps(f: FeatureFunction, image: Tensor, poses: tuple[Element, ...], grid: tuple[int, int]) -> Tensor:
    """Return the maps (poses, d, h, w) of an image in several poses of one shape."""
    maps = features_of(f, torch.stack([g.apply(image) for g in poses]))
    if tuple(maps.shape[-2:]) != grid:
        raise ShapeError(
            f"A map of {tuple(maps.shape[-2:])} patches came back where {grid} were expected; check patch=."
        )
    return maps


def forward_passes(grid: tuple[int, int], shifts: int) -> dict[str, int]:
    """Return how many forward passes each average needs by itself for one image."""
    n = int(np.prod([min(shifts, side) for side in grid]))
    passes = {"published_average": len(PUBLISHED), "d4_average": len(D4)}
    return passes | ({"shift_average": n, "d4_shift_average": n * len(D4)} if n > 1 else {})
