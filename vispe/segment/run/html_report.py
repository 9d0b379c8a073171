"""The page of a run: what was found in each image, how far it can be trusted, and what it was made with."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from vispe.files import atomic_path
from vispe.report.html_page import Page, Tone
from vispe.segment.classify.fractions import estimate_words, map_words
from vispe.segment.invariance_report.html_section import trust_section
from vispe.segment.materials.html_section import materials_section
from vispe.segment.objects.html_section import objects_section

NAME = "report.html"
SHOWN = 12
"""Images that are shown as pictures; the table has all."""

_SIDE = 900  # pixels of a picture on the page at most


def write_page(folder: Path, report: Mapping[str, Any]) -> Path:
    """Write `report.html` beside `report.json`, in place of an earlier one of this run.

    Args:
        folder: of the results.
        report: what `report.json` holds.
    """
    page = report_page(folder, report)
    with atomic_path(folder / NAME, True) as temporary:
        # names of files may hold what is no text
        temporary.write_text(page.html(), encoding="utf-8", errors="backslashreplace")
    return folder / NAME


def report_page(folder: Path, report: Mapping[str, Any]) -> Page:
    """Return the page of a run, with the pictures that lie in its folder."""
    images, failures = report["images"], report["failures"]
    page = Page(_named(images), "Segmentation", *_verdict(report))
    for note in report["notes"]:
        page.text(note, soft=True)
    if failures:
        page.section("Left out")
        page.table([["image", "why"], *([Path(f["image"]).name, f["reason"]] for f in failures)], left=(0, 1))
    if not images:
        return page
    page.section("Fractions of the area")
    page.text(_explained(images))
    page.table(_fractions(report))
    for record in images:
        if share := record.get("excluded_share"):
            page.text(
                f"{100 * share:.3g} % of the pixels of {Path(record['image']).name} are excluded (crop, mask or "
                "transparency) and count in no number.",
                soft=True,
            )
    _pictures(page, folder, images)
    trust_section(page, folder, images, SHOWN)
    objects_section(page, folder, images)
    materials_section(page, images)
    _confidence(page, report)
    page.section("What was used")
    page.table([["", ""], *_used(report)], left=(0, 1))
    return page


def _named(images: Sequence[Mapping[str, Any]]) -> str:
    return Path(images[0]["image"]).name if len(images) == 1 else f"{len(images)} images"


def _verdict(report: Mapping[str, Any]) -> tuple[str, Tone]:
    """Return the sentence at the top: fractions, objects, and what speaks against them."""
    images = report["images"]
    if not images:
        return "No image could be used.", "bad"
    shares = {name: _mean(images, "map_fractions", name) for name in report["classes"]}
    text = map_words({name: share for name, share in shares.items() if share is not None} or {"": None})
    if _estimated(images) and None not in shares.values():
        text += "; estimated true fractions: "
        text += ", ".join(
            f"{name} {100 * _mean(images, 'fractions', name):.1f} %" for name in report["classes"]
        )
    if len(images) > 1:
        text += " (averages over images)"
    counts: dict[str, int] = {}
    for record in images:
        for name, found in record.get("objects", {}).get("classes", {}).items():
            counts[name] = counts.get(name, 0) + found["count"]
    if counts:
        text += "; objects: " + ", ".join(f"{n} {name}" for name, n in counts.items())
    strange = sum(bool((r.get("domain") or {}).get("differs")) for r in images)
    if strange:
        which = "it differs" if len(images) == 1 else f"{strange} of {len(images)} images differ"
        return f"{text}. Look closely: {which} from the training images.", "bad"
    if report["failures"]:
        return f"{text}. {len(report['failures'])} image(s) were left out.", "mild"
    return f"{text}.", "plain"


def _fractions(report: Mapping[str, Any]) -> list[list[str]]:
    """Return the table of all images, a column for each class."""
    images, names = report["images"], report["classes"]
    scored = any("scores" in r for r in images)
    judged = any(r.get("domain") for r in images)
    estimated = _estimated(images)
    heads = [f"{name}, {kind}" for name in names for kind in ("map", *["estimated"] * estimated)]
    rows = [["image", *heads, "uncertainty", *["mIoU"] * scored, *["unlike training (limit 1)"] * judged]]
    for record in images:
        ends, cells = record.get("fractions_ci95") or {}, []
        for name in names:
            share = record["map_fractions"].get(name)
            cells.append("no data" if share is None else f"{100 * share:.1f}")
            if estimated:
                own = record["fraction_kind"] == "estimate"
                cells.append(estimate_words(record["fractions"].get(name), ends.get(name), "") if own else "")
        row = [Path(record["image"]).name, *cells, f"{record['mean_uncertainty']:.3f}"]
        row += [_number(record.get("scores", {}).get("miou"), ".3f")] * scored
        row += [_number((record.get("domain") or {}).get("score"), ".2f")] * judged
        rows.append(row)
    return rows


def _explained(images: Sequence[Mapping[str, Any]]) -> str:
    """Return what the columns of the table of fractions mean."""
    words = ["In per cent. Map: share of the pixels of the label map, which all figures and legends show."]
    if _estimated(images):
        words.append(
            "Estimated: the true fraction of this image, from the class probabilities and the estimated frequencies of "
            "the classes, with its 95 % interval; it differs from the map where pixels are uncertain. 'At most' and "
            "'at least' stand for an interval that reaches 0 or 100 %."
        )
        if any(None in (r["fractions_ci95"] or {"": None}).values() for r in images):
            words.append(
                "No interval: the map has no pixel of the class, or the classifier gives no intervals."
            )
    words.append(
        "Uncertainty is 1 minus how much more probable the first class of a pixel is than the second, averaged over "
        "the image."
    )
    return " ".join(words)


def _estimated(images: Sequence[Mapping[str, Any]]) -> bool:
    return any(record["fraction_kind"] == "estimate" for record in images)


def _mean(images: Sequence[Mapping[str, Any]], kind: str, name: str) -> float | None:
    known = [r[kind][name] for r in images if r[kind].get(name) is not None]
    return sum(known) / len(known) if known else None


def _pictures(page: Page, folder: Path, images: Sequence[Mapping[str, Any]]) -> None:
    """Show the overlays of the first images, and where an image is unlike the training images."""
    page.section("Pictures")
    if len(images) > SHOWN:
        page.text(f"The first {SHOWN} of {len(images)} images; the others lie in the folder.", soft=True)
    for record in images[:SHOWN]:
        files, name = record["files"], Path(record["image"]).name
        for kind, words in (
            ("overlay", "classes"),
            ("domain", "bright where it is unlike the training images"),
        ):
            path = folder / Path(files[kind]).name if kind in files else None
            if path is not None and path.is_file():
                page.picture(_small(path), f"{name}: {words}")
        maps = [
            (title, *_panel(folder / Path(files[kind]).name))
            for kind, title in (
                ("uncertainty", "uncertainty"),
                ("outlines", "objects"),
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
    """Return a picture as a small JPEG, with its size (width, height)."""
    with Image.open(path) as image:
        size = image.size
    return _small(path, _SIDE // 2), size


def _small(path: Path, side: int = _SIDE) -> bytes:
    """Return a picture as a JPEG of a size for a page."""
    with Image.open(path) as image:
        shown = image.convert("RGB")
    shown.thumbnail((side, side), Image.Resampling.LANCZOS)
    out = io.BytesIO()
    shown.save(out, "JPEG", quality=88)
    return out.getvalue()


def _confidence(page: Page, report: Mapping[str, Any]) -> None:
    """Say how well the strokes foretell each other, which is what is known without a ground truth."""
    facts = report.get("training", {}).get("calibration")
    if facts is None:
        return
    page.section("Confidence")
    if "reason" in facts:
        page.text(f"Strokes were not left out to check the others: {facts['reason']}.")
        return
    found = facts.get("left_out")
    if found is not None:
        page.text(
            f"Strokes that were left out of training were recognised to {100 * found['balanced_accuracy']:.0f} % "
            f"({facts['folds']} parts, each class counting alike). That is what your own strokes say of each other; "
            "borders, where nobody draws, are harder."
        )
        rows = [["class", "strokes", "right when left out"]]
        rows += [
            [name, str(facts["strokes"].get(name, "")), f"{100 * share:.0f} %"]
            for name, share in found["recall"].items()
        ]
        page.table(rows)
    error = facts["expected_calibration_error"]
    page.text(
        f"Probabilities are off by {100 * error:.1f} percentage points on average, on such strokes.",
        soft=True,
    )


def _used(report: Mapping[str, Any]) -> list[list[str]]:
    """Return settings, in words."""
    training, post = report.get("training", {}), report["post"]
    rows = [
        ["command", f"vispe {report['command']}"],
        ["features", f"{report['features'].get('kind', 'text')} ({report['model']})"],
        ["classifier", str(report["classifier"])],
        ["classes weighed by", str(post["prior"])],
    ]
    changed = {name: value for name, value in post.items() if name != "prior" and value}
    rows += [["after the classifier", ", ".join(f"{k} {v}" for k, v in changed.items())]] if changed else []
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


def _number(value: float | None, how: str) -> str:
    return "" if value is None else format(value, how)
