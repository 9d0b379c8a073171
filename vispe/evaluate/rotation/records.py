"""Records with one value per image, their table, and the verdict with its recommendation."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vispe.errors import ShapeError, UnknownName, counted
from vispe.evaluate.rotation.record_key import D4_MEAN, FULL, POSITION_CODE, UNMOVED, Key
from vispe.evaluate.rotation.verdict import remedy, scale_notes, verdict
from vispe.utils.report.result import Result
from vispe.utils.report.statistics import Better, Summary, summarise
from vispe.utils.report.table import interval, json_entries, json_list, json_value, number


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


@dataclass(frozen=True, eq=False)
class RotationResult(Result):
    """All records of one model or segmenter.

    Attributes:
        rows: measurements on the same images.
        images: names of the images.
        settings: options that affect the numbers, JSON values.
        notes: remarks.

    Raises:
        ShapeError: a record has another number of values than there are images.

    Example:
        >>> rows = (Measurement("rot90", "error", np.array([0.1, 0.3])),)
        >>> result = RotationResult(rows, ("a.png", "b.png"))
        >>> result.find("rot90", "error").summary().mean
        0.2
    """

    left = None

    rows: tuple[Measurement, ...]
    images: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        wrong = next((r for r in self.rows if len(r.values) != len(self.images)), None)
        if wrong is not None:
            raise ShapeError(
                f"RotationResult: {wrong.transform} {wrong.metric} must have {counted(len(self.images), 'value')}, "
                f"one per image, got {len(wrong.values)}. Pass one name per image."
            )

    def find(self, transform: str, metric: str, part: str = FULL) -> Measurement | None:
        """Return the record with this transform, metric and part, or None."""
        names = (transform, metric, part)
        return next((r for r in self.rows if (r.transform, r.metric, r.part) == names), None)

    @property
    def verdict(self) -> str:
        """Verdict on the features in one sentence; '' if the error over D4 was not measured."""
        full, r2 = self.find(D4_MEAN, "error"), self.find(UNMOVED, "r2")
        sentences = []
        if full is not None:
            sentences.append(verdict("features under rotation and reflection", full.summary().mean, "E"))
        if r2 is not None:
            sentences.append(verdict("features against position", r2.summary().median, "held-out R²"))
        return "; ".join(sentences)

    @property
    def remedy(self) -> str:
        """Recommendation in one sentence; '' if there is none."""
        full, position = self.find(D4_MEAN, "error"), self.find(D4_MEAN, "error", POSITION_CODE)
        if full is None:
            return ""
        return remedy(full.summary().mean, None if position is None else position.summary().mean)

    def to_dict(self, seed: int = 0) -> dict[str, Any]:
        """Return all fields as JSON values."""
        facts = json_entries(self, "verdict", "remedy", "images", "settings", "notes")
        return facts | {"rows": [row.to_dict(seed) for row in self.rows]}

    def table(self, seed: int = 0) -> list[list[str]]:
        """Return the table of all records as text, header first."""
        head = ["transform", "metric", "part", "mean", "median", "worst", "95 % interval", "floor", "effect"]
        return [head, *(_cells(row, seed) for row in self.rows)]


def notes_on_scale(rows: Iterable[Measurement]) -> tuple[str, ...]:
    """Return remarks on the scale of the equivariance errors in these records."""
    errors = [r for r in rows if r.metric == "error" and not r.control]
    mean = {r.part: r.summary().mean for r in errors if r.transform == D4_MEAN}
    whole = [float(v) for r in errors if r.part == FULL for v in r.values]
    return scale_notes(whole, mean.get(FULL, math.inf), mean.get(POSITION_CODE))


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


def merge(parts: Sequence[Sequence[Measurement]]) -> tuple[Measurement, ...]:
    """Merge records that were measured on consecutive parts of the images, such as by several processes.

    Raises:
        ShapeError: the parts do not have the same records in the same order.

    Example:
        >>> parts = [[Measurement("D4", "error", np.array([v]))] for v in (0.1, 0.2)]
        >>> merge(parts)[0].values.tolist()
        [0.1, 0.2]
    """
    keys = [[(r.transform, r.metric, r.part, r.control, tuple(r.floors)) for r in rows] for rows in parts]
    if not keys or any(key != keys[0] for key in keys):
        raise ShapeError(
            f"merge: parts must have the same records, got {[len(k) for k in keys]} records. Use equal metrics."
        )
    return tuple(
        replace(
            same[0],
            values=np.concatenate([r.values for r in same]),
            floors={name: np.concatenate([r.floors[name] for r in same]) for name in same[0].floors},
        )
        for same in zip(*parts, strict=True)
    )


def _cells(row: Measurement, seed: int) -> list[str]:
    summary, effect = row.summary(seed), row.effect(seed)
    ends = interval(summary.interval) or f"{counted(summary.n, 'image')}: none"
    cells = [row.transform, METRICS[row.metric].title, row.part + (" (control)" if row.control else "")]
    cells += [number(summary.mean), number(summary.median), number(summary.worst), ends]
    return [*cells, number(row.floor_mean), number(effect and effect.mean)]
