"""Synthetic micrographs with exact classes, rendered at any angle, shift and scale without interpolation.

>>> image, classes = random_field(0, wavelength=24).render((224, 224), angle=30, mirror=True)

Isotropic ones show no "up", so whatever changes when they are turned is due to the model; `layered` and stretched
ones do, as negative controls.
"""

from vispe.evaluate.textures.base import Texture
from vispe.evaluate.textures.discs import DiscPacking, disc_packing
from vispe.evaluate.textures.fields import Layered, RandomField, layered, random_field
from vispe.evaluate.textures.grains import Voronoi, voronoi

__all__ = [
    "DiscPacking",
    "Layered",
    "RandomField",
    "Texture",
    "Voronoi",
    "disc_packing",
    "layered",
    "random_field",
    "voronoi",
]
