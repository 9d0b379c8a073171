"""Converted timm `NaFlexVit` models: images, or packed patches of several grids.

Packed patches have coordinates. In attention, the extent of each sample is that of its own grid, and the padding mask
is combined with the bias; additive encodings are computed for each grid separately. Coordinates follow patch dropout.
The model's own rotary embedding is treated as in `vispe.hosts.timm.eva`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.fx
from timm.layers import apply_keep_indices_nlc, register_notrace_function, register_notrace_module
from timm.models import NaFlexVit
from timm.models.naflexvit import NaFlexEmbeds, create_attention_mask
from torch import Tensor, nn
from torch.nn import functional as F

from vispe.encodings.base import Additive, Encoding
from vispe.encodings.parts.positions.sampler import Sampler
from vispe.encodings.parts.preparation import prepare
from vispe.errors import InputError, ShapeError
from vispe.grid import Grid, Positions
from vispe.hosts.common import fx_leaves
from vispe.hosts.common.context import Context
from vispe.hosts.common.packed_positions import packed
from vispe.hosts.common.position_cache import PositionCache
from vispe.hosts.timm.converted import ConvertedTimm, converted_timm_class
from vispe.utils.offloading import loaded

OVERRIDDEN = ("_forward_embeds", "_load_from_state_dict")


class LaterDropout(nn.Dropout):
    """Disabled dropout of the embedding; the converted model applies it after adding the encodings."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens unchanged."""
        return x


@register_notrace_module
class ConvertedEmbeds(NaFlexEmbeds):
    """The embedding of a NaFlexVit with additive encodings, which are added by the model."""

    def forward(self, *args: Any, vispe_added: bool = False, **kwargs: Any) -> Any:
        """Return the output of timm's embedding; raise `InputError` if it is called outside the model."""
        if not vispe_added:
            raise InputError(
                "NaFlexEmbeds: the encoding is added to the tokens by the model, got a call of the embedding alone. "
                "Call the model, forward_features or forward_intermediates."
            )
        return super().forward(*args, **kwargs)


@cache
def converted_class(stock: type[NaFlexVit]) -> type[NaFlexVit]:
    """Return the converted class of a NaFlexVit class; raise `UnsupportedHost` as `converted_timm_class` does."""
    return converted_timm_class(ConvertedNaFlex, stock, NaFlexVit, OVERRIDDEN)


class ConvertedNaFlex(ConvertedTimm, NaFlexVit):
    """Mixin of converted timm NaFlexVit models."""

    vispe_make = staticmethod(converted_class)
    vispe_tables = ("embeds.pos_embed", "embeds.pos_embed_y", "embeds.pos_embed_x")

    def _forward_embeds(
        self, x: Tensor, patch_coord: Tensor | None, patch_valid: Tensor | None, attn_mask: Tensor | None
    ) -> dict[str, Any]:
        self._vispe_check_layers()
        x = inputs = x if patch_coord is not None else fx_leaves.one_size(x)
        added = {"vispe_added": True} if isinstance(self.embeds, ConvertedEmbeds) else {}
        x, shape = self.embeds(x, patch_coord=patch_coord, patch_valid=patch_valid, **added)
        prefix, shared = self.num_prefix_tokens, self._vispe_shared()
        prepared_by = (prefix, self.vispe.reference, shared, self._vispe_all(), self._vispe_cache(x))
        x, pos, mixed = encoded(x, inputs, shape, patch_coord, patch_valid, *prepared_by)
        rope = None
        if self.rope is not None:
            if patch_coord is None:
                rope = self.rope.get_embed(shape=shape)
            else:
                rope = self._generate_rope_naflex(x, patch_coord)
        x = F.dropout(x, self.embeds.pos_drop.p, self.training)
        keep: Tensor | None = None
        if self.training and self.patch_drop is not None:
            x, keep = self.patch_drop(x)
        if keep is not None:
            pos = fx_leaves.gather(pos, keep)
            patch_valid = None if patch_valid is None else patch_valid.gather(1, keep)
            if rope is not None and not self.rope_is_mixed:
                packed = patch_coord is not None
                rope = apply_keep_indices_nlc(x, rope, keep, pos_embed_has_batch=packed)
                rope = rope if packed else rope.unsqueeze(1)
        key_only = getattr(self, "use_key_only_attn_mask", False)  # newer timm only
        mask = masked(attn_mask, patch_valid, x, prefix, self.vispe.inside, key_only)
        if self.vispe.inside:
            if torch.compiler.is_compiling() and self.grad_checkpointing:
                # positions are not cached while compiling, so no other forward pass is affected
                pos.memo = None
            mask = Context(pos, shared, mask, False, mixed=mixed)
        return {
            "patches": self.norm_pre(x),
            "patch_valid": patch_valid,
            "rope_embeds": rope,
            "attn_mask": mask,
            "keep_indices": keep,
        }


