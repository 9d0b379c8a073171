"""Learnable Fourier features followed by an MLP (Li et al., arXiv 2106.02795)."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vispe.encodings.parts.additive.fourier import FourierEncoding, Normalize, with_first
from vispe.encodings.parts.layers import PreciseLinear
from vispe.encodings.registry import register
from vispe.errors import OptionError, counted
from vispe.grid import Positions
from vispe.utils.interval import Interval
from vispe.utils.options import PositiveEvenInt, PositiveFloat, PositiveInt

Init = Literal["paper", "willguimont", "jhlew"]


@register
class FourierLearned(FourierEncoding):
    """Adds an MLP of sines and cosines of the coordinates, with learned frequencies, to the tokens.

    r = W x, f = [cos r, sin r] / sqrt(F), MLP(f) = W2 GELU(W1 f + b1) + b2, no factor 2 pi       arXiv 2106.02795

    At first the product of two f is about exp(-|x - y|^2 / (2 gamma^2)) / 2: gamma is a length. Three interpretations
    of the paper's N(0, gamma^-2) are published, and their presets use the gamma of their examples:
    ``fourier_learned.paper`` (standard deviation 1 / gamma; also the default), ``fourier_learned.willguimont``
    (gamma^-2) and ``fourier_learned.jhlew`` (gamma^2). ``fourier_learned.loope`` is the baseline of arXiv 2504.14386
    (standard deviation 1, coordinates from -1 to 1, a learned vector for the class token).

    On its own, ``encode(x)`` takes free coordinates (..., axes).

    Args:
        dim: width of the tokens, d.
        grid: shape of the model's grid; defines the number of coordinates.
        axes: number of coordinates if no grid is known; 2 by default. `table` needs 1 to 3.
        groups: number of equal groups of coordinates that share the encoder, with d / groups channels each.
        features: number of sines and cosines, F; even.
        hidden: hidden units of the MLP.
        init: standard deviation of W as a function of gamma: 'paper', 'willguimont' or 'jhlew', as above.
        gamma: correlation length of positions; 0.2 by default, a fifth of the field of view.
        freq_std: standard deviation of W, instead of `init` and `gamma`.
        normalize: coordinates of `table`, from cell centres: 'field' (fractions of the field of view), 'common'
            (of its longest side, for both axes), 'reference' (of the longest side of the training grid, in patches),
            'corners' (-1 to 1 from the first to the last cell), 'none' (unscaled).
        reference: shape of the training grid for normalize='reference'; that of the host by default.
        class_vector: whether the first prefix token gets a learned vector, 0 at first.
        reveal: 'linear' or 'cosine' activates frequency bands during training, long wavelengths first (PINs, see
            `vispe.encodings.positions.set_progress`); 'none' uses all bands from the start.

    Shapes: pos.coords (1 or b, n, axes) -> (1 or b, n, d) float32; prefix tokens get 0, except with `class_vector`.
    New resolution: evaluated at the new coordinates; see `normalize`.
    Cost: F / 2 * axes / groups + (F + 1) hidden + (hidden + 1) d / groups parameters; the MLP on n tokens per forward.
    Invariant to: the resolution, where cell centres coincide (normalize='field').
    Raises: ShapeError if `pos` has another number of axes; OptionError for incompatible options.
    Differs from the reference: no code was released with the paper; computed in float32 for half-precision
        parameters; coordinates are slow to fast (y, x), which only permutes columns of W.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("fourier_learned", dim=16, grid=(2, 3))
        >>> encoding.table(Grid((2, 3)).positions()).shape
        torch.Size([1, 6, 16])
    """

    name = "fourier_learned"
    paper = (
        "Learnable Fourier Features for Multi-Dimensional Spatial Positional Encoding, "
        "https://arxiv.org/abs/2106.02795"
    )
    year = 2021
    encodes = ("position",)
    formula = (
        r"W_2 \operatorname{gelu}(W_1 f + b_1) + b_2, \quad f = \frac{1}{\sqrt{F}} \left[ \cos W p, \; "
        r"\sin W p \right]"
    )
    tested_options = (
        "groups=2,features=8",
        "hidden=5,gamma=2",
        "init=jhlew,gamma=3",
        "freq_std=2,normalize=reference",
        "normalize=common,class_vector=true",
    )
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"init": "paper"},
        "willguimont": {"init": "willguimont", "gamma": 10.0},
        "jhlew": {"init": "jhlew", "gamma": 1.0},
        "loope": {"freq_std": 1.0, "features": 768, "normalize": "corners", "class_vector": True},
    }

    axes: Annotated[int, Interval(least=1, most=64)] | None = None
    groups: PositiveInt = 1
    features: PositiveEvenInt | None = None
    hidden: PositiveInt = 32
    init: Init = "paper"
    gamma: PositiveFloat | None = None
    freq_std: PositiveFloat | None = None
    normalize: Normalize = "field"
    reference: tuple[PositiveInt, ...] | None = None
    class_vector: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        dim, groups = self.dim, self.groups
        if self.freq_std is not None and (self.gamma is not None or self.init != "paper"):
            raise OptionError(
                f"init and gamma have no effect with freq_std={self.freq_std:g}, got init={self.init!r}, "
                f"gamma={self.gamma}. Omit them."
            )
        if self.coordinates % groups or dim % groups:
            raise OptionError(
                f"groups must divide the {counted(self.coordinates, 'coordinate')} and dim={dim}, got groups={groups}."
            )
        # an even number: one cosine and one sine per frequency
        count = self.features or dim + dim % 2
        self.frequency = PreciseLinear(self.coordinates // groups, count // 2, bias=False)
        self.mlp = nn.ModuleList(
            [PreciseLinear(count, self.hidden), PreciseLinear(self.hidden, dim // groups)]
        )
        self.vector = nn.Parameter(torch.empty(1, dim)) if self.class_vector else None
        self.reset_parameters()

    @property
    def std(self) -> float:
        """Initial standard deviation of the frequencies."""
        if self.freq_std is not None:
            return float(self.freq_std)
        gamma = 0.2 if self.gamma is None else self.gamma
        # the implementations define gamma differently
        return float({"paper": 1 / gamma, "willguimont": gamma**-2, "jhlew": gamma**2}[self.init])

    def reset_parameters(self) -> None:
        """Draw the frequencies with standard deviation `std`, and the MLP as torch does."""
        nn.init.normal_(self.frequency.weight, std=self.std)
        for layer in self.mlp.children():
            cast("PreciseLinear", layer).reset_parameters()
        if self.vector is not None:
            nn.init.zeros_(self.vector)

    def rename_checkpoint_keys(self, state_dict: dict[str, Any], parent_prefix: str, prefix: str) -> None:
        """Rename ``Wr.weight``, ``mlp.0.*`` and ``mlp.2.*`` of the published module, if its prefix is `prefix`."""
        del parent_prefix
        if f"{prefix}Wr.weight" not in state_dict:
            return
        names = {"Wr.weight": "frequency.weight", "mlp.2.weight": "mlp.1.weight", "mlp.2.bias": "mlp.1.bias"}
        for released, name in names.items():
            state_dict[prefix + name] = state_dict.pop(prefix + released)

    def _table(self, pos: Positions) -> Tensor:
        table = super()._table(pos)
        return table if self.vector is None else with_first(table, self.vector, pos)

    def _encode(self, coords: Tensor, pos: Positions | None) -> Tensor:
        # (..., axes) -> (..., groups, axes / groups)
        grouped = coords.reshape(*coords.shape[:-1], self.groups, -1)
        angle = self.frequency(grouped)
        # divided by the root of the number of features, so that its norm does not depend on it
        waves = torch.cat([angle.cos(), angle.sin()], -1) / math.sqrt(2 * angle.shape[-1])
        if self.uses_progress:  # one band per frequency, ordered by wavelength
            order = self.frequency.weight.detach().norm(dim=-1).argsort().argsort()
            waves = self.by_length(waves, order, len(order))
        first, second = (cast("PreciseLinear", layer) for layer in self.mlp)
        # (..., groups, d / groups) -> (..., d)
        return second(F.gelu(first(waves))).flatten(-2)
