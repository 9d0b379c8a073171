"""DAPE: a static bias adapted to the content by a small network (arXiv 2405.14722, arXiv 2410.04798)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.value_term import ValueTerm
from vispe.encodings.base import HOST_FACTS, Additive, Biased, Encoding, Mixing, Rotary
from vispe.encodings.creation import create_encoding
from vispe.encodings.parts.bias.adapted_bias import AdaptedBias
from vispe.encodings.parts.layers import PreciseConv, PreciseLinear
from vispe.encodings.registry import parse_spec, register
from vispe.encodings.spec import spec_to_text
from vispe.errors import OptionError, ShapeError, UnsupportedCombination
from vispe.grid import Positions
from vispe.utils.axes import last_axis_to
from vispe.utils.options import NonNegativeFloat, PositiveInt, Shape


@register
class Dape(Biased):
    """Adapts another bias to the content by a small network over the bias and the logits of all heads.

    logits = x + a + f([x, a]), x = q . k / sqrt(d_h), a the other bias          arXiv 2405.14722, arXiv 2410.04798

    version=1: f is Linear(2h, width), LeakyReLU, Linear(width, h), applied per pair. version=2: convolutions
    over the grid of keys instead of linear maps.

    Args:
        num_heads: heads, h.
        head_dim: channels of a head, d_h; dim / num_heads by default.
        dim: width of the tokens, for inner biases that need it.
        depth: blocks of the model, likewise.
        grid: shape of the grid of the model, likewise; with version=2 its number of axes is that of the convolutions (2
            without it).
        inner: the bias a: any spec of kind bias, such as alibi2d, 'alibi2d(slopes=learned)' or rpb+alibi2d.
        version: 1 or 2.
        width: channels between the two layers.
        kernel: kernel size of the convolutions, odd; version=2 only, 3 by default.
        causal: one axis, for sequences under a causal mask: convolutions ignore later keys; version=2 only.
        negative_slope: negative slope of the LeakyReLU.

    Shapes: pos (n, axes) -> bias (b, h, n, n); prefix rows and columns are those of `inner`.
    New resolution: as for `inner`.   Cost: 3 h width + width + h parameters per layer (version=2: weights times the
        entries of a kernel) and those of `inner`; O(n^2 h width) work, and the bias is computed densely for every
        image. The last layer is initialised with small weights, so a model starts close to `inner` alone.
    Invariant to: what `inner` is invariant to, when patches keep their content; with version=2 nothing exactly.
    Raises: OptionError if `inner` is not a bias; ShapeError for dropped tokens with version=2, and without queries and
        keys; UnsupportedCombination if `inner` replaces the logits.
    Differs from the reference: bidirectional attention and grids; convolutions over all axes of the keys, while those
        of the reference run along a sequence (causal=true).

    Example:
        >>> import torch
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("dape(inner=alibi2d(slopes=alibi))", num_heads=2)
        >>> q = torch.ones(1, 2, 6, 8)
        >>> encoding.bias(Grid((2, 3)).positions(), 0).dense(q=q, k=q, scale=0.5).shape
        torch.Size([1, 2, 6, 6])
    """

    name = "dape"
    paper = (
        "DAPE: Data-Adaptive Positional Encoding for Length Extrapolation, https://arxiv.org/abs/2405.14722"
    )
    year = 2024
    formula = r"a' = a + b + f([a, b]), \quad a_{ij} = \frac{q_i \cdot k_j}{\sqrt{d_h}}"
    tested_options = (
        "inner=alibi2d(slopes=learned,wrap=false),width=5",
        "version=2,inner=alibi2d.local,width=4,kernel=5",
        "inner=alibi3d",
        "inner=alibi(slopes=learned),version=2,causal=true,negative_slope=0.2",
    )
    ndim = (1, 2, 3)
    encodes: ClassVar[tuple[str, ...]] = ("distance", "content")
    invariant: ClassVar[tuple[str, ...]] = ("translation", "quarter_turns", "reflection")

    num_heads: PositiveInt
    dim: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    depth: PositiveInt | None = None
    grid: Shape | None = None
    inner: Any = "alibi2d"
    version: Literal[1, 2] = 1
    width: PositiveInt = 32
    kernel: PositiveInt | None = None
    causal: bool = False
    negative_slope: NonNegativeFloat = 0.01

    def __post_init__(self) -> None:
        if self.version == 1 and (self.causal or self.kernel is not None):
            raise OptionError(
                "dape: kernel and causal have no effect with version=1, which has no convolutions. Use version=2."
            )
        if isinstance(self.inner, Encoding):
            raise OptionError(
                f"dape: inner needs a spec, got an instance of {self.inner.name}. Pass its config."
            )
        self.inner = spec_to_text(parse_spec(self.inner))
        facts = {name: getattr(self, name) for name in HOST_FACTS}
        self.adapted = cast("Biased", create_encoding(self.inner, **facts))
        parts = self.adapted.parts()
        others = [
            e.name for e in parts if not isinstance(e, Biased) or isinstance(e, Additive | Rotary | Mixing)
        ]
        others += [e.name for e in parts if e.multi_softmax]
        if others:
            raise OptionError(
                f"dape: inner needs encodings of kind bias only, got {' + '.join(others)}. Use inner=alibi2d."
            )
        axes = {a for a in (1, 2, 3) if all(a in e.ndim for e in parts)}
        if self.version == 2:
            # convolutions are built for one number of axes
            axes &= {1 if self.causal else 2 if self.grid is None else len(self.grid)}
        if not axes:
            raise OptionError(
                f"dape: inner={self.inner} does not support the requested axes or version={self.version}. Use "
                "another inner."
            )
        self._accept(*sorted(axes))
        vars(self)["extrapolates"] = all(e.extrapolates for e in parts)
        self._make(min(axes))
        self._start()

    def _make(self, axes: int) -> None:
        side = self.kernel or 3
        if side % 2 == 0:
            raise OptionError(f"dape: kernel needs an odd number, got kernel={side}.")
        sizes = (2 * self.num_heads, self.width), (self.width, self.num_heads)
        # 2 h input channels: logits and bias of every head
        layers: list[nn.Module] = [PreciseLinear(*size) for size in sizes]
        if self.version == 2:
            layers = [PreciseConv(axes, *size, side, padding=side // 2) for size in sizes]
        self.mlp2 = nn.Sequential(layers[0], nn.LeakyReLU(self.negative_slope), layers[1])

    def _start(self) -> None:
        self._layer(0).reset_parameters()
        # a small last layer, so that the sum starts close to the inner bias
        nn.init.trunc_normal_(self._layer(2).weight, std=0.02)
        nn.init.zeros_(cast("Tensor", self._layer(2).bias))

    def _layer(self, index: int) -> PreciseLinear | PreciseConv:
        return cast("PreciseLinear | PreciseConv", self.mlp2[index])

    @property
    def per_layer(self) -> bool:
        """True: every layer has its own network."""
        return True

    def reset_parameters(self) -> None:
        """Initialise the inner bias and the network, whose last layer gets small weights."""
        self.adapted.reset_parameters()
        self._start()

    def active(self, layer: int) -> bool:
        """Whether the inner bias has an effect in block `layer`."""
        return self.adapted.active(layer)

    def truncate(self, depth: int) -> None:
        """Drop the parameters of blocks from `depth` on."""
        self.adapted.truncate(depth)

    def rename_checkpoint_keys(self, state_dict: dict[str, Any], parent_prefix: str, prefix: str) -> None:
        """Rename entries of released checkpoints for the inner bias."""
        self.adapted.rename_checkpoint_keys(state_dict, parent_prefix, f"{prefix}adapted.")

    def prepare(
        self, pos: Positions, generator: torch.Generator | None = None, draws: dict[str, Tensor] | None = None
    ) -> Positions:
        """Return the positions with the draws of the inner bias."""
        return self.adapted.prepare(pos, generator, draws)

    def value_term(self, pos: Positions, layer: int) -> ValueTerm | None:
        """Return the value term of the inner bias."""
        return self.adapted.value_term(pos, layer)

    def bias(self, pos: Positions, layer: int, x: Tensor | None = None) -> Bias | None:
        """Return the bias; `dense` depends on queries and keys."""
        self._need_axes(pos)
        inner = self.adapted.bias(pos, layer, x)
        if inner is None:
            return None
        if inner.replaces_product:
            raise UnsupportedCombination(
                f"dape adapts a bias, but {self.inner} replaces the logits. Use another inner."
            )
        if self.version == 1:
            return AdaptedBias(inner, self._pairs, pos)
        grid = self._need_grid(pos, "Use version=1 for other positions.")
        if pos.index is not None:
            raise ShapeError(
                "dape with version=2 convolves over all keys of a grid, but some have been dropped. Use version=1."
            )
        return AdaptedBias(inner, lambda both: self._convolve(both, grid.prefix, grid.shape), pos)

    def _pairs(self, both: Tensor) -> Tensor:
        # (b, 2 h, n, n) -> (b, n, n, 2 h) for the linear maps, and back
        return last_axis_to(self.mlp2(both.movedim(1, -1)), 1)

    def _convolve(self, both: Tensor, prefix: int, shape: tuple[int, ...]) -> Tensor:
        both = both[..., prefix:, prefix:]
        if self.causal:
            # later keys must not enter the convolution
            both = both.tril()
        # (b, 2 h, n, n) -> (b n, 2 h, *grid): each query has an image of its keys
        b, _, n, _ = both.shape
        maps = both.transpose(1, 2).reshape(b * n, -1, *shape)
        maps = self.mlp2(maps)
        # (b n, h, *grid) -> (b, h, n, n)
        adapted = maps.reshape(b, n, -1, n).transpose(1, 2)
        return F.pad(adapted, (prefix, 0, prefix, 0))
