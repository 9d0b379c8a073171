"""Kerple: logarithmic and power kernels of distance (arXiv 2205.09921)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.dense_request import DenseRequest
from vispe.attention.precision import at_least_float32, exact_product
from vispe.encodings.parts.bias.radial import RadialEncoding, inverse_softplus, straight_through_clamp
from vispe.encodings.registry import register
from vispe.errors import OptionError, ShapeError
from vispe.grid import Positions
from vispe.utils.options import PositiveFloat, PositiveInt

EPS = 0.01


class WeightedBias(Bias):
    """``scale * q_i . k_j * exp(weight(i, j)) + profile(i, j)``, replacing the product of queries and keys.

    Args:
        weight: logarithm of the factor.
        profile: bias that is added.
    """

    __slots__ = ("profile", "weight")

    def __init__(self, weight: Bias, profile: Bias) -> None:
        super().__init__(profile.pos)
        self.weight, self.profile, self.replaces_product = weight, profile, True

    @property
    def per_sample(self) -> bool:
        """True: the logits depend on queries and keys."""
        return True

    def _dense(self, request: DenseRequest) -> Tensor:
        if request.q is None or request.k is None or request.scale is None:
            raise ShapeError(
                "WeightedBias needs q, k and scale, got None for one of them. Pass q, k and scale to dense()."
            )
        product = exact_product(
            request.pick(request.q, 1) * request.scale, request.pick(request.k, 1).transpose(-1, -2)
        )
        return product * self.weight._dense(request).exp() + self.profile._dense(request)


@register
class Kerple(RadialEncoding):
    """Attention falls off with the logarithm or with a power of the distance, at learned rates per head.

    bias = -p_h ln(1 + a_h d), or -a_h d^p_h with 0 < p < 2          arXiv 2205.09921

    ``kerple.log`` is the default, ``kerple.power`` the other kernel. Rates start at random, p in (0, 2) and a in
    (0, 1), so the outputs of a pretrained model change.

    Args:
        num_heads: heads, h.
        kernel: 'log' or 'power'.
        positive: parametrisation that makes p and a positive. 'softplus': they are softplus of the parameters, p of
            'power' twice a sigmoid; 'clamp': as the reference, parameters are raised to `eps` (and p of 'power' cut
            to 2) when used, with straight-through gradients.
        eps: the smallest p and a of positive='clamp', 0.01 by default.
        weighted: also multiply the products of queries and keys by exp(-a' d^p'), with separate a' and p'. It then
            replaces the whole logit, computed before any rotation; rotary encodings cannot be combined with it.
        metric: 'euclidean', 'manhattan', 'chebyshev' or 'squared' (euclidean, squared), in units of the spacing.
        wrap: distances on the torus: per axis min(d, n - d).
        normalize: 'max' divides by the largest distance in the grid, so that the bias stretches with it, 'reference'
            by that of the reference grid, 'none' not at all.
        reference: shape for normalize='reference'; the grid that the host was built with by default.
        spacing: distance between neighbouring patches per axis, instead of `Grid.spacing`.

    Shapes: pos (n, axes) -> bias (1, h, n, n); prefix rows and columns are 0.
    New resolution: no resampling needed; see `normalize`. On an infinite grid, the attention of 'log' is local only
        if p is larger than the number of axes.
    Cost: 2 h parameters per layer, 4 h with `weighted`; O(1) per score. `weighted` is made dense for every image.
    Invariant to: translation, rotation by any angle, flips (euclidean or squared, without wrap).
    Raises: ShapeError if `pos` has other axes than `spacing`; OptionError for incompatible options.
    Differs from the reference: two-sided and on grids, equal to the original under a causal mask; softplus by default;
        'clamp' does not modify stored parameters, while the reference overwrites them.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("kerple", num_heads=2)
        >>> encoding.bias(Grid((2, 3)).positions(), 0).dense().shape
        torch.Size([1, 2, 6, 6])
    """

    name = "kerple"
    paper = "KERPLE: Kernelized Relative Positional Embedding, https://arxiv.org/abs/2205.09921"
    year = 2022
    presets: ClassVar[dict[str, dict[str, Any]]] = {"log": {"kernel": "log"}, "power": {"kernel": "power"}}
    encodes = ("distance",)
    invariant = ("translation", "quarter_turns", "reflection", "rotation")
    formula = r"b_h = -p_h \ln(1 + a_h d) \quad \text{or} \quad b_h = -a_h d^{p_h}, \; 0 < p_h < 2"
    tested_options = (
        "kernel=power,metric=manhattan,normalize=max",
        "positive=clamp,eps=0.1,wrap=true",
        "weighted=true",
        "normalize=reference,spacing=[2,0.5]",
    )

    num_heads: PositiveInt
    kernel: Literal["log", "power"] = "log"
    positive: Literal["softplus", "clamp"] = "softplus"
    eps: PositiveFloat | None = None
    weighted: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eps is not None and self.positive != "clamp":
            raise OptionError(f"eps={self.eps} has no effect with positive={self.positive!r}. Omit it.")
        self.p, self.a = (nn.Parameter(torch.empty(self.num_heads)) for _ in range(2))
        if self.weighted:
            self.weight_p, self.weight_a = (nn.Parameter(torch.empty(self.num_heads)) for _ in range(2))
        self.reset_parameters()

    @property
    def per_layer(self) -> bool:
        """True: every layer has its own rates."""
        return True

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw p from U(0, 2) and a from U(0, 1), for either `positive`."""
        for name, parameter in self.named_parameters():
            top = 2.0 if name.endswith("p") else 1.0
            # away from the bounds, where the inverse maps below are infinite
            value = parameter.uniform_(0.0, top).clamp(EPS, top - EPS)
            if self.positive == "softplus":
                bounded = name.endswith("p") and self._most(name) is not None
                # inverse of `_rate`: 2 sigmoid(x), or softplus(x)
                value = torch.logit(value / 2) if bounded else inverse_softplus(value)
            parameter.copy_(value)

    def _most(self, name: str) -> float | None:
        """Return the upper bound of a parameter: powers above 2 are not valid kernels."""
        return 2.0 if name == "weight_p" or (name == "p" and self.kernel == "power") else None

    def _rate(self, name: str) -> Tensor:
        """Return the positive value of a parameter, (h, 1) in float32 or better."""
        raw, most = at_least_float32(getattr(self, name))[:, None], self._most(name)
        if self.positive == "clamp":
            return straight_through_clamp(raw, self.eps or EPS, most)
        # between 0 and `most`, or positive without an upper bound
        return F.softplus(raw) if most is None else most * raw.sigmoid()

    def bias(self, pos: Positions, layer: int, x: Tensor | None = None) -> Bias | None:
        """Return the bias; the whole logits with `weighted`."""
        profile = self._radial(self._log if self.kernel == "log" else self._power, pos)
        return WeightedBias(self._radial(self._weight, pos), profile) if self.weighted else profile

    def _log(self, distance: Tensor) -> Tensor:
        # (h, 1) * (m,) -> (h, m); log1p is accurate for small distances
        return -self._rate("p") * torch.log1p(self._rate("a") * distance)

    def _power(self, distance: Tensor) -> Tensor:
        return _falling(distance, self._rate("a"), self._rate("p"))

    def _weight(self, distance: Tensor) -> Tensor:
        return _falling(distance, self._rate("weight_a"), self._rate("weight_p"))


def _falling(distance: Tensor, rate: Tensor, power: Tensor) -> Tensor:
    """Return ``-rate * distance^power``, with gradient 0 at distance 0."""
    # powers below 1 have an infinite slope at 0, so the power of 1 is computed there instead
    nonzero = distance > 0
    return torch.where(nonzero, -rate * torch.where(nonzero, distance, 1.0) ** power, 0.0)
