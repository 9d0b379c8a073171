"""Counts and sizes of objects, per image and over all images."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vispe.segment.objects.labelling import ObjectList
from vispe.segment.objects.options import ObjectOptions
from vispe.segment.objects.table import Row

_DRAWS = 2000
_MANY = 10_000  # number of objects above which the mean is treated as normally distributed
_FRAME = (
    "unbiased counting frame: objects on the lower, right and last side are not counted; area of all data"
)
_CUT = (
    "of all objects in the table; biased by the border: objects cut by it have the size of their visible part"
)
_WITHIN = (
    "of objects inside the image; biased by the border: large objects touch it more often and are excluded"
)
_LEVELS = (10, 25, 50, 75, 90)


def summarize_image(
    objects: ObjectList, options: ObjectOptions, names: Sequence[str], area: float | None, volumes: bool
) -> dict[str, Any]:
    """Summarise the objects of one image, for the report.

    Args:
        objects: the objects.
        options: definition of objects.
        names: names of the K classes.
        area: area in um2 (volumes: um3) of the pixels with data; None if the pixel size is unknown.
        volumes: whether pages form volumes.

    Returns:
        The definition, the excluded objects, and for each class the count (rows of the table), 'counted_in_frame', the
        density derived from it ('per_um2' or 'per_um3') and the distribution of the equivalent diameter: mean with its
        95 % interval (bootstrap over objects), median, std and percentiles. The density is unbiased by the border, with
        or without `exclude_border`; the sizes are those of the table and are biased, as stated in 'sizes'.
    """
    class_names = [names[n - 1] for n in options.numbers(names)]
    of_class: dict[str, list[Row]] = {name: [] for name in class_names}
    for row in objects.rows:
        of_class[row["class"]].append(row)
    unit = "px" if area is None else "um"
    # clamp at 0: the weighted subtraction of small objects may overshoot
    frame_counts = {names[n - 1]: max(objects.in_frame.get(n, 0.0), 0.0) for n in options.numbers(names)}
    return {
        "touching": options.touching,
        "neighbours": 26 if volumes else 8,
        "fill_holes": options.fill_holes,
        "left_out": {"min_area": options.min_area, "smaller": objects.small, "at_the_border": objects.border},
        "interval": "bootstrap over objects",
        "density": _FRAME,
        f"{'volume_um3' if volumes else 'area_um2'}": area,
        "sizes": _WITHIN if options.exclude_border else _CUT,
        "classes": {
            name: {
                "count": len(rows),
                "counted_in_frame": frame_counts[name],
                **(
                    {}
                    if area is None
                    else {f"per_um{3 if volumes else 2}": frame_counts[name] / area if area else None}
                ),
                f"equivalent_diameter_{unit}": distribution([r[f"equivalent_diameter_{unit}"] for r in rows]),
            }
            for name, rows in of_class.items()
        },
    }


def distribution(values: Sequence[float]) -> dict[str, Any]:
    """Return n, mean with 95 % interval, std and percentiles of a sample; None if undefined.

    Example:
        >>> summary = distribution([1.0, 2.0, 3.0])
        >>> summary["mean"], summary["p50"]
        (2.0, 2.0)
    """
    sample = np.asarray(values, float)
    n = len(sample)
    if not n:
        empty = dict.fromkeys(("mean", "ci95", "std", *(f"p{level}" for level in _LEVELS)))
        return {"n": 0, **empty}
    interval = None
    if n >= _MANY:
        half = 1.96 * sample.std(ddof=1) / n**0.5
        interval = [float(sample.mean() - half), float(sample.mean() + half)]
    elif n > 1:
        rng = np.random.default_rng(0)
        # bootstrap over objects
        means = [sample[rng.integers(0, n, n)].mean() for _ in range(_DRAWS)]
        interval = np.percentile(means, [2.5, 97.5]).tolist()
    return {
        "n": n,
        "mean": float(sample.mean()),
        "ci95": interval,
        "std": float(sample.std(ddof=1)) if n > 1 else None,
        **{f"p{k}": float(v) for k, v in zip(_LEVELS, np.percentile(sample, _LEVELS), strict=True)},
    }


def summarize_batch(records: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Summarise the objects of all images; None without any.

    Intervals are from a bootstrap over images, which resamples complete images; a single image has none.

    Args:
        records: records of the images, with "objects" from `summarize_image`.

    Returns:
        For each class the count, the mean count per image, the density (objects in the counting frame of all images /
        area of all images) and the mean diameter of an object, in microns if all images have a pixel size, in
        pixels if none has; for a mixture, also of pages and volumes, there are no density and no diameter.
    """
    per_image = [record["objects"]["classes"] for record in records if "objects" in record]
    if not per_image:
        return None
    kinds = {record["objects"]["neighbours"] for record in records if "objects" in record}
    # bootstrap over images: one row of image indices per resample
    draws = np.random.default_rng(0).integers(0, len(per_image), (_DRAWS, len(per_image)))
    out: dict[str, Any] = {"images": len(per_image), "interval": "bootstrap over images", "classes": {}}
    for name in per_image[0]:
        counts = np.array([image_objects[name]["count"] for image_objects in per_image], float)
        summary: dict[str, Any] = {
            "count": int(counts.sum()),
            "mean_per_image": float(counts.mean()),
            "mean_per_image_ci95": _percentile_interval(counts[draws].mean(1))
            if len(per_image) > 1
            else None,
        }
        for kind, key in (("area_um2", "per_um2"), ("volume_um3", "per_um3")):
            sizes = np.array([r["objects"].get(kind) or 0.0 for r in records if "objects" in r], float)
            if not sizes.all():
                continue
            framed = np.array([image_objects[name]["counted_in_frame"] for image_objects in per_image], float)
            summary[key] = float(framed.sum() / sizes.sum())
            resampled = framed[draws].sum(1) / sizes[draws].sum(1)
            summary[f"{key}_ci95"] = _percentile_interval(resampled) if len(per_image) > 1 else None
        for unit in ("um", "px"):
            key = f"equivalent_diameter_{unit}"
            known = all(key in image_objects[name] for image_objects in per_image)
            # diameters of discs and of balls have no common mean
            if not counts.sum() or not known or len(kinds) > 1:
                continue
            sums = counts * [image_objects[name][key]["mean"] or 0.0 for image_objects in per_image]
            resampled = counts[draws].sum(1)
            means = sums[draws].sum(1)[resampled > 0] / resampled[resampled > 0]
            summary[f"mean_{key}"] = float(sums.sum() / counts.sum())
            summary[f"mean_{key}_ci95"] = _percentile_interval(means) if len(per_image) > 1 else None
        out["classes"][name] = summary
    return out


def _percentile_interval(values: np.ndarray) -> list[float]:
    return np.percentile(values, [2.5, 97.5]).tolist()
