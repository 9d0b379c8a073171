"""Segmentation tasks: an image, its exact phases, and a few scribbles as drawn by a user of `vispe segment`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import ndimage

from models.micro.appearance import degraded, render
from models.micro.geometry import Random, field, scene

SHARES = {"formula": 0.55, "collage": 0.25, "denoise": 0.2}
"""Probability of each kind of task if real images are available."""

HELD = 10
"""Every tenth real image is used for validation."""

_MIN_PIXELS = 40  # of a phase in the window


@dataclass(frozen=True)
class Task:
    """One image to segment.

    Attributes:
        kind: a key of `SHARES`.
        image: (3, side, side) float32 in [0, 1].
        other: same field of view in another image of a series, if the scribbles are drawn on that image; otherwise
            None.
        labels: (side, side) uint8, phases 0..K-1.
        scribbles: (side, side) bool, pixels with a known phase.
    """

    kind: str
    image: np.ndarray
    other: np.ndarray | None
    labels: np.ndarray
    scribbles: np.ndarray


def task(random: Random, side: int, real_images: Sequence[np.ndarray] = (), series: float = 0.0) -> Task:
    """Sample a task.

    Args:
        random: random generator.
        side: window size in pixels.
        real_images: (3, h, w) uint8; if empty, all tasks are synthetic.
        series: probability that the scribbles are drawn on another image of the same field of view.
    """
    kinds = list(SHARES) if len(real_images) else ["formula"]
    weights = np.array([SHARES[k] for k in kinds])
    while True:
        kind = kinds[random.choice(len(kinds), p=weights / weights.sum())]
        views = 1 + int(series > 0 and random.random() < series)
        if kind == "formula":
            structure = scene(random, side)
            images, labels = render(random, structure, views), structure.labels
        elif kind == "collage":
            images, labels = _collage(random, side, real_images, views)
        else:
            images, labels = _denoise(random, side, real_images, views)
        counts = np.bincount(labels.ravel())
        if 1 < (counts >= _MIN_PIXELS).sum() <= 5:
            labels = np.where(counts[labels] >= _MIN_PIXELS, labels, counts.argmax())
            ranks = np.cumsum(np.bincount(labels.ravel(), minlength=256) > 0) - 1
            labels = ranks[labels].astype(np.uint8)
            other = images[1] if views > 1 else None
            return Task(kind, images[0], other, labels, scribbles(random, labels))


def scribbles(random: Random, labels: np.ndarray) -> np.ndarray:
    """Draw short strokes in every phase -> (side, side) bool; with probability 0.2 in one quadrant where possible."""
    side = labels.shape[0]
    drawn = np.zeros(labels.shape, bool)
    corner = random.random() < 0.2
    y, x = np.mgrid[:side, :side]
    for phase in range(int(labels.max()) + 1):
        inside = labels == phase
        allowed = inside & (y < side // 2) & (x < side // 2) if corner else inside
        starts = np.flatnonzero(allowed if allowed.sum() >= 10 else inside)
        for start in random.choice(starts, int(random.integers(1, 5))):
            length, angle = random.uniform(2, 14), random.uniform(0, np.pi)
            dy, dx = y - start // side, x - start % side
            along = dx * np.cos(angle) + dy * np.sin(angle)
            across = dy * np.cos(angle) - dx * np.sin(angle)
            drawn |= inside & (np.abs(along) < length) & (np.abs(across) < 1.6)
    return drawn


def window(random: Random, images: Sequence[np.ndarray], side: int) -> np.ndarray:
    """Crop a window (3, side, side) float32 in [0, 1] from a random image, with random scale and D4 transform."""
    image = images[random.integers(len(images))]
    scale = float(np.exp(random.uniform(np.log(0.6), np.log(1.8))))
    size = min(max(int(side / scale), 16), *image.shape[1:])
    top, left = (random.integers(n - size + 1) for n in image.shape[1:])
    crop = image[:, top : top + size, left : left + size].astype(np.float32) / 255
    positions = np.clip((np.arange(side) + 0.5) * size / side - 0.5, 0, size - 1)
    low = np.minimum(positions.astype(int), size - 2)
    weight = (positions - low).astype(np.float32)
    crop = crop[:, low] * (1 - weight[:, None]) + crop[:, low + 1] * weight[:, None]
    crop = crop[:, :, low] * (1 - weight) + crop[:, :, low + 1] * weight
    crop = np.rot90(crop, random.integers(4), (1, 2))
    return crop[:, :, ::-1] if random.random() < 0.5 else crop


def _collage(
    random: Random, side: int, images: Sequence[np.ndarray], views: int
) -> tuple[list[np.ndarray], np.ndarray]:
    """Fill the phases of a scene with windows of different images."""
    labels = scene(random, side).labels
    grey = random.random() < 0.6
    image = np.zeros((3, side, side), np.float32)
    equalize = random.random() < 0.4  # same mean and contrast: phases differ only in texture
    for phase in range(int(labels.max()) + 1):
        crop = window(random, images, side)
        if grey:
            crop = np.broadcast_to(crop[random.integers(3)], crop.shape)
        if equalize:
            crop = 0.5 + 0.15 * (crop - crop.mean()) / max(float(crop.std()), 0.02)
        image = np.where(labels == phase, crop, image)
    if random.random() < 0.5:
        image = ndimage.gaussian_filter(image, (0, 0.6, 0.6))
    return degraded(random, image, views), labels


def _denoise(
    random: Random, side: int, images: Sequence[np.ndarray], views: int
) -> tuple[list[np.ndarray], np.ndarray]:
    """Threshold the grey levels of a clean real image to define phases, and add imaging artefacts to the image."""
    clean = window(random, images, side)
    levels = ndimage.gaussian_filter(clean[random.integers(3)], random.uniform(0.6, 4))
    if random.random() < 0.3:  # texture energy
        detail = (clean.mean(0) - ndimage.gaussian_filter(clean.mean(0), 2)) ** 2
        levels = ndimage.gaussian_filter(detail, random.uniform(2, 6))
    elif random.random() < 0.5:  # local contrast
        levels = levels - ndimage.gaussian_filter(levels, random.uniform(8, 30))
    thresholds = np.quantile(levels, np.sort(random.uniform(0.1, 0.9, random.integers(1, 3))))
    labels = np.searchsorted(thresholds, levels.ravel()).reshape(side, side).astype(np.uint8)
    return degraded(random, clean + 0.02 * field(random, side, 2), views), labels
