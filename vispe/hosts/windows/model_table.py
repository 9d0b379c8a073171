"""Supported models with windowed attention: classes of models and attention layers, and the grids of the layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from vispe.errors import UnsupportedHost, counted
from vispe.hosts.common.layer_access import plain_class, state_path
from vispe.hosts.transformers.subclasses import stock_of
from vispe.hosts.windows.attention import SiteAttention
from vispe.hosts.windows.monai import VolumeAttention, VolumeBlock, VolumeWindowAttention
from vispe.hosts.windows.timm import (
    MapAttention,
    PartitionAttention,
    SamAttention,
    SwinAttention,
    SwinV2Attention,
)
from vispe.hosts.windows.torchvision import GlobalAttention, ShiftedAttention
from vispe.hosts.windows.transformers import (
    HubSam3Attention,
    HubSamAttention,
    HubSwinAttention,
    VitDetAttention,
)

# class of a model: path of its absolute table, empty for models that never have a table
MODELS: dict[str, str] = {
    "transformers.models.swin.modeling_swin.SwinModel": "embeddings.position_embeddings",
    "transformers.models.vitdet.modeling_vitdet.VitDetModel": "embeddings.position_embeddings",
    "transformers.models.vitdet.modeling_vitdet.VitDetBackbone": "embeddings.position_embeddings",
    "timm.models.vision_transformer_sam.VisionTransformerSAM": "pos_embed",
    "timm.models.maxxvit.MaxxVit": "",
    "timm.models.swin_transformer.SwinTransformer": "",
    "timm.models.swin_transformer_v2.SwinTransformerV2": "",
    "monai.networks.nets.vit.ViT": "patch_embedding.position_embeddings",
    "monai.networks.nets.vitautoenc.ViTAutoEnc": "patch_embedding.position_embeddings",
    "monai.networks.nets.unetr.UNETR": "vit.patch_embedding.position_embeddings",
    "monai.networks.nets.swin_unetr.SwinTransformer": "",
    "monai.networks.nets.swin_unetr.SwinUNETR": "",
    "torchvision.models.vision_transformer.VisionTransformer": "encoder.pos_embedding",
    "torchvision.models.swin_transformer.SwinTransformer": "",
    "transformers.models.sam3.modeling_sam3.Sam3ViTModel": "embeddings.position_embeddings",
}
# class of an attention layer: its mixin
SITES: dict[str, type[SiteAttention]] = {
    "transformers.models.swin.modeling_swin.SwinAttention": HubSwinAttention,
    "transformers.models.vitdet.modeling_vitdet.VitDetAttention": VitDetAttention,
    "timm.models.vision_transformer_sam.Attention": SamAttention,
    "timm.models.maxxvit.AttentionCl": PartitionAttention,
    "timm.models.maxxvit.Attention2d": MapAttention,
    "timm.models.swin_transformer.WindowAttention": SwinAttention,
    "timm.models.swin_transformer_v2.WindowAttention": SwinV2Attention,
    "monai.networks.blocks.selfattention.SABlock": VolumeAttention,
    "monai.networks.nets.swin_unetr.WindowAttention": VolumeWindowAttention,
    "torch.nn.modules.activation.MultiheadAttention": GlobalAttention,
    "torchvision.models.swin_transformer.ShiftedWindowAttention": ShiftedAttention,
    "torchvision.models.swin_transformer.ShiftedWindowAttentionV2": ShiftedAttention,
    "transformers.models.sam3.modeling_sam3.Sam3ViTRoPEAttention": HubSam3Attention,
}
# transformers models with SAM's encoder or a copy: prefix of class names, suffix of the encoder's class
_LIKE_SAM = {
    "sam.modeling_sam.SamVision": "Encoder",
    "sam_hq.modeling_sam_hq.SamHQVision": "Encoder",
    "got_ocr2.modeling_got_ocr2.GotOcr2Vision": "Encoder",
    "deepseek_ocr2.modeling_deepseek_ocr2.DeepseekOcr2SamVision": "Encoder",
    "unlimited_ocr.modeling_unlimited_ocr.UnlimitedOcrSamVision": "Encoder",
    "slanext.modeling_slanext.SLANeXtVision": "Encoder",
    "pp_formulanet.modeling_pp_formulanet.PPFormulaNetVision": "Model",
}
LIKE_SAM = {f"transformers.models.{start}{end}" for start, end in _LIKE_SAM.items()}
MODELS |= dict.fromkeys(LIKE_SAM, "pos_embed")
SITES |= {
    f"transformers.models.{start}{kind}Attention": HubSamAttention
    for start in _LIKE_SAM
    for kind in ("", "Sdpa")
}
# class of another module: its mixin
PARTS: dict[str, type[nn.Module]] = {"monai.networks.nets.swin_unetr.SwinTransformerBlock": VolumeBlock}


def stock_type(module: nn.Module) -> type[Any]:
    """Return the library's class of a module, converted or not."""
    cls = plain_class(type(module))
    return stock_of(cls) or cls


