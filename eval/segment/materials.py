"""Accuracy of the statistics of `--materials` against closed forms, by feature size, with a figure.

Random discs (Boolean model) and Poisson-Voronoi grains have known mean intercepts; each size is measured on 24 pages of
256 x 256 px: the ratio to the true value, and the coverage of the 95 % interval.

    python eval/segment/materials.py [accuracy] [picture]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
import checkout  # noqa: F401  (finds vispe)
import numpy as np

from vispe.images.textures import voronoi
from vispe.segment.materials.statistics import measure
from vispe.utils.files import write_json

RESULT = Path(__file__).resolve().parents[1] / "results" / "materials.json"
SIDE, PAGES, PHASES = 256, 24, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", default=["accuracy", "picture"], choices=["accuracy", "picture"])
    for name in parser.parse_args().what:
        {"accuracy": accuracy, "picture": draw_figure}[name]()


def accuracy() -> None:
    """Measure pages of every kind and size."""
    rows = []
    for size in (6, 10, 20, 40):
        # neighbours share one of 4 phases by chance
        truth = math.pi / 4 * size * PHASES / (PHASES - 1)
        rows.append(row("grains", size, truth, [grains(size, seed) for seed in range(PAGES)]))
    for radius in (3, 5, 10, 20):
        density = 0.5 / (math.pi * radius**2)
        truth = 1 / (2 * radius * density)
        rows.append(
            row("matrix between discs", radius, truth, [discs(radius, density, s) for s in range(PAGES)])
        )
    state = {"what": __doc__.splitlines()[0], "side": SIDE, "pages": PAGES, "rows": rows}
    write_json(RESULT, state, force=True)
    print(json.dumps(rows, indent=1))


def row(kind: str, size: float, truth: float, pages: list[np.ndarray]) -> dict[str, Any]:
    """Compare the measured mean intercepts with the true one."""
    result = []
    for labels in pages:
        record, _ = measure(labels, [str(k) for k in range(1, PHASES + 1)])
        result.append(record["patches"] if kind == "grains" else record["classes"]["1"])
    ratios = [f["mean_intercept"] / truth for f in result]
    covered = [f["mean_intercept_ci95"][0] <= truth <= f["mean_intercept_ci95"][1] for f in result]
    return {
        "kind": kind,
        "size_px": size,
        "mean_intercept_px": round(truth, 3),
        "ratio": round(float(np.mean(ratios)), 4),
        "ratio_std": round(float(np.std(ratios, ddof=1)), 4),
        "interval_holds_truth": round(float(np.mean(covered)), 3),
        "relative_accuracy_percent": round(
            float(np.mean([f["relative_accuracy_percent"] for f in result])), 2
        ),
    }


def grains(size: float, seed: int) -> np.ndarray:
    """Draw Poisson-Voronoi grains in four phases -> (h, w)."""
    sample = voronoi(seed, grain=size, regularity=0, labels="grains", period=2 * SIDE, detail=0)
    grain = sample.render(SIDE)[1].numpy()
    return np.random.default_rng(seed).integers(1, PHASES + 1, grain.max() + 1)[grain]


def discs(radius: float, density: float, seed: int) -> np.ndarray:
    """Draw discs (2) at random positions of a matrix (1) -> (h, w)."""
    rng = np.random.default_rng(seed)
    wide = SIDE + 2 * radius
    y, x = np.mgrid[:SIDE, :SIDE]
    out = np.ones((SIDE, SIDE), np.uint8)
    for cy, cx in rng.random((rng.poisson(density * wide**2), 2)) * wide - radius:
        out[(y - cy) ** 2 + (x - cx) ** 2 < radius**2] = 2
    return out


def draw_figure() -> None:
    """Draw a label map of stretched grains, its rose of intercepts and its two-point correlations."""
    from matplotlib.figure import Figure

    sample = voronoi(3, grain=24, stretch=2.0, direction=30.0, fractions=(0.7, 0.3), period=512)
    image, classes = sample.render(400)
    record, curves = measure(classes.numpy() + 1, ["dark phase", "bright phase"], (0.5, 0.5))
    figure = Figure(figsize=(12, 3.9), dpi=110, facecolor="white", layout="constrained")
    left, rose, right = (
        figure.add_subplot(1, 3, 1),
        figure.add_subplot(1, 3, 2, projection="polar"),
        figure.add_subplot(1, 3, 3),
    )
    left.imshow(image[0], cmap="gray", vmin=0, vmax=1)
    left.contour(classes, [0.5], colors="#E69F00", linewidths=0.8)
    left.set_axis_off()
    left.set_title("bright phase outlined, pixels of 0.5 µm")
    for name, colour in (("dark phase", "#0072B2"), ("bright phase", "#D55E00")):
        own = record["classes"][name]
        angles = np.radians([*own["rose"]["degrees"], *(a + 180 for a in own["rose"]["degrees"]), 360])
        lengths = [*own["rose"]["mean_intercept"] * 2, own["rose"]["mean_intercept"][0]]
        stretch = own["elongation"]
        rose.plot(
            angles,
            lengths,
            color=colour,
            label=f"{name}: {stretch['ratio']:.2f} at {stretch['degrees']:.0f}°",
        )
        part = [r for r in curves if r["class"] == name and r["curve"] == "two_point_correlation"]
        right.plot([r["at"] for r in part], [r["value"] for r in part], color=colour, label=name)
        right.axhline(part[0]["value"] ** 2, color=colour, linestyle=":", linewidth=1)
    rose.set_title("mean intercept by angle, µm")
    rose.legend(loc="lower center", bbox_to_anchor=(0.5, -0.28), fontsize=8)
    right.set(xlabel="distance r, µm", title="two-point correlation S2(r)", xlim=(0, 60), ylim=(0, None))
    right.legend(fontsize=8)
    figure.savefig(Path(__file__).resolve().parents[2] / "docs" / "figures" / "materials.png")
    print(json.dumps(record["classes"]["bright phase"]["elongation"]))


if __name__ == "__main__":
    main()
