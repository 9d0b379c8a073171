"""Composition of transforms, and content-dependent scaling of channels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from vispe.attention.precision import check_floating, exact_product
from vispe.attention.transform.abstract_transform import Transform
from vispe.attention.transform.affine import widened
from vispe.errors import ShapeError


class Chain(Transform):
    """Composition of transforms, applied in order; the output part is applied in reverse order.

    Args:
        *links: the transforms.

    Example:
        >>> import torch
        >>> from vispe.attention import Affine
        >>> double = Affine(q_mul=torch.tensor(2.0), q_add=torch.tensor(1.0))
        >>> Chain(double, double).query(torch.ones(1, 1, 1, 1))
        tensor([[[[7.]]]])
    """

    __slots__ = ("links",)

    def __init__(self, *links: Transform) -> None:
        self.links = links

    @property
    def extra(self) -> int:
        """Number of channels that all links add to queries and keys."""
        return sum(link.extra for link in self.links)

    @property
    def changes_values(self) -> bool:
        """Whether any link transforms values or the output."""
        return any(link.changes_values for link in self.links)

    @property
    def key_heads(self) -> int:
        """Largest number of heads of the tensors of keys and values of any link."""
        return max((link.key_heads for link in self.links), default=1)

    def with_backend(self, backend: str) -> Chain:
        """Return the same links for a call with the selected backend."""
        return Chain(*(link.with_backend(backend) for link in self.links))

    def query(self, q: Tensor) -> Tensor:
        """Return queries after all links."""
        for link in self.links:
            q = link.query(q)
        return q

    def key(self, k: Tensor) -> Tensor:
        """Return keys after all links."""
        for link in self.links:
            k = link.key(k)
        return k

    def value(self, v: Tensor) -> Tensor:
        """Return values after all links."""
        for link in self.links:
            v = link.value(v)
        return v

    def output(self, out: Tensor) -> Tensor:
        """Return the output after all links, the last first."""
        # the inverse of a composition: (f g)^-1 = g^-1 f^-1
        for link in reversed(self.links):
            out = link.output(out)
        return out

    def inputs(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values after all links, each of which may fuse the three."""
        for link in self.links:
            q, k, v = link.inputs(q, k, v)
        return q, k, v


class Calibrate(Transform):
    """Scale each channel of queries and keys depending on their content: ``x * (1 + tanh(silu(x up) down) / 2)``.

    Args:
        q_up: (h, d_h, r), or None to leave queries unchanged.
        q_down: (h, r, d_h), or None.
        k_up: (h_kv, d_h, r), or None to leave keys unchanged.
        k_down: (h_kv, r, d_h), or None.

    Raises:
        ShapeError: only one of `up` and `down` is given, or a tensor is not floating point.

    Example:
        >>> import torch
        >>> x = torch.randn(1, 2, 5, 4)
        >>> identity = Calibrate(torch.zeros(2, 4, 4), torch.randn(2, 4, 4))
        >>> bool((identity.query(x) == x).all())
        True
    """

    __slots__ = ("k_down", "k_up", "q_down", "q_up")

    def __init__(
        self,
        q_up: Tensor | None = None,
        q_down: Tensor | None = None,
        k_up: Tensor | None = None,
        k_down: Tensor | None = None,
    ) -> None:
        # both matrices of a projection or none
        for which, up, down in (("queries", q_up, q_down), ("keys", k_up, k_down)):
            if (up is None) != (down is None):
                present = "up" if down is None else "down"
                raise ShapeError(
                    f"Calibrate needs both matrices for {which}, got only {present}. Pass both or neither."
                )
        check_floating("Calibrate", q_up=q_up, q_down=q_down, k_up=k_up, k_down=k_down)
        self.q_up, self.q_down, self.k_up, self.k_down = q_up, q_down, k_up, k_down

    @property
    def key_heads(self) -> int:
        """Number of heads of the matrices of keys."""
        return 1 if self.k_up is None else self.k_up.shape[0]

    def query(self, q: Tensor) -> Tensor:
        """Return calibrated queries in q's dtype."""
        return _calibrated(q, self.q_up, self.q_down)

    def key(self, k: Tensor) -> Tensor:
        """Return calibrated keys in k's dtype."""
        return _calibrated(k, self.k_up, self.k_down)


def _calibrated(x: Tensor, up: Tensor | None, down: Tensor | None) -> Tensor:
    if up is None or down is None:
        return x
    wide = widened(x, up)
    # float32 products: autocast would round them, and with them the channel weights
    hidden = F.silu(exact_product(wide, up))
    factor = 1 + torch.tanh(exact_product(hidden, down)) / 2
    return (wide * factor).to(x.dtype)
