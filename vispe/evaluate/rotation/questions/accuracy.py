"""What a user meets who lays the sample down in any orientation: accuracy and phase fractions by pose.

The same disc of the sample is scored at every pose. The segmenter is used as it is; whether it was trained at pose 0
only or on all poses is part of what is measured, so report both.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from torch import Tensor

from vispe.backbones.batches import Segmenter, batches, labels_of
from vispe.errors import OptionError
from vispe.evaluate.rotation.plan import ANGLES, Measured, Plan, Step, how_of, truths_of
from vispe.evaluate.rotation.rows import Measurement
from vispe.evaluate.rotation.steps import Elements, Found, Rows, _on_canvas, _trainings, _under, segmenter_for
from vispe.segment.metrics import mean_iou, shares, without_borders
from vispe.symmetry.labels import posed_labels, round_trip_labels
from vispe.symmetry.warp import Canvas


def across_poses(
    s: Segmenter,
    images: Iterable[Tensor],
    n_classes: int,
    truths: Sequence[object] | None = None,
    *,
    angles: Sequence[float] = ANGLES,
    margin: int = 8,
    side: int | None = None,
    how: Literal["crop", "disc"] = "crop",
    border: int = 1,
    names: Sequence[str] | None = None,
    part: str = "full",
) -> tuple[Measurement, ...]:
    """Measure accuracy and phase fractions over poses, always on the same disc of the sample.

    Args:
        s: image (c, side, side) -> labels (side, side).
        images: (c, H, W) each.
        n_classes: K.
        truths: labels (H, W) of each image; None measures phase fractions alone.
        angles: degrees.
        margin: pixels off the rim of the disc, and what the window's side is a multiple of: the patch of the model.
        side: see `Canvas.fit`.
        how: see `Canvas.fit`.
        border: pixels along class borders of the turned truth that do not count.
        names: of the classes; default 'class 1' ...
        part: name of the rows of accuracy.

    Returns:
        'accuracy' at each angle with the floor 'truth turned' (truth there and back against truth); for 'all poses'
        its mean, worst, spread (best minus worst) and standard deviation; and for each class, by name, 'phase_spread':
        largest minus smallest area share over poses, and 'phase_error': the share furthest from the true one, both in
        percentage points.
    """
    names = [f"class {k + 1}" for k in range(n_classes)] if names is None else list(names)
    if len(names) != n_classes or len(angles) == 0:
        raise OptionError(
            f"{len(names)} names and {len(angles)} angles were given for n_classes={n_classes}; give a name for each "
            "class and at least one angle."
        )
    accuracy: list[list[float]] = []
    floors: list[list[float]] = []
    area: list[np.ndarray] = []
    true_area: list[np.ndarray] = []
    for number, batch in enumerate(batches(images)):
        canvas = Canvas.fit(tuple(batch.shape[-2:]), margin, side, how)
        disc = canvas.pixels().numpy()
        given = None if truths is None else truths_of(truths, number, batch)
        if given is not None:
            given = given[: canvas.source[0], : canvas.source[1]]
            true_area.append(shares(np.where(disc, posed_labels(canvas, given, 0), 0), n_classes))
            accuracy.append([])
            floors.append([])
        area.append(np.empty((len(angles), n_classes)))
        for k, angle in enumerate(angles):
            found = np.where(disc, labels_of(s, canvas.pose(batch, angle)[0]), 0)
            area[-1][k] = shares(found, n_classes)
            if given is not None:
                wanted = without_borders(posed_labels(canvas, given, angle), border)
                still = without_borders(posed_labels(canvas, given, 0), border)
                trip = np.where(disc, round_trip_labels(canvas, given, angle), 0)
                accuracy[-1].append(mean_iou(wanted, found, n_classes))
                floors[-1].append(mean_iou(still, trip, n_classes))
    rows = _accuracy_rows(np.array(accuracy), np.array(floors), angles, part) if truths is not None else []
    return (*rows, *_area_rows(np.array(area), np.array(true_area) if truths is not None else None, names))


def _accuracy_rows(
    accuracy: np.ndarray, floors: np.ndarray, angles: Sequence[float], part: str
) -> list[Measurement]:
    """Rows of accuracy (n, angles) and of what it does over poses."""
    over = {
        "accuracy_mean": accuracy.mean(1),
        "accuracy_worst": accuracy.min(1),
        "accuracy_spread": np.ptp(accuracy, axis=1),
        "accuracy_std": accuracy.std(1),
    }
    rows = [Measurement("all poses", m, v, part) for m, v in over.items()]
    return rows + [
        Measurement(f"{a:g}°", "accuracy", accuracy[:, k], part, floors={"truth turned": floors[:, k]})
        for k, a in enumerate(angles)
    ]


def _area_rows(area: np.ndarray, truth: np.ndarray | None, names: Sequence[str]) -> list[Measurement]:
    """Rows of area shares (n, angles, K) in per cent."""
    rows = []
    for k, name in enumerate(names):
        rows.append(Measurement("all poses", "phase_spread", np.ptp(area[:, :, k], axis=1), name))
        if truth is not None:
            away = area[:, :, k] - truth[:, None, k]
            worst = np.take_along_axis(away, np.abs(away).argmax(1)[:, None], 1)[:, 0]
            rows.append(Measurement("all poses", "phase_error", worst, name))
    return rows


def _poses(what: Measured, plan: Plan, step: Step) -> Found:
    found: Found = {}
    for part, elements in _trainings(what):
        pieces = found.setdefault(part, [])
        for n in range(len(step.whole)):

            def measured(
                images: list[Tensor], canvas: Canvas, n: int = n, elements: Elements = elements
            ) -> Rows | None:
                s = segmenter_for(what, plan, step, n, elements, canvas)
                return s and across_poses(
                    s,
                    images,
                    plan.n_classes or 1,
                    None if step.truths is None else [step.truths[n]],
                    angles=plan.angles,
                    margin=plan.step,
                    side=canvas.side,
                    how=how_of(canvas),
                    names=plan.names,
                )

            count, rows = _on_canvas(step, slice(n, n + 1), plan, measured)
            pieces.append((count, rows and _under(rows, part)))
    return found
