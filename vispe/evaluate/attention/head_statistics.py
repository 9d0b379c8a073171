"""Running sums over images for statistics of attention heads; no attention map outlives its layer.

Memory between images, for L layers of h heads and width d, T tokens of which N form a grid gh x gw: 4 L h (2 gh - 1)
(2 gw - 1) + 2 L h T + L N d numbers of float64; 9 MB for a ViT-S at 224 pixels, 340 MB for a ViT-L at 518 pixels. While
a layer runs: about 7 b T^2 float32 for each head of a group; groups are as large as `SCRATCH` numbers allow, and at
least one head.
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
from vispe.backbones.attention_recorder import LayerAttention, attention_map, logits_of
from vispe.errors import ShapeError
from vispe.evaluate.attention.offset_tables import by_offset, pairs
from vispe.grid import Grid

# number of float32 values, 64 MB, in blocks that allocators reuse without a system call
SCRATCH = 2**24
ROWS = 128  # rows of attention per block in `entropy`
CLAMP = 1e-10  # lower bound of probabilities in entropies


@dataclass(kw_only=True)
class LogitSums:
    """Sums over images of the logits between patches in one layer; all float64 on the CPU.

    Attributes:
        logits: summed over pairs with the same signed offset from query to key (h, 2 gh - 1, 2 gw - 1).
        squares: sum of squared logits over all pairs (h,).
        masked: whether a mask prevents some patches from attending to others.
    """

    logits: Tensor
    squares: Tensor
    masked: bool = False


@dataclass(kw_only=True)
class LayerSums(LogitSums):
    """Sums over images of one layer; all float64 on the CPU.

    Attributes:
        path: name of the layer.
        received: attention on each key, mean over queries (h, T).
        peak: maximum of `received` over the keys of each image (h,).
        winners: number of images in which each key receives the most attention (h, T).
        entropy: entropy of the rows of attention in nats, mean over queries (h,).
        attention: attention between patches by signed offset, summed over pairs (h, 2 gh - 1, 2 gw - 1).
        bias: exp of the bias by offset, mean over pairs; NaN without a bias, or if it depends on content.
        prior: attention of the bias alone, by offset, summed over pairs as `attention`; NaN as for `bias`.
        q: squared queries by channel (h, d_h).
        k: squared keys by channel (h_kv, d_h).
        inputs: input of the layer by patch and channel (N, d).
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
    inputs: Tensor
    energy: Tensor


@dataclass
class HeadSums:
    """Sums over images of all layers.

    Attributes:
        grid: token grid, equal for all images.
        images: number of images.
        layers: one entry per layer.
    """

    grid: Grid | None = None
    images: int = 0
    layers: list[LayerSums] = field(default_factory=list)

    def add(self, captured: LayerAttention) -> None:
        """Add one layer of one batch; the first layer of a batch counts its images.

        Raises:
            ShapeError: the grid differs from that of the previous images.
        """
        shape = Grid(captured.grid.shape, captured.grid.prefix)
        if self.grid is None:
            self.grid = shape
        if shape != self.grid:
            raise ShapeError(
                f"{captured.path}: all images must have the same grid of patches, got {shape.shape} after "
                f"{self.grid.shape}. Resize or crop the images to one size."
            )
        if captured.layer == 0:
            self.images += captured.x.shape[0]
        sums = layer_sums(captured)
        if captured.layer >= len(self.layers):
            sums.bias, sums.prior = bias_tables(captured)
            self.layers.append(sums)
            return
        acc = self.layers[captured.layer]
        for name, value in vars(sums).items():
            if name not in ("path", "bias", "prior", "masked"):
                getattr(acc, name).add_(value)
        acc.masked |= sums.masked


def entropy(attn: Tensor, clamp: float = CLAMP) -> Tensor:
    """Return the entropy of attention (..., n, m) in nats, mean over queries; probabilities are clamped."""
    # in blocks of rows, so that temporaries stay in the CPU cache
    rows = ((p := block.clamp(min=clamp)).log().mul_(p).sum(-1) for block in attn.split(ROWS, -2))
    return -torch.cat(list(rows), -1).mean(-1)


