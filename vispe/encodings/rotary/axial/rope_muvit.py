"""Rotary embedding of MuViT: learned axial frequencies on coordinates shared by crops of several magnifications."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vispe.attention.precision import at_least_float32
from vispe.attention.transform.abstract_transform import Transform
from vispe.attention.transform.pairs import PairRotation
from vispe.encodings.base import Rotary
from vispe.encodings.parts.rotary.rope.axial_pairs import axial_angles
from vispe.encodings.registry import register
from vispe.errors import OptionError, counted
from vispe.grid import Positions
from vispe.grid.frequencies import inverse_frequencies
from vispe.utils.options import Axes, PositiveFloat, PositiveInt, Spacing


@register
class RopeMuvit(Rotary):
    """Rotates queries and keys by physical coordinates, with a part of the channels and learned frequencies per axis.

    Pair j of axis a with d_a channels rotates by p_a w_aj, where w_aj starts at T^(-2j / d_a)          arXiv 2602.24222

    It is for tokens of several grids in one coordinate system, such as crops of one slide at several
    magnifications: `vispe.grid.crops.crop_positions`, or `Positions.joined`. All heads share the frequencies.

    Args:
        dim: width of the tokens, d.
        num_heads: heads, h.
        head_dim: channels of a head, d_h; dim / num_heads by default.
        axes: axes of the grids. Axes after the first have 2 (d_h // axes // 2) channels each, the first has the others.
        temperature: base T of the initial frequencies. The fastest pair rotates by one radian per unit of the
            coordinates, so with steps above pi units (4 pixels) it aliases until trained.
        trainable: whether the frequencies are learned; they are saved either way.
        share_layers: one set of frequencies for all blocks instead of one per block.
        spacing: distance between neighbouring patches per axis, instead of `Grid.spacing`; for single grids.

    Shapes: pos.coords (1 or b, n, axes) -> tables (1 or b, 1, n, d_h / 2) float32; prefix tokens are not rotated.
    New resolution: positions continue in physical units.   Cost: d_h / 2 parameters per block, O(n d_h) per block.
    Invariant to: translation in scores between patches (not of prefix tokens with patches); norms are preserved.
    Raises: ShapeError if `pos` has other axes; OptionError for an odd head_dim, or fewer pairs than axes.
    Differs from the reference: parts of 8 channels and fewer are accepted; patches are at their true centres unless
        `crop_positions` is called with edges='box'.

    Example:
        >>> from vispe import create_encoding
        >>> from vispe.grid.crops import crop_positions
        >>> encoding = create_encoding("rope_muvit", dim=16, num_heads=2)
        >>> pos = crop_positions((8, 8), (4, 4), levels=(1, 4))
        >>> encoding.transform(pos, 0).query(torch.ones(1, 2, 8, 8)).shape
        torch.Size([1, 2, 8, 8])
    """

    name = "rope_muvit"
    paper = "MuViT: Multi-Resolution Vision Transformers, https://arxiv.org/abs/2602.24222"
    year = 2026
    ndim = (1, 2, 3)
    encodes = ("distance", "direction")
    invariant = ("translation",)
    formula = (
        r"\theta_{aj}(p) = p_a \, \omega_{aj}, \quad \omega_{aj} \leftarrow T^{-2 j / d_a}, \quad "
        r"q'_{aj} = e^{i \theta_{aj}(p)} q_{aj}"
    )
    tested_options = (
        "axes=1",
        "axes=3,temperature=50",
        "trainable=false",
        "share_layers=true,spacing=[4,0.7]",
    )

    dim: PositiveInt
    num_heads: PositiveInt
    head_dim: PositiveInt | None = None
    axes: Axes = 2
    temperature: PositiveFloat = 10000.0
    trainable: bool = True
    share_layers: bool = False
    spacing: Spacing | None = None

    def __post_init__(self) -> None:
        width = self._resolve_head_dim()
        # an even number of channels per axis; the first axis also has the remainder
        channels = 2 * (width // self.axes // 2)
        if width % 2 or not channels:
            raise OptionError(
                f"rope_muvit needs an even head_dim with a pair of channels per axis, got head_dim={width} for axes="
                f"{self.axes} (dim={self.dim}, num_heads={self.num_heads}). Choose another num_heads."
            )
        if self.share_layers and not self.trainable:
            raise OptionError("share_layers=True has no effect with trainable=False. Omit it.")
        if self.spacing is not None and len(self.spacing) != self.axes:
            raise OptionError(
                f"spacing needs one number for each of {counted(self.axes, 'axis')}, got spacing={list(self.spacing)}."
            )
        self._accept(self.axes)
        self.axis_dims = (width - (self.axes - 1) * channels, *[channels] * (self.axes - 1))
        for axis, size in enumerate(self.axis_dims):
            freqs = torch.empty(size // 2)
            setattr(self, f"inv_freq{axis}", nn.Parameter(freqs) if self.trainable else nn.Buffer(freqs))
        self.reset_parameters()

    @property
    def per_layer(self) -> bool:
        """Whether every block has its own frequencies."""
        return self.trainable and not self.share_layers

    def reset_parameters(self) -> None:
        """Set log-spaced frequencies per axis."""
        with torch.no_grad():
            for freqs, size in zip(self.frequencies(), self.axis_dims, strict=True):
                # computed in float64 and rounded once
                freqs.copy_(inverse_frequencies(size, self.temperature, torch.float64))

    def frequencies(self) -> list[Tensor]:
        """Return radians per unit of the coordinates, per axis (pairs of the axis,)."""
        return [getattr(self, f"inv_freq{axis}") for axis in range(self.axes)]

    def transform(self, pos: Positions, layer: int, x: Tensor | None = None) -> Transform:
        """Return the rotation of queries and keys, the identity for tokens without a position."""
        self._need_axes(pos)

        def make() -> tuple[Tensor, Tensor]:
            spaced = pos if self.spacing is None else pos.with_spacing(self.spacing)
            # (1, pairs of the axis): equal for all samples
            freqs = [at_least_float32(f)[None] for f in self.frequencies()]
            # of shape (b or 1, 1, n, d_h / 2)
            angle = axial_angles(spaced.coords, freqs, range(self.axes), sum(self.axis_dims) // 2)
            angle = angle * pos.spatial[:, None, :, None]
            return angle.cos(), angle.sin()

        return PairRotation(*self._eval_cache(self, pos, make), "interleaved")
