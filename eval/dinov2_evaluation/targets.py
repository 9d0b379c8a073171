"""Targets of a student, from the rows of its results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dinov2_evaluation.probe_images import PLACELESS
from vispe.train.evaluate.criteria import GONE, Criterion
from vispe.train.evaluate.mask_scores import finite_mean
from vispe.utils.report.statistics import summarise

COSINE, RANK = 0.95, 0.6
"""Least cosine to the blanked teacher, and least share of the teacher's effective rank."""

UNSEEN = ("textures", "micrographs", "synthetic")
"""Kinds on which features should be like the teacher's; images of the pool are shown, but a student may know them."""


def targets(rows: Sequence[Mapping[str, Any]]) -> list[Criterion]:
    """Return each target; keys are 'r2 noise 224', 'cosine textures 518', 'corner', 'miou' ..."""
    return [*_looks(rows), *_scribbles(rows)]


def _looks(rows: Sequence[Mapping[str, Any]]) -> Iterator[Criterion]:
    looks = [row for row in rows if row["question"] == "look"]
    for kind in PLACELESS:
        for row in (r for r in looks if r["kind"] == kind):
            title = f"R² of position, {kind}, {row['size']} px"
            yield Criterion(f"r2 {kind} {row['size']}", title, row["r2"]["after"]["lr+ud"], GONE, "most")
    unseen = [row for kind in UNSEEN for row in looks if row["kind"] == kind]
    for row in unseen:
        title = f"cosine to the blanked teacher, {row['kind']}, {row['size']} px"
        value = float(np.mean(row["cosine_blanked"]))
        yield Criterion(f"cosine {row['kind']} {row['size']}", title, value, COSINE, "least")
    for row in unseen:
        for side, words in (("before", "the teacher's"), ("blanked", "the blanked teacher's")):
            title = f"effective rank, share of {words}, {row['kind']}, {row['size']} px"
            share = float(np.median(np.array(row["rank"]["after"]) / np.array(row["rank"][side])))
            yield Criterion(f"rank {side} {row['kind']} {row['size']}", title, share, RANK, "least")


def _scribbles(rows: Sequence[Mapping[str, Any]]) -> Iterator[Criterion]:
    if corner := _means(rows, "corner"):
        title = "mIoU lost with scribbles in one corner"
        yield Criterion("corner", title, corner["after"], corner["before"], "most")
    if own := _means(rows, "own"):
        title = "mIoU of few scribbles, tokens alone"
        yield Criterion("miou", title, own["after"], own["before"], "least")
        title = "mIoU of few scribbles, tokens alongside filters"
        yield Criterion("miou beside", title, own["after + filters"], own["before + filters"], "least")


def by_image(rows: Sequence[Mapping[str, Any]], key: str) -> dict[str, np.ndarray]:
    """Return 'own' of all micrographs, or 'corner' of the homogeneous ones, by source; {} where there are none."""
    sets = [r for r in rows if r["question"] == "scribbles" and (r["homogeneous"] or key == "own")]
    return (
        {name: np.array([v for r in sets for v in r[key][name]], float) for name in sets[0][key]}
        if sets
        else {}
    )


def _means(rows: Sequence[Mapping[str, Any]], key: str) -> dict[str, float]:
    return {name: finite_mean(values) for name, values in by_image(rows, key).items()}


def gains(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return student minus teacher, image by image, as `summarise` says it: mean, interval and others."""
    own, corner = by_image(rows, "own"), by_image(rows, "corner")
    pairs = {}
    if own:
        pairs["miou"] = own["after"] - own["before"]
        pairs["miou beside"] = own["after + filters"] - own["before + filters"]
    if corner:
        pairs["corner"] = corner["after"] - corner["before"]
    return {key: summarise(values).to_dict() for key, values in pairs.items()}


def others(rows: Sequence[Mapping[str, Any]], key: str) -> dict[str, float]:
    """Return the number of a target for filters, the teacher and the blanked teacher, where they have one."""
    what, *rest = key.split()
    if what == "r2":
        return {side: result["lr+ud"] for side, result in look(rows, rest[0], int(rest[1]))["r2"].items()}
    if what == "corner":
        return _means(rows, "corner")
    if what == "miou":
        result = _means(rows, "own")
        more = " + filters" if rest else ""
        return {"filters": result["filters"]} | {side: result[side + more] for side in ("before", "blanked")}
    return {}


def look(rows: Sequence[Mapping[str, Any]], kind: str, size: int) -> Mapping[str, Any]:
    """Return the row of a source of images at a size."""
    return next(r for r in rows if r["question"] == "look" and (r["kind"], r["size"]) == (kind, size))
