"""LieRE: rotations by exponentials of learned generators that need not commute (arXiv 2406.10322)."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from vispe.attention.precision import at_least_float32
from vispe.attention.transform.abstract_transform import Transform
from vispe.attention.transform.pairs import PairRotation
from vispe.encodings.parts.resample import training_grid
from vispe.encodings.parts.rotary.skew_symmetric import (
    Block,
    SkewRotary,
    skew_matrix,
    skew_upper,
)
from vispe.encodings.registry import register
from vispe.errors import OptionError, counted
from vispe.grid import Positions
from vispe.utils.options import NonNegativeFloat, PositiveFloat, PositiveInt

Generators = Literal["learned", "inverse_exp", "even"]
Normalize = Literal["train", "linspace", "none"]
Init = Literal["uniform", "symmetric", "normal"]


@register
class LieRE(SkewRotary):
    """Rotates blocks of query and key channels by exponentials of learned generators, one per axis.

    q' = R(p) q, k' = R(p) k, R = exp(sum_i p_i (U_i - U_i^T)), U_i learned upper triangles       arXiv 2406.10322

    The generators of two axes do not commute, so attention depends on absolute positions, not only on
    offsets. ``liere.full`` has one block per head (the paper's LieRE-64 at 64 channels); ``liere.reference`` has
    the coordinates of the authors' code; ``liere.comrope`` starts as the baseline of arXiv 2506.03737.

    Args:
        dim: width of the tokens; its channels per head are d_h.
        num_heads: heads, h.
        head_dim: channels of a head, d_h; dim / num_heads by default.
        axes: number of axes, 1 to 3.
        block: channels per block, s; 8 by default, or d_h if that is less. Channels beyond a multiple of it pass
            unchanged. With 2 it is RoPE with learned frequencies per pair and axis.
        kind: 'learned', or fixed axial rotations of pairs without parameters: 'inverse_exp' with
            frequencies exp(-4 t), 'even' with t, for t from 0 to 1.
        per_head: whether generators are per head.
        share_layers: one set of generators for all layers.
        normalize: 'train' divides coordinates by n_train per axis: i / n_train with a spacing of 1, the same for a
            patch at every resolution; 'linspace' has those of the authors' code, from 0 to n / n_train both ends
            included, whatever the spacing; 'none' leaves units of `Grid.spacing`.
        reference: grid of the training resolution, n_train; `Grid.reference` by default, else the grid itself.
        init: 'uniform' draws from [0, 2 pi) (all generators then have the same sign), 'symmetric' from [-pi, pi),
            'normal' is P - P^T for P of standard deviation init_std * scale_factor.
        init_std: standard deviation for init='normal'.
        scale_factor: divisor of the generators, which also divides their effective learning rate.

    Shapes: pos (n, axes) -> matrices (1, h, n, d_h / s, s, s).
    New resolution: with 'train', coordinates are extrapolated; nothing is resampled.   Cost: axes h d_h (s - 1) / 2
        parameters per layer; one exponential of an s x s matrix per token, block and head in every layer.
    Invariant to: nothing (with one axis, block=2 or fixed generators: translation, for 'train' and 'none').
    Raises: ShapeError if `pos` has other axes; OptionError for incompatible options.
    Differs from the reference: only the strict upper triangle is a parameter (checkpoints are converted); any
        channels per head; by default coordinates of a patch do not depend on the size of the image; heads have
        generators of their own; exponentials are in float32 or better for every model dtype.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("liere", dim=16, num_heads=2)
        >>> encoding.transform(Grid((2, 3)).positions(), 0).query(torch.ones(1, 2, 6, 8)).shape
        torch.Size([1, 2, 6, 8])
    """

    name = "liere"
    paper = "LieRE: Lie Rotational Positional Encodings, https://arxiv.org/abs/2406.10322"
    year = 2024
    encodes = ("distance", "direction", "position")
    formula = (
        r"q' = R(p) \, q, \quad k' = R(p) \, k, \quad R(p) = \exp \Big( \sum_a p_a \left( U_a - U_a^\top "
        r"\right) \Big)"
    )
    tested_options = (
        "block=2",
        "block=3,per_head=false",
        "share_layers=true",
        "kind=even",
        "kind=inverse_exp",
        "init=symmetric,reference=[5,7]",
        "init=normal,init_std=0.5,scale_factor=10",
        "normalize=none",
        "axes=1",
        "axes=3",
    )
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "full": {"block": "head"},
        "reference": {"normalize": "linspace"},
        "comrope": {"init": "normal"},
    }

    block: Block | Literal["head"] | None = None
    kind: Generators = "learned"
    per_head: bool = True
    share_layers: bool = False
    normalize: Normalize = "train"
    reference: tuple[PositiveInt, ...] | None = None
    init: Init = "uniform"
    init_std: NonNegativeFloat = 1.0
    scale_factor: PositiveFloat = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set_blocks(self.head if self.block == "head" else self.block, 1)
        used = self.normalize != "none"
        self.reference = training_grid(self.reference, self.axes, used, f"normalize={self.normalize!r}")
        if self.kind != "learned":
            self._check_fixed()
            return
        if self.init != "normal" and self.init_std != 1.0:
            raise OptionError(
                f"init_std={self.init_std} has no effect with init={self.init!r}. Use init=normal."
            )
        self._set_skew(self.num_heads if self.per_head else 1, self.axes)
        self.reset_parameters()

    def _check_fixed(self) -> None:
        """Raise where options are given that are about parameters, or a head is too narrow."""
        for option in ("block", "per_head", "share_layers", "init", "init_std", "scale_factor"):
            value = getattr(self, option)
            if value != getattr(LieRE, option):
                raise OptionError(
                    f"{option}={value!r} has no effect with kind={self.kind!r}, which has no "
                    "parameters. Omit it."
                )
        if self.head < 2 * self.axes:
            raise OptionError(
                f"{self.name} with kind={self.kind!r} needs a pair of channels per axis, got "
                f"{counted(self.head, 'channel')} per head for {counted(self.axes, 'axis')}."
            )

    @property
    def per_layer(self) -> bool:
        """Learned generators belong to a layer unless they are shared."""
        return self.kind == "learned" and not self.share_layers

    def reset_parameters(self) -> None:
        """Draw the generators."""
        if self.kind != "learned":
            return
        with torch.no_grad():
            if self.init == "normal":  # the difference of two entries of P
                self.skew.normal_(0.0, self.init_std * self.scale_factor * 2**0.5)
            else:
                # an interval of length 2 pi
                low = -math.pi if self.init == "symmetric" else 0.0
                self.skew.uniform_(low, low + 2 * math.pi)

    def generators(self) -> Tensor:
        """Return the generators (h or 1, axes, blocks, s, s)."""
        if self.kind != "learned":
            raise OptionError(f"{self.name} has matrices with kind=learned only, got {self.kind!r}.")
        return skew_matrix(at_least_float32(self.skew), self.width) / self.scale_factor

    def coordinates(self, pos: Positions) -> Tensor:
        """Return the coordinates (b or 1, n, axes), 0 for tokens without a position."""
        key = (self.name, self.normalize, self.reference)
        return pos.remember(key, lambda: self._places(pos))

    def _places(self, pos: Positions) -> Tensor:
        x = pos.coords
        if self.normalize != "none":
            trained = self.reference or (pos.grid and (pos.grid.reference or pos.grid.shape))
            cells = pos.extent / pos.cell
            # without a training grid: relative to the current grid
            trained_cells = cells if trained is None else x.new_tensor(trained)[None]
            if self.normalize == "train":
                x = x / trained_cells[:, None]
            else:
                # 0 at the first cell, cells / trained_cells at the last; a single cell has no step, hence the clamp
                x = x / pos.cell[:, None] * (cells / trained_cells / (cells - 1).clamp(min=1))[:, None]
        return x * pos.spatial[..., None]

    def transform(self, pos: Positions, layer: int, x: Tensor | None = None) -> Transform:
        """Return the rotation of queries and keys."""
        if self.kind == "learned":
            return super().transform(pos, layer, x)
        self._need_axes(pos)
        key = (self.name, "fixed", self.head, self.kind, self.normalize, self.reference)
        cos, sin = pos.remember(key, lambda: self._fixed(pos))
        return PairRotation(cos, sin, "interleaved")

    def _fixed(self, pos: Positions) -> tuple[Tensor, Tensor]:
        # the same phases on all axes
        even = torch.linspace(0, 1, self.head // self.axes // 2, device=pos.coords.device)
        phases = (-4 * even).exp() if self.kind == "inverse_exp" else even
        # (b, n, axes, pairs of an axis) -> (b, 1, n, pairs)
        angles = (self.coordinates(pos)[..., None] * phases.to(pos.coords)).flatten(2)[:, None]
        return angles.cos(), angles.sin()

    def rename_checkpoint_keys(self, state_dict: dict[str, Any], parent_prefix: str, prefix: str) -> None:
        """Rename `generator_raw_params` (axes, 1, h or 1 times blocks, s, s) of the parent module."""
        if self.kind == "learned" and f"{parent_prefix}generator_raw_params" in state_dict:
            # entries on and below the diagonal have no effect
            raw = state_dict.pop(f"{parent_prefix}generator_raw_params")[:, 0].triu(1)
            upper = skew_upper(raw)
            # (axes, heads * blocks, m) -> (heads, axes, blocks, m)
            state_dict[f"{prefix}skew"] = upper.reshape(
                self.axes, -1, self.blocks, upper.shape[-1]
            ).transpose(0, 1)
