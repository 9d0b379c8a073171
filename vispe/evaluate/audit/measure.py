"""What a measure is: a question, what it keeps of every image, and what follows from that.

A measure is one small file in `vispe/evaluate/attention`, `features` or `behaviour`: pure functions of tensors, and a
class derived from `Measure` under them. It is found by its folder. Controls are measures of something else: of random
weights, of the model without its encoding; they run through the same code and need none of their own.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from vispe.errors import UnknownName, did_you_mean
from vispe.evaluate.audit.audited_model import Host, Need

if TYPE_CHECKING:
    from vispe.backbones.attention_recorder import Seen
    from vispe.evaluate.behaviour.perturbed_runs import Reruns

Family = Literal["attention", "features", "behaviour"]
View = Literal["random", "none"]

FAMILIES: tuple[Family, ...] = ("features", "attention", "behaviour")
GROUPS = 8
"""Parts into which images are dealt where an interval needs sums without some of them."""


@dataclass
class Kept:
    """What a measure keeps: a small record of every image, and sums over images. Nothing else grows.

    Attributes:
        records: of every image, numbers or lists of numbers by name.
        sums: float tensors on the CPU, added over images.
        scratch: what is needed until the image is over.
    """

    records: list[dict[str, Any]] = field(default_factory=list)
    sums: dict[str, Tensor] = field(default_factory=dict)
    scratch: dict[str, Any] = field(default_factory=dict)
    number: int = 0

    def begin(self, number: int) -> None:
        """Begin the record of an image, by its number among all images."""
        self.number, self.scratch = number, {}
        self.records.append({})

    def note(self, **values: Any) -> None:
        """Write numbers or arrays into the record of the image."""
        self.records[-1].update({name: _plain(value) for name, value in values.items()})

    def layer(self, **values: Any) -> None:
        """Append the number or array of a layer to a list in the record of the image."""
        for name, value in values.items():
            self.records[-1].setdefault(name, []).append(_plain(value))

    def add(self, name: str, value: Tensor, *, groups: bool = False) -> None:
        """Add a tensor to a sum over images; with `groups` to that of the image's group, (GROUPS, ...)."""
        value = value.detach().cpu()
        shape = (GROUPS, *value.shape) if groups else value.shape
        total = self.sums.setdefault(name, torch.zeros(shape, dtype=value.dtype))
        (total[self.number % GROUPS] if groups else total).add_(value)

    def column(self, name: str) -> np.ndarray:
        """Return the numbers of a name, (images, ...) float64."""
        return np.array([record[name] for record in self.records], dtype=np.float64)

    def join(self, other: Kept) -> None:
        """Add what was kept of the images that follow."""
        self.records.extend(other.records)
        for name, value in other.sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value


@dataclass(frozen=True)
class Outcome:
    """What follows from what was kept.

    Attributes:
        value: the headline.
        per_image: its value for every image; empty where only all images together have one.
        per_layer: its value after every layer; empty where layers have none.
        control: values that it would have without the effect, by name, where they are known without another pass.
        statistic: called with the numbers of units that were drawn, with replacement, gives the value for them; by
            default the mean of `per_image`.
        units: of what is drawn; by default the images. `GROUPS` where sums are kept by group.
        note: what else must be said beside the number; a sentence.
        details: further numbers, as JSON has them.
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
        """Return the value for each draw of units, (draws, units) numbers -> (draws,)."""
        if self.statistic is not None:
            return np.array([self.statistic(pick) for pick in picks])
        return np.asarray(self.per_image, dtype=np.float64)[picks].mean(1)

    @property
    def n(self) -> int:
        """Number of units that can be drawn."""
        return len(self.per_image) if self.units is None else self.units


@dataclass(frozen=True)
class Measure:
    """A question about a model. Options are fields; what it keeps of images goes into a `Kept`.

    Attributes:
        name: by which it is asked for.
        family: what it reads.
        asks: the question, in one sentence.
        number: what the headline is, in a few words.
        misleads: when the number is wrong or harmless, in one sentence.
        needs: what the model must give.
        controls: other passes that its number is compared with.
        beside: other passes whose number is printed and does not count: it may have the effect as well.
        layered: whether it looks at layers for a curve alone, which controls can do without.
        default: whether `vispe audit` asks it by itself.
        items: how many pictures of its own it looks at in place of images; 0 for images.
    """

    name: ClassVar[str]
    family: ClassVar[Family]
    asks: ClassVar[str]
    number: ClassVar[str]
    misleads: ClassVar[str]
    needs: ClassVar[frozenset[Need]] = frozenset()
    controls: ClassVar[tuple[View, ...]] = ()
    beside: ClassVar[tuple[View, ...]] = ()
    layered: ClassVar[bool] = False
    default: ClassVar[bool] = True
    items: ClassVar[int] = 0

    def see(self, kept: Kept, seen: Seen) -> None:
        """Look at one attention layer while one image passes."""

    def end(self, kept: Kept, maps: Tensor) -> None:
        """Look at the final features of the image, (d, h, w)."""

    def ask(self, kept: Kept, reruns: Reruns) -> None:
        """Run the model again, on changed pictures."""

    def finish(self, kept: Kept, host: Host) -> Outcome:
        """Return what follows from all images."""
        raise NotImplementedError


@cache
def all_measures() -> dict[str, type[Measure]]:
    """Return every measure by its name, in the order of the page: family by family, then by `ORDER`."""
    for family in FAMILIES:
        package = importlib.import_module(f"vispe.evaluate.{family}")
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{module.name}")
    found = {kind.name: kind for kind in Measure.__subclasses__() if kind.__module__.startswith("vispe.")}
    place = {name: k for k, name in enumerate(ORDER)}
    ranked = sorted(found, key=lambda n: (FAMILIES.index(found[n].family), place.get(n, len(place)), n))
    return {name: found[name] for name in ranked}


ORDER = (
    *("probe", "pattern", "neighbours", "spectrum", "channels", "read_or_used"),
    *("heads", "place_in_logits", "bands", "prior", "mask"),
    *("shift", "turn", "strips", "order", "sides"),
)


def choose(only: Sequence[str] | None = None) -> list[Measure]:
    """Return the measures that are asked: those of names or families, or by default those of the page.

    Raises:
        UnknownName: there is no such measure or family.

    >>> [m.name for m in choose(["probe"])]
    ['probe']
    """
    known = all_measures()
    if only is None:
        return [kind() for kind in known.values() if kind.default]
    for name in only:
        if name not in known and name not in FAMILIES:
            names = [*FAMILIES, *known]
            raise UnknownName(
                f"There is no measure or family {name!r}.{did_you_mean(name, names)} They are {', '.join(names)}."
            )
    return [k() for k in known.values() if k.name in only or (k.family in only and k.default)]


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return value.tolist()
    return value
