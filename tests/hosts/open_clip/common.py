"""Tiny models of open_clip, and an oracle without code of vispe: custom blocks of open_clip under dense masks."""

from __future__ import annotations

import copy

import torch
from open_clip import CLIP
from open_clip.transformer import VisionTransformer

from tests.hosts.helpers import shake

TEXT = {"context_length": 8, "vocab_size": 32, "width": 32, "heads": 2, "layers": 1}
VISION = {"image_size": (24, 40), "patch_size": 8, "width": 32, "layers": 2}
TOWER = {**VISION, "heads": 4, "mlp_ratio": 2.0, "output_dim": 16}
CUSTOM = {
    "qk_norm": True,
    "scale_heads": True,
    "scale_attn_inner": True,
    "scale_attn": True,
    "scale_fc": True,
}


def tiny_tower(**options) -> VisionTransformer:
    torch.manual_seed(0)
    return shake(VisionTransformer(**{**TOWER, **options})).eval()


def tiny_clip(**vision) -> CLIP:
    torch.manual_seed(0)
    return shake(CLIP(16, {**VISION, "head_width": 8, **vision}, TEXT)).eval()


def words(seed: int = 3) -> torch.Tensor:
    return torch.randint(0, 32, (3, 8), generator=torch.Generator().manual_seed(seed))


def as_custom(tower: VisionTransformer, table: bool = False, **options) -> VisionTransformer:
    """Return a stock tower of custom blocks with the weights of `tower`, which must not be converted."""
    custom = VisionTransformer(**{**TOWER, **options, "block_type": "custom"})
    custom.load_state_dict(tower.state_dict())
    if not table:
        custom.positional_embedding.data.zero_()
    return custom.train(tower.training)


def tower_oracle(custom: VisionTransformer, x: torch.Tensor, mask: torch.Tensor, keep=None) -> torch.Tensor:
    """Return tokens after the blocks, all under `mask`, which broadcasts to (b, heads, n, n)."""
    dropout, custom.patch_dropout = custom.patch_dropout, torch.nn.Identity()
    norm, custom.ln_pre = custom.ln_pre, torch.nn.Identity()
    x = custom._embeds(x)
    custom.patch_dropout, custom.ln_pre = dropout, norm
    if keep is not None:
        x = x.gather(1, keep[..., None].expand(-1, -1, x.shape[-1]))
    x = custom.ln_pre(x)
    for block in custom.transformer.resblocks:
        x = block(x, attn_mask=mask)
    return x


def copied(model):
    return copy.deepcopy(model)
