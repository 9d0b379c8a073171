"""Symmetries of images: the eight poses of D4, rotations by any angle, translations, symmetrised models and features.

>>> from vispe.images.symmetry import D4
>>> len(D4)
8
"""

from vispe._lazy import lazy_exports

__all__ = [
    "D4",
    "IDENTITY",
    "AveragedFeatures",
    "Canvas",
    "D4Features",
    "Element",
    "PatchKernel",
    "Placement",
    "View",
    "ViewAverage",
    "common_part",
    "d4_average",
    "element",
    "fit_to_patches",
    "patch_kernel",
    "rotate",
    "symmetrize",
    "view_average",
]

_REMEDIES = ("D4Features", "PatchKernel", "d4_average", "patch_kernel", "symmetrize")
_PLACES = ("Placement", "common_part")
_D4 = ("D4", "IDENTITY", "Element", "element", "fit_to_patches")
_VIEWS = ("AveragedFeatures", "View", "ViewAverage", "view_average")
__getattr__, __dir__ = lazy_exports(
    __name__,
    dict.fromkeys(_REMEDIES, "vispe.images.symmetry.symmetrization")
    | dict.fromkeys(_D4, "vispe.images.symmetry.d4")
    | dict.fromkeys(_PLACES, "vispe.images.symmetry.translations")
    | dict.fromkeys(_VIEWS, "vispe.images.symmetry.view_averages")
    | dict.fromkeys(("Canvas", "rotate"), "vispe.images.symmetry.warp"),
)
