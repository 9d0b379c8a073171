"""Sinusoid of a supplied token order, such as reading order (ROPE, arXiv 2106.10786)."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.encodings.base import Additive
from vispe.encodings.parts.additive.fourier import ProgressiveBands
from vispe.encodings.parts.additive.token_order import bind_ranks, ranks_of
from vispe.encodings.parts.additive.waves import rates, waves
from vispe.encodings.registry import register
from vispe.grid import Positions
from vispe.utils.options import PositiveEvenInt, PositiveFloat


@register
class Ranked(ProgressiveBands, Additive):
    """Adds the sinusoid of each token's rank in a supplied order.

    [sin(r w_k), cos(r w_k)], w_k = temperature ** (-k / (d / 2)), k = 0 .. d/2 - 1          after arXiv 2106.10786

    Ranks are integers in `Positions.attrs['rank']`: (1 or b, n), or a `PerToken` of them, prefix tokens included
    (theirs are ignored). `prepare` converts the former, so that ranks are dropped with their tokens.
    Without ranks, the tokens of a grid are ranked in row-major order, as text is read. A reordering of a
    sentence, a scan path or the order of detected lines are other orders.

    Args:
        dim: width of the tokens, d; even.
        temperature: ratio of the longest to the shortest wavelength; the shortest is 2 pi ranks.
        reveal: 'linear' or 'cosine' activates frequency bands during training, long wavelengths first (PINs, see
            `vispe.encodings.positions.set_progress`); 'none' uses all bands from the start.

    Shapes: ranks (1 or b, n) -> (1 or b, n, d) float32; prefix tokens get 0.
    New resolution: ranks are extrapolated.   Cost: no parameters, O(n d) per forward.
    Invariant to: positions, for fixed ranks.
    Raises: ShapeError without ranks on free coordinates, or for ranks that are not one integer per token.
    Differs from the reference: the reference ranks each word among its neighbours in a graph; here it
        is one order of all tokens.

    Example:
        >>> import torch
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("ranked", dim=16)
        >>> pos = Grid((2, 3)).positions().replace(attrs={"rank": torch.tensor([[0, 2, 4, 1, 3, 5]])})
        >>> encoding.table(encoding.prepare(pos)).shape
        torch.Size([1, 6, 16])
    """

    name = "ranked"
    paper = "ROPE: Reading Order Equivariant Positional Encoding for Graph-based Document Information Extraction, https://arxiv.org/abs/2106.10786"
    year = 2021
    ndim = (1, 2, 3)
    encodes = ("position",)
    formula = r"\left[ \sin r \omega_k, \; \cos r \omega_k \right], \quad \omega_k = T^{-k / (d / 2)}"
    tested_options = ("temperature=20",)

    dim: PositiveEvenInt
    temperature: PositiveFloat = 10000.0

    def prepare(
        self, pos: Positions, generator: torch.Generator | None = None, draws: dict[str, Tensor] | None = None
    ) -> Positions:
        """Bind ranks to their tokens, so that both are dropped together."""
        return bind_ranks(self.name, pos)

    def table(self, pos: Positions, image: Tensor | None = None) -> Tensor:
        """Return the vectors of all tokens, (1 or b, n, d) float32, 0 for prefix tokens."""
        self._need_axes(pos)
        self._need_start(pos, "reads an order of the tokens")
        # (1 or b, n) -> (1 or b, n, 1)
        rank = ranks_of(self.name, pos)[..., None].to(pos.coords)
        encoded = waves(rank * rates(self.dim // 2, self.temperature, rank))
        return self.with_band_weights(encoded, self.dim // 2) * pos.spatial[..., None]
