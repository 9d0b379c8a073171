"""timm's `NaFlexVit` as it runs with a positional encoding of vispe: images, or packed patches of several grids.

Packed patches come with their coordinates. Attention sees each sample with the extent of its own grid, and the
padding mask together with the bias; what is added to the tokens is made for each grid as if it came alone.
Coordinates follow dropped patches. The model's own rotary embedding is treated as in `vispe.hosts.timm_eva`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from timm.layers import apply_keep_indices_nlc
from timm.models import NaFlexVit
from timm.models.naflexvit import create_attention_mask
from torch import Tensor, nn
from torch.nn import functional as F

from vispe.base import Additive, Biased, Rotary
from vispe.errors import ShapeError
from vispe.grid import Grid, Positions
from vispe.hosts.context import Context
from vispe.hosts.timm_attention import shared_encodings
from vispe.hosts.timm_hosted import HostedTimm, after_dropping, hosted_class

OVERRIDDEN = ("_forward_embeds", "_load_from_state_dict")


class LaterDropout(nn.Dropout):
    """The dropout of the embedding, which the host applies itself, after the encodings were added."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens as they are."""
        return x


@cache
def hosted(stock: type[NaFlexVit]) -> type[NaFlexVit]:
    """Return the converted counterpart of a NaFlexVit class; errors as of `hosted_class`."""
    return hosted_class(HostedNaFlex, stock, NaFlexVit, OVERRIDDEN)


class HostedNaFlex(HostedTimm, NaFlexVit):
    """The parts of a timm NaFlexVit that change when it is converted."""

    vispe_make = staticmethod(hosted)
    vispe_tables = ("embeds.pos_embed", "embeds.pos_embed_y", "embeds.pos_embed_x")

    def _forward_embeds(
        self,
        x: Tensor,
        patch_coord: Tensor | None,
        patch_valid: Tensor | None,
        attn_mask: Tensor | None,
    ) -> dict[str, Any]:
        image = x if patch_coord is None else None
        x, shape = self.embeds(x, patch_coord=patch_coord, patch_valid=patch_valid)
        rope, mixed = None, False
        if patch_coord is None:
            grid = Grid(tuple(shape), prefix=self.num_prefix_tokens, reference=self.vispe.reference)
            pos = self._vispe_prepared(self.vispe.cache(grid, x))
            for encoding in shared_encodings(self):
                if isinstance(encoding, Additive):
                    x = x + encoding.table(pos, image).to(x.dtype)
            if self.rope is not None:
                rope = self.rope.get_embed(shape=shape)
        else:
            valid = patch_coord.new_ones(patch_coord.shape[:2], dtype=torch.bool)
            valid = valid if patch_valid is None else patch_valid.bool()
            sizes = _sizes(patch_coord, valid)
            mixed = len(set(sizes)) > 1
            x = self._vispe_add(x, patch_coord, valid, sizes)
            pos = self._vispe_prepared(self._vispe_packed(patch_coord, valid, sizes, x))
            if self.rope is not None:
                rope = self._generate_rope_naflex(x, patch_coord)
        x = F.dropout(x, self.embeds.pos_drop.p, self.training)
        keep: Tensor | None = None
        if self.training and self.patch_drop is not None:
            x, keep = self.patch_drop(x)
        if keep is not None:
            pos = after_dropping(pos, keep)
            patch_valid = None if patch_valid is None else patch_valid.gather(1, keep)
            if rope is not None and not self.rope_is_mixed:
                packed = patch_coord is not None
                rope = apply_keep_indices_nlc(x, rope, keep, pos_embed_has_batch=packed)
                rope = rope if packed else rope.unsqueeze(1)
        mask = self._vispe_mask(patch_valid, x) if attn_mask is None else attn_mask
        if self.vispe.inside:
            if torch.compiler.is_compiling() and self.grad_checkpointing:
                pos.memo = None  # fresh while compiling, so no other forward pass loses it
            mask = Context(pos, shared_encodings(self), mask, False, mixed=mixed)
        return {
            "patches": self.norm_pre(x),
            "patch_valid": patch_valid,
            "rope_embeds": rope,
            "attn_mask": mask,
            "keep_indices": keep,
        }

    def _vispe_mask(self, patch_valid: Tensor | None, x: Tensor) -> Tensor | None:
        """Return the padding mask: which keys exist (b, 1, 1, n) for vispe's attention, timm's own otherwise.

        timm also masks the rows of padded queries, by the lowest number of the dtype, which a bias would push
        over its edge; nothing reads those rows.
        """
        if patch_valid is None or not self.vispe.inside:
            return create_attention_mask(
                patch_valid,
                num_prefix_tokens=self.num_prefix_tokens,
                symmetric=not self.use_key_only_attn_mask,
                q_len=1 if self.use_key_only_attn_mask else None,
                dtype=x.dtype,
            )
        return F.pad(patch_valid.bool(), (self.num_prefix_tokens, 0), value=True)[:, None, None]

    def _vispe_packed(
        self, coord: Tensor, valid: Tensor, sizes: list[tuple[int, int]], x: Tensor
    ) -> Positions:
        """Return the positions of packed patches (b, n, 2): cells of the smallest grid that holds every sample.

        Each sample has the extent of its own grid, so nothing that wraps or normalises sees the others.

        Raises:
            ShapeError: the samples have different grids, and an encoding inside attention resamples per grid.
        """
        prefix = self.num_prefix_tokens
        shape = (max(h for h, _ in sizes), max(w for _, w in sizes))
        grid = Grid(shape, prefix=prefix, reference=self.vispe.reference)
        if len(set(sizes)) == 1:
            whole = self.vispe.cache(grid, x)
            if coord.shape[1] == grid.patches and bool(
                (coord == whole.coords[:, prefix:]).all() & valid.all()
            ):
                return whole
        else:
            inside = (*shared_encodings(self), *self._vispe_layered())
            fixed = dict.fromkeys(
                e.name for e in inside if isinstance(e, Biased | Rotary) and not e.extrapolates
            )
            if fixed:
                raise ShapeError(
                    f"The batch packs samples of the grids {sorted(set(sizes))}, but {' + '.join(fixed)} is resampled "
                    "for one grid at a time; pack samples of equal grids, or choose another encoding."
                )
        coords = coord.to(torch.float32) * valid[..., None]
        index = (coord[..., 0] * shape[1] + coord[..., 1]).long() * valid
        return Positions(
            F.pad(coords, (0, 0, prefix, 0)),
            F.pad(valid, (prefix, 0), value=False),
            coords.new_tensor(sizes),
            index=F.pad(index, (prefix, 0)),
            grid=grid,
        )

    def _vispe_add(self, x: Tensor, coord: Tensor, valid: Tensor, sizes: list[tuple[int, int]]) -> Tensor:
        """Add the encodings that are added to packed tokens; padding gets nothing."""
        encodings = [e for e in shared_encodings(self) if isinstance(e, Additive)]
        prefix = self.num_prefix_tokens
        for size in dict.fromkeys(sizes) if encodings else ():
            grid = Grid(size, prefix=prefix, reference=self.vispe.reference)
            pos = self.vispe.cache(grid, x)
            rows = torch.tensor([i for i, s in enumerate(sizes) if s == size], device=x.device)
            cell = (coord[rows, :, 0] * size[1] + coord[rows, :, 1]).long() * valid[rows]
            for encoding in encodings:
                table = encoding.table(encoding.prepare(pos))[0]
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
