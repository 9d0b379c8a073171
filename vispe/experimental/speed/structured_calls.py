"""Structured calls of attention: q, k and v with a bias, its parameters, a rotation or a mask."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import Tensor

from vispe.attention import Bias, DistanceBias, GatedBias, PairRotation, TableBias, attention
from vispe.attention.bias.decomposed import DecomposedBias
from vispe.attention.precision import exact_product
from vispe.grid import Positions

KINDS = ("dropped", "decomposed", "gated", "rotary")
"""Code paths of the kernels in addition to those of full grids."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Structured:
    """Random inputs of a structured call in addition to q, k and v; `double()` returns them in float64.

    Args:
        kind: on a full grid 'none', 'distance', 'slopes' (distance with learned slopes), 'table' or 'padding' (a table
            with a key padding mask); 'dropped' (tokens of a grid in random order, as after token dropping or packing),
            'decomposed' (a table per axis, multiplied by queries), 'gated' (gates of queries and keys on a distance)
            or 'rotary' (rotated channel pairs and a distance).
        pos: positions of a grid, (1, n).
        size: (b, h, n, d) of q.
        slopes: slopes of the distance, one per head.
        random: returns standard normal float32 numbers of a shape.
    """

    def __init__(
        self,
        kind: str,
        pos: Positions,
        size: tuple[int, ...],
        slopes: tuple[float, ...],
        random: Callable[..., Tensor],
    ) -> None:
        b, h, n, d = size
        self.kind, self.pos, self.slopes = kind, pos, slopes
        self.tensors: list[Tensor] = []
        self.learned = 0  # how many of the tensors may have a gradient, the first ones
        self.keep: Tensor | None = None  # which keys are attended to (b, n)
        shape = (0, 0) if pos.grid is None else pos.grid.shape
        if kind == "dropped":
            self.pos = pos.gather(random((n,)).argsort()[None])
        elif kind == "slopes":
            self.tensors, self.learned = [torch.tensor(slopes, device=pos.coords.device)], 1
        elif kind in ("table", "padding"):
            self.tensors = [random((h, *(2 * m - 1 for m in shape)))]
            self.tensors += [random((h, 3))] if pos.grid is not None and pos.grid.prefix else []
            self.learned = len(self.tensors)
        elif kind == "decomposed":
            spread = (len(shape) * d) ** -0.5  # the bias gets a deviation of 1, as a table has
            self.tensors = [random((h, m + 1, d)) * spread for m in shape]
            self.learned = 2
        elif kind == "gated":
            self.tensors, self.learned = [random((b, h, n)).sigmoid() for _ in range(2)], 2
        elif kind == "rotary":
            angle = random((1, h, n, d // 2)) * 3
            self.tensors = [angle.cos(), angle.sin()]

    def bias(self, q: Tensor) -> Bias | None:
        """Return the bias, for queries (b, h, n, d)."""
        if self.kind == "none":
            return None
        if self.kind in ("table", "padding"):
            return TableBias(self.tensors[0], self.pos, *self.tensors[1:])
        distance = DistanceBias(self.tensors[0] if self.kind == "slopes" else self.slopes, self.pos)
        if self.kind == "gated":
            return GatedBias(*self.tensors, distance)
        if self.kind == "decomposed":
            rows, cols = (exact_product(q, t.transpose(-1, -2)) for t in self.tensors)
            return DecomposedBias(rows, cols, "query", self.pos)
        return distance

    def rotation(self) -> PairRotation | None:
        """Return the rotation of queries and keys, if there is one."""
        return PairRotation(*self.tensors, "half") if self.kind == "rotary" else None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, backend: Any) -> Tensor:
        """Return attention (b, h, n, d) by a backend of vispe."""
        bias, transform = self.bias(q), self.rotation()
        return attention(q, k, v, bias=bias, transform=transform, key_padding_mask=self.keep, backend=backend)

    def leaves(self) -> list[Tensor]:
        """Return the parameters that may have a gradient."""
        return self.tensors[: self.learned]

    def double(self) -> Structured:
        """Return a float64 copy with separate leaves."""
        other = copy(self)
        # on a full grid the kernels compute distances from integer cells, so those are exact already
        if self.kind in KINDS:
            wide = {name: getattr(self.pos, name).double() for name in ("coords", "extent", "cell")}
            other.pos = self.pos.replace(**wide)
        other.tensors = [t.detach().double() for t in self.tensors]
        for leaf in other.leaves():
            leaf.requires_grad_()
        return other

    def sample(self, head: int) -> Structured:
        """Return one head of the first sample in float64."""
        other = self.double()
        heads = slice(head, head + 1)
        other.slopes = self.slopes[heads]
        if self.kind == "decomposed":
            other.tensors = [t[heads] for t in other.tensors]
        else:
            other.tensors = [t[:1, heads] for t in other.tensors]
        return other


def exact_rows(call: Structured, q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    """Return the output of some queries of one sample and head (r, d) in float64, from q, k, v (n, d) in float64."""
    q, k, v = (t[None, None] for t in (q, k, v))
    rotation = call.rotation()
    rotated = (q, k) if rotation is None else (rotation.query(q), rotation.key(k))
    cells, spatial = call.pos.cells()[0].double(), call.pos.spatial[0]
    distance = torch.cdist(cells[rows], cells).masked_fill(~(spatial[rows, None] & spatial[None]), 0.0)
    bias = -torch.as_tensor(call.slopes, dtype=torch.float64, device=q.device)[:, None] * distance
    if call.kind == "gated":
        row, col = (t[0, 0] for t in call.tensors)
        bias = (row[rows, None] + col[None]) * bias
    elif call.kind == "decomposed":
        shape = (0, 0) if call.pos.grid is None else call.pos.grid.shape
        bias = torch.zeros_like(distance)
        for axis, table in enumerate(call.tensors):
            index = call.pos.cells()[0][:, axis].long().masked_fill(~spatial, shape[axis])
            bias = bias + (q[0, 0, rows] @ table[0].T)[:, index]
    logits = q.shape[-1] ** -0.5 * rotated[0][0, 0, rows] @ rotated[1][0, 0].T + bias
    return logits.softmax(-1) @ v[0, 0]
