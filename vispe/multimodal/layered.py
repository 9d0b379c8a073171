"""Schemes of layers as one scheme, so that a model can carry the coordinates of all of them at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from vispe.errors import UnsupportedCombination
from vispe.multimodal.layers import LayerSchemes
from vispe.multimodal.registry import create_scheme
from vispe.multimodal.scheme import Coordinates, Scheme
from vispe.multimodal.streams.token_stream import Stream


@dataclass(frozen=True)
class Layered(Scheme):
    """The schemes of `LayerSchemes` side by side: axes of the first, then those of the second, and so on.

    Each scheme goes on from a counter of its own, so counters are (b, k).

    Args:
        layers: which layer takes which scheme.

    Raises:
        UnsupportedCombination: the counter of a scheme holds several numbers.

    Example:
        >>> from vispe.multimodal import Image, Text, alternating
        >>> both = Layered(alternating(["circlerope", "mrope"], 4))
        >>> found = both.coordinates(Stream.of([[Text(2), Image(2, 2), Text(1)]]))
        >>> found.ids.shape, found.next.shape
        (torch.Size([6, 1, 7]), torch.Size([1, 2]))
    """

    name: ClassVar[str] = "layers"
    summary: ClassVar[str] = "A scheme for each layer."
    levels: ClassVar[int] = 2  # counters, at least

    layers: LayerSchemes

    def __post_init__(self) -> None:
        several = [scheme.name for scheme in self.layers.schemes if scheme.levels > 1]
        if several:
            raise UnsupportedCombination(
                f"The counter of {several[0]} holds several numbers, so it does not go with schemes of other layers; "
                "give one scheme to all layers."
            )

    @property
    def parts(self) -> tuple[tuple[Scheme, int], ...]:
        """Each scheme, and which axis is its first."""
        firsts = [0]
        for scheme in self.layers.schemes[:-1]:
            firsts.append(firsts[-1] + scheme.axes)
        return tuple(zip(self.layers.schemes, firsts, strict=True))

    @property
    def axes(self) -> int:
        """How many coordinates a token has, of all schemes together."""
        return sum(scheme.axes for scheme in self.layers.schemes)

    @property
    def counts(self) -> int:
        """How many counters there are."""
        return len(self.layers.schemes)

    @property
    def added(self) -> tuple[int, ...]:
        """Axes that turn no channels."""
        return tuple(first + axis for scheme, first in self.parts for axis in scheme.added)

    def going_on(self, number: Tensor, counter: Tensor) -> Tensor:
        """Return the coordinates (axes, b, s) of text behind counters (b, k), or (b) where all are alike."""
        return torch.cat([s.going_on(number, c) for s, c in self._each(counter)])

    def counted_on(self, counter: Tensor, tokens: Tensor) -> Tensor:
        """Return the counters (b, k) after so many text tokens (b)."""
        return torch.stack([s.counted_on(c, tokens) for s, c in self._each(counter)], 1)

    def counter(self, ids: Tensor) -> Tensor:
        """Return the counters (b, k) at which text has the coordinates (axes, b)."""
        return torch.stack([s.counter(ids[first : first + s.axes]) for s, first in self.parts], 1)

    def allocation(self, pairs: int, kv_heads: int = 1) -> Tensor:
        """Raise `UnsupportedCombination`: it depends on the layer."""
        raise UnsupportedCombination(
            f"Which axis a pair of channels reads depends on the layer ({self.layers}); ask the scheme of a layer."
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
        """Return the coordinates under all schemes (axes, b, s), see `Scheme.coordinates`; each draws for itself."""
        if draws is not None:
            raise UnsupportedCombination(
                "Schemes of layers draw each for itself; give a generator instead of draws."
            )
        begin = None if start is None else [counter for _, counter in self._each(start)]
        how: dict[str, Any] = {"training": training, "generator": generator, "padding": padding}
        found = self.layers.coordinates(stream, start=begin, **how)
        following = torch.stack([c.next for c in found], 1)
        return Coordinates(torch.cat([c.ids for c in found]), stream.mask, following, self)

    def options(self) -> dict[str, object]:
        """Return the schemes and which layer takes which, as `scheme_of` reads them."""
        schemes = [{"name": s.name, **s.options()} for s in self.layers.schemes]
        return {"schemes": schemes, "of_layer": list(self.layers.of_layer)}

    def __str__(self) -> str:
        return str(self.layers)

    def _each(self, counter: Tensor) -> list[tuple[Scheme, Tensor]]:
        own = counter.unbind(1) if counter.ndim == 2 else [counter] * self.counts
        return list(zip(self.layers.schemes, own, strict=True))


def scheme_of(spec: Any, **options: Any) -> Scheme:
    """Return the scheme of a spec, as `create_scheme`, or of schemes of layers: `LayerSchemes`, or their record."""
    record: Mapping[str, Any] = cast("Mapping[str, Any]", spec) if isinstance(spec, Mapping) else {}
    if record.get("name") == Layered.name:
        schemes = tuple(create_scheme(one) for one in record["schemes"])
        layered = Layered(LayerSchemes(schemes, tuple(record["of_layer"])))
    elif isinstance(spec, LayerSchemes | Layered):
        layered = spec if isinstance(spec, Layered) else Layered(spec)
    else:
        return create_scheme(cast("str | Mapping[str, Any] | Scheme", spec), **options)
    if options:
        raise UnsupportedCombination(
            f"Options ({', '.join(options)}) were given beside schemes of layers; give them to the schemes."
        )
    return layered
