"""Disentangled attention of DeBERTa: content-to-position and position-to-content terms (arXiv 2006.03654)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.dense import SumBias
from vispe.attention.precision import at_least_float32, exact_product
from vispe.attention.transform.abstract_transform import Transform
from vispe.attention.transform.affine import Affine
from vispe.encodings.base import Biased, Rotary
from vispe.encodings.parts.bias.buckets import deberta_bucket
from vispe.encodings.parts.bias.relative import Dot, read_by_axis
from vispe.encodings.parts.coords import coordinate_count
from vispe.encodings.parts.layers import PreciseLinear
from vispe.encodings.registry import register
from vispe.errors import OptionError, UnsupportedCombination, counted
from vispe.grid import Positions
from vispe.utils.autocast import no_autocast
from vispe.utils.interval import Interval
from vispe.utils.options import Axes, NonNegativeFloat, PositiveInt


@register
class Deberta(Biased, Rotary):
    """Adds products of queries with relative-position keys, and of keys with relative-position queries.

    logits[i, j] = scale * (q_i . k_j + q_i . K(p_i - p_j) + k_j . Q(p_i - p_j))          arXiv 2006.03654, section 3.1

    K and Q are projections of one table of embeddings, whose rows are buckets of offsets: one per offset up to half of
    position_buckets, logarithmic beyond. On several axes, the embeddings of all offsets are added.

    Args:
        dim: width of the tokens, d; dim / num_heads is that of a head, d_h.
        num_heads: heads, h.
        head_dim: channels of a head, d_h; dim / num_heads by default.
        terms: 'c2p' (the one with K), 'p2c' (the one with Q) or 'both'.
        share_att_key: project with the query and key layers of the attention, passed to `tie`, instead of separate
            projections.
        position_buckets: buckets to each side; None: one for each offset up to max_relative_positions.
        max_relative_positions: offset from which on the last bucket is shared, in patches.
        rescale: divide all terms, including q_i . k_j, by the square root of their number, as the authors do.
        std: initial standard deviation of the projections; 0: a pretrained model is unchanged, and embeddings learn
            from the second step on.
        grid: shape of the token grid, supplied by the host.
        axes: number of axes; by default that of `grid`, or 2.

    Presets: ``deberta.scratch`` rescales and draws the projections, for training from scratch.

    Shapes: pos of a grid -> bias (b, h, n, n); rel_embeddings (axes * 2 span, d), with span the buckets per side;
        pos_key_proj and pos_query_proj d to d. Prefix rows and columns are 0; prefix tokens are not rescaled.
    New resolution: no resampling needed; far offsets share the outer bucket.
    Cost: 2 span d axes + 2 d^2 parameters per layer; on grids of 2 axes b h n (gh + gw + 4 span) d_h, else a gather of
        n x n for each term and axis.
    Invariant to: translation, at equal queries and keys.
    Raises: ShapeError if `pos` is not of a grid with as many axes; OptionError for buckets that do not fit;
        UnsupportedCombination for share_att_key without `tie`.
    Differs from the reference: several axes; embeddings are per layer and have no norm; buckets for
        images are fewer; rescale is off and projections start at 0, so that a pretrained model is unchanged at first.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("deberta", dim=16, num_heads=2)
        >>> q = torch.ones(1, 2, 6, 8)
        >>> encoding.bias(Grid((2, 3)).positions(), 0).dense(q=q, k=q, scale=0.35).shape
        torch.Size([1, 2, 6, 6])
    """

    name = "deberta"
    paper = "DeBERTa: Decoding-enhanced BERT with Disentangled Attention, https://arxiv.org/abs/2006.03654"
    year = 2020
    ndim = (1, 2, 3)
    presets: ClassVar[dict[str, dict[str, Any]]] = {"scratch": {"rescale": True, "std": 0.02}}
    fused = True
    encodes = ("distance", "direction", "content")
    invariant = ("translation",)
    formula = r"a_{ij} = s \left( q_i \cdot k_j + q_i \cdot K_{p_i - p_j} + k_j \cdot Q_{p_i - p_j} \right)"
    tested_options = (
        "terms=p2c,std=0.5,position_buckets=4,max_relative_positions=9",
        "terms=c2p,rescale=true,position_buckets=null,max_relative_positions=2",
        "std=0.5,rescale=true",
    )
    scales_channels = True

    dim: PositiveInt
    num_heads: PositiveInt
    head_dim: PositiveInt | None = None
    terms: Literal["both", "c2p", "p2c"] = "both"
    share_att_key: bool = False
    position_buckets: Annotated[int, Interval(least=2)] | None = 32
    max_relative_positions: PositiveInt = 128
    rescale: bool = False
    std: NonNegativeFloat = 0.0
    grid: tuple[PositiveInt, ...] | None = None
    axes: Axes | None = None

    def __post_init__(self) -> None:
        self.inner = self.num_heads * self._resolve_head_dim()
        self._accept(coordinate_count(self.name, self.axes, self.grid))
        buckets, most = self.position_buckets, self.max_relative_positions
        if buckets is not None and most <= buckets // 2 + 1:
            raise OptionError(
                f"deberta needs max_relative_positions above position_buckets / 2 + 1 = {buckets // 2 + 1}, got "
                f"{most}. "
                "Increase it, or use position_buckets=null for one bucket per offset."
            )
        if self.share_att_key and self.std:
            raise OptionError(
                f"std={self.std:g} has no effect with share_att_key=True, which has no separate projections. Omit "
                f"one of them."
            )
        self.span = buckets or most
        self.rel_embeddings = nn.Parameter(torch.empty(self.ndim[0] * 2 * self.span, self.dim))
        for name, term in (("pos_key_proj", "c2p"), ("pos_query_proj", "p2c")):
            is_separate = self.terms in (term, "both") and not self.share_att_key
            setattr(self, name, PreciseLinear(self.dim, self.inner) if is_separate else None)
        self.reset_parameters()

    @property
    def per_layer(self) -> bool:
        """True: every layer has its own embeddings and projections."""
        return True

    def reset_parameters(self) -> None:
        """Draw embeddings with standard deviation 0.02 and projections with `std`."""
        nn.init.normal_(self.rel_embeddings, std=0.02)
        for layer in self.children():
            if isinstance(layer, PreciseLinear):
                nn.init.normal_(layer.weight, std=self.std) if self.std else nn.init.zeros_(layer.weight)
                nn.init.zeros_(layer.bias)

    def tie(self, attention: nn.Module) -> None:
        """Share the query and key projections of `attention`: `qkv`, or `q_proj` and `k_proj`.

        The layers are looked up in each forward pass, so that adapters and quantised replacements are used.
        """
        out_features = (3 if getattr(attention, "qkv", None) is not None else 1) * self.inner
        for layer in self._layers(attention):
            if (getattr(layer, "in_features", None), getattr(layer, "out_features", None)) != (
                self.dim,
                out_features,
            ):
                raise UnsupportedCombination(
                    f"{type(attention).__name__} has no linear layers qkv, or q_proj and k_proj, from {self.dim} to "
                    f"{counted(out_features, 'channel')} for deberta to share. Omit share_att_key."
                )
        # not as a submodule: it contains this encoding
        vars(self)["_tied"] = attention

    @staticmethod
    def _layers(attention: nn.Module) -> tuple[Any, Any]:
        """Return the projections of queries and keys."""
        fused = getattr(attention, "qkv", None)
        if fused is not None:
            return fused, fused
        return getattr(attention, "q_proj", None), getattr(attention, "k_proj", None)

    def buckets(self, offset: Tensor) -> Tensor:
        """Return the bucket of integer offsets, int64, from -span on."""
        if self.position_buckets is None:
            return offset
        return deberta_bucket(offset, self.position_buckets, self.max_relative_positions)

    def transform(self, pos: Positions, layer: int, x: Tensor | None = None) -> Transform:
        """Return the rescaling of the queries of patches, or the identity."""
        self._need_axes(pos)
        if not self.rescale:
            return Transform()
        has_position = pos.spatial.to(torch.promote_types(self.rel_embeddings.dtype, torch.float32))
        # the factor for patches, 1 for prefix tokens
        return Affine(q_mul=(1 + (self._factor - 1) * has_position)[:, None, :, None])

    def bias(self, pos: Positions, layer: int, x: Tensor | None = None) -> Bias:
        """Return the terms of block `layer`."""
        grid = self._need_grid(pos)

        def rows(n: int) -> Tensor:
            offset = torch.arange(1 - n, n, device=pos.coords.device)
            # rows from 0; offsets beyond the span share the outermost rows
            return (self.buckets(offset) + self.span).clamp(0, 2 * self.span - 1)

        key = (self.name, self.position_buckets, self.max_relative_positions)
        terms: list[Bias] = []
        sides: tuple[tuple[str, Dot], ...] = (("c2p", "query"), ("p2c", "key"))
        for term, dot in sides:
            if self.terms in (term, "both"):
                terms += read_by_axis(
                    pos, grid, key, self._tables("key" if term == "c2p" else "query"), rows, dot
                )
        return SumBias(terms) if len(terms) > 1 else terms[0]

    @property
    def _factor(self) -> float:
        """One over the square root of the number of terms."""
        # the terms are the content and one or both of c2p and p2c
        return (2.0 + (self.terms == "both")) ** -0.5 if self.rescale else 1.0

    def _tables(self, side: Literal["query", "key"]) -> list[Tensor]:
        """Return the projected embeddings of each axis, (h, 2 span, d_h)."""
        table, bias = self._projected(side)
        parts = list(table.split(2 * self.span))
        if bias is not None:  # only once for all axes
            parts[0] = parts[0] + bias
        # (2 span, h d_h) -> (h, 2 span, d_h)
        return [(p * self._factor).unflatten(1, (self.num_heads, -1)).transpose(0, 1) for p in parts]

    def _projected(self, side: Literal["query", "key"]) -> tuple[Tensor, Tensor | None]:
        """Return the embeddings times the projection, (axes * 2 span, h d_h), and its bias, in float32 or better."""
        if not self.share_att_key:
            proj = cast("PreciseLinear", self.pos_key_proj if side == "key" else self.pos_query_proj)
            return exact_product(self.rel_embeddings, proj.weight.t()), proj.bias
        tied = vars(self).get("_tied")
        if tied is None:
            raise UnsupportedCombination(
                "deberta with share_att_key=True needs the attention whose projections it shares, got none. Call "
                "tie(attention), or omit share_att_key."
            )
        layer = self._layers(tied)[side == "key"]
        # a fused layer has the rows of queries first, then those of keys
        start = self.inner if layer.out_features > self.inner and side == "key" else 0
        rows = slice(start, start + self.inner)
        # torchao keeps the class of a layer and quantises its weight, which has no rows to select
        if type(layer) is nn.Linear and not is_traceable_wrapper_subclass(layer.weight):
            bias = None if layer.bias is None else at_least_float32(layer.bias[rows])
            return exact_product(self.rel_embeddings, layer.weight[rows].t()), bias
        # adapters and quantised layers have no single weight: call the layer; its bias is the output for 0
        with no_autocast(self.rel_embeddings.device):
            table = torch.cat([self.rel_embeddings, torch.zeros_like(self.rel_embeddings[:1])])
            projected = at_least_float32(layer(table)[:, rows])
        return projected[:-1] - projected[-1:], projected[-1]
