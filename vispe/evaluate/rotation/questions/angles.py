"""Equivariance of feature maps at any angle, with what interpolation alone does beside every number.

Only multiples of 90 degrees are exact. Elsewhere image and features are resampled, and a square grid of patches
samples the sample in another way even for a perfect encoding. Three floors are measured for every image and angle:

- 'round trip': the image turned there and back, unturned, through the model: resampling of the image;
- 'features': the map turned there and back: resampling of the features;
- 'blur': the image low-passed to the spectrum of the turned one, through the model: loss of detail alone.

The floor is the largest of them: the first two hold two resamplings each where the measurement holds one, so they
are bounds from above; the effect is the error minus the floor. The gap between 90 and 85 degrees shows the confound.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from torch import Tensor

from vispe.backbones.batches import FeatureFunction, batches, features_of, patch_of
from vispe.errors import ShapeError
from vispe.evaluate.rotation.compare import error
from vispe.evaluate.rotation.plan import ANGLES, Measured, Plan, Step, how_of
from vispe.evaluate.rotation.rows import Measurement
from vispe.evaluate.rotation.steps import Found, Rows, _features, _on_canvas
from vispe.symmetry.warp import Canvas, blurred_as, rotate

FLOORS = ("round trip", "features", "blur")


def angle_equivariance(
    f: FeatureFunction,
    images: Iterable[Tensor],
    *,
    angles: Sequence[float] = ANGLES,
    patch: int | None = None,
    side: int | None = None,
    how: Literal["crop", "disc"] = "crop",
    batch_size: int = 1,
    part: str = "full",
) -> tuple[Measurement, ...]:
    """Measure the centred equivariance error of f at any angles.

    The image is turned about its exact centre (bicubic), a window is cut out after turning, and the map of the window
    is turned back (bilinear). The same tokens count at every angle, 0 included: the inscribed disc less one token.
    Each batch costs three runs of f for every angle that is no multiple of 90, else one.

    Args:
        f: images (b, c, side, side) -> maps (b, d, side/patch, side/patch).
        images: (c, H, W) each, of any size that holds the window.
        angles: degrees, counter-clockwise.
        patch: side of a patch in pixels; default `f.patch`.
        side: of the window in pixels; default the largest.
        how: 'crop': only pixels of the image are shown, which must be √2 times larger than the window; 'disc': pixels
            outside the image are mirrored.
        batch_size: images of equal size that f sees at once.
        part: name of the rows.

    Returns:
        A row for each angle, named as '15°', with its floors; and 'all angles', their mean without multiples of 90.
    """
    size = patch_of(f, patch)
    found: dict[float, list[list[float]]] = {float(a): [] for a in angles}
    for batch in batches(images, batch_size):
        canvas = Canvas.fit(tuple(batch.shape[-2:]), size, side, how)
        still = canvas.pose(batch, 0)
        first = features_of(f, still)
        if tuple(first.shape[-2:]) != (canvas.grid, canvas.grid):
            raise ShapeError(
                f"A window of {canvas.side} px gave a map of {tuple(first.shape[-2:])} tokens, expected {canvas.grid} "
                f"a side for patch={size}; check patch=."
            )
        for angle, rows in found.items():
            rows += _one_angle(f, batch, canvas, still, first, angle)
    made = {a: np.array(v) for a, v in found.items()}
    rows = [_row(f"{a:g}°", v, part) for a, v in made.items()]
    tilted = [v for a, v in made.items() if a % 90]
    return (*([_row("all angles", np.mean(tilted, 0), part)] if tilted else []), *rows)


def _one_angle(
    f: FeatureFunction, batch: Tensor, canvas: Canvas, still: Tensor, first: Tensor, angle: float
) -> list[list[float]]:
    """For each image of a batch the error and the floors at one angle."""
    valid = canvas.tokens()
    posed = canvas.pose(batch, angle)
    back = _turn(features_of(f, posed), -angle)
    if angle % 90 == 0:  # nothing was resampled
        return [[error(a, b, valid), 0.0, 0.0, 0.0] for a, b in zip(first, back, strict=True)]
    trip = features_of(f, canvas.round_trip(batch, angle))
    maps = _turn(_turn(first, angle), -angle)
    blur = features_of(f, blurred_as(still, posed))
    return [
        [error(a, other, valid) for other in others]
        for a, *others in zip(first, back, trip, maps, blur, strict=True)
    ]


def _turn(maps: Tensor, degrees: float) -> Tensor:
    return rotate(maps, degrees, mode="bilinear", padding="border")


def _row(transform: str, values: np.ndarray, part: str) -> Measurement:
    floors = {name: values[:, k + 1] for k, name in enumerate(FLOORS)}
    return Measurement(transform, "error", values[:, 0], part, floors=floors)


def _angles(what: Measured, plan: Plan, step: Step) -> Found:
    def measured(images: list[Tensor], canvas: Canvas) -> Rows:
        return angle_equivariance(
            _features(what),
            images,
            angles=plan.angles,
            patch=plan.step,
            side=canvas.side,
            how=how_of(canvas),
            batch_size=plan.batch_size,
        )

    return {"angles": [_on_canvas(step, part, plan, measured) for part in step.shapes()]}
