"""iRPE: learned scalars or vectors per bucket of patch offsets (arXiv 2107.14222)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.content import ContextBias
from vispe.attention.bias.dense import SumBias
from vispe.attention.bias.table import TableBias
from vispe.attention.value_term import ValueTerm
from vispe.encodings.base import Biased
from vispe.encodings.parts.bias import buckets
from vispe.encodings.parts.bias.axis_terms import CrossBias, CrossValue
from vispe.encodings.parts.bias.buckets import RATIOS, Method
from vispe.encodings.parts.bias.irpe_tables import BucketTable, CrossTables, Mode, PrefixBuckets, num_buckets
from vispe.encodings.registry import register
from vispe.errors import OptionError
from vispe.grid import Positions
from vispe.utils.options import PositiveFloat, PositiveInt
from vispe.utils.parameters import parameters_of


def _published(on: str, method: Method = "product") -> dict[str, Any]:
    return {"method": method, "mode": "contextual", "on": on}


@register
class IRPE(Biased):
    """Adds a learned scalar or vector per bucket of the offset of two patches.

    o = p_i - p_j;  g: o itself up to alpha, then logarithmic, at most beta (alpha, beta, gamma = 1, 2, 8 ratio)
    contextual: logits[h, i, j] += scale * (q_i . Tk[h, b(o)] + k_j . Tq[h, b(-o)]);  out_i += sum_j A_ij Tv[h, b(o)]
    bias: logits[h, i, j] += Tk[h, b(o)] + Tq[h, b(-o)]          arXiv 2107.14222

    The released DeiT models are ``irpe.ctx_product_50_shared_k``, ``irpe.ctx_product_50_shared_qk`` and
    ``irpe.ctx_product_50_shared_qkv`` (all in addition to the absolute table: convert with keep_abs=True); their
    checkpoints load. The authors' other models are ``irpe.ctx_euc_20_shared_k``, ``irpe.ctx_quant_51_shared_k``,
    ``irpe.ctx_cross_56_shared_k`` and, in their DETR encoder, ``irpe.detr_7x7`` and ``irpe.detr_9x9``.

    Args:
        dim: width of the tokens; dim / num_heads is that of a head, d_h.
        num_heads: heads, h.
        head_dim: channels of a head, d_h; dim / num_heads by default.
        method: definition of b: 'product' g(dy) and g(dx) as a pair; 'cross' a table for g(dy) and one for g(dx), which
            add up; 'euclidean' g(round(|o|)); 'quantization' g(|o|^2).
        mode: 'contextual' (vectors multiplied with q, k or the attention weights) or 'bias' (scalars).
        on: which of q, k and v have a table: 'k', 'qk', 'qkv', 'v', ...; v needs the contextual mode.
        shared: one table for all heads instead of one per head.
        ratio: offset from which on buckets are shared, in patches; 1.9 for product, 33 for quantization, 20 for
            euclidean and cross by default.
        prefix_buckets: 1: class and register tokens have one more bucket, for all pairs they are in; 3: one each for
            prefix to patch, patch to prefix, prefix to prefix; 0: none, their terms are 0.

    Shapes: pos (n, 2) of a grid -> bias (b, h, n, n), contextual, or (1, h or 1, n, n). Tables, all 0 at first:
        (h or 1, d_h, buckets) on q and k, (h or 1, buckets, d_h) on v, (h or 1, buckets) as bias.
    New resolution: no resampling needed; offsets beyond 8 ratio share the outer bucket.
    Cost: contextual k or q: b h n buckets d_h and a gather per score; 'cross' gathers n (h + w) and adds; v: sums per
        bucket, nothing of n x n x d_h, but attention weights are materialised.
    Invariant to: translation. Euclidean and quantization: rotation by 90 degrees and flips of a square grid too.
    Raises: ShapeError if `pos` is not of a 2-axis grid; OptionError for incompatible options.
    Differs from the reference: the grid is always explicit, never inferred from the number of tokens, and any number of
        prefix tokens is supported; tables have no weight decay unless the optimizer is configured to.

    Example:
        >>> import torch
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("irpe", dim=16, num_heads=2)
        >>> q = torch.ones(1, 2, 6, 8)
        >>> encoding.bias(Grid((2, 3)).positions(), 0).dense(q=q, k=q, scale=0.35).shape
        torch.Size([1, 2, 6, 6])
    """

    name = "irpe"
    paper = "Rethinking and Improving Relative Position Encoding for Vision Transformer, https://arxiv.org/abs/2107.14222"
    year = 2021
    encodes = ("distance", "direction", "content")
    invariant = ("translation",)
    formula = (
        r"a_{hij} = s \left( q_i \cdot k_j + q_i \cdot T^k_{h, b(o)} + k_j \cdot T^q_{h, b(-o)} \right), "
        r"\quad o = p_i - p_j \\ o_i = \sum_j A_{ij} \left( v_j + T^v_{h, b(o)} \right)"
    )
    tested_options = (
        "method=euclidean,on=qkv",
        "method=quantization,ratio=2.5,shared=false",
        "method=cross,on=qkv,prefix_buckets=3",
        "on=v,prefix_buckets=0",
        "mode=bias,on=qk,shared=false",
        "mode=bias,method=cross,prefix_buckets=3",
        "mode=bias,method=euclidean,prefix_buckets=0",
    )
    preset_invariant: ClassVar[dict[str, tuple[str, ...]]] = {
        "ctx_euc_20_shared_k": ("translation", "quarter_turns", "reflection"),
        "ctx_quant_51_shared_k": ("translation", "quarter_turns", "reflection"),
    }
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "ctx_product_50_shared_k": _published("k"),
        "ctx_product_50_shared_qk": _published("qk"),
        "ctx_product_50_shared_qkv": _published("qkv"),
        "ctx_euc_20_shared_k": _published("k", "euclidean"),
        "ctx_quant_51_shared_k": _published("k", "quantization"),
        "ctx_cross_56_shared_k": _published("k", "cross"),
        "detr_7x7": {**_published("k"), "prefix_buckets": 0},
        "detr_9x9": {**_published("k"), "prefix_buckets": 0, "ratio": 2.0},
    }

    dim: PositiveInt
    num_heads: PositiveInt
    head_dim: PositiveInt | None = None
    method: Method = "product"
    mode: Mode = "contextual"
    on: str = "k"
    shared: bool = True
    ratio: PositiveFloat | None = None
    prefix_buckets: PrefixBuckets = 1

    def __post_init__(self) -> None:
        on, width = self.on, self._resolve_head_dim()
        if type(on) is not str or not on or len(set(on)) != len(on) or set(on) - set("qkv"):
            raise OptionError(f"on must be some of the letters q, k, v, each once, got on={on!r}.")
        if self.mode == "bias" and "v" in on:
            raise OptionError(
                f"A bias is added to the logits, so mode='bias' cannot be on v, got on={on!r}: "
                "omit v or use mode=contextual."
            )
        self.ratio: float = RATIOS[self.method] if self.ratio is None else self.ratio
        heads = 1 if self.shared else self.num_heads
        # buckets of prefix tokens included
        count = num_buckets(self.method, self.ratio, self.prefix_buckets)
        table_class = CrossTables if self.method == "cross" else BucketTable
        for letter in "qkv":
            # tables on k and q are the transpose of those on v, as in the released checkpoints
            shape = (heads, count, width) if letter == "v" else (heads, width, count)
            shape = (heads, count) if self.mode == "bias" else shape
            # setattr, since a registered None would swallow checkpoint entries
            setattr(self, f"rpe_{letter}", table_class(self.mode, shape) if letter in on else None)

    @property
    def per_layer(self) -> bool:
        """True: every layer has its own tables."""
        return True

    def reset_parameters(self) -> None:
        """Set all tables to 0, so that initially nothing is added."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def rename_checkpoint_keys(self, state_dict: dict[str, Any], parent_prefix: str, prefix: str) -> None:
        """Rename the tables of released checkpoints from the attention layer."""
        for key in [
            k for k in state_dict if k.startswith(tuple(f"{parent_prefix}rpe_{c}." for c in self.on))
        ]:
            state_dict[prefix + key.removeprefix(parent_prefix)] = state_dict.pop(key)

    def bias(self, pos: Positions, layer: int, x: Tensor | None = None) -> Bias | None:
        """Return the terms on k and q; None when there is only one on v."""
        self._need_grid(pos)
        term = self._fixed if self.mode == "bias" else self._contextual
        terms = [term(pos, letter) for letter in "kq" if letter in self.on]
        return SumBias(terms) if len(terms) > 1 else terms[0] if terms else None

    def value_term(self, pos: Positions, layer: int) -> ValueTerm | None:
        """Return the term on v, or None."""
        if "v" not in self.on:
            return None
        self._need_grid(pos)
        tables = self._tables("v")
        if self.method == "cross":
            return CrossValue(
                tables[0], tables[1], buckets.grid_lines(pos, self.ratio, self.prefix_buckets), pos
            )
        return ValueTerm(tables[0], self._pairs(pos)[0])

    def _contextual(self, pos: Positions, letter: str) -> Bias:
        tables = self._tables(letter)
        dot = "query" if letter == "k" else "key"
        if self.method == "cross":
            lines = buckets.grid_lines(pos, self.ratio, self.prefix_buckets)
            return CrossBias((tables[0], tables[1]), lines, dot, pos)
        options = self.method, self.ratio, self.prefix_buckets
        # the table on q is indexed by the offset from the key
        pairs = buckets.grid_buckets(pos, *options, transposed=dot == "key")
        return ContextBias(tables[0], pairs, dot, True, pos, cache_key=("irpe", letter, *options))

    def _fixed(self, pos: Positions, letter: str) -> Bias:
        tables = parameters_of(self.get_submodule(f"rpe_{letter}"))
        offsets = buckets.offset_buckets(pos, self.method, self.ratio)
        # (h or 1, buckets) -> (h or 1, offsets per axis)
        read = [
            table.index_select(1, ids.flatten()).reshape(-1, *ids.shape)
            for table, ids in zip(tables, offsets, strict=True)
        ]
        # 'cross': the row bucket and the column bucket of each offset are added
        values = read[0] if len(read) == 1 else read[0][:, :, None] + read[1][:, None]
        # the table on q is read at the negative offset
        values = values if letter == "k" else values.flip(1, 2)
        if not self.prefix_buckets:
            return TableBias(values, pos, one_grid=False, depends_on=self._sources(letter))
        # one shared prefix bucket is expanded to the three kinds of pairs
        edge = sum(tables[1:], tables[0])[:, -self.prefix_buckets :].expand(-1, 3)
        # for q, prefix to patch and patch to prefix are exchanged
        edge = edge if letter == "k" else edge[:, [1, 0, 2]]
        return TableBias(values, pos, edge, one_grid=False, depends_on=self._sources(letter))

    def _pairs(self, pos: Positions) -> tuple[Tensor, ...]:
        return buckets.pair_buckets(pos, self.method, self.ratio, self.prefix_buckets)

    def _tables(self, letter: str) -> Sequence[Tensor]:
        """Return the tables of vectors, (h or 1, buckets, d_h); an absent prefix bucket is zero."""
        parameters = parameters_of(self.get_submodule(f"rpe_{letter}"))
        # (h or 1, d_h, buckets) -> (h or 1, buckets, d_h)
        tables = parameters if letter == "v" else [p.transpose(-1, -2) for p in parameters]
        return tables if self.prefix_buckets else [F.pad(t, (0, 0, 0, 1)) for t in tables]
