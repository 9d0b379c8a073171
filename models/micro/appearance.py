"""Rendering of scenes: grey levels, textures, relief, and imaging artefacts of microscopes."""

from __future__ import annotations

import numpy as np
from scipy import ndimage

from models.micro.geometry import Random, Scene, field


def render(random: Random, scene: Scene, views: int = 1) -> list[np.ndarray]:
    """Render `views` images (3, side, side) float32 in [0, 1] of a scene.

    Two thirds of the scenes are grey. The views differ in focus, illumination, noise and contrast, as in an image
    series; the contrast between phases has the same sign in all of them.
    """
    side = scene.labels.shape[0]
    low_contrast = scene.kind == "regions" or random.random() < 0.12  # phases differ mainly in texture
    channels = 3 if random.random() < 0.33 else 1
    phases = int(scene.labels.max()) + 1
    colours = random.uniform(0, 1, (phases, channels))
    contrast = random.uniform(0.12, 0.8)
    levels = 0.5 + (colours - colours.mean(0)) * (0.08 if low_contrast else contrast)
    if not low_contrast and channels == 1 and phases > 2 and random.random() < 0.6:
        levels[2:] = levels[1] + random.normal(0, 0.03, (phases - 2, 1))  # brightness of phase 1
    image = levels[scene.labels]  # (side, side, channels)
    objects = scene.objects
    offsets = random.normal(0, 1, (int(objects.max()) + 1, 1)) * random.choice([0.0, 0.03, 0.08])
    image = image + offsets[objects]
    if scene.kind == "coating":  # cracks and pores have the same brightness
        dark = np.clip(levels.mean() - random.uniform(0.2, 0.5), -0.2, 1.2)
        image[objects == 90] = dark + random.normal(0, 0.02)
    if scene.kind == "lamellae" and objects.max() >= 200:
        image = image + random.uniform(-0.3, 0.3) * (objects == 201)[..., None]
    image = image.transpose(2, 0, 1).astype(np.float32)
    for phase in range(phases):  # texture of the phase
        amplitude = random.choice([0.0, 0.02, 0.05, 0.12]) * (2 if low_contrast else 1)
        if amplitude:
            wavelength = float(np.exp(random.uniform(np.log(2.5), np.log(30))))
            stretch = random.choice([1.0, 1.0, random.uniform(1, 4)])
            texture = amplitude * field(random, side, wavelength, stretch)
            image += np.where(scene.labels == phase, texture, 0)
    image += _edges(random, scene)
    if scene.relief.any():
        image += _shading(random, scene.relief)
    negative = random.random() < 0.5
    return [_normalize(_microscope(random, image, channels, negative)) for _ in range(views)]


def _edges(random: Random, scene: Scene) -> np.ndarray:
    """Return bright or dark rims on one or both sides of interfaces."""
    if random.random() < 0.45:
        return np.zeros((1, 1), np.float32)
    marks = (scene.labels > 0).astype(np.float32) if random.random() < 0.7 else (scene.objects % 7) / 6
    blurred = ndimage.gaussian_filter(marks.astype(np.float32), random.uniform(0.7, 4))
    rim = np.abs(marks - blurred)
    side = random.random()
    if side < 0.35:
        rim = rim * (scene.labels > 0)
    elif side < 0.6:
        rim = rim * (scene.labels == 0)
    return random.choice([-0.5, 0.4, 0.8]) * rim


def _shading(random: Random, relief: np.ndarray) -> np.ndarray:
    """Return shading of a relief (secondary electrons or oblique light): bright rims, tilt, shadows in gaps."""
    gy, gx = np.gradient(ndimage.gaussian_filter(relief, 1.0))
    angle = random.uniform(0, 2 * np.pi)
    tilt = gx * np.cos(angle) + gy * np.sin(angle)
    steep = np.clip(np.hypot(gx, gy), 0, 0.5)
    shadow = ndimage.gaussian_filter(relief, random.uniform(3, 15)) - relief
    return (
        random.uniform(0, 2) * steep
        + random.uniform(0, 2) * np.clip(tilt, -0.4, 0.4)
        - random.uniform(0, 0.3) * shadow
        + random.uniform(-0.2, 0.4) * relief
    )


def _microscope(random: Random, image: np.ndarray, channels: int, negative: bool) -> np.ndarray:
    """Add imaging artefacts: blur, illumination, curtaining, charging, noise, gamma; invert if `negative`."""
    side = image.shape[-1]
    blur = random.choice([0.0, random.uniform(0.4, 1.0), random.uniform(0.8, 2.0)])
    if blur:
        image = ndimage.gaussian_filter(image, (0, blur, blur))
    y, x = np.mgrid[:side, :side] / side - 0.5
    if random.random() < 0.5:
        angle = random.uniform(0, 2 * np.pi)
        image = image + random.uniform(0, 0.4) * (x * np.cos(angle) + y * np.sin(angle))
    if random.random() < 0.25:
        image = image * (1 - random.uniform(0, 1.2) * (x**2 + y**2))
    if random.random() < 0.15:
        image = image + random.uniform(0.02, 0.15) * field(random, side, side / 2)
    lines = random.random()
    if lines < 0.1:  # curtaining from ion milling
        columns = ndimage.gaussian_filter1d(random.standard_normal(side), random.uniform(0.7, 3))
        image = image + random.uniform(0.02, 0.08) * columns / columns.std()
    elif lines < 0.2:  # charging
        rows = ndimage.gaussian_filter1d(random.standard_normal(side), random.uniform(0.5, 8))
        image = image + random.uniform(0.01, 0.06) * (rows / rows.std())[:, None]
    noise = random.choice([0.005, random.uniform(0.01, 0.05), random.uniform(0.04, 0.16)])
    shot = np.sqrt(np.clip(image, 0.05, 1.5)) if random.random() < 0.5 else 1.0
    grain = random.standard_normal((channels, side, side), np.float32)
    if random.random() < 0.3:
        smooth = random.uniform(0.4, 0.9)
        grain = ndimage.gaussian_filter(grain, (0, smooth, smooth))
        grain /= grain.std()
    image = image + noise * shot * grain
    if random.random() < 0.4:
        image = np.clip((image + 0.3) / 1.6, 0, 1) ** random.uniform(0.6, 1.8)
    if negative:
        image = -image
    return np.broadcast_to(image, (3, side, side)).astype(np.float32)


def _normalize(image: np.ndarray, clip: float = 0.5) -> np.ndarray:
    """Rescale from the percentiles `clip` and 100 - `clip`, as `vispe segment` does."""
    low, high = np.percentile(image[:, ::2, ::2], (clip, 100 - clip))
    return np.clip((image - low) / max(float(high - low), 1e-6), 0, 1).astype(np.float32)


def degraded(random: Random, image: np.ndarray, views: int = 1) -> list[np.ndarray]:
    """Add imaging artefacts to a real image (3, side, side); see `render`."""
    grey = bool(np.ptp(image, axis=0).max() < 1e-3)
    image, channels = (image[:1], 1) if grey else (image, 3)
    negative = random.random() < 0.5
    return [_normalize(_microscope(random, image, channels, negative)) for _ in range(views)]
