"""Relative position representations: a learned vector per offset for queries, keys or values (arXiv 1803.02155)."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.content import ContextBias, OffsetBuckets
from vispe.attention.bias.dense import SumBias
from vispe.attention.precision import same_grid
from vispe.attention.value_term import ValueTerm
from vispe.encodings.base import Biased
from vispe.encodings.parts.bias.content_terms import FactorBias
from vispe.encodings.parts.bias.relative import grid_rows, offset_rows, with_none
from vispe.encodings.parts.bias.table_interpolation import Resample, resample_table, take
from vispe.encodings.parts.coords import coordinate_count
from vispe.encodings.parts.layers import EmbeddingTable
from vispe.encodings.parts.resample import trained_grid
from vispe.encodings.registry import register
from vispe.errors import OptionError
from vispe.grid import Positions
from vispe.utils.options import Axes, NonNegativeInt, PositiveInt, Shape

TermOn = Literal["key", "key_query", "distance_factor", "offset_factor"]
TABLES = ("distance_embedding", "value_embedding")


@register
class Shaw(Biased):
    """Adds the product of the query with a learned vector of the offset, as if it were added to the key.

    o = p_i - p_j:  logits[i, j] += scale * q_i . r(o);  with values out_i += sum_j A_ij r'(o)          arXiv 1803.02155

    key_query adds scale * k_j . r(o), method 4 of arXiv 2009.13658; distance_factor and offset_factor make the product
    scale * (1 + t) q_i . k_j with numbers t(|o|) or t(o), its methods 1 and 2.

    Args:
        dim: width of the tokens; dim / num_heads is that of a head, d_h.
        num_heads: heads, h.
        head_dim: channels of a head, d_h; dim / num_heads by default.
        method: 'key', 'key_query', 'distance_factor' or 'offset_factor', see above.
        values: whether the values have a table of vectors, too.
        shared: one table for all heads instead of one per head.
        clip: range of the table: offsets from -clip[0] to clip[1] along each axis, to which others are clamped, instead
            of all offsets of `grid`.
        index: offset that rows of the table count: 'query_key' p_i - p_j (BERT), 'key_query' p_j - p_i (wav2vec 2.0
            BERT).
        resample: how another grid reads a table without `clip`: 'geometric' keeps near offsets and spreads far ones,
            'bicubic' stretches all equally.
        grid: shape of the token grid at the training resolution, 1 to 3 axes, supplied by the host.
        axes: number of axes; by default that of `grid`, or 2.

    Presets: ``shaw.values`` has keys and values as in the paper; ``shaw.method1``, ``shaw.method2`` and
        ``shaw.method4`` are those of arXiv 2009.13658.

    Shapes: pos of a grid -> bias (b, h, n, n). Tables, initialised with 0, so that a pretrained model is unchanged:
        (offsets, d_h), numbers (offsets, 1), both h times as wide unless `shared`. Prefix rows and columns are 0.
    New resolution: the table is resampled in each forward, see `resample`; with `clip` it needs no resampling.
    Cost: prod(2 n_a - 1) d_h parameters per layer; b h n prod(2 n_a - 1) d_h and a gather per score.
    Invariant to: translation, at equal queries and keys; distance_factor: reflection of an axis, too.
    Raises: ShapeError if `pos` is not of a grid with as many axes; OptionError for incompatible options.
    Differs from the reference: several axes; tables start at 0, so that a pretrained model is unchanged at first; a
        factor is 1 + t and does not affect rotations of queries and keys.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("shaw", dim=16, num_heads=2, grid=(4, 4))
        >>> q = torch.ones(1, 2, 6, 8)
        >>> encoding.bias(Grid((2, 3)).positions(), 0).dense(q=q, k=q, scale=0.35).shape
        torch.Size([1, 2, 6, 6])
    """

    name = "shaw"
    paper = "Self-Attention with Relative Position Representations, https://arxiv.org/abs/1803.02155"
    year = 2018
    ndim = (1, 2, 3)
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "values": {"values": True},
        "method1": {"method": "distance_factor"},
        "method2": {"method": "offset_factor"},
        "method4": {"method": "key_query"},
    }
    extrapolates = False
    encodes = ("distance", "direction", "content")
    invariant = ("translation",)
    formula = r"a_{ij} = s \, q_i \cdot \left( k_j + r_{p_i - p_j} \right)"
    tested_options = (
        "values=true,shared=false,resample=bicubic",
        "clip=[2,1],index=key_query,method=key_query",
        "clip=[3,3],method=distance_factor,shared=false",
    )
    preset_invariant: ClassVar[dict[str, tuple[str, ...]]] = {"method1": ("translation", "reflection")}

    dim: PositiveInt
    num_heads: PositiveInt
    head_dim: PositiveInt | None = None
    method: TermOn = "key"
    values: bool = False
    shared: bool = True
    clip: tuple[NonNegativeInt, NonNegativeInt] | None = None
    index: Literal["query_key", "key_query"] = "query_key"
    resample: Resample = "geometric"
    grid: Shape | None = None
    axes: Axes | None = None

    def __post_init__(self) -> None:
        width, heads = self._resolve_head_dim(), 1 if self.shared else self.num_heads
        axes = coordinate_count(self.name, self.axes, self.grid)
        self._accept(axes)
        if self.grid is None and self.clip is None:
            raise OptionError(
                "shaw needs grid, the grid of its table, or clip=[min, max] offset, got neither. Pass one of them."
            )
        if self.clip is not None:  # the table fits every grid
            vars(self)["extrapolates"] = True
        self.folded = self.method == "distance_factor"
        if self.folded and self.clip is not None and self.clip[0] != self.clip[1]:
            raise OptionError(
                f"method='distance_factor' is symmetric and needs two equal numbers for clip, got {self.clip}."
            )
        if self.folded and self.index != "query_key":
            raise OptionError(
                f"index={self.index!r} has no effect with method='distance_factor', which is symmetric. Omit it."
            )
        if self.clip is not None and self.resample != "geometric":
            raise OptionError(
                f"resample={self.resample!r} has no effect with clip={list(self.clip)}. Omit one of them."
            )
        self.distance_embedding = self._table_for(
            heads * (1 if "factor" in self.method else width), self.folded
        )
        self.value_embedding = self._table_for(heads * width, False) if self.values else None
        self.reset_parameters()

    def _table_for(self, channels: int, folded: bool) -> EmbeddingTable:
        rows = math.prod(self._sides(self.grid or (), folded))
        return EmbeddingTable(rows, channels)

    def _sides(self, grid: Sequence[int], folded: bool) -> tuple[int, ...]:
        """Return the shape of the table for a grid."""
        if self.clip is not None:
            return (self.clip[1] + 1 if folded else sum(self.clip) + 1,) * self.ndim[0]
        # distances need n rows per axis, signed offsets 2 n - 1
        return tuple(n if folded else 2 * n - 1 for n in grid)

    @property
    def per_layer(self) -> bool:
        """True: every layer has its own tables."""
        return True

    def reset_parameters(self) -> None:
        """Set all tables to 0, so that a pretrained model is initially unchanged."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def rename_checkpoint_keys(self, state_dict: dict[str, Any], parent_prefix: str, prefix: str) -> None:
        """Rename the tables of released checkpoints from the attention layer."""
        take(state_dict, parent_prefix, prefix, {f"{name}.weight": f"{name}.weight" for name in TABLES})

    def resample_checkpoint(
        self, state_dict: dict[str, Any], prefix: str, grid: tuple[int, ...] | None
    ) -> None:
        """Resample tables of another grid, as `bias` does; an unknown grid is assumed to be square."""
        for name in TABLES:
            # the table on values always has signed offsets
            key, folded = f"{prefix}{name}.weight", self.folded and name == TABLES[0]
            table = state_dict.get(key)
            if table is None or table.ndim != 2 or self.clip is not None or self.grid is None:
                continue
            old = trained_grid(
                key, grid, len(table), self.grid, lambda g, f=folded: math.prod(self._sides(g, f))
            )
            if old != self.grid:
                resampled = self._resampled(table, old, self.grid, folded)
                # only non-negative offsets are stored for distances
                half = tuple(slice(n - 1 if folded else 0, None) for n in self.grid)
                state_dict[key] = resampled[(slice(None), *half)].flatten(1).t().to(table.dtype)

    def bias(self, pos: Positions, layer: int, x: Tensor | None = None) -> Bias:
        """Return the bias of block `layer`."""
        pairs, table, cache_key = self._read(
            pos, self.distance_embedding, 1 if "factor" in self.method else None, self.folded
        )
        if "factor" in self.method:
            # (h or 1, rows, 1) -> (h or 1, rows)
            return FactorBias(table[..., 0], pairs if isinstance(pairs, Tensor) else pairs.pairs(), pos)
        dots = ("query", "key") if self.method == "key_query" else ("query",)
        terms = [ContextBias(table, pairs, dot, True, pos, cache_key=cache_key) for dot in dots]
        return SumBias(terms) if len(terms) > 1 else terms[0]

    def value_term(self, pos: Positions, layer: int) -> ValueTerm | None:
        """Return the term added to the attention output, with `values`."""
        if self.value_embedding is None:
            return None
        pairs, table, _ = self._read(pos, self.value_embedding, None, False)
        return ValueTerm(table, pairs if isinstance(pairs, Tensor) else pairs.pairs())

    def _read(
        self, pos: Positions, embedding: EmbeddingTable, channels: int | None, folded: bool
    ) -> tuple[Tensor | OffsetBuckets, Tensor, Hashable]:
        """Return the row of each pair (b or 1, n, n) or offset, the table (h or 1, rows, channels), and a cache key."""
        grid, weight = self._need_grid(pos), embedding.weight
        if self.clip is None and self.grid is not None and (folded or not same_grid(self.grid, grid.shape)):
            # (channels, 2 n_1 - 1, ...) -> (rows, channels)
            weight = self._resampled(weight, self.grid, grid.shape, folded).flatten(1).t()
        key = ("shaw", self.clip, self.index, folded)
        pairs = grid_rows(pos, key, lambda: self._rows(grid.shape, folded, pos.coords.device))
        # (rows, h * channels) -> (h, rows, channels)
        table = weight.unflatten(1, (-1, channels or self._resolve_head_dim())).transpose(0, 1)
        return pairs, with_none(table), key

    def _rows(self, shape: Sequence[int], folded: bool, device: torch.device) -> Tensor:
        """Return the table row of every offset of a grid, (2 n_1 - 1, ...), query minus key."""
        index = torch.zeros((), dtype=torch.int64, device=device)
        for n in shape:
            along, side = offset_rows(n, device, self.clip, self.index == "key_query"), 2 * n - 1
            if self.clip is not None:
                side = sum(self.clip) + 1
            if self.clip is not None and folded:  # distances are indexed from 0
                along, side = (along - self.clip[0]).abs(), self.clip[0] + 1
            # row-major over the axes
            index = index[..., None] * side + along
        return index

    def _resampled(self, table: Tensor, old: tuple[int, ...], new: tuple[int, ...], folded: bool) -> Tensor:
        """Return a table of one grid for another, (channels, 2 n_1 - 1, ...)."""
        values = table.t().unflatten(1, self._sides(old, folded))
        # a table of distances is mirrored to offsets from 1 - n to n - 1
        for axis, n in enumerate(old if folded else (), 1):
            values = torch.cat([values.narrow(axis, 1, n - 1).flip(axis), values], axis)
        return resample_table(values, old, new, self.resample)
