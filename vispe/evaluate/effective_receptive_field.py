"""Effective receptive field: the pixels that the feature of the central patch depends on, measured by gradients.

Follows "Understanding the Effective Receptive Field in Deep Convolutional Neural Networks" (arXiv 1701.04128). The
influence of a pixel is the norm of the gradient of a random projection of the central feature with respect to the
pixel, so that it does not depend on the basis of the channels. The theoretical receptive field of an attention bias
alone is in `vispe.evaluate.attention.receptive_field`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vispe.errors import ShapeError, UnsupportedHost
from vispe.utils.options import Seed, checked
from vispe.utils.report.html_page import Tone
from vispe.utils.report.result import Result
from vispe.utils.report.statistics import Summary, summarise
from vispe.utils.report.table import interval, json_entries, number

SHARES = (0.5, 0.95)


@dataclass(frozen=True, eq=False)
class EffectiveReceptiveField(Result):
    """Influence of the pixels of an image on the feature of its central patch.

    Attributes:
        influence: (H, W), sums to 1, averaged over images.
        center: row and column of the centre of the patch, in pixels.
        patch_size: height and width of a patch in pixels.
        reach: radius in pixels that contains 50 % and 95 % of the influence, (images, 2).
        area: fraction of the image in the smallest set of pixels with 95 % of the influence, (images,).
        own: influence of the patch itself, (images,).
        uniform: reach of a field with equal influence of all pixels, (2,).
    """

    influence: np.ndarray
    center: tuple[float, float]
    patch_size: tuple[float, float]
    reach: np.ndarray
    area: np.ndarray
    own: np.ndarray
    uniform: np.ndarray

    @property
    def verdict(self) -> str:
        """Verdict in one sentence: how far the model looks, relative to uniform influence."""
        far, patch = self.reach[:, 1].mean(), math.sqrt(math.prod(self.patch_size))
        return (
            f"95 % of the influence is within {far:.0f} px ({far / patch:.1f} patches) of the central patch; uniform "
            f"influence would give {self.uniform[1]:.0f} px"
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Caveats of the verdict, one sentence each."""
        return (
            "The gradient shows where a small change has an effect, not how much of the content is used.",
        )

    @property
    def tone(self) -> Tone:
        """Colour of the verdict in the report: neutral, as neither a small nor a large field is better."""
        return "plain"

    def rows(self) -> dict[str, tuple[Summary, float]]:
        """Return mean and interval over images of each number, with its value for uniform influence."""
        patch = math.prod(self.patch_size) / self.influence.size
        columns = (self.reach[:, 0], self.reach[:, 1], self.area, self.own)
        names = ("reach 50 % (px)", "reach 95 % (px)", "area 95 %", "own patch")
        uniform = (*self.uniform.tolist(), SHARES[1], patch)
        return {
            name: (summarise(column), value)
            for name, column, value in zip(names, columns, uniform, strict=True)
        }

    def table(self) -> list[list[str]]:
        """Return the table as text, header first."""
        rows = [["influence", "mean", "95 % interval", "uniform"]]
        for name, (summary, uniform) in self.rows().items():
            rows.append([name, number(summary.mean), interval(summary.interval), number(uniform)])
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, including the map of influence."""
        names = ("center", "patch_size", "reach", "area", "own", "uniform", "influence")
        return json_entries(self, "verdict", "notes", *names)


@checked
def effective_receptive_field(
    f: Callable[[Tensor], Tensor], images: Tensor | Iterable[Tensor], *, seed: Seed = 0
) -> EffectiveReceptiveField:
    """Measure the effective receptive field of the central patch, one forward and backward pass per image.

    Args:
        f: normalised images (b, c, H, W) -> maps (b, d, h, w), differentiable, such as a `VisionModel`.
        images: normalised images (b, c, H, W), or an iterable of (c, H, W), all of one size.
        seed: seed of the random projections.

    Raises:
        ShapeError: there are no images, or they differ in size.
        UnsupportedHost: `f` has no gradient, or one that is 0 or not finite.

    >>> import timm
    >>> from vispe.backbones.vision_model import VisionModel
    >>> conv = torch.nn.Conv2d(3, 4, 3, padding=1)
    >>> field = effective_receptive_field(conv, torch.randn(2, 3, 9, 9))
    >>> field.influence.shape, int((field.influence > 0).sum())
    ((9, 9), 9)
    """
    generator = torch.Generator().manual_seed(seed)
    total, reaches, areas, within_patch = None, [], [], []
    center, patch = (0.0, 0.0), (1.0, 1.0)
    distance: np.ndarray | None = None
    for image in images:
        if image.ndim != 3 or (total is not None and image.shape[-2:] != total.shape):
            before = "" if total is None else f" after {tuple(total.shape)} px"
            raise ShapeError(
                f"effective_receptive_field: images must be (c, H, W) of one size, got {tuple(image.shape)}{before}. "
                "Crop or resize them first."
            )
        field, (h, w) = _influence(f, image, generator)
        if distance is None:
            center, patch = _central_patch(field.shape, (h, w))  # type: ignore[arg-type]
            distance = _distances(field.shape, center)  # type: ignore[arg-type]
        total = field if total is None else total + field
        reaches.append(_reach(field, distance))
        areas.append(_area(field))
        within_patch.append(float(field[_within(field.shape, center, patch)].sum()))  # type: ignore[arg-type]
    if total is None or distance is None:
        raise ShapeError(
            "effective_receptive_field: no images, got an empty sequence. Pass at least one image."
        )
    uniform = _reach(np.full(total.shape, 1 / total.size), distance)
    return EffectiveReceptiveField(
        total / len(within_patch),
        center,
        patch,
        np.array(reaches),
        np.array(areas),
        np.array(within_patch),
        np.array(uniform),
    )


def _influence(
    f: Callable[[Tensor], Tensor], image: Tensor, generator: torch.Generator
) -> tuple[np.ndarray, tuple[int, int]]:
    """Return the influence (H, W) of pixels on the feature of the central patch, and the shape of the map."""
    with torch.enable_grad():
        pixels = image.detach()[None].clone().requires_grad_()
        maps = f(pixels)
        h, w = maps.shape[-2:]
        feature = maps[0, :, h // 2, w // 2]
        projection = torch.randn(feature.shape, generator=generator).to(feature)
        if not feature.requires_grad:
            raise UnsupportedHost(
                f"effective_receptive_field: {getattr(f, '__name__', type(f).__name__)} must be differentiable, got an "
                "output without a gradient. Pass the model itself."
            )
        (grad,) = torch.autograd.grad((feature * projection).sum(), pixels)
    energy = grad[0].double().square().sum(0).sqrt().cpu().numpy()
    total = energy.sum()
    if not (np.isfinite(total) and total > 0):
        raise UnsupportedHost(
            f"effective_receptive_field: the gradient of the central feature must be finite and not 0 everywhere, got "
            f"a sum of {total:g}. Check the weights, and use float32."
        )
    return energy / total, (h, w)


def _central_patch(
    size: tuple[int, int], grid: tuple[int, int]
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the centre of the central patch in pixels, (n - 1) / 2 is the centre of n pixels, and its size."""
    patch = size[0] / grid[0], size[1] / grid[1]
    center = ((grid[0] // 2 + 0.5) * patch[0] - 0.5, (grid[1] // 2 + 0.5) * patch[1] - 0.5)
    return center, patch


def _distances(size: tuple[int, int], center: tuple[float, float]) -> np.ndarray:
    """Return the distance of every pixel from the centre of the patch, (H, W)."""
    y, x = (np.arange(n) - c for n, c in zip(size, center, strict=True))
    return np.hypot(y[:, None], x[None])


def _within(size: tuple[int, int], center: tuple[float, float], patch: tuple[float, float]) -> np.ndarray:
    """Return the mask of the pixels of the patch, (H, W)."""
    y, x = (np.abs(np.arange(n) - c) < p / 2 for n, c, p in zip(size, center, patch, strict=True))
    return y[:, None] & x[None]


def _reach(field: np.ndarray, distance: np.ndarray) -> tuple[float, ...]:
    """Return the radius that contains each of `SHARES` of a field."""
    order = np.argsort(distance, axis=None, kind="stable")
    cumulative = np.cumsum(field.ravel()[order])
    index = np.searchsorted(cumulative, np.array(SHARES) * cumulative[-1] - 1e-12)
    return tuple(distance.ravel()[order][np.minimum(index, field.size - 1)].tolist())


def _area(field: np.ndarray) -> float:
    """Return the fraction of the image in the smallest set of pixels with 95 % of a field."""
    cumulative = np.cumsum(np.sort(field, axis=None)[::-1])
    return float(np.searchsorted(cumulative, SHARES[1] * cumulative[-1] - 1e-12) + 1) / field.size
