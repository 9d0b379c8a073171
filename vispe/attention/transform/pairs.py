"""What an encoding may do to queries, keys, values and outputs: the closed `Transform` vocabulary.

Every transform acts on tensors (b, h, n, d_h). Tokens without a place carry the identity in the tables.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from vispe.attention.backend_selection import environment
from vispe.attention.transform.abstract_transform import Layout, Transform
from vispe.attention.transform.affine import widened
from vispe.errors import ShapeError

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # kernels then run on the CPU, for tests


class PairRotation(Transform):
    """Rotate pairs of channels of q and k by angles; channels beyond ``2 * pairs`` pass unchanged.

    Args:
        cos: (b or 1, h or h_kv or 1, n, pairs), float32 or float64.
        sin: like cos.
        layout: ``'half'`` pairs channel c with c + pairs, ``'interleaved'`` pairs 2c with 2c + 1. It travels
            with the angles, so producer and consumer cannot disagree.
        values: whether values are rotated like keys, and outputs back by the angles of their queries.
        keys: cos and sin of the keys where they are not those of the queries, of the same shape but for samples and
            heads.

    Raises:
        ShapeError: tables are not of one shape, or there is no such layout.

    Example:
        >>> import torch
        >>> turn = torch.tensor([0.0, torch.pi / 2]).reshape(1, 1, 2, 1)  # of two tokens, one pair
        >>> x = torch.tensor([1.0, 0.0]).expand(1, 1, 2, 2)
        >>> PairRotation(turn.cos(), turn.sin(), "half").query(x).round().abs()[0, 0]
        tensor([[1., 0.],
                [0., 1.]])
    """

    __slots__ = ("cos", "layout", "of_keys", "sin", "values")

    def __init__(
        self,
        cos: Tensor,
        sin: Tensor,
        layout: Layout,
        values: bool = False,
        keys: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        if layout not in ("half", "interleaved"):
            raise ShapeError(f"PairRotation needs layout 'half' or 'interleaved', got {layout!r}.")
        if cos.ndim != 4 or cos.shape != sin.shape:
            raise ShapeError(
                f"PairRotation needs cos and sin of one shape (b, h, n, pairs), got {tuple(cos.shape)} "
                f"and {tuple(sin.shape)}."
            )
        if keys is not None and not (
            keys[0].shape == keys[1].shape and keys[0].ndim == 4 and keys[0].shape[2:] == cos.shape[2:]
        ):
            raise ShapeError(
                f"PairRotation needs tables of keys of the shape of those of queries, {tuple(cos.shape)}, up to "
                f"samples and heads, got {tuple(keys[0].shape)} and {tuple(keys[1].shape)}."
            )
        self.cos, self.sin, self.layout, self.values = cos, sin, layout, values
        self.of_keys = self if keys is None else PairRotation(*keys, layout)

    @property
    def changes_values(self) -> bool:
        """Whether values are rotated."""
        return self.values

    def query(self, q: Tensor) -> Tensor:
        """Rotate queries; computed in the tables' precision or better, cast back once."""
        return self._rotate(q)

    def key(self, k: Tensor) -> Tensor:
        """Rotate keys; computed in the tables' precision or better, cast back once."""
        return self.of_keys._rotate(k)

    def value(self, v: Tensor) -> Tensor:
        """Rotate values like keys where `values` says so."""
        return self.of_keys._rotate(v) if self.values else v

    def output(self, out: Tensor) -> Tensor:
        """Rotate the output back where `values` says so."""
        return self._rotate(out, -1) if self.values else out

    def inputs(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotate queries, keys and, where `values` says so, values; on CUDA in one pass over memory."""
        if self.of_keys is not self or not all(
            self._fused(x) for x in ((q, k, v) if self.values else (q, k))
        ):
            return self.query(q), self.key(k), self.value(v)
        from vispe.attention.backends.triton.rotary.op import rotate_pairs

        q, k, turned = rotate_pairs(q, k, v if self.values else None, *self._tables(), False)
        return q, k, turned if self.values else v

    def _tables(self) -> tuple[Tensor, Tensor, bool]:
        return self.cos, self.sin, self.layout == "half"

    def _fused(self, x: Tensor) -> bool:
        """Whether a fused kernel rotates `x`: on CUDA, with tables in float32 that fit it as they are."""
        if x.device.type == "cpu" and not INTERPRETED:
            return False
        from vispe.attention.backends.triton.device import failed, no_device, say_once

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
            from vispe.attention.backends.triton.rotary.op import rotate_pairs

            return rotate_pairs(x, None, None, *self._tables(), sign < 0)[0]
        cos, sin = (_for_heads(t, x) for t in (self.cos, self.sin if sign > 0 else -self.sin))
        head, rest = widened(x[..., : 2 * pairs], cos), x[..., 2 * pairs :]
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
