"""The measurements by name, each on the few images of one step; see `vispe.evaluate.rotation.plan.GROUPS`."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from vispe.backbones.batches import FeatureFunction, Segmenter
from vispe.backbones.maps import ModelFeatures, patch_projection
from vispe.errors import OptionError, UnsupportedCombination
from vispe.evaluate.rotation.angles import angle_equivariance
from vispe.evaluate.rotation.clusters import cluster_consistency
from vispe.evaluate.rotation.controls import control_rows
from vispe.evaluate.rotation.features import ALL, equivariance, position_equivariance
from vispe.evaluate.rotation.layers import layer_curve, position_r2
from vispe.evaluate.rotation.lie import along, lie_derivatives
from vispe.evaluate.rotation.plan import Measured, Plan, Step, canvas_for, how_of
from vispe.evaluate.rotation.poses import across_poses
from vispe.evaluate.rotation.quadrant import quadrant_gap, scribble_classifier, scribbles
from vispe.evaluate.rotation.result import Measurement
from vispe.evaluate.rotation.segmentation import angle_consistency, consistency, phase_consistency
from vispe.evaluate.rotation.sharing import Piece
from vispe.evaluate.rotation.trained import TrainedSegmenter
from vispe.evaluate.rotation.translation import crop_shift, roll_equivariance
from vispe.segment.metrics import without_borders
from vispe.symmetry.d4 import D4, IDENTITY, Element
from vispe.symmetry.labels import posed_labels
from vispe.symmetry.warp import Canvas

Rows = tuple[Measurement, ...]
Elements = Sequence[Element] | None
EVERY_POSE = "trained on all poses"

Found = dict[str, list[Piece]]
"""Rows of one step under names that are the same in all steps."""


def measure_step(what: Measured, plan: Plan, step: Step, group: str) -> Found:
    """Measure one group on one step; what could not be measured is said in `step.notes`."""
    return _GROUPS[group](what, plan, step)


def _d4(what: Measured, plan: Plan, step: Step) -> Found:
    f, images, size = _features(what), step.fitted, plan.batch_size
    rows = equivariance(f, images, measures=ALL, batch_size=size, seed=plan.seed, first=step.first)
    if isinstance(f, ModelFeatures) and patch_projection(f.model) is not None:
        rows += position_equivariance(f, images, batch_size=size)
    else:
        step.notes.append(
            "The share of the position code is not known: it is told apart in a vision transformer only, where "
            "tokens can be moved after the patches were embedded."
        )
    found, notes = control_rows(f, images, batch_size=size, twin=what.twin)
    step.notes += notes
    return {"d4": [(len(images), rows + found)]}


def _angles(what: Measured, plan: Plan, step: Step) -> Found:
    def measured(images: list[Tensor], canvas: Canvas) -> Rows:
        return angle_equivariance(
            _features(what),
            images,
            angles=plan.angles,
            patch=plan.step,
            side=canvas.side,
            how=how_of(canvas),
            batch_size=plan.batch_size,
        )

    return {"angles": [_on_canvas(step, part, plan, measured) for part in step.shapes()]}


def _shift(what: Measured, plan: Plan, step: Step) -> Found:
    f, patch = _features(what), plan.step
    rolls = roll_equivariance(f, step.fitted, shifts=plan.shifts, patch=patch, batch_size=plan.batch_size)
    near = [s for s in plan.shifts if max(map(abs, s)) <= patch]
    crops: list[Piece] = []
    for part in step.shapes():
        images = step.whole[part]
        room = [have - patch for have in images[0].shape[-2:]]  # a window is up to a patch further
        h, w = (min(n, plan.size or n) // patch * patch for n in room)
        if min(h, w) < 3 * patch or (plan.exact and {h, w} != {plan.size}):
            step.notes.append(
                f"{_words(images[0])} are too small for two windows that lie up to {patch} px apart: their error under "
                "a shift of the window was not measured."
            )
            crops.append((len(images), None))
        else:
            rows = crop_shift(f, images, (h, w), shifts=near, patch=patch, batch_size=plan.batch_size)
            crops.append((len(images), rows))
    return {"roll": [(len(step.fitted), rolls)], "crop shift": crops}


def _lie(what: Measured, plan: Plan, step: Step) -> Found:
    f, images = _features(what), step.fitted
    try:
        if not isinstance(f, ModelFeatures):
            _check_differentiable(f, images[0])
        return {"lie": [(len(images), lie_derivatives(f, images, batch_size=plan.batch_size))]}
    except (UnsupportedCombination, TypeError, ValueError) as error:
        step.notes.append(f"The Lie derivative was not measured: {str(error).partition(';')[0].rstrip('.')}.")
        return {"lie": [(len(images), None)]}


def _position(what: Measured, plan: Plan, step: Step) -> Found:
    rows = position_r2(
        _features(what),
        step.fitted,
        masks=plan.probe_masks,
        batch_size=plan.batch_size,
        seed=plan.seed,
        first=step.first,
    )
    return {"position": [(len(step.fitted), rows)]}


def _layers(what: Measured, plan: Plan, step: Step) -> Found:
    f, images = _features(what), step.fitted
    if not isinstance(f, ModelFeatures):
        step.notes.append("There is no curve over layers: the layers are known of models only.")
        return {"layers": [(len(images), None)]}
    rows = layer_curve(
        f, images, masks=plan.probe_masks, batch_size=plan.batch_size, seed=plan.seed, first=step.first
    )
    if patch_projection(f.model) is not None:
        found = layer_curve(f, images, position_only=True, probe=False, batch_size=plan.batch_size)
        rows += tuple(replace(r, part=f"{r.part}, position code") for r in found)
    return {"layers": [(len(images), rows)]}


def _clusters(what: Measured, plan: Plan, step: Step) -> Found:
    f, images = _features(what), step.fitted
    pieces: list[Piece] = []
    for image in images:
        try:
            pieces.append((1, cluster_consistency(f, [image], plan.clusters, seed=plan.seed)))
        except OptionError as error:
            step.notes.append(f"An image was left out of the clusters: {error}")
            pieces.append((1, None))
    return {"clusters": pieces}


def _quadrant(what: Measured, plan: Plan, step: Step) -> Found:
    if step.fitted_truths is None or plan.n_classes is None:
        return {}
    rows = quadrant_gap(
        scribble_classifier(_features(what)),
        step.fitted,
        step.fitted_truths,
        plan.n_classes,
        budget=plan.budget,
        seed=plan.seed,
        first=step.first,
    )
    return {"quadrant": [(len(step.fitted), rows)]}


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


_GROUPS: dict[str, Callable[[Measured, Plan, Step], Found]] = {
    "d4": _d4,
    "angles": _angles,
    "shift": _shift,
    "lie": _lie,
    "position": _position,
    "layers": _layers,
    "clusters": _clusters,
    "quadrant": _quadrant,
    "segmentation": _segmentation,
    "poses": _poses,
}


def segmenter_for(
    what: Measured, plan: Plan, step: Step, n: int, elements: Elements, canvas: Canvas | None = None
) -> Segmenter | None:
    """Return the segmenter of image n of a step, or one that was trained on its own truth.

    Args:
        what: what is measured.
        plan: settings.
        step: images.
        n: number within the step.
        elements: poses that it learns from; None takes the segmenter as it is.
        canvas: window at pose 0 that it learns from; default the fitted image.

    Returns:
        None when the image shows fewer than two classes.
    """
    if elements is None or what.f is None:
        return what.segmenter
    if step.truths is None or step.fitted_truths is None:
        return None
    image, truth = step.fitted[n], step.fitted_truths[n]
    if canvas is not None:
        image = canvas.pose(step.whole[n][None], 0)[0]
        h, w = canvas.source
        truth = posed_labels(canvas, step.truths[n][:h, :w], 0)
    rng = np.random.default_rng([plan.seed, step.first + n, 7])
    marks = scribbles(without_borders(truth), np.ones(truth.shape, bool), plan.budget, rng)
    if len(np.unique(marks[marks > 0])) < 2:
        step.notes.append(
            f"Image {step.first} shows fewer than two classes: no classifier was trained on it."
        )
        return None
    return TrainedSegmenter.of_image(what.f, image, marks, elements)


def _trainings(what: Measured) -> tuple[tuple[str, Elements], ...]:
    """Names of rows, and the poses that a segmenter is trained on."""
    return (("full", None),) if what.segmenter else (("full", (IDENTITY,)), (EVERY_POSE, D4))


def _under(rows: Rows, part: str) -> Rows:
    """Rows of accuracy under the name of the training; rows of a class keep its name."""
    if part == "full":
        return rows
    return tuple(replace(r, part=part if r.part == "full" else f"{r.part}, {part}") for r in rows)


def _on_canvas(
    step: Step, part: slice, plan: Plan, measured: Callable[[list[Tensor], Canvas], Rows | None]
) -> Piece:
    """Measure images of one size on the window that every angle shows, or say that they are too small."""
    images = step.whole[part]
    h, w = images[0].shape[-2:]
    canvas = canvas_for((h, w), plan)
    if canvas is None:
        step.notes.append(
            f"{_words(images[0])} are too small to be turned by any angle: they were left out there."
        )
        return len(images), None
    if canvas.invented:
        step.notes.append(
            f"{_words(images[0])} are too small to be turned without gaps: mirrored pixels fill these, and only the "
            "inscribed disc counts. For arbitrary angles larger images are better."
        )
    return len(images), measured(images, canvas)


def _check_differentiable(f: FeatureFunction, image: Tensor) -> None:
    """Raise when a motion of the image does not reach the features, because something cut them off from it."""
    try:
        _, pushed = torch.func.jvp(f, (image[None],), (along(image[None], "right"),))
    except (RuntimeError, NotImplementedError) as error:
        raise UnsupportedCombination(
            f"the features have no derivative ({str(error).splitlines()[0]})."
        ) from error
    if not bool((pushed != 0).any()):
        raise UnsupportedCombination("the features do not depend on the image differentiably.")


def _features(what: Measured) -> FeatureFunction:
    if what.f is None:
        raise OptionError("Features were asked for, but only a segmenter was given.")
    return what.f


def _words(image: Tensor) -> str:
    return f"Images of {image.shape[-2]} x {image.shape[-1]} px"
