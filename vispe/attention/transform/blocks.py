"""Block-diagonal linear transforms of channels."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.attention.precision import check_floating, exact_product
from vispe.attention.transform.abstract_transform import Transform
from vispe.errors import ShapeError, counted
from vispe.utils.axes import last_axis_to


class BlockTransform(Transform):
    """Multiply blocks of channels by matrices, separately for q, k, v and the output.

    Args:
        q, k, v, out: (b or 1, h or 1, n, blocks, s, s) or None for the identity. Each multiplies the first
            ``blocks * s`` channels from the left as a block-diagonal matrix.

    Raises:
        ShapeError: a tensor has another shape or is not floating point, or on use, the blocks cover more channels
            than the head has.

    Example:
        >>> import torch
        >>> swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).expand(1, 1, 1, 2, 2, 2)  # two blocks of two channels
        >>> BlockTransform(q=swap).query(torch.arange(4.0).reshape(1, 1, 1, 4))
        tensor([[[[1., 0., 3., 2.]]]])
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
        check_floating("BlockTransform", q=q, k=k, v=v, out=out)
        self.q, self.k, self.v, self.out = q, k, v, out

    @property
    def changes_values(self) -> bool:
        """Whether there are matrices for values or the output."""
        return self.v is not None or self.out is not None

    @property
    def key_heads(self) -> int:
        """Number of heads of the matrices of keys and values."""
        return max((m.shape[1] for m in (self.k, self.v) if m is not None), default=1)

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


def _blocks(matrices: Tensor | None, x: Tensor) -> Tensor:
    if matrices is None:
        return x
    blocks, s = matrices.shape[-3], matrices.shape[-1]
    if blocks * s > x.shape[-1]:
        raise ShapeError(
            f"BlockTransform covers {counted(blocks * s, 'channel')}, but head_dim is {x.shape[-1]}. Use fewer or "
            "smaller blocks."
        )
    # (b, h, n, d) -> (b, h, n, blocks, s)
    covered = torch.unflatten(x[..., : blocks * s], -1, (blocks, s))
    # shared by all samples: treat samples as columns, so that the matrices are not copied for each
    if matrices.shape[0] == 1:
        product = last_axis_to(exact_product(matrices[0], covered.movedim(0, -1)), 0).flatten(-2)
    else:
        product = exact_product(matrices, covered[..., None]).flatten(-3)
    return torch.cat([product.to(x.dtype), x[..., blocks * s :]], -1)
