"""Base class of attention biases.

A bias is a description that kernels can match on; `Bias.dense` defines its meaning:
``logits[b, h, i, j] = scale * q_i . k_j + dense[b, h, i, j]``, or dense alone if it `replaces_product`. On
one regular grid every translation-invariant bias is one table ``T[h, 2 gh - 1, 2 gw - 1]`` (any number of axes) with
index ``T[h, y_i - y_j + gh - 1, x_i - x_j + gw - 1]``, where i is the query. Rows and columns of tokens without a
position (prefix tokens) are 0 unless a bias has `prefix` values. Content-dependent biases are in
`vispe.attention.bias.content`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Self

import torch
from torch import Tensor

from vispe.attention.bias.dense_request import DenseRequest
from vispe.attention.bias.strip.runs import fill_dense
from vispe.attention.precision import at_least_float32, rounded
from vispe.attention.score_terms import ScoreMod, ScoreTerm, cell_numbers, extended, lookup_term
from vispe.errors import ShapeError, UnsupportedCombination
from vispe.grid import Grid, Positions


class Bias:
    """An additive term of the attention logits, bound to the positions that it was created for.

    Attributes:
        pos: the positions; None if the bias fits any.
        replaces_product: whether the bias replaces ``scale * q . k``; the logits are then this bias plus further terms.

    Raises:
        ShapeError: `dense` is called without positions on a bias that is not bound to any, or `mask` on a learned bias.
        UnsupportedCombination: `table` is called on a bias that depends on more than the offset.

    Example:
        >>> from vispe import Grid
        >>> from vispe.attention import DistanceBias
        >>> bias = DistanceBias((0.5,), Grid((1, 3)).positions())
        >>> bias.dense()[0, 0]
        tensor([[-0.0000, -0.5000, -1.0000],
                [-0.5000, -0.0000, -0.5000],
                [-1.0000, -0.5000, -0.0000]])
        >>> bias.invariant, bias.per_sample
        (True, False)
    """

    __slots__ = ("pos", "replaces_product")

    def __init__(self, pos: Positions | None) -> None:
        self.pos, self.replaces_product = pos, False

    def as_logits(self) -> Self:
        """Return a copy of the bias that replaces the product of queries and keys.

        Example:
            >>> import torch
            >>> from vispe.attention import DenseBias, attention
            >>> v = torch.tensor([[[[1.0], [2.0]]]])
            >>> swap = torch.tensor([[[[-torch.inf, 0.0], [0.0, -torch.inf]]]])
            >>> attention(v, v, v, bias=DenseBias(swap).as_logits())
            tensor([[[[2.],
                      [1.]]]])
        """
        # copy.copy() does not see __slots__ in a compiled graph
        cls = type(self)
        copied = cls.__new__(cls)
        # copy all slots of all base classes
        for name in (n for base in cls.__mro__ for n in getattr(base, "__slots__", ())):
            setattr(copied, name, getattr(self, name))
        # subclasses without __slots__; torch 2.11 cannot compile hasattr(self, "__dict__")
        if cls.__dictoffset__:
            for name, value in self.__dict__.items():
                setattr(copied, name, value)
        copied.replaces_product = True
        return copied

    def dense(
        self,
        pos_q: Positions | None = None,
        pos_k: Positions | None = None,
        *,
        q: Tensor | None = None,
        k: Tensor | None = None,
        scale: float | None = None,
        heads: slice | None = None,
    ) -> Tensor:
        """Return the bias as a tensor (b or 1, h or 1, n, m) in float32 or better.

        Args:
            pos_q: positions of the queries; by default those that the bias is bound to.
            pos_k: positions of the keys; by default those of the queries.
            q: queries (b, h, n, d_h) after qk-norm and before rotation, for content-dependent biases.
            k: keys (b, h, m, d_h), likewise.
            scale: the factor of the logits, for biases that are scaled with them.
            heads: heads to return, so that a large bias can be computed group by group; all by default.

        Raises:
            ShapeError: a required argument is missing or does not fit the bias.
        """
        return self._dense(DenseRequest(pos_q, pos_k, q, k, scale, heads))

    def _dense(self, request: DenseRequest) -> Tensor:
        raise NotImplementedError

    @property
    def invariant(self) -> bool:
        """Whether the bias depends only on the offset between two tokens, so that `table` is defined."""
        return False

    @property
    def between_positions(self) -> bool:
        """Whether ``dense(pos_q, pos_k)`` is defined for any two positions, on one grid if there is a table."""
        return self.invariant

    @property
    def key(self) -> Hashable | None:
        """Cache key of everything but the positions that a fixed bias depends on; None for a learned bias."""
        return None

    @property
    def per_head(self) -> bool:
        """Whether heads differ, so that `dense` has h heads instead of 1."""
        return True

    @property
    def per_sample(self) -> bool:
        """Whether samples of a batch differ, so that `dense` has b samples instead of 1."""
        return self.pos is not None and self.pos.coords.shape[0] > 1

    @property
    def finite(self) -> bool:
        """Whether no entry is known to be -inf, so that every query has a key; False if unknown.

        Tensors are read only on the CPU outside of compiled programs, where this is free. Elsewhere reading them would
        wait for the device or break the graph, so they count as unknown, and attention handles fully masked rows.
        """
        return False

    @property
    def is_sparse(self) -> bool:
        """Whether so many pairs are known to be -inf that kernels should skip fully masked blocks."""
        return False

    def table(self, grid: Grid) -> Tensor:
        """Return the offset table T (h or 1, 2 n_1 - 1, 2 n_2 - 1, ...) of this bias on `grid`, differentiable.

        Raises:
            UnsupportedCombination: the bias is not translation-invariant.
        """
        raise UnsupportedCombination(
            f"{type(self).__name__} has no offset table, since it depends on more than the offset between two "
            "tokens. Use dense()."
        )

    def score_mod(self) -> ScoreMod:
        """Return the bias as a `score_mod` of ``torch.nn.attention.flex_attention.flex_attention``.

        It captures tensors that are linear in the number of tokens (for a `DenseBias`, its tensor). Gradients of the
        parameters are those of FlexAttention. Apply the transforms of an encoding to queries and keys before.

        Raises:
            ShapeError: the bias is not bound to positions.
            UnsupportedCombination: the bias depends on queries or keys, or its tokens are not at the positions of a
                grid.

        Example:
            >>> import torch
            >>> from torch.nn.attention.flex_attention import flex_attention
            >>> from vispe import Grid
            >>> from vispe.attention import DistanceBias, attention
            >>> q = torch.randn(1, 2, 6, 16)
            >>> bias = DistanceBias((1.0, 0.5), Grid((2, 3)).positions())
            >>> out = flex_attention(q, q, q, score_mod=bias.score_mod())  # in practice, torch.compile(flex_attention)
            >>> torch.allclose(out, attention(q, q, q, bias=bias), atol=1e-5)
            True
        """
        terms, replaces_product = self._score_terms(), self.replaces_product

        def modified(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            total = torch.zeros_like(score) if replaces_product else score
            for term in terms:
                total = total + term(b, h, i, j).to(score.dtype)
            return total

        return modified

    def _score_terms(self) -> list[ScoreTerm]:
        """Return functions (b, h, i, j) whose sum is the bias."""
        name = type(self).__name__
        if not self.invariant:
            raise UnsupportedCombination(
                f"{name} has no score_mod, since it depends on more than the offset between two tokens. Use "
                "vispe.attention, or DenseBias(bias.dense(...)).score_mod() if a tensor of all pairs fits into memory."
            )
        pos = self._bound("score_mod")
        if pos.grid is None or not pos.on_grid:
            raise UnsupportedCombination(
                f"{name} has no score_mod here, since its tokens are not at the positions of a grid. Use "
                "vispe.attention, or DenseBias(bias.dense()).score_mod() if a tensor of all pairs fits into memory."
            )
        return [lookup_term(extended(at_least_float32(self.table(pos.grid)), None), cell_numbers(pos))]

    def _bound(self, method: str) -> Positions:
        if self.pos is None:
            raise ShapeError(
                f"{type(self).__name__}.{method} needs a bias with positions, got pos=None. Bind it to positions."
            )
        return self.pos

    def mask(self, dtype: torch.dtype) -> Tensor:
        """Return a fixed bias as a dense mask in `dtype`, cached with its positions.

        In half precision a constant is subtracted from each row, which softmax ignores (see `precision.rounded`).

        Raises:
            ShapeError: the bias is learned or not bound to positions, so its mask cannot be cached.
        """
        key, pos = self.key, self.pos
        if key is None or pos is None:
            raise ShapeError(
                f"{type(self).__name__} is learned or has no positions, so its mask cannot be cached. Use dense()."
            )

        def make() -> Tensor:
            grid = pos.grid
            # values written into a window are lost in a legacy ONNX export, which traces the model
            if (
                torch.compiler.is_compiling()
                or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
                or grid is None
                or not (self.invariant and pos.regular and pos.static)
            ):
                return rounded(self._dense(DenseRequest(None, None, None, None, None, None, False)), dtype)
            # a copy of windows of the table needs no further tensors of this size, unlike distances of all pairs
            table = at_least_float32(self.table(grid))
            mask = table.new_empty(len(table), pos.tokens, pos.tokens, dtype=dtype)
            for head in range(len(table)):
                out, one = mask[head], table[head : head + 1]
                is_exact = dtype.itemsize >= table.dtype.itemsize
                dense = out if is_exact else torch.empty_like(out, dtype=table.dtype)
                fill_dense(dense[None], one, grid.shape, grid.prefix)
                if not is_exact:
                    out.copy_(rounded(dense, dtype))
            return mask[None]

        return pos.remember(("mask", key, dtype), make)
