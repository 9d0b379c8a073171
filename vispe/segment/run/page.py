"""The page of a run: what was found in each image, how far it can be trusted, and what it was made with."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from vispe.files import atomic_path
from vispe.report.page import Page, Tone

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
    page.text(
        "In per cent, with the interval of 95 % where there is one. Uncertainty is 1 minus how much more probable the "
        "first class of a pixel is than the second, averaged over the image."
    )
    page.table(_fractions(report))
    for record in images:
        if share := record.get("excluded_share"):
            page.text(
                f"{100 * share:.3g} % of the pixels of {Path(record['image']).name} are excluded (crop, mask or "
                "transparency) and count in no number.",
                soft=True,
            )
    _pictures(page, folder, images)
    _objects(page, report)
    _materials(page, images)
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
    words = []
    for name in report["classes"]:
        known = [r["fractions"][name] for r in images if r["fractions"].get(name) is not None]
        if known:
            words.append(f"{name} {100 * sum(known) / len(known):.1f} %")
    text = ", ".join(words)
    if len(images) > 1:
        text += " on average"
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
    rows = [["image", *names, "uncertainty", *["mIoU"] * scored, *["unlike training (limit 1)"] * judged]]
    for record in images:
        ends = record.get("fractions_ci95") or {}
        cells = [_share(record["fractions"].get(name), ends.get(name)) for name in names]
        row = [Path(record["image"]).name, *cells, f"{record['mean_uncertainty']:.3f}"]
        row += [_number(record.get("scores", {}).get("miou"), ".3f")] * scored
        row += [_number((record.get("domain") or {}).get("score"), ".2f")] * judged
        rows.append(row)
    return rows


def _share(value: float | None, ends: Sequence[float] | None) -> str:
    if value is None:
        return "no data"
    between = "" if ends is None else f" ({100 * ends[0]:.1f} to {100 * ends[1]:.1f})"
    return f"{100 * value:.1f}{between}"


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
        for note in record.get("notes", ()):
            page.text(note, soft=True)


def _small(path: Path) -> bytes:
    """Return a picture as a JPEG of a size for a page."""
    with Image.open(path) as image:
        shown = image.convert("RGB")
    shown.thumbnail((_SIDE, _SIDE), Image.Resampling.LANCZOS)
    out = io.BytesIO()
    shown.save(out, "JPEG", quality=88)
    return out.getvalue()


def _objects(page: Page, report: Mapping[str, Any]) -> None:
    """Show counts and sizes of objects, by image."""
    images = [r for r in report["images"] if "objects" in r]
    if not images:
        return
    page.section("Objects")
    rows = [["image", "class", "objects", "mean diameter", "median", "10 % to 90 %"]]
    for record in images:
        for name, found in record["objects"]["classes"].items():
            unit = "um" if "equivalent_diameter_um" in found else "px"
            sizes = found[f"equivalent_diameter_{unit}"]
            mean = _number(sizes["mean"], ".3g")
            if sizes.get("ci95"):
                mean += f" ({sizes['ci95'][0]:.3g} to {sizes['ci95'][1]:.3g})"
            spread = f"{_number(sizes['p10'], '.3g')} to {_number(sizes['p90'], '.3g')}" if sizes["n"] else ""
            shown = unit.replace("um", "µm") if sizes["n"] else ""
            row = [Path(record["image"]).name, name, str(found["count"])]
            rows.append([*row, f"{mean} {shown}".strip(), _number(sizes["p50"], ".3g"), spread])
    page.table(rows, left=(0, 1))
    page.text(
        "Diameters are those of discs of the same area. Each object has a row in the tables of the folder.",
        soft=True,
    )


def _materials(page: Page, images: Sequence[Mapping[str, Any]]) -> None:
    """Show the materials numbers of each image, of stacks the means over pages."""
    own = [r for r in images if r.get("materials")]
    if not own:
        return
    from vispe.segment.materials.run import table_row

    page.section("Materials numbers")
    rows = [["image", "of", "mean intercept", "ASTM grain size", "boundary per area", "elongation"]]
    for record in own:
        found = table_row(record["materials"])
        unit = found.pop("unit").replace("um", "µm")
        for name, numbers in found.items():
            row = [Path(record["image"]).name, name.removeprefix("class.")]
            row += [
                f"{_number(numbers['mean_intercept'], '.3g')} {unit}",
                _number(numbers["grain_size_number"], ".1f"),
            ]
            row += [
                f"{_number(numbers['boundary_per_area'], '.3g')} /{unit}",
                _number(numbers["elongation"], ".2f"),
            ]
            rows.append(row)
    page.table(rows, left=(0, 1))


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
