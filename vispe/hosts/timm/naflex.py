"""timm's `NaFlexVit` as it runs with a positional encoding of vispe: images, or packed patches of several grids.

Packed patches come with their coordinates. Attention sees each sample with the extent of its own grid, and the
padding mask together with the bias; what is added to the tokens is made for each grid as if it came alone.
Coordinates follow dropped patches. The model's own rotary embedding is treated as in `vispe.hosts.timm.eva`.
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
from vispe.encodings.parts.preparation import prepare
from vispe.encodings.parts.sampler import Sampler
from vispe.errors import InputError, ShapeError
from vispe.grid import Grid, Positions
from vispe.hosts.common import fx_leaves
from vispe.hosts.common.context import Context
from vispe.hosts.common.packed_positions import packed
from vispe.hosts.common.position_cache import PositionCache
from vispe.hosts.timm.converted import HostedTimm, hosted_class

OVERRIDDEN = ("_forward_embeds", "_load_from_state_dict")


class LaterDropout(nn.Dropout):
    """The dropout of the embedding, which the host applies itself, after the encodings were added."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens as they are."""
        return x


@register_notrace_module
class HostedEmbeds(NaFlexEmbeds):
    """The embedding of a NaFlexVit whose encodings are added to tokens, which only the model can do."""

    def forward(self, *args: Any, vispe_added: bool = False, **kwargs: Any) -> Any:
        """Return the embedding of timm; raise `InputError` where the model does not add its encodings behind it."""
        if not vispe_added:
            raise InputError(
                "NaFlexEmbeds: its encoding is added to the tokens by the model, got a call of the embedding alone. "
                "Call the model, forward_features or forward_intermediates."
            )
        return super().forward(*args, **kwargs)


@cache
def hosted(stock: type[NaFlexVit]) -> type[NaFlexVit]:
    """Return the converted counterpart of a NaFlexVit class, or raise `UnsupportedHost` as `hosted_class` does."""
    return hosted_class(HostedNaFlex, stock, NaFlexVit, OVERRIDDEN)


class HostedNaFlex(HostedTimm, NaFlexVit):
    """The parts of a timm NaFlexVit that change when it is converted."""

    vispe_make = staticmethod(hosted)
    vispe_tables = ("embeds.pos_embed", "embeds.pos_embed_y", "embeds.pos_embed_x")

    def _forward_embeds(
        self, x: Tensor, patch_coord: Tensor | None, patch_valid: Tensor | None, attn_mask: Tensor | None
    ) -> dict[str, Any]:
        self._vispe_intact()
        x = given = x if patch_coord is not None else fx_leaves.one_size(x)
        added = {"vispe_added": True} if isinstance(self.embeds, HostedEmbeds) else {}
        x, shape = self.embeds(x, patch_coord=patch_coord, patch_valid=patch_valid, **added)
        prefix, shared = self.num_prefix_tokens, self._vispe_shared()
        where = (prefix, self.vispe.reference, shared, self._vispe_all(), self._vispe_cache(x))
        x, pos, mixed = located(x, given, shape, patch_coord, patch_valid, *where)
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
                pos.memo = None  # fresh while compiling, so no other forward pass loses it
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
    given: Tensor | None, patch_valid: Tensor | None, x: Tensor, prefix: int, inside: bool, key_only: bool
) -> Tensor | None:
    """Return the user's mask, or that of padding: which keys exist (b, 1, 1, n), or timm's own for stock attention.

    timm also masks the rows of padded queries, by the lowest number of the dtype, which a bias would push over its
    edge; nothing reads those rows.
    """
    if given is not None:
        return given
    if patch_valid is None or not inside:
        queries = {"symmetric": not key_only, "q_len": 1 if key_only else None}
        return create_attention_mask(patch_valid, num_prefix_tokens=prefix, dtype=x.dtype, **queries)
    return F.pad(patch_valid.bool(), (prefix, 0), value=True)[:, None, None]


