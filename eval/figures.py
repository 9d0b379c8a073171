"""Draw the pictures of README: what vispe does at a glance, and how encodings fare on grids they were not trained on.

python eval/figures.py [overview] [extrapolation]
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image

import vispe
from vispe.cli.main import main as command
from vispe.segment.draw import PALETTE
from vispe.segment.images import find_images

matplotlib.use("Agg")
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
STROKES = ROOT / "data" / "demo" / "ihc_scribbles.json"
MAPS = {
    "alibi2d": "alibi2d: nearer is louder, on a torus",
    "alibi2d.local": "alibi2d.local: equal cost per step",
    "sincos2d": "sincos2d: a place has an address",
}


def overview() -> None:
    """Draw bias maps of three encodings, and a micrograph segmented by the command."""
    figure = Figure(figsize=(12, 8.6), dpi=110, facecolor="white", layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=(1, 2.05), hspace=0.03)
    top, bottom = upper.subplots(1, 3), lower.subplots(1, 2, width_ratios=(1, 1.3))
    for ax, (spec, title) in zip(top, MAPS.items(), strict=True):
        vispe.plot_bias(spec, (20, 32), (6, 9), ax)
        ax.set_title("")
        ax.set_title(title, fontsize=11, loc="left")
        ax.set(xlabel="", ylabel="", xticks=[], yticks=[])
    (path,) = find_images(["skimage:ihc"])
    strokes = json.loads(STROKES.read_text())
    names = list(dict.fromkeys(s["class"] for s in strokes))
    with tempfile.TemporaryDirectory() as folder:
        command(["segment", str(path), "--labels", str(STROKES), "--classes", ",".join(names), "-o", folder])
        overlay = np.asarray(Image.open(Path(folder) / "ihc_overlay.png"))
    before, after = bottom
    before.imshow(Image.open(path))
    for stroke in strokes:
        color = np.array(PALETTE[names.index(stroke["class"])]) / 255
        before.plot(*np.array(stroke["points"]).T, color="white", lw=5, solid_capstyle="round")
        before.plot(*np.array(stroke["points"]).T, color=color, lw=3, solid_capstyle="round")
    before.set_title(f"{len(strokes)} strokes on a stained tissue section …", fontsize=12, loc="left")
    after.imshow(overlay)
    after.set_title("… and what vispe segment makes of them", fontsize=12, loc="left")
    for ax in (before, after):
        ax.axis("off")
        ax.set_anchor("NW")
    figure.savefig(ROOT / "docs" / "overview.png")


def extrapolation() -> None:
    """Draw the accuracy on every grid as a table of colours, best encodings first."""
    found = json.loads((ROOT / "eval" / "results" / "extrapolation.json").read_text())
    shapes = found["shapes"]
    names = list(dict.fromkeys(r["encoding"] for r in found["rows"]))
    tables = {
        question: np.array(
            [
                [
                    np.mean([r["accuracy"][s][question] for r in found["rows"] if r["encoding"] == name])
                    for s in shapes
                ]
                for name in names
            ]
        )
        for question in ("distance", "direction")
    }
    unseen = [i for i, name in enumerate(shapes) if name != "1x"]
    order = np.argsort([-sum(t[i, unseen].mean() for t in tables.values()) for i in range(len(names))])
    figure = Figure(figsize=(11, 1.4 + 0.3 * len(names)), dpi=110, facecolor="white", layout="constrained")
    titles = {
        "distance": "Which colour has the nearest marker?",
        "direction": "… the nearest marker above?",
    }
    for ax, (question, table) in zip(figure.subplots(1, 2, sharey=True), tables.items(), strict=True):
        values = 100 * table[order]
        ax.imshow(values, cmap="viridis", vmin=30, vmax=100, aspect="auto")
        for (row, column), value in np.ndenumerate(values):
            ax.text(
                column,
                row,
                f"{value:.0f}",
                ha="center",
                va="center",
                fontsize=9,
                color="white" if value < 75 else "black",
            )
        ax.set_title(titles[question], fontsize=12, loc="left")
        labels = [f"{n}\n{h} x {w}" for n, (h, w) in shapes.items()]
        ax.set_xticks(range(len(shapes)), labels, fontsize=9)
        ax.set_yticks(range(len(names)), [names[i] for i in order], fontsize=9)
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
        ax.axvline(list(shapes).index("1x") - 0.5, color="white", lw=2)
        ax.axvline(list(shapes).index("1x") + 0.5, color="white", lw=2)
    h, w = shapes["1x"]
    counts = [sum(r["encoding"] == name for r in found["rows"]) for name in names]
    seeds = f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else str(counts[0])
    figure.supxlabel(
        f"patches; trained on {h} x {w} only. % of patches right, mean of {seeds} seed(s); "
        "best on unseen grids first",
        fontsize=10,
    )
    figure.savefig(ROOT / "docs" / "extrapolation.png")


if __name__ == "__main__":
    (ROOT / "docs").mkdir(exist_ok=True)
    pictures = {"overview": overview, "extrapolation": extrapolation}
    for chosen in sys.argv[1:] or pictures:
        pictures[chosen]()
