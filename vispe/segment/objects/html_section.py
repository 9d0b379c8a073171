"""Section of the HTML report about objects: counts, densities and sizes."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vispe.errors import counted
from vispe.utils.report.html_page import Page

_BINS = 24
_SHAPES = {False: "discs of equal area", True: "balls of equal volume"}


def objects_section(page: Page, folder: Path, images: Sequence[Mapping[str, Any]]) -> None:
    """Add counts, densities and sizes by image, and a histogram of sizes by class; a no-op without objects."""
    images = [record for record in images if "objects" in record]
    if not images:
        return
    page.section("Objects")
    rows = [["image", "class", "objects", "density", "mean diameter", "median", "10 % to 90 %"]]
    for record in images:
        for name, summary in record["objects"]["classes"].items():
            row = [Path(record["image"]).name, name, str(summary["count"])]
            rows.append([*row, _density(summary), *_sizes(summary)])
    page.table(rows, left=(0, 1))
    classes_table(page, images)
    first, volumes = images[0]["objects"], {record["objects"]["neighbours"] == 26 for record in images}
    shapes = " (pages) or ".join(_SHAPES[kind] for kind in sorted(volumes)) + " (volumes)" * (
        len(volumes) > 1
    )
    page.text(
        "Objects: rows in the tables of the folder. Density: unbiased by the border (counting frame), so it differs "
        "from the number of objects divided by the area. Diameters are those of "
        f"{shapes}, {first['sizes']}. Orientation in the tables: degrees counter-clockwise from the horizontal axis.",
        soft=True,
    )
    for (name, unit, flat), values in _diameters(folder, images).items():
        which = "all images" if len(volumes) == 1 else "pages" if flat else "volumes"
        page.histogram(values, _BINS, f"{name}: objects by diameter ({unit}), {which}")


def classes_table(page: Page, images: Sequence[Mapping[str, Any]]) -> None:
    """Add the number of objects of each object class by image; a no-op without object classes."""
    records = [
        (r["image"], r["objects"]["object_classes"]) for r in images if "object_classes" in r["objects"]
    ]
    if not records:
        return
    learnt = records[0][1]
    page.table(
        [
            ["image", *learnt["counts"]],
            *([Path(image).name, *map(str, each["counts"].values())] for image, each in records),
        ]
    )
    text = f"Object classes, learnt from {counted(sum(learnt['examples'].values()), 'example')}"
    if "accuracy" in learnt:
        text += f"; {100 * learnt['accuracy']:.0f} % of left-out examples are classified correctly"
    page.text(f"{text}.", soft=True)


def _density(summary: Mapping[str, Any]) -> str:
    for key, unit in (("per_um2", "µm²"), ("per_um3", "µm³")):
        if summary.get(key) is not None:
            return f"{summary[key]:.3g} /{unit}"
    return "no pixel size"


def _sizes(summary: Mapping[str, Any]) -> list[str]:
    unit = "um" if "equivalent_diameter_um" in summary else "px"
    sizes = summary[f"equivalent_diameter_{unit}"]
    if not sizes["n"]:
        return ["none", "", ""]
    interval = (
        f" ({sizes['ci95'][0]:.3g} to {sizes['ci95'][1]:.3g})" if sizes.get("ci95") else " (no interval)"
    )
    mean = f"{sizes['mean']:.3g}{interval} {unit.replace('um', 'µm')}"
    return [mean, f"{sizes['p50']:.3g}", f"{sizes['p10']:.3g} to {sizes['p90']:.3g}"]


def _diameters(folder: Path, images: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str, bool], np.ndarray]:
    """Read the diameters of all objects by class, unit, and whether they are those of pages."""
    diameters: dict[tuple[str, str, bool], list[float]] = {}
    for record in images:
        table = folder / Path(record["files"]["objects_table"]).name
        if not table.is_file():
            continue
        with table.open(newline="", encoding="utf-8", errors="backslashreplace") as stream:
            for row in csv.DictReader(stream):
                unit = "um" if row["equivalent_diameter_um"] else "px"
                key = row["class"], unit.replace("um", "µm"), bool(row["area_px"])
                diameters.setdefault(key, []).append(float(row[f"equivalent_diameter_{unit}"]))
    return {key: np.array(values) for key, values in diameters.items() if len(values) > 1}
