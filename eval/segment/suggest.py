"""Evaluation of `vispe suggest`: mean IoU with scribbles at suggested positions and at random ones.

Synthetic images of 256 x 256 px with known classes: regions of four textures (one of them rare), grains of three phases
with dark boundaries, and discs of two sizes in a matrix. Each begins with one dot in every class, at random. Then five
dots are added in each of eight rounds: at random positions, where the model is least certain (five distant pixels), or
at the positions of `suggest`. Labels come from the ground truth: a dot is the part of a disc with the class of its
centre. All three begin with the same dots; mean IoU of the whole image is measured after each round. Finished seeds are
stored, so that an interrupted run resumes; `--fresh` discards them.

    python eval/segment/suggest.py
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
import checkout  # noqa: F401  (finds vispe)
import numpy as np

from vispe.images.textures import disc_packing, random_field, voronoi
from vispe.segment.live import Live, micrograph
from vispe.segment.live.suggest_file import draw_suggestions
from vispe.segment.live.suggestions import candidates, radius_for, suggest
from vispe.segment.overlays import PALETTE
from vispe.utils.files import write_json
from vispe.utils.version import versions

RESULT = Path(__file__).resolve().parents[1] / "results" / "suggest.json"
FIGURE = Path(__file__).resolve().parents[2] / "docs" / "figures" / "suggest-curve.png"
PICTURE = FIGURE.with_name("suggest.png")
SIDE, ROUNDS, EACH = 256, 8, 5
FIRST = 5  # on the seeds before it was chosen how much newness counts
WAYS = ("random", "unsure", "suggest")
Picture = tuple[np.ndarray, np.ndarray]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    parser.add_argument("--figure", action="store_true", help="only draw the figure of the guide")
    options = parser.parse_args()
    if options.figure:
        return draw_figure()
    rows: dict[str, list[float]] = {}
    if RESULT.exists() and not options.fresh:
        state = json.loads(RESULT.read_text())
        if state["versions"] != versions():
            raise SystemExit(f"{RESULT} was made with other versions; use --fresh.")
        rows = state["rows"]
    for seed in range(FIRST, FIRST + options.seeds):
        for task, made in TASKS.items():
            for way in WAYS:
                key = f"{task} {seed} {way}"
                if key not in rows:
                    rows[key] = curve(*made(seed), seed, way)
                    print(key, *(f"{value:.3f}" for value in rows[key]), flush=True)
        write_json(RESULT, {**facts(rows), "rows": rows}, force=True)
    print(json.dumps(facts(rows)["summary"], indent=1))
    return draw(rows)


def regions(seed: int) -> Picture:
    """Regions of four textures that differ in grain, contrast and grey level a little; one is rare."""
    classes = rendered(voronoi(seed, grain=36, fractions=(0.45, 0.3, 0.19, 0.06), detail=0, width=0))[1]
    kinds = ((6, 0.08, 0.0), (12, 0.08, 0.0), (9, 0.04, 0.02), (6, 0.12, -0.02))
    grey = np.zeros(classes.shape)
    for number, (wavelength, contrast, level) in enumerate(kinds):
        texture = random_field([seed, number], wavelength=wavelength, contrast=contrast)
        grey = np.where(classes == number, rendered(texture)[0] + level, grey)
    return noisy(grey, seed, 0.03), classes


def grains(seed: int) -> Picture:
    """Grains of three phases that overlap in grey level, and their dark boundaries as a fourth class."""
    shared = {"grain": 28, "fractions": (0.5, 0.35, 0.15), "variation": 0.04}
    grey, classes = rendered(voronoi(seed, **shared))
    edges = rendered(voronoi(seed, labels="boundaries", **shared))[1]
    return noisy(grey, seed, 0.05), np.where(edges == 1, 3, classes)


def discs(seed: int) -> Picture:
    """Large discs and small rare ones of the same grey level, in a matrix."""
    large, small = (
        disc_packing(seed, radius=14, coverage=0.3),
        disc_packing([seed, 1], radius=4, coverage=0.08),
    )
    (grey, first), (other, second) = rendered(large), rendered(small)
    classes = np.where(first == 1, 1, np.where(second == 1, 2, 0))
    return noisy(np.maximum(grey, other), seed, 0.12), classes


TASKS: dict[str, Callable[[int], Picture]] = {"regions": regions, "grains": grains, "discs": discs}


def rendered(texture: Any) -> Picture:
    """Render a texture as arrays (h, w)."""
    image, classes = texture.render(SIDE)
    return image[0].numpy().astype(float), np.asarray(classes).astype(int)


def noisy(grey: np.ndarray, seed: int, deviation: float) -> np.ndarray:
    """Add noise and turn into 8 bits."""
    grey = grey + np.random.default_rng([seed, 7]).normal(0, deviation, grey.shape)
    return np.rint(255 * np.clip(grey, 0, 1)).astype(np.uint8)


def curve(grey: np.ndarray, classes: np.ndarray, seed: int, way: str) -> list[float]:
    """Return the mean IoU after the first dots and after each round."""
    live, labels = Live(micrograph(grey), classifier="logistic"), np.zeros(grey.shape, np.uint8)
    radius, valid = radius_for(*grey.shape), np.ones(grey.shape, bool)
    first, later = np.random.default_rng([seed, 1]), np.random.default_rng([seed, 2])
    inside = candidates(valid, np.zeros(0, np.int64), radius)
    for number in np.unique(classes):
        dot(labels, classes, int(first.choice(inside[classes.ravel()[inside] == number])), radius)
    result, out = live.update(labels), list[float]()
    for turn in range(ROUNDS + 1):
        out.append(round(miou(result.labels, classes + 1), 4))
        if turn == ROUNDS:
            break
        if way == "suggest":
            positions = [place.y * SIDE + place.x for place in suggest(live, EACH, result)]
        else:
            left = candidates(valid, live.drawn(), radius)
            value = later.random(len(left)) if way == "random" else result.uncertainty.ravel()[left]
            positions = best(left, value, 4 * radius)
        for place in positions:
            dot(labels, classes, place, radius)
        result = live.update(labels)
    return out


def best(positions: np.ndarray, value: np.ndarray, apart: int) -> list[int]:
    """Return the positions with the largest values, each apart from the others."""
    chosen: list[int] = []
    for place in positions[np.argsort(-value, kind="stable")].tolist():
        if all(
            np.hypot(*(np.divmod(place, SIDE)[i] - np.divmod(o, SIDE)[i] for i in (0, 1))) >= apart
            for o in chosen
        ):
            chosen.append(place)
        if len(chosen) == EACH:
            break
    return chosen


def dot(labels: np.ndarray, classes: np.ndarray, place: int, radius: int) -> None:
    """Label what of a disc has the class of its middle."""
    row, column = divmod(place, SIDE)
    y, x = np.mgrid[:SIDE, :SIDE]
    own = (np.hypot(y - row, x - column) <= radius) & (classes == classes[row, column])
    labels[own] = classes[row, column] + 1


def miou(result: np.ndarray, truth: np.ndarray) -> float:
    """Score labels 1..K over the classes present in truth or result."""
    shares = [
        ((result == k) & (truth == k)).sum() / ((result == k) | (truth == k)).sum()
        for k in np.unique(np.concatenate([np.unique(result), np.unique(truth)]))
    ]
    return float(np.mean(shares))


def facts(rows: dict[str, list[float]]) -> dict[str, Any]:
    """Return the settings that are stored with the rows."""
    what = {"what": __doc__.splitlines()[0], "versions": versions(), "dots of a round": EACH}
    return {**what, "summary": summary(rows)}


def summary(rows: dict[str, list[float]]) -> dict[str, Any]:
    """Compare the ways by task, in pairs of the same seed: mean curves, gains with an interval, dots saved."""
    out: dict[str, Any] = {}
    for task in [*TASKS, "all"]:
        own = {way: table(rows, task, way) for way in WAYS}
        if not len(own["suggest"]) or len({len(each) for each in own.values()}) > 1:
            continue
        result: dict[str, Any] = {way: np.round(own[way].mean(0), 4).tolist() for way in WAYS}
        for way in WAYS[:2]:
            # the area between the curves, without the common beginning
            gain = (own["suggest"] - own[way])[:, 1:].mean(1)
            drawn = np.random.default_rng(0).choice(gain, (10_000, len(gain))).mean(1)
            low, high = np.percentile(drawn, (2.5, 97.5)).round(4).tolist()
            result[f"gain over {way}"] = {"mean": round(float(gain.mean()), 4), "ci95": [low, high]}
            result[f"gain over {way}"]["worse in"] = f"{int((gain < 0).sum())} of {len(gain)}"
        goal = own["random"].mean(0)[-1]
        reached = np.flatnonzero(own["suggest"].mean(0) >= goal)
        result["rounds to the end of random"] = int(reached[0]) if len(reached) else None
        out[task] = result
    return out


def table(rows: dict[str, list[float]], task: str, way: str) -> np.ndarray:
    """Return the curves (seeds, rounds + 1) of a task and a way."""
    return np.array([v for k, v in rows.items() if k.split()[2] == way and task in ("all", k.split()[0])])


def draw(rows: dict[str, list[float]]) -> None:
    """Draw the mean curves with the standard error over seeds."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(TASKS), figsize=(10, 3.2), layout="constrained", sharey=False)
    for axis, task in zip(axes, TASKS, strict=True):
        for way, color in zip(WAYS, ("#999999", "#E69F00", "#0072B2"), strict=True):
            own = table(rows, task, way)
            x, mean, error = np.arange(own.shape[1]) * EACH, own.mean(0), own.std(0) / len(own) ** 0.5
            axis.plot(x, mean, color=color, label={"unsure": "least certain"}.get(way, way))
            axis.fill_between(x, mean - error, mean + error, color=color, alpha=0.2, lw=0)
        axis.set(title=task, xlabel="added labels")
    axes[0].set_ylabel("mean IoU")
    axes[0].legend()
    figure.savefig(FIGURE, dpi=110)
    plt.close(figure)


def draw_figure() -> None:
    """Draw the positions on a stained tissue section, with one stroke each on glands, stroma and background."""
    from PIL import Image
    from skimage.data import immunohistochemistry

    grey = immunohistochemistry()
    labels = np.zeros(grey.shape[:2], np.uint8)
    for number, (row, column) in enumerate(((60, 100), (260, 265), (390, 2)), 1):
        labels[row : row + 8, column : column + 40] = number
    names = ("gland", "stroma", "empty")
    live = Live(micrograph(grey, "YXC"), classifier="logistic", names=names)
    live.update(labels)
    shown = live.normalized()[0].copy()
    shown[labels > 0] = np.array(PALETTE[:3], np.float32)[labels[labels > 0] - 1] / 255
    positions = suggest(live)
    Image.fromarray(draw_suggestions(shown, positions)).quantize(256, Image.Quantize.MAXCOVERAGE).save(
        PICTURE
    )
    print(*(f"{number}: {region.reason}" for number, region in enumerate(positions, 1)), sep="\n")


if __name__ == "__main__":
    main()
