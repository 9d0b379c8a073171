"""Classes of objects, learnt from a few examples: size, shape and intensity from the table of objects."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from vispe.errors import InputError, counted
from vispe.segment.classify.pixel_classifier import PixelClassifier
from vispe.segment.objects.class_measurements import Unit, grey_limits, grey_notes, measurements
from vispe.segment.objects.options import ObjectOptions
from vispe.segment.objects.table import Row

CLASS_COLUMNS = ("object_class", "object_probability")
"""Columns of the table that a classifier of objects adds; empty for objects that cannot be classified."""

PREFIX = "objects."
"""Prefix of the arrays of a classifier of objects in model files."""

_FOLDS = 5
_FEW = 3  # examples of a class below which a note is written

_MOST = 255  # classes of the figure of object classes


@dataclass(frozen=True, eq=False)
class ObjectClassifier:
    """Classifier of objects: the mean of logistic regression and extremely randomised trees, as for pixels.

    Attributes:
        names: names of the object classes.
        classifier: predicts their probabilities from `measurements`.
        options: definition of the objects that were examples, with names of classes of pixels.
        unit: unit of sizes: 'um' if all examples have a pixel size.
        volumes: whether the objects are volumes.
        facts: number of examples of each class, their smallest and largest mean grey, and the accuracy in
            cross-validation; JSON-able.
    """

    names: tuple[str, ...]
    classifier: PixelClassifier
    options: ObjectOptions
    unit: Unit
    volumes: bool
    facts: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def fit(
        cls, rows: Sequence[Row], labels: Sequence[str], options: ObjectOptions, seed: int = 0
    ) -> "ObjectClassifier":
        """Fit to examples.

        Args:
            rows: rows of the table, of the example objects.
            labels: object class of each row.
            options: definition of the objects, which `apply` repeats.
            seed: seed of the trees and of the folds of the cross-validation.

        Raises:
            InputError: fewer than 2 or more than 255 classes, examples on pages and in volumes, or an example without
                measurements.
        """
        names = tuple(sorted(set(labels)))
        if len(names) < 2:
            raise InputError(
                f"object_classes needs examples of at least 2 classes, got {', '.join(names) or 'none'}. Add examples "
                "of the other classes."
            )
        if len(names) > _MOST:
            raise InputError(
                f"object_classes has {counted(len(names), 'class')}, more than {_MOST}. Use fewer."
            )
        volumes = {row["volume_px"] is not None for row in rows}
        if len(volumes) > 1:
            raise InputError(
                "object_classes has examples on pages and in volumes. Pass examples of one kind."
            )
        volume = volumes.pop()
        unit: Unit = "um" if all(row["equivalent_diameter_um"] is not None for row in rows) else "px"
        features = measurements(rows, unit, volume)
        if not np.isfinite(features).all():
            broken = rows[int(np.flatnonzero(~np.isfinite(features).all(1))[0])]
            raise InputError(
                f"object {broken['object']} has no finite size, shape and intensity. Choose another example."
            )
        classes = np.array([names.index(label) + 1 for label in labels])
        classifier = PixelClassifier("ensemble", len(names), seed=seed).fit(features, classes, names)
        examples = {name: int((classes == k).sum()) for k, name in enumerate(names, start=1)}
        facts = {
            "examples": examples,
            "mean_grey": grey_limits(rows),
            **_cross_validation(features, classes, seed),
        }
        return cls(names, classifier, options, unit, volume, facts)

    def classify(self, name: str, rows: Sequence[Row], options: ObjectOptions) -> list[str]:
        """Add `CLASS_COLUMNS` to rows of the table; empty for classes of pixels without examples.

        Args:
            name: name of the image, for notes.
            rows: its objects.
            options: their definition.

        Returns:
            Notes on objects that are defined otherwise than the examples, or are much brighter or darker.

        Raises:
            InputError: pages instead of volumes or the reverse, or no pixel size although the examples have one.
        """
        for row in rows:
            row |= dict.fromkeys(CLASS_COLUMNS)
        notes = self._definition_notes(rows, options)
        rows = [row for row in rows if row["class"] in self.options.classes]
        for row in rows:
            is_volume = row["volume_px"] is not None
            if is_volume != self.volumes:
                kinds = "volumes", "objects on pages"
                raise InputError(
                    f"the object classes were learnt from {kinds[not self.volumes]}, but the image has "
                    f"{kinds[not is_volume]}. Train them on such objects, or set axes."
                )
            if self.unit == "um" and row["equivalent_diameter_um"] is None:
                raise InputError(
                    "the object classes were learnt in microns, but the pixel size of the image is unknown. Save the "
                    "image with its pixel size, or train the classes on images without one."
                )
        features = measurements(rows, self.unit, self.volumes)
        usable = np.flatnonzero(np.isfinite(features).all(1))
        if not usable.size:
            return notes
        probabilities = self.classifier.probabilities(features[usable])
        for index, values in zip(usable.tolist(), probabilities, strict=True):
            best = int(values.argmax())
            rows[index] |= {CLASS_COLUMNS[0]: self.names[best], CLASS_COLUMNS[1]: float(values[best])}
        return notes + grey_notes(name, rows, self.facts.get("mean_grey"))

    def _definition_notes(self, rows: Sequence[Row], options: ObjectOptions) -> list[str]:
        """Return notes on options that change the shape of objects, and on classes of pixels without examples."""
        notes = []
        for option in ("touching", "fill_holes"):
            value, learnt = getattr(options, option), getattr(self.options, option)
            if value != learnt:
                notes.append(
                    f"the objects are defined with {option}={value}, but the object classes were learnt with "
                    f"{option}={learnt}. Omit objects to use the definition of the model."
                )
        others = sorted({row["class"] for row in rows} - set(self.options.classes))
        if others:
            notes.append(f"no object class was learnt for the objects of {', '.join(others)}.")
        return notes

    def counts(self, rows: Sequence[Row]) -> dict[str, int]:
        """Return the number of classified rows of each object class."""
        return {name: sum(row[CLASS_COLUMNS[0]] == name for row in rows) for name in self.names}

    def numbers(self, rows: Sequence[Row]) -> np.ndarray:
        """Return the class 1..K of each object number, 0 = none, as (n + 1,) uint8 for maps of objects."""
        out = np.zeros(len(rows) + 1, np.uint8)
        for row in rows:
            if row[CLASS_COLUMNS[0]] is not None:
                out[row["object"]] = self.names.index(row[CLASS_COLUMNS[0]]) + 1
        return out

    def notes(self) -> list[str]:
        """Return notes on classes with few examples, and on a low accuracy in cross-validation."""
        few = {name: n for name, n in self.facts["examples"].items() if n < _FEW}
        notes = [
            f"object class {name!r} has {counted(n, 'example')}; {_FEW} or more are advisable."
            for name, n in few.items()
        ]
        accuracy = self.facts.get("accuracy")
        if accuracy is not None and accuracy < 0.8:
            notes.append(
                f"the object classes agree with {100 * accuracy:.0f} % of the left-out examples. Add examples, or use "
                "classes that differ in size, shape or mean grey level."
            )
        return notes

    def card(self) -> dict[str, Any]:
        """Return the metadata for a model file, JSON-able."""
        options = asdict(self.options) | {"classes": list(self.options.classes), "kinds": []}
        entries = {"names": list(self.names), "unit": self.unit, "volumes": self.volumes}
        return {**entries, "options": options, "facts": dict(self.facts)}

    def tensors(self) -> dict[str, np.ndarray]:
        """Return the arrays for a model file."""
        return {f"{PREFIX}{name}": value for name, value in self.classifier.tensors().items()}

    @classmethod
    def stored(
        cls, card: Mapping[str, Any], tensors: Mapping[str, np.ndarray], seed: int
    ) -> "ObjectClassifier":
        """Create a classifier from its entry of a card, and the arrays of a model file.

        Raises:
            InputError: arrays that are missing or inconsistent.
        """
        names, volumes = tuple(card["names"]), card["volumes"]
        state = {name.removeprefix(PREFIX): v for name, v in tensors.items() if name.startswith(PREFIX)}
        classifier = PixelClassifier("ensemble", len(names), seed=seed, state=state)
        width = measurements([], card["unit"], volumes).shape[1]
        trees = classifier.trees
        if trees is None or trees.width[0] != width or len(trees.classes) != len(names):
            raise InputError("the object classes have inconsistent arrays. Train the model again.")
        return cls(names, classifier, ObjectOptions(**card["options"]), card["unit"], volumes, card["facts"])


def _cross_validation(features: np.ndarray, classes: np.ndarray, seed: int) -> dict[str, Any]:
    """Return the accuracy on left-out examples; {} if a class has a single example."""
    folds = min(_FOLDS, int(np.bincount(classes)[1:].min()))
    if folds < 2:
        return {}
    random, fold = np.random.default_rng(seed), np.zeros(len(classes), int)
    for k in np.unique(classes):
        members = random.permutation(np.flatnonzero(classes == k))
        fold[members] = np.arange(len(members)) % folds
    correct = 0
    for left_out in range(folds):
        test = fold == left_out
        fitted = PixelClassifier("ensemble", int(classes.max()), seed=seed).fit(
            features[~test], classes[~test]
        )
        correct += int((fitted.probabilities(features[test]).argmax(1) + 1 == classes[test]).sum())
    return {"accuracy": correct / len(classes), "folds": folds}
