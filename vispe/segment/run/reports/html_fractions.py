"""Headline of the HTML report, and its table of area fractions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vispe.errors import counted
from vispe.segment.classify.fractions import estimate_words, map_words
from vispe.utils.report.html_page import Tone


def verdict(report: Mapping[str, Any]) -> tuple[str, Tone]:
    """Return the headline: fractions, objects, and warnings."""
    images = report["images"]
    if not images:
        return "No image could be used.", "bad"
    fractions = {name: _mean(images, "map_fractions", name) for name in report["classes"]}
    text = map_words(
        {name: fraction for name, fraction in fractions.items() if fraction is not None} or {"": None}
    )
    if _estimated(images) and None not in fractions.values():
        text += "; estimated true fractions: "
        text += ", ".join(
            f"{name} {100 * _mean(images, 'fractions', name):.1f} %" for name in report["classes"]
        )
    if len(images) > 1:
        text += " (averages over images)"
    counts: dict[str, int] = {}
    for record in images:
        for name, result in record.get("objects", {}).get("classes", {}).items():
            counts[name] = counts.get(name, 0) + result["count"]
    if counts:
        text += "; objects: " + ", ".join(f"{n} {name}" for name, n in counts.items())
    flagged = sum(bool((r.get("domain") or {}).get("differs")) for r in images)
    if flagged:
        which = "it differs" if len(images) == 1 else f"{flagged} of {counted(len(images), 'image')} differ"
        return f"{text}. Check the result: {which} from the training images.", "bad"
    if report["failures"]:
        return f"{text}. {counted(len(report['failures']), 'image')} skipped.", "mild"
    return f"{text}.", "plain"


def fraction_table(report: Mapping[str, Any]) -> list[list[str]]:
    """Return the table of all images, with columns for each class."""
    images, names = report["images"], report["classes"]
    scored = any("scores" in r for r in images)
    compared = any(r.get("domain") for r in images)
    estimated = _estimated(images)
    heads = [f"{name}, {kind}" for name in names for kind in ("map", *["estimated"] * estimated)]
    rows = [
        [
            "image",
            *heads,
            "uncertainty",
            *["mIoU"] * scored,
            *["out-of-distribution score (limit 1)"] * compared,
        ]
    ]
    for record in images:
        intervals, cells = record.get("fractions_ci95") or {}, []
        for name in names:
            fraction = record["map_fractions"].get(name)
            cells.append("no data" if fraction is None else f"{100 * fraction:.1f}")
            if estimated:
                has_estimate = record["fraction_kind"] == "estimate"
                cells.append(
                    estimate_words(record["fractions"].get(name), intervals.get(name), "")
                    if has_estimate
                    else ""
                )
        row = [Path(record["image"]).name, *cells, f"{record['mean_uncertainty']:.3f}"]
        row += [_number(record.get("scores", {}).get("miou"), ".3f")] * scored
        row += [_number((record.get("domain") or {}).get("score"), ".2f")] * compared
        rows.append(row)
    return rows


def column_description(images: Sequence[Mapping[str, Any]]) -> str:
    """Return the description of the columns of the fraction table."""
    sentences = [
        "In percent. Map: fraction of the pixels of the label map, as shown in all figures and legends."
    ]
    if _estimated(images):
        sentences.append(
            "Estimated: the true fraction of this image, from the class probabilities and the estimated class "
            "frequencies, with its 95 % interval; it differs from the map where pixels are uncertain. 'At most' and "
            "'at least' denote an interval that reaches 0 or 100 %."
        )
        if any(None in (r["fractions_ci95"] or {"": None}).values() for r in images):
            sentences.append(
                "No interval: the map has no pixel of the class, or the classifier provides no intervals."
            )
    sentences.append(
        "Uncertainty is 1 minus the difference between the largest and the second largest class probability of a "
        "pixel, averaged over the image."
    )
    return " ".join(sentences)


def _estimated(images: Sequence[Mapping[str, Any]]) -> bool:
    return any(record["fraction_kind"] == "estimate" for record in images)


def _mean(images: Sequence[Mapping[str, Any]], kind: str, name: str) -> float | None:
    known = [r[kind][name] for r in images if r[kind].get(name) is not None]
    return sum(known) / len(known) if known else None


def _number(value: float | None, format_spec: str) -> str:
    return "" if value is None else format(value, format_spec)
