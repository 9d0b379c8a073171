"""The mask of shifted windows, as a description: which parts of a window are neighbours in the map.

Swin rolls a map before it cuts it into windows, so that a window at the end of an axis holds two parts that are no
neighbours; a number as low as -100 is added between them. Along an axis there are thus two parts at most, and what a
pair of tokens reads is decided by its offset and by whether it goes from one part to the other: a table of offsets
with three times as many entries along each axis, in which only the middle ones are without that number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.attention.bias.abstract_bias import Bias, Request
from vispe.attention.precision import at_least_float32, no_infinity
from vispe.errors import ShapeError
from vispe.grid import Positions


class WindowMask(Bias):
    """What is added between tokens of different parts of a shifted window (Swin, arXiv 2103.14030, section 3.2).

    Args:
        mask: (w, n, n), 0 between tokens of one part and one other number between parts, which are rectangles: two at
            most along an axis. Samples are the windows of one image after another.
        pos: positions of one window: a full grid of n tokens in order.
        samples: b, a multiple of w.

    Raises:
        ShapeError: these do not fit.

    Example:
        >>> import torch
        >>> from vispe import Grid
        >>> apart = torch.tensor([[[0.0, -100.0], [-100.0, 0.0]]])
        >>> WindowMask(apart, Grid((1, 2)).positions(), samples=1).dense()[0, 0]
        tensor([[   0., -100.],
                [-100.,    0.]])
    """

    __slots__ = ("mask_of_windows", "samples")

    def __init__(self, mask: Tensor, pos: Positions, samples: int) -> None:
        super().__init__(pos)
        grid = pos.grid
        if grid is None or grid.prefix or pos.index is not None or pos.coords.shape[0] > 1:
            raise ShapeError(
                f"WindowMask needs the positions of one window, a full grid in order; got {pos}."
            )
        if mask.ndim != 3 or tuple(mask.shape[1:]) != (pos.tokens, pos.tokens) or samples % mask.shape[0]:
            raise ShapeError(
                f"WindowMask needs (windows, {pos.tokens}, {pos.tokens}) for windows of {grid.shape} tokens, and "
                f"{samples} samples to be a multiple of the windows; got {tuple(mask.shape)}."
            )
        self.mask_of_windows, self.samples = mask, samples

    @property
    def per_head(self) -> bool:
        """Heads are alike."""
        return False

    @property
    def per_sample(self) -> bool:
        """Windows differ."""
        return True

    @property
    def finite(self) -> bool:
        """Whether it is known to hold no infinity."""
        return no_infinity(self.mask_of_windows)

    def added(self) -> Tensor:
        """Return the mask (b, 1, n, n) of all samples, in its own dtype."""
        return self._repeated(self.mask_of_windows)[:, None]

    def _dense(self, ask: Request) -> Tensor:
        return at_least_float32(self.added())

    def cell_numbers(self) -> Tensor:
        """Return two numbers per token, (b, 2, n) int32: pairs read entry ``[0, i] - [1, j]`` of `widened`."""
        shape = self._shape
        cells, parts = self._cells()
        number = torch.zeros_like(parts[..., 0])
        for axis, n in enumerate(shape):
            # cells of another part are so far off that their offsets are none of those inside of a part
            number = number * (3 * (2 * n - 1)) + cells[:, axis] + parts[..., axis] * (2 * n - 1)
        middle = self._size(shape) // 2
        return self._repeated(torch.stack([number + middle, number], 1).to(torch.int32))

    def widened(self, table: Tensor | None) -> Tensor:
        """Return the table (h or 1, 3 (2 n_1 - 1), ...) of the mask, and of a bias inside of a window.

        Args:
            table: of the bias, (h or 1, 2 n_1 - 1, ...), or None.
        """
        shape, mask = self._shape, at_least_float32(self.mask_of_windows)
        apart = mask.amin().expand(1, *(3 * (2 * n - 1) for n in shape)).clone()
        apart[(slice(None), *(slice(2 * n - 1, 2 * (2 * n - 1)) for n in shape))] = 0
        return apart if table is None else table.repeat(1, *[3] * len(shape)) + apart

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
        """Return the cells of a window (n, axes), and in which part along each axis a token is, 0 or 1 (w, n, axes)."""
        if self.pos is None:
            raise ShapeError("This mask is not bound to positions.")
        cells = self.pos.cells()[0]
        # the first token that sees a token is the corner of its part
        corner = (self.mask_of_windows == 0).to(torch.uint8).argmax(1)
        return cells, (cells[corner] > 0).to(cells.dtype)
