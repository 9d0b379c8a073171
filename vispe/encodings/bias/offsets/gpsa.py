"""GPSA of ConViT: gated mixture of positional attention, initialised as a convolution, and content attention."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.table import TableBias
from vispe.attention.precision import at_least_float32
from vispe.encodings.base import Biased
from vispe.encodings.multi_softmax import Branch
from vispe.encodings.parts.bias.table_interpolation import take
from vispe.encodings.parts.layers import PreciseLinear
from vispe.encodings.registry import register
from vispe.errors import OptionError, UnsupportedCombination
from vispe.grid import Grid, Positions
from vispe.utils.axes import last_axis_to
from vispe.utils.constants import constant
from vispe.utils.options import Axes, FiniteFloat, Integer, PositiveFloat, PositiveInt, check_per_axis

NAMES = ("gating_param", "pos_proj.weight", "pos_proj.bias")


@register
class GPSA(Biased):
    """Every head attends partly by content and partly by offset, as a convolution at the start.

    weights = (1 - s_h) softmax(q_i . k_j / sqrt(d_h)) + s_h softmax(w_h . (dx, dy, dx^2 + dy^2) + c_h)

    arXiv 2103.10697, section 4; (dx, dy) is the offset from the query to the key, s = sigmoid(gating).

    Args:
        num_heads: heads, h.
        axes: number of axes; w_h has one number for each, the last axis first, and one for the square.
        depth: blocks of the model, supplied by the host, to check `layers`.
        local_init: the first k^axes heads start at the offsets of a convolution of k^axes cells, with the largest
            possible k; the other heads, and all heads without it, start at random near uniform attention.
        locality_strength: initial sharpness of these heads: factor of their logits.
        gating: initial gating of all heads; a low number, such as -8, leaves a pretrained model nearly unchanged. With
            class-token pooling, that of the last block gets no gradient: only its class row is read, without a
            position.
        spacing: distance between neighbouring patches per axis, instead of `Grid.spacing`.
        layers: blocks that have it; all by default. ConViT has it in all but the last two of twelve.
        late_prefix: prefix tokens enter after the last of `layers`, unchanged, as the class token of ConViT; only
            timm's plain ViT supports this.

    Shapes: pos of a grid (n, axes) -> two softmaxes (b, h, n, n) with gates (1, h, n, 1). Prefix tokens attend by
        content alone, and are attended to by content alone.
    New resolution: no resampling needed; a step counts the same.   Cost: h (axes + 3) parameters per layer, two
        attentions, of which that by offset has a mask (h, n, n).
    Invariant to: translation.
    Raises: ShapeError if `pos` is not of a grid with as many axes; OptionError for blocks that do not exist;
        UnsupportedCombination with another encoding inside attention.
    Differs from the reference: grids of any shape, 1 to 3 axes and prefix tokens; the values start as those of the
        model, while the reference sets their projection to the identity; dropout applies to each softmax.

    Example:
        >>> from vispe import Attention
        >>> layer = Attention(8, 4, "gpsa")
        >>> layer(torch.ones(1, 6, 8), (2, 3)).shape
        torch.Size([1, 6, 8])
    """

    name = "gpsa"
    paper = (
        "ConViT: Improving Vision Transformers with Soft Convolutional Inductive Biases, "
        "https://arxiv.org/abs/2103.10697"
    )
    year = 2021
    ndim = (1, 2, 3)
    encodes = ("distance", "direction", "content")
    invariant = ("translation",)
    formula = (
        r"(1 - s_h) \operatorname{softmax} \left( \frac{q_i \cdot k_j}{\sqrt{d_h}} \right) + s_h "
        r"\operatorname{softmax} \left( w_h \cdot (\Delta x, \Delta y, \Delta x^2 + \Delta y^2) + c_h "
        r"\right)"
    )
    tested_options = (
        "local_init=false,gating=-1",
        "locality_strength=0.5,spacing=[2,0.5]",
        "layers=[0,2]",
        "axes=3",
    )
    multi_softmax = True

    num_heads: PositiveInt
    axes: Axes = 2
    depth: PositiveInt | None = None
    local_init: bool = True
    locality_strength: PositiveFloat = 1.0
    gating: FiniteFloat = 1.0
    spacing: tuple[PositiveFloat, ...] | None = None
    layers: tuple[Integer, ...] | None = None
    late_prefix: bool = False

    def __post_init__(self) -> None:
        self._accept(self.axes)
        check_per_axis("spacing", self.spacing, self.axes)
        outside = [i for i in self.layers or () if i < 0 or i >= (self.depth or i + 1)]
        if outside:
            raise OptionError(f"layers must be block indices below depth={self.depth}, got {outside}.")
        if not self.local_init and self.locality_strength != 1:
            raise OptionError(
                f"locality_strength={self.locality_strength} has no effect with local_init=false. Omit it."
            )
        if self.late_prefix and self.layers is None:
            raise OptionError(
                "late_prefix=true needs layers, the blocks that prefix tokens skip, got None. Pass layers."
            )
        self.pos_proj = PreciseLinear(self.axes + 1, self.num_heads)
        self.gating_param = nn.Parameter(torch.empty(self.num_heads))
        self.reset_parameters()

    @property
    def per_layer(self) -> bool:
        """True: every layer has its own gates and offsets."""
        return True

    @property
    def prefix_from(self) -> int:
        """The block after the last one that attends by offset, with late_prefix."""
        return max(self.layers, default=-1) + 1 if self.late_prefix and self.layers else 0

    def active(self, layer: int) -> bool:
        """Whether block `layer` attends by offset."""
        return self.layers is None or layer in self.layers

    def reset_parameters(self) -> None:
        """Initialise the gates, and the offsets as a convolution or at random."""
        nn.init.constant_(self.gating_param, self.gating)
        nn.init.trunc_normal_(self.pos_proj.weight, std=0.02)
        nn.init.zeros_(self.pos_proj.bias)
        if not self.local_init:
            return
        # side of the largest kernel with at most one position per head
        side = 1
        while (side + 1) ** self.axes <= self.num_heads:
            side += 1
        # -|d - c|^2 without its constant is largest at the offset c; the last axis varies slowest over heads
        cells = itertools.product(range(side), repeat=self.axes)
        weights = [[*(2.0 * c - (side - 1) for c in cell), -1.0] for cell in cells]
        with torch.no_grad():
            self.pos_proj.weight[: len(weights)] = self.pos_proj.weight.new_tensor(weights)
            self.pos_proj.weight.mul_(self.locality_strength)

    def rename_checkpoint_keys(self, state_dict: dict[str, Any], parent_prefix: str, prefix: str) -> None:
        """Rename the gates and offsets of ConViT from the attention layer, and fuse its projections."""
        take(state_dict, parent_prefix, prefix, {name: name for name in NAMES})
        for kind in ("weight", "bias"):
            split = [f"{parent_prefix}{name}.{kind}" for name in ("qk", "v")]
            if all(name in state_dict for name in split):
                # ConViT has a fused qk and a separate v
                state_dict[f"{parent_prefix}qkv.{kind}"] = torch.cat([state_dict.pop(name) for name in split])

    def bias(self, pos: Positions, layer: int, x: Tensor | None = None) -> Bias | None:
        """Raise `UnsupportedCombination`: there are two softmaxes, see `branches`."""
        raise UnsupportedCombination(
            "gpsa uses two softmaxes, so it has no single bias. Call its branches()."
        )

    def branches(self, pos: Positions, layer: int, x: Tensor | None = None) -> Sequence[Branch]:
        """Return attention by content and attention by offset in block `layer`."""
        grid = self._need_grid(pos)
        if not self.active(layer):
            return [Branch(torch.ones(1, 1, 1, 1, device=pos.coords.device))]
        if self.late_prefix and grid.prefix:
            raise UnsupportedCombination(
                f"gpsa(late_prefix=true) allows no prefix token in block {layer}, got {grid.prefix}. Convert a plain "
                "ViT of timm, which supports it, or omit late_prefix."
            )
        # tokens without a position attend by content only
        gate = (
            torch.sigmoid(at_least_float32(self.gating_param))[:, None, None] * pos.spatial[:, None, :, None]
        )
        # (2 n_1 - 1, ..., h) -> (h, 2 n_1 - 1, ...)
        values = last_axis_to(self.pos_proj(self._offsets(grid, pos.coords.device)), 0)
        # positional attention covers patches only: prefix tokens have no offset
        hidden = ((0.0, -torch.inf, 0.0),)
        edge = constant(hidden, values.dtype, values.device) if grid.prefix else None
        by_position = TableBias(values, pos, edge, one_grid=False).as_logits()
        return [Branch(1 - gate), Branch(gate, bias=by_position)]

    def _offsets(self, grid: Grid, device: torch.device) -> Tensor:
        """Return offsets from query to key and their squared length, (2 n_1 - 1, ..., axes + 1), last axis first."""
        spacing = self.spacing or grid.spacing or (1.0,) * self.axes
        # tables are indexed by query minus key
        sides = zip(grid.shape, spacing, strict=True)
        lines = [torch.arange(1 - n, n, dtype=torch.float32, device=device) * -s for n, s in sides]
        # last axis (x) first, as in the formula
        steps = torch.stack(torch.meshgrid(*lines, indexing="ij")[::-1], -1)
        return torch.cat([steps, steps.square().sum(-1, keepdim=True)], -1)
