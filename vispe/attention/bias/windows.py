"""Mask of shifted windows (Swin) as a bias.

Swin rolls a feature map before partitioning it into windows, so a window at the end of an axis contains two parts that
are not neighbours in the map; a constant such as -100 is added between them. A window has at most two parts along an
axis, so the mask of a pair depends on its offset and on whether it crosses parts: an offset table with three times as
many entries along each axis, in which only the middle ones do not have that constant.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.dense_request import DenseRequest
from vispe.attention.precision import at_least_float32, no_infinity
from vispe.attention.score_terms import ScoreTerm, lookup_term
from vispe.errors import ShapeError
from vispe.grid import Positions


class WindowMask(Bias):
    """The additive mask between different parts of shifted windows (Swin, arXiv 2103.14030, section 3.2).

    Args:
        mask: (w, n, n), 0 within a part and one other constant between parts, which are rectangles, at most two
            along an axis. The batch consists of the w windows of one image after the other.
        pos: positions of one window, a full grid of n tokens in raster order.
        samples: batch size b, a multiple of w.

    Raises:
        ShapeError: `mask`, `pos` and `samples` do not fit together.

    Example:
        >>> import torch
        >>> from vispe import Grid
        >>> mask = torch.tensor([[[0.0, -100.0], [-100.0, 0.0]]])
        >>> WindowMask(mask, Grid((1, 2)).positions(), samples=1).dense()[0, 0]
        tensor([[   0., -100.],
                [-100.,    0.]])
    """

    __slots__ = ("mask_of_windows", "samples")

    def __init__(self, mask: Tensor, pos: Positions, samples: int) -> None:
        super().__init__(pos)
        grid = pos.grid
        if grid is None or grid.prefix or pos.index is not None or pos.coords.shape[0] > 1:
            raise ShapeError(
                f"WindowMask needs the positions of one window, a full grid in raster order, got {pos}."
            )
        if mask.ndim != 3 or tuple(mask.shape[1:]) != (pos.tokens, pos.tokens) or samples % mask.shape[0]:
            raise ShapeError(
                f"WindowMask needs a mask (windows, {pos.tokens}, {pos.tokens}) for windows of {grid.shape} tokens, "
                f"with samples={samples} a multiple of windows, got {tuple(mask.shape)}."
            )
        self.mask_of_windows, self.samples = mask, samples

    @property
    def per_head(self) -> bool:
        """False: all heads share the mask."""
        return False

    @property
    def per_sample(self) -> bool:
        """True: windows differ."""
        return True

    @property
    def finite(self) -> bool:
        """Whether it is known to contain no infinity."""
        return no_infinity(self.mask_of_windows)

    def added(self) -> Tensor:
        """Return the mask of all samples (b, 1, n, n) in its own dtype."""
        return self._repeated(self.mask_of_windows)[:, None]

    def _score_terms(self) -> list[ScoreTerm]:
        return [lookup_term(self.widened(None).flatten(1), self.cell_numbers())]

    def _dense(self, request: DenseRequest) -> Tensor:
        return at_least_float32(self.added())

    def cell_numbers(self) -> Tensor:
        """Return two integers per token, (b, 2, n) int32: a pair reads entry ``[0, i] - [1, j]`` of `widened`."""
        shape = self._shape
        # one integer per token, linear in cell and part
        cells, parts = self._cells()
        number = torch.zeros_like(parts[..., 0])
        for axis, n in enumerate(shape):
            # shift cells of the second part, so that offsets between parts differ from offsets within a part
            number = number * (3 * (2 * n - 1)) + cells[:, axis] + parts[..., axis] * (2 * n - 1)
        middle = self._size(shape) // 2
        return self._repeated(torch.stack([number + middle, number], 1).to(torch.int32))

    def widened(self, table: Tensor | None) -> Tensor:
        """Return the offset table (h or 1, 3 (2 n_1 - 1), ...) of the mask plus a bias within the window.

        Args:
            table: offset table of the bias, (h or 1, 2 n_1 - 1, ...), or None.
        """
        shape, mask = self._shape, at_least_float32(self.mask_of_windows)
        wide = mask.amin().expand(1, *(3 * (2 * n - 1) for n in shape)).clone()
        # the middle third along each axis: pairs within one part
        wide[(slice(None), *(slice(2 * n - 1, 2 * (2 * n - 1)) for n in shape))] = 0
        return wide if table is None else table.repeat(1, *[3] * len(shape)) + wide

    @property
    def _shape(self) -> tuple[int, ...]:
        return () if self.pos is None or self.pos.grid is None else self.pos.grid.shape

    @staticmethod
    def _size(shape: tuple[int, ...]) -> int:
        size = 1
        for n in shape:
            size *= 3 * (2 * n - 1)
        return size

    def _repeated(self, windows: Tensor) -> Tensor:
        return windows.repeat(self.samples // windows.shape[0], *[1] * (windows.ndim - 1))

    def _cells(self) -> tuple[Tensor, Tensor]:
        """Return the cells of a window (n, axes), and the part of each token along each axis, 0 or 1 (w, n, axes)."""
        if self.pos is None:
            raise ShapeError("WindowMask is not bound to positions. Create it with pos.")
        cells = self.pos.cells()[0]
        # the first token within the same part is its corner
        corner = (self.mask_of_windows == 0).to(torch.uint8).argmax(1)
        return cells, (cells[corner] > 0).to(cells.dtype)
