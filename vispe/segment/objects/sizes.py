"""Counts and sizes of objects, of one image and of all."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vispe.segment.objects.labelling import Found
from vispe.segment.objects.options import ObjectOptions
from vispe.segment.objects.table import Row

_DRAWS = 2000
_MANY = 10_000  # objects from which on the mean is normal for any purpose
_FRAME = (
    "unbiased counting frame: objects on the lower, right and last side are not counted; area of all data"
)
_CUT = "of all objects in the table; biased by the border: objects that it cuts have the size of their visible part"
_WITHIN = (
    "of objects inside the image; biased by the border: large objects touch it more often and are left out"
)
_LEVELS = (10, 25, 50, 75, 90)


def of_image(
    found: Found, options: ObjectOptions, names: Sequence[str], area: float | None, volumes: bool
) -> dict[str, Any]:
    """Summarise the objects of one image, for the report.

    Args:
        found: the objects.
        options: what counted.
        names: of the K classes.
        area: in um2, or um3 of volumes, of the pixels with data; None where the pixel size is not known.
        volumes: whether pages were taken together.

    Returns:
        What counted, what was left out, and for each class the count (rows of the table), 'counted_in_frame', the
        density made of it ('per_um2' or 'per_um3') and the distribution of the equivalent diameter: mean with its 95 %
        interval (bootstrap over objects), median, std and percentiles. The density has no bias from the border, with
        or without `exclude_border`; the sizes are those of the table and do have one, as 'sizes' states.
    """
    asked = [names[n - 1] for n in options.numbers(names)]
    of_class: dict[str, list[Row]] = {name: [] for name in asked}
    for row in found.rows:
        of_class[row["class"]].append(row)
    unit = "px" if area is None else "um"
    # never below 0: small objects are subtracted with weights
    framed = {names[n - 1]: max(found.framed.get(n, 0.0), 0.0) for n in options.numbers(names)}
    return {
        "touching": options.touching,
        "neighbours": 26 if volumes else 8,
        "fill_holes": options.fill_holes,
        "left_out": {"min_area": options.min_area, "smaller": found.small, "at_the_border": found.border},
        "interval": "bootstrap over objects",
        "density": _FRAME,
        f"{'volume_um3' if volumes else 'area_um2'}": area,
        "sizes": _WITHIN if options.exclude_border else _CUT,
        "classes": {
            name: {
                "count": len(rows),
                "counted_in_frame": framed[name],
                **(
                    {}
                    if area is None
                    else {f"per_um{3 if volumes else 2}": framed[name] / area if area else None}
                ),
                f"equivalent_diameter_{unit}": distribution([r[f"equivalent_diameter_{unit}"] for r in rows]),
            }
            for name, rows in of_class.items()
        },
    }


def distribution(values: Sequence[float]) -> dict[str, Any]:
    """Describe a sample: n, mean with 95 % interval, std and percentiles; None where there is nothing to say.

    >>> found = distribution([1.0, 2.0, 3.0])
    >>> found["mean"], found["p50"]
    (2.0, 2.0)
    """
    sample = np.asarray(values, float)
    n = len(sample)
    if not n:
        empty = dict.fromkeys(("mean", "ci95", "std", *(f"p{level}" for level in _LEVELS)))
        return {"n": 0, **empty}
    ends = None
    if n >= _MANY:
        half = 1.96 * sample.std(ddof=1) / n**0.5
        ends = [float(sample.mean() - half), float(sample.mean() + half)]
    elif n > 1:
        rng = np.random.default_rng(0)
        means = [sample[rng.integers(0, n, n)].mean() for _ in range(_DRAWS)]
        ends = np.percentile(means, [2.5, 97.5]).tolist()
    return {
        "n": n,
        "mean": float(sample.mean()),
        "ci95": ends,
        "std": float(sample.std(ddof=1)) if n > 1 else None,
        **{f"p{k}": float(v) for k, v in zip(_LEVELS, np.percentile(sample, _LEVELS), strict=True)},
    }


def of_batch(records: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Summarise the objects of all images; None where there are none.

    Intervals are of a bootstrap over images, with the objects of an image kept together; one image has none.

    Args:
        records: of the images, with "objects" from `of_image`.

    Returns:
        For each class the count, the mean count of an image, the density (objects in the counting frame of all images /
        area of all images) and the mean diameter of an object, in microns where all images have a pixel size, else in
        pixels where none has; with images of both kinds there are no density and no diameter.
    """
    each = [record["objects"]["classes"] for record in records if "objects" in record]
    if not each:
        return None
    draws = np.random.default_rng(0).integers(0, len(each), (_DRAWS, len(each)))
    out: dict[str, Any] = {"images": len(each), "interval": "bootstrap over images", "classes": {}}
    for name in each[0]:
        counts = np.array([found[name]["count"] for found in each], float)
        summary: dict[str, Any] = {
            "count": int(counts.sum()),
            "mean_per_image": float(counts.mean()),
            "mean_per_image_ci95": _ends(counts[draws].mean(1)) if len(each) > 1 else None,
        }
        for kind, key in (("area_um2", "per_um2"), ("volume_um3", "per_um3")):
            sizes = np.array([r["objects"].get(kind) or 0.0 for r in records if "objects" in r], float)
            if not sizes.all():
                continue
            framed = np.array([found[name]["counted_in_frame"] for found in each], float)
            summary[key] = float(framed.sum() / sizes.sum())
            drawn = framed[draws].sum(1) / sizes[draws].sum(1)
            summary[f"{key}_ci95"] = _ends(drawn) if len(each) > 1 else None
        for unit in ("um", "px"):
            key = f"equivalent_diameter_{unit}"
            if not counts.sum() or any(key not in found[name] for found in each):
                continue
            sums = counts * [found[name][key]["mean"] or 0.0 for found in each]
            drawn = counts[draws].sum(1)
            means = sums[draws].sum(1)[drawn > 0] / drawn[drawn > 0]
            summary[f"mean_{key}"] = float(sums.sum() / counts.sum())
            summary[f"mean_{key}_ci95"] = _ends(means) if len(each) > 1 else None
        out["classes"][name] = summary
    return out


def _ends(values: np.ndarray) -> list[float]:
    return np.percentile(values, [2.5, 97.5]).tolist()
