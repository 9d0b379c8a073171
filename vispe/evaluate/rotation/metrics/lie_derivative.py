"""Lie derivative of feature maps: change under an infinitesimal motion of the image, beyond the motion of the map.

    L f(x) = d/dt [ρ(-t) f(ρ(t) x)]  at t = 0

It is zero for an equivariant f and needs no choice of an angle. Bilinear interpolation has a kink at t = 0, where
pixels are on the grid; the mean of both one-sided derivatives is the central difference of neighbouring pixels along
the motion, so L f = J_f (v·∇x) - (v·∇f), with the Jacobian-vector product J_f. Motions are in pixels, about the exact
centre, so images need not be square.

Source: The Lie derivative for measuring learned equivariance (Gruver et al., arXiv 2210.02984). Their implementation
uses coordinates from -1 to 1, in which the rotation of a non-square image is sheared; this implementation
uses pixels, without shear.
"""

import warnings
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import grid_sample

from vispe.backbones.batching import FeatureFunction, batches, checked_maps
from vispe.backbones.vision_model import VisionModel
from vispe.errors import OptionError, ShapeError, UnsupportedCombination, short
from vispe.evaluate.rotation.helpers import Rows, features, question
from vispe.evaluate.rotation.plan import ImageBatch, Measured, RotationPlan
from vispe.evaluate.rotation.record_key import FULL, Key
from vispe.evaluate.rotation.records import Measurement
from vispe.utils.options import checked

Motion = Literal["rotation", "down", "right"]
Method = Literal["forward", "double backward", "difference"]
MOTIONS = ("rotation", "down", "right")
STEP = 1e-5
"""Step of the difference: radians for rotation, pixels for translation; its error grows with step and image."""


def lie_derivatives(
    f: FeatureFunction,
    images: Iterable[Tensor],
    *,
    motions: Sequence[Motion] = MOTIONS,
    method: Method = "forward",
    batch_size: int = 1,
    part: str = FULL,
) -> tuple[Measurement, ...]:
    """Measure |L f| relative to the standard deviation of f over positions, for each motion.

    Args:
        f: images (b, c, H, W) -> maps (b, d, h, w), differentiable unless `method='difference'`.
        images: (c, H, W) each; float64 is recommended.
        motions: 'rotation' (per radian), 'down' and 'right' (per pixel).
        method: Jacobian-vector product by 'forward' or 'double backward' differentiation, or 'difference', a finite
            difference of ±STEP as a cross-check, which needs float64.
        batch_size: max number of images of equal size per batch.
        part: part of the records, see `Measurement`.

    Returns:
        The records 'Lie rotation', 'Lie down', 'Lie right' with sqrt(Σ|Lf|²/Σ|Z|²); Z is f minus its mean over
        positions. NaN for images with a constant map.

    Raises:
        OptionError: an unknown motion or method, or `method='difference'` without float64.
        UnsupportedCombination: f has no derivative of that kind.
        InputError: there are no images, or an image or a map has values that are not finite.
        ShapeError: an image is not (c, H, W), or `f` does not return one map per image.

    Example:
        >>> rows = lie_derivatives(lambda images: images**2, torch.rand(1, 1, 8, 8, dtype=torch.float64))
        >>> [row.transform for row in rows]
        ['Lie rotation', 'Lie down', 'Lie right']
    """
    values: dict[str, list[float]] = {m: [] for m in motions}
    for batch in batches(images, batch_size):
        for motion in motions:
            value, derivative = lie_derivative(f, batch, motion, method=method)
            spread = value - value.mean((-2, -1), keepdim=True)
            power, signal = (t.square().sum((1, 2, 3)) for t in (derivative, spread))
            noise = value.square().sum((1, 2, 3)) * (8 * torch.finfo(torch.float64).eps) ** 2
            ratio = torch.where(signal > noise, power / signal, torch.nan).sqrt()
            values[motion] += ratio.tolist()
    return tuple(Measurement.of(Key(f"Lie {m}", "lie", part), v) for m, v in values.items())


@checked
def lie_derivative(
    f: FeatureFunction, images: Tensor, motion: Motion, *, method: Method = "forward"
) -> tuple[Tensor, Tensor]:
    """Return f and its Lie derivative, both (b, d, h, w) float64.

    Args:
        f: images (b, c, H, W) -> maps (b, d, h, w).
        images: (b, c, H, W).
        motion: 'rotation', 'down' or 'right'.
        method: 'forward', 'double backward' or 'difference'.

    Raises:
        OptionError: an unknown motion or method.
        UnsupportedCombination: f has no derivative of that kind.
        ShapeError: an image is not (c, H, W), or `f` does not return one map per image.
        InputError: a map has values that are not finite.

    Example:
        >>> image = torch.rand(1, 1, 8, 8, dtype=torch.float64)
        >>> value, derivative = lie_derivative(lambda images: 2 * images, image, "right")
        >>> derivative.shape, derivative.abs().max().item() < 1e-12
        (torch.Size([1, 1, 8, 8]), True)
    """
    if method == "difference" and images.dtype != torch.float64:
        raise OptionError(
            f"lie_derivative: method='difference' is dominated by rounding errors, got {images.dtype}. Use float64 for "
            "images and model, or method='forward'."
        )
    if method == "difference":
        return _difference(f, images, motion)
    tangent = along(images, motion)
    try:
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no forward derivative
            if method == "forward":
                value, pushed = _jvp(f, images, tangent)
            else:
                value, pushed = torch.autograd.functional.jvp(f, images, tangent)
    except (NotImplementedError, RuntimeError) as error:
        raise UnsupportedCombination(
            f"lie_derivative: no derivative by method={method!r} ({short(error)}). Use method='difference' in float64."
        ) from error
    value, pushed = (checked_maps(t.detach(), len(images)) for t in (value, pushed))
    return value, pushed - along(value, motion, _stride(images, value))


