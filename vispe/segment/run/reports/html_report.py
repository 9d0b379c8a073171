"""HTML report of a run: results of each image, their reliability, and the settings."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from vispe.errors import counted
from vispe.segment.invariance_report.html_section import trust_section
from vispe.segment.materials.html_section import materials_section
from vispe.segment.objects.html_section import objects_section
from vispe.segment.run.reports.html_fractions import column_description, fraction_table, verdict
from vispe.utils.files import atomic_path
from vispe.utils.report.html_page import Page

NAME = "report.html"
SHOWN = 12
"""Number of images shown as figures; the table lists all."""

_FEATURES = 8  # number of groups of features in the table
_SIDE = 900  # largest side in pixels of a figure in the report


def write_page(folder: Path, report: Mapping[str, Any]) -> Path:
    """Write `report.html` next to `report.json`, replacing an earlier one of this run.

    Args:
        folder: folder of the results.
        report: content of `report.json`.
    """
    page = report_page(folder, report)
    with atomic_path(folder / NAME, True) as temporary:
        # file names may contain bytes that are not valid text
        temporary.write_text(page.html(), encoding="utf-8", errors="backslashreplace")
    return folder / NAME


def report_page(folder: Path, report: Mapping[str, Any]) -> Page:
    """Return the HTML report of a run, with the figures in its folder."""
    images, failures = report["images"], report["failures"]
    title = Path(images[0]["image"]).name if len(images) == 1 else counted(len(images), "image")
    page = Page(title, "Segmentation", *verdict(report))
    for note in report["notes"]:
        page.text(note, soft=True)
    if failures:
        page.section("Skipped images")
        page.table(
            [["image", "reason"], *([Path(f["image"]).name, f["reason"]] for f in failures)], left=(0, 1)
        )
    if not images:
        return page
    _figures(page, folder, images)
    page.section("Fractions of the area")
    page.text(column_description(images))
    page.table(fraction_table(report))
    for record in images:
        if fraction := record.get("excluded_share"):
            page.text(
                f"{100 * fraction:.3g} % of the pixels of {Path(record['image']).name} are excluded (crop, mask or "
                "transparency).",
                soft=True,
            )
    trust_section(page, folder, images, SHOWN)
    objects_section(page, folder, images)
    materials_section(page, images)
    _confidence(page, report)
    _importance(page, report)
    page.section("Settings")
    page.table([["", ""], *_used(report)], left=(0, 1))
    return page


def _figures(page: Page, folder: Path, images: Sequence[Mapping[str, Any]]) -> None:
    """Add the overlays of the first images, and maps of image regions that differ from the training images."""
    page.section("Result")
    if len(images) > SHOWN:
        page.text(
            f"The first {SHOWN} of {counted(len(images), 'image')}; the others are in the folder.", soft=True
        )
    for record in images[:SHOWN]:
        files, name = record["files"], Path(record["image"]).name
        for kind, caption in (
            ("overlay", "classes"),
            ("domain", "bright where it differs from the training images"),
        ):
            path = folder / Path(files[kind]).name if kind in files else None
            if path is not None and path.is_file():
                page.image(_small(path), f"{name}: {caption}")
        maps = [
            (title, *_panel(folder / Path(files[kind]).name))
            for kind, title in (
                ("uncertainty", "uncertainty"),
                ("outlines", "objects"),
                ("object_classes", "object classes"),
                ("disagreement", "disagreement of poses"),
            )
            if kind in files and files[kind].endswith(".png") and (folder / Path(files[kind]).name).is_file()
        ]
        if maps:
            page.panels(
                maps, f"{name}: maps in the folder; uncertainty and disagreement are bright where high"
            )
        for note in record.get("notes", ()):
            page.text(note, soft=True)


def _panel(path: Path) -> tuple[bytes, tuple[int, int]]:
    """Return a figure as a small JPEG, with its original size (width, height)."""
    with Image.open(path) as image:
        size = image.size
    return _small(path, _SIDE // 2), size


def _small(path: Path, side: int = _SIDE) -> bytes:
    """Return a figure as a JPEG of at most `side` pixels."""
    with Image.open(path) as image:
        figure = image.convert("RGB")
    figure.thumbnail((side, side), Image.Resampling.LANCZOS)
    out = io.BytesIO()
    figure.save(out, "JPEG", quality=88)
    return out.getvalue()


def _confidence(page: Page, report: Mapping[str, Any]) -> None:
    """Add the cross-validated accuracy on scribbles, the only estimate without ground truth."""
    facts = report.get("training", {}).get("calibration")
    if facts is None:
        return
    page.section("Confidence")
    if "reason" in facts:
        page.text(f"No cross-validation over scribbles: {facts['reason']}.")
        return
    scores_held_out = facts.get("left_out")
    if scores_held_out is not None:
        page.text(
            f"Balanced accuracy on held-out scribbles: {100 * scores_held_out['balanced_accuracy']:.0f} % "
            f"({facts['folds']}-fold cross-validation). This measures the agreement of your own scribbles; "
            "unlabelled pixels near boundaries are harder."
        )
        rows = [["class", "scribbles", "recall when held out"]]
        rows += [
            [name, str(facts["strokes"].get(name, "")), f"{100 * fraction:.0f} %"]
            for name, fraction in scores_held_out["recall"].items()
        ]
        page.table(rows)
    error = facts["expected_calibration_error"]
    page.text(
        f"Probabilities on these scribbles are off by {100 * error:.1f} percentage points on average.",
        soft=True,
    )


def _importance(page: Page, report: Mapping[str, Any]) -> None:
    """Add the features that the classifier depends on most."""
    importance = report.get("training", {}).get("feature_importance")
    if not isinstance(importance, dict) or not importance:
        return
    page.section("Features")
    page.text(
        "Decrease of the probability of the labelled class, in percentage points, if the values of these features are "
        "permuted among the labelled pixels. Correlated features share their importance."
    )
    rows = sorted(importance.items(), key=lambda item: -item[1])[:_FEATURES]
    page.table([["features", "decrease"], *([name, f"{100 * drop:.1f}"] for name, drop in rows)])


def _used(report: Mapping[str, Any]) -> list[list[str]]:
    training, post = report.get("training", {}), report["post"]
    rows = [
        ["command", f"vispe {report['command']}"],
        ["features", f"{report['features'].get('kind', 'text')} ({report['model']})"],
        ["classifier", str(report["classifier"])],
        ["class prior", str(post["prior"])],
    ]
    changed = {name: value for name, value in post.items() if name != "prior" and value}
    rows += [["post-processing", ", ".join(f"{k} {v}" for k, v in changed.items())]] if changed else []
    if training.get("images"):
        rows.append(["trained on", ", ".join(Path(str(name)).name for name in training["images"])])
    if training.get("labelled_pixels"):
        drawn = ", ".join(f"{name} {count}" for name, count in training["labelled_pixels"].items())
        rows.append(["labelled pixels", drawn])
    read = report.get("reading", {})
    rows += [["crop (rows, columns)", read["crop"]]] if read.get("crop") else []
    rows += [["mask", ", ".join(Path(path).name for path in read["mask"])]] if read.get("mask") else []
    rows += [["seed", str(report["seed"])], ["device", str(report["device"])]]
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items() if number)
    return [*rows, ["versions", versions]]
