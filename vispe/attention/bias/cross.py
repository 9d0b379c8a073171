"""Biases between queries and keys at different positions."""

from __future__ import annotations

from torch import Tensor

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.dense import SumBias
from vispe.attention.bias.dense_request import DenseRequest
from vispe.attention.score_terms import ScoreTerm
from vispe.errors import UnsupportedCombination
from vispe.grid import Positions


class CrossAttentionBias(Bias):
    """A bias between queries and keys at different positions: cross attention, and decoding with a KV cache.

    Queries and keys may differ in number. The fused kernels support tables and distances; other backends compute a
    dense mask in each call.

    Args:
        bias: a table, a profile, a distance, a function of the offset or of the distance, or a sum of these.
        pos_q: positions of the queries.
        pos_k: positions of the keys.

    Raises:
        ShapeError: on use, if the bias is a table and `pos_q` and `pos_k` are not on its grid.
        UnsupportedCombination: the bias depends on more than positions.

    Example:
        >>> import torch
        >>> from vispe import Grid
        >>> from vispe.attention import DistanceBias, attention
        >>> pos = Grid((1, 4)).positions()
        >>> last = pos.gather(torch.tensor([[3]]))  # the newest token; keys and values of all are cached
        >>> bias = CrossAttentionBias(DistanceBias((1.0,), pos), last, pos)
        >>> bias.dense()[0, 0]
        tensor([[-3., -2., -1., -0.]])
        >>> attention(torch.ones(1, 1, 1, 8), torch.ones(1, 1, 4, 8), torch.ones(1, 1, 4, 8), bias=bias).shape
        torch.Size([1, 1, 1, 8])
    """

    __slots__ = ("bias", "pos_k", "pos_q")

    def __init__(self, bias: Bias, pos_q: Positions, pos_k: Positions) -> None:
        super().__init__(None)
        refused = _not_of_positions(bias)
        if refused is not None:
            raise UnsupportedCombination(
                f"CrossAttentionBias needs a bias that depends on positions only, got {type(refused).__name__}. Use "
                "DenseBias with a tensor (b, h, queries, keys)."
            )
        self.bias, self.pos_q, self.pos_k = bias, pos_q, pos_k
        self.replaces_product = bias.replaces_product

    @property
    def per_head(self) -> bool:
        """Whether heads differ."""
        return self.bias.per_head

    @property
    def per_sample(self) -> bool:
        """Whether samples of a batch differ."""
        return max(self.pos_q.coords.shape[0], self.pos_k.coords.shape[0]) > 1

    def _score_terms(self) -> list[ScoreTerm]:
        raise UnsupportedCombination(
            "CrossAttentionBias has no score_mod, since queries and keys are at different positions. Use "
            "vispe.attention, or DenseBias(bias.dense()).score_mod() if a tensor of all pairs fits into memory."
        )

    def _dense(self, request: DenseRequest) -> Tensor:
        return self.bias._dense(request._replace(pos_q=self.pos_q, pos_k=self.pos_k, cacheable=False))


def _not_of_positions(bias: Bias) -> Bias | None:
    """Return the bias, or the first term of a sum, that is not known to be defined between any two positions."""
    if isinstance(bias, SumBias):
        return next((term for term in map(_not_of_positions, bias.terms) if term is not None), None)
    return None if bias.between_positions else bias
