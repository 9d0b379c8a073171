"""Tiny models with windows, of timm, torchvision and transformers, and explicit attention for them."""

from __future__ import annotations

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformerBlockV2

from tests.hosts.helpers import dense, shake
from vispe.hosts.windows.model_table import attentions

_SWIN = {
    "patch_size": 4,
    "window_size": 4,
    "embed_dim": 16,
    "depths": (2, 2),
    "num_heads": (2, 4),
    "num_classes": 3,
}
_VISION = ([4, 4], 16, [2, 2], [2, 4], [4, 4])
_V2 = {"block": SwinTransformerBlockV2, "downsample_layer": PatchMergingV2}
_SAM = {
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 2,
    "window_size": 4,
    "global_attn_indexes": (1,),
    "neck_chans": 16,
}


def _sam_of_transformers(attention: str = "sdpa") -> nn.Module:
    import transformers

    config = transformers.SamVisionConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=48, patch_size=8, window_size=4,
        global_attn_indexes=[1], output_channels=16, mlp_dim=48, attn_implementation=attention,
    )  # fmt: skip
    return transformers.SamVisionModel(config)


def _of_transformers(name: str) -> nn.Module:
    import transformers

    if name == "Sam3":
        config = transformers.Sam3ViTConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=48,
            pretrain_image_size=32, patch_size=8, window_size=4, global_attn_indexes=[1],
        )  # fmt: skip
        return transformers.Sam3ViTModel(config)
    if name == "Swin":
        config = transformers.SwinConfig(
            image_size=64, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4,
            use_absolute_embeddings=True, drop_path_rate=0.0,
        )  # fmt: skip
        return transformers.SwinModel(config)
    config = transformers.VitDetConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=48, pretrain_image_size=48, patch_size=8,
        window_size=4, window_block_indices=[0], use_absolute_position_embeddings=True,
        use_relative_position_embeddings=True,
    )  # fmt: skip
    return transformers.VitDetModel(config)


# name: what builds it, the size that it is built for, and another size; SAM pads windows, torchvision pads maps
MODELS = {
    "timm_sam": (
        lambda: timm.models.VisionTransformerSAM(48, 8, num_classes=3, use_rel_pos=True, **_SAM),
        48,
        (40, 72),
    ),
    "timm_swin": (lambda: timm.models.SwinTransformer(64, **_SWIN), 64, None),
    "timm_swin_v2": (lambda: timm.models.SwinTransformerV2(64, **_SWIN), 64, None),
    "torchvision_vit": (
        lambda: torchvision.models.VisionTransformer(32, 8, 2, 2, 32, 48, num_classes=3),
        32,
        None,
    ),
    "torchvision_swin": (lambda: torchvision.models.SwinTransformer(*_VISION, num_classes=3), 60, (16, 72)),
    "torchvision_swin_v2": (
        lambda: torchvision.models.SwinTransformer(*_VISION, num_classes=3, **_V2),
        60,
        (16, 72),
    ),
    "hub_swin": (lambda: _of_transformers("Swin"), 64, (40, 72)),
    "hub_vitdet": (lambda: _of_transformers("VitDet"), 48, (40, 72)),
    "hub_sam": (_sam_of_transformers, 48, (40, 72)),
    "hub_sam3": (lambda: _of_transformers("Sam3"), 48, (40, 72)),
}


def build(name: str) -> nn.Module:
    """Return a random model in double precision."""
    if "hub" in name:
        pytest.importorskip("transformers", reason="vispe[vlm] is not installed")
    torch.manual_seed(0)
    return shake(MODELS[name][0]()).double().eval()


def image(name: str, size: tuple[int, int] | None = None) -> Tensor:
    height, width = size or (MODELS[name][1],) * 2
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(1)).double()


def run(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    return out if isinstance(out, Tensor) else out.last_hidden_state


def inner(model: nn.Module) -> nn.Module:
    """Return the module that contains the layers."""
    return getattr(model, "vision_encoder", model)


def by_hand(model: nn.Module, slopes: list[Tensor]) -> nn.Module:
    """Give a stock model the logits -slopes[i] * distance inside its windows, without its tables."""
    for (_, _, attn), slope in zip(attentions(inner(model)), slopes, strict=True):

        def bias(h: int, w: int, prefix: int = 0, slope: Tensor = slope) -> Tensor:
            return -slope[:, None, None] * dense(h, w, prefix).double()

        if hasattr(attn, "cpb_mlp"):  # 16 sigmoid(table); a constant more changes no softmax
            table = _offsets(bias(*attn.window_size), *attn.window_size)
            attn.cpb_mlp = _Fixed((table + 8).div(16).logit())
        elif hasattr(attn, "_get_rel_pos_bias"):
            attn._get_rel_pos_bias = lambda bias=bias, attn=attn: bias(*attn.window_size)[None]
        elif hasattr(attn, "relative_position_bias"):
            attn.relative_position_bias.forward = lambda bias=bias: bias(4, 4)[None]
        elif hasattr(attn, "get_relative_position_bias"):
            attn.get_relative_position_bias = lambda bias=bias, attn=attn: bias(*attn.window_size)[None]
        elif isinstance(attn, nn.MultiheadAttention):

            def attend(x, *_, attn=attn, bias=bias, **__):
                qkv = nn.functional.linear(x, attn.in_proj_weight, attn.in_proj_bias)
                return attn.out_proj(_attention(qkv, attn.num_heads, bias(4, 4, 1))), None

            attn.forward = attend
        elif hasattr(attn, "q_proj"):

            def rotated(hidden_states, position_embeddings, attn=attn, bias=bias):
                x = hidden_states.flatten(1, 2)
                qkv = torch.cat([attn.q_proj(x), attn.k_proj(x), attn.v_proj(x)], -1)
                out = _attention(qkv, len(bias(1, 1)), bias(*hidden_states.shape[1:3]))
                return attn.o_proj(out).reshape(hidden_states.shape), None

            attn.forward = rotated
        else:

            def window(x=None, hidden_states=None, output_attentions=None, attn=attn, bias=bias):
                x = hidden_states if x is None else x
                heads = len(bias(1, 1))
                out = attn.proj(_attention(attn.qkv(x.flatten(1, 2)), heads, bias(*x.shape[1:3]))).reshape(
                    x.shape
                )
                return out if type(attn).__module__.startswith("timm.") else (out, None)

            attn.forward = window
    names = ("pos_embed", "position_embeddings")
    table = next((p for n, p in model.named_parameters() if any(name in n for name in names)), None)
    if table is not None:
        table.data.zero_()
    return model


class _Fixed(nn.Module):
    """Constant in place of the network of Swin V2."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = table

    def forward(self, coords: Tensor) -> Tensor:
        return self.table.reshape(*coords.shape[:-1], -1)


def _offsets(bias: Tensor, h: int, w: int) -> Tensor:
    """Return the table (offsets, heads) of a bias (heads, n, n) that depends only on the offset of cells."""
    rows = []
    for dy in range(1 - h, h):
        for dx in range(1 - w, w):
            query, key = (max(dy, 0), max(dx, 0)), (max(-dy, 0), max(-dx, 0))
            rows.append(bias[:, query[0] * w + query[1], key[0] * w + key[1]])
    return torch.stack(rows)


def _attention(qkv: Tensor, heads: int, bias: Tensor) -> Tensor:
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    logits = torch.einsum("bhnd,bhmd->bhnm", q, k) / q.shape[-1] ** 0.5 + bias
    return torch.einsum("bhnm,bhmd->bnhd", logits.softmax(-1), v).flatten(2)
