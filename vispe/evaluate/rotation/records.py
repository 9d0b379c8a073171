"""Records with one value per image, and their metrics."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vispe.errors import ShapeError, UnknownName
from vispe.evaluate.rotation.record_key import FULL, Key
from vispe.utils.report.statistics import Better, Summary, summarise
from vispe.utils.report.table import json_entries, json_list, json_value


@dataclass(frozen=True)
class Metric:
    """Description of a metric.

    Attributes:
        title: name in tables.
        better: which values are good.
        chance: value for unrelated maps or labels; None if it depends on the data.
    """

    title: str
    better: Better
    chance: float | None = None


METRICS = {
    "error": Metric("equivariance error (centred)", "low", 2**0.5),
    "error_uncentred": Metric("equivariance error (uncentred)", "low"),
    "cosine": Metric("1 - cosine", "low", 1.0),
    "cosine_centred": Metric("1 - cosine (centred)", "low", 1.0),
    "cka": Metric("linear CKA", "high"),
    "subspace": Metric("principal subspace overlap", "high"),
    "rank": Metric("right nearest neighbour", "high"),
    "invariant_share": Metric("invariant share", "high"),
    "r2": Metric("held-out R² of position", "low", 0.0),
    "snr": Metric("fingerprint SNR", "low", 1.0),
    "lie": Metric("Lie derivative (relative)", "low"),
    "miou": Metric("consistency mIoU", "high"),
    "ari": Metric("consistency ARI", "high", 0.0),
    "accuracy": Metric("mIoU against the truth", "high"),
    "accuracy_mean": Metric("mIoU, mean over poses", "high"),
    "accuracy_worst": Metric("mIoU, worst pose", "high"),
    "accuracy_spread": Metric("mIoU, best minus worst pose", "low"),
    "accuracy_std": Metric("mIoU, standard deviation over poses", "low"),
    "phase_spread": Metric("phase fraction spread (pp)", "low"),
    "phase_error": Metric("phase fraction, furthest from the truth (pp)", "zero"),
    "quadrant_gap": Metric("quadrant gap in mIoU", "high", 0.0),
    "argmax": Metric("same predicted class", "high"),
    "score_change": Metric("mean squared change of the scores", "low"),
}
"""All metrics of a `Measurement`."""


_UNKNOWN = Key("", "")


@dataclass(frozen=True, eq=False)
class Measurement:
    """A record: one metric under one transform, for every image.

    Attributes:
        transform: transform of the image: 'rot90', 'D4' (mean over its elements except the identity), '15°' ...
        metric: a key of `METRICS`.
        values: (n,) float64, one per image in order; NaN if it is not defined for an image.
        part: 'full', 'position code', 'layer 3', or the name of a class or of a control.
        control: whether the record is a control.
        floors: (n,) by name: effect of resampling alone.
        key: structured key, printed as transform, metric and part.

    Raises:
        UnknownName: an unknown metric.
        ShapeError: values and floors have different lengths.

    Example:
        >>> Measurement("rot90", "error", np.array([0.1, 0.3])).summary().mean
        0.2
    """

    transform: str
    metric: str
    values: np.ndarray
    part: str = FULL
    control: bool = False
    floors: dict[str, np.ndarray] = field(default_factory=dict)
    key: Key = _UNKNOWN

    @classmethod
    def of(
        cls,
        key: Key,
        values: Sequence[float] | np.ndarray,
        *,
        control: bool = False,
        floors: dict[str, np.ndarray] | None = None,
    ) -> "Measurement":
        """Return the record of a key.

        >>> Measurement.of(Key("roll", "error", amount=(0, 8)), [0.5]).transform
        'roll (0, 8) px'
        """
        numbers = np.asarray(values, dtype=np.float64)
        return cls(key.transform, key.quantity, numbers, key.name, control, floors or {}, key)

    def about(self, **changes: Any) -> "Measurement":
        """Return the record with some fields of its key replaced."""
        key = replace(self.key, **changes)
        return replace(self, transform=key.transform, part=key.name, key=key)

    def __post_init__(self) -> None:
        if not self.key.question:  # the record was constructed from its printed names
            object.__setattr__(self, "key", Key(self.transform, self.metric, self.part))
        if self.metric not in METRICS:
            raise UnknownName(
                f"Measurement: unknown metric, got {self.metric!r}. Use one of {', '.join(METRICS)}."
            )
        shapes = {k: np.shape(v) for k, v in {"values": self.values, **self.floors}.items()}
        if len(set(shapes.values())) > 1 or len(shapes["values"]) != 1:
            raise ShapeError(
                f"Measurement: values and floors need one value per image, got {shapes}. Use equal lengths."
            )

    @property
    def floor(self) -> np.ndarray | None:
        """Largest floor of each image, or smallest if high values are good; None without floors."""
        if not self.floors:
            return None
        stacked = np.stack(list(self.floors.values()))
        return stacked.min(0) if METRICS[self.metric].better == "high" else stacked.max(0)

    @property
    def floor_mean(self) -> float | None:
        """Mean floor over images; None without floors."""
        return None if self.floor is None else summarise(self.floor).mean

    def summary(self, seed: int = 0) -> Summary:
        """Return mean, median, worst value and confidence interval over images."""
        return summarise(self.values, METRICS[self.metric].better, seed=seed)

    def effect(self, seed: int = 0) -> Summary | None:
        """Return the summary of value minus floor, image by image; None without floors."""
        if self.floor is None:
            return None
        return summarise(self.values - self.floor, METRICS[self.metric].better, seed=seed)

    def ratio(self) -> float | None:
        """Return mean value divided by mean floor; None without a floor or if it is 0."""
        floor = self.floor_mean
        return self.summary().mean / floor if floor and np.isfinite(floor) else None

    def to_dict(self, seed: int = 0) -> dict[str, Any]:
        """Return JSON values, including those of every image; NaN becomes None."""
        entry = json_entries(self, "transform", "metric", "part", "control")
        entry |= {"values": json_list(self.values), "summary": self.summary(seed).to_dict()}
        if self.floors:
            effect = self.effect(seed)
            entry["floors"] = {name: json_list(v) for name, v in self.floors.items()}
            entry["effect"] = json_value(effect)
            entry["ratio"] = self.ratio()
        return entry


def relabelled(
    rows: Iterable[Measurement], part: str, *, control: bool | None = None
) -> tuple[Measurement, ...]:
    """Return the records renamed to `part`, and marked as controls or not by `control`.

    Example:
        >>> (row,) = relabelled([Measurement("rot90", "error", np.array([0.1]))], "random weights", control=True)
        >>> row.part, row.control
        ('random weights', True)
    """
    named = (row.about(part=part, layer=None, training="") for row in rows)
    return tuple(named if control is None else (replace(row, control=control) for row in named))
