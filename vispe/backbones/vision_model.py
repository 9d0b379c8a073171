"""Vision models as functions from images to feature maps: per block, and with permuted tokens."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vispe.backbones.model_access import (
    blocks_of,
    copy_with_shared_weights,
    has_class_token,
    image_tower,
    input_settings,
    intermediates,
    patch_projection,
)
from vispe.errors import InputError, OptionError, ShapeError, UnsupportedHost, counted
from vispe.hosts.common.state_dict_loading import LoadsWeights
from vispe.images.symmetry.d4 import Element


class VisionModel:
    """The patch features of a model: normalised images (b, 3, H, W) -> maps (b, d, h, w).

    Every model with `forward_intermediates` is supported: models of timm and image towers of open_clip,
    converted by vispe or not. Class and register tokens are not included. Gradients are computed as usual.

    Args:
        model: model in evaluation mode; of an open_clip model, the image tower is used.
        layer: index of the block whose output is returned; negative from the end. Outputs of several blocks are
            concatenated along the channels.
        norm: apply the model's final norm.
        mean: channel means of images in [0, 1], (3, 1, 1); default: those of the model's training.
        std: channel standard deviations, (3, 1, 1); default as for `mean`.
        exact: whether only images of the model's size are accepted; default: determined from the model's class.
        stride: pixels between tokens, for overlapping patches, see `overlap`; then `model` is a copy of the passed
            model, which is not changed and shares its weights.

    Attributes:
        size: image size in pixels that the model was built for.
        depth: number of blocks.
        class_token: whether there is a class token.

    Raises:
        UnsupportedHost: the model returns no feature maps.
        OptionError: the model is in training mode; a block does not exist or is repeated; the stride does not
            divide the patch size, or is set for a model of one image size.

    Example:
        >>> import timm
        >>> f = VisionModel(timm.create_model("test_vit").eval(), layer=2)
        >>> f.patch_size, f.size, f.exact, f.channels, f.depth
        (16, 160, False, 64, 6)
        >>> f(torch.zeros(1, 3, 160, 160)).shape
        torch.Size([1, 64, 10, 10])
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        layer: int | Sequence[int] = -1,
        norm: bool = True,
        mean: Tensor | None = None,
        std: Tensor | None = None,
        exact: bool | None = None,
        stride: int | None = None,
    ) -> None:
        tower = image_tower(model)
        if not hasattr(tower, "forward_intermediates"):
            raise UnsupportedHost(
                f"The model must have forward_intermediates, got {type(tower).__name__} without. Use a timm or "
                "open_clip model, or a function of images."
            )
        if tower.training:
            raise OptionError(
                "The model must be in evaluation mode, as its features are random in training mode. Call model.eval() "
                "first."
            )
        self.model, self.layer, self.norm = tower, layer, norm
        self.depth = self._depth()
        self._selected = self._blocks()
        self.size, default_mean, default_std = input_settings(tower)
        self.mean = default_mean if mean is None else mean
        self.std = default_std if std is None else std
        self.class_token = has_class_token(tower)
        if exact is None and hasattr(tower, "image_mean"):
            # open_clip builds towers for one image size, converted towers accept any
            exact = not (isinstance(tower, LoadsWeights) or getattr(tower, "any_size", False))
        elif exact is None:
            exact = hasattr(tower, "patch_embed") and not getattr(tower, "dynamic_img_size", False)
        self.exact = exact
        if stride is not None and stride != self.patch_size:
            if exact:
                raise OptionError(
                    f"token_stride={stride} needs a model for images of any size, got one for {self.size} px. Omit it, "
                    "or replace the encoding of the model with pos_embed."
                )
            # imported on demand, as it imports timm
            from vispe.backbones.overlap import overlap

            self.model = copy_with_shared_weights(tower)
            overlap(self.model, stride)

    @property
    def last(self) -> bool:
        """Whether the features are those after the last block and the final norm."""
        return self.norm and self._selected == [self.depth - 1]

    @property
    def channels(self) -> int:
        """Width of the features of a transformer."""
        return self._projection().out_channels * len(self._selected)

    @property
    def patch_size(self) -> int | None:
        """Patch size in pixels; None where the model has no patch embedding.

        Raises:
            UnsupportedHost: the patches are not square.
        """
        conv = patch_projection(self.model, overlapping=True)
        if conv is None:
            return None
        if conv.kernel_size[0] != conv.kernel_size[1]:
            raise UnsupportedHost(f"The patches of the model must be square, got {conv.kernel_size} px.")
        return int(conv.kernel_size[0])

    @property
    def permutable(self) -> bool:
        """Whether tokens can be permuted after the patch embedding, see `permuted`."""
        # some debiased models have several forward passes per image
        return getattr(self.model, "passes", 1) == 1 and patch_projection(self.model) is not None

    def __call__(self, images: Tensor) -> Tensor:
        """Return the feature maps (b, d, h, w) of images (b, 3, H, W)."""
        maps = self._maps(images, 1 if self._selected == [self.depth - 1] else self._selected, self.norm)
        return maps[0] if len(maps) == 1 else torch.cat(maps, 1)

    def layers(self, images: Tensor) -> list[Tensor]:
        """Return the maps after every block, without the final norm."""
        return self._maps(images, list(range(self.depth)), False)

    def permuted(self, images: Tensor, g: Element) -> Tensor:
        """Return the maps for tokens that are transformed by `g` after the patch embedding.

        The patches of the untransformed image are embedded, and then the grid of tokens is transformed. So
        any asymmetry of the patch kernel has no effect on the result, while encodings and all later layers
        process the transformed image.

        Args:
            images: (b, 3, H, W).
            g: element of D4.

        Raises:
            UnsupportedHost: the patch embedding is not a single convolution.
        """
        with self._transformed_tokens(images, g):
            return self(g.apply(images))

    def permuted_layers(self, images: Tensor, g: Element) -> list[Tensor]:
        """Return the maps of `layers` for tokens transformed as in `permuted`."""
        with self._transformed_tokens(images, g):
            return self.layers(g.apply(images))

    @contextmanager
    def _transformed_tokens(self, images: Tensor, g: Element) -> Iterator[None]:
        """Let the patch embedding return the transformed tokens of `images`."""
        conv = self._projection()
        if (passes := getattr(self.model, "passes", 1)) > 1:
            raise UnsupportedHost(
                "Position code and patch kernel can be separated for features of one forward pass only, got a mean "
                f"over {passes}. Measure the full error only."
            )
        with torch.no_grad():
            tokens = g.apply(conv(images.to(_device(self.model)))).contiguous()

        def replace(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            if tokens.shape != output.shape:
                raise ShapeError(
                    f"Transformed images and transformed tokens must have the same shape, got {tuple(output.shape)} "
                    f"and {tuple(tokens.shape)}. Use images whose sides are multiples of the patch size."
                )
            return tokens

        handle = conv.register_forward_hook(replace)
        try:
            yield
        finally:
            handle.remove()

    def _projection(self) -> nn.Conv2d:
        conv = patch_projection(self.model, overlapping=True)
        if conv is None:
            raise UnsupportedHost(
                "The patch embedding must be one convolution (patch_embed.proj or conv1 with stride = kernel) to "
                f"separate position code and patch kernel, got {type(self.model).__name__}. Measure the full error "
                "only."
            )
        return conv

    def _maps(self, images: Tensor, indices: int | list[int], norm: bool) -> list[Tensor]:
        patch_size, size = self.patch_size, tuple(images.shape[-2:])
        if patch_size is not None and (size[0] % patch_size or size[1] % patch_size):
            raise ShapeError(
                f"The image size must be a multiple of the patch size, {patch_size} px, got {size} px. Crop the image "
                "with fit_to_patches."
            )
        try:
            return intermediates(self.model, images.to(_device(self.model)), indices, norm=norm)
        # timm and open_clip raise these for an image of another size
        except (AssertionError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "size of tensor" not in str(error):
                raise
            raise InputError(
                f"The model does not accept images of {size} px ({error}). Build it with dynamic_img_size=True, or use "
                "square images of its size."
            ) from error

    def _blocks(self) -> list[int]:
        """Return the indices of the blocks whose outputs are returned, in ascending order."""
        layers = [self.layer] if isinstance(self.layer, int) else list(self.layer)
        if missing := [layer for layer in layers if not -self.depth <= layer < self.depth]:
            raise OptionError(
                f"layer must be one of the {counted(self.depth, 'block')} of the model, got {missing[0]}."
            )
        selected = sorted({layer % self.depth for layer in layers})
        if not layers or len(selected) < len(layers):
            listed = ", ".join(map(str, layers)) or "none"
            raise OptionError(
                f"layer must name each of {counted(self.depth, 'block')} at most once, got {listed}."
            )
        sides = {one["reduction"] for one in getattr(self.model, "feature_info", None) or ()}
        if not isinstance(self.layer, int) and len(sides) > 1:
            raise UnsupportedHost(
                f"layer: the maps of all blocks must have one size, got {type(self.model).__name__}. Use a plain ViT."
            )
        return selected

    def _depth(self) -> int:
        try:
            return len(blocks_of(self.model))
        except UnsupportedHost:
            return len(getattr(self.model, "feature_info", None) or ()) or 1


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))