def known(cls: type[Any]) -> str | None:
    """Return the entry of `MODELS` that a class is or derives from, or None."""
    names = (f"{c.__module__}.{c.__qualname__}" for c in cls.__mro__)
    return next((n for n in names if n in MODELS), None)


def attentions(model: nn.Module) -> Iterator[tuple[int, str, nn.Module]]:
    """Yield (index, path, module) of every attention layer."""
    layers = ((path, m) for path, m in model.named_modules() if name_of(m) in SITES)
    yield from ((i, state_path(path), m) for i, (path, m) in enumerate(layers))


def name_of(module: nn.Module) -> str:
    """Return the qualified name of the library's class of a module."""
    cls = stock_type(module)
    return f"{cls.__module__}.{cls.__qualname__}"


def heads_of(attention: Any) -> tuple[int, int]:
    """Return the number of heads of an attention layer, and their total width."""
    if isinstance(attention, nn.MultiheadAttention):
        return attention.num_heads, attention.embed_dim
    heads = getattr(attention, "num_heads", None) or attention.num_attention_heads
    if hasattr(attention, "dim_head"):
        return heads, heads * attention.dim_head
    if hasattr(attention, "q_proj"):
        return heads, attention.q_proj.out_features
    return heads, attention.qkv.out_features // 3


def width_of(attention: Any) -> int:
    """Return the width of the input tokens of an attention layer."""
    if isinstance(attention, nn.MultiheadAttention):
        return attention.embed_dim
    layer = attention.q_proj if hasattr(attention, "q_proj") else attention.qkv
    return layer.in_features if hasattr(layer, "in_features") else layer.in_channels


def prefix_of(model: nn.Module) -> int:
    """Return the number of tokens of a model without a position."""
    return int(hasattr(model, "class_token") or hasattr(model, "cls_token"))


def _of_monai(model: Any) -> tuple[int, ...]:
    """Return the grid of patches of MONAI's ViT, which stores only their number.

    Raises:
        UnsupportedHost: the number is not that of a grid with equal sides.
    """
    if hasattr(model, "feat_size"):
        return tuple(int(n) for n in model.feat_size)
    patches = model.patch_embedding
    if isinstance(patches.patch_embeddings, nn.Sequential):
        axes = sum(name.startswith("p") for name in patches.patch_embeddings[0].axes_lengths)
    else:
        axes = len(patches.patch_embeddings.kernel_size)
    side = round(float(patches.n_patches) ** (1 / axes))
    if side**axes != patches.n_patches:
        raise UnsupportedHost(
            f"MONAI's {type(model).__name__} stores only the number of patches, so its grid of "
            f"{counted(axes, 'axis')} must have equal sides, got {counted(patches.n_patches, 'patch')}. Use equal "
            "sides, or UNETR, which stores its grid."
        )
    return (side,) * axes


def grid_of(model: Any, attention: Any) -> tuple[int, ...]:
    """Return the grid that an attention layer was built for: its window, or that of the whole feature map."""
    if isinstance(attention, VolumeAttention) or name_of(attention).endswith(".SABlock"):
        return _of_monai(model)
    biased: Any = (
        getattr(attention, "relative_position_bias", getattr(attention, "rel_pos", None)) or attention
    )
    window = getattr(biased, "window_size", None)
    if window is not None:
        return tuple(int(n) for n in window)
    if isinstance(attention, nn.MultiheadAttention):
        side = model.image_size // model.patch_size
        return (side, side)
    block: Any = next(b for b in model.modules() if attention in b._modules.values())
    if hasattr(block, "partition_size"):
        return (int(block.partition_size[0]), int(block.partition_size[1]))
    # global attention of CoAtNet: the stem and every stage halve the feature map
    if hasattr(model, "stages"):
        stage = next(i for i, s in enumerate(model.stages, 1) if any(attention is m for m in s.modules()))
        sides = [size // model.stem.stride for size in model.img_size]
        return (-(-sides[0] // 2**stage), -(-sides[1] // 2**stage))
    if block.window_size:
        return (block.window_size, block.window_size)
    patches = model.patch_embed if hasattr(model, "patch_embed") else model.embeddings
    grid = getattr(patches, "grid_size", None)
    if SITES[name_of(attention)] is HubSam3Attention:  # its patch embedding stores only the size of the table
        grid = [model.config.image_size // model.config.patch_size] * 2
    if grid is None:
        grid = [size // patch for size, patch in zip(patches.image_size, patches.patch_size, strict=True)]
    return (int(grid[0]), int(grid[1]))
