"""Symmetries of images: the eight poses of D4, rotations by any angle, translations, and symmetrisation of models.

>>> from vispe.images.symmetry import D4
>>> len(D4)
8
"""

from vispe._lazy import lazy_exports

__all__ = [
    "D4",
    "IDENTITY",
    "Canvas",
    "D4Features",
    "Element",
    "PatchKernel",
    "Placement",
    "common_part",
    "d4_average",
    "element",
    "fit_to_patches",
    "patch_kernel",
    "rotate",
    "symmetrize",
]

_REMEDIES = ("D4Features", "PatchKernel", "d4_average", "patch_kernel", "symmetrize")
_PLACES = ("Placement", "common_part")
_D4 = ("D4", "IDENTITY", "Element", "element", "fit_to_patches")
__getattr__, __dir__ = lazy_exports(
    __name__,
    dict.fromkeys(_REMEDIES, "vispe.images.symmetry.symmetrization")
    | dict.fromkeys(_D4, "vispe.images.symmetry.d4")
    | dict.fromkeys(_PLACES, "vispe.images.symmetry.translations")
    | dict.fromkeys(("Canvas", "rotate"), "vispe.images.symmetry.warp"),
)
