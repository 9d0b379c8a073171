"""Record of a position scheme in a converted language model, and its description."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from vispe.errors import counted
from vispe.hosts.transformers.language.families import language_model_of, model_inside
from vispe.hosts.transformers.language.parallel_sets import Parallel
from vispe.hosts.transformers.language.rotary_detection import DetectedRotary, kinds_of
from vispe.hosts.transformers.subclasses import stock_of
from vispe.multimodal import Scheme
from vispe.multimodal.concatenated_scheme import ConcatenatedScheme


@dataclass(frozen=True, eq=False)
class TextConversion:
    """Settings of a converted language model, its attribute `vispe_text`; copied and pickled with the model.

    Attributes:
        scheme: the position scheme.
        rotary: rotary embedding of the stock model, for each kind of layers.
        allocation: values of the buffer of each kind of layers, the axis of each pair of channels, as plain numbers.
        late_rotation: whether queries and keys are rotated inside the attention.
        parallel: method that makes adjacent images unordered, if any.
        self_extend: group and window of grouped positions, if any.
        all_positions: whether layers need the rotation of cached tokens as well, as their indexers rotate cached keys.
        first: position of the first token in the stock model.
        prefix_lm: whether all tokens of a prompt attend to each other.
    """

    scheme: Scheme
    rotary: dict[str, DetectedRotary]
    allocation: dict[str, list[Any]]
    late_rotation: bool
    parallel: Parallel | None
    self_extend: tuple[int, int] | None
    first: int = 0
    all_positions: bool = False
    prefix_lm: bool = False

    @property
    def caches_coordinates(self) -> bool:
        """Whether the coordinates of cached tokens are stored with the cache."""
        return self.late_rotation or self.all_positions

    @property
    def of_keys(self) -> tuple[Any, ...]:
        """Settings that determine the keys in a KV cache, and how they are read."""
        return self.scheme, self.late_rotation, self.parallel


def schemes_of(scheme: Scheme) -> list[tuple[int | None, Scheme, int]]:
    """Return (index, scheme, first axis) of each scheme of layers; the index is None for one scheme of all layers."""
    if isinstance(scheme, ConcatenatedScheme):
        return [(number, *part) for number, part in enumerate(scheme.parts)]
    return [(None, scheme, 0)]


def kind_key(kind: str, number: int | None) -> str:
    """Return the key of layers of one kind and scheme; the kind itself where one scheme is used in all layers."""
    return kind if number is None else f"{kind}{number}"


def describe_vlm(model: nn.Module) -> str:
    """Return a summary of the conversion of a vision-language model."""
    inner: Any = model_inside(model)
    if stock_of(type(inner)) is None:
        return f"{type(model).__name__}: its own position scheme"
    text = language_model_of(inner)
    lines = [
        _allocation(
            part, first, _layers_of(kind, number, part), text.vispe_text.allocation[kind_key(kind, number)]
        )
        for number, part, first in schemes_of(inner.vispe_scheme)
        for kind in dict.fromkeys(kinds_of(text))
    ]
    rotated = (
        "queries and keys inside the attention"
        if text.vispe_text.late_rotation
        else "keys before they are cached"
    )
    return (
        f"{type(model).__name__}: {inner.vispe_scheme} in {counted(len(text.layers), 'decoder layer')}\n"
        f"{''.join(lines)}  rotates {rotated}{_options_text(text)}"
    )


def _layers_of(kind: str, number: int | None, scheme: Scheme) -> str:
    """Return a description of some layers by kind and scheme; empty for all layers."""
    names = [*([kind] if kind else []), *([] if number is None else [scheme.name])]
    return f" in layers of {' with '.join(names)}" if names else ""


def _allocation(scheme: Scheme, first: int, layers: str, axes: list[Any]) -> str:
    """Return a line with the axis of each pair or head in some layers; `first` is the first axis of their scheme."""
    by_head = isinstance(axes[0], list)
    labels = scheme.axis_names or (("t", "h", "w") if scheme.axes == 3 else ())
    names = {-1: "-", **dict(enumerate(labels))}
    each = [row[0] for row in axes] if by_head else axes
    in_scheme = [a - first if a >= 0 else a for a in each]
    line = " ".join(names.get(a, str(a)) for a in in_scheme)
    unrotated = any(a < 0 for row in (axes if by_head else [axes]) for a in row)
    line += " (-: not rotated)" if unrotated else ""
    unit = "key head" if by_head else "pair of channels, from the highest frequency"
    unit = "channel" if scheme.options().get("layout") == "elementwise" else unit
    return f"  axis of each {unit}{layers}: {line}\n"


def _options_text(text: Any) -> str:
    """Return a line with the options of a conversion besides the scheme, if any."""
    if text.vispe_text.self_extend is not None:
        return "\n  self_extend: groups of {} from {} positions on".format(*text.vispe_text.self_extend)
    return (
        ""
        if text.vispe_text.parallel is None
        else f"\n  adjacent images have no order: {text.vispe_text.parallel}"
    )
