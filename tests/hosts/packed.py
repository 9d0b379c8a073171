"""Packed inputs of NaFlexVit."""

from __future__ import annotations

import torch
from timm.models import NaFlexVit

from tests.hosts.helpers import shake

NAFLEX = {
    "patch_size": 8,
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 4,
    "num_classes": 5,
    "pos_embed_grid_size": (3, 5),
}


def naflex(**options) -> NaFlexVit:
    torch.manual_seed(0)
    return shake(
        NaFlexVit(**{**NAFLEX, "class_token": True, "reg_tokens": 2, "global_pool": "avg", **options})
    ).eval()


def pack(sizes: list[tuple[int, int]], tokens: int | None = None, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return patches of samples with different grids, padded to one length, in the format of timm's collator."""
    n = tokens or max(h * w for h, w in sizes)
    generator = torch.Generator().manual_seed(seed)
    patches = torch.randn(len(sizes), n, 8 * 8 * 3, generator=generator)
    coord = torch.zeros(len(sizes), n, 2, dtype=torch.long)
    valid = torch.zeros(len(sizes), n, dtype=torch.bool)
    for i, (h, w) in enumerate(sizes):
        cells = [(y, x) for y in range(h) for x in range(w)]
        coord[i, : h * w] = torch.tensor(cells)
        valid[i, : h * w] = True
    return {"patches": patches, "patch_coord": coord, "patch_valid": valid}


def sample_of(batch: dict[str, torch.Tensor], i: int) -> dict[str, torch.Tensor]:
    """Return sample i of a packed batch without its padding."""
    n = int(batch["patch_valid"][i].sum())
    return {name: value[i : i + 1, :n] for name, value in batch.items()}
