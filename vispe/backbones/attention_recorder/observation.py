"""Attention of one layer in one forward pass, and its maps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from vispe.attention.call import Call
from vispe.attention.masks import combine_masks
from vispe.attention.transform.pairs import PairRotation
from vispe.backbones.local.transformers_model import of_transformers
from vispe.errors import ShapeError, UnsupportedHost, counted
from vispe.grid import Grid
from vispe.utils.autocast import no_autocast

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class LayerAttention:
    """Attention of one layer in one forward pass.

    Attributes:
        layer: index of the layer, from 0.
        path: name of the module.
        call: queries and keys (b, h, n, d_h) as passed to vispe's attention, with bias, rotation and masks.
            The model's own rotary embedding is already applied to them.
        x: input of the layer (b, n, d).
        grid: grid of the tokens: prefix tokens, then the patches in row-major order; text is a grid of one
            row, (1, n).
        rotation: rotation of the patches by the model's own rotary embedding; None if it has none.
    """

    layer: int
    path: str
    call: Call
    x: Tensor
    grid: Grid
    rotation: PairRotation | None = None
    _known: dict[str, Any] = field(default_factory=dict, repr=False)

    def remember(self, name: str, make: Callable[[], T]) -> T:
        """Return the cached result of `make` for this layer and name, computed in the first call."""
        if name not in self._known:
            self._known[name] = make()
        return self._known[name]


def attention_map(call: Call, heads: slice = slice(None)) -> tuple[Tensor, Tensor]:
    """Return logits and attention (b, h, n, m) of some heads of a call, in float32 or float64.

    Logits include bias and masks; the attention of fully masked rows is 0.
    """
    with no_autocast(call.q.device):
        logits, dead = logits_of(call, heads)
        attn = logits.softmax(-1)
        return logits, attn if dead is None else attn.masked_fill(dead, 0.0)


def logits_of(call: Call, heads: slice = slice(None)) -> tuple[Tensor, Tensor | None]:
    """Return the logits of `attention_map` (b, h, n, m), and the mask of fully masked rows, None without such rows."""
    with no_autocast(call.q.device):
        q, k, _ = call.transformed()
        dtype = torch.promote_types(q.dtype, torch.float32)
        logits = (q[:, heads].to(dtype) * call.factor) @ k[:, heads].to(dtype).transpose(-1, -2)
        parts = (call.added(), call.allowed())
        added, keep = (p if p is None or p.shape[1] == 1 else p[:, heads] for p in parts)
        mask, dead = combine_masks(call.dense_bias(heads), added, keep, call.finite)
        return logits if mask is None else logits + mask, dead


def observed(
    number: int, path: str, call: Call, x: Tensor, grid: Grid, rotation: PairRotation | None = None
) -> LayerAttention:
    """Return the attention of a layer with a 2-axis grid of all tokens, or raise `ShapeError`."""
    if grid.axes != 2 or grid.tokens != x.shape[1]:
        raise ShapeError(
            f"{path} must have {counted(grid.prefix, 'prefix token')} and a grid of {grid.shape} patches, got "
            f"{counted(x.shape[1], 'token')}. Pass complete images, without dropped patches."
        )
    return LayerAttention(number, path, call, x, grid, rotation)


def grid_of(tower: nn.Module, size: tuple[int, ...], tokens: int) -> Grid:
    """Return the grid of a model without encodings of vispe, from image and patch size."""
    embed = getattr(tower, "patch_embed", getattr(tower, "embeds", None))
    patch_size = getattr(embed, "patch_size", getattr(tower, "patch_size", None))
    if patch_size is None and of_transformers(tower):
        patch_size = getattr(tower.config, "patch_size", None)
    if patch_size is None:
        raise UnsupportedHost(f"The model must have a patch_size, got {type(tower).__name__} without.")
    patch = patch_size if isinstance(patch_size, tuple | list) else (patch_size, patch_size)
    if getattr(embed, "dynamic_img_pad", False):  # images are padded to complete patches; others are cropped
        shape = tuple(-(-n // step) for n, step in zip(size, patch, strict=True))
    else:
        convs = (m for m in tower.modules() if isinstance(m, nn.Conv2d) and m.stride == tuple(patch))
        padding = getattr(next(convs, None), "padding", (0, 0))
        padding = padding if isinstance(padding, tuple) else (0, 0)
        shape = tuple((n + 2 * p) // step for n, p, step in zip(size, padding, patch, strict=True))
    return Grid(shape, prefix=max(0, tokens - shape[0] * shape[1]))
