"""Interface of measures: `Measure`, the `Accumulator` of its sums over images, and its `Outcome`.

A measure is a file in `vispe/evaluate/attention`, `features` or `behaviour`: pure functions of tensors,
followed by a subclass of `Measure`, which `vispe.evaluate.audit.measures` finds by its folder. `papers` lists
the papers that it follows. Controls run the same measure on another model (random weights, or without the
encoding), so they need no code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from vispe.evaluate.measure.audited_model import AuditedModel, Need

if TYPE_CHECKING:
    from vispe.backbones.attention_recorder import LayerAttention
    from vispe.evaluate.measure.perturbed_runs import PerturbedRuns

Family = Literal["attention", "features", "behaviour"]
Control = Literal["random", "none"]

FAMILIES: tuple[Family, ...] = ("features", "attention", "behaviour")
GROUPS = 8
"""Number of groups of images; intervals of statistics that are not means over images resample groups."""


@dataclass
class Accumulator:
    """State of a measure: a small record per image, and sums over images, so that memory does not grow.

    Attributes:
        records: one dict per image, with numbers or lists of numbers by name.
        sums: float tensors on the CPU, summed over images.
        scratch: temporary values of the current image.
        number: index of the current image.
    """

    records: list[dict[str, Any]] = field(default_factory=list)
    sums: dict[str, Tensor] = field(default_factory=dict)
    scratch: dict[str, Any] = field(default_factory=dict)
    number: int = 0

    def begin(self, number: int) -> None:
        """Start the record of an image, given its index among all images."""
        self.number, self.scratch = number, {}
        self.records.append({})

    def note(self, **values: Any) -> None:
        """Store numbers or arrays in the record of the current image."""
        self.records[-1].update({name: _plain(value) for name, value in values.items()})

    def layer(self, **values: Any) -> None:
        """Append the number or array of a layer to a list in the record of the current image."""
        for name, value in values.items():
            self.records[-1].setdefault(name, []).append(_plain(value))

    def add(self, name: str, value: Tensor, *, groups: bool = False) -> None:
        """Add a tensor to a sum over images; with `groups`, to the row of the image's group in (GROUPS, ...)."""
        value = value.detach().cpu()
        shape = (GROUPS, *value.shape) if groups else value.shape
        total = self.sums.setdefault(name, torch.zeros(shape, dtype=value.dtype))
        (total[self.number % GROUPS] if groups else total).add_(value)

    def column(self, name: str) -> np.ndarray:
        """Return the recorded values of a name, (images, ...) float64."""
        return np.array([record[name] for record in self.records], dtype=np.float64)

    def join(self, other: Accumulator) -> None:
        """Merge the accumulator of other images, in order."""
        self.records.extend(other.records)
        for name, value in other.sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value


@dataclass(frozen=True)
class Outcome:
    """Result of a measure for one model.

    Attributes:
        value: the headline.
        per_image: value for every image; empty if it is only defined for all images together.
        per_layer: value after every layer; empty if it is not defined for layers.
        control: known values in the absence of the effect, by name, which need no run of a control.
        statistic: maps indices of resampled units (with replacement) to the value; by default the mean of `per_image`.
        units: number of units to resample; by default the number of images, at most `GROUPS` for sums by group.
        note: a caveat in one sentence.
        details: further JSON values.
    """

    value: float
    per_image: Sequence[float] = ()
    per_layer: Sequence[float] = ()
    control: dict[str, float] = field(default_factory=dict)
    statistic: Callable[[np.ndarray], float] | None = None
    units: int | None = None
    note: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    def drawn(self, picks: np.ndarray) -> np.ndarray:
        """Return the value for each bootstrap draw, indices (draws, units) -> (draws,)."""
        if self.statistic is not None:
            return np.array([self.statistic(pick) for pick in picks])
        return np.asarray(self.per_image, dtype=np.float64)[picks].mean(1)

    @property
    def n(self) -> int:
        """Number of units that are resampled."""
        return len(self.per_image) if self.units is None else self.units


@dataclass(frozen=True)
class Measure:
    """A measure of a model. Options are dataclass fields; the state is an `Accumulator`.

    Override `on_layer` for attention layers, `on_features` for final features, `rerun` for perturbed images, and
    `summarize`.

    Attributes:
        name: used on the command line and in JSON.
        family: attention, features or behaviour.
        question: the question, in one sentence.
        number: meaning of the headline, in a few words.
        misleads: cases in which the number is wrong or harmless, in one sentence.
        papers: papers that the measure follows, each "Title" or "Title, https://..."; empty for vispe's own
            measures.
        needs: required capabilities of the model, see `AuditedModel.can`.
        controls: control models that the verdict compares with.
        reported_controls: control models that are reported, but do not count for the verdict, because they
            may have the effect as well.
        layered: whether `on_layer` only adds a curve over layers, which control runs can skip.
        default: whether `vispe audit` runs the measure by default.
        items: number of images that the measure generates itself; 0 to use the images of the audit.
        order: position in the report, within the family; measures without one come last, by name.
        limit: min excess over the largest control for a verdict of yes; chosen by us, above the values of random
            weights without an encoding.
    """

    name: ClassVar[str]
    family: ClassVar[Family]
    question: ClassVar[str]
    number: ClassVar[str]
    misleads: ClassVar[str]
    papers: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[frozenset[Need]] = frozenset()
    controls: ClassVar[tuple[Control, ...]] = ()
    reported_controls: ClassVar[tuple[Control, ...]] = ()
    layered: ClassVar[bool] = False
    default: ClassVar[bool] = True
    items: ClassVar[int] = 0
    order: ClassVar[int] = 100
    limit: ClassVar[float] = 0.05

    def on_layer(self, acc: Accumulator, captured: LayerAttention) -> None:
        """Accumulate one attention layer in the forward pass of one image."""

    def on_features(self, acc: Accumulator, maps: Tensor) -> None:
        """Accumulate the final features of one image, (d, h, w)."""

    def rerun(self, acc: Accumulator, runs: PerturbedRuns) -> None:
        """Accumulate outputs for perturbed versions of one image."""

    def summarize(self, acc: Accumulator, audited: AuditedModel) -> Outcome:
        """Return the result for all images.

        Raises:
            UnsupportedHost: the measure is not defined for the model or the images.
        """
        raise NotImplementedError


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return value.tolist()
    return value
