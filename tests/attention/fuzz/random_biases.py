"""Random biases, each with its definition in float64, which shares no code with the package."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vispe import Grid, Positions
from vispe.attention import (
    ContextBias,
    CrossAttentionBias,
    DenseBias,
    DistanceBias,
    GatedBias,
    LowRankBias,
    OffsetBias,
    ProfileBias,
    RadialBias,
    SumBias,
    TableBias,
    WindowMask,
)
from vispe.attention.bias.content import OffsetBuckets
from vispe.attention.bias.decomposed import DecomposedBias

METRICS = ("euclidean", "manhattan", "chebyshev", "squared")


class RandomBias(NamedTuple):
    """A bias, and a function of (parameters in float64, q, k, scale) that returns it densely."""

    bias: Any
    dense: Callable


class Tokens:
    """Tokens of a grid in plain tensors: cells (b or 1, n, a), coordinates in float64, and which have a position."""

    def __init__(self, grid: Grid, index: Tensor | None = None) -> None:
        axes = [torch.arange(n) for n in grid.shape]
        cells = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(grid.shape))
        cells = torch.cat([torch.zeros(grid.prefix, len(grid.shape), dtype=torch.long), cells])
        spatial = torch.arange(len(cells)) >= grid.prefix
        index = torch.arange(len(cells))[None] if index is None else index
        self.shape, spacing = (
            grid.shape,
            torch.tensor(grid.spacing or (1.0,) * grid.axes, dtype=torch.float64),
        )
        self.cells, self.spatial = cells[index], spatial[index]
        self.coords, self.period = self.cells * spacing, torch.tensor(grid.shape) * spacing


def distances(a: Tokens, b: Tokens, metric: str, wrap: bool, divisor: float = 1.0) -> Tensor:
    """Return the distances (b or 1, n, m), 0 from and to tokens without a position."""
    gap = (a.coords[:, :, None] - b.coords[:, None]).abs()
    if wrap:
        gap = gap % a.period
        gap = torch.minimum(gap, a.period - gap)
    if metric == "squared":
        length = gap.square().sum(-1)
    else:
        length = torch.linalg.vector_norm(
            gap, {"euclidean": 2, "manhattan": 1, "chebyshev": math.inf}[metric], -1
        )
    return length / divisor * (a.spatial[:, :, None] & b.spatial[:, None])


def table_entries(table: Tensor, edge: Tensor | None, a: Tokens, b: Tokens) -> Tensor:
    """Return the entries (b or 1, h or 1, n, m) of a table at query minus key, and of `edge` for prefix tokens."""
    offset = a.cells[:, :, None] - b.cells[:, None] + torch.tensor(a.shape) - 1
    index = torch.zeros_like(offset[..., 0])
    for axis, n in enumerate(a.shape):
        index = index * (2 * n - 1) + offset[..., axis].clamp(0, 2 * n - 2)
    patches = table.flatten(1)[:, index].transpose(0, 1)
    edge = table.new_zeros(1, 3) if edge is None else edge
    kind = torch.where(a.spatial[:, :, None], 1, torch.where(b.spatial[:, None], 0, 2))
    both = (a.spatial[:, :, None] & b.spatial[:, None])[:, None]
    return torch.where(both, patches, edge[:, kind].transpose(0, 1))


class Maker:
    """Random parameters and biases of one call.

    Args:
        rng: `random.Random`.
        b: batch size.
        h: query heads.
        d: head_dim.
        size: typical size of the values.
    """

    def __init__(self, rng: Any, b: int, h: int, d: int, size: float) -> None:
        self.rng, self.b, self.h, self.d, self.size = rng, b, h, d, size
        self.params: list[Tensor] = []

    def leaf(self, *shape: int, size: float | None = None, learned: bool | None = None) -> tuple[Tensor, int]:
        """Return a parameter and its number; some need no gradient."""
        value = torch.randn(*shape) * (self.size if size is None else size)
        learned = self.rng.random() < 0.8 if learned is None else learned
        self.params.append(value.requires_grad_(learned))
        return self.params[-1], len(self.params) - 1

    def heads(self) -> int:
        """Return h, or 1 for a parameter that heads share."""
        return self.h if self.rng.random() < 0.75 else 1

    def distance(self, pos: Positions, tokens: Tokens, learned: bool) -> RandomBias:
        """A distance with fixed or learned slopes."""
        rng, metric, wrap = self.rng, self.rng.choice(METRICS), self.rng.random() < 0.25
        normalize = rng.choice(["none", "none", "max"]) if tokens.cells.shape[0] == 1 else "none"
        divisor = 1.0
        if normalize == "max":
            full = Tokens(Grid(pos.grid.shape, spacing=pos.grid.spacing))
            divisor = float(distances(full, full, metric, wrap).amax()) or 1.0
        length = distances(tokens, tokens, metric, wrap, divisor)
        if learned:
            slopes, i = self.leaf(self.heads(), size=min(self.size, 2.0), learned=True)
        else:
            slopes, i = tuple(abs(rng.gauss(0, min(self.size, 2.0))) for _ in range(self.h)), None
        bias = DistanceBias(slopes, pos, metric=metric, wrap=wrap, normalize=normalize)

        def dense(p: list[Tensor], q: Tensor, k: Tensor, scale: float) -> Tensor:
            m = torch.tensor(slopes, dtype=torch.float64) if i is None else p[i]
            return -m[None, :, None, None] * length[:, None]

        return RandomBias(bias, dense)

    def table(
        self, pos: Positions, tokens: Tokens, hides: float = 0.0, prefix: bool | None = None
    ) -> RandomBias:
        """A table, with prefix values or not; a proportion `hides` of its entries is -inf."""
        shape = [2 * n - 1 for n in pos.grid.shape]
        values, i = self.leaf(self.heads(), *shape, learned=False if hides else None)
        hidden = torch.rand(values.shape) < hides
        edge, j = (None, None)
        if self.rng.random() < 0.4 if prefix is None else prefix:
            edge, j = self.leaf(self.heads(), 3)
        # masking a learned table here would be part of the graph of the first call only
        values = values.masked_fill(hidden, -math.inf) if hides else values
        bias = TableBias(values, pos, edge, is_sparse=hides > 0)

        def dense(p: list[Tensor], q: Tensor, k: Tensor, scale: float) -> Tensor:
            table = p[i].masked_fill(hidden, -math.inf)
            return table_entries(table, None if j is None else p[j], tokens, tokens)

        return RandomBias(bias, dense)

    def profile(self, pos: Positions, tokens: Tokens) -> RandomBias:
        """One table times a factor per head."""
        (slopes, i), (values, j) = (
            self.leaf(self.h, size=1.0),
            self.leaf(1, *(2 * n - 1 for n in pos.grid.shape)),
        )
        return RandomBias(
            ProfileBias(slopes, values, pos),
            lambda p, q, k, s: p[i][:, None, None] * table_entries(p[j], None, tokens, tokens),
        )

    def radial(self, pos: Positions, tokens: Tokens) -> RandomBias:
        """A function of distance with a factor per head."""
        factor, i = self.leaf(self.h)
        metric, wrap = self.rng.choice(METRICS), self.rng.random() < 0.25
        length = distances(tokens, tokens, metric, wrap)
        both = (tokens.spatial[:, :, None] & tokens.spatial[:, None])[:, None]
        return RandomBias(
            RadialBias(lambda d: torch.log1p(d) * factor[:, None] - d, pos, metric=metric, wrap=wrap),
            lambda p, q, k, s: (length.log1p()[:, None] * p[i][:, None, None] - length[:, None]) * both,
        )

    def offset(self, pos: Positions, tokens: Tokens) -> RandomBias:
        """Waves along one direction per head."""
        waves, i = self.leaf(self.h, pos.axes, size=1.0)
        step = tokens.coords[:, None] - tokens.coords[:, :, None]
        both = (tokens.spatial[:, :, None] & tokens.spatial[:, None])[:, None]
        return RandomBias(
            OffsetBias(lambda s: 2 * (s @ waves.T).sin().T, pos),
            lambda p, q, k, s: 2 * (step @ p[i].T).sin().permute(0, 3, 1, 2) * both,
        )

    def gated(self, inner: RandomBias, tokens: int) -> RandomBias:
        """A profile that is multiplied by gates of queries, of keys, or of both."""
        sides = self.rng.choice(["row", "col", "both"])
        row, i = self.leaf(self.b, self.h, tokens, size=1.0) if sides != "col" else (None, None)
        col, j = self.leaf(self.b, self.h, tokens, size=1.0) if sides != "row" else (None, None)

        def dense(p: list[Tensor], q: Tensor, k: Tensor, scale: float) -> Tensor:
            gates = [p[i][..., None]] if i is not None else []
            gates += [p[j][..., None, :]] if j is not None else []
            return sum(gates) * inner.dense(p, q, k, scale)

        return RandomBias(GatedBias(row, col, inner.bias), dense)

    def decomposed(self, pos: Positions, tokens: Tokens, dot: str) -> RandomBias:
        """Terms for grid rows and columns."""
        shape = pos.grid.shape
        (rows, i), (cols, j) = (
            self.leaf(self.rng.choice([1, self.b]), self.h, pos.tokens, n + 1) for n in shape
        )
        row, col = (torch.where(tokens.spatial[0], tokens.cells[0, :, a], shape[a]) for a in (0, 1))

        def dense(p: list[Tensor], q: Tensor, k: Tensor, scale: float) -> Tensor:
            total = p[i][..., row] + p[j][..., col]
            return total if dot == "query" else total.mT

        return RandomBias(DecomposedBias(rows, cols, dot, pos), dense)

    def context(self, pos: Positions) -> RandomBias:
        """A table that is multiplied by queries or keys."""
        weights, i = self.leaf(self.heads(), 7, self.d, size=min(self.size, 1.0))
        buckets, dot = torch.randint(0, 7, (pos.tokens, pos.tokens)), self.rng.choice(["query", "key"])
        scaled = self.rng.random() < 0.5

        def dense(p: list[Tensor], q: Tensor, k: Tensor, scale: float) -> Tensor:
            entries = p[i][:, buckets]
            factor = scale if scaled else 1.0
            spec = "bhnd,hnmd->bhnm" if dot == "query" else "bhmd,hnmd->bhnm"
            return factor * torch.einsum(spec, q if dot == "query" else k, entries.expand(self.h, -1, -1, -1))

        return RandomBias(ContextBias(weights, buckets, dot, scaled, pos), dense)

    def offset_context(self, pos: Positions, tokens: Tokens) -> RandomBias:
        """A table of buckets of offsets that is multiplied by queries or keys."""
        weights, i = self.leaf(self.heads(), 7, self.d, size=min(self.size, 1.0))
        table = torch.randint(0, 7, tuple(2 * n - 1 for n in pos.grid.shape))
        edge = torch.randint(0, 7, (3,))
        pairs = table_entries(table[None], edge[None], tokens, tokens)[0]
        dot, scaled = self.rng.choice(["query", "key"]), self.rng.random() < 0.5
        buckets = OffsetBuckets(table, tuple(edge.tolist()), lambda: pairs)
        bias = ContextBias(
            weights, buckets, dot, scaled, pos, cache_key="buckets" if self.rng.random() < 0.5 else None
        )

        def dense(p: list[Tensor], q: Tensor, k: Tensor, scale: float) -> Tensor:
            x = (q if dot == "query" else k) * (scale if scaled else 1.0)
            products = x @ p[i].mT
            if dot == "query":
                return products.gather(-1, pairs[None].expand(*products.shape[:2], -1, -1))
            return products.gather(-1, pairs.mT[None].expand(*products.shape[:2], -1, -1)).mT

        return RandomBias(bias, dense)

    def windows(self, pos: Positions, tokens: Tokens) -> RandomBias:
        """Masks of windows that are cut into up to four parts."""
        count = self.rng.choice([c for c in (1, 2) if self.b % c == 0])
        masks = []
        for _ in range(count):
            cut = torch.tensor([self.rng.randint(1, n) for n in tokens.shape])
            part = ((tokens.cells[0] >= cut) * torch.tensor([2, 1])).sum(-1)
            masks.append(torch.where(part[:, None] == part[None], 0.0, -100.0))
        mask = torch.stack(masks)
        repeated = mask.double().repeat(self.b // count, 1, 1)[:, None]
        return RandomBias(WindowMask(mask, pos, self.b), lambda p, q, k, s: repeated)

    def low_rank(self, tokens: int) -> RandomBias:
        """Products of columns."""
        row, i = self.leaf(self.rng.choice([1, self.b]), self.heads(), tokens, 3, size=1.0)
        col, j = self.leaf(1, self.h, tokens, 3, size=1.0)
        return RandomBias(LowRankBias(row, col), lambda p, q, k, s: p[i] @ p[j].mT)

    def tensor(self, tokens: int) -> RandomBias:
        """A tensor of all pairs."""
        values, i = self.leaf(self.rng.choice([1, self.b]), self.heads(), tokens, tokens)
        return RandomBias(DenseBias(values), lambda p, q, k, s: p[i])

    def free(self, tokens: int, axes: int) -> RandomBias:
        """Distances between free coordinates that differ per sample."""
        b = self.rng.choice([1, self.b])
        coords, spatial = torch.rand(b, tokens, axes) * 10, torch.rand(b, tokens) > 0.1
        pos = Positions(coords, spatial, torch.full((b, axes), 12.0))
        slopes, i = self.leaf(self.h, size=1.0)
        metric = self.rng.choice(METRICS)
        tokens_of_pos = Tokens(Grid((1,) * axes))
        tokens_of_pos.coords, tokens_of_pos.spatial = coords.double(), spatial
        length = distances(tokens_of_pos, tokens_of_pos, metric, False)
        return RandomBias(
            DistanceBias(slopes, pos, metric=metric),
            lambda p, q, k, s: -p[i][:, None, None] * length[:, None],
        )

    @staticmethod
    def cross(inner: RandomBias, pos_q: Positions, pos_k: Positions, rows: Tensor) -> RandomBias:
        """Some rows of a bias."""
        return RandomBias(
            CrossAttentionBias(inner.bias, pos_q, pos_k),
            lambda p, q, k, s: inner.dense(p, q, k, s)[:, :, rows],
        )

    @staticmethod
    def sum(*parts: RandomBias) -> RandomBias:
        """The sum of several biases."""

        def dense(p: list[Tensor], q: Tensor, k: Tensor, scale: float) -> Tensor:
            total = parts[0].dense(p, q, k, scale)
            for part in parts[1:]:
                total = total + part.dense(p, q, k, scale)
            return total

        return RandomBias(SumBias([part.bias for part in parts]), dense)