@torch.fx.wrap
@register_notrace_function
def located(
    x: Tensor,
    given: Tensor,
    shape: tuple[int, int] | None,
    coord: Tensor | None,
    valid: Tensor | None,
    prefix: int,
    reference: tuple[int, ...],
    shared: Sequence[Encoding],
    preparing: Sequence[Encoding],
    cache: PositionCache | None,
) -> tuple[Tensor, Positions, bool]:
    """Return the tokens with what encodings add, their prepared positions, and whether samples have several grids.

    Args:
        x: embedded tokens (b, n, d).
        given: the images, or the packed patches.
        shape: the grid of images.
        coord: row and column (b, n, 2) of packed patches; None for images.
        valid: which packed patches exist (b, n); None for all.
        prefix: tokens without a place.
        reference: grid of the training resolution.
        shared: encodings of the model.
        preparing: these and those of its layers, all of which prepare positions.
        cache: where positions are kept; None for a traced graph.
    """
    cache = cache or PositionCache()

    def positions(size: tuple[int, int]) -> Positions:
        return cache(Grid(size, prefix=prefix, reference=reference), x)

    sizes: list[tuple[int, int]] = []
    if coord is None:
        pos = prepare(preparing, positions(tuple(shape)), batch=x.shape[0])
        x = _with_shared(x, pos, given, shared)
    else:
        valid = coord.new_ones(coord.shape[:2], dtype=torch.bool) if valid is None else valid.bool()
        sizes = _sizes(coord, valid)
        pos = prepare(preparing, packed(coord, valid, sizes, preparing, positions), batch=x.shape[0])
        if any(
            isinstance(e, Sampler) for e in preparing
        ):  # all that is added reads the places that were drawn
            x = _with_shared(x, pos, given, shared)
        else:
            x = _with_tables(x, coord, valid, sizes, prefix, shared, positions)
    return x, pos, len(set(sizes)) > 1


def _with_shared(x: Tensor, pos: Positions, given: Tensor, shared: Sequence[Encoding]) -> Tensor:
    for encoding in shared:
        if isinstance(encoding, Additive):
            x = fx_leaves.add(encoding, x, pos, given)
    return x


def _with_tables(
    x: Tensor,
    coord: Tensor,
    valid: Tensor,
    sizes: list[tuple[int, int]],
    prefix: int,
    shared: Sequence[Encoding],
    positions: Callable[[tuple[int, int]], Positions],
) -> Tensor:
    """Return packed tokens with the encodings that are added to them; padding gets nothing."""
    encodings = [e for e in shared if isinstance(e, Additive)]
    for encoding in encodings:
        if encoding.reads_tokens:
            x = encoding.embed(x, encoding.prepare(packed(coord, valid, sizes, (), positions)))
            continue
        for size in dict.fromkeys(sizes):
            rows = torch.tensor([i for i, s in enumerate(sizes) if s == size], device=x.device)
            cell = (coord[rows, :, 0] * size[1] + coord[rows, :, 1]).long() * valid[rows]
            table = encoding.table(encoding.prepare(positions(size)))[0]
            added = table[prefix:].index_select(0, cell.flatten()).unflatten(0, cell.shape)
            added = added * valid[rows, :, None]
            head = table[:prefix].expand(len(rows), -1, -1)
            x = x.index_add(0, rows, torch.cat([head, added], 1).to(x.dtype))
    return x


def _sizes(coord: Tensor, valid: Tensor) -> list[tuple[int, int]]:
    """Return the grid (rows, columns) of each sample from the coordinates (b, n, 2) of its patches."""
    if coord.ndim != 3 or coord.shape[-1] != 2 or coord.shape[:2] != valid.shape:
        raise ShapeError(
            f"NaFlexVit needs patch_coord (b, n, 2) and patch_valid (b, n), got {tuple(coord.shape)} and "
            f"{tuple(valid.shape)}."
        )
    far = coord.masked_fill(~valid[..., None], 0).amax(1) + 1
    return [(int(h), int(w)) for h, w in far.tolist()]


VispeNaFlexVit = hosted(NaFlexVit)
