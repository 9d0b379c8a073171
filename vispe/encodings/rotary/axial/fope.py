"""FoPE: every pair of channels is modulated by a mixture of waves instead of one (arXiv 2412.17739)."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vispe.attention.precision import at_least_float32, exact_product
from vispe.attention.transform.pairs import PairRotation
from vispe.encodings.parts.coords import exact_device
from vispe.encodings.parts.rotary.angles import AxialRotary
from vispe.encodings.registry import register
from vispe.errors import OptionError, counted
from vispe.grid import Positions
from vispe.grid.frequencies import inverse_frequencies
from vispe.utils.axes import last_axis_to
from vispe.utils.options import Axes, PositiveFloat


@register
class Fope(AxialRotary):
    """RoPE with mixtures of waves as cosines and sines, without waves longer than the training length.

    cos_f = cos(p w) C_cos, sin_f = sin(p w) C_sin          arXiv 2412.17739

    Frequencies w of RoPE with less than one period in the training length are omitted. C_cos and C_sin are
    random matrices per head, close to a selection of evenly spaced waves; the remaining pairs have cosine and sine 1.
    An experiment of language models: it is not a rotation, norms change with the position, and scores are not functions
    of offsets. ``fope.text`` has the base and length of these. The outputs of a pretrained model change.

    Args:
        dim: width of the tokens, d.
        num_heads: heads, h.
        head_dim: channels of a head, d_h; dim / num_heads by default.
        axes: number of grid axes, each with separate waves, matrices and pairs, the last axis (x) first.
        train_length: the longest wavelength that is used: the side of the training grid, in units of the spacing.
        norm: whether the columns of the matrices are divided by their sums.
        trainable: whether the matrices are learned; they are saved in either case.
        base: ratio of the first frequency of an axis to the one after its last; the first is 1 per unit of the
            spacing.
        layout: which channels are a pair: 'half' c and c + pairs, 'interleaved' 2c and 2c + 1.
        spacing: distance between neighbouring patches per axis, instead of `Grid.spacing`.

    Shapes: pos (n, axes) -> tables (1 or b, h, n, pairs); prefix tokens are unchanged.
    New resolution: coordinates are extrapolated; every wave has at least one period in the training length.   Cost: 2
        h axes I O numbers for I waves and O <= I mixtures of an axis, once for all layers; as RoPE.
    Invariant to: nothing, translation included.
    Raises: OptionError if no wave is as short as `train_length`.
    Differs from the reference: the reference has one axis; base 100 and length 32 by default, for grids of tens of
        patches.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("fope", dim=16, num_heads=2)
        >>> encoding.transform(Grid((2, 3)).positions(), 0).query(torch.ones(1, 2, 6, 8)).shape
        torch.Size([1, 2, 6, 8])
    """

    name = "fope"
    paper = (
        "Fourier Position Embedding: Enhancing Attention's Periodic Extension for Length Generalization, "
        "https://arxiv.org/abs/2412.17739"
    )
    year = 2024
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "text": {"axes": 1, "base": 10000.0, "train_length": 512.0},
    }
    encodes = ("distance", "direction", "position")
    formula = r"\cos_f = C_{\cos} \cos p \omega, \quad \sin_f = C_{\sin} \sin p \omega"
    tested_options = (
        "norm=true,trainable=true,train_length=100",
        "axes=3,train_length=60,layout=interleaved",
        "axes=1,spacing=[0.5]",
    )

    axes: Axes = 2
    train_length: PositiveFloat = 32.0
    norm: bool = False
    trainable: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.axes not in self.ndim:
            raise OptionError(
                f"fope(axes={self.axes}) needs a pair of channels per axis and a spacing for each, got "
                f"{counted(self.pairs, 'pair')} with spacing={self.spacing}."
            )
        self._accept(self.axes)
        self.share = self.pairs // self.axes  # pairs of an axis
        # lower frequencies have less than one period in the training length
        min_freq = 2 * math.pi / self.train_length
        self.waves = waves = sum(self.base ** (-c / self.share) >= min_freq for c in range(self.share))
        if not waves:
            raise OptionError(
                f"fope uses waves with a period of at most train_length={self.train_length:g}, and the shortest has "
                f"2 pi "
                "units of the spacing. Choose train_length=7 or more."
            )
        # mixtures are at most half of an axis's pairs; the remaining pairs have cosine and sine 1
        mixed = max(min(waves, self.share // 2), 1)
        shape = (self.axes, self.num_heads, waves, mixed)
        kind = nn.Parameter if self.trainable else nn.Buffer
        self.cos_coef, self.sin_coef = kind(torch.empty(shape)), kind(torch.empty(shape))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the matrices: a selection of waves plus noise."""
        for matrix in (self.cos_coef, self.sin_coef):
            waves, mixed = matrix.shape[-2:]
            step = -(-waves // mixed)
            chosen = torch.zeros(waves, mixed)
            for i in range(min(mixed, -(-waves // step))):
                chosen[i * step, i] = 1
            with torch.no_grad():
                # noise with 0.3 times the standard deviation of Xavier initialisation
                matrix.normal_(std=0.3 * math.sqrt(2 / (waves + mixed))).add_(chosen.to(matrix))

    def frequencies(self, device: torch.device | None = None) -> Tensor:
        """Return the used frequencies of an axis, float64."""
        freqs = inverse_frequencies(2 * self.share, self.base, torch.float64)
        return freqs[: self.waves].to(device or freqs.device)

    def transform(self, pos: Positions, layer: int, x: Tensor | None = None) -> PairRotation:
        """Return the tables of all tokens; the identity for prefix tokens."""
        self._need_axes(pos)
        return PairRotation(*self._eval_cache(self, pos, lambda: self._tables(pos)), self.layout)

    def _tables(self, pos: Positions) -> tuple[Tensor, Tensor]:
        spaced = pos if self.spacing is None else pos.with_spacing(self.spacing)
        freqs = self.frequencies(exact_device(pos.coords)).to(spaced.coords)
        angle = last_axis_to(spaced.coords, 0)[:, :, None, :, None] * freqs  # (axes, b, 1, n, waves)
        cos, sin = (
            self._mixed(wave, matrix)
            for wave, matrix in ((angle.cos(), self.cos_coef), (angle.sin(), self.sin_coef))
        )
        spatial = pos.spatial[:, None, :, None]
        # identity for tokens without a position
        return torch.where(spatial, cos, 1.0), torch.where(spatial, sin, 0.0)

    def _mixed(self, waves: Tensor, matrix: Tensor) -> Tensor:
        """Return mixtures (b, h, n, pairs) of waves (axes, b, 1, n, I), the last axis first, with 1 for the rest."""
        weights = at_least_float32(matrix)[:, None]
        if self.norm:
            weights = weights / weights.sum(-2, keepdim=True)
        # of shape (axes, b, 1, n, waves) @ (axes, 1, h, waves, mixed)
        mixed = exact_product(waves, weights)
        padded = nn.functional.pad(mixed, (0, self.share - mixed.shape[-1]), value=1.0)
        # the last axis (x) has the first pairs
        joined = torch.cat([*padded.flip(0)], -1)
        return nn.functional.pad(joined, (0, self.pairs - joined.shape[-1]), value=1.0)
