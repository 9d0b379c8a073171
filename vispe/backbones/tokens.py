"""What training asks of a vision transformer: its facts, its blocks, and its final tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from vispe.errors import UnsupportedHost


@dataclass(frozen=True, eq=False)
class Backbone:
    """A vision transformer and the images that it takes.

    Attributes:
        model: in evaluation mode; of open_clip the image tower alone.
        mean: of the channels of images in [0, 1], (3, 1, 1).
        std: of the channels, (3, 1, 1).
        patch: side of a patch in pixels.
        size: side in pixels of the images that it was built for.
        exact: whether it takes images of that size alone.
        channels: width of its features.
        class_token: whether it has one.
    """

    model: nn.Module
    mean: Tensor
    std: Tensor
    patch: int
    size: int
    exact: bool
    channels: int
    class_token: bool


def final_tokens(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the final, normed patch features (b, d, h, w) and class tokens (b, d), with gradients.

    The mode of the model, training or evaluation, stays as it is. Class tokens are None where there are none.

    Args:
        model: of timm, or an image tower of open_clip, converted or not.
        images: normalised, (b, 3, H, W), sides multiples of the patch.

    Raises:
        UnsupportedHost: the model returns no feature maps.
    """
    last = [len(blocks_of(model)) - 1]
    if hasattr(model, "conv1"):
        found = model.forward_intermediates(
            images,
            indices=last,
            intermediates_only=True,
            normalize_intermediates=True,
            output_extra_tokens=True,
        )
        return found["image_intermediates"][0], found["image_intermediates_prefix"][0][:, 0]
    found = model.forward_intermediates(
        images, indices=last, norm=True, output_fmt="NCHW", intermediates_only=True, return_prefix_tokens=True
    )[0]
    if isinstance(found, Tensor):
        return found, None
    return found[0], found[1][:, 0] if has_class_token(model) else None


def has_class_token(model: nn.Module) -> bool:
    """Return whether a vision transformer has a class token."""
    return any(getattr(model, name, None) is not None for name in ("cls_token", "class_embedding"))


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """Return the blocks of a vision transformer.

    Raises:
        UnsupportedHost: it has none, or returns no feature maps.
    """
    blocks = getattr(model, "blocks", None)
    if blocks is None:
        blocks = getattr(getattr(model, "transformer", None), "resblocks", None)
    if blocks is None or not hasattr(model, "forward_intermediates"):
        raise UnsupportedHost(
            f"{type(model).__name__} has no blocks and forward_intermediates, from which features are learnt; use a "
            "vision transformer of timm or open_clip."
        )
    return blocks
