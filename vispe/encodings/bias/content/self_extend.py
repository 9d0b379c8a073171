"""SelfExtend: RoPE on larger grids by grouping far positions, without training (arXiv 2401.01325)."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.dense_request import DenseRequest
from vispe.attention.precision import at_least_float32
from vispe.attention.transform.abstract_transform import Layout
from vispe.encodings.base import Biased
from vispe.encodings.parts.bias.scores import ScoreBias
from vispe.encodings.parts.rotary.pairwise.self_extend import SelfExtendScores
from vispe.encodings.parts.rotary.rope.axial_pairs import pair_counts
from vispe.encodings.registry import register
from vispe.errors import OptionError
from vispe.grid import Positions
from vispe.grid.frequencies import inverse_frequencies
from vispe.utils.autocast import no_autocast
from vispe.utils.options import PositiveFloat, PositiveInt, Spacing


@register
class SelfExtend(Biased):
    """Axial RoPE with exact offsets for near patches and grouped offsets for far ones, so that offsets stay small.

    Offset on an axis: p_i - p_j below the window w, else floor(p_i / g) - floor(p_j / g) + w - floor(w / g), mirrored
    behind                                                                      arXiv 2401.01325, LongEmbed 2404.12096

    For models trained with ``rope_axial`` on smaller grids, without training: with ``group=1`` it equals `rope_axial`.
    The largest offset of a side of N patches is about (N - w) / g + w. Patches within the window on all axes
    (Chebyshev) are unchanged; for others, each axis has its own rule.

    Args:
        dim: width of the tokens, d.
        num_heads: heads, h.
        head_dim: channels of a head, d_h; dim / num_heads by default.
        group: number of positions that share one, g.
        window: distance from which patches are grouped, w, in units of the spacing.
        temperature: ratio of the longest to the shortest wavelength, that of the model.
        layout: which channels are a pair, that of the model: 'interleaved' 2c and 2c + 1, 'half' c and c + pairs.
        spacing: distance between neighbouring patches per axis, instead of `Grid.spacing`.

    Shapes: pos (n, axes), q and k (b, h, n, d_h) -> logits (b, h, n, n); prefix tokens are not rotated.
    New resolution: far offsets shrink by `group`; the trained grid should reach the largest.
    Cost: no parameters; three products for each axis instead of one, and dense logits for every image.
    Invariant to: nothing; groups start at the corner of the grid, so far offsets round differently elsewhere.
    Raises: ShapeError without queries and keys; OptionError for an odd head_dim.
    Differs from the reference: several axes, each with the authors' rule. They do not group inputs shorter than the
        window; here this follows from the rule.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("self_extend", dim=16, num_heads=2, window=2)
        >>> q = torch.ones(1, 2, 6, 8)
        >>> encoding.bias(Grid((2, 3)).positions(), 0).dense(q=q, k=q).shape
        torch.Size([1, 2, 6, 6])
    """

    name = "self_extend"
    paper = (
        "LLM Maybe LongLM: Self-Extend LLM Context Window Without Tuning, https://arxiv.org/abs/2401.01325"
    )
    year = 2024
    ndim = (1, 2, 3)
    encodes = ("distance", "direction", "position", "content")
    formula = (
        r"D = p_i - p_j \text{ below } w, \quad D = \lfloor p_i / g \rfloor - \lfloor p_j / g \rfloor + w "
        r"- \lfloor w / g \rfloor \text{ from there on}"
    )
    tested_options = ("group=3,window=2,layout=half", "group=2,window=1,spacing=[2,0.5]")

    dim: PositiveInt
    num_heads: PositiveInt
    head_dim: PositiveInt | None = None
    group: PositiveInt = 2
    window: PositiveInt = 8
    temperature: PositiveFloat = 100.0
    layout: Layout = "interleaved"
    spacing: Spacing | None = None

    def __post_init__(self) -> None:
        width = self._resolve_head_dim()
        if width % 2:
            raise OptionError(
                f"self_extend needs an even head_dim, got {width} (dim={self.dim}, num_heads="
                f"{self.num_heads}). Use another num_heads."
            )
        self.pairs = width // 2
        if self.spacing is not None:
            self._accept(len(self.spacing))

    def rates(self, axes: int) -> Tensor:
        """Return radians per unit of every axis for each pair of channels, (1, axes, pairs); x has the first pairs."""
        counts = pair_counts(self.name, None, self.pairs, axes)
        # a pair has rate 0 on all axes except one
        rates, start = torch.zeros(1, axes, self.pairs, dtype=torch.float64), 0
        for axis in reversed(range(axes)):
            # float64: errors of a rate grow with the offset
            part = inverse_frequencies(2 * counts[axis], self.temperature, torch.float64)
            rates[0, axis, start : start + counts[axis]] = part
            start += counts[axis]
        return rates

    def bias(self, pos: Positions, layer: int, x: Tensor | None = None) -> Bias | None:
        """Return the logits; `dense` depends on queries and keys."""
        self._need_axes(pos)
        return GridScores(pos, self.rates(pos.axes), self.group, self.window, self.layout, self.spacing)


class GridScores(ScoreBias):
    """The logits of `SelfExtend`."""

    __slots__ = ("group", "layout", "rates", "spacing", "window")
    of = "self_extend"

    def __init__(
        self,
        pos: Positions,
        rates: Tensor,
        group: int,
        window: int,
        layout: Layout,
        spacing: tuple[float, ...] | None,
    ) -> None:
        super().__init__(pos)
        self.rates, self.group, self.window, self.layout, self.spacing = rates, group, window, layout, spacing

    def scores(
        self, q: Tensor, k: Tensor, scale: float, pos_q: Positions, pos_k: Positions, request: DenseRequest
    ) -> Tensor:
        """Return the logits (b, h, n, m) of patches; those of pairs with a prefix token are plain rotary ones."""
        a, b = (p if self.spacing is None else p.with_spacing(self.spacing) for p in (pos_q, pos_k))
        # tokens without a position are at the origin, where the rotation is the identity
        at, to = (p.coords * p.spatial[..., None] for p in (a, b))
        # pairs with a prefix token have plain rotary offsets, without groups
        bare = ~(a.spatial[:, :, None] & b.spatial[:, None])
        rates = self.rates.to(q.device)
        grouped = SelfExtendScores(at, to, rates, self.group, self.window, self.layout, plain=bare)
        return grouped.scores(q, k, scale)

    def _dense(self, request: DenseRequest) -> Tensor:
        """Return the logits; unlike other score biases, prefix tokens interact with rotated patches, as in RoPE."""
        if request.q is None or request.k is None:
            return super()._dense(request)
        pos_q, pos_k = request.positions(self.pos)
        q, k = (at_least_float32(request.pick(x, 1)) for x in (request.q, request.k))
        # 1 / sqrt(d_h), as in attention without an explicit scale
        scale = q.shape[-1] ** -0.5 if request.scale is None else request.scale
        with no_autocast(q.device):
            return self.scores(q, k, scale, pos_q, pos_k, request)
