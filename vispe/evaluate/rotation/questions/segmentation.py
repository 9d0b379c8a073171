"""Consistency of a segmentation when the sample is turned, mirrored or shifted: no truth is needed.

A segmenter takes one image (c, H, W) and returns labels (H, W): 1..K are classes, 0 is no data. The same segmenter is
used at every pose; nothing is fitted again. Memory: one image and its labels at two poses.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from vispe.backbones.batches import Segmenter, batches, labels_of
from vispe.errors import OptionError
from vispe.evaluate.rotation.plan import ANGLES, Measured, Plan, Step, how_of
from vispe.evaluate.rotation.questions.features import label_of
from vispe.evaluate.rotation.rows import Measurement
from vispe.evaluate.rotation.steps import Found, Rows, _on_canvas, _trainings, segmenter_for
from vispe.segment.metrics import mean_iou, rand_index
from vispe.symmetry.d4 import D4, IDENTITY, Element
from vispe.symmetry.labels import resampled_labels, turned_labels
from vispe.symmetry.warp import Canvas


def consistency(
    s: Segmenter,
    images: Iterable[Tensor],
    n_classes: int,
    *,
    elements: Sequence[Element] = D4,
    part: str = "full",
) -> tuple[Measurement, ...]:
    """Compare the labels of turned and mirrored images, brought back, with those of the image: exact, no resampling.

    Args:
        s: image (c, H, W) -> labels (H, W).
        images: (c, H, W) each.
        n_classes: K.
        elements: poses; the identity, s a second time, becomes a control.
        part: name of the rows.

    Returns:
        mIoU over the classes in either map and adjusted Rand index, for each pose and on average ('D4').
    """
    poses = [g for g in dict.fromkeys(elements) if g != IDENTITY]
    if not poses:
        raise OptionError("Consistency needs a pose besides the identity; give elements=D4.")
    found: dict[tuple[str, str], list[float]] = {}
    for batch in batches(images):
        image = batch[0]
        still = labels_of(s, image)
        for g in (IDENTITY, *poses):
            back = g.undo(labels_of(s, g.apply(image)))
            found.setdefault((g.name, "miou"), []).append(mean_iou(still, back, n_classes))
            found.setdefault((g.name, "ari"), []).append(rand_index(still, back))
    rows = []
    for m in ("miou", "ari"):
        over = np.array([found[g.name, m] for g in poses])
        rows.append(Measurement(label_of(poses), m, over.mean(0), part))
        rows += [Measurement(g.name, m, np.array(found[g.name, m]), part) for g in poses]
        rows.append(Measurement("identity", m, np.array(found["identity", m]), part, control=True))
    return tuple(rows)


def angle_consistency(
    s: Segmenter,
    images: Iterable[Tensor],
    n_classes: int,
    *,
    angles: Sequence[float] = ANGLES,
    margin: int = 8,
    side: int | None = None,
    how: Literal["crop", "disc"] = "crop",
    part: str = "full",
) -> tuple[Measurement, ...]:
    """Compare the labels at any angles, turned back by nearest neighbour, with those at 0 on the same disc.

    Args:
        s: image (c, side, side) -> labels (side, side).
        images: (c, H, W) each.
        n_classes: K.
        angles: degrees.
        margin: pixels off the rim of the disc, and what the window's side is a multiple of: the patch of the model.
        side: see `Canvas.fit`.
        how: see `Canvas.fit`.
        part: name of the rows.

    Returns:
        mIoU and adjusted Rand index at each angle, with two floors: 'labels turned', what resampling does to the labels
        of the image, below 1 for thin phases; and 'round trip', the labels of the image turned there and back.
    """
    found: dict[tuple[float, str], list[list[float]]] = {}
    for batch in batches(images):
        canvas = Canvas.fit(tuple(batch.shape[-2:]), margin, side, how)
        disc = canvas.pixels().numpy()
        whole = labels_of(s, canvas.pose(batch, 0)[0])
        still = np.where(disc, whole, 0)
        for angle in angles:
            back = turned_labels(labels_of(s, canvas.pose(batch, angle)[0]), -angle)
            trip = whole if angle % 90 == 0 else labels_of(s, canvas.round_trip(batch, angle)[0])
            maps = (back, resampled_labels(whole, angle), trip)
            found.setdefault((angle, "miou"), []).append([mean_iou(still, m, n_classes) for m in maps])
            found.setdefault((angle, "ari"), []).append([rand_index(still, m) for m in maps])
    rows = []
    for (angle, m), v in sorted(found.items(), key=lambda item: (item[0][1] != "miou", item[0][0])):
        values, turned, trip = np.array(v).T
        floors = {"labels turned": turned, "round trip": trip}
        rows.append(Measurement(f"{angle:g}°", m, values, part, floors=floors))
    return tuple(rows)


def phase_consistency(
    s: Segmenter,
    images: Iterable[Tensor],
    n_classes: int,
    patch: int,
    *,
    phases: int | None = 8,
    seed: int = 0,
    part: str = "full",
) -> tuple[Measurement, ...]:
    """Compare the labels of images rolled by part of a patch, rolled back pixel by pixel, with those of the image.

    Args:
        s: image (c, H, W) -> labels (H, W).
        images: (c, H, W) each.
        n_classes: K.
        patch: side of a patch in pixels; it has patch² phases.
        phases: how many are drawn at random, without the resting one; None takes all of them.
        seed: of the draw.
        part: name of the rows.

    Returns:
        The mean over phases 'roll, random phases' of mIoU and adjusted Rand index.
    """
    if patch < 2 or (phases is not None and phases < 1):
        raise OptionError(
            f"Phases need a patch of 2 px or more and at least one draw, got {patch=}, {phases=}."
        )
    every = np.arange(1, patch**2)
    rng = np.random.default_rng(seed)
    drawn = (
        every if phases is None or phases >= len(every) else np.sort(rng.choice(every, phases, replace=False))
    )
    found: dict[str, list[float]] = {"miou": [], "ari": []}
    for batch in batches(images):
        still = labels_of(s, batch[0])
        values = []
        for phase in drawn:
            dy, dx = divmod(int(phase), patch)
            back = np.roll(labels_of(s, torch.roll(batch[0], (dy, dx), (-2, -1))), (-dy, -dx), (0, 1))
            values.append((mean_iou(still, back, n_classes), rand_index(still, back)))
        for m, value in zip(found, np.mean(values, 0), strict=True):
            found[m].append(float(value))
    word = "roll, all phases" if len(drawn) == len(every) else "roll, random phases"
    return tuple(Measurement(word, m, np.array(v), part) for m, v in found.items())


def _segmentation(what: Measured, plan: Plan, step: Step) -> Found:
    k = plan.n_classes or 1
    found: Found = {}
    for part, elements in _trainings(what):
        turned, angled, shifted = (found.setdefault(f"{n} {part}", []) for n in ("D4", "angles", "phases"))
        for n, image in enumerate(step.fitted):
            s = segmenter_for(what, plan, step, n, elements)
            turned.append((1, None if s is None else consistency(s, [image], k, part=part)))
            if elements is not None and len(elements) > 1:
                continue

            def measured(images: list[Tensor], canvas: Canvas, n: int = n) -> Rows | None:
                own = segmenter_for(what, plan, step, n, (IDENTITY,), canvas)
                options = {"angles": plan.angles, "side": canvas.side, "how": how_of(canvas)}
                return own and angle_consistency(own, images, k, margin=plan.step, **options)

            angled.append(_on_canvas(step, slice(n, n + 1), plan, measured))
            rows = None
            if s is not None and plan.step > 1:
                rows = phase_consistency(s, [image], k, plan.step, phases=plan.phases, seed=plan.seed)
            shifted.append((1, rows))
    return found
