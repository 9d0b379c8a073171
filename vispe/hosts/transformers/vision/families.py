"""Families of transformers' vision towers: paths of attention, tables, rotary embedding, and the training grid."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from vispe.hosts.transformers.subclasses import stock_of


@dataclass(frozen=True)
class VisionFamily:
    """Layout of the towers of one class.

    Attributes:
        module: package of the class in `transformers.models`.
        tower: class name of the tower.
        attention: class name of its attention layers.
        kind: how a context is passed to attention, a key of `SWAPS`.
        blocks: path of the blocks.
        attn: path of the attention layer in a block.
        tables: paths of position tables, the absolute table first; `*` is any index.
        bare: whether the stock forward pass supports a table that is None.
        prefix: number of tokens without a position.
        more_prefix: configuration entry with the number of further prefix tokens.
        rope: whether the tower has its own rotary embedding.
        computed: configuration entry that is true if the forward pass computes the absolute table.
    """

    module: str
    tower: str
    attention: str
    kind: str = "packed"
    blocks: str = "blocks"
    attn: str = "attn"
    tables: tuple[str, ...] = ()
    bare: bool = False
    prefix: int = 0
    more_prefix: str = ""
    rope: bool = True
    computed: str = ""

    @property
    def path(self) -> str:
        """The module of its classes."""
        return f"transformers.models.{self.module}.modeling_{self.module}"


_CLIP: dict[str, Any] = {"kind": "clip", "blocks": "encoder.layers", "attn": "self_attn", "rope": False}
_CLIP["tables"] = ("embeddings.position_embedding",)
_INTERN: dict[str, Any] = {"kind": "intern", "blocks": "encoder.layer", "attn": "attention", "rope": False}
_INTERN |= {"tables": ("embeddings.position_embeddings",), "bare": True}
_QWEN3: dict[str, Any] = {"tables": ("pos_embed",)}
# the layout of most vision models: blocks pass keywords to attention with four projections
_GRID: dict[str, Any] = {"kind": "grid", "attn": "attention", "prefix": 1, "rope": False}
_VIT = _GRID | {"blocks": "layers", "tables": ("embeddings.position_embeddings",)}
_DINO = _VIT | {"blocks": "encoder.layer"}
_REGISTERS = _DINO | {"more_prefix": "num_register_tokens"}
_DINO3 = _REGISTERS | {"blocks": "model.layer", "tables": (), "rope": True}
_VIDEOMAE = {"kind": "film", "blocks": "encoder.layer", "attn": "attention.attention", "rope": False}
_VIDEOMAE["tables"] = ("embeddings.position_embeddings",)
_BEIT = _VIT | {"bare": True}
_BEIT["tables"] = (*_VIT["tables"], "layers.*.relative_position_bias", "shared_position_bias")
_SELF: dict[str, Any] = {"blocks": "encoder.layer", "attn": "attention.attention", "rope": False}
_SELF["tables"] = ("embeddings.position_embeddings",)
_RADIO = _GRID | {
    "kind": "radio",
    "blocks": "encoder.layer",
    "prefix": 0,
    "more_prefix": "num_summary_tokens",
}
_RADIO["tables"] = ("embeddings.position_embedding",)
_AIM = _CLIP | {"kind": "plain", "attn": "attention", "computed": "is_native"}
_SAPIENS = _DINO3 | {"kind": "sapiens"}
VIDEO_KINDS = ("film", "jepa")  # kinds whose grids have frames, rows and columns
FAMILIES = (
    VisionFamily("qwen2_vl", "Qwen2VisionTransformerPretrainedModel", "VisionAttention"),
    VisionFamily("qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel", "Qwen2_5_VLVisionAttention"),
    VisionFamily("qwen3_vl", "Qwen3VLVisionModel", "Qwen3VLVisionAttention", **_QWEN3),
    VisionFamily("qwen3_vl_moe", "Qwen3VLMoeVisionModel", "Qwen3VLMoeVisionAttention", **_QWEN3),
    VisionFamily("clip", "CLIPVisionModel", "CLIPAttention", prefix=1, **_CLIP),
    VisionFamily("chinese_clip", "ChineseCLIPVisionModel", "ChineseCLIPVisionAttention", prefix=1, **_CLIP),
    VisionFamily("altclip", "AltCLIPVisionModel", "AltCLIPAttention", prefix=1, **_CLIP),
    VisionFamily("clipseg", "CLIPSegVisionModel", "CLIPSegAttention", prefix=1, **_CLIP),
    VisionFamily("metaclip_2", "MetaClip2VisionModel", "MetaClip2Attention", prefix=1, **_CLIP),
    VisionFamily("owlvit", "OwlViTVisionTransformer", "OwlViTAttention", prefix=1, **_CLIP),
    VisionFamily("owlv2", "Owlv2VisionTransformer", "Owlv2Attention", prefix=1, **_CLIP),
    VisionFamily("aimv2", "Aimv2VisionModel", "Aimv2Attention", **_AIM),
    VisionFamily("siglip", "SiglipVisionModel", "SiglipAttention", **_CLIP),
    VisionFamily("siglip2", "Siglip2VisionModel", "Siglip2Attention", **_CLIP | {"kind": "patches"}),
    VisionFamily("internvl", "InternVLVisionModel", "InternVLVisionAttention", prefix=1, **_INTERN),
    VisionFamily("vit", "ViTModel", "ViTAttention", **_VIT),
    VisionFamily("deit", "DeiTModel", "DeiTAttention", **_VIT | {"prefix": 2}),
    VisionFamily("vit_msn", "ViTMSNModel", "ViTMSNAttention", **_VIT),
    VisionFamily("vit_mae", "ViTMAEModel", "ViTMAEAttention", **_VIT | {"kind": "masked"}),
    VisionFamily("ijepa", "IJepaModel", "IJepaAttention", **_VIT | {"prefix": 0}),
    VisionFamily(
        "pixio", "PixioModel", "PixioAttention", **_VIT | {"prefix": 0, "more_prefix": "n_cls_tokens"}
    ),
    VisionFamily("beit", "BeitModel", "BeitAttention", **_BEIT),
    VisionFamily("dinov2", "Dinov2Model", "Dinov2Attention", **_DINO),
    VisionFamily("dinov2", "Dinov2Backbone", "Dinov2Attention", **_DINO),
    VisionFamily(
        "dinov2_with_registers",
        "Dinov2WithRegistersModel",
        "Dinov2WithRegistersAttention",
        **_REGISTERS,
    ),
    VisionFamily(
        "dinov2_with_registers",
        "Dinov2WithRegistersBackbone",
        "Dinov2WithRegistersAttention",
        **_REGISTERS,
    ),
    VisionFamily("dinov3_vit", "DINOv3ViTModel", "DINOv3ViTAttention", **_DINO3),
    VisionFamily("dinov3_vit", "DINOv3ViTBackbone", "DINOv3ViTAttention", **_DINO3),
    VisionFamily("tipsv2", "Tipsv2VisionModel", "Tipsv2VisionAttention", **_REGISTERS),
    VisionFamily("tipsv2", "Tipsv2VisionBackbone", "Tipsv2VisionAttention", **_REGISTERS),
    VisionFamily("radio", "RadioModel", "RadioAttention", **_RADIO),
    VisionFamily("sapiens2", "Sapiens2Model", "Sapiens2Attention", **_SAPIENS),
    VisionFamily("sapiens2", "Sapiens2Backbone", "Sapiens2Attention", **_SAPIENS),
    VisionFamily("dpt", "DPTModel", "DPTSelfAttention", kind="dpt", prefix=1, **_SELF),
    VisionFamily("vitpose_backbone", "VitPoseBackbone", "VitPoseBackboneSelfAttention", kind="self", **_SELF),
    VisionFamily("videomae", "VideoMAEModel", "VideoMAESelfAttention", **_VIDEOMAE),
    VisionFamily(
        "vjepa2", "VJEPA2Model", "VJEPA2RopeAttention", kind="jepa", blocks="encoder.layer", attn="attention"
    ),
)
# transformers 5.17 has the layout of DPT in four more packages, with a class of this name
_NESTED = {
    (f.path, f.tower): replace(
        f,
        attention=f.attention.replace("Attention", "SelfAttention"),
        kind="nested" if f.kind == "grid" else "nested_radio",
        attn="attention.attention",
    )
    for f in FAMILIES
    if f.module in ("dinov2", "dinov2_with_registers", "tipsv2", "radio")
}


def family_of(tower: nn.Module) -> VisionFamily | None:
    """Return the family of a tower; None if its class is not supported."""
    return family_of_class(type(tower))


def family_of_class(cls: type[Any]) -> VisionFamily | None:
    """Return the family of a class of towers; None if it is not supported."""
    names = {(c.__module__, c.__name__) for c in cls.__mro__}
    family = next((f for f in FAMILIES if (f.path, f.tower) in names), None)
    nested = None if family is None else _NESTED.get((family.path, family.tower))
    return family if nested is None or not hasattr(sys.modules[nested.path], nested.attention) else nested


def stock_type(module: nn.Module) -> type[Any]:
    """Return transformers' class of a module, converted or not."""
    return stock_of(type(module)) or type(module)


