"""One page in every pose through one segmenter, nothing fitted again, and what that changes."""

from collections.abc import Callable, Sequence

import numpy as np

from vispe.backbones.batching import checked_labels
from vispe.errors import OptionError, ShapeError
from vispe.segment.invariance_report.poses import REPEAT, Lay, Move, Moved, Rim, Shift, fitting
from vispe.segment.invariance_report.result import FAMILIES, Posed, Trust
from vispe.segment.run.prediction import Prediction
from vispe.symmetry.d4 import D4, IDENTITY

SHIFTS: tuple[Shift, ...] = ((-3, 5), (8, -7), (16, 16))
"""Shifts (down, right) in pixels: an odd one, about half a patch of 14 or 16 pixels, and one patch of 16 (two of 8)."""

RUNS = len(D4) + 1 + len(SHIFTS)
"""Predictions of `trust_page` besides the one of the picture as it stands."""

BORDER = 2

Predict = Callable[[np.ndarray, np.ndarray], "Prediction | np.ndarray"]
"""Page (h, w, c) float32 in [0, 1] and valid (h, w) bool -> a `Prediction`, or labels (h, w): 1..K, 0 = no data."""


def trust_page(
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
) -> Trust:
    """Segment one page in every pose and report what changes.

    The poses are the eight in which a square fits itself (quarter turns, mirrored or not) and a few shifts. They move
    pixels and make none, so that differences are due to the model and to how it cuts the page. Controls give the floor:
    the page once more as it stands, and the page with the rim mirrored that the shifts lose. Memory: K bytes a pixel
    besides a prediction. Time: `RUNS` predictions besides the first one, and 1 + 2 n for n angles.

    Args:
        page: (h, w, c) float32 grey levels in [0, 1], normalised once, before any pose.
        valid: (h, w) bool, pixels with data.
        predict: what segments a page of any size; it must not change between calls.
        names: of the classes 1..K.
        still: what `predict` gave for the page, where it is known already.
        shifts: (down, right) in pixels; those beyond a quarter of a side are left out with a note.
        angles: degrees; other than multiples of 90 they make new pixels, so each has a floor of its own, and they do
            not enter the map of disagreement. The inscribed disc is compared.
        border: pixels along borders between classes that count as border.
        step: called with the share of the work that each prediction is.

    Raises:
        ShapeError: `page` and `valid` differ in size, or the prediction differs from them.
        InputError: the prediction holds no whole numbers, or classes beyond the names.
        OptionError: no names, a border below 0, or a shift that is not two whole numbers.
    """
    if page.ndim != 3 or page.shape[:2] != valid.shape or not valid.size:
        raise ShapeError(
            f"trust_page needs a page (h, w, c) and valid (h, w), got {page.shape} and {valid.shape}."
        )
    if not names or border < 0:
        raise OptionError(
            f"trust_page needs class names and a border of 0 or more pixels, got {names!r}, {border=}."
        )
    count, notes = len(names), []
    used = fitting(shifts, valid.shape)
    if len(used) < len(set(shifts) - {(0, 0)}):
        h, w = valid.shape
        notes.append(
            f"{len(set(shifts)) - len(used)} of {len(set(shifts))} shifts are too large for {h} x {w} px and left out."
        )
    moves: list[Move] = [Lay(g) for g in D4 if g != IDENTITY] + [Moved(*s) for s in used]
    controls: list[Move] = [REPEAT, *([Rim.of(used)] if used else [])]
    frame = Rim.of(used).frame(*valid.shape) if used else valid
    runs = len(moves) + len(controls) + (still is None) + (1 + 2 * len(angles) if angles else 0)

    def labels_of(page: np.ndarray, valid: np.ndarray) -> np.ndarray:
        found = segmented(predict(page, valid), valid, count)
        if step is not None:
            step(1 / runs)
        return found

    def posed(move: Move) -> np.ndarray:
        """Predict in a pose -> labels in the frame of the page; 0 where the pose does not show it."""
        moved = np.ascontiguousarray(np.moveaxis(move.apply(np.moveaxis(page, -1, 0)), 0, -1))
        return np.where(valid, move.undo(labels_of(moved, move.apply(valid))), 0)

    first = labels_of(page, valid) if still is None else segmented(still, valid, count)
    votes = np.zeros((count, *valid.shape), np.uint8 if len(moves) < 255 else np.uint16)
    changed = {family: np.zeros(valid.shape, bool) for family in FAMILIES if used or family != "shifted"}
    rows = {}
    vote(votes, first)
    for move in [*moves, *controls]:
        found = posed(move)
        where = frame if move.family == "shifted" else valid
        rows[move] = Posed.compare(move.name, move.family, np.where(where, first, 0), found, count)
        if move not in controls:
            vote(votes, found)
            changed[move.family] |= (found > 0) & (found != first)
    poses, floors = [rows[m] for m in moves], [rows[c] for c in controls]
    if angles:
        from vispe.segment.invariance_report.any_angle import at_angles

        turned, floored, said = at_angles(page, valid, labels_of, angles, count)
        poses, floors, notes = [*poses, *turned], [*floors, *floored], [*notes, *said]
    seen = votes.sum(0, dtype=np.int32)
    disagreement = 1 - (votes.max(0) / np.maximum(seen, 1)).astype(np.float32)
    disagreement[first == 0] = np.nan
    labels, moved = first.astype(np.uint8), (tuple(poses), tuple(floors), changed)
    return Trust(tuple(names), labels, disagreement, *moved, border, tuple(notes))


def segmented(found: Prediction | np.ndarray, valid: np.ndarray, count: int) -> np.ndarray:
    """Return the labels (h, w) of a prediction, 0 where there is no data, or say what is wrong with them."""
    labels = found.labels if isinstance(found, Prediction) else found
    labels = checked_labels(labels, valid.shape, "The segmenter returned")
    if labels.max(initial=0) > count:
        raise OptionError(f"The segmenter returned class {labels.max()}, but {count} names were given.")
    return np.where(valid, labels, 0).astype(np.uint8)


def vote(votes: np.ndarray, labels: np.ndarray) -> None:
    """Add one to the votes (K, h, w) of the class of each pixel that has one."""
    for k in range(len(votes)):
        votes[k] += labels == k + 1
