"""Two remedies against features that change when an image is turned: symmetric patch kernels, and averaging poses.

A picture can be turned by quarters and mirrored without interpolation: eight poses, the group D4. A model whose
positions are isotropic (no encoding, or `alibi2d`) still answers differently when its patch kernel does, and
`symmetrize` takes that part away. `D4Features` makes any feature function exact, for eight times the work.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from timm.layers import PatchEmbed
from timm.models import Eva, NaFlexVit, VisionTransformer
from timm.models.naflexvit import NaFlexEmbeds
from torch import Tensor, nn

from vispe.errors import OptionError, ShapeError, UnsupportedHost
from vispe.symmetry.d4 import D4, fit_to_patches

M = TypeVar("M", bound=nn.Module)
Features = Callable[[Tensor], Tensor]
Fit = Literal["auto", "crop", "pad"]

_logger = logging.getLogger(__name__)
_TRANSFORMERS = ("patch_embed.proj", "patch_embed", "patch_conv", "embeddings.patch_embedding")
_TRANSFORMERS += (
    "embeddings.patch_embeddings.projection",
    "embeddings.patch_embeddings",
    "embeddings.patch_embed",
)


@dataclass(frozen=True)
class PatchKernel:
    """The patch projection of a model.

    Attributes:
        path: name of its weight in the model.
        side: side of its square patches, in pixels.
        asymmetry: share of the energy of the weights (sum of squares) that is not common to the eight poses,
            which is what `symmetrize` removes: 0 for a symmetric kernel, 1 for one that averages to nothing.
    """

    path: str
    side: int
    asymmetry: float


@torch.no_grad()
def symmetrize(model: M) -> M:
    """Average the patch projection of a model over the eight poses of a square, in place.

    The weights change, and with them every output, so a trained model should be trained or distilled again; keep a
    copy of the state dict where the old weights are still needed. Weights keep their names, dtype and device, and
    afterwards they equal their turned and mirrored selves bit for bit. Features then turn with the image if positions
    are isotropic too (no encoding, or a bias that treats rows and columns alike, such as `alibi2d`) and the image is
    cut into whole patches. What is averaged is logged (INFO); `patch_kernel` measures it, before and after.

    Args:
        model: a `VisionTransformer`, `Eva` or `NaFlexVit` of timm, converted or not; a model of open_clip with a
            transformer as image tower, or the tower; or a model of transformers with one patch projection by
            convolution. Vision models that merge neighbouring patches later (Qwen) are not made exact by this alone.

    Returns:
        the same model.

    >>> model = symmetrize(VisionTransformer(img_size=32, patch_size=8, embed_dim=12, depth=1, num_heads=2))
    >>> patch_kernel(model).asymmetry < 1e-12
    True

    Raises:
        UnsupportedHost: no patch projection was found, or several, or one by overlapping or not by square patches.
        ShapeError: patches are not square.
    """
    path, tensors = _projection(model)
    before = patch_kernel(model).asymmetry
    for tensor, layout in tensors:
        tensor.copy_(layout.flat(_average(layout.square(tensor))))
    _logger.info("%s.weight was averaged over 8 poses; %.3g of its energy is gone.", path, before)
    return model


@torch.no_grad()
def patch_kernel(model: nn.Module) -> PatchKernel:
    """Return where the patch projection of a model is, and how far it is from symmetric.

    Args:
        model: one that `symmetrize` takes; it is not changed.

    Raises:
        UnsupportedHost, ShapeError: `symmetrize` would refuse the model.
    """
    path, tensors = _projection(model)
    tensor, layout = tensors[0]
    kernel = layout.square(tensor.detach()).double()
    energy = float(kernel.square().sum())
    lost = float((kernel - _average(kernel)).square().sum())
    return PatchKernel(f"{path}.weight", kernel.shape[-1], lost / energy if energy else 0.0)


def d4_average(
    features: Features, images: Tensor, *, patch: int | None = None, fit: Fit | None = None
) -> Tensor:
    """Return the mean of the features over the eight poses, each moved back to lie on the image.

    The result turns exactly with the image, whatever the features do. One pose is computed after another: without
    gradients two maps are held, the sum and that of a pose, and a copy while it is moved back. Half precision is summed
    in float32.

    Args:
        features: gives maps (b, c, h, w) of images; it must take images of both orientations, and do the same to the
            same image (evaluation mode).
        images: (b, 3, H, W).
        patch: side of the patches in pixels, by which sizes are checked; `features.patch` by default, and where that
            is missing too, `features` must treat any remainder alike on opposite sides by itself.
        fit: what happens to images that are no multiple of the patch: refused (None), or cropped or padded about
            their centre as `fit_to_patches` does; maps lie on the fitted image.

    Raises:
        ShapeError: the images have a remainder, or the maps do not have one cell for each patch in every pose.
        OptionError: `fit` without a patch, or a remainder that it cannot treat alike on opposite sides.

    >>> columns = lambda images: images * torch.arange(4.0)
    >>> d4_average(columns, torch.ones(1, 1, 4, 4))[0, 0, 0]
    tensor([1.5000, 1.5000, 1.5000, 1.5000])
    """
    if images.ndim != 4:
        raise ShapeError(f"Images (b, c, H, W) are needed, got {tuple(images.shape)}.")
    patch = _patch_of(features, patch)
    if fit is not None and patch is None:
        raise OptionError(f"fit={fit!r} needs the side of the patches; give patch.")
    if fit is not None:
        images, _ = fit_to_patches(images, patch, fit)
    size = images.shape[-2:]
    if patch is not None and (size[0] % patch or size[1] % patch):
        raise ShapeError(
            f"Images of {tuple(size)} pixels are no multiple of patches of {patch}; say fit='auto', or cut them alike "
            "on opposite sides."
        )
    cells = None if patch is None else (size[0] // patch, size[1] // patch)
    total, dtype = None, images.dtype
    for pose in D4:
        maps = features(pose.apply(images))
        if maps.ndim != 4:
            raise ShapeError(f"Features must be maps (b, c, h, w), got {tuple(maps.shape)}.")
        dtype, maps = maps.dtype, pose.undo(maps)
        cells = cells or tuple(maps.shape[-2:])
        if tuple(maps.shape[-2:]) != cells:
            raise ShapeError(
                f"The features of images of {tuple(size)} pixels have {tuple(maps.shape[-2:])} cells in the pose "
                f"{pose.name}, where {cells} were expected; give features with one cell for each patch that take "
                "images of any orientation, and the side of the patches."
            )
        share = maps.float() if maps.dtype in (torch.float16, torch.bfloat16) else maps
        total = share / len(D4) if total is None else total.add_(share, alpha=1 / len(D4))
        del maps, share  # before the next pose is computed
    return total.to(dtype)


class D4Features(nn.Module):
    """Features averaged over the eight poses of a square, which turn exactly with the image.

    Args:
        features: gives maps (b, c, h, w) of images; if it is a module, its parameters are those of this one.
        patch: side of the patches in pixels; `features.patch` by default.
        fit: what happens to images that are no multiple of the patch.

    >>> D4Features(torch.nn.AvgPool2d(8), patch=8, fit="crop")(torch.ones(1, 3, 18, 18)).shape
    torch.Size([1, 3, 2, 2])
    """

    def __init__(self, features: Features, patch: int | None = None, fit: Fit | None = None) -> None:
        super().__init__()
        self.features, self.patch, self.fit = features, _patch_of(features, patch), fit

    def forward(self, images: Tensor) -> Tensor:
        """Return maps (b, c, h, w) of images (b, 3, H, W)."""
        return d4_average(self.features, images, patch=self.patch, fit=self.fit)


def _patch_of(features: Features, patch: int | None) -> int | None:
    """Return the side of patches that was given, or that a feature function knows by itself."""
    side = getattr(features, "patch", None) if patch is None else patch
    if side is not None and (isinstance(side, bool) or not isinstance(side, int) or side < 1):
        raise OptionError(f"patch must be a whole number of pixels, at least 1, got {side!r}.")
    return side


@dataclass(frozen=True)
class _Layout:
    """How the last axes of a weight hold a patch: (..., side, side), or flattened with channels last or first."""

    side: int = 0
    flattened: bool = False
    channels_last: bool = False

    def square(self, x: Tensor) -> Tensor:
        if not self.flattened:
            return x
        if self.channels_last:
            return x.unflatten(-1, (self.side, self.side, -1)).movedim(-1, -3)
        return x.unflatten(-1, (-1, self.side, self.side))

    def flat(self, x: Tensor) -> Tensor:
        if not self.flattened:
            return x
        return (x.movedim(-3, -1) if self.channels_last else x).flatten(-3)


def _average(kernel: Tensor) -> Tensor:
    """Return the mean over the eight poses; sums of two at a time make it symmetric bit for bit."""
    mean = kernel if kernel.dtype == torch.float64 else kernel.float()
    for other in (lambda x: x.flip(-1), lambda x: x.flip(-2), lambda x: x.mT):
        mean = (mean + other(mean)) / 2
    return mean.to(kernel.dtype)


def _projection(model: nn.Module) -> tuple[str, list[tuple[Tensor, _Layout]]]:
    """Return path of the patch projection, and what of it holds a patch; all checks are made here."""
    places = dict(_projections(model))
    if len(places) != 1:
        n = f"{len(places)} of them ({', '.join(places)})" if places else "none that vispe knows"
        raise UnsupportedHost(
            f"The patch projection of a {type(model).__name__} was asked for, and there is {n}; give a vision tower "
            "alone, of timm (VisionTransformer, Eva, NaFlexVit), open_clip or transformers, or use D4Features."
        )
    ((path, (owner, projection)),) = places.items()
    if not projection.weight.is_floating_point() or projection.weight.is_meta:
        kind = "meta" if projection.weight.is_meta else str(projection.weight.dtype)
        raise UnsupportedHost(f"{path} has {kind} weights, which cannot be averaged; load plain weights.")
    if isinstance(projection, nn.Linear):
        h, w = owner.patch_size
        _check_square(path, h, w)
        layout = _Layout(h, True, owner.channels_last)
        norm = owner.norm_input
        affine = [] if norm is None else [p for p in norm.parameters(recurse=False) if p.ndim == 1]
        return path, [(projection.weight, layout), *((p, layout) for p in affine)]
    h, w = projection.kernel_size[-2:]
    _check_square(path, h, w)
    plain = projection.padding in ("valid", (0,) * len(projection.kernel_size))
    if projection.stride != projection.kernel_size or not plain or set(projection.dilation) != {1}:
        raise UnsupportedHost(
            f"{path} has kernel {projection.kernel_size}, stride {projection.stride}, padding {projection.padding} and "
            f"dilation {projection.dilation}; patches that lie side by side are needed. Use D4Features instead."
        )
    return path, [(projection.weight, _Layout())]


def _check_square(path: str, h: int, w: int) -> None:
    if h != w:
        raise ShapeError(
            f"{path} has patches of {h} x {w} pixels, which do not fit themselves when turned; use square ones."
        )


def _projections(model: nn.Module) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield path, owner and module of every patch projection of a transformer."""
    for name, host in model.named_modules():
        for path in _paths(host):
            try:
                owner, module = host.get_submodule(path.rpartition(".")[0]), host.get_submodule(path)
            except AttributeError:
                continue
            if isinstance(module, nn.Conv2d | nn.Conv3d) or isinstance(owner, NaFlexEmbeds):
                yield f"{name}.{path}" if name else path, (owner, module)


def _paths(host: nn.Module) -> tuple[str, ...]:
    """Return where a patch projection may be below a module."""
    if isinstance(host, NaFlexVit):
        return ("embeds.proj",)
    if isinstance(host, VisionTransformer | Eva):
        return ("patch_embed.proj",) if isinstance(host.patch_embed, PatchEmbed) else ()
    classes = {(c.__module__, c.__name__) for c in type(host).__mro__}
    if ("open_clip.transformer", "VisionTransformer") in classes:
        return ("conv1",)
    return _TRANSFORMERS if any(module.startswith("transformers.models.") for module, _ in classes) else ()
