"""Record of a position scheme in a converted language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vispe.hosts.transformers.language.parallel_sets import Parallel
from vispe.hosts.transformers.language.rotary_detection import DetectedRotary
from vispe.multimodal import Scheme


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
    """

    scheme: Scheme
    rotary: dict[str, DetectedRotary]
    allocation: dict[str, list[Any]]
    late_rotation: bool
    parallel: Parallel | None
    self_extend: tuple[int, int] | None
    first: int = 0
    all_positions: bool = False

    @property
    def caches_coordinates(self) -> bool:
        """Whether the coordinates of cached tokens are stored with the cache."""
        return self.late_rotation or self.all_positions
