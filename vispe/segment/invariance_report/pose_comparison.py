"""Invariance measurement: one page in every pose through one segmenter, without refitting."""

from collections.abc import Callable, Sequence

import numpy as np

from vispe.backbones.batching import checked_labels
from vispe.errors import OptionError, ShapeError, counted
from vispe.images.symmetry.d4 import D4, IDENTITY
from vispe.segment.invariance_report.pose_result import FAMILIES, PoseResult
from vispe.segment.invariance_report.poses import (
    REPEAT,
    Move,
    Shift,
    ShiftedFrame,
    ShiftMargin,
    SquareSymmetry,
    valid_shifts,
)
from vispe.segment.invariance_report.result import InvarianceReport
from vispe.segment.types import Prediction

SHIFTS: tuple[Shift, ...] = ((-3, 5), (8, -7), (16, 16))
"""Shifts (down, right) in pixels: an odd one, about half a patch of 14 or 16 px, and one patch of 16 px (two of 8)."""

RUNS = len(D4) + 1 + len(SHIFTS)
"""Number of predictions of `measure_invariance` in addition to the one of the unmodified image."""

BORDER = 2

Predict = Callable[[np.ndarray, np.ndarray], "Prediction | np.ndarray"]
"""Maps (page (h, w, c) float32 in [0, 1], valid (h, w) bool) to a `Prediction` or labels (h, w): 1..K, 0 = no data."""


