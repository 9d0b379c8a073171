"""Continuous position bias of Swin V2: a small network of logarithmic offsets (arXiv 2111.09883)."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.table import TableBias
from vispe.encodings.base import Biased
from vispe.encodings.parts.bias.table_interpolation import drop_index, take
from vispe.encodings.parts.layers import PreciseLinear
from vispe.encodings.registry import register
from vispe.errors import OptionError, ShapeError
from vispe.grid import Grid, Positions
from vispe.utils.options import PositiveInt, Probability, Shape, check_per_axis

Coords = Literal["swin", "cr"]
DRAW = "rpb_cpb_dropout"
# on the attention layer, or at the root for all
HOLDERS = ("", "rel_pos.", "shared_rel_pos.")


@register
class ContinuousBias(Biased):
    """A small network maps the logarithmic offset of two patches to a bias per head.

    c = 8 o / (n - 1) per axis;  bias[h, i, j] = 16 sigmoid(W2 relu(W1 sign(c) log2(1 + |c|) / 3 + b))[h]

    That is ``rpb_cpb.swinv2`` (arXiv 2111.09883, section 3.3). ``rpb_cpb.vit_relpos`` is the form of timm's
    `vit_relpos`
    models: sign(o) ln(1 + |o|) in patches, no sigmoid, dropout. The entries of their checkpoints load
    unchanged (`cpb_mlp.*` on the attention layer; `mlp.*` in `rel_pos`, or in `shared_rel_pos` at the root).

    Args:
        num_heads: heads, h.
        grid: shape of the token grid at the training resolution, 1 to 3 axes, supplied by the host.
        coords: 'swin' as above, or 'cr': sign(o) ln(1 + |o|), an output bias, and no sigmoid.
        hidden: width of the hidden layer.
        pretrained: n instead of the input's grid, for coords='swin': the grid of the pretraining; larger
            grids then extend the range instead of refining it.
        centre: for coords='swin': 16 (sigmoid - 1/2). Without prefix tokens this has no effect; with them, it avoids
            an initial bias of 8 between patches that prefix tokens do not have. True for 'swin' by default.
        dropout: fraction of hidden units that are dropped in training; drawn once per forward, for all layers.
        share_layers: one network for all layers instead of one each.

    Shapes: pos of a grid with a axes -> bias (1, h, n, n); W1 (hidden, a), W2 (h, hidden). Prefix rows and columns
        are 0.
    New resolution: no resampling needed; see `pretrained`.
    Cost: hidden (a + h + 1) parameters per layer; the network runs once per offset, O(1) per score.
    Invariant to: translation.
    Raises: ShapeError if `pos` is not of a grid with as many axes; OptionError for incompatible options.
    Differs from the reference: computed in float32 for every model dtype; an axis of one patch has coordinate 0
        (timm's `RelPosMlp`: 0/0); any number of prefix tokens; `centre`, off in the presets; the window is the full
        grid; cosine attention is not included.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("rpb_cpb", num_heads=2, grid=(4, 4))
        >>> encoding.bias(Grid((2, 3)).positions(), 0).dense().shape
        torch.Size([1, 2, 6, 6])
    """

    name = "rpb_cpb"
    paper = "Swin Transformer V2, https://arxiv.org/abs/2111.09883"
    year = 2021
    ndim = (1, 2, 3)
    encodes = ("distance", "direction")
    invariant = ("translation",)
    formula = (
        r"b_{hij} = 16 \, \sigma \left( W_2 \operatorname{relu} (W_1 c' + b) \right)_h, \quad c' = "
        r"\operatorname{sign}(c) \frac{\log_2(1 + |c|)}{3}, \quad c = \frac{8 \, o}{n - 1}"
    )
    tested_options = (
        "coords=cr,hidden=20",
        "pretrained=[7,5],centre=false",
        "share_layers=true",
        "dropout=0.25",
    )
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "swinv2": {"coords": "swin", "hidden": 512, "centre": False},
        "vit_relpos": {"coords": "cr", "hidden": 128, "dropout": 0.125},
    }
    fused = True

    num_heads: PositiveInt
    grid: Shape
    coords: Coords = "swin"
    hidden: PositiveInt = 512
    pretrained: tuple[PositiveInt, ...] | None = None
    centre: bool | None = None
    dropout: Probability = 0.0
    share_layers: bool = False

    def __post_init__(self) -> None:
        axes, swin = len(self.grid), self.coords == "swin"
        self._accept(axes)
        self.centre: bool = swin if self.centre is None else self.centre
        if not swin and (self.centre or self.pretrained is not None):
            raise OptionError(
                f"centre and pretrained have no effect with coords='cr', got centre={self.centre}, "
                f"pretrained={self.pretrained}. Omit them."
            )
        check_per_axis("pretrained", self.pretrained, axes)
        out = PreciseLinear(self.hidden, self.num_heads, bias=not swin)
        self.cpb_mlp = nn.Sequential(PreciseLinear(axes, self.hidden), nn.ReLU(), out)
        self.reset_parameters()

    @property
    def per_layer(self) -> bool:
        """Whether every layer has its own a network, rather than a shared one."""
        return not self.share_layers

    def reset_parameters(self) -> None:
        """Draw the weights from a truncated normal of standard deviation 0.02; biases are 0."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.trunc_normal_(parameter, std=0.02)

    def rename_checkpoint_keys(self, state_dict: dict[str, Any], parent_prefix: str, prefix: str) -> None:
        """Rename the network of released checkpoints, from the attention layer, or the root if shared by layers."""
        names = {name: name for name in self.state_dict()}
        for holder in HOLDERS[1:]:
            for name in self.state_dict():
                released = name.replace("cpb_mlp.0", "mlp.fc1").replace("cpb_mlp.2", "mlp.fc2")
                names[holder + released] = name
        take(state_dict, parent_prefix, prefix, names)
        drop_index(state_dict, parent_prefix, HOLDERS)

    def prepare(
        self, pos: Positions, generator: torch.Generator | None = None, draws: dict[str, Tensor] | None = None
    ) -> Positions:
        """Draw the dropout mask of hidden units per offset, in training; factors 0 or 1 / (1 - dropout)."""
        factors = (draws or {}).get(DRAW)
        if not self.dropout or (factors is None and (not self.training or DRAW in pos.attrs)):
            return pos
        # one mask per offset, because the network runs once per offset
        count = math.prod(2 * n - 1 for n in self._need_grid(pos).shape)
        if factors is None:
            uniform = torch.rand(count, self.hidden, generator=generator, device=pos.coords.device)
            factors = (uniform >= self.dropout) / (1.0 - self.dropout)
        if tuple(factors.shape) != (count, self.hidden):
            raise ShapeError(
                f"rpb_cpb needs a draw of {DRAW} of shape ({count}, {self.hidden}), got {tuple(factors.shape)}."
            )
        return pos.replace(attrs={**pos.attrs, DRAW: factors})

    def bias(self, pos: Positions, layer: int, x: Tensor | None = None) -> Bias:
        """Return the bias, the same for every block that has this network."""
        grid = self._need_grid(pos)
        values = self._eval_cache(self, pos, lambda: self._table(pos, grid))
        return TableBias(values, pos, depends_on=None if DRAW in pos.attrs else self._sources())

    def _table(self, pos: Positions, grid: Grid) -> Tensor:
        offsets = self._offsets(pos, grid)
        # the network runs once per offset, not per pair of tokens
        hidden = self.cpb_mlp[:2](offsets)
        if self.dropout and DRAW in pos.attrs:
            hidden = hidden * pos.attrs[DRAW]
        values = self.cpb_mlp[2](hidden)
        if self.coords == "swin":
            # from 0 to 16; with `centre` from -8 to 8
            values = 16.0 * (values.sigmoid() - 0.5 if self.centre else values.sigmoid())
        # (offsets, h) -> (h, 2 n_1 - 1, ...)
        return values.t().reshape(self.num_heads, *(2 * n - 1 for n in grid.shape))

    def _offsets(self, pos: Positions, grid: Grid) -> Tensor:
        """Return the logarithmic coordinates of every offset of the grid, (offsets, axes)."""

        def make() -> Tensor:
            lines: list[Tensor] = []
            for n, wide in zip(grid.shape, self.pretrained or grid.shape, strict=True):
                line = torch.arange(1 - n, n, dtype=torch.float32, device=pos.coords.device)
                if self.coords == "swin":
                    # 8 at the largest offset of the pretrained window; one patch has only offset 0, hence the max
                    line = line * (8.0 / max(wide - 1, 1))
                    # divided by log2(8) = 3
                    lines.append(line.sign() * torch.log2(1.0 + line.abs()) / 3.0)
                else:
                    lines.append(line.sign() * torch.log1p(line.abs()))
            return torch.stack(torch.meshgrid(*lines, indexing="ij"), -1).flatten(0, -2)

        return pos.remember(("rpb_cpb", self.coords, self.pretrained), make)