def attentions(tower: nn.Module) -> Iterator[tuple[int, str, nn.Module]]:
    """Yield (block, path, module) of every attention layer of a tower."""
    family = family_of(tower)
    for i, block in enumerate(tower.get_submodule(family.blocks)):
        yield i, f"{family.blocks}.{i}.{family.attn}", block.get_submodule(family.attn)


def prefix_of(tower: Any) -> int:
    """Return the number of tokens without a position."""
    family = family_of(tower)
    return family.prefix + (getattr(tower.config, family.more_prefix) if family.more_prefix else 0)


def heads_of(attention: Any) -> tuple[int, int]:
    """Return the number of heads of an attention layer, and its head_dim."""
    heads, width = (getattr(attention, n, None) for n in ("num_attention_heads", "attention_head_size"))
    return (
        attention.num_heads if heads is None else heads,
        attention.head_dim if width is None else width,
    )


def width_of(attention: Any) -> int:
    """Return the width of the input tokens of an attention layer."""
    heads, width = heads_of(attention)
    widths = (getattr(m, "in_features", None) for m in attention.modules())
    return next((n for n in widths if n is not None), heads * width)


def reference_of(tower: Any) -> tuple[int, ...] | None:
    """Return the grid of the training resolution; None for towers without one."""
    side = getattr(tower, "num_grid_per_side", None)
    if side is not None:
        return (side, side)
    kind, config = family_of(tower).kind, tower.config
    if kind == "packed":
        return None
    if kind == "patches":
        return (math.isqrt(config.num_patches),) * 2
    patch = pair(config.patch_size)
    size = pair(config.crop_size if kind == "jepa" else config.image_size)
    side = (size[0] // patch[0], size[1] // patch[1])
    if kind not in VIDEO_KINDS:
        return side
    frames = config.frames_per_clip if kind == "jepa" else config.num_frames
    return (frames // config.tubelet_size, *side)


def rope_spec(tower: Any) -> str | None:
    """Return the encoding that equals the tower's own rotary embedding; None if no equal encoding is known."""
    family, config = family_of(tower), tower.config
    if family.kind != "jepa":
        return None
    # V-JEPA 2 has neither entry; V-JEPA 2.1 interpolates to the patches of 256 pixels (252 for patches of 14)
    name = "rope_axial.vjepa21" if getattr(config, "use_rope_interleave", False) else "rope_axial.vjepa2"
    if getattr(config, "interpolate_rope", False):
        side = 252 // 14 if pair(config.patch_size)[0] == 14 else 256 // 16
        schedule = "" if name.endswith("21") else "schedule=align_corners,"
        return f"{name}({schedule}reference=[1,{side},{side}])"
    return f"{name}(schedule=none)" if name.endswith("21") else name


def pair(size: Any) -> tuple[int, int]:
    """Return height and width of a size, which is an integer if both are equal."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])
