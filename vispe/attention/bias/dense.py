"""Dense biases, low-rank biases and sums of biases."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import Tensor

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.dense_request import DenseRequest
from vispe.attention.precision import at_least_float32, check_floating, exact_product, no_infinity
from vispe.attention.score_terms import ScoreTerm, entry_term, product_term
from vispe.errors import ShapeError, UnsupportedCombination
from vispe.grid import Grid, Positions

MAX_RANK = 16  # of a low-rank bias as a score_mod, which writes out all channels


class LowRankBias(Bias):
    """``row_i . col_j``: a bias of rank r.

    Args:
        row: (b or 1, h or 1, n, r).
        col: (b or 1, h or 1, m, r).
        pos: the positions it is bound to, if any.

    Raises:
        ShapeError: `row` or `col` have another shape, or are not floating point.

    Example:
        >>> import torch
        >>> row, col = torch.ones(1, 1, 2, 1), torch.tensor([0.0, 3.0]).reshape(1, 1, 2, 1)
        >>> LowRankBias(row, col).dense()[0, 0]
        tensor([[0., 3.],
                [0., 3.]])
    """

    __slots__ = ("col", "row")

    def __init__(self, row: Tensor, col: Tensor, pos: Positions | None = None) -> None:
        super().__init__(pos)
        if row.ndim != 4 or col.ndim != 4 or row.shape[-1] != col.shape[-1]:
            raise ShapeError(
                "LowRankBias needs row (b, h, n, r) and col (b, h, m, r), got "
                f"{tuple(row.shape)} and {tuple(col.shape)}."
            )
        check_floating("LowRankBias", row=row, col=col)
        self.row, self.col = row, col

    @property
    def per_head(self) -> bool:
        """Whether heads differ."""
        return self.row.shape[1] > 1 or self.col.shape[1] > 1

    @property
    def per_sample(self) -> bool:
        """Whether samples of a batch differ."""
        return self.row.shape[0] > 1 or self.col.shape[0] > 1

    @property
    def finite(self) -> bool:
        """Whether it is known to contain no infinity."""
        return no_infinity(self.row, self.col)

    def _score_terms(self) -> list[ScoreTerm]:
        if self.row.shape[-1] > MAX_RANK:
            return super()._score_terms()
        return [product_term(at_least_float32(self.row), at_least_float32(self.col))]

    def _dense(self, request: DenseRequest) -> Tensor:
        return exact_product(request.pick(self.row, 1), request.pick(self.col, 1).transpose(-1, -2))


class DenseBias(Bias):
    """A bias given as a tensor (b or 1, h or 1, n, m), without a structure that fused kernels could use.

    Args:
        values: (b or 1, h or 1, n, m).
        pos: the positions it is bound to, if any.

    Raises:
        ShapeError: `values` is not 4-dimensional, or not floating point.

    Example:
        >>> import torch
        >>> DenseBias(torch.zeros(1, 1, 4, 4)).dense().shape
        torch.Size([1, 1, 4, 4])
    """

    __slots__ = ("values",)

    def __init__(self, values: Tensor, pos: Positions | None = None) -> None:
        super().__init__(pos)
        if values.ndim != 4:
            raise ShapeError(f"DenseBias needs a tensor (b, h, n, m), got {tuple(values.shape)}.")
        check_floating("DenseBias", values=values)
        self.values = values

    @property
    def per_head(self) -> bool:
        """Whether heads differ."""
        return self.values.shape[1] > 1

    @property
    def per_sample(self) -> bool:
        """Whether samples of a batch differ."""
        return self.values.shape[0] > 1

    def _score_terms(self) -> list[ScoreTerm]:
        return [entry_term(self.values)]

    def _dense(self, request: DenseRequest) -> Tensor:
        return at_least_float32(request.pick(self.values, 1))


class SumBias(Bias):
    """The sum of several biases.

    Args:
        terms: one or more biases.

    Raises:
        ShapeError: `terms` is empty.
        UnsupportedCombination: more than one term replaces the product of queries and keys.

    Example:
        >>> import torch
        >>> ones = DenseBias(torch.ones(1, 1, 2, 2))
        >>> SumBias([ones, ones]).dense()[0, 0]
        tensor([[2., 2.],
                [2., 2.]])
    """

    __slots__ = ("terms",)

    def __init__(self, terms: Sequence[Bias]) -> None:
        if not terms:
            raise ShapeError("SumBias needs at least one term, got none.")
        super().__init__(next((t.pos for t in terms if t.pos is not None), None))
        self.terms = tuple(terms)
        # two terms cannot both replace the product
        replacing = [type(t).__name__ for t in self.terms if t.replaces_product]
        if len(replacing) > 1:
            raise UnsupportedCombination(
                f"At most one term may replace the product of queries and keys, got {' and '.join(replacing)}. "
                "Omit the others."
            )
        self.replaces_product = bool(replacing)

    @property
    def invariant(self) -> bool:
        """Whether it depends only on the offset between two tokens."""
        return all(t.invariant for t in self.terms)

    @property
    def key(self) -> Hashable | None:
        """Cache key of everything but the positions; None if a term is learned."""
        # fixed only if all terms are
        keys = tuple(t.key for t in self.terms)
        # with different positions, these would have to be part of the key
        same_positions = all(t.pos is self.pos for t in self.terms)
        return keys if same_positions and all(key is not None for key in keys) else None

    @property
    def per_head(self) -> bool:
        """Whether heads differ."""
        return any(t.per_head for t in self.terms)

    @property
    def per_sample(self) -> bool:
        """Whether samples of a batch differ."""
        return any(t.per_sample for t in self.terms)

    @property
    def finite(self) -> bool:
        """Whether it is known to contain no infinity."""
        return all(t.finite for t in self.terms)

    @property
    def is_sparse(self) -> bool:
        """Whether a term masks many pairs."""
        return any(t.is_sparse for t in self.terms)

    def _score_terms(self) -> list[ScoreTerm]:
        return [function for term in self.terms for function in term._score_terms()]

    def _dense(self, request: DenseRequest) -> Tensor:
        # broadcasts over samples and heads
        total = self.terms[0]._dense(request)
        for term in self.terms[1:]:
            total = total + term._dense(request)
        return total

    def table(self, grid: Grid) -> Tensor:
        """Return the sum of the offset tables (h or 1, 2 n_1 - 1, 2 n_2 - 1, ...) on a grid."""
        total = self.terms[0].table(grid)
        for term in self.terms[1:]:
            total = total + term.table(grid)
        return total
