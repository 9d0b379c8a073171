"""Tasks: a picture, its exact phases, and a few scribbles, as a user of `vispe segment` would draw them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import ndimage

from models.micro.appearance import degraded, picture
from models.micro.geometry import Random, field, scene

SHARES = {"formula": 0.55, "collage": 0.25, "denoise": 0.2}
"""How often each kind of task comes, when there are real pictures."""

HELD = 10
"""Every tenth real picture is kept for validation."""

_LEAST = 40  # pixels of a phase in the window


@dataclass(frozen=True)
class Task:
    """One picture to segment.

    Attributes:
        kind: a key of `SHARES`.
        image: (3, side, side) float32 in [0, 1].
        other: the same place in another picture of a series, where scribbles are drawn on that one; None else.
        labels: (side, side) uint8, phases 0..K-1.
        scribbles: (side, side) bool, pixels whose phase is given.
    """

    kind: str
    image: np.ndarray
    other: np.ndarray | None
    labels: np.ndarray
    scribbles: np.ndarray


def task(random: Random, side: int, pictures: Sequence[np.ndarray] = (), series: float = 0.0) -> Task:
    """Draw a task.

    Args:
        random: source of all randomness.
        side: of the window in pixels.
        pictures: real pictures (3, h, w) uint8; without them all tasks are by formula.
        series: how often the scribbles are on another picture of the same place.
    """
    kinds = list(SHARES) if len(pictures) else ["formula"]
    weights = np.array([SHARES[k] for k in kinds])
    while True:
        kind = kinds[random.choice(len(kinds), p=weights / weights.sum())]
        views = 1 + int(series > 0 and random.random() < series)
        if kind == "formula":
            made = scene(random, side)
            images, labels = picture(random, made, views), made.labels
        elif kind == "collage":
            images, labels = _collage(random, side, pictures, views)
        else:
            images, labels = _denoise(random, side, pictures, views)
        counts = np.bincount(labels.ravel())
        if 1 < (counts >= _LEAST).sum() <= 5:
            labels = np.where(counts[labels] >= _LEAST, labels, counts.argmax())
            ranks = np.cumsum(np.bincount(labels.ravel(), minlength=256) > 0) - 1
            labels = ranks[labels].astype(np.uint8)
            other = images[1] if views > 1 else None
            return Task(kind, images[0], other, labels, scribbles(random, labels))


def scribbles(random: Random, labels: np.ndarray) -> np.ndarray:
    """Draw short strokes in every phase -> (side, side) bool; one time in five in one quadrant, where it can be."""
    side = labels.shape[0]
    drawn = np.zeros(labels.shape, bool)
    corner = random.random() < 0.2
    y, x = np.mgrid[:side, :side]
    for phase in range(int(labels.max()) + 1):
        inside = labels == phase
        allowed = inside & (y < side // 2) & (x < side // 2) if corner else inside
        places = np.flatnonzero(allowed if allowed.sum() >= 10 else inside)
        for start in random.choice(places, int(random.integers(1, 5))):
            length, angle = random.uniform(2, 14), random.uniform(0, np.pi)
            dy, dx = y - start // side, x - start % side
            along = dx * np.cos(angle) + dy * np.sin(angle)
            across = dy * np.cos(angle) - dx * np.sin(angle)
            drawn |= inside & (np.abs(along) < length) & (np.abs(across) < 1.6)
    return drawn


def window(random: Random, pictures: Sequence[np.ndarray], side: int) -> np.ndarray:
    """Cut a window (3, side, side) float32 in [0, 1] out of a random picture, of a random scale and pose."""
    image = pictures[random.integers(len(pictures))]
    scale = float(np.exp(random.uniform(np.log(0.6), np.log(1.8))))
    reach = min(max(int(side / scale), 16), *image.shape[1:])
    top, left = (random.integers(n - reach + 1) for n in image.shape[1:])
    cut = image[:, top : top + reach, left : left + reach].astype(np.float32) / 255
    at = (np.arange(side) + 0.5) * reach / side - 0.5
    rows = np.clip(at, 0, reach - 1)
    low = np.minimum(rows.astype(int), reach - 2)
    part = (rows - low).astype(np.float32)
    cut = cut[:, low] * (1 - part[:, None]) + cut[:, low + 1] * part[:, None]
    cut = cut[:, :, low] * (1 - part) + cut[:, :, low + 1] * part
    cut = np.rot90(cut, random.integers(4), (1, 2))
    return cut[:, :, ::-1] if random.random() < 0.5 else cut


def _collage(
    random: Random, side: int, pictures: Sequence[np.ndarray], views: int
) -> tuple[list[np.ndarray], np.ndarray]:
    """Fill the phases of a scene with windows of different pictures."""
    labels = scene(random, side).labels
    grey = random.random() < 0.6
    image = np.zeros((3, side, side), np.float32)
    alike = random.random() < 0.4  # same mean and contrast: texture must tell
    for phase in range(int(labels.max()) + 1):
        part = window(random, pictures, side)
        if grey:
            part = np.broadcast_to(part[random.integers(3)], part.shape)
        if alike:
            part = 0.5 + 0.15 * (part - part.mean()) / max(float(part.std()), 0.02)
        image = np.where(labels == phase, part, image)
    if random.random() < 0.5:
        image = ndimage.gaussian_filter(image, (0, 0.6, 0.6))
    return degraded(random, image, views), labels


def _denoise(
    random: Random, side: int, pictures: Sequence[np.ndarray], views: int
) -> tuple[list[np.ndarray], np.ndarray]:
    """Take the phases of a clean real picture from its own grey levels, and show it through a worse instrument."""
    clean = window(random, pictures, side)
    levels = ndimage.gaussian_filter(clean[random.integers(3)], random.uniform(0.6, 4))
    if random.random() < 0.3:  # texture energy instead of brightness
        detail = (clean.mean(0) - ndimage.gaussian_filter(clean.mean(0), 2)) ** 2
        levels = ndimage.gaussian_filter(detail, random.uniform(2, 6))
    elif random.random() < 0.5:  # brightness against the surroundings
        levels = levels - ndimage.gaussian_filter(levels, random.uniform(8, 30))
    cuts = np.quantile(levels, np.sort(random.uniform(0.1, 0.9, random.integers(1, 3))))
    labels = np.searchsorted(cuts, levels.ravel()).reshape(side, side).astype(np.uint8)
    return degraded(random, clean + 0.02 * field(random, side, 2), views), labels
