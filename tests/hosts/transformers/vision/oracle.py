"""Vision towers of tiny models, and an oracle: their forward pass with explicit dense attention over patches."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.hosts.transformers.tiny import make
from vispe.hosts.transformers.vision.convert import vision_tower_of
from vispe.hosts.transformers.vision.families import attentions

# an image, a video and two images; windows are 4 x 4 patches
GRIDS = ((1, 4, 6), (3, 2, 4), (1, 6, 10), (1, 4, 6))
ROWS = ("llava", "llava_onevision", "internvl")
# cells (n, 1, 2) and (1, n, 2), grid -> (h or 1, n, n)
Pair = Callable[[Tensor, Tensor, tuple[int, int]], Tensor]


def tower(family: str, double: bool = True) -> nn.Module:
    result = vision_tower_of(make(family))
    return result.double() if double else result


def patches(grids=GRIDS, double: bool = True, seed: int = 2) -> tuple[Tensor, Tensor]:
    count = sum(t * h * w for t, h, w in grids)
    x = torch.randn(count, 3 * 2 * 16, generator=torch.Generator().manual_seed(seed))
    return (x.double() if double else x), torch.tensor(grids)


def line(family: str, grids=GRIDS) -> list[tuple[int, int, int, int, tuple[int, int], tuple[int, int]]]:
    """Return (image, frame, row, column, grid, window) of every patch in the order of the blocks."""
    result = []
    for image, (t, h, w) in enumerate(grids):
        for frame in range(t):
            corners = [(y, x) for y in range(0, h, 2) for x in range(0, w, 2)]
            if family == "qwen2_5_vl":
                corners.sort(key=lambda c: (c[0] // 4, c[1] // 4))  # stable
            for y, x in corners:
                cells = [(y, x), (y, x + 1), (y + 1, x), (y + 1, x + 1)]
                result += [(image, frame, *c, (h, w), (y // 4, x // 4)) for c in cells]
    return result


def mask(family: str, pair: Pair, layer: int, grids=GRIDS) -> Tensor:
    """Return the addend to the logits (h, n, n) of a block."""
    tokens = line(family, grids)
    windowed = family == "qwen2_5_vl" and layer == 0
    out = torch.full((2, len(tokens), len(tokens)), float("-inf"), dtype=torch.float64)
    for key in dict.fromkeys((*t[:2], t[4], t[5] if windowed else None) for t in tokens):
        indices = [i for i, t in enumerate(tokens) if (*t[:2], t[4], t[5] if windowed else None) == key]
        cells, indices = torch.tensor([tokens[i][2:4] for i in indices]), torch.tensor(indices)
        out[:, indices[:, None], indices] = pair(cells[:, None], cells[None], key[2])
    return out


def by_hand(stock: nn.Module, masks: list[Tensor]) -> nn.Module:
    """Replace the attention of a tower by explicit attention: block i under masks[i] (h, n, n)."""
    rotate = getattr(importlib.import_module(type(stock).__module__), "apply_rotary_pos_emb_vision", None)
    for i, _, attn in attentions(stock):

        def packed(hidden_states, position_embeddings=None, attn=attn, i=i, **_):
            q, k, v = attn.qkv(hidden_states).unflatten(-1, (3, attn.num_heads, -1)).unbind(1)
            q, k = rotate(q, k, *position_embeddings)
            logits = torch.einsum("nhd,mhd->hnm", q, k) * attn.head_dim**-0.5 + masks[i].to(q)
            return attn.proj(torch.einsum("hnm,mhd->nhd", logits.softmax(-1), v).flatten(1))

        def rows(hidden_states, attention_mask=None, attn=attn, i=i, **_):
            x, norms = (
                hidden_states,
                (getattr(attn, "q_norm", nn.Identity()), getattr(attn, "k_norm", nn.Identity())),
            )
            q, k = (norm(p(x)) for norm, p in zip(norms, (attn.q_proj, attn.k_proj), strict=True))
            q, k, v = (t.unflatten(-1, (attn.num_heads, -1)) for t in (q, k, attn.v_proj(x)))
            logits = torch.einsum("bnhd,bmhd->bhnm", q, k) * attn.head_dim**-0.5 + masks[i].to(q)
            out = torch.einsum("bhnm,bmhd->bnhd", logits.softmax(-1), v).flatten(2)
            return (attn.projection_layer if hasattr(attn, "projection_layer") else attn.out_proj)(out), None

        attn.forward = rows if rotate is None else packed
    return stock


def close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance * max(1.0, b.detach().abs().max().item()))


def images(family: str, double: bool = True, size: tuple[int, int] | None = None) -> Tensor:
    side = 24 if family == "internvl" else 12
    x = torch.randn(2, 3, *(size or (side, side)), generator=torch.Generator().manual_seed(6))
    return x.double() if double else x
