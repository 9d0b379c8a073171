"""Tiny vision models of transformers, and explicit attention for them."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor, nn

from tests.hosts.helpers import shake
from tests.hosts.transformers.tiny import transformers
from vispe.hosts.transformers.vision.convert import vision_tower_of
from vispe.hosts.transformers.vision.families import attentions, heads_of

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
SHAPE |= {"image_size": 16, "patch_size": 4}
RELATIVE = {
    "use_relative_position_bias": True,
    "use_absolute_position_embeddings": True,
    "drop_path_rate": 0.0,
}
# model: its prefix tokens
MODELS = {
    "ViTModel": 1,
    "DeiTModel": 2,
    "ViTMSNModel": 1,
    "ViTMAEModel": 1,
    "IJepaModel": 0,
    "PixioModel": 8,
    "BeitModel": 1,
    "Dinov2Model": 1,
    "Dinov2WithRegistersModel": 5,
    "DINOv3ViTModel": 5,
}
BACKBONES = ("Dinov2Backbone", "Dinov2WithRegistersBackbone", "DINOv3ViTBackbone")
HEADS = (
    "ViTForImageClassification",
    "DeiTForImageClassification",
    "DeiTForImageClassificationWithTeacher",
    "ViTMSNForImageClassification",
    "ViTMAEForPreTraining",
    "IJepaForImageClassification",
    "BeitForImageClassification",
    "Dinov2ForImageClassification",
    "Dinov2WithRegistersForImageClassification",
)
RESAMPLED = ("ViT", "DeiT", "ViTMSN", "ViTMAE", "IJepa", "Beit")  # only on request


def stem(name: str) -> str:
    """Return the prefix of the name of the configuration class."""
    return name.partition("For")[0].removesuffix("Model").removesuffix("Backbone")


def build(name: str, **options) -> nn.Module:
    """Return a random model in double precision."""
    more = {"num_register_tokens": 4} if "Registers" in name or "DINOv3" in name else {}
    more |= RELATIVE if stem(name) == "Beit" else {}
    more |= {"out_features": ["stage1", "stage2"]} if name in BACKBONES else {}
    config = getattr(transformers, f"{stem(name)}Config")(**{**SHAPE, **more, **options})
    torch.manual_seed(0)
    return shake(getattr(transformers, name)(config)).double().eval()


def inputs(name: str, height: int = 16, width: int = 16, seed: int = 1) -> dict:
    """Return two images, the noise of ViTMAE, and permission to resample tables."""
    generator = torch.Generator().manual_seed(seed)
    result = {"pixel_values": torch.randn(2, 3, height, width, generator=generator).double()}
    if (height, width) != (16, 16) and stem(name) in RESAMPLED:
        result["interpolate_pos_encoding"] = True
    if stem(name) == "ViTMAE":
        result["noise"] = torch.rand(2, height * width // 16, generator=generator).double()
    return result


def outputs(model: nn.Module, arguments: dict, **more) -> list[Tensor]:
    """Return all output tensors of a model."""
    out = model(**arguments, **more)
    result = [v if isinstance(v, tuple) else (v,) for v in out.values()]
    return [v for values in result for v in values if isinstance(v, Tensor)]


def visible_tokens(name: str, arguments: dict, prefix: int) -> Tensor | None:
    """Return token indices (b, m) that ViTMAE keeps, in its order, prefix included; None for all."""
    if "noise" not in arguments:
        return None
    order = arguments["noise"].argsort(1)
    patches = order[:, : int(order.shape[1] * 0.25)]
    return torch.cat([torch.arange(prefix).expand(len(patches), -1), patches + prefix], 1)


def by_hand(model: nn.Module, masks: list[Tensor], rope: bool = False) -> nn.Module:
    """Replace the attention of a model by explicit attention: block i under masks[i] (h, n, n) or (b, h, n, n)."""
    tower = vision_tower_of(model)
    module = importlib.import_module(type(tower).__module__)
    for i, _, attn in attentions(tower):

        def forward(hidden_states, *_, position_embeddings=None, attn=attn, i=i, **__):
            heads, width = heads_of(attn)
            names = ("q_proj", "k_proj", "v_proj") if hasattr(attn, "q_proj") else ("query", "key", "value")
            projections = (getattr(attn, name) for name in names)
            q, k, v = (p(hidden_states).unflatten(-1, (heads, width)).transpose(1, 2) for p in projections)
            if rope and position_embeddings is not None:
                q, k = module.apply_rotary_pos_emb(q, k, *position_embeddings)
            logits = torch.einsum("bhnd,bhmd->bhnm", q, k) / width**0.5 + masks[i]
            out = torch.einsum("bhnm,bhmd->bnhd", logits.softmax(-1), v).flatten(2)
            return attn.o_proj(out) if hasattr(attn, "o_proj") else out, None

        attn.forward = forward
    return model


def without_tables(model: nn.Module) -> nn.Module:
    """Return a model with zero tables."""
    for name, p in model.named_parameters():
        if "decoder" not in name and ("position_embedding" in name or "relative_position" in name):
            p.data.zero_()
    return model