def sums_of(captured: LayerAttention) -> LayerSums:
    """Return `layer_sums`, cached for all measures while the layer is captured; do not modify the result."""
    sums = captured.remember("sums", lambda: layer_sums(captured))
    captured.remember("logits", lambda: sums)
    return sums


def logit_sums_of(captured: LayerAttention) -> LogitSums:
    """Return the sums of the logits only, which need no softmax; reuses `sums_of` if it is already cached."""
    return captured.remember("logits", lambda: logit_sums(captured))


def logit_sums(captured: LayerAttention) -> LogitSums:
    """Return the sums of the logits of one layer of one batch."""
    parts = [
        _offsets(logits_of(captured.call, heads_slice)[0], captured.grid) for heads_slice in groups(captured)
    ]
    return LogitSums(masked=_masked(captured), **_joined(parts))


def layer_sums(captured: LayerAttention) -> LayerSums:
    """Return the sums of one layer of one batch; `bias` and `prior` are empty."""
    call, prefix, grid = captured.call, captured.grid.prefix, captured.grid
    parts: list[dict[str, Tensor]] = []
    rows: list[Tensor] = []
    for heads_slice in groups(captured):
        logits, attn = attention_map(call, heads_slice)
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
    captured.remember("rows", lambda: torch.cat(rows, 1))
    patches = captured.x[:, prefix:].double()
    return LayerSums(
        path=captured.path,
        bias=torch.empty(0),
        prior=torch.empty(0),
        q=call.q.double().square().sum((0, 2)).cpu(),
        k=call.k.double().square().sum((0, 2)).cpu(),
        inputs=patches.sum(0).cpu(),
        energy=patches.square().sum((0, 1)).cpu(),
        masked=_masked(captured),
        **_joined(parts),
    )


def rows_of(attn: Tensor, prefix: int) -> Tensor:
    """Return attention to patches (b, h, 2, N) float64: of the first token, and averaged over patches as queries."""
    attn = attn[..., prefix:]
    return torch.stack([attn[:, :, 0], attn[:, :, prefix:].mean(2)], 2).double().cpu()


def groups(captured: LayerAttention) -> Iterator[slice]:
    """Yield slices of heads that are processed together, see `SCRATCH`."""
    batch, heads, tokens = captured.call.q.shape[:3]
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


def _masked(captured: LayerAttention) -> bool:
    return captured.call.added() is not None or captured.call.allowed() is not None


def bias_tables(captured: LayerAttention) -> tuple[Tensor, Tensor]:
    """Return `bias` and `prior` of `LayerSums` for the bias of a layer, relative to its maximum per head."""
    bias, prefix, grid = captured.call.bias, captured.grid.prefix, captured.grid
    heads, tokens = captured.call.q.shape[1:3]
    if bias is None or bias.per_sample or _depends_on_content(bias):
        empty = torch.full((heads, *pairs(grid).shape), math.nan, dtype=torch.float64)
        return empty, empty
    group = max(1, SCRATCH // (7 * tokens**2))
    parts: list[tuple[Tensor, Tensor]] = []
    for first in range(0, heads, group):
        dense = captured.call.dense_bias(slice(first, min(first + group, heads)))
        dense = dense[0, :, prefix:, prefix:].double().expand(min(group, heads - first), -1, -1)
        powers = (dense - dense.amax((1, 2), keepdim=True)).exp()
        parts.append((by_offset(powers, grid).cpu() / pairs(grid), by_offset(dense.softmax(-1), grid).cpu()))
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def _depends_on_content(bias: Bias) -> bool:
    if isinstance(bias, SumBias):
        return any(_depends_on_content(term) for term in bias.terms)
    return isinstance(bias, ContextBias | GatedBias | DecomposedBias)


def position_share(sums: LogitSums, images: int, grid: Grid) -> Tensor:
    """Return R² (h,) of the logits predicted by the offset; NaN under a mask."""
    if sums.masked:
        return torch.full_like(sums.squares, math.nan)
    count = pairs(grid) * images
    total = sums.logits.sum((1, 2)) ** 2 / count.sum()
    return ((sums.logits**2 / count).sum((1, 2)) - total) / (sums.squares - total).clamp(min=1e-30)
