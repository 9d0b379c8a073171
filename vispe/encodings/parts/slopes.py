"""What `alibi` and `alibi2d` share: slopes, options and the bias they amount to."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vispe.attention.bias.base import Bias
from vispe.attention.bias.dense import DenseBias, SumBias
from vispe.attention.bias.distance import DistanceBias
from vispe.attention.bias.distances import Metric, Normalize, check_rule
from vispe.encodings.base import Biased
from vispe.errors import OptionError, ShapeError, is_whole
from vispe.grid import PerToken, Positions, as_spacing

Slopes = Literal["constant", "geometric", "alibi", "learned"]


def fixed_slopes(rule: Slopes, heads: int) -> tuple[float, ...]:
    """Return the slopes of a fixed rule, one per head.

    'constant': 1. 'geometric': ``2 ** (-8 k / h)``, k = 1 .. h, for any h (arXiv 2603.16840). 'alibi': the same for
    powers of two; otherwise those of the next lower power p, then the first h - p of every second slope of
    the 2p-head rule (arXiv 2108.12409).
    """
    if rule == "constant":
        return (1.0,) * heads
    if rule == "geometric" or heads & (heads - 1) == 0:
        return tuple(2.0 ** (-8.0 * k / heads) for k in range(1, heads + 1))
    lower = 1 << (heads.bit_length() - 1)
    return fixed_slopes("alibi", lower) + fixed_slopes("alibi", 2 * lower)[::2][: heads - lower]


class AlibiBase(Biased):
    """A penalty on attention that grows with distance; `alibi` and `alibi2d` are its final classes."""

    def __init__(self, num_heads: int, slopes: Slopes, softplus: bool, options: dict[str, Any]) -> None:
        super().__init__()
        self.num_heads, self.slopes, self.softplus = num_heads, slopes, softplus
        if slopes not in get_args(Slopes):
            raise OptionError(f"slopes must be one of {', '.join(get_args(Slopes))}, got {slopes!r}.")
        if not is_whole(num_heads) or num_heads < 1:
            raise OptionError(f"{self.name} needs at least one head, got num_heads={num_heads}.")
        for name, flag in (("softplus", softplus), ("wrap", options.get("wrap", False))):
            if not isinstance(flag, bool):
                raise OptionError(f"{name} is true or false, got {name}={flag!r}.")
        if softplus and slopes != "learned":
            raise OptionError(
                f"softplus keeps learned slopes positive, but slopes={slopes!r}; say slopes=learned."
            )
        self.metric: Metric = options.get("metric", "euclidean")
        self.wrap: bool = options.get("wrap", False)
        self.normalize: Normalize = options.get("normalize", "none")
        reference = options.get("reference")
        check_rule(self.metric, self.normalize)
        if reference is not None and self.normalize != "reference":
            raise OptionError(
                f"reference={reference} has no effect with normalize={self.normalize!r}; say 'reference'."
            )
        self.reference = None if reference is None else _whole_numbers("reference", reference)
        if self.reference is not None and (len(self.reference) != self.ndim[0] or min(self.reference) < 1):
            raise OptionError(
                f"reference needs one number above 0 for each of {self.ndim[0]} axes, got {reference}."
            )
        spacing = options.get("spacing")
        self.spacing = None if spacing is None else as_spacing(spacing, self.ndim[0])
        layers = options.get("layers")
        self.layers = None if layers is None else _whole_numbers("layers", layers)
        self.depth: int | None = options.get("depth")
        outside = [i for i in self.layers or () if i < 0 or i >= (self.depth or i + 1)]
        if outside:
            raise OptionError(f"layers must be block indices below depth={self.depth}, got {outside}.")
        jitter = options.get("jitter", 0.0)
        if isinstance(jitter, bool) or not isinstance(jitter, int | float) or not 0 <= jitter < float("inf"):
            raise OptionError(f"jitter is a standard deviation, got jitter={jitter!r}.")
        self.jitter = float(jitter)
        biased = options.get("biased_heads")
        if biased is not None and not (is_whole(biased) and 0 < biased <= num_heads):
            raise OptionError(f"biased_heads must be between 1 and num_heads={num_heads}, got {biased}.")
        self.biased_heads = biased
        if slopes == "learned":
            self.slope = nn.Parameter(torch.empty(biased or num_heads))
            self.reset_parameters()

    @property
    def per_layer(self) -> bool:
        """Learned slopes are one per head and layer."""
        return self.slopes == "learned"

    def reset_parameters(self) -> None:
        """Draw learned slopes uniformly from [0, 1) (of the slope itself, also with softplus)."""
        if self.slopes == "learned":
            with torch.no_grad():
                self.slope.uniform_(0.0, 1.0)
                if self.softplus:  # softplus(slope) is what was drawn
                    self.slope.copy_(_inverse_softplus(self.slope.clamp(min=1e-4)))

    def active(self, layer: int) -> bool:
        """Whether block `layer` has the bias."""
        return self.layers is None or layer in self.layers

    def adopt(self, state_dict: dict[str, Any], beside: str, own: str) -> None:
        """Take learned slopes that released checkpoints keep as `m` (h, 1, 1) on the attention layer."""
        if self.slopes == "learned" and f"{beside}m" in state_dict:
            slope = state_dict.pop(f"{beside}m").flatten()
            if self.softplus and not (slope > 0).all():
                raise OptionError(
                    f"{beside}m has slopes down to {slope.min():.3g}, which softplus=true cannot hold; "
                    "load it with softplus=false."
                )
            state_dict[f"{own}slope"] = _inverse_softplus(slope) if self.softplus else slope

    def head_slopes(self) -> tuple[float, ...] | Tensor:
        """Return one slope per head: floats of a fixed rule, or the learned tensor (h,) float32."""
        active = self.biased_heads or self.num_heads
        rest = self.num_heads - active
        if self.slopes != "learned":
            return fixed_slopes(self.slopes, active) + (0.0,) * rest
        slope = self.slope if self.slope.dtype == torch.float64 else self.slope.float()
        slope = F.softplus(slope) if self.softplus else slope
        return F.pad(slope, (0, rest)) if rest else slope

    def prepare(
        self, pos: Positions, generator: torch.Generator | None = None, draws: dict[str, Tensor] | None = None
    ) -> Positions:
        """Draw the jitter of this forward pass while training."""
        noise = (draws or {}).get("jitter")
        if noise is None and self.jitter and self.training and "jitter" not in pos.attrs:
            shape = (1, self.num_heads, pos.tokens, pos.tokens)
            noise = torch.randn(shape, generator=generator, device=pos.coords.device) * self.jitter
        if noise is None:
            return pos
        if tuple(noise.shape[1:]) != (self.num_heads, pos.tokens, pos.tokens):
            raise ShapeError(
                f"{self.name} needs a draw of jitter of shape (1 or b, {self.num_heads}, {pos.tokens}, {pos.tokens}), "
                f"got {tuple(noise.shape)}."
            )
        return pos.replace(attrs={**pos.attrs, "jitter": PerToken(noise, (2, 3))})

    def bias(self, pos: Positions, layer: int, x: Tensor | None = None) -> Bias | None:
        """Return the bias of block `layer`; None where `layers` leaves it out."""
        if pos.axes != self.ndim[0]:
            raise ShapeError(f"{self.name} needs {self.ndim[0]}-axis positions, got {pos.axes} axes ({pos}).")
        if not self.active(layer):
            return None
        noise = pos.attrs.get("jitter") if self.jitter else None
        bias = DistanceBias(
            self.head_slopes(),
            pos,
            metric=self.metric,
            wrap=self.wrap,
            normalize=self.normalize,
            reference=self.reference,
            spacing=self.spacing,
        )
        return bias if noise is None else SumBias([bias, DenseBias(noise.values, pos)])


def _whole_numbers(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not all(is_whole(n) for n in value):
        raise OptionError(f"{name} needs a list of whole numbers, got {name}={value!r}.")
    return tuple(value)


def _inverse_softplus(slope: Tensor) -> Tensor:
    """Return x with softplus(x) = slope, exact for small and large slopes."""
    return slope + torch.log(-torch.expm1(-slope))
