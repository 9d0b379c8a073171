"""Geometry of synthetic microstructures: exact masks of phases and objects, without grey levels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import ndimage
from scipy.spatial import cKDTree

Random = np.random.Generator


@dataclass(frozen=True)
class Scene:
    """Microstructure.

    Attributes:
        kind: name of the family.
        labels: (side, side) uint8, phase of each pixel, 0..K-1.
        objects: (side, side) int32, index of the particle, grain or sphere; 0: none.
        relief: (side, side) float32 in [0, 1], surface height; 0 for a polished section.
    """

    kind: str
    labels: np.ndarray
    objects: np.ndarray
    relief: np.ndarray


def scene(random: Random, side: int) -> Scene:
    """Return a scene of a random family, (side, side) pixels, with at least two phases."""
    names = list(FAMILIES)
    weights = np.array([FAMILIES[name][0] for name in names], float)
    while True:
        name = names[random.choice(len(names), p=weights / weights.sum())]
        labels, objects, relief = FAMILIES[name][1](random, side)
        present = np.unique(labels)
        if len(present) > 1:
            ranks = np.zeros(256, np.uint8)
            ranks[present] = np.arange(len(present))
            return Scene(name, ranks[labels], objects.astype(np.int32), relief.astype(np.float32))


def field(random: Random, side: int, wavelength: float, stretch: float = 1.0) -> np.ndarray:
    """Return a Gaussian random field with mean 0 and standard deviation 1.

    Args:
        random: random generator.
        side: size in pixels.
        wavelength: characteristic wavelength in pixels.
        stretch: anisotropy, in a random direction.
    """
    fy, fx = np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)[None]
    angle = random.uniform(0, np.pi)
    along, across = fx * np.cos(angle) + fy * np.sin(angle), fy * np.cos(angle) - fx * np.sin(angle)
    f = np.hypot(along * stretch, across) * wavelength
    shape = f**2 * np.exp(-(f**2)) if random.random() < 0.5 else np.exp(-(f**2) / 2)
    noise = np.fft.rfft2(random.standard_normal((side, side), np.float32))
    out = np.fft.irfft2(noise * shape, s=(side, side)).astype(np.float32)
    return (out - out.mean()) / max(float(out.std()), 1e-6)


def _log(random: Random, low: float, high: float) -> float:
    return float(np.exp(random.uniform(np.log(low), np.log(high))))


def _flat(side: int) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((side, side), np.int32), np.zeros((side, side), np.float32)


def _threshold(values: np.ndarray, fraction: float) -> np.ndarray:
    return values > np.quantile(values[::4, ::4], 1 - fraction)


def _stamp(
    random: Random, side: int, radius: float, spread: float, count: int, overlap: float, power: float = 2.0
) -> tuple[np.ndarray, np.ndarray]:
    """Draw superellipses at random positions -> object indices (0: none) and relief of domes."""
    objects, relief = _flat(side)
    common_angle = random.uniform(0, np.pi) if random.random() < 0.5 else None
    aspect = 1 + random.exponential(0.3)
    for number in range(1, count + 1):
        r = radius * float(np.exp(spread * random.standard_normal()))
        r = min(max(r, 1.0), side / 3)
        a, b = r * np.sqrt(aspect), r / np.sqrt(aspect)
        angle = random.uniform(0, np.pi) if common_angle is None else common_angle
        cy, cx = random.uniform(-r / 2, side + r / 2, 2)
        reach = int(a * 1.5) + 2
        y0, y1, x0, x1 = (
            max(int(cy) - reach, 0),
            min(int(cy) + reach, side),
            max(int(cx) - reach, 0),
            min(int(cx) + reach, side),
        )
        if y1 <= y0 or x1 <= x0:
            continue
        y, x = np.arange(y0, y1)[:, None] - cy, np.arange(x0, x1)[None] - cx
        u, v = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
        d = np.abs(u / a) ** power + np.abs(v / b) ** power
        inside = d < 1
        region = objects[y0:y1, x0:x1]
        occupied = inside & (region > 0)
        if occupied.sum() > overlap * max(inside.sum(), 1):
            continue
        free = inside & ((region == 0) | (overlap > 0.3))
        region[free] = number
        height = np.sqrt(np.clip(1 - d, 0, 1)).astype(np.float32)
        relief[y0:y1, x0:x1][free] = height[free]
    return objects, relief


def _spinodal(random: Random, side: int):
    objects, relief = _flat(side)
    stretch = random.choice([1.0, 1.0, random.uniform(1.5, 5)])
    values = field(random, side, _log(random, 8, 80), stretch)
    labels = _threshold(values, random.uniform(0.15, 0.85)).astype(np.uint8)
    if random.random() < 0.3:
        labels[_threshold(field(random, side, _log(random, 8, 60)), random.uniform(0.05, 0.3))] = 2
    return labels, objects, relief


def _two_sizes(random: Random, side: int):
    """Large and small precipitates with the same appearance, which differ only in size and surroundings."""
    big = _log(random, 10, 40)
    if random.random() < 0.5:
        power = random.choice([2.0, 3.0, 5.0])
        large, _ = _stamp(random, side, big, 0.3, int(2.5 * (side / big) ** 2 / 3.14), 0.02, power)
    else:
        large, _ = ndimage.label(_threshold(field(random, side, 3 * big), random.uniform(0.3, 0.6)))
    gap = random.integers(1, 4)
    near = ndimage.binary_dilation(large > 0, iterations=int(gap))
    small_radius = random.uniform(1.2, max(big / 5, 2.0))
    density = random.uniform(0.3, 3)
    small, _ = _stamp(random, side, small_radius, 0.2, int(density * (side / small_radius) ** 2 / 25), 0.0)
    small[near] = 0
    labels = np.where(large > 0, 1, np.where(small > 0, 2, 0)).astype(np.uint8)
    return labels, np.where(large > 0, large, small + large.max()), np.zeros_like(labels, np.float32)


def _particles(random: Random, side: int):
    radius = _log(random, 3, 30)
    count = int(random.uniform(0.1, 1.2) * (side / radius) ** 2 / 3.14)
    power = random.choice([2.0, 2.0, 3.0])
    objects, _ = _stamp(random, side, radius, random.uniform(0, 0.5), min(count, 900), 0.05, power)
    rough = random.uniform(0, radius / 3)
    if rough > 0.7:
        dy, dx = (rough * field(random, side, radius * 1.5) for _ in range(2))
        y, x = np.mgrid[:side, :side]
        objects = objects[
            np.clip(np.rint(y + dy), 0, side - 1).astype(int),
            np.clip(np.rint(x + dx), 0, side - 1).astype(int),
        ]
    labels = (objects > 0).astype(np.uint8)
    if random.random() < 0.25:  # a second phase of the same shape
        labels[(objects % 5 < 2) & (objects > 0)] = 2
    return labels, objects, np.zeros((side, side), np.float32)


def _powder(random: Random, side: int):
    """Overlapping spheres in top view."""
    radius = _log(random, 8, 50)
    count = int(random.uniform(0.5, 3) * (side / radius) ** 2 / 3.14)
    objects, relief = _stamp(random, side, radius, random.uniform(0.2, 0.6), min(count, 600), 0.6)
    return (objects > 0).astype(np.uint8), objects, relief


def _nuclei(random: Random, side: int):
    radius = _log(random, 5, 26)
    count = int(random.uniform(0.05, 0.8) * (side / radius) ** 2 / 3.14)
    objects, relief = _stamp(random, side, radius, 0.25, max(count, 3), 0.15)
    labels = (objects > 0).astype(np.uint8)
    if random.random() < 0.4:  # cells around nuclei
        reach = int(random.uniform(0.5, 1.5) * radius)
        cells = ndimage.binary_dilation(labels > 0, iterations=max(reach, 1))
        labels = np.where(labels > 0, 2, cells).astype(np.uint8)
    return labels, objects, relief * random.uniform(0, 0.5)


def _grains(random: Random, side: int):
    size = _log(random, 8, 70)
    seeds = random.uniform(-size, side + size, (int(((side + 2 * size) / size) ** 2) + 4, 2))
    y, x = np.mgrid[:side, :side]
    warp = random.uniform(0, size / 4)
    positions = np.stack([y, x], -1).astype(np.float32)
    positions += warp * np.stack([field(random, side, size) for _ in range(2)], -1)
    distances, nearest = cKDTree(seeds).query(positions.reshape(-1, 2), k=2, workers=1)
    numbers = nearest[:, 0].reshape(side, side)
    edge = (distances[:, 1] - distances[:, 0]).reshape(side, side) < random.uniform(1, 5)
    kinds = random.integers(0, random.integers(1, 4), len(seeds))
    labels = kinds[numbers].astype(np.uint8)
    if labels.max() == 0 or random.random() < 0.5:
        labels = np.where(edge, labels.max() + 1, labels).astype(np.uint8)
    return labels, numbers + 1, np.zeros((side, side), np.float32)


def _curves(random: Random, side: int, count: int, width: float, wander: float) -> np.ndarray:
    """Draw random curves, `width` pixels wide -> (side, side) bool.

    Args:
        random: random generator.
        side: size in pixels.
        count: number of curves.
        width: in pixels.
        wander: standard deviation of the change of direction per pixel, in radians.
    """
    background = np.ones((side, side), bool)
    for _ in range(count):
        n = int(random.uniform(0.2, 1.5) * side)
        angle = np.cumsum(random.standard_normal(n) * wander) + random.uniform(0, 2 * np.pi)
        y = np.cumsum(np.sin(angle)) + random.uniform(0, side)
        x = np.cumsum(np.cos(angle)) + random.uniform(0, side)
        inside = (y >= 0) & (y < side) & (x >= 0) & (x < side)
        background[y[inside].astype(int), x[inside].astype(int)] = False
    return ndimage.distance_transform_edt(background) < width / 2 + 0.3


def _coating(random: Random, side: int):
    """Layers with rough interfaces: thin cracks in one of them, pores with the same brightness in the others."""
    objects, relief = _flat(side)
    bend = field(random, side, _log(random, 20, 200)) * random.uniform(0.5, 8)
    y, x = np.mgrid[:side, :side]
    angle = random.normal(0, 0.15)
    depth = y * np.cos(angle) + x * np.sin(angle) + bend
    interfaces = np.sort(random.uniform(0, side, random.integers(2, 5)))
    layer = np.searchsorted(interfaces, depth.ravel()).reshape(side, side)
    oxide = random.integers(0, layer.max() + 1)
    labels = (layer == oxide).astype(np.uint8)
    cracks = _curves(random, side, random.integers(2, 14), random.uniform(1, 4), random.uniform(0.02, 0.3))
    pores = _threshold(field(random, side, _log(random, 6, 30)), random.uniform(0.005, 0.06))
    labels[cracks & (layer == oxide)] = 2
    objects[:] = layer + 1
    objects[(labels == 2) | (pores & (layer != oxide))] = 90
    return labels, objects, relief


def _network(random: Random, side: int):
    """Fibres, hydrides, membranes or cracks on a uniform background."""
    objects, relief = _flat(side)
    wander = _log(random, 0.005, 0.3)
    labels = _curves(random, side, random.integers(4, 50), random.uniform(1, 8), wander).astype(np.uint8)
    return labels, objects, relief


def _lamellae(random: Random, side: int):
    """Lamellar colonies and uniform regions (pearlite and ferrite); phases are regions or lamellae."""
    size = _log(random, 30, 120)
    seeds = random.uniform(0, side, (max(int((side / size) ** 2), 2), 2))
    y, x = np.mgrid[:side, :side].astype(np.float32)
    colony = cKDTree(seeds).query(np.stack([y, x], -1).reshape(-1, 2))[1].reshape(side, side)
    angle = random.uniform(0, np.pi, len(seeds))[colony]
    period = _log(random, 4, 16)
    wave = np.sin(
        2 * np.pi * (x * np.cos(angle) + y * np.sin(angle)) / period + 0.6 * field(random, side, 30)
    )
    stripes = wave > random.uniform(-0.6, 0.6)
    plain = random.random(len(seeds))[colony] < random.uniform(0.2, 0.6)
    if random.random() < 0.5:
        # the colony is the phase, the lamellae its texture
        objects = np.where(plain, colony + 1, 200 + stripes)
        return plain.astype(np.uint8), objects, np.zeros((side, side), np.float32)
    labels = np.where(plain, 0, stripes).astype(np.uint8)
    return labels, np.zeros((side, side), np.int32), np.zeros((side, side), np.float32)


def _regions(random: Random, side: int):
    """Large regions with curved boundaries, for textures."""
    objects, relief = _flat(side)
    count = int(random.integers(2, 5))
    fields = np.stack([field(random, side, _log(random, 60, 250)) for _ in range(count)])
    return fields.argmax(0).astype(np.uint8), objects, relief


FAMILIES: dict[str, tuple[float, Callable]] = {
    "spinodal": (1.0, _spinodal),
    "two_sizes": (1.6, _two_sizes),
    "particles": (1.4, _particles),
    "powder": (1.2, _powder),
    "nuclei": (1.4, _nuclei),
    "grains": (1.0, _grains),
    "coating": (1.4, _coating),
    "network": (0.8, _network),
    "lamellae": (0.6, _lamellae),
    "regions": (1.0, _regions),
}
"""Families of scenes: relative frequency and generating function."""
