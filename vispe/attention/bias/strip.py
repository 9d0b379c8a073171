"""Memory layout of bias tables in which the bias of one query is a contiguous run over its keys.

For raster keys with pitch R (the product of all axes but the first, which has n cells) let y be the position of a query
on the first axis and x its index within the pitch. The strip ``S[x, r, x'] = T[2 (n - 1) - r, x - x' + ...]`` has the
bias of query (y, x) and key (y', x') at r = n - 1 - y + y', so all keys of a query are read from ``base_i + j``. Prefix
queries read a constant run after the strip; the biases of prefix keys are two numbers per head that the kernels select.
Small grids store one aligned row per query instead, which is not larger there and needs no selection.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

WORD = 8  # elements in one 16-byte load of half precision
TAIL = 256  # elements after the last row that a tile may load without using them


@dataclass(frozen=True)
class Layout:
    """Memory layout of the runs of a bias: a strip, or one row per query.

    Args:
        shape: cells of the grid per axis, 1 to 3 axes, slow to fast.
        prefix: number of leading tokens without a position.
        rows: store a row of all keys for each query instead of a strip.
    """

    shape: tuple[int, ...]
    prefix: int
    rows: bool

    @property
    def patches(self) -> int:
        """Number of tokens with a position."""
        return math.prod(self.shape)

    @property
    def tokens(self) -> int:
        """Number of all tokens, n."""
        return self.prefix + self.patches

    @property
    def pitch(self) -> int:
        """Common divisor of the starts of all runs."""
        return _round_up(self.tokens, WORD) if self.rows else math.prod(self.shape[1:])

    @property
    def selected(self) -> int:
        """Number of keys (the prefix) whose bias is one of two numbers per head instead of part of the runs."""
        return 0 if self.rows else self.prefix

    @property
    def sharers(self) -> int:
        """Largest number of queries that share an element of the runs."""
        # queries of one column share an element of the strip, prefix queries the constant run
        return 1 if self.rows else max(self.shape[0], self.prefix)

    @property
    def length(self) -> int:
        """Elements per head."""
        if self.rows:
            return self.tokens * self.pitch
        return self.prefix + self._strip + (self.patches if self.prefix else 0)

    @property
    def _strip(self) -> int:
        return self.pitch * (2 * self.shape[0] - 1) * self.pitch

    @property
    def copies(self) -> int:
        """Number of shifted copies after which every run has an aligned start."""
        return WORD // _gcd_8(self.pitch)

    @property
    def copy_length(self) -> int:
        """Elements per head and copy, a multiple of 16, which Triton requires of the head stride for wide loads."""
        return _round_up(self.length + TAIL + WORD, 2 * WORD)

    @property
    def _address_dtype(self) -> torch.dtype:
        """The dtype of addresses; grids of more than 500 x 500 cells may need 64 bits."""
        if isinstance(self.copy_length, torch.SymInt):
            return torch.int32
        return torch.int32 if self.copies * self.copy_length < 1 << 31 else torch.int64

    def base(self, device: torch.device | str | None = None) -> Tensor:
        """Return the start of each query's run, at token 0, (n,) int32, or int64 if that overflows."""
        token = torch.arange(self.tokens, device=device)
        if self.rows:
            return (token * self.pitch).to(self._address_dtype)
        cell = (token - self.prefix).clamp(min=0)
        y, x = cell // self.pitch, cell % self.pitch
        # the strip of column x, at the first row of keys
        start = (x * (2 * self.shape[0] - 1) + self.shape[0] - 1 - y) * self.pitch
        return torch.where(token < self.prefix, self._strip, start).to(self._address_dtype)

    @property
    def lead(self) -> int:
        """Padding in front of the runs that aligns the first key with a position, for `pack`."""
        return -self.selected % _gcd_8(self.pitch)

    def patches_first(self, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
        """Return addresses and starts of runs for kernels that order patches first and prefix tokens last.

        Both are (n,), with queries in that order, and refer to the bias of the first patch: starts in the runs,
        addresses in the shifted copies of `pack` with `lead`, multiples of 8. In the row layout the prefix is part of
        the rows, so nothing changes.
        """
        first = self.base(device) + self.selected
        lead = first + self.lead
        shift = (-lead) % WORD
        address = lead + shift + shift // _gcd_8(self.pitch) * self.copy_length
        return torch.roll(address, -self.selected), torch.roll(first, -self.selected)


def layout_of(shape: tuple[int, ...], prefix: int) -> Layout:
    """Return the layout of a grid that needs less memory: the strip or one row per query."""
    strip, rows = Layout(shape, prefix, False), Layout(shape, prefix, True)
    # an exported program must work for all sizes
    if any(isinstance(n, torch.SymInt) for n in shape):
        return strip
    return strip if strip.copies * strip.copy_length < rows.copy_length else rows


def build(table: Tensor, edge: Tensor | None, layout: Layout) -> tuple[Tensor, Tensor]:
    """Return the runs (h, `Layout.length`) and the biases of prefix keys (h, 2), differentiable.

    Args:
        table: (h, 2 n_1 - 1, ...).
        edge: (h, 3) biases from prefix to patch, patch to prefix, prefix to prefix; zeros if None.
        layout: memory layout.
    """
    heads = table.shape[0] if edge is None else max(table.shape[0], edge.shape[0])
    table = table.expand(heads, *table.shape[1:])
    prefix_values = table.new_zeros(heads, 3) if edge is None else edge.to(table.dtype).expand(heads, 3)
    if layout.rows:
        return _rows(table, prefix_values, layout), prefix_values[:, 1:]
    # sliding windows over all axes but the first; along the first the strip itself slides
    windows = _windows(table, layout.shape, 2).flatten(1)
    parts = [windows]
    if layout.prefix:
        # padding for prefix keys in front, and a constant run for prefix queries at the end
        front, run = table.new_zeros(heads, layout.prefix), prefix_values[:, :1].expand(-1, layout.patches)
        parts = [front, windows, run]
    return torch.cat(parts, 1), prefix_values[:, 1:]


def fill_dense(out: Tensor, table: Tensor, shape: tuple[int, ...], prefix: int) -> None:
    """Write the bias of all pairs into `out` (h, n, n), from a table (h, 2 n_1 - 1, ...); 0 for prefix tokens."""
    out[:, :prefix] = 0
    out[:, :, :prefix] = 0
    out[:, prefix:, prefix:].view(len(out), *shape, *shape).copy_(_windows(table, shape, 1))


def pack(
    runs: Tensor,
    edge: Tensor,
    layout: Layout,
    scale: float,
    dtype: torch.dtype,
    *,
    shift: bool = True,
    lead: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return the results of `build` as the kernels read them: (h, copies x length) in `dtype` and (h, 2) float32.

    They are divided by the scale of the logits, since kernels add them before scaling, and each head is shifted to a
    maximum of 0, which softmax ignores, so that the largest biases are stored most precisely. Use ``shift=False`` for a
    profile that is multiplied by gates, and for tables from `lower_to_table.shifted`. Use float16 only if
    `fits_float16`. Kernels that order patches first need `Layout.lead`.
    """
    runs, edge = runs.detach().float(), edge.detach().float()
    # softmax ignores a constant per row; the largest biases become small numbers with small rounding errors
    maximum = torch.maximum(runs.amax(1), edge.amax(1))[:, None]
    maximum = torch.where(maximum.isfinite(), maximum, 0.0) if shift else torch.zeros_like(maximum)
    runs, edge = (runs - maximum) / scale, (edge - maximum) / scale
    return aligned(runs.to(dtype), layout, lead), edge.contiguous()


def aligned(runs: Tensor, layout: Layout, lead: int) -> Tensor:
    """Return copies of runs (h, `Layout.length`) shifted by multiples of a step, so that each run is aligned in one."""
    step = _gcd_8(layout.pitch)
    shifted = [
        F.pad(runs, (lead + copy * step, layout.copy_length - layout.length - lead - copy * step))
        for copy in range(layout.copies)
    ]
    return torch.cat(shifted, 1)


def _windows(table: Tensor, shape: tuple[int, ...], first: int) -> Tensor:
    """Return sliding windows ``W[h, x..., r, x'...] = T[.., x - x' + n - 1, ..]``, with r for axes before `first`."""
    axes = len(shape)
    # a larger key coordinate means a smaller offset, so tables are reversed
    flipped = table.flip([1 + axis for axis in range(axes)])
    for axis in range(first, axes + 1):
        flipped = _sliding_windows(flipped, axis, shape[axis - 1])
    if first <= axes:
        flipped = flipped.flip([first + axis for axis in range(axes + 1 - first)])
    order = [0, *range(first, axes + 1), *range(1, first), *range(axes + 1, flipped.ndim)]
    return flipped.permute(order)


def _rows(table: Tensor, prefix_values: Tensor, layout: Layout) -> Tensor:
    heads, patches, prefix = table.shape[0], layout.patches, layout.prefix
    dense = _windows(table, layout.shape, 1).reshape(heads, patches, patches)
    if prefix:
        to_patch, to_prefix, between = (
            column[:, None, None].expand(-1, *size)
            for column, size in zip(
                prefix_values.unbind(1), ((prefix, patches), (patches, prefix), (prefix, prefix)), strict=True
            )
        )
        dense = torch.cat([torch.cat([between, to_patch], 2), torch.cat([to_prefix, dense], 2)], 1)
    return F.pad(dense, (0, layout.pitch - layout.tokens)).flatten(1)


def _round_up(count: int, multiple: int) -> int:
    return (count + multiple - 1) // multiple * multiple


def _sliding_windows(x: Tensor, axis: int, n: int) -> Tensor:
    """Return ``x.unfold(axis, n, 1)`` of 2 n - 1 entries, without specialising a symbolic n as `unfold` does."""
    if not torch.compiler.is_compiling():
        return x.unfold(axis, n, 1)
    # a sequence of period 2 n read in rows of 2 n - 1 shifts by one per row
    x = F.pad(x.movedim(axis, -1), (0, 1))
    rows = x[..., None, :].expand(*x.shape[:-1], n, 2 * n).flatten(-2)[..., : n * (2 * n - 1)]
    return rows.reshape(*x.shape[:-1], n, 2 * n - 1)[..., n - 1 :].flip(-2).movedim(-2, axis)


def _gcd_8(pitch: int) -> int:
    """Return the greatest common divisor of `pitch` and 8, or 1 for a symbolic pitch."""
    if isinstance(pitch, torch.SymInt):
        return 1
    return next(divisor for divisor in (8, 4, 2, 1) if pitch % divisor == 0)


def visible_offsets(table: Tensor, heads: int) -> Tensor:
    """Return the range of unmasked offsets from query to key, in tokens of raster order, (heads, 2) int32.

    Args:
        table: (h or 1, 2 n_1 - 1, 2 n_2 - 1, ...), -inf for masked offsets.
        heads: h.
    """
    shape = [(side + 1) // 2 for side in table.shape[1:]]
    step = torch.zeros(1, dtype=torch.int32, device=table.device)
    for n in shape:
        # tables are indexed by query minus key; one cell along an axis skips all tokens of the faster axes
        step = (step[:, None] * n + torch.arange(n - 1, -n, -1, device=table.device)).flatten()
    unmasked = table.detach().flatten(1) != -torch.inf
    # masked offsets count as 0, the offset of a token to itself
    lowest = torch.where(unmasked, step, 0).amin(1)
    highest = torch.where(unmasked, step, 0).amax(1)
    return torch.stack([lowest, highest], 1).to(torch.int32).expand(heads, 2).contiguous()
