"""Tiny models, and an oracle without code of vispe: the forward pass of timm with dense masks."""

from __future__ import annotations

import copy
import os

import timm
import torch
from timm.layers import AttentionPoolLatent
from timm.layers.patch_dropout import patch_dropout_forward
from timm.models import VisionTransformer
from timm.models.deit import VisionTransformerDistilled

import vispe

RELEASE = tuple(int(part) for part in timm.__version__.split(".")[:3])
SHAPE = {"img_size": (24, 40), "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 5}


# the long tests take a sample of products of encodings and hosts, and all of them with VISPE_EVERY=1
EVERY = os.environ.get("VISPE_EVERY") == "1"


def shake(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Set every parameter to a random value: layer scales of 1e-5 and zero biases hide errors."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter) * 0.2)
    return model


def tiny(cls: type[VisionTransformer] = VisionTransformer, **options) -> VisionTransformer:
    torch.manual_seed(0)
    return shake(cls(**{**SHAPE, **options})).eval()


def image(*size: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*(size or (2, 3, 24, 40)), generator=torch.Generator().manual_seed(seed))


def cotangent(like: torch.Tensor, seed: int = 7) -> torch.Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)).to(like)


def dense(h: int, w: int, prefix: int, wrap: bool = True, normalize: bool = True) -> torch.Tensor:
    """Return distances between all tokens (n, n), computed cell by cell."""
    cells = [(y, x) for y in range(h) for x in range(w)]
    out = torch.zeros(prefix + h * w, prefix + h * w, dtype=torch.float64)
    for i, (y, x) in enumerate(cells):
        for j, (v, u) in enumerate(cells):
            dy, dx = abs(y - v), abs(x - u)
            if wrap:
                dy, dx = min(dy, h - dy), min(dx, w - dx)
            out[prefix + i, prefix + j] = (dy**2 + dx**2) ** 0.5
    return (out / out.max() if normalize and out.max() else out).float()


def without_table(model: VisionTransformer) -> VisionTransformer:
    """Return a copy with a zero absolute table; supports every kind of ViT."""
    model = copy.deepcopy(model)
    if model.pos_embed is not None:
        model.pos_embed.data.zero_()
    return model


def oracle(model, x, masks, extra=None, keep=None) -> torch.Tensor:
    """Return tokens after the blocks of timm, block i under masks[i]; `extra` is added to tokens and prefix."""
    x = model._pos_embed(model.patch_embed(x))
    x = x if extra is None else x + extra
    if keep is not None:
        x = x.gather(1, keep[..., None].expand(-1, -1, x.shape[-1]))
    x = model.norm_pre(x)
    for block, mask in zip(model.blocks, masks, strict=True):
        x = block(x, attn_mask=mask)
    return model.norm(x)


def head_masks(model, distance: torch.Tensor, slopes: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Return masks for every block: -slope * distance, with the heads doubled for blocks of timm that need it."""
    masks = []
    for i, block in enumerate(model.blocks):
        attn = next(m for m in block.modules() if hasattr(m, "num_heads"))
        slope = torch.ones(attn.num_heads) if slopes is None else slopes[i]
        mask = (-slope[:, None, None] * distance)[None]
        if hasattr(attn, "sub_norm") and not attn.fused_attn:
            mask = mask.repeat_interleave(2, 1)
        masks.append(mask)
    return masks


def grads(model, out: torch.Tensor, drop: str = "pos_embed") -> dict[str, torch.Tensor]:
    """Return gradients of every parameter for a random cotangent."""
    model.zero_grad()
    (out * cotangent(out)).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None and drop not in n}


def close(actual, expected, tol: float = 2e-5) -> None:
    if isinstance(expected, dict):
        assert set(actual) == set(expected)
        for name in expected:
            scale = max(1.0, float(expected[name].abs().max()))
            torch.testing.assert_close(actual[name], expected[name], rtol=1e-4, atol=tol * scale, msg=name)
    else:
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=tol)


def set_fused(model, fused: bool) -> None:
    for module in model.modules():
        if hasattr(module, "fused_attn") and not isinstance(module, AttentionPoolLatent):
            module.fused_attn = fused


def keep_of(seed: int, batch: int, patches: int, prefix: int, prob: float) -> torch.Tensor:
    """Return the indices that patch dropout of timm keeps at this seed, prefix tokens included."""
    torch.manual_seed(seed)
    _, keep = patch_dropout_forward(torch.zeros(batch, patches, 1), prob, 0, False, True)
    return torch.cat([torch.arange(prefix).expand(batch, -1), keep + prefix], 1)


def slopes_of(model) -> torch.Tensor:
    """Return learned slopes of every layer (layers, heads)."""
    return torch.stack([p for n, p in model.named_parameters() if n.endswith("pos_enc.slope")])


__all__ = [
    "RELEASE", "SHAPE", "VisionTransformerDistilled", "close", "cotangent", "dense", "grads", "head_masks", "image",
    "keep_of", "oracle", "set_fused", "shake", "slopes_of", "tiny", "vispe", "without_table",
]  # fmt: skip
