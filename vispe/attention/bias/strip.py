"""Bias tables laid out so that the bias of one query is a contiguous run over its keys.

For raster keys with pitch R (the product of all axes but the first, of n cells) let x be a query's place within its
pitch and y its place on the first axis. The strip ``S[x, r, x'] = T[2 (n - 1) - r, x - x' + ...]`` holds the bias of
query (y, x) on key (y', x') at r = n - 1 - y + y', so all keys of a query are read from ``base_i + j``. Prefix queries
read a constant run behind the strip; prefix keys are two numbers per head that the kernels select. Small grids keep
one aligned row per query instead, which is no larger there and needs no selection.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

WORD = 8  # elements in one 16-byte load of half precision
TAIL = 256  # elements behind the last row that a tile may read without using them


@dataclass(frozen=True)
class Layout:
    """Where the bias of each query lies.

    Args:
        shape: cells of the grid per axis, 1 to 3 axes, slow to fast.
        prefix: tokens without a place, in front.
        rows: keep a row of all keys for each query, in place of a strip.
    """

    shape: tuple[int, ...]
    prefix: int
    rows: bool

    @property
    def patches(self) -> int:
        """Number of tokens with a place."""
        return math.prod(self.shape)

    @property
    def tokens(self) -> int:
        """Number of all tokens, n."""
        return self.prefix + self.patches

    @property
    def pitch(self) -> int:
        """Number by which all run starts can be divided."""
        return _up(self.tokens, WORD) if self.rows else math.prod(self.shape[1:])

    @property
    def selected(self) -> int:
        """Number of keys whose bias is one of two numbers per head, and not in the runs."""
        return 0 if self.rows else self.prefix

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
        """How many shifted copies give every run an aligned start."""
        return WORD // _common(self.pitch)

    @property
    def copy_length(self) -> int:
        """Elements per head and copy, a multiple of 16, which Triton must see in the stride of heads to load wide."""
        return _up(self.length + TAIL + WORD, 2 * WORD)

    @property
    def _counted(self) -> torch.dtype:
        """The integers that reach the end of all copies; grids of more than 500 x 500 cells may need 64 bits."""
        if isinstance(self.copy_length, torch.SymInt):
            return torch.int32
        return torch.int32 if self.copies * self.copy_length < 1 << 31 else torch.int64

    def base(self, device: torch.device | str | None = None) -> Tensor:
        """Return where each query's run starts, counted from token 0, (n,) int32, or int64 where that is too small."""
        token = torch.arange(self.tokens, device=device)
        if self.rows:
            return (token * self.pitch).to(self._counted)
        cell = (token - self.prefix).clamp(min=0)
        y, x = cell // self.pitch, cell % self.pitch
        # the strip of column x, and within it the row of keys that stands highest
        start = (x * (2 * self.shape[0] - 1) + self.shape[0] - 1 - y) * self.pitch
        return torch.where(token < self.prefix, self._strip, start).to(self._counted)

    def address(self, device: torch.device | str | None = None) -> Tensor:
        """Return `base` within the shifted copies of `pack`, (n,), in its dtype, all multiples of 8."""
        base = self.base(device)
        shift = (-base) % WORD
        return base + shift + shift // _common(self.pitch) * self.copy_length

    @property
    def lead(self) -> int:
        """Elements by which `pack` moves runs that are read from the first key with a place on, to align it."""
        return -self.selected % _common(self.pitch)

    def patches_first(self, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
        """Return `address` and `base` as kernels read them that count patches first, and prefix tokens behind them.

        Both are (n,), with queries in that order, and lead to the bias on the first patch. Addresses are those of runs
        that were packed with `lead`, and multiples of 8. Rows have no prefix apart, and are read as they stand.
        """
        first = self.base(device) + self.selected
        lead = first + self.lead
        shift = (-lead) % WORD
        address = lead + shift + shift // _common(self.pitch) * self.copy_length
        return torch.roll(address, -self.selected), torch.roll(first, -self.selected)


def layout_of(shape: tuple[int, ...], prefix: int) -> Layout:
    """Return the smaller layout for a grid, the strip or one row per query."""
    strip, rows = Layout(shape, prefix, False), Layout(shape, prefix, True)
    if any(isinstance(n, torch.SymInt) for n in shape):  # an exported program serves all sizes
        return strip
    return strip if strip.copies * strip.copy_length < rows.copy_length else rows


def build(table: Tensor, edge: Tensor | None, layout: Layout) -> tuple[Tensor, Tensor]:
    """Return the runs (h, `Layout.length`) and the numbers (h, 2) of prefix keys, differentiable.

    Args:
        table: (h, 2 n_1 - 1, ...).
        edge: (h, 3) biases from prefix to patch, patch to prefix, prefix to prefix; zeros if None.
        layout: where to put them.
    """
    heads = table.shape[0] if edge is None else max(table.shape[0], edge.shape[0])
    table = table.expand(heads, *table.shape[1:])
    ends = table.new_zeros(heads, 3) if edge is None else edge.to(table.dtype).expand(heads, 3)
    if layout.rows:
        return _rows(table, ends, layout), ends[:, 1:]
    # windows over all axes but the first; along the first the strip itself is the window
    windows = _windows(table, layout.shape, 2).flatten(1)
    parts = [windows]
    if layout.prefix:
        # room for prefix keys in front, and a constant run that prefix queries read
        front, run = table.new_zeros(heads, layout.prefix), ends[:, :1].expand(-1, layout.patches)
        parts = [front, windows, run]
    return torch.cat(parts, 1), ends[:, 1:]


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
    """Return runs and numbers of `build` as kernels read them, (h, copies x length) in `dtype` and (h, 2) float32.

    They are divided by the scale of the logits, as kernels add them before they scale, and each head is shifted so
    that its largest is 0: softmax does not see the shift, and what decides it is stored most exactly. What is not
    added as it is, but times a number per token, says ``shift=False``. float16 is for what `fits_half`. Kernels that
    count patches first need the `lead` of the layout.
    """
    runs, edge = runs.detach().float(), edge.detach().float()
    # softmax does not see the largest bias go; what remains is small where it counts
    top = torch.maximum(runs.amax(1), edge.amax(1))[:, None]
    top = torch.where(top.isfinite(), top, 0.0) if shift else torch.zeros_like(top)
    runs, edge = (runs - top) / scale, (edge - top) / scale
    return aligned(runs.to(dtype), layout, lead), edge.contiguous()


def aligned(runs: Tensor, layout: Layout, lead: int) -> Tensor:
    """Return runs (h, `Layout.length`) in copies that start 1, 2, ... elements later: every run has an aligned one."""
    step = _common(layout.pitch)
    shifted = [
        F.pad(runs, (lead + copy * step, layout.copy_length - layout.length - lead - copy * step))
        for copy in range(layout.copies)
    ]
    return torch.cat(shifted, 1)


def _windows(table: Tensor, shape: tuple[int, ...], first: int) -> Tensor:
    """Return ``W[h, x..., r, x'...] = T[.., x - x' + n - 1, ..]``, with r for axes before `first`."""
    axes = len(shape)
    # a larger key means a smaller offset, so tables are read backwards
    flipped = table.flip([1 + axis for axis in range(axes)])
    for axis in range(first, axes + 1):
        flipped = _slide(flipped, axis, shape[axis - 1])
    if first <= axes:
        flipped = flipped.flip([first + axis for axis in range(axes + 1 - first)])
    order = [0, *range(first, axes + 1), *range(1, first), *range(axes + 1, flipped.ndim)]
    return flipped.permute(order)


def _rows(table: Tensor, ends: Tensor, layout: Layout) -> Tensor:
    heads, patches, prefix = table.shape[0], layout.patches, layout.prefix
    dense = _windows(table, layout.shape, 1).reshape(heads, patches, patches)
    if prefix:
        to_patch, to_prefix, between = (
            column[:, None, None].expand(-1, *size)
            for column, size in zip(
                ends.unbind(1), ((prefix, patches), (patches, prefix), (prefix, prefix)), strict=True
            )
        )
        dense = torch.cat([torch.cat([between, to_patch], 2), torch.cat([to_prefix, dense], 2)], 1)
    return F.pad(dense, (0, layout.pitch - layout.tokens)).flatten(1)


def _up(count: int, multiple: int) -> int:
    return (count + multiple - 1) // multiple * multiple


def _slide(x: Tensor, axis: int, n: int) -> Tensor:
    """Return ``x.unfold(axis, n, 1)`` of 2 n - 1 entries; `unfold` would make a symbol a number."""
    if not torch.compiler.is_compiling():
        return x.unfold(axis, n, 1)
    x = F.pad(x.movedim(axis, -1), (0, 1))  # rows of 2 n - 1 in a repetition of 2 n move on by one
    rows = x[..., None, :].expand(*x.shape[:-1], n, 2 * n).flatten(-2)[..., : n * (2 * n - 1)]
    return rows.reshape(*x.shape[:-1], n, 2 * n - 1)[..., n - 1 :].flip(-2).movedim(-2, axis)


def _common(pitch: int) -> int:
    """Return the greatest common divisor of `pitch` and 8, also of symbolic numbers."""
    if isinstance(pitch, torch.SymInt):
        return 1
    return next(divisor for divisor in (8, 4, 2, 1) if pitch % divisor == 0)


def sight_of(table: Tensor, heads: int) -> Tensor:
    """Return between which steps, in tokens from a query to a key, a table shows keys, (heads, 2) int32.

    Args:
        table: (h or 1, 2 n_1 - 1, 2 n_2 - 1, ...), -inf where a key is hidden.
        heads: h.
    """
    shape = [(side + 1) // 2 for side in table.shape[1:]]
    step = torch.zeros(1, dtype=torch.int32, device=table.device)
    for n in shape:
        # tables are read at query minus key, and a step along an axis passes all tokens of the faster ones
        step = (step[:, None] * n + torch.arange(n - 1, -n, -1, device=table.device)).flatten()
    shown = table.detach().flatten(1) != -torch.inf
    # a token's own step is 0
    lowest = torch.where(shown, step, 0).amin(1)
    highest = torch.where(shown, step, 0).amax(1)
    return torch.stack([lowest, highest], 1).to(torch.int32).expand(heads, 2).contiguous()
