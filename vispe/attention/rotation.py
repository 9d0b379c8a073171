"""What an encoding may do to queries, keys, values and outputs: the closed `Transform` vocabulary.

Every transform acts on tensors (b, h, n, d_h). Tokens without a place carry the identity in the tables.
"""

from __future__ import annotations

import os
from typing import Literal

import torch
from torch import Tensor

from vispe.attention.precision import exact_product
from vispe.attention.selection import environment
from vispe.errors import ShapeError

Layout = Literal["half", "interleaved"]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # kernels then run on the CPU, for tests


class Transform:
    """Base of the transforms: the identity on everything."""

    __slots__ = ()

    def query(self, q: Tensor) -> Tensor:
        """Transform queries (b, h, n, d_h)."""
        return q

    def key(self, k: Tensor) -> Tensor:
        """Transform keys (b, h_kv, m, d_h)."""
        return k

    def value(self, v: Tensor) -> Tensor:
        """Transform values (b, h_kv, m, d_v)."""
        return v

    def output(self, out: Tensor) -> Tensor:
        """Transform the attention output (b, h, n, d_v)."""
        return out

    def inputs(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Transform queries, keys and values."""
        return self.query(q), self.key(k), self.value(v)


class PairRotation(Transform):
    """Rotate pairs of channels of q and k by angles; channels beyond ``2 * pairs`` pass unchanged.

    Args:
        cos: (b or 1, h or h_kv or 1, n, pairs), float32 or float64.
        sin: like cos.
        layout: ``'half'`` pairs channel c with c + pairs, ``'interleaved'`` pairs 2c with 2c + 1. It travels
            with the angles, so producer and consumer cannot disagree.
        values: whether values are rotated like keys, and outputs back by the angles of their queries.
    """

    __slots__ = ("cos", "layout", "sin", "values")

    def __init__(self, cos: Tensor, sin: Tensor, layout: Layout, values: bool = False) -> None:
        if layout not in ("half", "interleaved"):
            raise ShapeError(f"PairRotation needs layout 'half' or 'interleaved', got {layout!r}.")
        if cos.ndim != 4 or cos.shape != sin.shape:
            raise ShapeError(
                f"PairRotation needs cos and sin of one shape (b, h, n, pairs), got {tuple(cos.shape)} "
                f"and {tuple(sin.shape)}."
            )
        self.cos, self.sin, self.layout, self.values = cos, sin, layout, values

    def query(self, q: Tensor) -> Tensor:
        """Rotate queries; computed in the tables' precision or better, cast back once."""
        return self._rotate(q)

    def key(self, k: Tensor) -> Tensor:
        """Rotate keys; computed in the tables' precision or better, cast back once."""
        return self._rotate(k)

    def value(self, v: Tensor) -> Tensor:
        """Rotate values like keys where `values` says so."""
        return self._rotate(v) if self.values else v

    def output(self, out: Tensor) -> Tensor:
        """Rotate the output back where `values` says so."""
        return self._rotate(out, -1) if self.values else out

    def inputs(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotate queries, keys and, where `values` says so, values; on CUDA in one pass over memory."""
        if not all(self._fused(x) for x in ((q, k, v) if self.values else (q, k))):
            return self.query(q), self.key(k), self.value(v)
        from vispe.attention.triton.rotary_op import rotate_pairs

        q, k, turned = rotate_pairs(q, k, v if self.values else None, *self._tables(), False)
        return q, k, turned if self.values else v

    def _tables(self) -> tuple[Tensor, Tensor, bool]:
        return self.cos, self.sin, self.layout == "half"

    def _fused(self, x: Tensor) -> bool:
        """Whether a fused kernel rotates `x`: on CUDA, with tables in float32 that fit it as they are."""
        if x.device.type == "cpu" and not INTERPRETED:
            return False
        from vispe.attention.triton.device import failed, no_device, say_once

        fields, tables, n, pairs = self.cos.shape
        fits = (
            self.cos.dtype == self.sin.dtype == torch.float32
            and x.dtype in (torch.float16, torch.bfloat16, torch.float32)
            and x.device == self.cos.device == self.sin.device
            and fields in (1, x.shape[0])
            and x.shape[1] % max(tables, 1) == 0
            and n == x.shape[2]
            and 0 < 2 * pairs <= x.shape[3]
            and all(x.shape)
            and environment() in ("auto", "triton")
        )
        if not fits or (no_device(x) or failed(x, "rotation")) is None:
            return fits
        say_once(x)
        return False

    def _rotate(self, x: Tensor, sign: int = 1) -> Tensor:
        pairs = self.cos.shape[-1]
        if 2 * pairs > x.shape[-1]:
            raise ShapeError(f"The rotation has {pairs} pairs but the head has {x.shape[-1]} channels.")
        if self._fused(x):
            from vispe.attention.triton.rotary_op import rotate_pairs

            return rotate_pairs(x, None, None, *self._tables(), sign < 0)[0]
        cos, sin = (_for_heads(t, x) for t in (self.cos, self.sin if sign > 0 else -self.sin))
        head, rest = _widened(x[..., : 2 * pairs], cos), x[..., 2 * pairs :]
        if self.layout == "half":
            a, b = head[..., :pairs], head[..., pairs:]
            turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        elif _complex_viewable(head):  # the same products, in one pass over memory: 6 times faster on CPU
            turned = torch.view_as_complex(head.reshape(*head.shape[:-1], pairs, 2)) * torch.complex(cos, sin)
            turned = torch.view_as_real(turned).flatten(-2)
        else:
            a, b = head[..., 0::2], head[..., 1::2]
            turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        turned = turned.to(x.dtype)
        return torch.cat([turned, rest], -1) if rest.shape[-1] else turned


class BlockTransform(Transform):
    """Multiply blocks of channels by matrices, separately for q, k, v and the output.

    Args:
        q, k, v, out: (b or 1, h or 1, n, blocks, s, s) or None for the identity. Each acts on the first
            ``blocks * s`` channels, as block-diagonal matrix from the left.
    """

    __slots__ = ("k", "out", "q", "v")

    def __init__(
        self,
        q: Tensor | None = None,
        k: Tensor | None = None,
        v: Tensor | None = None,
        out: Tensor | None = None,
    ) -> None:
        for name, m in {"q": q, "k": k, "v": v, "out": out}.items():
            if m is not None and (m.ndim != 6 or m.shape[-1] != m.shape[-2]):
                raise ShapeError(
                    f"BlockTransform needs {name} of shape (b, h, n, blocks, s, s), got {tuple(m.shape)}."
                )
        self.q, self.k, self.v, self.out = q, k, v, out

    def query(self, q: Tensor) -> Tensor:
        """Multiply queries by the q blocks."""
        return _blocks(self.q, q)

    def key(self, k: Tensor) -> Tensor:
        """Multiply keys by the k blocks."""
        return _blocks(self.k, k)

    def value(self, v: Tensor) -> Tensor:
        """Multiply values by the v blocks."""
        return _blocks(self.v, v)

    def output(self, out: Tensor) -> Tensor:
        """Multiply the output by the out blocks."""
        return _blocks(self.out, out)


class Affine(Transform):
    """Scale and shift queries and keys: ``q * q_mul + q_add``, ``k * k_mul + k_add``.

    Args:
        q_mul, k_mul, q_add, k_add: broadcastable to (b, h, n, d_h), or None.
    """

    __slots__ = ("k_add", "k_mul", "q_add", "q_mul")

    def __init__(
        self,
        q_mul: Tensor | None = None,
        k_mul: Tensor | None = None,
        q_add: Tensor | None = None,
        k_add: Tensor | None = None,
    ) -> None:
        self.q_mul, self.k_mul, self.q_add, self.k_add = q_mul, k_mul, q_add, k_add

    def query(self, q: Tensor) -> Tensor:
        """Return ``q * q_mul + q_add`` in q's dtype."""
        return _affine(q, self.q_mul, self.q_add)

    def key(self, k: Tensor) -> Tensor:
        """Return ``k * k_mul + k_add`` in k's dtype."""
        return _affine(k, self.k_mul, self.k_add)


class Expand(Transform):
    """Double the width of q and k to ``[x * cos, x * sin]``.

    Scores then weigh channel c by ``cos(angle_c(i) - angle_c(j))``.

    Args:
        cos: (b or 1, h or 1, n, d_h).
        sin: like cos.
    """

    __slots__ = ("cos", "sin")

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        if cos.ndim != 4 or cos.shape != sin.shape:
            raise ShapeError(
                f"Expand needs cos and sin of one shape (b, h, n, d_h), got {tuple(cos.shape)} and {tuple(sin.shape)}."
            )
        self.cos, self.sin = cos, sin

    def query(self, q: Tensor) -> Tensor:
        """Return queries of doubled width."""
        return self._expand(q)

    def key(self, k: Tensor) -> Tensor:
        """Return keys of doubled width."""
        return self._expand(k)

    def _expand(self, x: Tensor) -> Tensor:
        wide = _widened(x, self.cos)
        return torch.cat([wide * self.cos, wide * self.sin], -1).to(x.dtype)


def _widened(x: Tensor, like: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, like.dtype))


def _complex_viewable(x: Tensor) -> bool:
    """Whether pairs of neighbouring channels can be read as complex numbers; compilers and traces do without."""
    if torch.compiler.is_compiling() or x.device.type not in ("cpu", "cuda"):
        return False
    if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        return False
    *outer, inner = x.stride()
    return bool(inner == 1 and x.storage_offset() % 2 == 0 and all(step % 2 == 0 for step in outer))


def _for_heads(table: Tensor, x: Tensor) -> Tensor:
    """Return a table of key heads repeated for the groups of query heads that share them."""
    heads, tables = x.shape[1], table.shape[1]
    return (
        table.repeat_interleave(heads // tables, 1) if heads > tables > 1 and heads % tables == 0 else table
    )


def _blocks(matrices: Tensor | None, x: Tensor) -> Tensor:
    if matrices is None:
        return x
    blocks, s = matrices.shape[-3], matrices.shape[-1]
    if blocks * s > x.shape[-1]:
        raise ShapeError(f"The transform covers {blocks * s} channels but the head has {x.shape[-1]}.")
    head = x[..., : blocks * s].reshape(*x.shape[:-1], blocks, s)
    if matrices.shape[0] == 1 and len(x) > 1:  # samples as columns: no copy of the matrices for each
        turned = exact_product(matrices[0], head.movedim(0, -1)).movedim(-1, 0).flatten(-2)
    else:
        turned = exact_product(matrices, head[..., None]).flatten(-3)
    return torch.cat([turned.to(x.dtype), x[..., blocks * s :]], -1)


def _affine(x: Tensor, mul: Tensor | None, add: Tensor | None) -> Tensor:
    y = x if mul is None else x * mul
    return (y if add is None else y + add).to(x.dtype)
