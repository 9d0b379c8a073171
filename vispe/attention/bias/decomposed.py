"""Decomposed relative position bias: one term per grid axis that depends on the content."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.dense_request import DenseRequest
from vispe.attention.precision import at_least_float32, check_floating, no_infinity
from vispe.errors import ShapeError
from vispe.grid import Positions


class DecomposedBias(Bias):
    """``rows[b, h, i, y_j] + cols[b, h, i, x_j]``: one term per grid row and one per grid column of the other token.

    The decomposed relative positions of SAM and the method 'cross' of iRPE have this form.

    Args:
        rows: (b or 1, h or 1, n, gh + 1), the last entry for tokens j without a position.
        cols: (b or 1, h or 1, n, gw + 1), likewise.
        dot: 'query': i is the query and j the key; 'key': i is the key and j the query.
        pos: the positions it is bound to, those of a 2-axis grid.

    Raises:
        ShapeError: `pos` is not from a 2-axis grid, or `rows` or `cols` do not fit it or are not floating point.

    Example:
        >>> import torch
        >>> from vispe import Grid
        >>> rows = torch.zeros(1, 1, 4, 3)  # 2 x 2 tokens: two rows, and tokens without a position
        >>> rows[..., 1] = 7.0  # the bias of all keys in the second row
        >>> DecomposedBias(rows, rows * 0, "query", Grid((2, 2)).positions()).dense()[0, 0, 0]
        tensor([0., 0., 7., 7.])
    """

    __slots__ = ("cols", "dot", "rows")

    def __init__(
        self, rows: Tensor | None, cols: Tensor | None, dot: Literal["query", "key"], pos: Positions
    ) -> None:
        super().__init__(pos)
        if pos.grid is None or pos.axes != 2:
            raise ShapeError(f"DecomposedBias needs the tokens of a 2-axis grid, got {pos}.")
        for name, tensor, axis in (("rows", rows, 0), ("cols", cols, 1)):
            expected = pos.tokens, pos.grid.shape[axis] + 1
            if tensor is not None and (tensor.ndim != 4 or tuple(tensor.shape[2:]) != expected):
                raise ShapeError(
                    f"DecomposedBias needs {name} (b, h, {expected[0]}, {expected[1]}) for {pos.grid}, got "
                    f"{tuple(tensor.shape)}."
                )
        check_floating("DecomposedBias", rows=rows, cols=cols)
        self.rows, self.cols, self.dot = rows, cols, dot

    @property
    def per_sample(self) -> bool:
        """Whether samples of a batch differ."""
        return True

    @property
    def finite(self) -> bool:
        """Whether it is known to contain no infinity."""
        return no_infinity(self.rows, self.cols)

    def lookups(self, request: DenseRequest) -> tuple[Tensor, Tensor]:
        """Return rows and cols of the requested heads, in float32 or better.

        Raises:
            ShapeError: one of them is missing.
        """
        if self.rows is None or self.cols is None:
            raise ShapeError(
                f"{type(self).__name__} needs row and column tensors, got rows=None or cols=None."
            )
        return at_least_float32(request.pick(self.rows, 1)), at_least_float32(request.pick(self.cols, 1))

    def _dense(self, request: DenseRequest) -> Tensor:
        rows, cols = self.lookups(request)
        pos = self.pos
        if pos is not None and pos.regular and pos.grid is not None:
            # (b, h, n, gh, 1) + (b, h, n, 1, gw) -> (b, h, n, gh * gw), patches in raster order
            patches = (rows[..., :-1, None] + cols[..., None, :-1]).flatten(-2)
            # prefix tokens have one row and one column entry
            prefix = (rows[..., -1:] + cols[..., -1:]).expand(*patches.shape[:-1], pos.grid.prefix)
            dense = torch.cat([prefix, patches], -1)
        else:
            # tokens are a subset or reordered: look up the row and column of each
            row, col = (grid_line_index(pos, axis)[:, None, None] for axis in (0, 1))
            batch = max(rows.shape[0], cols.shape[0], row.shape[0])
            shape = batch, max(rows.shape[1], cols.shape[1]), rows.shape[2], -1
            dense = rows.expand(shape).gather(-1, row.expand(shape))
            dense = dense + cols.expand(shape).gather(-1, col.expand(shape))
        return dense if self.dot == "query" else dense.transpose(-1, -2)


def grid_line_index(pos: Positions | None, axis: int) -> Tensor:
    """Return the grid row (axis 0) or column (axis 1) of each token, (b or 1, n); n_axis for tokens without a position.

    Raises:
        ShapeError: the positions are not from a grid.
    """
    if pos is None or pos.grid is None:
        raise ShapeError(f"Rows and columns need positions of a grid, got {pos}.")
    n = pos.grid.shape[axis]
    return pos.remember(("line", axis), lambda: torch.where(pos.spatial, pos.cells()[..., axis], n))
