"""Dynamic position encoding: sinusoids with phases computed from each token (arXiv 2204.08142)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from vispe.encodings.base import Additive
from vispe.encodings.parts.additive.token_order import bind_ranks, check_ranks, ranks_of
from vispe.encodings.parts.additive.waves import rates, waves
from vispe.encodings.parts.layers import PreciseLinear
from vispe.encodings.registry import register
from vispe.errors import ShapeError, UnsupportedCombination
from vispe.grid import Positions
from vispe.utils.options import PositiveEvenInt, PositiveFloat, PositiveInt


@register
class Dynamic(Additive):
    """Adds sinusoids to every token, with phases computed from the token by a small network.

    p = W2 gelu(W1 x + b1) + b2, (K,);  x + [sin p, cos p], K = d / 2          after arXiv 2204.08142

    Phases do not represent positions until trained to: `rank_loss` pulls them towards the sinusoid of a rank r,
    p_k = r w_k, w_k = temperature ** (-k / K). Add it, with a weight, to the loss of the model; without it, the network
    learns any phases that help.

    Args:
        dim: width of the tokens, d; even.
        hidden: hidden units of the network; d by default.
        temperature: temperature of the sinusoid of a rank, see `ranks`.

    Shapes: x (b, n, d) -> x with its vectors, (b, n, d); prefix tokens are unchanged.
    New resolution: nothing depends on the grid.   Cost: 2 hidden d multiplications per token.
    Invariant to: positions: the added vector depends only on the content of a token.
    Raises: ShapeError for tokens of another width; `table` raises `UnsupportedCombination`.
    Differs from the reference: it is for translation, with a loss towards the order of the target sentence; no code
        is published; network, phases and the fit of ranks are ours, and so is the order of patches.

    Example:
        >>> import torch
        >>> from vispe import Grid, create_encoding
        >>> encoding, pos = create_encoding("dynamic", dim=16), Grid((2, 3)).positions()
        >>> x = torch.randn(4, 6, 16)
        >>> encoding.embed(x, pos).shape, encoding.rank_loss(x, pos).shape
        (torch.Size([4, 6, 16]), torch.Size([]))
    """

    name = "dynamic"
    paper = "Dynamic Position Encoding for Transformers, https://arxiv.org/abs/2204.08142"
    year = 2022
    ndim = (1, 2, 3)
    encodes = ("content",)
    formula = r"x + \left[ \sin p, \; \cos p \right], \quad p = W_2 \operatorname{gelu}(W_1 x + b_1) + b_2"
    tested_options = ("hidden=7,temperature=20",)
    reads_tokens = True

    dim: PositiveEvenInt
    hidden: PositiveInt | None = None
    temperature: PositiveFloat = 10000.0

    def __post_init__(self) -> None:
        self.first = PreciseLinear(self.dim, self.hidden or self.dim)
        self.second = PreciseLinear(self.hidden or self.dim, self.dim // 2)

    def reset_parameters(self) -> None:
        """Initialise both layers as torch does."""
        self.first.reset_parameters()
        self.second.reset_parameters()

    def prepare(
        self, pos: Positions, generator: torch.Generator | None = None, draws: dict[str, Tensor] | None = None
    ) -> Positions:
        """Bind supplied ranks to their tokens, so that both are dropped together."""
        return bind_ranks(self.name, pos)

    def table(self, pos: Positions, image: Tensor | None = None) -> Tensor:
        """Raise `UnsupportedCombination`: there is no table without tokens."""
        raise UnsupportedCombination(
            "dynamic reads the tokens, so it has no table of positions. Call embed(x, pos) with tokens (b, n, d)."
        )

    def embed(self, x: Tensor, pos: Positions, image: Tensor | None = None) -> Tensor:
        """Return the tokens (b, n, d) with their vectors, in their dtype."""
        self._need_axes(pos)
        # (b, n, d / 2) -> (b, n, d)
        return x + (waves(self._phases(x, pos)) * pos.spatial[..., None]).to(x.dtype)

    def ranks(self, x: Tensor, pos: Positions) -> Tensor:
        """Return the rank of each token (b, n) whose sinusoid is nearest to its phases, by least squares."""
        phases = self._phases(x, pos)
        rate = rates(self.dim // 2, self.temperature, phases)
        # the r that minimises |phases - r rate|^2
        return (phases * rate).sum(-1) / rate.square().sum()

    def rank_loss(self, x: Tensor, pos: Positions, rank: Tensor | None = None) -> Tensor:
        """Return the mean square of ``ranks(x, pos) - rank`` over patches, normalised by the largest rank.

        Args:
            x: tokens (b, n, d), as passed to `embed`.
            pos: their positions.
            rank: integers (1 or b, n), prefix tokens included, such as reading order, or the row-by-row order of
                a reference view; those of `Positions.attrs['rank']`, else of the grid, by default.
        """
        target = ranks_of(self.name, pos) if rank is None else check_ranks(self.name, rank, pos)
        predicted = self.ranks(x, pos)
        no_position = ~pos.spatial
        gap = (predicted - target.to(predicted)).masked_fill(no_position, 0.0)
        # an error as large as the full order counts 1, for any number of tokens
        largest = target.masked_fill(no_position, 0).abs().max().clamp(min=1)
        # patches of all samples; at least 1, since the sum is divided by it
        count = (~no_position).expand_as(gap).sum().clamp(min=1)
        return (gap / largest.to(gap)).square().sum() / count

    def _phases(self, x: Tensor, pos: Positions) -> Tensor:
        """Return the phases (b, n, d / 2) in float32 or better."""
        if x.ndim != 3 or x.shape[1:] != (pos.tokens, self.dim):
            raise ShapeError(
                f"dynamic reads the tokens (b, {pos.tokens}, {self.dim}), got {tuple(x.shape)}. Pass the tokens "
                f"that it is "
                "added to."
            )
        return self.second(F.gelu(self.first(x)))
