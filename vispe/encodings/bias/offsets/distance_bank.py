"""Distance bank: every token mixes functions of distance from a shared bank (Inkling, as in x-transformers)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.content import ContextBias
from vispe.attention.bias.distance_metrics import distances
from vispe.attention.precision import at_least_float32
from vispe.encodings.base import Biased
from vispe.encodings.parts.layers import PreciseLinear
from vispe.encodings.registry import register
from vispe.errors import OptionError, ShapeError, counted
from vispe.grid import Positions
from vispe.utils.options import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Shape, Spacing


@register
class DistanceBank(Biased):
    """Adds a learned function of distance to the logits, mixed per patch from a small bank.

    bias[h, i, j] = sum_r (W x_i + c)[h, r] * bank[r, d(i, j)], 0 from max_dist on          x-transformers

    d is the distance, rounded to integers. With `scale` and `log_floor` the logits are those of Inkling,
    tau_i (q_i . k_j / d_h + bias[h, i, j]) with tau_i = 1 + alpha ln(max((i + 1) / n_floor, 1)), i the position of the
    query in the sequence. Masks are those of the caller: the bias of later keys and beyond max_dist is 0, not -inf.

    Args:
        dim: width of the tokens, d.
        num_heads: heads, h.
        head_dim: channels of a head, d_h, for scale='inverse'; dim / num_heads by default.
        depth: blocks of the model, to check options per block.
        grid: shape of the grid of the model; only the number of its axes is used, by over='offset' (2 without it).
        basis: number of functions in the bank, r, shared by all heads.
        max_dist: number of distances (per axis with over='offset') covered by the bank, from 0 on; a list has one per
            block, such as the window of blocks with a sliding window. Their banks are all as wide as the largest.
        over: 'distance', or 'offset': a bank over vectors from key to query, (2 max_dist - 1)^axes of them.
        causal: one axis, looking back: d = i - j, and 0 for later keys; as the released language models.
        spacing: distance between neighbouring patches per axis, instead of `Grid.spacing`.
        gate_bias: whether the gates have the bias c.
        scale: factor of q . k: 'sqrt' is 1 / sqrt(d_h), 'inverse' is 1 / d_h, for queries and keys with an RMS norm.
        log_floor: n_floor, the number of keys from which logits grow; never by default. Needs causal=True.
        log_alpha: alpha, the growth per e-fold of the number of keys.
        log_layers: blocks whose logits grow; all by default. In Inkling those without a sliding window.

    Presets: ``distance_bank.inkling`` has the options of Inkling's global layers.

    Shapes: pos (n, axes), x (b, n, d) -> bias (b, h, n, n); prefix rows and columns are 0. Factor of queries
        (b or 1, 1, n or 1, 1), prefix tokens included.
    New resolution: no resampling needed; a step reads the same entry.   Cost: h r (d + 1) + r max_dist parameters per
        layer; the bias is computed densely for every image.
    Invariant to: translation; rotation by any angle and reflection, when patches keep their content; only translation
        with over='offset'; nothing with log_floor.
    Raises: ShapeError without the tokens x, for causal=True on a grid of several axes, or for a block beyond a list of
        `max_dist`; OptionError for incompatible options.
    Differs from the reference: distances and offsets on grids, where the reference has one causal axis (causal=True).

    Example:
        >>> import torch
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("distance_bank", dim=16, num_heads=2)
        >>> encoding.bias(Grid((2, 3)).positions(), 0, torch.ones(1, 6, 16)).dense().shape
        torch.Size([1, 2, 6, 6])
    """

    name = "distance_bank"
    paper = "x-transformers (no paper), https://github.com/lucidrains/x-transformers"
    year = 2025
    ndim = (1, 2, 3)
    encodes = ("distance", "content")
    reads_tokens = True
    invariant = ("translation", "quarter_turns", "reflection", "rotation")
    formula = r"b_{hij} = \sum_r (W x_i + c)_{hr} \, B_{r, d(i, j)}"
    tested_options = (
        "max_dist=4,basis=3",
        "over=offset,max_dist=3",
        "causal=true",
        "spacing=[2,0.5]",
        "max_dist=[3,5,2,4],gate_bias=false,scale=inverse",
        "causal=true,log_floor=2,log_alpha=0.3,log_layers=[0,2]",
    )
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "inkling": {"causal": True, "max_dist": 1024, "gate_bias": False, "scale": "inverse"}
    }
    preset_invariant: ClassVar[dict[str, tuple[str, ...]]] = {"inkling": ("translation",)}

    dim: PositiveInt
    num_heads: PositiveInt
    head_dim: PositiveInt | None = None
    depth: PositiveInt | None = None
    grid: Shape | None = None
    basis: PositiveInt = 16
    max_dist: PositiveInt | tuple[PositiveInt, ...] = 32
    over: Literal["distance", "offset"] = "distance"
    causal: bool = False
    spacing: Spacing | None = None
    gate_bias: bool = True
    scale: Literal["sqrt", "inverse"] = "sqrt"
    log_floor: PositiveFloat | None = None
    log_alpha: NonNegativeFloat = 0.1
    log_layers: tuple[NonNegativeInt, ...] | None = None

    def __post_init__(self) -> None:
        self._check_blocks()
        if self.causal and self.over == "offset":
            raise OptionError(
                "distance_bank: over='offset' has no effect with causal=True, which looks back along one axis. Omit it."
            )
        self.reach = max(self.max_dist) if isinstance(self.max_dist, tuple) else self.max_dist
        entries = self.reach
        if self.causal:
            self._accept(1)
        if self.over == "offset":
            axes = 2 if self.grid is None else len(self.grid)
            self._accept(axes)
            # one entry per offset vector within the reach
            entries = (2 * self.reach - 1) ** axes
        if self.spacing is not None:
            if len(self.spacing) not in self.ndim:
                raise OptionError(
                    f"distance_bank: spacing needs one number per axis ({self.ndim}), got {self.spacing}."
                )
            self._accept(len(self.spacing))
        if self.scale == "inverse":
            self._resolve_head_dim()
        self.gates = PreciseLinear(self.dim, self.num_heads * self.basis, bias=self.gate_bias)
        self.distance_bank = nn.Parameter(torch.empty(self.basis, entries))
        self.reset_parameters()

    def _check_blocks(self) -> None:
        """Raise `OptionError` for options per block or of the logarithm that do not fit each other."""
        if self.log_floor is None:
            defaults = {"log_alpha": 0.1, "log_layers": None}
            unused = [name for name, default in defaults.items() if getattr(self, name) != default]
            if unused:
                raise OptionError(
                    f"distance_bank: {unused[0]}={getattr(self, unused[0])} has no effect without log_floor. Omit it."
                )
        elif not self.causal:
            raise OptionError(
                f"distance_bank: log_floor={self.log_floor:g} reads the position of a query in a causal sequence, got "
                "causal=False. Use causal=True, or ssmax+distance_bank for images."
            )
        depth = self.depth
        if isinstance(self.max_dist, tuple) and not len(self.max_dist) >= (depth or 1):
            raise OptionError(
                f"distance_bank: max_dist needs one number for each of {counted(depth or 1, 'block')}, got "
                f"{list(self.max_dist)}."
            )
        outside = [i for i in self.log_layers or () if i >= (depth or i + 1)]
        if outside:
            raise OptionError(
                f"distance_bank: log_layers must be block indices below depth={depth}, got {outside}."
            )

    @property
    def per_layer(self) -> bool:
        """True: every layer has its own bank."""
        return True

    def reset_parameters(self) -> None:
        """Draw the bank from N(0, 0.02^2) and the gates as torch does: the bias starts near 0."""
        self.gates.reset_parameters()
        nn.init.normal_(self.distance_bank, std=0.02)

    def bias(self, pos: Positions, layer: int, x: Tensor | None = None) -> Bias | None:
        """Return the bias for the tokens `x` (b, n, d)."""
        if self.causal and pos.axes != 1:
            raise ShapeError(
                f"distance_bank needs 1 axis with causal=True, got {counted(pos.axes, 'axis')} ({pos})."
            )
        self._need_axes(pos)
        if x is None:
            raise ShapeError("distance_bank reads the tokens. Pass x (b, n, d) to bias().")
        spaced = pos if self.spacing is None else pos.with_spacing(self.spacing)
        reach = self._reach(layer)
        key = ("distance bank", self.over, self.causal, reach, self.reach)
        buckets = spaced.remember(key, lambda: self._buckets(spaced, reach))
        gates = self.gates(x)
        # (b, n, h * basis) -> (b, h, n, basis)
        content = gates.reshape(*gates.shape[:2], self.num_heads, self.basis).transpose(1, 2)
        growth = self.growth(pos, layer)
        if growth is not None:
            content = content * growth[:, None, :, None]
        # the last bucket is for distances beyond the bank
        bank = nn.functional.pad(at_least_float32(self.distance_bank), (0, 1)).t()[None]
        return ContextBias(bank, buckets, "query", scaled=False, pos=pos, content=content)

    def query_factor(self, pos: Positions, layer: int) -> Tensor | None:
        """Return the factor of the queries in addition to the usual 1 / sqrt(d_h), or None for 1."""
        growth = self.growth(pos, layer)
        if self.scale == "sqrt":
            return None if growth is None else growth[:, None, :, None]
        # 'inverse' divides logits by d_h: a second factor of 1 / sqrt(d_h)
        base = pos.coords.new_full((1, 1, 1, 1), self._resolve_head_dim() ** -0.5)
        return base if growth is None else base * growth[:, None, :, None]

    def growth(self, pos: Positions, layer: int) -> Tensor | None:
        """Return tau (b or 1, n), the factor of the logits of each query in block `layer`, or None for 1."""
        if self.log_floor is None or not (self.log_layers is None or layer in self.log_layers):
            return None
        if pos.grid is None:
            # free coordinates are absolute positions, also of the queries of one decoding step
            number = pos.coords[..., 0].detach() / pos.cell[:, :1]
        else:
            number = (pos.numbers() + pos.grid.prefix).to(pos.coords.dtype)
        # 1 up to `log_floor` tokens, then logarithmic in the position
        return 1 + self.log_alpha * ((number + 1) / self.log_floor).clamp(min=1).log()

    def _reach(self, layer: int) -> int:
        """Return the number of distances of block `layer`."""
        if not isinstance(self.max_dist, tuple):
            return self.max_dist
        if not 0 <= layer < len(self.max_dist):
            raise ShapeError(
                f"distance_bank has max_dist for {counted(len(self.max_dist), 'block')}, got a call for block {layer}."
            )
        return self.max_dist[layer]

    def _buckets(self, pos: Positions, reach: int) -> Tensor:
        """Return the index into the bank of each pair, (b or 1, n, n) int64."""
        # buckets are integers, without a gradient
        coords, most = pos.coords.detach(), self.reach
        near = pos.spatial[:, :, None] & pos.spatial[:, None]
        if self.over == "offset":
            steps = (coords[:, :, None] - coords[:, None]).round().long()
            # the reach of a block may be smaller than that of the bank
            near = near & (steps.abs() < reach).all(-1)
            bucket = torch.zeros_like(steps[..., 0])
            for axis in range(pos.axes):
                # row-major index of the offset vector, each axis from 1 - most to most - 1
                bucket = bucket * (2 * most - 1) + steps[..., axis] + most - 1
        else:
            away = distances(pos, pos, "euclidean", wrap=False, normalize="none").detach()
            bucket = away.round().long()
            near = near & (bucket < reach)
            if self.causal:
                near = near & (coords[:, :, None, 0] >= coords[:, None, :, 0])
        # one past the bank: the entry of 0 that `bias` appends
        return bucket.where(near, self.distance_bank.shape[1])
