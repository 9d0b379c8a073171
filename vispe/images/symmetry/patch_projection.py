"""Patch projection of a model, as tensors with a square patch in their last axes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from timm.layers import PatchEmbed
from timm.models import Eva, NaFlexVit, VisionTransformer
from timm.models.naflexvit import NaFlexEmbeds
from torch import Tensor, nn

from vispe.errors import ShapeError, UnsupportedHost

_TRANSFORMERS = (
    *("patch_embed.proj", "patch_embed", "patch_conv", "embeddings.patch_embedding"),
    *("embeddings.patch_embeddings.projection", "embeddings.patch_embeddings", "embeddings.patch_embed"),
)
"""Paths of the patch projection in models of transformers."""


@dataclass(frozen=True)
class PatchLayout:
    """Layout of a patch in the last axes of a weight: (..., side, side), or flattened with channels last or first."""

    side: int = 0
    flattened: bool = False
    channels_last: bool = False

    def square(self, x: Tensor) -> Tensor:
        """Return a weight with a square patch in its last axes."""
        if not self.flattened:
            return x
        if self.channels_last:
            return x.unflatten(-1, (self.side, self.side, -1)).movedim(-1, -3)
        return x.unflatten(-1, (-1, self.side, self.side))

    def flat(self, x: Tensor) -> Tensor:
        """Invert `square`."""
        if not self.flattened:
            return x
        return (x.movedim(-3, -1) if self.channels_last else x).flatten(-3)


def projection_weights(model: nn.Module) -> tuple[str, list[tuple[Tensor, PatchLayout]]]:
    """Return the path of the patch projection, and its tensors with a patch in the last axes.

    Raises:
        UnsupportedHost: there is not exactly one supported patch projection.
        ShapeError: patches are not square.
    """
    projections = dict(_projections(model))
    if len(projections) != 1:
        n = f"{len(projections)} ({', '.join(projections)})" if projections else "none that is supported"
        raise UnsupportedHost(
            f"{type(model).__name__} must have exactly one patch projection, got {n}. Pass a vision tower of timm "
            "(VisionTransformer, Eva, NaFlexVit), open_clip or transformers, or use D4Features."
        )
    ((path, (owner, projection)),) = projections.items()
    if not projection.weight.is_floating_point() or projection.weight.is_meta:
        kind = "meta" if projection.weight.is_meta else str(projection.weight.dtype)
        raise UnsupportedHost(f"{path} needs floating-point weights, got {kind}. Load unquantised weights.")
    if isinstance(projection, nn.Linear):
        # NaFlexVit: a linear projection of flattened patches
        h, w = owner.patch_size
        _check_square(path, h, w)
        layout = PatchLayout(h, True, owner.channels_last)
        norm = owner.norm_input
        # a norm before the projection has parameters per pixel, which must be symmetric as well
        affine = [] if norm is None else [p for p in norm.parameters(recurse=False) if p.ndim == 1]
        return path, [(projection.weight, layout), *((p, layout) for p in affine)]
    h, w = projection.kernel_size[-2:]
    _check_square(path, h, w)
    # adjacent patches: kernel = stride, no padding, no dilation
    plain = projection.padding in ("valid", (0,) * len(projection.kernel_size))
    if projection.stride != projection.kernel_size or not plain or set(projection.dilation) != {1}:
        raise UnsupportedHost(
            f"{path} must have non-overlapping adjacent patches, got kernel {projection.kernel_size}, stride "
            f"{projection.stride}, padding {projection.padding} and dilation {projection.dilation}. Use D4Features."
        )
    return path, [(projection.weight, PatchLayout())]


def _check_square(path: str, h: int, w: int) -> None:
    if h != w:
        raise ShapeError(
            f"{path} must have square patches, got {h} x {w} pixels, which rotation by 90 degrees would change."
        )


def _projections(model: nn.Module) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield path, owner and module of every patch projection of a transformer."""
    for name, host in model.named_modules():
        for path in _paths(host):
            # hosts may lack some of the candidate paths
            try:
                owner, module = host.get_submodule(path.rpartition(".")[0]), host.get_submodule(path)
            except AttributeError:
                continue
            if isinstance(module, nn.Conv2d | nn.Conv3d) or isinstance(owner, NaFlexEmbeds):
                yield f"{name}.{path}" if name else path, (owner, module)


def _paths(host: nn.Module) -> tuple[str, ...]:
    """Return the candidate paths of a patch projection in a module."""
    if isinstance(host, NaFlexVit):
        return ("embeds.proj",)
    if isinstance(host, VisionTransformer | Eva):
        return ("patch_embed.proj",) if isinstance(host.patch_embed, PatchEmbed) else ()
    classes = {(c.__module__, c.__name__) for c in type(host).__mro__}
    if ("open_clip.transformer", "VisionTransformer") in classes:
        return ("conv1",)
    return _TRANSFORMERS if any(module.startswith("transformers.models.") for module, _ in classes) else ()
