"""Equivariance of features to shifts by integer and fractional patches: cyclic rolls, and windows of a larger image.

A roll by an integer number of patches is exact for a model without a position code. A roll by a fraction of a
patch is not exact, because the content of every patch changes; it measures the effect of the phase of the
patch grid. A roll adds a seam;
`crop_shift` compares two overlapping windows of a larger image, as in practice. Shifts are undone by the nearest
integer number of tokens.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from vispe.backbones.batching import FeatureFunction, features_of, patch_of
from vispe.errors import OptionError, ShapeError
from vispe.evaluate.rotation.comparison import Pair, compared
from vispe.evaluate.rotation.distributed import Piece
from vispe.evaluate.rotation.feature_similarity import measures_named
from vispe.evaluate.rotation.helpers import Found, features, question, size_of
from vispe.evaluate.rotation.plan import ImageBatch, Measured, RotationPlan, Shift
from vispe.evaluate.rotation.record_key import CROP_SHIFT, FULL, PARTS, ROLL, WHOLE, Key
from vispe.evaluate.rotation.records import Measurement


def default_shifts(patch_size: int, grid: tuple[int, int]) -> tuple[Shift, ...]:
    """Return the default shifts (dy, dx) in pixels.

    One patch down, right and both; half of the grid; and all fractions of a patch along the diagonal.

    >>> default_shifts(2, (6, 6))
    ((2, 0), (0, 2), (2, 2), (6, 6), (1, 1))
    """
    far = (grid[0] // 2 * patch_size, grid[1] // 2 * patch_size)
    by_patches = [(patch_size, 0), (0, patch_size), (patch_size, patch_size), far]
    return tuple(
        dict.fromkeys([s for s in by_patches if s != (0, 0)] + [(d, d) for d in range(1, patch_size)])
    )


def tokens_of(pixels: int, patch_size: int) -> int:
    """Return the shift in pixels rounded to an integer number of tokens, halves towards 0.

    >>> [tokens_of(d, 4) for d in (2, 3, 5, -7)]
    [0, 1, 1, -2]
    """
    tokens, rest = divmod(abs(pixels), patch_size)
    return (tokens + (2 * rest > patch_size)) * (1 if pixels >= 0 else -1)


def roll_equivariance(
    f: FeatureFunction,
    images: Iterable[Tensor],
    *,
    shifts: Sequence[Shift] | None = None,
    patch_size: int | None = None,
    measures: Sequence[str] = ("error", "error_uncentred"),
    batch_size: int = 1,
    part: str = FULL,
) -> tuple[Measurement, ...]:
    """Measure the equivariance of f to cyclic shifts by (dy, dx) pixels.

    Args:
        f: images (b, c, H, W) -> maps (b, d, h, w).
        images: (c, H, W) each, both sides multiples of the patch size.
        shifts: (dy, dx) in pixels; `default_shifts` of the first image by default.
        patch_size: patch size in pixels; `f.patch_size` by default.
        measures: names in `vispe.evaluate.rotation.feature_similarity.MEASURES`.
        batch_size: max number of images of equal size per batch.
        part: part of the records, see `Measurement`.

    Returns:
        A record 'roll (dy, dx) px' for each shift and measure, and the means 'roll, whole patches' and 'roll, parts of
        a patch'.

    Raises:
        OptionError: the patch size or a measure is invalid, or `batch_size` is below 1.
        InputError: there are no images, or an image or a map has values that are not finite.
        ShapeError: a map does not match the patch size.

    Example:
        >>> rows = roll_equivariance(torch.nn.AvgPool2d(4), torch.rand(1, 3, 16, 16), shifts=[(4, 0)], patch_size=4)
        >>> [(row.transform, row.summary().mean) for row in rows if row.metric == "error"]
        [('roll, whole patches', 0.0), ('roll (4, 0) px', 0.0)]
    """
    size, scores = patch_of(f, patch_size), _scores(measures)

    def pairs(batch: Tensor) -> Iterator[Pair]:
        nonlocal shifts
        first = features_of(f, batch)
        _check_grid(batch, first, size)
        shifts = shifts or default_shifts(size, tuple(first.shape[-2:]))
        for dy, dx in shifts:
            moved = features_of(f, torch.roll(batch, (dy, dx), (-2, -1)))
            yield (dy, dx), first, torch.roll(moved, (-tokens_of(dy, size), -tokens_of(dx, size)), (-2, -1))

    return _rows(compared(images, pairs, scores, batch_size), size, ROLL, part)


def crop_shift(
    f: FeatureFunction,
    images: Iterable[Tensor],
    size: tuple[int, int],
    *,
    shifts: Sequence[Shift] | None = None,
    patch_size: int | None = None,
    measures: Sequence[str] = ("error", "error_uncentred"),
    batch_size: int = 1,
    margin: int = 0,
    part: str = FULL,
) -> tuple[Measurement, ...]:
    """Measure f on two windows of a larger image, at the tokens in their overlap.

    The windows are placed symmetrically about the centre of the image, up to a pixel.

    Args:
        f: images (b, c, H, W) -> maps (b, d, h, w).
        images: (c, H, W) each, larger than the window by the largest shift.
        size: window (height, width) in pixels, multiples of the patch size.
        shifts: (dy, dx) in pixels; `default_shifts` without the half grid by default.
        patch_size: patch size in pixels; `f.patch_size` by default.
        measures: names in `vispe.evaluate.rotation.feature_similarity.MEASURES`.
        batch_size: max number of images of equal size per batch.
        margin: tokens excluded at the border of both windows.
        part: part of the records, see `Measurement`.

    Raises:
        ShapeError: the image is too small, or the windows do not overlap.
        OptionError: the patch size or a measure is invalid, or `batch_size` is below 1.
        InputError: there are no images, or an image or a map has values that are not finite.

    Example:
        >>> rows = crop_shift(torch.nn.AvgPool2d(4), torch.rand(1, 3, 24, 24), (16, 16), shifts=[(4, 0)], patch_size=4)
        >>> rows[0].transform, rows[0].values.tolist()
        ('crop shift, whole patches', [0.0])
    """
    p, scores = patch_of(f, patch_size), _scores(measures)
    if shifts is None:
        shifts = [s for s in default_shifts(p, (2, 2)) if max(s) <= p]

    def pairs(batch: Tensor) -> Iterator[Pair]:
        for dy, dx in shifts:
            first, second = _windows(batch, size, (dy, dx))
            first_maps, second_maps = features_of(f, first), features_of(f, second)
            _check_grid(first, first_maps, p)
            ty, tx = tokens_of(dy, p), tokens_of(dx, p)
            yield (dy, dx), _common(first_maps, ty, tx, margin), _common(second_maps, -ty, -tx, margin)

    return _rows(compared(images, pairs, scores, batch_size), p, CROP_SHIFT, part)


def _scores(measures: Sequence[str]) -> dict[str, Callable[..., float]]:
    scores = measures_named(measures)
    if "invariant_share" in measures:
        raise OptionError(
            "crop_shift: 'invariant_share' is defined for groups of poses, got shifts. Omit it."
        )
    return scores


def _windows(batch: Tensor, size: tuple[int, int], shift: Shift) -> tuple[Tensor, Tensor]:
    """Return two windows of `size`, the second one shifted down and right by `shift`."""
    starts = []
    for have, want, d in zip(batch.shape[-2:], size, shift, strict=True):
        if want + abs(d) > have or want < 1:
            raise ShapeError(
                f"crop_shift: size={size} with shift {shift} must fit into the image, got {tuple(batch.shape[-2:])} "
                "px. Use larger images or a smaller size."
            )
        low = (have - want - abs(d)) // 2
        starts.append((low, low + d) if d >= 0 else (low - d, low))
    (y0, y1), (x0, x1) = starts
    h, w = size
    return batch[..., y0 : y0 + h, x0 : x0 + w], batch[..., y1 : y1 + h, x1 : x1 + w]


def _common(maps: Tensor, ty: int, tx: int, margin: int) -> Tensor:
    """Return the tokens of a window in its overlap with another one, shifted by (ty, tx) tokens."""
    h, w = maps.shape[-2:]
    rows = slice(max(ty, 0) + margin, h + min(ty, 0) - margin)
    cols = slice(max(tx, 0) + margin, w + min(tx, 0) - margin)
    common = maps[..., rows, cols]
    if 0 in common.shape:
        raise ShapeError(
            f"crop_shift: windows of {h}x{w} tokens shifted by {(ty, tx)} must overlap, got margin={margin}. Reduce it."
        )
    return common


def _check_grid(images: Tensor, maps: Tensor, patch_size: int) -> None:
    size, grid = tuple(images.shape[-2:]), tuple(maps.shape[-2:])
    if (grid[0] * patch_size, grid[1] * patch_size) != size:
        raise ShapeError(
            f"shift: patch_size={patch_size} does not match a map of {grid} tokens, got an image of {size} px. Check "
            "patch_size, and "
            "use fit_to_patches."
        )


def _rows(
    values: Mapping[tuple[Shift, str], np.ndarray], patch_size: int, word: str, part: str
) -> tuple[Measurement, ...]:
    """Return the means over shifts by integer and by fractional patches, and a record for each shift."""
    groups: dict[tuple[str, str], list[np.ndarray]] = {}
    for (shift, m), numbers in values.items():
        kind = WHOLE if all(d % patch_size == 0 for d in shift) else PARTS
        groups.setdefault((kind, m), []).append(numbers)
    means = [
        Measurement.of(Key(f"{word}, {kind}", m, part), np.mean(v, 0)) for (kind, m), v in groups.items()
    ]
    rows = [Measurement.of(Key(word, m, part, shift), numbers) for (shift, m), numbers in values.items()]
    return (*means, *rows)


@question("shift")
def shifts(measured: Measured, plan: RotationPlan, step: ImageBatch) -> Found:
    """Compare features of rolled images, and of two windows of each image if it is large enough."""
    f, patch_size = features(measured), plan.step
    options = {"patch_size": patch_size, "batch_size": plan.batch_size}
    near = [s for s in plan.shifts if max(map(abs, s)) <= patch_size]
    crops: list[Piece] = []
    for part in step.shapes():
        images = step.whole[part]
        # the second window is shifted by up to a patch
        h, w = (
            min(side - patch_size, plan.size or side) // patch_size * patch_size
            for side in images[0].shape[-2:]
        )
        rows = None
        if min(h, w) < 3 * patch_size or (plan.exact and {h, w} != {plan.size}):
            step.notes.append(
                f"{size_of(images[0])} are too small for two windows shifted by up to {patch_size} px, so crop_shift "
                "was not measured."
            )
        else:
            rows = crop_shift(f, images, (h, w), shifts=near, **options)
        crops.append((len(images), rows))
    rolls = roll_equivariance(f, step.fitted, shifts=plan.shifts, **options)
    return {ROLL: [(len(step.fitted), rolls)], CROP_SHIFT: crops}