@torch.fx.wrap
@register_notrace_function
def masked(
    user_mask: Tensor | None, patch_valid: Tensor | None, x: Tensor, prefix: int, inside: bool, key_only: bool
) -> Tensor | None:
    """Return the user's mask, or the padding mask: valid keys (b, 1, 1, n), or timm's own for stock attention.

    timm also masks the rows of padded queries with the lowest number of the dtype, to which no bias can be
    added without overflow. Here these rows are not masked, as they are never used.
    """
    if user_mask is not None:
        return user_mask
    if patch_valid is None or not inside:
        queries = {"symmetric": not key_only, "q_len": 1 if key_only else None}
        return create_attention_mask(patch_valid, num_prefix_tokens=prefix, dtype=x.dtype, **queries)
    return F.pad(patch_valid.bool(), (prefix, 0), value=True)[:, None, None]


@torch.fx.wrap
@register_notrace_function
def encoded(
    x: Tensor,
    inputs: Tensor,
    shape: tuple[int, int] | None,
    coord: Tensor | None,
    valid: Tensor | None,
    prefix: int,
    reference: tuple[int, ...],
    shared: Sequence[Encoding],
    preparing: Sequence[Encoding],
    cache: PositionCache | None,
) -> tuple[Tensor, Positions, bool]:
    """Return the tokens with additive encodings, their prepared positions, and whether samples have several grids.

    Args:
        x: embedded tokens (b, n, d).
        inputs: the images, or the packed patches.
        shape: the grid of images.
        coord: row and column (b, n, 2) of packed patches; None for images.
        valid: which packed patches exist (b, n); None for all.
        prefix: number of tokens without a position.
        reference: grid of the training resolution.
        shared: encodings of the model.
        preparing: encodings of the model and of its layers, all of which prepare positions.
        cache: cache of positions; None in a traced graph.
    """
    cache = cache or PositionCache()

    def positions(size: tuple[int, int]) -> Positions:
        return cache(Grid(size, prefix=prefix, reference=reference), x)

    sizes: list[tuple[int, int]] = []
    if coord is None:
        pos = prepare(preparing, positions(tuple(shape)), batch=x.shape[0])
        x = _add_encodings(x, pos, inputs, shared)
    else:
        valid = coord.new_ones(coord.shape[:2], dtype=torch.bool) if valid is None else valid.bool()
        sizes = _sizes(coord, valid)
        pos = prepare(preparing, packed(coord, valid, sizes, preparing, positions), batch=x.shape[0])
        # with a sampler, additive encodings are evaluated at the sampled positions
        if any(isinstance(e, Sampler) for e in preparing):
            x = _add_encodings(x, pos, inputs, shared)
        else:
            x = _add_tables(x, coord, valid, sizes, prefix, shared, positions)
    return x, pos, len(set(sizes)) > 1


def _add_encodings(x: Tensor, pos: Positions, inputs: Tensor, shared: Sequence[Encoding]) -> Tensor:
    for encoding in shared:
        if isinstance(encoding, Additive):
            x = fx_leaves.add(encoding, x, pos, inputs)
    return x


def _add_tables(
    x: Tensor,
    coord: Tensor,
    valid: Tensor,
    sizes: list[tuple[int, int]],
    prefix: int,
    shared: Sequence[Encoding],
    positions: Callable[[tuple[int, int]], Positions],
) -> Tensor:
    """Return packed tokens (b, n, d) with additive encodings, one table per grid; nothing is added to padding."""
    encodings = [e for e in shared if isinstance(e, Additive)]
    for encoding in encodings:
        if encoding.reads_tokens:
            x = fx_leaves.add(encoding, x, encoding.prepare(packed(coord, valid, sizes, (), positions)), None)
            continue
        for size in dict.fromkeys(sizes):
            samples = torch.tensor([i for i, s in enumerate(sizes) if s == size], device=x.device)
            # row-major index of each patch in the table of its grid (m, n)
            cell = (coord[samples, :, 0] * size[1] + coord[samples, :, 1]).long() * valid[samples]
            with loaded((encoding,)):
                table = encoding.table(encoding.prepare(positions(size)))[0]
            added = table[prefix:].index_select(0, cell.flatten()).unflatten(0, cell.shape)
            added = added * valid[samples, :, None]
            head = table[:prefix].expand(len(samples), -1, -1)
            x = x.index_add(0, samples, torch.cat([head, added], 1).to(x.dtype))
    return x


def _sizes(coord: Tensor, valid: Tensor) -> list[tuple[int, int]]:
    """Return the grid (rows, columns) of each sample from the coordinates (b, n, 2) of its patches."""
    if coord.ndim != 3 or coord.shape[-1] != 2 or coord.shape[:2] != valid.shape:
        raise ShapeError(
            f"NaFlexVit: patch_coord must have the shape (b, n, 2) and patch_valid (b, n), got {tuple(coord.shape)} "
            f"and {tuple(valid.shape)}."
        )
    extent = coord.masked_fill(~valid[..., None], 0).amax(1) + 1
    return [(int(h), int(w)) for h, w in extent.tolist()]


VispeNaFlexVit = converted_class(NaFlexVit)
