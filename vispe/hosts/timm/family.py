"""The families of timm models that vispe converts, and where each keeps its own position information."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import resample_abs_pos_embed
from timm.models import Eva, NaFlexVit, VisionTransformer
from torch import nn

from vispe.hosts.timm import eva as timm_eva
from vispe.hosts.timm import naflex as timm_naflex
from vispe.hosts.timm import vit as timm_vit
from vispe.hosts.timm.hosted import HostedTimm


@dataclass(frozen=True)
class Family:
    """What differs between families when a model is converted.

    Attributes:
        base: timm's class.
        hosted: gives the converted counterpart of a class.
        overridden: methods that the counterpart replaces.
        grid: gives the grid of the training resolution, None when the model has none.
        has_table: whether the model has an absolute table now.
        take_table: takes it out and returns what `put_table` needs to bring it back.
        put_table: brings it back.
        mask_at: which argument of a block, counted after the tokens, is its mask.
        mixes: whether its forward pass calls encodings between blocks.
        word: the word of timm's own constructor for its absolute table, with which a model is built that keeps it.
    """

    base: type[nn.Module]
    hosted: Callable[[Any], type[Any]]
    overridden: tuple[str, ...]
    grid: Callable[[Any], tuple[int, ...] | None]
    has_table: Callable[[Any], bool]
    take_table: Callable[[Any], Any]
    put_table: Callable[[Any, Any], None]
    mask_at: int | None = 0
    mixes: bool = True
    word: str | None = None


def _patch_grid(model: Any) -> tuple[int, ...] | None:
    grid = model.patch_embed.grid_size
    return None if grid is None else tuple(grid)


def _has_pos_embed(model: Any) -> bool:
    return model.pos_embed is not None


def _take_pos_embed(model: Any) -> tuple[nn.Parameter, tuple[int, ...]]:
    kept = (model.pos_embed, tuple(model.patch_embed.grid_size))
    model.register_parameter("pos_embed", None)
    return kept


def _put_pos_embed(model: Any, kept: tuple[nn.Parameter, tuple[int, ...]]) -> None:
    """Put the table back, resampled if the grid has changed since."""
    table, old = kept
    grid, like = tuple(model.patch_embed.grid_size), next(model.parameters())
    if grid != old or table.device != like.device or table.dtype != like.dtype:
        prefix = 0 if model.no_embed_class else model.num_prefix_tokens
        values = resample_abs_pos_embed(table.detach(), new_size=grid, old_size=old, num_prefix_tokens=prefix)
        table = nn.Parameter(values.to(like), requires_grad=table.requires_grad)
    model.pos_embed = table


def _naflex_grid(model: Any) -> tuple[int, ...] | None:
    grid = model.embeds.pos_embed_grid_size
    return None if grid is None else tuple(grid)


def _has_naflex_table(model: Any) -> bool:
    return model.embeds.pos_embed_type != "none"


def _take_naflex_table(model: Any) -> tuple[str, dict[str, nn.Parameter]]:
    embeds = model.embeds
    names = [n for n in ("pos_embed", "pos_embed_y", "pos_embed_x") if getattr(embeds, n) is not None]
    kept = (embeds.pos_embed_type, {name: getattr(embeds, name) for name in names})
    for name in names:
        embeds.register_parameter(name, None)
    embeds.pos_embed_type = "none"
    return kept


def _put_naflex_table(model: Any, kept: tuple[str, dict[str, nn.Parameter]]) -> None:
    kind, tables = kept
    like = next(model.parameters())
    for name, table in tables.items():
        if table.device != like.device or table.dtype != like.dtype:
            table = nn.Parameter(table.detach().to(like), requires_grad=table.requires_grad)
        setattr(model.embeds, name, table)
    model.embeds.pos_embed_type = kind


_TABLE = (_patch_grid, _has_pos_embed, _take_pos_embed, _put_pos_embed)
_NAFLEX_TABLE = (_naflex_grid, _has_naflex_table, _take_naflex_table, _put_naflex_table)
VIT = Family(VisionTransformer, timm_vit.hosted, timm_vit.OVERRIDDEN, *_TABLE, word="learn")
EVA = Family(Eva, timm_eva.hosted, timm_eva.OVERRIDDEN, *_TABLE, mask_at=1)
NAFLEX = Family(
    NaFlexVit,
    timm_naflex.hosted,
    timm_naflex.OVERRIDDEN,
    *_NAFLEX_TABLE,
    mask_at=None,
    mixes=False,
    word="learned",
)
FAMILIES = (VIT, EVA, NAFLEX)


def family_of(model: nn.Module) -> Family | None:
    """Return the family of a model, or None when vispe does not convert its kind."""
    return next((f for f in FAMILIES if isinstance(model, f.base)), None)


def has_rope(model: nn.Module) -> bool:
    """Whether the model has a rotary embedding of its own now."""
    return getattr(model, "rope", None) is not None


def take_rope(model: Any) -> tuple[nn.Module, torch.dtype]:
    """Take the model's own rotary embedding out; returns what `put_rope` needs."""
    kept = (model.rope, next(model.parameters()).dtype)
    model.rope = None
    return kept


def put_rope(model: Any, kept: tuple[nn.Module, torch.dtype]) -> None:
    """Bring the model's own rotary embedding back, for the grid, device, dtype and mode that it has now."""
    rope, dtype = kept
    like = next(model.parameters())
    rope = rope.to(like.device) if like.dtype == dtype else rope.to(like)
    if getattr(rope, "feat_shape", None) is not None and hasattr(model, "patch_embed"):
        grid = list(model.patch_embed.grid_size)
        if list(rope.feat_shape) != grid:
            rope.update_feat_shape(grid)
    model.rope = rope.train(model.training)


__all__ = [
    "EVA",
    "FAMILIES",
    "NAFLEX",
    "VIT",
    "Family",
    "HostedTimm",
    "family_of",
    "has_rope",
    "put_rope",
    "take_rope",
]
