"""Kinds of encodings by where they act: on tokens, queries and keys, attention logits, or between blocks."""

from __future__ import annotations

import inspect
from collections.abc import Hashable
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.transform.abstract_transform import Transform
from vispe.attention.value_term import ValueTerm
from vispe.encodings.base.encoding import Encoding
from vispe.grid import Positions
from vispe.utils.parameters import parameters_of


class Additive(Encoding):
    """Encoding that adds a vector to every token, once, after patch embedding.

    The vectors are the `table` of positions; an encoding with `reads_tokens` has no table and overrides `embed`.

    Raises:
        NotImplementedError: a host calls a subclass that does not define `table`.

    Example:
        >>> from vispe import Grid
        >>> import torch
        >>> class Ones(Additive):
        ...     dim: int
        ...     def table(self, pos, image=None):
        ...         return torch.ones(1, pos.tokens, self.dim)
        ...
        >>> Ones(dim=4).embed(torch.zeros(2, 6, 4), Grid((2, 3)).positions())[0, 0]
        tensor([1., 1., 1., 1.])
    """

    def table(self, pos: Positions, image: Tensor | None = None) -> Tensor:
        """Return the table (1 or b, n, d) in float32; 0 for tokens without a position unless documented otherwise."""
        raise NotImplementedError

    def embed(self, x: Tensor, pos: Positions, image: Tensor | None = None) -> Tensor:
        """Return the tokens (b, n, d) plus the table, in their dtype; called by hosts."""
        return x + self.table(pos, image).to(x.dtype)


class Rotary(Encoding):
    """Encoding that transforms queries and keys (optionally values and outputs) inside attention.

    Attributes:
        scales_channels: it only scales or shifts channels by their content, so it can precede a rotation.

    Raises:
        NotImplementedError: a host calls a subclass that does not define `transform`.

    Example:
        >>> from vispe import Grid
        >>> from vispe.attention import Affine
        >>> import torch
        >>> class Doubled(Rotary):
        ...     def transform(self, pos, layer, x=None):
        ...         return Affine(q_mul=torch.tensor(2.0))
        ...
        >>> Doubled().transform(Grid((1, 1)).positions(), layer=0).query(torch.ones(1, 1, 1, 2))
        tensor([[[[2., 2.]]]])
    """

    scales_channels: ClassVar[bool] = False

    def transform(self, pos: Positions, layer: int, x: Tensor | None = None) -> Transform:
        """Return the transform of block `layer`; the identity for tokens without a position."""
        raise NotImplementedError


class Biased(Encoding):
    """Encoding that adds a bias to the attention logits.

    Raises:
        NotImplementedError: a host calls a subclass that does not define `bias`.

    Example:
        >>> from vispe import Grid
        >>> from vispe.attention import DistanceBias
        >>> class Nearby(Biased):
        ...     slope: float = 0.5
        ...     def bias(self, pos, layer, x=None):
        ...         return DistanceBias((self.slope,), pos)
        ...
        >>> Nearby(slope=0.25).bias(Grid((1, 3)).positions(), layer=0).dense()[0, 0]
        tensor([[-0.0000, -0.2500, -0.5000],
                [-0.2500, -0.0000, -0.2500],
                [-0.5000, -0.2500, -0.0000]])
    """

    def bias(self, pos: Positions, layer: int, x: Tensor | None = None) -> Bias | None:
        """Return the bias of block `layer`, or None.

        Args:
            pos: positions of the tokens.
            layer: index of the block.
            x: the block's input to attention (b, n, d), for encodings with gates.
        """
        raise NotImplementedError

    def _sources(self, *extra: Hashable) -> tuple[Hashable, tuple[Tensor, ...]] | None:
        """Return the cache key of a function of offsets (`extra`, options) and the tensors that it reads.

        None under compilation, where nothing is cached.
        """
        if torch.compiler.is_compiling():
            return None
        arguments = tuple(getattr(self, name) for name in _arguments(type(self)))
        # the progress determines the active bands of some encodings
        return (type(self), arguments, self.progress, *extra), (*parameters_of(self), *self.buffers())

    def query_factor(self, pos: Positions, layer: int) -> Tensor | None:
        """Return the factor of the queries (b or 1, h or 1, n or 1, 1) in block `layer`, or None.

        It scales the product of queries and keys, not the bias.
        """
        del pos, layer
        return None

    def value_term(self, pos: Positions, layer: int) -> ValueTerm | None:
        """Return the term added to the attention output in block `layer`, or None."""
        del pos, layer
        return None


class Mixing(Encoding):
    """Encoding that mixes neighbouring tokens between blocks.

    Raises:
        NotImplementedError: a host calls a subclass that does not define `mix`.

    Example:
        >>> from vispe import Grid
        >>> import torch
        >>> class Neighbours(Mixing):
        ...     def mix(self, x, pos, layer):
        ...         return x + x.roll(1, dims=1)
        ...
        >>> Neighbours().mix(torch.ones(1, 4, 2), Grid((2, 2)).positions(), layer=0).shape
        torch.Size([1, 4, 2])
    """

    def mix(self, x: Tensor, pos: Positions, layer: int) -> Tensor:
        """Return the mixed tokens (b, n, d); called after block `layer`."""
        raise NotImplementedError


@cache
def _arguments(kind: type[Encoding]) -> tuple[str, ...]:
    return tuple(inspect.signature(kind).parameters)
