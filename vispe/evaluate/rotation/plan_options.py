"""Options of `measure` checked and completed for its plan: metrics, patch size, classes, angles and shifts."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from vispe.backbones.batching import FeatureFunction, Segmenter, features_of
from vispe.errors import OptionError, ShapeError, UnknownName, counted, did_you_mean
from vispe.evaluate.rotation.metrics.translation import default_shifts
from vispe.evaluate.rotation.plan import ANGLES, GROUPS, OF_LABELS, QUICK, QUICK_ANGLES, center_crop


def check_metrics(metrics: Sequence[str] | None) -> None:
    """Raise `UnknownName` for a metric that is not in `GROUPS`."""
    for name in metrics or ():
        if name not in GROUPS:
            raise UnknownName(
                f"measure: unknown metric, got {name!r}.{did_you_mean(name, GROUPS)} Use one of {', '.join(GROUPS)}."
            )


def applicable_metrics(
    metrics: Sequence[str] | None,
    quick: bool,
    f: FeatureFunction | None,
    segmenter: Segmenter | None,
    truths: Sequence[Any] | None,
) -> tuple[tuple[str, ...], list[str]]:
    """Return the applicable metrics in order, and notes on skipped ones."""
    if f is None and segmenter is None:
        raise OptionError("measure: f and segmenter are None. Pass a feature function, a segmenter, or both.")
    check_metrics(metrics)
    reasons = {}
    for name in GROUPS:
        labels = name in OF_LABELS
        if not labels and f is None:
            reasons[name] = "a segmenter has no features"
        elif (name == "quadrant" and truths is None) or (labels and segmenter is None and truths is None):
            reasons[name] = "it needs masks"
    refused = next((m for m in metrics or () if m in reasons), None)
    if refused is not None:
        raise OptionError(f"measure: metric {refused!r} is not applicable: {reasons[refused]}. Omit it.")
    requested = metrics or (QUICK if quick else GROUPS)
    notes = []
    if truths is None and f is not None and segmenter is None and metrics is None:
        notes.append("Without masks accuracy was not measured; clusters of the features replace labels.")
    if quick and metrics is None:
        missing = [g for g in GROUPS if g not in QUICK and g not in reasons]
        notes += [f"Skipped by quick: {', '.join(missing)}."] if missing else []
    return tuple(g for g in GROUPS if g in requested and g not in reasons), notes


def inferred_patch_size(f: FeatureFunction, image: Tensor, size: int | None) -> int:
    """Infer the patch size from the feature map of the first image."""
    image = center_crop(image, None, size)[0]
    h, w = features_of(f, image[None]).shape[-2:]
    high, wide = image.shape[-2:]
    if high % h or wide % w or high // h != wide // w:
        raise ShapeError(
            f"measure: patch_size cannot be inferred, got {(h, w)} cells for an image of {(high, wide)} px. Pass "
            "`patch_size`, the pixels per cell."
        )
    return high // h


def class_count(
    n_classes: int | None,
    names: Sequence[str] | None,
    segmenter: Segmenter | None,
    truths: Sequence[Any] | None,
) -> int | None:
    """Return the number of classes; None without labels.

    Raises:
        OptionError: `names` has another number of entries, or the number of classes is unknown.
    """
    known = n_classes or getattr(segmenter, "n_classes", None) or (len(names) if names else None)
    if names is not None and not names:
        raise OptionError("measure: `names` must have one entry per class, got []. Pass one per class.")
    if names is not None and known != len(names):
        raise OptionError(
            f"measure: `names` must have {counted(known, 'entry')}, got {len(names)}. Pass one per class."
        )
    if known is not None:
        return int(known)
    if truths is not None:
        return int(max(np.max(np.asarray(truth)) for truth in truths))
    if segmenter is not None:
        raise OptionError(
            "measure: the number of classes of the segmenter is unknown, got neither names nor truths. Pass `names`, "
            "one per class, or `truths`."
        )
    return None


def all_angles(angles: Sequence[float] | None, quick: bool) -> tuple[float, ...]:
    """Return the unique angles in degrees, or the default ones; `OptionError` if there are none."""
    if angles is None:
        return QUICK_ANGLES if quick else tuple(float(a) for a in ANGLES)
    if not angles or not all(np.isfinite(angles)):
        raise OptionError(f"measure: `angles` must be finite degrees, got {list(angles)}. Pass at least one.")
    return tuple(dict.fromkeys(float(a) for a in angles))


def all_shifts(
    image: Tensor, patch_size: int | None, size: int | None, quick: bool
) -> tuple[tuple[int, int], ...]:
    """Return the shifts for all images, from the grid of the first one."""
    step = patch_size or 8
    if quick:
        return tuple(s for s in ((step, 0), (0, step), (step // 2, step // 2)) if s != (0, 0))
    h, w = center_crop(image, step, size)[0].shape[-2:]
    return default_shifts(step, (h // step, w // step))
