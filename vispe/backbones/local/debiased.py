"""Models whose features were debiased without training: averages over views, then a linear map of the channels.

A debiased model has the interface of timm's vision models, so that it can be used wherever a model is accepted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vispe.backbones.local.registers import Neuron, check_registers, register_intermediates
from vispe.backbones.local.transformers_model import TransformersModel
from vispe.backbones.model_access import (
    blocks_of,
    image_size,
    image_tower,
    intermediates,
    patch_projection,
)
from vispe.errors import ShapeError, UnsupportedHost, counted
from vispe.images.symmetry.view_averages import View, ViewAverage, view_average


@dataclass(frozen=True, eq=False)
class Debiasing:
    """What is done to the features of a model.

    Attributes:
        method: names of the methods, joined by +.
        average: numbers of poses and positions over which features are averaged.
        seed: seed of the poses and positions.
        matrix: (C, C), the linear map of the channels after the average; None for none.
        bias: (C,), added after the linear map.
        unit_norm: scale the features of each patch to unit norm before and after the linear map.
        details: JSON values that describe the fit, such as the number of images.
        registers: register neurons, as pairs of block and hidden unit; see `vispe.backbones.local.registers`.
    """

    method: str
    average: ViewAverage = field(default_factory=ViewAverage)
    seed: int = 0
    matrix: Tensor | None = None
    bias: Tensor | None = None
    unit_norm: bool = False
    details: Mapping[str, Any] = field(default_factory=dict)
    registers: tuple[Neuron, ...] = ()

    def fingerprint(self) -> str:
        """Return a hash of everything that the features depend on."""
        values = [self.method, asdict(self.average), self.seed, self.unit_norm, self.registers]
        digest = hashlib.sha256(json.dumps(values).encode())
        for tensor in (self.matrix, self.bias):
            if tensor is not None:
                digest.update(tensor.double().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def views(self, images: Tensor, patch_size: int) -> list[View]:
        """Return the views of images (b, 3, H, W); they depend on the size of the images only.

        Raises:
            ShapeError: the sides are not multiples of the patch size.
        """
        height, width = images.shape[-2:]
        if height % patch_size or width % patch_size:
            raise ShapeError(
                f"Image sides must be multiples of the patch size, {patch_size} px, got {(height, width)}. Crop or "
                "pad the images."
            )
        return self.average.sample(
            np.random.default_rng(self.seed), (height // patch_size, width // patch_size)
        )

    def project(self, maps: Tensor) -> Tensor:
        """Return maps (b, C, h, w) after the linear map, in their dtype."""
        if self.matrix is None:
            return maps
        if maps.shape[1] != len(self.matrix):
            raise ShapeError(
                f"The method {self.method} was fitted on features with {counted(len(self.matrix), 'channel')}, got "
                f"{tuple(maps.shape)}. Use the last block of the model."
            )
        x = F.normalize(maps.double(), dim=1) if self.unit_norm else maps.double()
        x = torch.einsum("kc,bchw->bkhw", self.matrix.to(x), x)
        if self.bias is not None:
            x = x + self.bias.to(x)[:, None, None]
        # eps keeps rounding errors from being scaled to unit norm
        return (F.normalize(x, dim=1, eps=1e-6) if self.unit_norm else x).to(maps.dtype)


class DebiasedFeatures(nn.Module):
    """Debiased features of a function of images.

    Args:
        features: function of images that returns maps (b, c, h, w); a module is registered as a submodule.
        debiasing: what is done to the features.

    Attributes:
        patch_size: patch size in pixels, that of `features`; None if it has none.

    Raises:
        UnsupportedHost: an average over views, but the patch size is unknown.
    """

    def __init__(self, features: Callable[[Tensor], Tensor], debiasing: Debiasing) -> None:
        super().__init__()
        self.features, self.debiasing = features, debiasing
        self.patch_size: int | None = getattr(features, "patch_size", None)
        if self.patch_size is None and not debiasing.average.is_identity:
            raise UnsupportedHost(
                f"{debiasing.method} needs features with an attribute patch_size, got {type(features).__name__}. Set "
                "it to the patch size in pixels."
            )

    def forward(self, images: Tensor) -> Tensor:
        """Return maps (b, c, h, w) of images (b, 3, H, W)."""
        if self.debiasing.average.is_identity:
            return self.debiasing.project(self.features(images))
        views = self.debiasing.views(images, int(self.patch_size or 1))
        return self.debiasing.project(view_average(self.features, images, views))


class DebiasedModel(nn.Module):
    """A vision model with debiased features, and `forward_intermediates` as in timm.

    Maps of all blocks are averaged over the views. The linear map applies to the last block after the final norm.

    Args:
        model: model of timm, or an image tower of open_clip or transformers, for images of any size if features are
            averaged over positions.
        debiasing: what is done to the features.

    Raises:
        UnsupportedHost: the model is not a plain vision transformer.
    """

    def __init__(self, model: nn.Module, debiasing: Debiasing) -> None:
        super().__init__()
        from vispe.backbones.vision_model import VisionModel

        tower = image_tower(model)
        blocks_of(tower)
        features = VisionModel(tower)
        if features.patch_size is None:
            raise UnsupportedHost(
                f"debias: {type(tower).__name__} must have a patch embedding by one convolution. Use a plain ViT."
            )
        if debiasing.average.positions and features.exact:
            raise UnsupportedHost(
                f"debias: positions needs a model for images of any size, got one for {features.size} px. Use another "
                "method, or replace its encoding with pos_embed."
            )
        if debiasing.registers:
            check_registers(tower)
        self.tower, self.debiasing, self.side = tower, debiasing, int(features.patch_size)
        self.image_mean = features.mean.flatten().tolist()
        self.image_std = features.std.flatten().tolist()
        self.image_size, self.any_size = image_size(tower), not features.exact
        self.training = tower.training

    @property
    def passes(self) -> int:
        """Number of forward passes per image."""
        return self.debiasing.average.passes

    @property
    def blocks(self) -> nn.Module:
        """The blocks of the model, first to last."""
        return blocks_of(self.tower)

    @property
    def patch_embed(self) -> SimpleNamespace:
        """Namespace with the convolution of the patches as `proj`."""
        return SimpleNamespace(proj=patch_projection(self.tower, overlapping=True))

    @property
    def cls_token(self) -> Tensor | None:
        """The class token."""
        return next(
            (t for n in ("cls_token", "class_embedding") if (t := getattr(self.tower, n, None)) is not None),
            None,
        )

    def init_weights(self) -> None:
        """Reinitialise all weights of the model, as its library does."""
        if callable(getattr(self.tower, "init_weights", None)):
            self.tower.init_weights()

    def forward(self, images: Tensor) -> Tensor:
        """Return the debiased maps (b, d, h, w) of images (b, 3, H, W)."""
        return self.forward_intermediates(images, 1, norm=True)[0]

    def forward_intermediates(
        self,
        images: Tensor,
        indices: int | list[int],
        norm: bool = False,
        return_prefix_tokens: bool = False,
        **_: Any,
    ) -> list[Any]:
        """Return maps (b, d, h, w) after some blocks, optionally with prefix tokens (b, p, d)."""
        views = self.debiasing.views(images, self.side)
        sums: list[Tensor] = []
        prefixes: list[Tensor | None] = []
        for view in views:
            outputs = self._outputs(view.apply(images), indices, norm=norm, prefix=return_prefix_tokens)
            pairs = [(out, None) if isinstance(out, Tensor) else out for out in outputs]
            maps = [view.undo(part) / len(views) for part, _ in pairs]
            tokens = [None if token is None else token / len(views) for _, token in pairs]
            sums = [a + b for a, b in zip(sums, maps, strict=True)] if sums else maps
            prefixes = [
                a if b is None else a + b for a, b in zip(prefixes or [0] * len(tokens), tokens, strict=True)
            ]
        count = len(self.blocks)
        selected = list(range(count - indices, count)) if isinstance(indices, int) else list(indices)
        results = [
            self.debiasing.project(x) if norm and k % count == count - 1 else x
            for k, x in zip(selected, sums, strict=True)
        ]
        if not return_prefix_tokens:
            return results
        return [
            x if isinstance(token, int) else (x, token) for x, token in zip(results, prefixes, strict=True)
        ]

    def _outputs(self, images: Tensor, indices: int | list[int], **options: bool) -> list[Any]:
        if self.debiasing.registers:
            return register_intermediates(self.tower, images, indices, self.debiasing.registers, **options)
        return intermediates(self.tower, images, indices, **options)


def inner_model(model: nn.Module) -> nn.Module:
    """Return the model inside vispe's wrappers of vision models, which `vispe.convert` accepts."""
    inner = model.tower if isinstance(model, DebiasedModel) else model
    return inner.net if isinstance(inner, TransformersModel) else inner
