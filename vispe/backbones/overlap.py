"""Vision transformers whose patches overlap, so that there are more tokens than patches side by side."""

from __future__ import annotations

from torch import nn

from vispe.backbones.model_access import blocks_of, image_tower, patch_projection
from vispe.errors import OptionError, UnsupportedCombination, UnsupportedHost
from vispe.hosts.common.overlapping_patches import without_distances
from vispe.hosts.common.state_dict_loading import LoadsWeights
from vispe.hosts.convert import convert


def overlap(model: nn.Module, stride: int) -> None:
    """Let a model look at patches that begin every `stride` pixels, in place; its weights stay as they are.

    An image (H, W) then gives (H - patch) / stride + 1 tokens a side, token i centred at i * stride + patch / 2 pixels.
    All of them attend to each other, at their true distances in patches: encodings of vispe measure a step as
    stride / patch, and the model's own absolute table is read at the places of the tokens.

    Args:
        model: a plain ViT of timm or a tower of open_clip, or one converted by vispe, that takes images of any size.
        stride: pixels, a divisor of the patch; at the patch itself nothing changes.

    Raises:
        OptionError: the stride does not divide the patch.
        UnsupportedHost: a model that vispe cannot convert, or with a rotary embedding of its own.
        UnsupportedCombination: its encoding counts tokens and does not measure distances.

    >>> import timm, torch
    >>> model = timm.create_model("test_vit", dynamic_img_size=True).eval()
    >>> overlap(model, 8)
    >>> model.forward_intermediates(torch.zeros(1, 3, 160, 160), intermediates_only=True)[-1].shape
    torch.Size([1, 64, 19, 19])
    """
    tower = image_tower(model)
    kind = type(tower).__name__
    projection = patch_projection(tower)
    if projection is None:
        raise UnsupportedHost(
            f"{kind} does not embed patches by one projection, so token_stride={stride} has no meaning for it; leave "
            "it out, or take a plain ViT."
        )
    sides = set(projection.kernel_size)
    if stride < 1 or any(side % stride for side in sides):
        patch = " x ".join(map(str, projection.kernel_size))
        raise OptionError(
            f"token_stride={stride} px does not divide the patch of {patch} px; choose a divisor of it."
        )
    if sides == {stride}:
        return
    if getattr(tower, "rope", None) is not None:
        raise UnsupportedHost(
            f"{kind} has a rotary embedding of its own, which knows whole patches only, so token_stride={stride} "
            "cannot be used; replace it with --pos-embed, or leave token_stride out."
        )
    if not isinstance(tower, LoadsWeights):
        # converted, it places its table where the tokens are
        tables = (getattr(tower, name, None) for name in ("pos_embed", "positional_embedding"))
        convert(tower, "learn" if any(table is not None for table in tables) else "none")
    _check_encodings(tower, stride)
    projection.stride = (stride, stride)


def _check_encodings(tower: nn.Module, stride: int) -> None:
    """Raise UnsupportedCombination where an encoding counts tokens."""
    attention = next((m for _, _, m in tower.vispe_attentions()), None)
    heads = getattr(attention, "num_heads", 1)
    dim = patch_projection(tower).out_channels
    width = getattr(attention, "head_dim", dim // heads)
    found = without_distances(tower._vispe_all(), dim, heads, width, len(blocks_of(tower)))
    if found:
        raise UnsupportedCombination(
            f"{' and '.join(found)} counts tokens and does not measure how far apart they are, so token_stride="
            f"{stride} would change its meaning; leave token_stride out, or take alibi2d or rope_axial."
        )
