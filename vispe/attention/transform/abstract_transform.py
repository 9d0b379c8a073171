"""Base class of transforms, and the layouts of channel pairs."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

# pairs of channels (c, c + pairs), or (2 c, 2 c + 1): `interleaved=False` and `True` of torch, ONNX and flash-attn
Layout = Literal["half", "interleaved"]


class Transform:
    """Base class of transforms of queries, keys, values and output; the identity.

    Example:
        >>> import torch
        >>> x = torch.ones(1, 1, 2, 4)
        >>> Transform().query(x) is x
        True
    """

    __slots__ = ()

    @property
    def extra(self) -> int:
        """Number of channels added to queries and keys."""
        return 0

    @property
    def changes_values(self) -> bool:
        """Whether values or the output are transformed as well."""
        return False

    @property
    def key_heads(self) -> int:
        """Number of heads of the tensors applied to keys and values; 1 if all heads share them.

        Grouped keys and values are repeated for the query heads of each group if this is the number of query heads.
        """
        return 1

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

    def with_backend(self, backend: str) -> Transform:
        """Return this transform for a call with the selected backend; transforms with fused kernels override this.

        Args:
            backend: 'auto' or 'triton' for fused kernels where available, any other name for plain operations.
        """
        del backend
        return self

    def inputs(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Transform queries (b, h, n, d_h), keys (b, h_kv, m, d_h) and values (b, h_kv, m, d_v)."""
        return self.query(q), self.key(k), self.value(v)
