"""A sinusoid of an order that is given as data, such as reading order (ROPE, arXiv 2106.10786)."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.encodings.base import Additive
from vispe.encodings.parts.fourier import Revealed
from vispe.encodings.parts.token_order import follow, ranks_of
from vispe.encodings.parts.waves import rates, waves
from vispe.encodings.registry import register
from vispe.grid import Positions
from vispe.options import Even, Positive


@register
class Ranked(Revealed, Additive):
    """Adds the sinusoid of each token's rank in an order that is given as data.

    [sin(r w_k), cos(r w_k)], w_k = temperature ** (-k / (d / 2)), k = 0 .. d/2 - 1          after arXiv 2106.10786

    Ranks are whole numbers in `Positions.attrs['rank']`: (1 or b, n), or a `PerToken` of them, prefix tokens included
    (theirs are not read). `prepare` makes the one of the other, so that ranks follow when tokens are dropped.
    Without any, the tokens of a grid are ranked row by row, as text is read. A reordering of a
    sentence, a scan path or the order of detected lines are other orders.

    Args:
        dim: width of the tokens, d; even.
        temperature: ratio of the longest to the shortest wavelength; the shortest is 2 pi ranks.
        reveal: 'linear' or 'cosine' opens the waves band by band while the model is trained, long ones first (PINs, see
            `vispe.encodings.positions.set_progress`); 'none' has all of them from the start.

    Shapes: ranks (1 or b, n) -> (1 or b, n, d) float32; prefix tokens get 0.
    New resolution: ranks go on.   Cost: no parameters, O(n d) per forward.
    Invariant to: where tokens are, given their ranks.
    Raises: ShapeError without ranks on free coordinates, or for ranks that are not one whole number per token.
    Differs from the reference: there the rank is counted for each word anew, among its neighbours in a graph; here it
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
    knows = ("place",)

    dim: Even
    temperature: Positive = 10000.0

    def prepare(
        self, pos: Positions, generator: torch.Generator | None = None, draws: dict[str, Tensor] | None = None
    ) -> Positions:
        """Give every token its rank, so that ranks follow when tokens are dropped."""
        return follow(self.name, pos)

    def table(self, pos: Positions, image: Tensor | None = None) -> Tensor:
        """Return the vectors of all tokens, (1 or b, n, d) float32, 0 for prefix tokens."""
        self._need_axes(pos)
        self._need_start(pos, "reads an order of the tokens")
        rank = ranks_of(self.name, pos)[..., None].to(pos.coords)
        made = waves(rank * rates(self.dim // 2, self.temperature, rank))
        return self.opened(made, self.dim // 2) * pos.spatial[..., None]
