"""A vision model as a function of images, with its tokens moved after the patch embedding, and block by block."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vispe.backbones.local.transformers_model import draw_again, of_transformers
from vispe.backbones.model_access import (
    blocks_of,
    has_class_token,
    image_tower,
    input_settings,
    intermediates,
    patch_projection,
)
from vispe.errors import InputError, OptionError, ShapeError, UnsupportedHost
from vispe.hosts.common.state_dict_loading import LoadsWeights
from vispe.symmetry.d4 import Element


class VisionModel:
    """The patch features of a model: images (b, 3, H, W), normalised -> maps (b, d, h, w).

    Works for every model that has `forward_intermediates`: timm's, open_clip's image towers, and both converted by
    vispe. Class and register tokens are left out. Gradients flow, so that derivatives can be taken.

    Args:
        model: in evaluation mode; an open_clip model is taken by its image tower.
        layer: block whose output is taken; negative counts from the end. Several are joined, channels side by side.
        norm: apply the model's final norm.
        mean: of the channels of images in [0, 1], (3, 1, 1); by default what the model was trained with.
        std: of the channels, (3, 1, 1), likewise.
        exact: whether it takes images of its size alone; by default what its class does.
        stride: pixels between tokens, where patches overlap; the model is changed as `overlap` says.

    Attributes:
        size: side in pixels of the images that it was built for.
        depth: number of its blocks.
        class_token: whether it has one.

    Raises:
        UnsupportedHost: the model returns no feature maps.
        OptionError: the model is in training mode, where it is random; a block that it does not have, or one twice; a
            stride that does not divide the patch, or for a model of one size.

    >>> import timm
    >>> f = VisionModel(timm.create_model("test_vit").eval(), layer=2)
    >>> f.patch, f.size, f.exact, f.channels, f.depth
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
                f"{type(tower).__name__} has no forward_intermediates, from which patch features are read; "
                "use a timm or open_clip model, or give a function of images."
            )
        if tower.training:
            raise OptionError(
                "The model is in training mode, where its features are random; call model.eval() first."
            )
        self.model, self.layer, self.norm = tower, layer, norm
        self.depth = self._depth()
        self._taken = self._blocks()
        self.size, own_mean, own_std = input_settings(tower)
        self.mean = own_mean if mean is None else mean
        self.std = own_std if std is None else std
        self.class_token = has_class_token(tower)
        if exact is None and hasattr(tower, "image_mean"):
            # open_clip builds a tower for one size, and converting lifts that
            exact = not (isinstance(tower, LoadsWeights) or getattr(tower, "any_size", False))
        elif exact is None:
            exact = hasattr(tower, "patch_embed") and not getattr(tower, "dynamic_img_size", False)
        self.exact = exact
        if stride is not None and stride != self.patch:
            if exact:
                raise OptionError(
                    f"token_stride={stride} needs a model that takes images of any size, but this one takes "
                    f"{self.size} px alone; leave it out, or replace its encoding with --pos-embed."
                )
            # it converts models, which takes timm with it
            from vispe.backbones.overlap import overlap

            overlap(tower, stride)

    @property
    def last(self) -> bool:
        """Whether its features are those after the last block and the final norm."""
        return self.norm and self._taken == [self.depth - 1]

    @property
    def channels(self) -> int:
        """Width of the features of a transformer."""
        return self._projection().out_channels * len(self._taken)

    @property
    def patch(self) -> int | None:
        """Side of a patch in pixels; None where the model has no patch embedding."""
        conv = patch_projection(self.model, overlapping=True)
        if conv is None:
            return None
        if conv.kernel_size[0] != conv.kernel_size[1]:
            raise UnsupportedHost(f"The model has patches of {conv.kernel_size} px; square ones are needed.")
        return int(conv.kernel_size[0])

    def __call__(self, images: Tensor) -> Tensor:
        """Images (b, 3, H, W) -> maps (b, d, h, w)."""
        maps = self._maps(images, 1 if self._taken == [self.depth - 1] else self._taken, self.norm)
        return maps[0] if len(maps) == 1 else torch.cat(maps, 1)

    def layers(self, images: Tensor) -> list[Tensor]:
        """Return the maps after every block, without the final norm."""
        return self._maps(images, list(range(self.depth)), False)

    def permuted(self, images: Tensor, g: Element) -> Tensor:
        """Return the maps for tokens that were moved by `g` after the patch embedding.

        The patches are embedded as they stand, then the grid of tokens is moved, so the patch kernel has no part in
        the result; encodings and everything else see the image moved by `g`.

        Args:
            images: (b, 3, H, W).
            g: element of D4.

        Raises:
            UnsupportedHost: the model has no patch embedding that could be measured apart.
        """
        with self._moved_tokens(images, g):
            return self(g.apply(images))

    def permuted_layers(self, images: Tensor, g: Element) -> list[Tensor]:
        """Return what `layers` gives for tokens that were moved as in `permuted`."""
        with self._moved_tokens(images, g):
            return self.layers(g.apply(images))

    @contextmanager
    def _moved_tokens(self, images: Tensor, g: Element) -> Iterator[None]:
        """While open, the patch embedding answers with the tokens of `images`, moved."""
        conv = self._projection()
        with torch.no_grad():
            tokens = g.apply(conv(images.to(_device(self.model)))).contiguous()

        def instead(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            if tokens.shape != output.shape:
                raise ShapeError(
                    f"The patch embedding gave {tuple(output.shape)} for the moved image and {tuple(tokens.shape)} "
                    "by moving tokens; make both sides of the image multiples of the patch."
                )
            return tokens

        handle = conv.register_forward_hook(instead)
        try:
            yield
        finally:
            handle.remove()

    def _projection(self) -> nn.Conv2d:
        conv = patch_projection(self.model, overlapping=True)
        if conv is None:
            raise UnsupportedHost(
                f"{type(self.model).__name__} has no patch embedding by one projection (patch_embed.proj or conv1 with "
                "stride = kernel), so its position code cannot be measured apart from its patch kernel; measure the "
                "full error only."
            )
        return conv

    def _maps(self, images: Tensor, indices: int | list[int], norm: bool) -> list[Tensor]:
        patch, size = self.patch, tuple(images.shape[-2:])
        if patch is not None and (size[0] % patch or size[1] % patch):
            raise ShapeError(
                f"An image of {size} px is no multiple of the model's patch of {patch} px; "
                "fit it about its centre with fit_to_patches."
            )
        try:
            return intermediates(self.model, images.to(_device(self.model)), indices, norm=norm)
        # what timm and open_clip raise for an image of another size
        except (AssertionError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "size of tensor" not in str(error):
                raise
            raise InputError(
                f"The model refuses an image of {size} px ({error}); build it with dynamic_img_size=True or give "
                "square images of its size."
            ) from error

    def _blocks(self) -> list[int]:
        """Return the blocks whose outputs are taken, from the first one on."""
        several = [self.layer] if isinstance(self.layer, int) else list(self.layer)
        for layer in several:
            if not -self.depth <= layer < self.depth:
                raise OptionError(f"layer={layer} is not one of the {self.depth} blocks of the model.")
        taken = sorted({layer % self.depth for layer in several})
        if not several or len(taken) < len(several):
            listed = ", ".join(map(str, several)) or "none"
            raise OptionError(
                f"layer={listed} of {self.depth} blocks names one twice or none; name each block once."
            )
        sides = {one["reduction"] for one in getattr(self.model, "feature_info", None) or ()}
        if not isinstance(self.layer, int) and len(sides) > 1:
            raise UnsupportedHost(
                f"{type(self.model).__name__} has maps of several sizes, so layers cannot be chosen; take a plain ViT."
            )
        return taken

    def _depth(self) -> int:
        try:
            return len(blocks_of(self.model))
        except UnsupportedHost:
            return len(getattr(self.model, "feature_info", None) or ()) or 1


ModelFeatures = Backbone = VisionModel  # its names before


def random_twin(model: nn.Module, seed: int = 0) -> tuple[nn.Module, Sequence[str]]:
    """Return a copy of a model with fresh random weights: the control for 'what training did'.

    A random transformer is not invariant either. Every module draws its weights by its own `reset_parameters`, after
    it a timm model by its `init_weights`; embeddings and tokens of the model itself get timm's normal(0, 0.02).

    Args:
        model: stays as it is.
        seed: of the draws.

    Returns:
        The copy, in evaluation mode, and the names of the parameters that nothing redrew.
    """
    twin = copy.deepcopy(model)
    before = {name: p.detach().clone() for name, p in twin.named_parameters()}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for module in twin.modules():
            if callable(getattr(module, "reset_parameters", None)):
                module.reset_parameters()
        if of_transformers(twin):
            draw_again(twin)
        elif callable(getattr(twin, "init_weights", None)):
            twin.init_weights()
        for name, p in twin.named_parameters():
            tables = ("pos_embed", "_token", "positional_embedding", "class_embedding")
            known = name.rpartition(".")[2].endswith(tables)
            if known and torch.equal(p, before[name]):
                torch.nn.init.trunc_normal_(p, std=0.02)
    same = [name for name, p in twin.named_parameters() if torch.equal(p, before[name]) and not _constant(p)]
    return twin.eval(), tuple(same)


def _constant(p: Tensor) -> bool:
    """Whether a parameter is where every initialisation puts it: all zeros or all ones."""
    return bool((p == 0).all()) or bool((p == 1).all())


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))
