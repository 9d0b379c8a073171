"""Symmetrisation of models: D4-symmetric patch kernels, and features averaged over the eight poses.

Rotations by 90 degrees and flips are exact on pixels: eight poses, the group D4. A model with isotropic positions (no
encoding, or `alibi2d`) is still not equivariant if its patch kernel is not symmetric; `symmetrize` removes this cause.
`D4Features` makes any feature function exactly equivariant, at eight times the cost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from vispe.errors import OptionError, ShapeError, counted
from vispe.images.symmetry.d4 import D4, fit_to_patches
from vispe.images.symmetry.patch_projection import projection_weights

M = TypeVar("M", bound=nn.Module)
Features = Callable[[Tensor], Tensor]
Fit = Literal["auto", "crop", "pad"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PatchKernel:
    """The patch projection of a model.

    Attributes:
        path: name of its weight in the model.
        side: side of its square patches, in pixels.
        asymmetry: fraction of the energy of the weights (sum of squares) that `symmetrize` removes: 0 for a symmetric
            kernel, 1 for one whose average over the eight poses is 0.

    Example:
        >>> import timm
        >>> kernel = patch_kernel(timm.create_model("test_vit"))
        >>> kernel.path, kernel.side, 0 < kernel.asymmetry < 1
        ('patch_embed.proj.weight', 16, True)
    """

    path: str
    side: int
    asymmetry: float


@torch.no_grad()
def symmetrize(model: M) -> M:
    """Average the patch projection of a model over the eight poses of D4, in place.

    This changes the weights and thus all outputs, so a trained model should be fine-tuned or distilled afterwards; keep
    a copy of the state dict if the original weights are needed. Names, dtype and device of the weights do not change,
    and afterwards the weights are bitwise invariant under D4. Features are then equivariant if positions are isotropic
    as well (no encoding, or a bias that treats rows and columns equally, such as `alibi2d`) and the image consists of
    whole patches. The change is logged (INFO); `patch_kernel` measures the asymmetry before and after.

    Args:
        model: a `VisionTransformer`, `Eva` or `NaFlexVit` of timm, converted or not; an open_clip model with a
            transformer as image tower, or the tower; or a transformers model with one convolutional patch projection.
            For vision models that merge neighbouring patches later (Qwen) this alone is not sufficient.

    Returns:
        The same model.

    Example:
        >>> from timm.models import VisionTransformer
        >>> model = symmetrize(VisionTransformer(img_size=32, patch_size=8, embed_dim=12, depth=1, num_heads=2))
        >>> patch_kernel(model).asymmetry < 1e-12
        True

    Raises:
        UnsupportedHost: the model has no patch projection, several, or one with overlapping patches.
        ShapeError: patches are not square.
    """
    path, tensors = projection_weights(model)
    before = patch_kernel(model).asymmetry
    for tensor, layout in tensors:
        tensor.copy_(layout.flat(_average(layout.square(tensor))))
    _logger.info("%s.weight was averaged over 8 poses; %.3g of its energy was removed.", path, before)
    return model


@torch.no_grad()
def patch_kernel(model: nn.Module) -> PatchKernel:
    """Return the path, patch size and asymmetry of the patch projection of a model.

    Args:
        model: a model that `symmetrize` supports; it is not changed.

    Raises:
        UnsupportedHost: the model has no patch projection, several, or one with overlapping patches.
        ShapeError: patches are not square.

    Example:
        >>> import timm
        >>> model = timm.create_model("test_vit")
        >>> patch_kernel(symmetrize(model)).asymmetry < 1e-6
        True
    """
    path, tensors = projection_weights(model)
    tensor, layout = tensors[0]
    kernel = layout.square(tensor.detach()).double()
    # fraction of the squared norm that the average removes, in float64
    energy = float(kernel.square().sum())
    removed = float((kernel - _average(kernel)).square().sum())
    return PatchKernel(f"{path}.weight", kernel.shape[-1], removed / energy if energy else 0.0)


def d4_average(
    features: Features, images: Tensor, *, patch_size: int | None = None, fit: Fit | None = None
) -> Tensor:
    """Return the mean of the features over the eight poses of D4, each transformed back to the original pose.

    The result is exactly equivariant under D4 for any features. Poses are computed one after the other: without
    gradients the memory is that of two maps, the sum and that of one pose, plus a copy. Half precision is summed in
    float32.

    Args:
        features: function of images that returns maps (b, c, h, w); it must support both orientations and be
            deterministic (evaluation mode).
        images: (b, 3, H, W).
        patch_size: patch size in pixels, to check image sizes; `features.patch_size` by default. If this does not
            exist either, `features` must treat any remainder symmetrically.
        fit: treatment of images whose sides are not multiples of the patch size: an error (None), or cropping or
            padding about their centre as in `fit_to_patches`; the maps then belong to the fitted image.

    Raises:
        ShapeError: the sides are not multiples of the patch size, or the maps do not have one cell per patch in every
            pose.
        OptionError: `fit` without a patch size, or a remainder that cannot be treated symmetrically.

    Example:
        >>> columns = lambda images: images * torch.arange(4.0)
        >>> d4_average(columns, torch.ones(1, 1, 4, 4))[0, 0, 0]
        tensor([1.5000, 1.5000, 1.5000, 1.5000])
    """
    if images.ndim != 4:
        raise ShapeError(f"d4_average needs images (b, c, H, W), got {tuple(images.shape)}.")
    patch_size = _patch_of(features, patch_size)
    if fit is not None and patch_size is None:
        raise OptionError(
            f"d4_average: fit={fit!r} needs the patch size, got patch_size=None. Pass patch_size."
        )
    if fit is not None:
        images, _ = fit_to_patches(images, patch_size, fit)
    size = images.shape[-2:]
    if patch_size is not None and (size[0] % patch_size or size[1] % patch_size):
        raise ShapeError(
            f"Image sides must be multiples of patch_size={patch_size} px, got {tuple(size)}. Use fit='auto', or crop "
            "them symmetrically."
        )
    # cells per side of the maps, if the patch size is known
    cells = None if patch_size is None else (size[0] // patch_size, size[1] // patch_size)
    total, dtype = None, images.dtype
    for pose in D4:
        maps = features(pose.apply(images))
        if maps.ndim != 4:
            raise ShapeError(f"Features must be maps (b, c, h, w), got {tuple(maps.shape)}.")
        dtype, maps = maps.dtype, pose.undo(maps)
        # without a patch size the first pose defines the number of cells
        cells = cells or tuple(maps.shape[-2:])
        if tuple(maps.shape[-2:]) != cells:
            raise ShapeError(
                f"Features of images of {tuple(size)} px must have {counted(cells, 'cell')} in pose {pose.name}, got "
                f"{tuple(maps.shape[-2:])}. Use features with one cell per patch that support any orientation, and "
                "pass patch."
            )
        # accumulate in float32
        part = maps.float() if maps.dtype in (torch.float16, torch.bfloat16) else maps
        total = part / len(D4) if total is None else total.add_(part, alpha=1 / len(D4))
        # free memory before the next pose
        del maps, part
    return total.to(dtype)


class D4Features(nn.Module):
    """Features averaged over the eight poses of D4, exactly equivariant.

    Args:
        features: function of images that returns maps (b, c, h, w); if it is a module, it is registered as a submodule.
        patch_size: patch size in pixels; `features.patch_size` by default.
        fit: treatment of images whose sides are not multiples of the patch size, see `d4_average`.

    Raises:
        OptionError: `patch_size` is not a positive integer.

    Example:
        >>> D4Features(torch.nn.AvgPool2d(8), patch_size=8, fit="crop")(torch.ones(1, 3, 18, 18)).shape
        torch.Size([1, 3, 2, 2])
    """

    def __init__(self, features: Features, patch_size: int | None = None, fit: Fit | None = None) -> None:
        super().__init__()
        self.features, self.patch_size, self.fit = features, _patch_of(features, patch_size), fit

    def forward(self, images: Tensor) -> Tensor:
        """Return maps (b, c, h, w) of images (b, 3, H, W)."""
        return d4_average(self.features, images, patch_size=self.patch_size, fit=self.fit)


def _patch_of(features: Features, patch_size: int | None) -> int | None:
    """Return `patch_size`, or `features.patch_size` if that is None, or None."""
    side = getattr(features, "patch_size", None) if patch_size is None else patch_size
    if side is not None and (isinstance(side, bool) or not isinstance(side, int) or side < 1):
        raise OptionError(f"patch_size must be a positive integer (pixels), got {side!r}.")
    return side


def _average(kernel: Tensor) -> Tensor:
    """Return the mean over the eight poses."""
    # averaging pairs makes the result bitwise symmetric, since a + b == b + a
    mean = kernel if kernel.dtype == torch.float64 else kernel.float()
    for other in (lambda x: x.flip(-1), lambda x: x.flip(-2), lambda x: x.mT):
        mean = (mean + other(mean)) / 2
    return mean.to(kernel.dtype)