def along(values: Tensor, motion: Motion, stride: tuple[float, float] = (1.0, 1.0)) -> Tensor:
    """Return d/dt at t = 0 of values (b, d, h, w) under a motion, by central differences.

    Args:
        values: an image or a map, mirrored at its border.
        motion: 'rotation' counter-clockwise by t radians, 'down' or 'right' by t pixels of the image.
        stride: pixels of the image per cell (vertical, horizontal).
    """
    down, right = _slope(values, -2) / stride[0], _slope(values, -1) / stride[1]
    if motion == "down":
        return -down
    if motion == "right":
        return -right
    v, u = _offsets(values, stride)
    return -v * right + u * down  # samples at (u - t v, v + t u), as `warp.sampling_grid` does


def moved(values: Tensor, motion: Motion, t: float, stride: tuple[float, float] = (1.0, 1.0)) -> Tensor:
    """Return values (b, d, h, w) moved by t with bilinear interpolation, mirrored at the border."""
    v, u = _offsets(values, stride)
    v, u = v + 0 * u, u + 0 * v
    if motion == "rotation":
        cos, sin = np.cos(t), np.sin(t)
        v, u = sin * u + cos * v, cos * u - sin * v
    elif motion == "down":
        v = v - t
    else:
        u = u - t
    h, w = values.shape[-2:]
    grid = torch.stack([u * (2 / (stride[1] * (w - 1))), v * (2 / (stride[0] * (h - 1)))], -1)
    grid = grid.expand(len(values), -1, -1, -1)
    return grid_sample(values, grid, mode="bilinear", padding_mode="reflection", align_corners=True)


def _difference(f: FeatureFunction, images: Tensor, motion: Motion) -> tuple[Tensor, Tensor]:
    """Return the central difference, by moving the image by ±STEP and the map back."""
    with torch.no_grad():
        value = checked_maps(f(images), len(images))
        stride = _stride(images, value)
        both_sides = [
            moved(checked_maps(f(moved(images, motion, t)), len(images)), motion, -t, stride)
            for t in (STEP, -STEP)
        ]
    return value, (both_sides[0] - both_sides[1]) / (2 * STEP)


def _slope(values: Tensor, axis: int) -> Tensor:
    """Return the central difference along an axis; 0 at the border, where the mirrored neighbours are equal."""
    n = values.shape[axis]
    if n < 2:
        raise ShapeError(
            f"lie_derivative: maps need 2 cells per axis, got {tuple(values.shape[-2:])}. Use larger images."
        )
    out = torch.zeros_like(values)
    inner = (values.narrow(axis, 2, n - 2) - values.narrow(axis, 0, n - 2)) / 2
    out.narrow(axis, 1, n - 2).copy_(inner)
    return out


def _offsets(values: Tensor, stride: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Return offsets from the centre in pixels of the image, down (h, 1) and right (1, w)."""
    h, w = values.shape[-2:]
    v, u = (
        (torch.arange(n, dtype=values.dtype, device=values.device) - (n - 1) / 2) * s
        for n, s in zip((h, w), stride, strict=True)
    )
    return v[:, None], u[None, :]


def _stride(images: Tensor, value: Tensor) -> tuple[float, float]:
    return images.shape[-2] / value.shape[-2], images.shape[-1] / value.shape[-1]


@question("lie")
def lie(measured: Measured, plan: RotationPlan, step: ImageBatch) -> Rows | None:
    """Measure the Lie derivatives of differentiable features."""
    f, images = features(measured), step.fitted
    try:
        if not isinstance(f, VisionModel):
            _check_differentiable(f, images[0])
        return lie_derivatives(f, images, batch_size=plan.batch_size)
    except (UnsupportedCombination, TypeError, ValueError) as error:
        step.notes.append(f"The Lie derivative was not measured: {str(error).partition(';')[0].rstrip('.')}.")
        return None


def _jvp(f: FeatureFunction, images: Tensor, tangent: Tensor) -> tuple[Tensor, Tensor]:
    """Return the features and their forward derivative along a tangent."""
    with warnings.catch_warnings():
        # the first call of a process imports rules that torch compiles with its own deprecated TorchScript
        warnings.filterwarnings("ignore", message="`torch.jit.script`", category=FutureWarning)
        return torch.func.jvp(f, (images,), (tangent,))


def _check_differentiable(f: FeatureFunction, image: Tensor) -> None:
    """Raise if the features do not depend differentiably on the image."""
    try:
        _, pushed = _jvp(f, image[None], along(image[None], "right"))
    except (RuntimeError, NotImplementedError) as error:
        raise UnsupportedCombination(
            f"the features have no derivative ({str(error).splitlines()[0]})."
        ) from error
    if not bool((pushed != 0).any()):
        raise UnsupportedCombination("the features do not depend on the image differentiably.")
