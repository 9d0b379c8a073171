"""A scheme for each layer: which layers of a language model take which position scheme (Circle-RoPE's AGE, PyPE)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vispe.errors import OptionError, ShapeError, is_whole
from vispe.multimodal.registry import create_scheme
from vispe.multimodal.scheme import Coordinates, Scheme
from vispe.multimodal.streams.token_stream import Stream


@dataclass(frozen=True)
class LayerSchemes:
    """Position schemes of a model whose layers do not all take the same one.

    Each scheme has a counter of its own: text after a picture may stand at another position in another layer, and goes
    on from there when the model writes. A key is cached as its own layer turns it, so decoding is right layer by layer.

    Attributes:
        schemes: the schemes, each once.
        of_layer: number of the scheme of each layer.

    Raises:
        OptionError: there is no layer, or a layer names a scheme that is not there, or a scheme has no layer.

    Example:
        >>> from vispe.multimodal import Image, Stream, Text
        >>> layers = alternating(["circlerope", "mrope"], 4)
        >>> [layers.scheme(i).name for i in range(4)]
        ['circlerope', 'mrope', 'circlerope', 'mrope']
        >>> found = layers.coordinates(Stream.of([[Text(2), Image(2, 2), Text(1)]]))
        >>> found[layers.of_layer[3]].ids.shape
        torch.Size([3, 1, 7])
    """

    schemes: tuple[Scheme, ...]
    of_layer: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.of_layer or set(self.of_layer) != set(range(len(self.schemes))):
            raise OptionError(
                f"of_layer needs the number of a scheme, 0 to {len(self.schemes) - 1}, for each layer, and each scheme "
                f"a layer; got of_layer={list(self.of_layer)} for {len(self.schemes)} schemes."
            )

    def scheme(self, layer: int) -> Scheme:
        """Return the scheme of a layer, counted from 0.

        Raises:
            OptionError: there is no such layer.
        """
        if not is_whole(layer) or not 0 <= layer < len(self.of_layer):
            raise OptionError(f"The model has layers 0 to {len(self.of_layer) - 1}, got layer={layer!r}.")
        return self.schemes[self.of_layer[layer]]

    @property
    def text_exact(self) -> bool:
        """Whether all layers encode text alone as by rotary embedding of one position."""
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
        """Return the coordinates of every token of a stream, once for each scheme.

        Args:
            stream: what stands where.
            start: for each scheme the counter that the first sample of each row goes on from (b), as `Coordinates.next`
                of what came before; 0 by default.
            training: whether schemes that draw at random do so, each for itself.
            generator: for what is drawn; the global one by default.
            padding: coordinate of tokens that are padding.

        Raises:
            ShapeError: there is not one counter for each scheme.
            UnsupportedCombination: a scheme has no rule for such a stream.
        """
        if start is not None and len(start) != len(self.schemes):
            raise ShapeError(
                f"start needs the counters of each of {len(self.schemes)} schemes, got {len(start)}; give "
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


def alternating(specs: Sequence[str | Mapping[str, Any] | Scheme], layers: int) -> LayerSchemes:
    """Let layer i take spec ``i mod n`` of n.

    ``alternating(['circlerope', 'mrope'], layers)`` is the alternating geometry encoding (AGE) of Circle-RoPE (arXiv
    2505.16416): even layers see the circle, odd ones the plain grid. Where text goes on after a picture is each
    scheme's own affair here; whether the authors' code has one counter for both was not verified.

    Args:
        specs: names or specs of schemes, or schemes.
        layers: of the language model.

    Raises:
        OptionError: there are fewer layers than specs, or a spec is not right.
    """
    _check_whole(layers=layers)
    if isinstance(specs, str | Mapping) or not 0 < len(specs) <= layers:
        raise OptionError(
            f"alternating needs a list of schemes, at most one for each of {layers} layers; got {specs!r}."
        )
    return _of_layers([create_scheme(specs[i % len(specs)]) for i in range(layers)])


def pyramid(layers: int, rings: int, every: int) -> LayerSchemes:
    """Let pictures have one ring less every few layers, so that the middle grows: PyPE (arXiv 2501.10967).

    Layer i takes ``pype(rings=max(rings - i // every, 1))``.

    Written from the paper's description: that it is one ring less each time was not compared with the authors' code,
    nor does vispe know their numbers, so there are no defaults.

    Args:
        layers: of the language model.
        rings: at most, in the first layer.
        every: layers that have the same number of rings.

    Raises:
        OptionError: a number is not whole and above 0.
    """
    _check_whole(layers=layers, rings=rings, every=every)
    return _of_layers([create_scheme("pype", rings=max(rings - i // every, 1)) for i in range(layers)])


def _of_layers(each: Sequence[Scheme]) -> LayerSchemes:
    """Return the description of a scheme for each layer."""
    schemes = list(dict.fromkeys(each))
    return LayerSchemes(tuple(schemes), tuple(schemes.index(scheme) for scheme in each))


def _check_whole(**numbers: int) -> None:
    """Raise `OptionError` unless all numbers are whole and above 0."""
    for name, value in numbers.items():
        if not is_whole(value) or value < 1:
            raise OptionError(f"{name} needs a whole number above 0, got {name}={value!r}.")
