"""Draw the picture of README: bias maps of three encodings, and a micrograph segmented by the command.

python eval/figures.py
"""

from __future__ import annotations

import json
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


def main() -> None:
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
    (ROOT / "docs").mkdir(exist_ok=True)
    figure.savefig(ROOT / "docs" / "overview.png")


if __name__ == "__main__":
    main()
