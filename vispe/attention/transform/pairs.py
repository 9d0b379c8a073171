"""Rotation of channel pairs, the transform of rotary position embeddings.

It acts on tensors (b, h, n, d_h). The tables have the identity (cos 1, sin 0) for tokens without a position.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from vispe.attention.backend_selection import selected
from vispe.attention.precision import check_floating, differentiation_unsupported_reason
from vispe.attention.transform.abstract_transform import Layout, Transform
from vispe.attention.transform.affine import widened
from vispe.errors import ShapeError, counted

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # kernels then run on the CPU, for tests


class PairRotation(Transform):
    """Rotate pairs of channels of q and k by angles; channels from ``2 * pairs`` on are unchanged.

    Args:
        cos: (b or 1, h or h_kv or 1, n, pairs), float32 or float64.
        sin: like cos.
        layout: ``'half'`` pairs channel c with c + pairs, ``'interleaved'`` pairs 2c with 2c + 1. It is stored with
            the angles, so that producer and consumer agree.
        values: whether values are rotated like keys, and outputs rotated back by the angles of their queries.
        keys: cos and sin of the keys, of the same shape except for samples and heads; those of the queries by default.

    Raises:
        ShapeError: tables differ in shape or are not floating point, `layout` is unknown, or on use, there are
            more pairs than channels.

    Example:
        >>> import torch
        >>> angle = torch.tensor([0.0, torch.pi / 2]).reshape(1, 1, 2, 1)  # two tokens, one pair
        >>> x = torch.tensor([1.0, 0.0]).expand(1, 1, 2, 2)
        >>> PairRotation(angle.cos(), angle.sin(), "half").query(x).round().abs()[0, 0]
        tensor([[1., 0.],
                [0., 1.]])
    """

    __slots__ = ("backend", "cos", "layout", "of_keys", "sin", "values")

    def __init__(
        self,
        cos: Tensor,
        sin: Tensor,
        layout: Layout,
        values: bool = False,
        keys: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        if layout not in ("half", "interleaved"):
            raise ShapeError(f"PairRotation: layout must be 'half' or 'interleaved', got {layout!r}.")
        if cos.ndim != 4 or cos.shape != sin.shape:
            raise ShapeError(
                f"PairRotation needs cos and sin of equal shape (b, h, n, pairs), got {tuple(cos.shape)} "
                f"and {tuple(sin.shape)}."
            )
        if keys is not None and not (
            keys[0].shape == keys[1].shape and keys[0].ndim == 4 and keys[0].shape[2:] == cos.shape[2:]
        ):
            raise ShapeError(
                f"PairRotation needs tables of the keys with the shape of those of the queries, {tuple(cos.shape)}, "
                f"except for samples and heads, got {tuple(keys[0].shape)} and {tuple(keys[1].shape)}."
            )
        check_floating("PairRotation", cos=cos, sin=sin)
        self.cos, self.sin, self.values = cos, sin, values
        self.layout: Layout = layout
        self.of_keys = self if keys is None else PairRotation(*keys, layout)
        self.backend: str | None = None  # by default the backend selected when the rotation is applied

    def with_backend(self, backend: str) -> PairRotation:
        """Return the same rotation, fused only if `backend` is 'auto' or 'triton'."""
        keys = None if self.of_keys is self else (self.of_keys.cos, self.of_keys.sin)
        rotation = PairRotation(self.cos, self.sin, self.layout, self.values, keys)
        rotation.backend = rotation.of_keys.backend = backend
        return rotation

    @property
    def changes_values(self) -> bool:
        """Whether values are rotated."""
        return self.values

    @property
    def key_heads(self) -> int:
        """Number of heads of the tables of keys."""
        return self.of_keys.cos.shape[1]

    def query(self, q: Tensor) -> Tensor:
        """Rotate queries, computed in the dtype of the tables or better and rounded once."""
        return self._rotate(q)

    def key(self, k: Tensor) -> Tensor:
        """Rotate keys, computed in the dtype of the tables or better and rounded once."""
        return self.of_keys._rotate(k)

    def value(self, v: Tensor) -> Tensor:
        """Rotate values like keys if `values` is set."""
        return self.of_keys._rotate(v) if self.values else v

    def output(self, out: Tensor) -> Tensor:
        """Rotate the output back if `values` is set."""
        return self._rotate(out, -1) if self.values else out

    def inputs(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotate queries, keys and, if `values` is set, values; on CUDA in one fused kernel."""
        # the fused kernel takes one pair of tables for all tensors
        if self.of_keys is not self or not all(
            self._fused(x) for x in ((q, k, v) if self.values else (q, k))
        ):
            return self.query(q), self.key(k), self.value(v)
        from vispe.attention.backends.triton.rotary.op import rotated_pairs

        q, k, rotated_v = rotated_pairs(q, k, v if self.values else None, *self._tables(), False)
        return q, k, rotated_v if self.values else v

    def _tables(self) -> tuple[Tensor, Tensor, bool]:
        return self.cos, self.sin, self.layout == "half"

    def _fused(self, x: Tensor) -> bool:
        """Whether the fused kernel can rotate `x`: on CUDA, with float32 tables of a fitting shape."""
        if x.device.type == "cpu" and not INTERPRETED:
            return False
        from vispe.attention.backends.triton.device import (
            device_unsupported_reason,
            failure_reason,
            warn_once,
        )

        fields, tables, n, pairs = self.cos.shape
        # tables must broadcast to x without copies
        fits = (
            self.cos.dtype == self.sin.dtype == torch.float32
            and x.dtype in (torch.float16, torch.bfloat16, torch.float32)
            and x.device == self.cos.device == self.sin.device
            and fields in (1, x.shape[0])
            and x.shape[1] % max(tables, 1) == 0
            and n == x.shape[2]
            and 0 < 2 * pairs <= x.shape[3]
            and all(x.shape)
            and (self.backend or selected().backend) in ("auto", "triton")
            and differentiation_unsupported_reason() is None
        )
        # kernels that failed before are not used again; warn once
        if not fits or (device_unsupported_reason(x) or failure_reason(x, "rotation")) is None:
            return fits
        warn_once(x)
        return False

    def _rotate(self, x: Tensor, sign: int = 1) -> Tensor:
        pairs = self.cos.shape[-1]
        if 2 * pairs > x.shape[-1]:
            raise ShapeError(
                f"PairRotation has {counted(pairs, 'pair')} of channels, but head_dim is {x.shape[-1]}. Use at most "
                "half as many."
            )
        if self._fused(x):
            from vispe.attention.backends.triton.rotary.op import rotated_pairs

            return rotated_pairs(x, None, None, *self._tables(), sign < 0)[0]
        # the inverse rotation has the opposite sign of the sine
        cos, sin = (_for_heads(t, x) for t in (self.cos, self.sin if sign > 0 else -self.sin))
        head, rest = widened(x[..., : 2 * pairs], cos), x[..., 2 * pairs :]
        # half: (c, c + pairs); interleaved: (2 c, 2 c + 1)
        if self.layout == "half":
            a, b = head[..., :pairs], head[..., pairs:]
            rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        # complex multiplication computes the same products in one pass over memory: 6 times faster on CPU
        elif _complex_viewable(head):
            rotated = torch.view_as_complex(head.reshape(*head.shape[:-1], pairs, 2)) * torch.complex(
                cos, sin
            )
            rotated = torch.view_as_real(rotated).flatten(-2)
        else:
            a, b = head[..., 0::2], head[..., 1::2]
            rotated = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        rotated = rotated.to(x.dtype)
        return torch.cat([rotated, rest], -1) if rest.shape[-1] else rotated


def _complex_viewable(x: Tensor) -> bool:
    """Whether neighbouring channels can be viewed as complex numbers; not in compiled or traced programs."""
    if torch.compiler.is_compiling() or x.device.type not in ("cpu", "cuda"):
        return False
    if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        return False
    # view_as_complex needs even strides and offset
    *outer, inner = x.stride()
    return bool(inner == 1 and x.storage_offset() % 2 == 0 and all(step % 2 == 0 for step in outer))


def _for_heads(table: Tensor, x: Tensor) -> Tensor:
    """Return a table (b, h_kv, n, pairs) repeated for the query heads of each group if `x` has more heads."""
    heads, tables = x.shape[1], table.shape[1]
    return (
        table.repeat_interleave(heads // tables, 1) if heads > tables > 1 and heads % tables == 0 else table
    )
