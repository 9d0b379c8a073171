"""Compass-RoPE: mixed RoPE whose frequencies are learned as a magnitude and an angle (ICML 2026)."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from vispe.attention.precision import at_least_float32, exact_product
from vispe.encodings.parts.rotary.rope.mixed_rope import MixedRope
from vispe.encodings.registry import register
from vispe.grid.frequencies import inverse_frequencies
from vispe.utils.options import PositiveFloat

Mixing = Literal["dft", "none"]


@register
class RopeCompass(MixedRope):
    """Queries and keys turn with the coordinates of their patch along learned directions, in polar form.

    Pair i of head n turns by m[n, i] * (x * cos a[n, i] + y * sin a[n, i])        icml.cc/virtual/2026/poster/62023

    Magnitudes m and angles a are separate parameters, so that training one leaves the other unchanged. Learned
    frequencies of `rope_mixed` concentrate along the axes of the image, by the abstract, which limits extrapolation.

    Args:
        dim: width of the tokens, d.
        num_heads: heads, h.
        head_dim: channels of a head, d_h; dim / num_heads by default.
        depth: blocks of the model, for `per_block`.
        temperature: ratio of the longest to just below the shortest wavelength at the start; pair i of J starts with
            m = temperature^(-i / J).
        mixing: 'dft' learns the discrete Hartley transform (the real discrete Fourier transform) of the angles of each
            head, so that every parameter acts on all of them; 'none' learns the angles.
        layout: which channels are a pair: 'interleaved' 2c and 2c + 1, 'half' c and c + pairs. A checkpoint
            works only with its own.
        rotated: fraction of the head channels that are rotated; the others carry content only.
        spacing: distance between neighbouring patches per axis, instead of `Grid.spacing`.
        schedule: what happens at another resolution, per axis, as in `rope_mixed`: 'none', 'rescale',
            'align_corners', 'pi' or 'yarn'.
        reference: training grid for `schedule` and `logit_scale`; the grid that the host was built with by default.
        logit_scale: factor of all logits, as in `rope_mixed`.
        basis: 'head' multiplies queries and keys by learned matrices before the rotation, as in `rope_mixed`.
        basis_key: matrix of the keys: 'inverse_transpose' leaves scores at offset 0 unchanged, 'same' uses M again.
        shift_coords: in training, adds uniform [-s, s] patches per axis.
        jitter_coords: in training, then multiplies each axis by exp of uniform [-ln J, ln J].
        rescale_coords: in training, then multiplies all axes by one such factor.
        per_block: separate draws for every block instead of one draw per forward.

    Shapes: pos.coords (1 or b, n, 2) -> tables (1 or b, h, n, pairs) float32; prefix tokens are not rotated.
    New resolution: see `schedule`.   Cost: d parameters per block, O(n d) per block.
    Invariant to: translation in scores between patches (not of prefix tokens with patches); norms are preserved
        (logit_scale=none, basis=none).
    Raises: ShapeError if `pos` has other axes, or the training grid is needed and unknown; OptionError for
        options that do not fit together.
    Differs from the reference: written from the abstract. The initial magnitudes, random initial angles per head and
        the Hartley transform, which is orthogonal and its own inverse, are ours.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("rope_compass", dim=16, num_heads=2)
        >>> encoding.transform(Grid((2, 3)).positions(), 0).query(torch.ones(1, 2, 6, 8)).shape
        torch.Size([1, 2, 6, 8])
    """

    name = "rope_compass"
    paper = "Compass-RoPE: Isotropic Rotary Position Embeddings for Vision Transformers, https://icml.cc/virtual/2026/poster/62023"
    year = 2026
    ndim = (2,)
    encodes = ("distance", "direction")
    invariant = ("translation",)
    formula = (
        r"\theta_{ni}(p) = m_{ni} (x \cos a_{ni} + y \sin a_{ni}), \quad q'_i = e^{i \theta_{ni}(p)} q_i"
    )
    tested_options = (
        "mixing=none",
        "temperature=10,layout=half",
        "rotated=0.5",
        "spacing=[5,0.7]",
        "schedule=rescale,reference=[5,7]",
        "logit_scale=ssmax,shift_coords=0.5",
    )

    temperature: PositiveFloat = 10.0
    mixing: Mixing = "dft"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.magnitudes = nn.Parameter(torch.empty(self.num_heads, self.pairs))
        self.angle_parameters = nn.Parameter(torch.empty(self.num_heads, self.pairs))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set geometric magnitudes, and draw angles uniformly from [0, 2 pi)."""
        super().reset_parameters()
        with torch.no_grad():
            self.magnitudes.copy_(inverse_frequencies(2 * self.pairs, self.temperature))
            angles = 2 * math.pi * torch.rand(self.angle_parameters.shape, device=self.magnitudes.device)
            # the transform is its own inverse, so the angles of the first step are those drawn
            self.angle_parameters.copy_(angles if self.mixing == "none" else hartley(angles))

    def directions(self) -> Tensor:
        """Return the angles of the frequencies (h, pairs) in radians, from x towards y, float32 or better."""
        angles = at_least_float32(self.angle_parameters)
        return angles if self.mixing == "none" else hartley(angles)

    def frequencies(self) -> Tensor:
        """Return the frequencies (2, h, pairs), x first, in radians per patch."""
        magnitudes, angles = at_least_float32(self.magnitudes), self.directions()
        return torch.stack([magnitudes * angles.cos(), magnitudes * angles.sin()])


def hartley(x: Tensor) -> Tensor:
    """Return the orthonormal discrete Hartley transform of the last axis, sum_j x_j cas(2 pi i j / n) / sqrt(n)."""
    n = x.shape[-1]
    steps = torch.arange(n, device=x.device)
    # products modulo n are exact; cas(t) = cos t + sin t
    phase = (2 * math.pi / n) * (steps[:, None] * steps % n).double()
    return exact_product(x, ((phase.cos() + phase.sin()) / math.sqrt(n)).to(x.dtype))
