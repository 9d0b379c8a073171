"""Equivariance of feature maps at any angle, with the error of interpolation alone reported for each value.

Only multiples of 90 degrees are exact. At all other angles, image and features are resampled, and a square
grid of patches samples the content differently even for an equivariant encoder. Three floors are measured for
every image and angle:

- 'round trip': the image rotated and rotated back, through the model: resampling of the image;
- 'features': the map rotated and rotated back: resampling of the features;
- 'blur': the image low-passed to the spectrum of the rotated one, through the model: loss of detail alone.

The floor is the largest of the three. The first two contain two resamplings each, while the measurement
contains one, so they are upper bounds. The effect is the error minus the floor. The difference between 90 and
85 degrees shows the effect of resampling.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import numpy as np
from torch import Tensor

from vispe.backbones.batching import FeatureFunction, features_of, patch_of
from vispe.errors import ShapeError
from vispe.evaluate.rotation.comparison import Pair, compared
from vispe.evaluate.rotation.feature_similarity import error
from vispe.evaluate.rotation.helpers import Found, at_angles, canvas_of, features, question
from vispe.evaluate.rotation.plan import ANGLES, ImageBatch, Measured, RotationPlan
from vispe.evaluate.rotation.record_key import ALL_ANGLES, ANGLE, FULL, Key
from vispe.evaluate.rotation.records import Measurement
from vispe.images.symmetry.spectrum import match_spectrum
from vispe.images.symmetry.warp import Canvas, rotate

VALUE = "value"
FLOORS = ("round trip", "features", "blur")


def angle_equivariance(
    f: FeatureFunction,
    images: Iterable[Tensor],
    *,
    angles: Sequence[float] = ANGLES,
    patch_size: int | None = None,
    side: int | None = None,
    how: Literal["crop", "disc"] = "crop",
    batch_size: int = 1,
    part: str = FULL,
) -> tuple[Measurement, ...]:
    """Measure the centred equivariance error of f at any angles.

    The image is rotated about its exact centre (bicubic), a window is cropped afterwards, and the map of the window
    is rotated back (bilinear). The same tokens are compared at every angle, including 0: those in the
    inscribed disc, without a margin of one token. Each batch needs three forward passes for every angle that
    is not a multiple of 90, and one for multiples of 90.

    Args:
        f: images (b, c, side, side) -> maps (b, d, side/patch, side/patch).
        images: (c, H, W) each, of any size that contains the window.
        angles: degrees, counter-clockwise.
        patch_size: patch size in pixels; `f.patch_size` by default.
        side: side of the window in pixels; the largest by default.
        how: 'crop': only pixels of the image are shown, which must be √2 times larger than the window; 'disc': pixels
            outside the image are mirrored.
        batch_size: images of equal size per forward pass.
        part: part of the records, see `Measurement`.

    Returns:
        A record for each angle, named as '15°', with its floors; and 'all angles', the mean without multiples
        of 90.

    Raises:
        OptionError: `how` or the patch size is invalid, or `batch_size` is below 1.
        InputError: there are no images, or an image or a map has values that are not finite.
        ShapeError: an image is too small for the window, or a map does not match the patch size.
        MissingExtra: scikit-learn, used at angles that are not multiples of 90, is not installed.

    Example:
        >>> import torch
        >>> (row,) = angle_equivariance(torch.nn.AvgPool2d(4), torch.rand(1, 3, 64, 64), angles=[90], patch_size=4)
        >>> row.transform, row.summary().mean < 1e-6
        ('90°', True)
    """
    size = patch_of(f, patch_size)

    def pairs(batch: Tensor) -> Iterator[Pair]:
        canvas = Canvas.fit(tuple(batch.shape[-2:]), size, side, how)
        still = canvas.pose(batch, 0)
        first = features_of(f, still)
        if tuple(first.shape[-2:]) != (canvas.grid, canvas.grid):
            raise ShapeError(
                f"A window of {canvas.side} px gave a map of {tuple(first.shape[-2:])} tokens, expected {canvas.grid} "
                f"a side for patch_size={size}; check patch_size."
            )
        valid = canvas.tokens()
        still_tokens = _inside(first, valid)
        for angle in turns:
            for name, maps in _turned(f, batch, canvas, still, first, angle):
                yield (angle, name), still_tokens, _inside(maps, valid)

    turns = list(dict.fromkeys(map(float, angles)))
    numbers = compared(images, pairs, {"error": error}, batch_size)

    def column(angle: float, name: str) -> np.ndarray:
        # multiples of 90 need no resampling, so their floors are 0
        return numbers.get(((angle, name), "error"), np.zeros_like(numbers[(angle, VALUE), "error"]))

    table = {a: np.stack([column(a, name) for name in (VALUE, *FLOORS)], 1) for a in turns}
    rows = [_row(Key(ANGLE, "error", part, (a,)), values) for a, values in table.items()]
    tilted = [values for a, values in table.items() if a % 90]
    return (*([_row(Key(ALL_ANGLES, "error", part), np.mean(tilted, 0))] if tilted else []), *rows)


def _turned(
    f: FeatureFunction, batch: Tensor, canvas: Canvas, still: Tensor, first: Tensor, angle: float
) -> Iterator[tuple[str, Tensor]]:
    """Yield the maps of a rotated batch, rotated back, and the maps for the three floors."""
    posed = canvas.pose(batch, angle)
    yield VALUE, _turn(features_of(f, posed), -angle)
    if angle % 90:
        yield "round trip", features_of(f, canvas.round_trip(batch, angle))
        yield "features", _turn(_turn(first, angle), -angle)
        yield "blur", features_of(f, match_spectrum(still, posed))


def _turn(maps: Tensor, degrees: float) -> Tensor:
    return rotate(maps, degrees, mode="bilinear", padding="border")


def _inside(maps: Tensor, valid: Tensor) -> Tensor:
    """Return the tokens (b, d, n, 1) that are visible at every angle."""
    return maps[..., valid.to(maps.device)][..., None]


def _row(key: Key, values: np.ndarray) -> Measurement:
    return Measurement.of(key, values[:, 0], floors=dict(zip(FLOORS, values[:, 1:].T, strict=True)))


@question("angles")
def angles(measured: Measured, plan: RotationPlan, step: ImageBatch) -> Found:
    """Compare features at all angles of the plan, images of one size at a time."""
    f, pieces = features(measured), []
    for part in step.shapes():
        images = step.whole[part]
        canvas = canvas_of(step, images[0], plan)
        options = {"patch_size": plan.step, "batch_size": plan.batch_size}
        rows = canvas and angle_equivariance(f, images, **options, **at_angles(plan, canvas))
        pieces.append((len(images), rows))
    return {"angles": pieces}
