"""Vision transformers with overlapping patches, for a denser grid of tokens."""

from __future__ import annotations

from torch import nn

from vispe.backbones.model_access import blocks_of, image_tower, patch_projection
from vispe.errors import OptionError, UnsupportedCombination, UnsupportedHost
from vispe.hosts.common.overlapping_patches import without_distances
from vispe.hosts.common.state_dict_loading import LoadsWeights
from vispe.hosts.convert import convert


def overlap(model: nn.Module, stride: int) -> None:
    """Change the stride of the patch embedding in place, so that patches overlap; weights are not changed.

    An image (H, W) then has (H - patch) / stride + 1 tokens per side, token i centred at i * stride + patch / 2 pixels.
    Encodings use the true distances of tokens: encodings of vispe have a token spacing of stride / patch, and
    the model's own absolute table is resampled at the token positions.

    Args:
        model: a plain ViT of timm or a tower of open_clip, or one converted by vispe, for images of any size.
        stride: pixels between tokens, a divisor of the patch size; a stride equal to the patch size changes nothing.

    Raises:
        OptionError: the stride does not divide the patch size.
        UnsupportedHost: vispe cannot convert the model, or the model has its own rotary embedding.
        UnsupportedCombination: the encoding does not depend on the spacing of tokens.

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
            f"token_stride={stride} needs a patch embedding by one convolution, got {kind}. Use a plain ViT."
        )
    sides = set(projection.kernel_size)
    if stride < 1 or any(side % stride for side in sides):
        patch = " x ".join(map(str, projection.kernel_size))
        raise OptionError(f"token_stride must divide the patch size of {patch} px, got {stride} px.")
    if sides == {stride}:
        return
    if getattr(tower, "rope", None) is not None:
        raise UnsupportedHost(
            f"token_stride={stride} is not supported with the rotary embedding of {kind} itself, which assumes patches "
            "without overlap. Replace it with pos_embed, or omit token_stride."
        )
    if not isinstance(tower, LoadsWeights):
        # converted models resample their table at the positions of the tokens
        tables = (getattr(tower, name, None) for name in ("pos_embed", "positional_embedding"))
        convert(tower, "learn" if any(table is not None for table in tables) else "none")
    _check_encodings(tower, stride)
    projection.stride = (stride, stride)


def _check_encodings(tower: nn.Module, stride: int) -> None:
    """Raise `UnsupportedCombination` if an encoding does not depend on the spacing of tokens."""
    attention = next((m for _, _, m in tower.vispe_attentions()), None)
    heads = getattr(attention, "num_heads", 1)
    dim = patch_projection(tower).out_channels
    width = getattr(attention, "head_dim", dim // heads)
    names = without_distances(tower._vispe_all(), dim, heads, width, len(blocks_of(tower)))
    if names:
        raise UnsupportedCombination(
            f"token_stride={stride} needs an encoding that depends on the spacing of tokens, got "
            f"{' and '.join(names)}. Omit token_stride, or use alibi2d or rope_axial."
        )
