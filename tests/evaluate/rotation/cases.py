"""Images that are known exactly at every angle, and small transformers whose symmetries are known."""

import math

import torch
from timm.models import VisionTransformer

import vispe
from vispe.evaluate.rotation import D4

F64 = torch.float64


def field(size, seed=0, degrees=0.0, waves=40, channels=3, finest=0.12):
    """A random field (c, H, W): a sum of cosines, whose wave vectors are rotated, so nothing is interpolated."""
    g = torch.Generator().manual_seed(seed)
    direction = torch.rand(waves, generator=g, dtype=F64) * 2 * math.pi
    k = 2 * math.pi * (0.02 + torch.rand(waves, generator=g, dtype=F64) * (finest - 0.02))
    phase = torch.rand(channels, waves, generator=g, dtype=F64) * 2 * math.pi
    y, x = (torch.arange(n, dtype=F64) - (n - 1) / 2 for n in size)
    y, x = -y[:, None, None], x[None, :, None]  # y up, so that positive angles are counter-clockwise
    rotated = direction + math.radians(degrees)
    waves_at = k * (rotated.cos() * x + rotated.sin() * y)
    return (waves_at[None] + phase[:, None, None]).cos().sum(-1) / math.sqrt(len(k) / 2)


def noise(size, seed=0, channels=3):
    return torch.rand(channels, *size, generator=torch.Generator().manual_seed(seed), dtype=F64)


def vit(pos="none", symmetric=True, size=42, gain=1.0, depth=4, seed=0, **options):
    """A transformer with patches of 7 px, in float64; `gain` multiplies queries, keys and values."""
    torch.manual_seed(seed)
    model = VisionTransformer(
        img_size=size,
        patch_size=7,
        embed_dim=32,
        depth=depth,
        num_heads=2,
        num_classes=0,
        pos_embed="learn" if pos == "learn" else "none",
        weight_init="skip",
        **{"dynamic_img_size": True, **options},
    )
    torch.nn.init.normal_(model.cls_token)
    if pos == "learn":
        torch.nn.init.normal_(model.pos_embed, std=0.5)
    elif pos != "none":
        vispe.convert(model, pos)
    model = model.double().eval()
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight *= gain
        if symmetric:
            kernel = model.patch_embed.proj.weight
            kernel.copy_(sum(g.apply(kernel) for g in D4) / 8)
    return model
