"""Position schemes per layer: `PerLayerSchemes`, `alternating` (Circle-RoPE's AGE) and `pyramid` (PyPE)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vispe.errors import OptionError, ShapeError, counted, is_integer
from vispe.multimodal.coordinates import Coordinates
from vispe.multimodal.registry import create_scheme
from vispe.multimodal.scheme import Scheme
from vispe.multimodal.streams.token_stream import Stream


@dataclass(frozen=True)
class PerLayerSchemes:
    """Position schemes of a model with different schemes in different layers.

    Each scheme has a separate counter: text after an image may be at different positions in different layers, and
    generation continues from there. Keys are cached as rotated by their layer, so decoding is exact in every layer.

    Attributes:
        schemes: the distinct schemes.
        of_layer: index of the scheme of each layer.

    Raises:
        OptionError: there are no layers, an index is invalid, or a scheme has no layer.

    Example:
        >>> from vispe.multimodal import Image, Stream, Text
        >>> layers = alternating(["circlerope", "mrope"], 4)
        >>> [layers.scheme(i).name for i in range(4)]
        ['circlerope', 'mrope', 'circlerope', 'mrope']
        >>> coordinates = layers.coordinates(Stream.of([[Text(2), Image(2, 2), Text(1)]]))
        >>> coordinates[layers.of_layer[3]].ids.shape
        torch.Size([3, 1, 7])
    """

    schemes: tuple[Scheme, ...]
    of_layer: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.of_layer or set(self.of_layer) != set(range(len(self.schemes))):
            raise OptionError(
                f"of_layer needs the index of a scheme, 0 to {len(self.schemes) - 1}, for each layer, and each scheme "
                f"a layer, got of_layer={list(self.of_layer)} for {counted(len(self.schemes), 'scheme')}."
            )

    def scheme(self, layer: int) -> Scheme:
        """Return the scheme of a layer, counted from 0.

        Raises:
            OptionError: the layer does not exist.
        """
        if not is_integer(layer) or not 0 <= layer < len(self.of_layer):
            raise OptionError(f"The model has layers 0 to {len(self.of_layer) - 1}, got layer={layer!r}.")
        return self.schemes[self.of_layer[layer]]

    @property
    def text_exact(self) -> bool:
        """Whether all layers encode pure text exactly as 1D RoPE."""
        return all(scheme.text_exact for scheme in self.schemes)

    def coordinates(
        self,
        stream: Stream,
        *,
        start: Sequence[Tensor] | None = None,
        training: bool = False,
        generator: torch.Generator | None = None,
        padding: float = 0,
    ) -> tuple[Coordinates, ...]:
        """Return the coordinates of every token of a stream, for each scheme.

        Args:
            stream: the token stream.
            start: for each scheme, the counter from which the first sample of each row continues (b), which
                is `Coordinates.next` of the preceding tokens; 0 by default.
            training: whether random schemes draw, each separately.
            generator: source of the draws; the global generator by default.
            padding: coordinate of padding tokens.

        Raises:
            ShapeError: the number of counters differs from that of schemes.
            UnsupportedCombination: a scheme does not support the stream.
        """
        if start is not None and len(start) != len(self.schemes):
            raise ShapeError(
                f"start needs the counters of each of {counted(len(self.schemes), 'scheme')}, got {len(start)}. Pass "
                "[c.next for c in coordinates]."
            )
        begin = [None] * len(self.schemes) if start is None else start
        how: dict[str, Any] = {"training": training, "generator": generator, "padding": padding}
        return tuple(
            scheme.coordinates(stream, start=at, **how)
            for scheme, at in zip(self.schemes, begin, strict=True)
        )

    def __str__(self) -> str:
        return "; ".join(
            f"{scheme}: layers {', '.join(str(i) for i, of in enumerate(self.of_layer) if of == number)}"
            for number, scheme in enumerate(self.schemes)
        )


def alternating(specs: Sequence[str | Mapping[str, Any] | Scheme], layers: int) -> PerLayerSchemes:
    """Assign spec ``i mod n`` of n to layer i.

    ``alternating(['circlerope', 'mrope'], layers)`` is the alternating geometry encoding (AGE) of Circle-RoPE (arXiv
    2505.16416): circles in even layers, the plain grid in odd ones. Each scheme has a separate counter for text after
    an image; whether the authors' code has one counter for both was not verified.

    Args:
        specs: names or specs of schemes, or schemes.
        layers: number of layers of the language model.

    Raises:
        OptionError: there are fewer layers than specs, or a spec is invalid.
        UnknownName: a scheme does not exist.

    Example:
        >>> layers = alternating(["circlerope", "mrope"], 4)
        >>> [layers.scheme(i).name for i in range(4)]
        ['circlerope', 'mrope', 'circlerope', 'mrope']
    """
    _check_whole(layers=layers)
    if isinstance(specs, str | Mapping) or not 0 < len(specs) <= layers:
        raise OptionError(
            f"alternating needs a list of schemes, at most one for each of {counted(layers, 'layer')}, got {specs!r}."
        )
    return _of_layers([create_scheme(specs[i % len(specs)]) for i in range(layers)])


def pyramid(layers: int, rings: int, every: int) -> PerLayerSchemes:
    """Assign PyPE to layers with one ring fewer every few layers, so that the central region grows (arXiv 2501.10967).

    Layer i has ``pype(rings=max(rings - i // every, 1))``.

    Implemented from the paper's description: the decrease by one ring was not compared with the authors'
    code. Their values of `rings` and `every` are unknown, so there are no defaults.

    Args:
        layers: number of layers of the language model.
        rings: number of rings in the first layer, the maximum.
        every: number of consecutive layers with the same number of rings.

    Raises:
        OptionError: a number is not an integer above 0.

    Example:
        >>> layers = pyramid(4, rings=3, every=2)
        >>> [layers.scheme(i).rings for i in range(4)]
        [3, 3, 2, 2]
    """
    _check_whole(layers=layers, rings=rings, every=every)
    return _of_layers([create_scheme("pype", rings=max(rings - i // every, 1)) for i in range(layers)])


def _of_layers(each: Sequence[Scheme]) -> PerLayerSchemes:
    schemes = list(dict.fromkeys(each))
    return PerLayerSchemes(tuple(schemes), tuple(schemes.index(scheme) for scheme in each))


def _check_whole(**numbers: int) -> None:
    """Raise `OptionError` unless all numbers are integers above 0."""
    for name, value in numbers.items():
        if not is_integer(value) or value < 1:
            raise OptionError(f"{name} needs an integer above 0, got {name}={value!r}.")