def measure_invariance(
    page: np.ndarray,
    valid: np.ndarray,
    predict: Predict,
    names: Sequence[str],
    *,
    still: Prediction | np.ndarray | None = None,
    shifts: Sequence[Shift] = SHIFTS,
    angles: Sequence[float] = (),
    border: int = BORDER,
    step: Callable[[float], None] | None = None,
) -> InvarianceReport:
    """Segment one page in every pose and report the changes.

    The poses are the symmetries of the square (rotations by 90 degrees and reflections) and a few shifts. They permute
    pixels without resampling, so differences are due to the model and to the tiling of the page. Two controls
    measure the noise floor: a second prediction of the unmodified page, and the page in which the margin that
    shifts lose is replaced by reflection.
    Memory: K bytes per pixel in addition to a prediction. Time: `RUNS` further predictions, and 1 + 2 n for n angles.

    Args:
        page: (h, w, c) float32 grey levels in [0, 1], normalised once, before any pose.
        valid: (h, w) bool, pixels with data.
        predict: segments a page of any size; must be stateless.
        names: names of the classes 1..K, at most 255.
        still: prediction of the unmodified page, if already computed.
        shifts: (down, right) in pixels; those beyond a quarter of a side are skipped with a note.
        angles: degrees; angles other than multiples of 90 require resampling, so each has its own noise floor, and they
            are excluded from the map of disagreement. The inscribed disc is compared.
        border: half width in pixels of the border zone between classes.
        step: called with the fraction of the work of each prediction.

    Raises:
        ShapeError: `page` and `valid` differ in size, or the prediction differs from them.
        InputError: the prediction is not of integers.
        OptionError: no or more than 255 names, classes beyond these, a negative border, or a shift that is not a pair
            of integers.

    Example:
        >>> page = np.repeat([[0.1, 0.9]], 64, 0).repeat(32, 1)[..., None].astype(np.float32)
        >>> valid, names = page[..., 0] > 0, ["dark", "bright"]
        >>> report = measure_invariance(page, valid, lambda p, valid: 1 + (p[..., 0] > 0.5), names)
        >>> report.level, report.agreement
        ('steady', 1.0)
    """
    if page.ndim != 3 or page.shape[:2] != valid.shape or not valid.size:
        raise ShapeError(
            f"measure_invariance needs a page (h, w, c) and valid (h, w), got {page.shape} and {valid.shape}."
        )
    if not names or border < 0:
        raise OptionError(
            f"measure_invariance needs class names and a border of 0 or more pixels, got {names!r}, {border=}."
        )
    count, notes = len(names), []
    if count > 255:  # labels have 8 bits
        raise OptionError(f"measure_invariance supports up to 255 classes, got {count} names.")
    small_shifts, requested = valid_shifts(shifts, valid.shape), set(shifts) - {(0, 0)}
    if skipped := len(requested) - len(small_shifts):
        h, w = valid.shape
        notes.append(
            f"{skipped} of {counted(len(requested), 'shift')} are too large for {h} x {w} px and were skipped."
        )
    moves: list[Move] = [SquareSymmetry(g) for g in D4 if g != IDENTITY] + [
        ShiftedFrame(*s) for s in small_shifts
    ]
    controls: list[Move] = [REPEAT, *([ShiftMargin.of(small_shifts)] if small_shifts else [])]
    frame = ShiftMargin.of(small_shifts).frame(*valid.shape) if small_shifts else valid
    runs = len(moves) + len(controls) + (still is None) + (1 + 2 * len(angles) if angles else 0)

    def labels_of(page: np.ndarray, valid: np.ndarray) -> np.ndarray:
        labels = checked_prediction(predict(page, valid), valid, count)
        if step is not None:
            step(1 / runs)
        return labels

    def posed(move: Move) -> np.ndarray:
        """Predict in a pose and undo it; labels are 0 for pixels that the pose does not show."""
        moved = np.ascontiguousarray(np.moveaxis(move.apply(np.moveaxis(page, -1, 0)), 0, -1))
        return np.where(valid, move.undo(labels_of(moved, move.apply(valid))), 0)

    first = labels_of(page, valid) if still is None else checked_prediction(still, valid, count)
    # votes (K, h, w) of the unmodified image and all poses
    votes = np.zeros((count, *valid.shape), np.uint8 if len(moves) < 255 else np.uint16)
    changed = {
        family: np.zeros(valid.shape, bool) for family in FAMILIES if small_shifts or family != "shifted"
    }
    comparisons = {}
    add_votes(votes, first)
    for move in [*moves, *controls]:
        labels = posed(move)
        # shifts are compared on the pixels that all of them show
        visible = frame if move.family == "shifted" else valid
        comparisons[move] = PoseResult.compare(
            move.name, move.family, np.where(visible, first, 0), labels, count
        )
        if move not in controls:
            add_votes(votes, labels)
            changed[move.family] |= (labels > 0) & (labels != first)
    poses, floors = [comparisons[m] for m in moves], [comparisons[c] for c in controls]
    if angles:
        from vispe.segment.invariance_report.any_angle import compare_angles

        angle_poses, angle_controls, angle_notes = compare_angles(page, valid, labels_of, angles, count)
        poses, floors, notes = [*poses, *angle_poses], [*floors, *angle_controls], [*notes, *angle_notes]
    n_votes = votes.sum(0, dtype=np.int32)
    # fraction of the poses that do not vote for the most frequent class
    disagreement = 1 - (votes.max(0) / np.maximum(n_votes, 1)).astype(np.float32)
    disagreement[first == 0] = np.nan
    labels, moved = first.astype(np.uint8), (tuple(poses), tuple(floors), changed)
    return InvarianceReport(tuple(names), labels, disagreement, *moved, border, tuple(notes))


def checked_prediction(prediction: Prediction | np.ndarray, valid: np.ndarray, count: int) -> np.ndarray:
    """Return the labels (h, w) of a prediction, 0 where there is no data.

    Raises:
        ShapeError: another shape than `valid`.
        InputError: not integers.
        OptionError: classes beyond `count`.
    """
    labels = prediction.labels if isinstance(prediction, Prediction) else prediction
    labels = checked_labels(labels, valid.shape, "The segmenter returned")
    if labels.max(initial=0) > count:
        raise OptionError(f"The segmenter returned class {labels.max()}, but there are {count} class names.")
    return np.where(valid, labels, 0).astype(np.uint8)


def add_votes(votes: np.ndarray, labels: np.ndarray) -> None:
    """Add one to the votes (K, h, w) of the class of each labelled pixel, in place."""
    for k in range(len(votes)):
        votes[k] += labels == k + 1
