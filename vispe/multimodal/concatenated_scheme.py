"""`PerLayerSchemes` as one scheme, whose coordinates are those of all its schemes one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from vispe.errors import UnsupportedCombination
from vispe.multimodal.coordinates import Coordinates
from vispe.multimodal.per_layer import PerLayerSchemes
from vispe.multimodal.registry import create_scheme
from vispe.multimodal.scheme import Scheme
from vispe.multimodal.streams.token_stream import Stream


@dataclass(frozen=True)
class ConcatenatedScheme(Scheme):
    """Concatenation of the schemes of `PerLayerSchemes`: axes of the first, then of the second, and so on.

    Each scheme has a separate counter, so counters are (b, k).

    Args:
        layers: assignment of schemes to layers.

    Raises:
        UnsupportedCombination: the counter of a scheme consists of several numbers.

    Example:
        >>> from vispe.multimodal import Image, Stream, Text, alternating
        >>> both = ConcatenatedScheme(alternating(["circlerope", "mrope"], 4))
        >>> coordinates = both.coordinates(Stream.of([[Text(2), Image(2, 2), Text(1)]]))
        >>> coordinates.ids.shape, coordinates.next.shape
        (torch.Size([6, 1, 7]), torch.Size([1, 2]))
    """

    name: ClassVar[str] = "layers"
    summary: ClassVar[str] = "A scheme for each layer."
    levels: ClassVar[int] = 2  # a concatenation has at least one counter

    layers: PerLayerSchemes

    def __post_init__(self) -> None:
        several = [scheme.name for scheme in self.layers.schemes if scheme.levels > 1]
        if several:
            raise UnsupportedCombination(
                f"The counter of {several[0]} has several numbers, so it cannot be combined with schemes of other "
                "layers. Use the same scheme for all layers."
            )

    @property
    def parts(self) -> tuple[tuple[Scheme, int], ...]:
        """Each scheme with the index of its first axis."""
        firsts = [0]
        for scheme in self.layers.schemes[:-1]:
            firsts.append(firsts[-1] + scheme.axes)
        return tuple(zip(self.layers.schemes, firsts, strict=True))

    @property
    def axes(self) -> int:
        """Total number of coordinates of a token."""
        return sum(scheme.axes for scheme in self.layers.schemes)

    @property
    def counts(self) -> int:
        """Number of counters."""
        return len(self.layers.schemes)

    @property
    def added(self) -> tuple[int, ...]:
        """Axes that rotate no channels."""
        return tuple(first + axis for scheme, first in self.parts for axis in scheme.added)

    def continue_text(self, number: Tensor, counter: Tensor) -> Tensor:
        """Return the coordinates (axes, b, s) of text after counters (b, k), or (b) if all are equal."""
        return torch.cat([s.continue_text(number, c) for s, c in self._each(counter)])

    def counter_after(self, counter: Tensor, tokens: Tensor) -> Tensor:
        """Return the counters (b, k) after `tokens` text tokens (b)."""
        return torch.stack([s.counter_after(c, tokens) for s, c in self._each(counter)], 1)

    def counter(self, ids: Tensor) -> Tensor:
        """Return the counters (b, k) at which text has the coordinates (axes, b)."""
        return torch.stack([s.counter(ids[first : first + s.axes]) for s, first in self.parts], 1)

    def allocation(self, pairs: int, kv_heads: int = 1) -> Tensor:
        """Raise `UnsupportedCombination`: the allocation depends on the layer."""
        raise UnsupportedCombination(
            f"The allocation depends on the layer, got {self.layers}. Use the scheme of a layer."
        )

    def coordinates(
        self,
        stream: Stream,
        *,
        start: Tensor | None = None,
        training: bool = False,
        generator: torch.Generator | None = None,
        draws: Tensor | None = None,
        padding: float = 0,
    ) -> Coordinates:
        """Return the coordinates of all schemes (axes, b, s), as `Scheme.coordinates`; draws are separate."""
        if draws is not None:
            raise UnsupportedCombination(
                "Per-layer schemes draw separately and do not accept draws. Pass a generator instead."
            )
        begin = None if start is None else [counter for _, counter in self._each(start)]
        how: dict[str, Any] = {"training": training, "generator": generator, "padding": padding}
        parts = self.layers.coordinates(stream, start=begin, **how)
        following = torch.stack([c.next for c in parts], 1)
        return Coordinates(torch.cat([c.ids for c in parts]), stream.mask, following, self)

    def options(self) -> dict[str, object]:
        """Return the schemes and their assignment to layers, as read by `scheme_of`."""
        schemes = [{"name": s.name, **s.options()} for s in self.layers.schemes]
        return {"schemes": schemes, "of_layer": list(self.layers.of_layer)}

    def __str__(self) -> str:
        return str(self.layers)

    def _each(self, counter: Tensor) -> list[tuple[Scheme, Tensor]]:
        counters = counter.unbind(1) if counter.ndim == 2 else [counter] * self.counts
        return list(zip(self.layers.schemes, counters, strict=True))


def scheme_of(spec: Any, **options: Any) -> Scheme:
    """Return the scheme of a spec, as `create_scheme`, or of per-layer schemes: `PerLayerSchemes` or their options."""
    record: Mapping[str, Any] = cast("Mapping[str, Any]", spec) if isinstance(spec, Mapping) else {}
    if record.get("name") == ConcatenatedScheme.name:
        schemes = tuple(create_scheme(one) for one in record["schemes"])
        layered = ConcatenatedScheme(PerLayerSchemes(schemes, tuple(record["of_layer"])))
    elif isinstance(spec, PerLayerSchemes | ConcatenatedScheme):
        layered = spec if isinstance(spec, ConcatenatedScheme) else ConcatenatedScheme(spec)
    else:
        return create_scheme(cast("str | Mapping[str, Any] | Scheme", spec), **options)
    if options:
        raise UnsupportedCombination(
            f"Options ({', '.join(options)}) cannot be combined with per-layer schemes. Pass them to the schemes."
        )
    return layered
