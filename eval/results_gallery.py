"""Segment six sample images of scikit-image from a few scribbles, and write the figures and table of the gallery.

python eval/results_gallery.py [NAME ...]     # segment, and write figures, table and results
python eval/results_gallery.py scribbles      # write the scribbles by the rule of results_gallery_scribbles.py
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import checkout  # noqa: F401  (finds vispe)
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from PIL import Image
from results_gallery_scribbles import EXAMPLES, HAND, area_of, scribbles

from vispe.cli.main import main as command
from vispe.errors import counted
from vispe.images.file_search import find_images
from vispe.segment.classify.fractions import estimate_words
from vispe.segment.overlays import PALETTE, boundaries
from vispe.utils.files import write_json
from vispe.utils.report.figure_style import INK, SOFT, hide_axes
from vispe.utils.version import versions

ROOT = Path(__file__).resolve().parents[1]
SCRIBBLES = ROOT / "data" / "demo"
FIGURES = ROOT / "docs" / "figures"
PAGE = ROOT / "docs" / "how-to" / "micrographs" / "gallery.md"
RESULT = ROOT / "eval" / "results" / "gallery.json"
START, END = "<!-- results: written by eval/results_gallery.py -->", "<!-- end of results -->"


def scribble_file(name: str) -> Path:
    """Return the file of the scribbles of an image."""
    return SCRIBBLES / f"{name}_scribbles.json"


def main() -> None:
    names = sys.argv[1:] or list(EXAMPLES)
    if names == ["scribbles"]:
        for name, example in EXAMPLES.items():
            if any(quantiles != HAND for quantiles in example.classes.values()):
                lines = ",\n".join(f"  {json.dumps(stroke)}" for stroke in scribbles(name))
                scribble_file(name).write_text(f"[\n{lines}\n]\n")
        return
    state = json.loads(RESULT.read_text()) if RESULT.exists() else {"rows": {}}
    for name in names:
        state["rows"][name] = run(name)
        print(name, state["rows"][name])
    rows = {name: state["rows"][name] for name in EXAMPLES if name in state["rows"]}
    write_json(RESULT, {"versions": versions(), "rows": rows}, force=True)
    head, rest = PAGE.read_text().split(START)
    PAGE.write_text(f"{head}{START}\n{table(rows)}\n{END}{rest.split(END)[1]}")


def words(name: str, out: str) -> list[str]:
    """Return the arguments of the command for an image."""
    example = EXAMPLES[name]
    labels = scribble_file(name).relative_to(ROOT)
    objects = ["--objects", example.objects] if example.objects else []
    return [
        *("segment", f"skimage:{name}", "--labels", str(labels), "--classes", ",".join(example.classes)),
        *example.options,
        *objects,
        *("-o", out),
    ]


def run(name: str) -> dict[str, Any]:
    """Segment an image, draw its figure, and return its numbers."""
    example, strokes = EXAMPLES[name], json.loads(scribble_file(name).read_text())
    with tempfile.TemporaryDirectory() as folder:
        arguments = words(name, folder)
        arguments[3] = str(scribble_file(name))  # from any folder
        if command(arguments) != 0:
            raise SystemExit(f"{name}: the command failed.")
        report = json.loads((Path(folder) / "report.json").read_text())
        labels = np.asarray(Image.open(Path(folder) / f"{name}_seg.png"))
    (page,) = report["images"]
    area = area_of(example, labels.shape)
    row: dict[str, Any] = {
        "scribbles": len(strokes),
        "labelled_share": round(sum(report["training"]["labelled_pixels"].values()) / labels[area].size, 4),
        "classes": {
            label: {
                "map": round(page["map_fractions"][label], 6),
                "fraction": round(page["fractions"][label], 6),
                "ci95": [round(bound, 6) for bound in page["fractions_ci95"][label]],
            }
            for label in example.classes
        },
    }
    if example.objects:
        summary = report["objects"]["classes"][example.objects]
        row["objects"] = {
            "class": example.objects,
            "count": summary["count"],
            "mean_diameter_px": round(summary["mean_equivalent_diameter_px"], 1),
            "known": example.known,
        }
    draw(name, strokes, labels[area], row)
    return row


def draw(name: str, strokes: list[dict[str, Any]], labels: np.ndarray, row: dict[str, Any]) -> None:
    """Draw the scribbles and the label map over the image."""
    example = EXAMPLES[name]
    (path,) = find_images([f"skimage:{name}"])
    whole = np.asarray(Image.open(path).convert("RGB"))
    area = area_of(example, whole.shape[:2])
    image = whole[area]
    colours = {label: np.array(PALETTE[i]) / 255 for i, label in enumerate(example.classes)}
    width, gap, foot = 9.6, 0.1, 0.42  # inches
    side = (width - gap) / 2
    height = side * image.shape[0] / image.shape[1]
    figure = Figure(figsize=(width, height + foot), dpi=100, facecolor="white")
    axes = [
        figure.add_axes((x / width, foot / (height + foot), side / width, height / (height + foot)))
        for x in (0, side + gap)
    ]
    axes[0].imshow(image)
    corner = np.array([area[1].start, area[0].start])
    for stroke in strokes:
        x, y = (np.array(stroke["points"]) - corner).T
        axes[0].plot(x, y, color="white", lw=4.5, solid_capstyle="round")
        axes[0].plot(x, y, color=colours[stroke["class"]], lw=2.8, solid_capstyle="round")
    tints = np.array([(0, 0, 0), *colours.values()])[labels]
    tinted = 0.6 * image / 255 + 0.4 * tints
    border = boundaries(labels, 1 + max(labels.shape) // 500)
    axes[1].imshow(np.where(border[..., None], tints, tinted))
    for ax in axes:
        ax.set(xlim=(-0.5, image.shape[1] - 0.5), ylim=(image.shape[0] - 0.5, -0.5))
        hide_axes(ax)
    handles = [
        Patch(color=colour, label=f"{label} {100 * row['classes'][label]['map']:.1f} %")
        for label, colour in colours.items()
    ]
    figure.legend(
        handles=handles, loc="lower left", ncols=3, frameon=False, labelcolor=INK, bbox_to_anchor=(0, 0)
    )
    if objects := row.get("objects"):
        count = counted(objects["count"], "object")
        text = f"{objects['class']}: {count}, mean diameter {objects['mean_diameter_px']:g} px"
        figure.text(0.995, foot / (height + foot) / 2, text, size=10, color=SOFT, ha="right", va="center")
    figure.savefig(raw := io.BytesIO(), format="png")
    # a palette of 256 colours, half of the size, that contains those of the classes and of the text
    drawn = Image.open(raw).convert("RGB")
    exact = [
        255,
        255,
        255,
        *to_rgb255(INK),
        *to_rgb255(SOFT),
        *(part for colour in PALETTE[:3] for part in colour),
    ]
    common = drawn.quantize(256 - len(exact) // 3, kmeans=1, dither=Image.Dither.NONE)
    shared = Image.new("P", (1, 1))
    shared.putpalette(exact + common.getpalette()[: 3 * 256 - len(exact)])
    indices = np.array(drawn.quantize(palette=shared, dither=Image.Dither.NONE))
    indices[(np.asarray(drawn) == 255).all(2)] = 0  # the nearest colour is only approximate
    small = Image.fromarray(indices)
    small.putpalette(shared.getpalette())
    small.save(figure_file(name), optimize=True)


def to_rgb255(colour: str) -> list[int]:
    """Return a hexadecimal colour as three integers."""
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def figure_file(name: str) -> Path:
    """Return the file of the figure of an image."""
    return FIGURES / f"result-{name.replace('_', '-')}.png"


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Return the table of the page."""
    lines = [
        "| image | scribbles (pixels) | estimated true fractions (95 %) | objects |",
        "|---|---|---|---|",
    ]
    for name, row in rows.items():
        fractions = "; ".join(
            f"{label} {estimate_words(c['fraction'], c['ci95'])}" for label, c in row["classes"].items()
        )
        objects = ""
        if summary := row.get("objects"):
            known = f" (by eye: {summary['known']})" if summary["known"] is not None else ""
            size = f"mean diameter {summary['mean_diameter_px']:g} px"
            objects = f"{summary['class']}: {summary['count']}{known}, {size}"
        share = f"{row['scribbles']} ({100 * row['labelled_share']:.2f} %)"
        lines.append(f"| `{name}` | {share} | {fractions} | {objects} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
