"""Synthetic micrographs with exact classes, rendered at any angle, shift and scale without interpolation.

>>> image, classes = random_field(0, wavelength=24).render((224, 224), angle=30, mirror=True)

Isotropic textures have no preferred orientation, so any change under rotation is due to the model; `layered` and
stretched textures are negative controls.
"""

from vispe.images.textures.discs import DiscPacking, disc_packing
from vispe.images.textures.grains import Voronoi, voronoi
from vispe.images.textures.random_fields import Layered, RandomField, layered, random_field
from vispe.images.textures.texture import Texture

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
