"""Comparison of results with ground truth, image by image."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vispe.errors import InputError, VispeError
from vispe.images.formats.headers import stored_frame, stored_shape
from vispe.images.labels.truth_files import MaskConvention, joint_convention, read_truth
from vispe.images.orientation import Frame
from vispe.images.read import Micrograph
from vispe.segment.metrics import adjusted_rand, apply_mapping, match_clusters, scores
from vispe.segment.run.inputs import BatchImage
from vispe.segment.types import Paths, ReadOptions
from vispe.utils.options import NonNegativeInt, Options


@dataclass(frozen=True)
class ScoreOptions(Options):
    """Options of the comparison with ground truth.

    Attributes:
        truth: files with the true classes, matched to the images by name: masks, or shapes as for labels.
        zero_is: `'class'`: pixel value 0 is the first class; `'ignore'`: 0 is ignored and classes start at
            1.
        page: page that a single-page ground truth belongs to, if the image has several.
        include_labelled: score the labelled pixels too; by default they are excluded.

    Example:
        >>> ScoreOptions(truth=["masks"], zero_is="ignore").include_labelled
        False
    """

    truth: Paths | str | Path = ()
    zero_is: Literal["class", "ignore"] = "class"
    page: NonNegativeInt | None = None
    include_labelled: bool = False

    def read(
        self,
        path: Path,
        shape: tuple[int, int, int],
        names: Sequence[str] | None,
        image: Path,
        note: Callable[[str], None] | None = None,
        frame: Frame | None = None,
        convention: MaskConvention = MaskConvention(),  # noqa: B008 - frozen
    ) -> np.ndarray:
        """Return the true classes (pages, h, w) of an image of this shape, 0 where unknown.

        Args:
            path: the ground-truth file.
            shape: (pages, h, w) of the image.
            names: class names; None for clusters, which are matched to the classes in the file.
            image: the file of the image.
            note: called with messages for the user.
            frame: `Micrograph.frame` of the image.
            convention: meaning of the values of all masks of the run.
        """
        count = None if names is None else len(names)
        known = {"names": names, "image": image, "note": note, "frame": frame, "levels": convention.levels}
        zero_is = "ignore" if path in convention.from_one else self.zero_is
        return read_truth(path, shape, zero_is=zero_is, n_classes=count, page=self.page, **known)


class GroundTruth:
    """Ground truth of the images of a run.

    Args:
        options: options of the comparison.
        reading: options of image reading.
        note: called with messages for the user.
    """

    def __init__(self, options: ScoreOptions, reading: ReadOptions, note: Callable[[str], None]) -> None:
        self._options, self._reading, self._note = options, reading, note
        self._convention = MaskConvention()

    def check(
        self,
        images: Sequence[BatchImage],
        names: Sequence[str] | None,
        fail: Callable[[BatchImage, VispeError | OSError], None],
    ) -> None:
        """Read every ground truth once.

        Args:
            images: images of the run.
            names: class names; None if clusters are matched to the classes of the ground truth.
            fail: called with an image whose ground truth is unusable, and the error.
        """
        z, orientation = self._reading.z, self._reading.orientation
        shapes: dict[Path, tuple[int, int, int]] = {}
        for image in images:
            axes = image.axes or self._reading.axes
            if image.truth is not None and (shape := stored_shape(image.path, z, axes, orientation)):
                shapes[image.truth] = shape
        if names is not None:
            self._convention = joint_convention(shapes, len(names), self._options.zero_is)
            conflicts = self._convention.conflicts
            for image in [image for image in images if image.truth in conflicts]:
                fail(image, InputError(conflicts[image.truth]))
        for image in [image for image in images if image.truth in shapes]:
            try:
                frame = stored_frame(image.path, z, image.axes or self._reading.axes, orientation)
                known = image.path, self._note, frame, self._convention
                self._options.read(image.truth, shapes[image.truth], names, *known)
            except (VispeError, OSError) as error:
                fail(image, error)

    def read(
        self, image: BatchImage, micrograph: Micrograph, names: Sequence[str] | None
    ) -> np.ndarray | None:
        """Return the true classes (z, h, w) of an image, 0 where unknown or without data; None without ground truth."""
        if image.truth is None:
            return None
        classes = self._options.read(
            image.truth,
            micrograph.pages.shape[:3],
            names,
            image.path,
            frame=micrograph.frame,
            convention=self._convention,
        )
        return np.where(micrograph.valid, classes, 0)

    def score(
        self,
        image: BatchImage,
        truth: np.ndarray,
        labels: np.ndarray,
        names: Sequence[str] | None,
        fractions: Mapping[str, float | None],
    ) -> dict[str, Any]:
        """Return the entries of the scores in the record of an image.

        Args:
            image: the image.
            truth: (z, h, w), from `read`.
            labels: (z, h, w), the label map.
            names: class names; None for clusters.
            fractions: reported fraction of each class.
        """
        if names is None:
            return {"truth": str(image.truth), "scores": score_clusters(labels, truth)}
        labelled = None
        if image.label_data is not None and not self._options.include_labelled:
            labelled = image.label_data.values > 0
        return {"truth": str(image.truth), "scores": score_classes(labels, truth, names, labelled, fractions)}


def score_classes(
    labels: np.ndarray,
    truth: np.ndarray,
    names: Sequence[str],
    ignore: np.ndarray | None,
    fractions: Mapping[str, float | None],
) -> dict[str, Any]:
    """Score classes learnt from labels, and their reported area fractions.

    Args:
        labels: (z, h, w), 1..K, 0 = no data.
        truth: (z, h, w), 0 = unknown.
        names: names of the K classes.
        ignore: (z, h, w) bool, pixels excluded from the scores of the label map; None excludes none.
        fractions: reported fraction of each class.
    """
    return scores(labels, truth, len(names), ignore=ignore, names=names) | _errors(fractions, truth)


def score_clusters(labels: np.ndarray, truth: np.ndarray) -> dict[str, Any]:
    """Score clusters (z, h, w) after matching each to the class with the best IoU."""
    count = int(truth.max())
    mapping = match_clusters(labels, truth, count)
    result = scores(apply_mapping(labels, mapping), truth, max([count, *mapping.values()]))
    result["cluster_to_class"] = {str(k): v for k, v in mapping.items()}
    result["adjusted_rand"] = adjusted_rand(labels, truth)
    return result


def _errors(fractions: Mapping[str, float | None], truth: np.ndarray) -> dict[str, Any]:
    """Return the errors of the reported fractions in percentage points, over all pixels with ground truth."""
    if not (truth > 0).any():
        return {}
    true = np.bincount(truth[truth > 0], minlength=len(fractions) + 1)[1:] / (truth > 0).sum()
    error = {
        name: 100 * ((f or 0.0) - float(t)) for (name, f), t in zip(fractions.items(), true, strict=True)
    }
    mean = float(np.mean([abs(e) for e in error.values()]))
    return {"fraction_error_pp": error, "fraction_mean_abs_error_pp": mean}
