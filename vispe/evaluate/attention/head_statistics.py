"""Sums over images from which a report of attention heads is made; no attention map outlives its layer.

Memory between images, for L layers of h heads and width d, T tokens of which N are a grid gh x gw: L h (2 gh - 1)
(2 gw - 1) four times, L h T twice and L N d, as float64; a ViT-S of 224 pixels takes 9 MB, a ViT-L of 518 pixels
340 MB. While a layer runs: about 7 b T^2 float32 for each of the heads that are looked at together, which are as many
as keep this below `SCRATCH` numbers, and at least one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.content import ContextBias, GatedBias
from vispe.attention.bias.decomposed import DecomposedBias
from vispe.attention.bias.dense import SumBias
from vispe.backbones.attention_recorder import Seen, attention_map, logits_of
from vispe.errors import ShapeError
from vispe.grid import Grid

SCRATCH = (
    2**24
)  # numbers: 64 MB of float32, in pieces that allocators hand out again without asking the system
ROWS = 128  # of attention whose entropy is taken together
CLAMP = 1e-10  # of probabilities in entropies


@dataclass(kw_only=True)
class LogitSums:
    """Sums over images of the logits between patches in one layer; all float64 on the CPU.

    Attributes:
        logits: by signed offset from query to key, summed over pairs (h, 2 gh - 1, 2 gw - 1).
        squares: squared logits of all pairs (h,).
        masked: whether a mask kept some patches from attending to others.
    """

    logits: Tensor
    squares: Tensor
    masked: bool = False


@dataclass(kw_only=True)
class LayerSums(LogitSums):
    """Sums over images of one layer; all float64 on the CPU.

    Attributes:
        path: name of the layer.
        received: attention that each key gets, mean over queries (h, T).
        peak: the largest of these in an image (h,).
        winners: images in which each key gets most (h, T).
        entropy: of the rows of attention in nats, mean over queries (h,).
        attention: from patch to patch by signed offset, summed over pairs (h, 2 gh - 1, 2 gw - 1).
        bias: exp of the bias by offset, mean over pairs; NaN without one, or when it depends on what is seen.
        prior: attention that the bias alone would give, by offset, summed over pairs like `attention`; NaN likewise.
        q: squared queries by channel (h, d_h).
        k: squared keys by channel (h_kv, d_h).
        places: input by patch and channel (N, d).
        energy: squared input by channel (d,).
    """

    path: str
    received: Tensor
    peak: Tensor
    winners: Tensor
    entropy: Tensor
    attention: Tensor
    bias: Tensor
    prior: Tensor
    q: Tensor
    k: Tensor
    places: Tensor
    energy: Tensor


@dataclass
class HeadSums:
    """Sums over images of all layers.

    Attributes:
        grid: the tokens, equal for all images.
        images: how many were seen.
        layers: one entry per layer.
    """

    grid: Grid | None = None
    images: int = 0
    layers: list[LayerSums] = field(default_factory=list)

    def add(self, seen: Seen) -> None:
        """Add one layer of one batch; the first layer of a batch counts its images.

        Raises:
            ShapeError: the grid is not that of the images before.
        """
        shape = Grid(seen.grid.shape, seen.grid.prefix)
        if self.grid is None:
            self.grid = shape
        if shape != self.grid:
            raise ShapeError(
                f"Heads are compared on one grid, but {seen.path} got {shape.shape} patches after images of "
                f"{self.grid.shape}; give images of one size."
            )
        if seen.layer == 0:
            self.images += seen.x.shape[0]
        sums = layer_sums(seen)
        if seen.layer >= len(self.layers):
            sums.bias, sums.prior = alone(seen)
            self.layers.append(sums)
            return
        kept = self.layers[seen.layer]
        for name, value in vars(sums).items():
            if name not in ("path", "bias", "prior", "masked"):
                getattr(kept, name).add_(value)
        kept.masked |= sums.masked


def by_offset(values: Tensor, grid: Grid) -> Tensor:
    """Return sums of values (..., N, N) of pairs of patches by offset, (..., 2 gh - 1, 2 gw - 1) float64.

    The query comes first; the offset is that of key minus query.
    """
    (h, w), outer = grid.shape, values.shape[:-2]
    values = values.unflatten(-2, (h, w))
    # the keys of a row of queries lie one after the other, and so do their offsets: whole runs are added, axis by axis
    rows = values.new_zeros(*outer, w, (2 * h - 1) * w, dtype=torch.float64)
    for i in range(h):
        rows[..., (h - 1 - i) * w : (2 * h - 1 - i) * w] += values[..., i, :, :]
    rows = rows.unflatten(-1, (2 * h - 1, w))
    table = rows.new_zeros(*outer, 2 * h - 1, 2 * w - 1)
    for j in range(w):
        table[..., w - 1 - j : 2 * w - 1 - j] += rows[..., j, :, :]
    return table


def pairs(grid: Grid) -> Tensor:
    """Return how many pairs of patches have each offset, (2 gh - 1, 2 gw - 1) float64."""
    h, w = grid.shape
    rows, cols = (n - torch.arange(1 - n, n, dtype=torch.float64).abs() for n in (h, w))
    return rows[:, None] * cols


def entropy(attn: Tensor, clamp: float = CLAMP) -> Tensor:
    """Return the entropy of attention (..., n, m) in nats, mean over queries; probabilities are clamped."""
    # a few rows at a time, so that what is made on the way stays in the cache
    rows = ((p := some.clamp(min=clamp)).log().mul_(p).sum(-1) for some in attn.split(ROWS, -2))
    return -torch.cat(list(rows), -1).mean(-1)


def sums_of(seen: Seen) -> LayerSums:
    """Return `layer_sums`, made once for all who look at a layer and kept as long as it is; leave them unchanged."""
    sums = seen.remember("sums", lambda: layer_sums(seen))
    seen.remember("logits", lambda: sums)
    return sums


def logit_sums_of(seen: Seen) -> LogitSums:
    """Return the sums of logits alone, which need no attention, or those of `sums_of` if they are made already."""
    return seen.remember("logits", lambda: logit_sums(seen))


def logit_sums(seen: Seen) -> LogitSums:
    """Return the sums of the logits of one layer of one batch."""
    parts = [_offsets(logits_of(seen.call, chosen)[0], seen.grid) for chosen in groups(seen)]
    return LogitSums(masked=_masked(seen), **_joined(parts))


def layer_sums(seen: Seen) -> LayerSums:
    """Return the sums of one layer of one batch, those of the bias alone empty."""
    call, prefix, grid = seen.call, seen.grid.prefix, seen.grid
    parts: list[dict[str, Tensor]] = []
    rows: list[Tensor] = []
    for chosen in groups(seen):
        logits, attn = attention_map(call, chosen)
        rows.append(rows_of(attn, prefix))
        received = attn.mean(2).double()
        top = received.argmax(-1)
        parts.append(
            {
                "received": received.sum(0),
                "peak": received.amax(-1).sum(0),
                "winners": torch.zeros_like(received[0]).scatter_add_(
                    1, top.T, torch.ones_like(top.T).double()
                ),
                "entropy": entropy(attn).double().sum(0),
                "attention": by_offset(attn[:, :, prefix:, prefix:], grid).sum(0),
                **_offsets(logits, grid),
            }
        )
    seen.remember("rows", lambda: torch.cat(rows, 1))
    patches = seen.x[:, prefix:].double()
    return LayerSums(
        path=seen.path,
        bias=torch.empty(0),
        prior=torch.empty(0),
        q=call.q.double().square().sum((0, 2)).cpu(),
        k=call.k.double().square().sum((0, 2)).cpu(),
        places=patches.sum(0).cpu(),
        energy=patches.square().sum((0, 1)).cpu(),
        masked=_masked(seen),
        **_joined(parts),
    )


def rows_of(attn: Tensor, prefix: int) -> Tensor:
    """Return attention (b, h, 2, N) to patches, from the first token and from patches in the mean, float64."""
    attn = attn[..., prefix:]
    return torch.stack([attn[:, :, 0], attn[:, :, prefix:].mean(2)], 2).double().cpu()


def groups(seen: Seen) -> Iterator[slice]:
    """Yield the heads that are looked at together."""
    batch, heads, tokens = seen.call.q.shape[:3]
    group = max(1, SCRATCH // (7 * batch * tokens**2))
    for first in range(0, heads, group):
        yield slice(first, min(first + group, heads))


def _offsets(logits: Tensor, grid: Grid) -> dict[str, Tensor]:
    """Return `logits` and `squares` of `LogitSums` for some heads of a batch (b, h, T, T)."""
    logits = logits[:, :, grid.prefix :, grid.prefix :]
    squares = torch.linalg.vector_norm(logits, dim=(2, 3), dtype=torch.float64).square()
    return {"logits": by_offset(logits, grid).sum(0), "squares": squares.sum(0)}


def _joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([p[name] for p in parts]).cpu() for name in parts[0]}


def _masked(seen: Seen) -> bool:
    return seen.call.added() is not None or seen.call.allowed() is not None


def alone(seen: Seen) -> tuple[Tensor, Tensor]:
    """Return `bias` and `prior` of `LayerSums`: what a layer's bias is by itself, in its largest value per head."""
    bias, prefix, grid = seen.call.bias, seen.grid.prefix, seen.grid
    heads, tokens = seen.call.q.shape[1:3]
    if bias is None or bias.per_sample or _sees_content(bias):
        empty = torch.full((heads, *pairs(grid).shape), math.nan, dtype=torch.float64)
        return empty, empty
    group = max(1, SCRATCH // (7 * tokens**2))
    parts: list[tuple[Tensor, Tensor]] = []
    for first in range(0, heads, group):
        dense = seen.call.dense_bias(slice(first, min(first + group, heads)))
        dense = dense[0, :, prefix:, prefix:].double().expand(min(group, heads - first), -1, -1)
        powers = (dense - dense.amax((1, 2), keepdim=True)).exp()
        parts.append((by_offset(powers, grid).cpu() / pairs(grid), by_offset(dense.softmax(-1), grid).cpu()))
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def _sees_content(bias: Bias) -> bool:
    if isinstance(bias, SumBias):
        return any(_sees_content(term) for term in bias.terms)
    return isinstance(bias, ContextBias | GatedBias | DecomposedBias)


def radii(grid: Grid) -> Tensor:
    """Return the distance in patches of every offset, (2 gh - 1, 2 gw - 1) float64."""
    h, w = grid.shape
    down, right = (torch.arange(1 - n, n, dtype=torch.float64) for n in (h, w))
    return (down[:, None] ** 2 + right**2).sqrt()


def by_distance(table: Tensor, grid: Grid) -> Tensor:
    """Return sums of a table by offset (h, 2 gh - 1, 2 gw - 1) at each rounded distance, (h, distances)."""
    ring = radii(grid).round().long().flatten().to(table.device)
    return table.new_zeros(len(table), int(ring.max()) + 1).index_add_(1, ring, table.flatten(1))


def position_share(sums: LogitSums, images: int, grid: Grid) -> Tensor:
    """Return R² (h,) of the logits from the offset alone; NaN under a mask."""
    if sums.masked:
        return torch.full_like(sums.squares, math.nan)
    count = pairs(grid) * images
    total = sums.logits.sum((1, 2)) ** 2 / count.sum()
    return ((sums.logits**2 / count).sum((1, 2)) - total) / (sums.squares - total).clamp(min=1e-30)


def local_mass(attention: Tensor, grid: Grid) -> Tensor:
    """Return what a table of attention by offset (..., 2 gh - 1, 2 gw - 1) holds of the 3 x 3 neighbours, (...)."""
    h, w = grid.shape
    return attention[..., max(h - 2, 0) : h + 1, max(w - 2, 0) : w + 1].sum((-2, -1))


def reach(table: Tensor, eps: float) -> Tensor:
    """Return the distance in patches within which 1 - eps of a table by offset lies, (h,) float64.

    Args:
        table: (h, 2 gh - 1, 2 gw - 1), not negative.
        eps: share that is left out.

    >>> reach(torch.ones(1, 3, 3), 0.5).tolist()
    [1.0]
    """
    h, w = table.shape[1:]
    distance, order = radii(Grid(((h + 1) // 2, (w + 1) // 2))).flatten().sort()
    mass = table.flatten(1)[:, order].cumsum(1)
    # a ring of equal distances is taken whole
    edge = torch.nn.functional.pad(distance[1:] != distance[:-1], (0, 1), value=True)
    wanted = mass[:, -1:] * (1 - eps) * (1 - 1e-9)
    enough = (mass >= wanted) & edge
    return torch.where(mass[:, -1] > 0, distance[enough.int().argmax(1)], math.nan)
