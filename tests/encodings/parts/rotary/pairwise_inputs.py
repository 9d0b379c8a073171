"""Inputs of the tests of logits with a rotation per pair of tokens, and of external memory."""

import torch

from vispe.attention import PairRotation

RATES = torch.tensor([[[1.0, 0.3, 0.05]]], dtype=torch.float64)


def inputs(b=2, heads=4, kv_heads=2, n=13, width=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(b, h, n, width, generator=generator, dtype=torch.float64)
        for h in (heads, kv_heads, kv_heads)
    ]


def rotation(coords):
    angle = coords[:, None] @ RATES
    return PairRotation(angle.cos(), angle.sin(), "half")


def line(n, b=1):
    return torch.arange(float(n), dtype=torch.float64)[None, :, None].expand(b, -1, -1)
