"""What an encoding may add to the attention logits: the closed `Bias` vocabulary.

A bias is a description that kernels can match on; `Bias.dense` is its meaning:
``logits[b, h, i, j] = scale * q_i . k_j + dense[b, h, i, j]``, or dense alone where it is `whole`. On one regular
grid every translation-invariant bias is one table ``T[h, 2 gh - 1, 2 gw - 1]`` (any number of axes) with index
``T[h, y_i - y_j + gh - 1, x_i - x_j + gw - 1]``, i the query. Rows and columns of tokens without a place are 0
unless a bias carries `prefix` values. Content-dependent members are in `vispe.attention.bias.content`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple, Self

import torch
from torch import Tensor

from vispe.attention.precision import rounded
from vispe.errors import ShapeError, UnsupportedCombination
from vispe.grid import Grid, Positions


class Request(NamedTuple):
    """The arguments of `Bias.dense`.

    `heads` is None for all heads, since compilers of torch 2.11 cannot build a slice that no tensor is indexed with.
    `keep`: what only depends on positions may be cached with them.
    """

    pos_q: Positions | None
    pos_k: Positions | None
    q: Tensor | None
    k: Tensor | None
    scale: float | None
    heads: slice | None
    keep: bool = True

    def pick(self, per_head: Tensor, axis: int = 0) -> Tensor:
        """Return the asked heads of a tensor with h or 1 heads on `axis`."""
        if per_head.shape[axis] == 1 or self.heads is None:
            return per_head
        return per_head[self.heads] if axis == 0 else per_head[:, self.heads]

    def where(self, own: Positions | None) -> tuple[Positions, Positions]:
        """Return the positions of queries and keys for a bias that is bound to `own`, or raise `ShapeError`."""
        pos_q = own if self.pos_q is None else self.pos_q
        pos_k = pos_q if self.pos_k is None else self.pos_k
        if pos_q is None or pos_k is None:
            raise ShapeError("This bias is not bound to positions; pass pos_q (and pos_k) to dense().")
        return pos_q, pos_k


class Bias:
    """An additive term of the attention logits, bound to the positions that it was made for.

    Attributes:
        pos: the positions; None where it goes with any.
        whole: whether it takes the place of ``scale * q . k``, so that the logits are this alone (and what else is
            added to them).
    """

    __slots__ = ("pos", "whole")

    def __init__(self, pos: Positions | None) -> None:
        self.pos, self.whole = pos, False

    def as_whole(self) -> Self:
        """Return the same bias in place of the product of queries and keys.

        Example:
            >>> import torch
            >>> from vispe.attention import DenseBias, attention
            >>> v = torch.tensor([[[[1.0], [2.0]]]])
            >>> swap = torch.tensor([[[[-torch.inf, 0.0], [0.0, -torch.inf]]]])
            >>> attention(v, v, v, bias=DenseBias(swap).as_whole())
            tensor([[[[2.],
                      [1.]]]])
        """
        # copy() would find no slots in a compiled graph
        kind = type(self)
        alone = kind.__new__(kind)
        for name in (n for base in kind.__mro__ for n in getattr(base, "__slots__", ())):
            setattr(alone, name, getattr(self, name))
        if (
            kind.__dictoffset__
        ):  # a class of yours without slots; torch 2.11 compiles no look at what is not there
            for name, value in self.__dict__.items():
                setattr(alone, name, value)
        alone.whole = True
        return alone

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
        """Return the logits to add, (b or 1, h or 1, n, m), in float32 or better.

        Args:
            pos_q: positions of the queries; by default those that the bias is bound to.
            pos_k: positions of the keys; by default those of the queries.
            q: queries (b, h, n, d_h) after qk-norm and before rotation, for content-dependent biases.
            k: keys (b, h, m, d_h), likewise.
            scale: the factor of the logits, for biases that are scaled with them.
            heads: which heads to return, so that a large bias can be made group by group; all by default.
        """
        return self._dense(Request(pos_q, pos_k, q, k, scale, heads))

    def _dense(self, ask: Request) -> Tensor:
        raise NotImplementedError

    @property
    def invariant(self) -> bool:
        """Whether the bias depends on nothing but the offset between two tokens, so that `table` exists."""
        return False

    @property
    def key(self) -> Hashable | None:
        """What the bias depends on beside its positions, when that has no gradient; else None."""
        return None

    @property
    def per_head(self) -> bool:
        """Whether heads differ, so that `dense` has h heads and not 1."""
        return True

    @property
    def per_sample(self) -> bool:
        """Whether samples of a batch differ, so that `dense` has b samples and not 1."""
        return self.pos is not None and self.pos.coords.shape[0] > 1

    @property
    def finite(self) -> bool:
        """Whether no entry is -inf, so that every query has a key.

        It is derived, and False where nothing is known. The numbers that a bias was made from are looked at where that
        costs nothing: on the CPU, called and not compiled. Elsewhere a look would wait for the device or break the
        graph, so there tensors count as not known, and attention takes care of rows that may be closed.
        """
        return False

    @property
    def hides(self) -> bool:
        """Whether it is known to be -inf for so many pairs that kernels should look for blocks to pass over."""
        return False

    def table(self, grid: Grid) -> Tensor:
        """Return the table T (h or 1, 2 n_1 - 1, 2 n_2 - 1, ...) of this bias on `grid`, differentiable.

        Raises:
            UnsupportedCombination: the bias is not translation invariant.
        """
        raise UnsupportedCombination(
            f"A table of {type(self).__name__} was asked, but it depends on more than the offset between two "
            "tokens; use dense()."
        )

    def mask(self, dtype: torch.dtype, heads: slice | None = None) -> Tensor:
        """Return the dense bias of fixed biases in `dtype`, kept with their positions; of all heads by default."""
        key = self.key
        if key is None or self.pos is None:
            raise ShapeError(
                f"{type(self).__name__} is not fixed, so no mask of it can be kept; use dense()."
            )
        ask = Request(None, None, None, None, None, heads, keep=False)
        span = (None, None) if heads is None else (heads.start, heads.stop)
        return self.pos.remember(("mask", key, dtype, span), lambda: rounded(self._dense(ask), dtype))
