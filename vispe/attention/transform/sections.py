"""Different transforms of consecutive sections of the channels."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.attention.transform.abstract_transform import Transform
from vispe.errors import ShapeError, counted


class Sections(Transform):
    """Apply one transform to each of several consecutive sections of the channels; the remaining ones are unchanged.

    Args:
        *sections: pairs of a number of channels and the transform of these channels, which must not add channels.

    Raises:
        ShapeError: on use, the sections cover more channels than the head has.

    Example:
        >>> import torch
        >>> from vispe.attention import Affine
        >>> double = Affine(q_mul=torch.tensor(2.0))
        >>> Sections((1, Transform()), (2, double)).query(torch.ones(1, 1, 1, 4))
        tensor([[[[1., 2., 2., 1.]]]])
    """

    __slots__ = ("sections",)

    def __init__(self, *sections: tuple[int, Transform]) -> None:
        self.sections = sections

    @property
    def changes_values(self) -> bool:
        """Whether any section transforms values or the output."""
        return any(transform.changes_values for _, transform in self.sections)

    @property
    def key_heads(self) -> int:
        """Largest number of heads of the tensors of keys and values of any section."""
        return max((transform.key_heads for _, transform in self.sections), default=1)

    def with_backend(self, backend: str) -> Sections:
        """Return the same sections for a call with the selected backend."""
        return Sections(*((size, transform.with_backend(backend)) for size, transform in self.sections))

    def query(self, q: Tensor) -> Tensor:
        """Transform the sections of queries."""
        parts = [transform.query(part) for transform, part in self._split(q)]
        return torch.cat(parts, -1)

    def key(self, k: Tensor) -> Tensor:
        """Transform the sections of keys."""
        parts = [transform.key(part) for transform, part in self._split(k)]
        return torch.cat(parts, -1)

    def value(self, v: Tensor) -> Tensor:
        """Transform the sections of values."""
        if not self.changes_values:
            return v
        parts = [transform.value(part) for transform, part in self._split(v)]
        return torch.cat(parts, -1)

    def output(self, out: Tensor) -> Tensor:
        """Transform the sections of the output."""
        if not self.changes_values:
            return out
        parts = [transform.output(part) for transform, part in self._split(out)]
        return torch.cat(parts, -1)

    def _split(self, x: Tensor) -> list[tuple[Transform, Tensor]]:
        covered = sum(size for size, _ in self.sections)
        rest = x.shape[-1] - covered
        # sections are consecutive, from channel 0
        if rest < 0:
            raise ShapeError(
                f"Sections covers {counted(covered, 'channel')}, but head_dim is {x.shape[-1]}. Use fewer or smaller "
                "sections."
            )
        parts: list[tuple[Transform, Tensor]] = []
        start = 0
        # the identity for the remaining channels
        for size, transform in (*self.sections, (rest, Transform())):
            parts.append((transform, x[..., start : start + size]))
            start += size
        return parts
