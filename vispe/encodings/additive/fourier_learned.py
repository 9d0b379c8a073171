"""Learnable Fourier features with an MLP behind them (Li et al., arXiv 2106.02795)."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vispe.encodings.parts.fourier import FourierEncoding, Normalize, with_first
from vispe.encodings.parts.layers import PreciseLinear
from vispe.encodings.registry import register
from vispe.errors import OptionError
from vispe.grid import Positions
from vispe.options import Even, Limits, Positive, Whole

Init = Literal["paper", "willguimont", "jhlew"]


@register
class FourierLearned(FourierEncoding):
    """Adds an MLP of sines and cosines of the coordinates, with learned frequencies, to the tokens.

    r = W x, f = [cos r, sin r] / sqrt(F), MLP(f) = W2 GELU(W1 f + b1) + b2, no factor 2 pi       arXiv 2106.02795

    At first the product of two f is about exp(-|x - y|^2 / (2 gamma^2)) / 2: gamma is a length. Three readings of
    the paper's N(0, gamma^-2) are published, and their presets take the gamma of their examples:
    ``fourier_learned.paper`` (standard deviation 1 / gamma; also the default), ``fourier_learned.willguimont``
    (gamma^-2) and ``fourier_learned.jhlew`` (gamma^2). ``fourier_learned.loope`` is what arXiv 2504.14386 compares with
    (standard deviation 1, coordinates from -1 to 1, a learned vector for the class token).

    On its own, ``encode(x)`` takes free coordinates (..., axes).

    Args:
        dim: width of the tokens, d.
        grid: shape of the model's grid; says how many coordinates there are.
        axes: number of coordinates where no grid is known; 2 by default. `table` needs 1 to 3.
        groups: so many equal groups of coordinates are encoded alike, into d / groups channels each.
        features: sines and cosines, F; even.
        hidden: units of the MLP.
        init: how gamma gives the standard deviation of W: 'paper', 'willguimont' or 'jhlew', as above.
        gamma: length over which places resemble each other; 0.2 by default, a fifth of the field of view.
        freq_std: the standard deviation of W itself, in place of `init` and `gamma`.
        normalize: coordinates of `table`, from cell centres: 'field' (fractions of the field of view), 'common'
            (of its longest side, for both axes), 'reference' (of the longest side of the training grid, in patches),
            'corners' (-1 to 1 from the first to the last cell), 'none' (as they are).
        reference: shape of the training grid for normalize='reference'; that of the host by default.
        class_vector: whether the first prefix token gets a learned vector, 0 at first.
        reveal: 'linear' or 'cosine' opens the waves band by band while the model is trained, long ones first (PINs, see
            `vispe.encodings.positions.set_progress`); 'none' has all of them from the start.

    Shapes: pos.coords (1 or b, n, axes) -> (1 or b, n, d) float32; prefix tokens get 0, but see `class_vector`.
    New resolution: evaluated at the new coordinates; see `normalize`.
    Cost: F / 2 * axes / groups + (F + 1) hidden + (hidden + 1) d / groups parameters; the MLP on n tokens per forward.
    Invariant to: the resolution, where cell centres coincide (normalize='field').
    Raises: ShapeError if `pos` has another number of axes; OptionError for options that do not fit together.
    Differs from the reference: no code was released with the paper; everything is in float32 for half-precision
        parameters; coordinates are slow to fast (y, x), which permutes columns of W only.

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
    knows = ("place",)
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"init": "paper"},
        "willguimont": {"init": "willguimont", "gamma": 10.0},
        "jhlew": {"init": "jhlew", "gamma": 1.0},
        "loope": {"freq_std": 1.0, "features": 768, "normalize": "corners", "class_vector": True},
    }

    axes: Annotated[int, Limits(least=1, most=64)] | None = None
    groups: Whole = 1
    features: Even | None = None
    hidden: Whole = 32
    init: Init = "paper"
    gamma: Positive | None = None
    freq_std: Positive | None = None
    normalize: Normalize = "field"
    reference: tuple[Whole, ...] | None = None
    class_vector: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        dim, groups = self.dim, self.groups
        if self.freq_std is not None and (self.gamma is not None or self.init != "paper"):
            raise OptionError(
                f"freq_std={self.freq_std:g} says the standard deviation of the frequencies itself; leave init and "
                "gamma out."
            )
        if self.coordinates % groups or dim % groups:
            raise OptionError(
                f"groups must divide the {self.coordinates} coordinates and dim={dim}, got groups={groups}."
            )
        count = self.features or dim + dim % 2
        self.frequency = PreciseLinear(self.coordinates // groups, count // 2, bias=False)
        self.mlp = nn.ModuleList(
            [PreciseLinear(count, self.hidden), PreciseLinear(self.hidden, dim // groups)]
        )
        self.vector = nn.Parameter(torch.empty(1, dim)) if self.class_vector else None
        self.reset_parameters()

    @property
    def std(self) -> float:
        """Standard deviation of the frequencies at first."""
        if self.freq_std is not None:
            return float(self.freq_std)
        gamma = 0.2 if self.gamma is None else self.gamma
        return float({"paper": 1 / gamma, "willguimont": gamma**-2, "jhlew": gamma**2}[self.init])

    def reset_parameters(self) -> None:
        """Draw the frequencies with standard deviation `std`, and the MLP as torch does."""
        nn.init.normal_(self.frequency.weight, std=self.std)
        for layer in self.mlp.children():
            cast("PreciseLinear", layer).reset_parameters()
        if self.vector is not None:
            nn.init.zeros_(self.vector)

    def adopt(self, state_dict: dict[str, Any], beside: str, own: str) -> None:
        """Rename ``Wr.weight``, ``mlp.0.*`` and ``mlp.2.*`` of the published module, where it is itself `own`."""
        del beside
        if f"{own}Wr.weight" not in state_dict:
            return
        names = {"Wr.weight": "frequency.weight", "mlp.2.weight": "mlp.1.weight", "mlp.2.bias": "mlp.1.bias"}
        for theirs, ours in names.items():
            state_dict[own + ours] = state_dict.pop(own + theirs)

    def _table(self, pos: Positions) -> Tensor:
        table = super()._table(pos)
        return table if self.vector is None else with_first(table, self.vector, pos)

    def _encode(self, coords: Tensor, pos: Positions | None) -> Tensor:
        grouped = coords.reshape(*coords.shape[:-1], self.groups, -1)
        angle = self.frequency(grouped)
        waves = torch.cat([angle.cos(), angle.sin()], -1) / math.sqrt(2 * angle.shape[-1])
        if self.opening:  # as many bands as frequencies, by the length of their waves
            order = self.frequency.weight.detach().norm(dim=-1).argsort().argsort()
            waves = self.by_length(waves, order, len(order))
        first, second = (cast("PreciseLinear", layer) for layer in self.mlp)
        return second(F.gelu(first(waves))).flatten(-2)
