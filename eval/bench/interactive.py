"""Benchmark of the response to a changed scribble: features cached in memory against full recomputation.

    python eval/bench/interactive.py [--rounds 30] [--threads 2] [--out eval/results/interactive.json]

The image is scikit-image's `cell` micrograph, mirrored to 1000 x 1000 pixels, with strokes 5 px wide of 2, then of 3
classes by grey level. Rounds alternate between two sets of scribbles that differ by one stroke, so that the labels of
every round are new. `preview_ms` is the time of the preview by logistic regression: look up the features of the
labelled pixels, fit the classifier, predict the page and take the argmax; `parts_ms` has the time of each step.
`ensemble_ms` is the time of the result after it, `Live.update`. `anew_ms` is the preview from pixels: all steps of
`vispe segment` between reading and writing files, in the same process. `layers_ms` is the time in which the layers of
napari, if installed, accept the result, without the canvas, which needs a screen. `cpu` is the CPU time of all cores,
the only reliable number on a shared machine; see `load_average`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timing import environment

from vispe.segment.classify.classifier_fit import learn
from vispe.segment.features.pixel_features import Features
from vispe.segment.live import Live, micrograph
from vispe.segment.model.prediction import predict_page
from vispe.segment.pipeline import DEFAULT
from vispe.segment.types import PostProcessing, Prediction

STROKES = 24
WIDTH = 5  # pixels


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--full-rounds", type=int, default=3, help="of the recomputation")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--img-size", type=int, default=1000, help="of the image, in pixels")
    parser.add_argument("--num-classes", type=int, nargs="+", default=[2, 3])
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parents[1] / "results" / "interactive.json"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    grey = synthetic_image(args.img_size)
    live = Live(micrograph(grey))
    start = time.perf_counter()
    live.compute()
    retained = {
        "features_s": round(time.perf_counter() - start, 2),
        "features_mb": round(live.nbytes / 1e6, 1),
    }
    rows = []
    for count in args.num_classes:
        rows.append(
            {"megapixels": round(grey.size / 1e6, 3), "classes": count, **measure(live, grey, count, args)}
        )
        print(json.dumps(rows[-1]), flush=True)
    peak = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)
    packages = ("scikit-learn", "scipy", "numpy", "napari")
    result = {
        "environment": environment(*packages),
        "load_average": round(load(), 2),
        **retained,
        "peak_gib": peak,
    }
    args.out.write_text(json.dumps({**result, "rows": rows}, indent=1) + "\n")


def measure(live: Live, grey: np.ndarray, count: int, args: argparse.Namespace) -> dict[str, Any]:
    drawings = strokes(grey, count)
    live.names = ()
    for drawing in drawings:
        preview(live, drawing)
    turn = [0]

    def changed() -> np.ndarray:
        turn[0] += 1
        return drawings[turn[0] % 2]

    preview_times = timed(lambda: preview(live, changed()), args.rounds)
    ensemble = timed(lambda: live.update(changed()), args.full_rounds)
    recomputed = timed(lambda: from_pixels(live, changed(), count), args.full_rounds)
    parts = {
        "draw": timed(lambda: live.draw(changed()), args.rounds),
        "look_up_and_fit": timed(lambda: (live.draw(changed()), live.fit(preview=True)), args.rounds),
        "predict": timed(live.predict, args.rounds),
    }
    actual = preview(live, drawings[0])
    expected = from_pixels(live, drawings[0], count)
    out = {
        "labelled_pixels": int((drawings[0] > 0).sum()),
        "preview_ms": milliseconds(preview_times),
        "ensemble_ms": milliseconds(ensemble),
        "parts_ms": {name: milliseconds(seconds) for name, seconds in parts.items()},
        "anew_ms": milliseconds(recomputed),
        "times_as_fast": round(milliseconds(recomputed)["median"] / milliseconds(preview_times)["median"], 1),
        "times_less_work": round(milliseconds(recomputed)["cpu"] / milliseconds(preview_times)["cpu"], 1),
        "largest_difference_of_probabilities": float(np.abs(actual.prob - expected.prob).max()),
        "labels_that_differ": int((actual.labels != expected.labels).sum()),
        "rounds": args.rounds,
    }
    if importlib.util.find_spec("napari"):
        out["layers_ms"] = milliseconds(timed(shown(grey, live, actual), args.rounds))
    return out


def preview(live: Live, labels: np.ndarray) -> Prediction:
    """Return the preview for changed labels."""
    live.draw(labels)
    live.fit(preview=True)
    return live.predict()


def from_pixels(live: Live, labels: np.ndarray, count: int) -> Prediction:
    """Compute the features of the image, and the preview from them."""
    page, valid = live.normalized()
    features = Features(DEFAULT)
    mask = labels > 0
    classes = labels[mask].astype(np.int64)
    names, scale = [f"class {k + 1}" for k in range(count)], features.filter_scale(page.shape[-1])
    classifier, _ = learn(
        "logistic", names, features.prepare(page, valid).gather(mask), classes, None, 0, scale
    )
    return predict_page(page, valid, features, classifier, PostProcessing(), lambda share: None)


def shown(grey: np.ndarray, live: Live, result: Prediction) -> Callable[[], None]:
    """Return the function that updates existing layers with a result."""
    from napari.components import ViewerModel

    from vispe.segment.napari.requests import Answer
    from vispe.segment.napari.results import show_pages

    viewer = ViewerModel()
    image = viewer.add_image(grey, name="image")
    answer = Answer(pages={0: result}, names=live.names)
    show_pages(viewer, image, answer)
    return lambda: show_pages(viewer, image, answer)


def synthetic_image(side: int) -> np.ndarray:
    """Return the cell micrograph, mirrored to size."""
    from skimage import data

    cell = data.cell()
    reps = [-(-side // n) for n in cell.shape]
    padded = np.pad(cell, [(0, (r - 1) * n) for r, n in zip(reps, cell.shape, strict=True)], mode="symmetric")
    return np.ascontiguousarray(padded[:side, :side])


def strokes(grey: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return two sets of scribbles, the second with one more stroke; classes follow from the grey level."""
    from scipy.ndimage import gaussian_filter
    from skimage.draw import line

    smooth = gaussian_filter(grey.astype(np.float32), 4)
    truth = 1 + np.digitize(smooth, np.quantile(smooth, np.linspace(0, 1, count + 1)[1:-1]))
    rng, side = np.random.default_rng(0), len(grey)
    labels = np.zeros(grey.shape, np.uint8)
    before = labels
    for _ in range(STROKES + 1):
        before = labels.copy()
        start = rng.integers(WIDTH, side - WIDTH, 2)
        end = np.clip(start + rng.integers(-60, 61, 2), WIDTH, side - WIDTH - 1)
        rows, columns = line(*map(int, (*start, *end)))
        number = truth[tuple(start)]
        matches = truth[rows, columns] == number
        for shift in range(-(WIDTH // 2), WIDTH // 2 + 1):
            labels[rows[matches] + shift, columns[matches]] = number
    return before, labels


def timed(work: Callable[[], Any], rounds: int) -> list[tuple[float, float]]:
    """Return the wall time and the CPU time of all cores of each round in seconds."""
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter(), time.process_time()
        work()
        seconds.append((time.perf_counter() - start[0], time.process_time() - start[1]))
    return seconds


def milliseconds(seconds: list[tuple[float, float]]) -> dict[str, float]:
    """Return the median and the 10th and 90th percentile of the wall time, and the median CPU time of all cores."""
    ordered = sorted(wall for wall, _ in seconds)
    late = ordered[min(round(0.9 * len(ordered)), len(ordered) - 1)]
    cores = statistics.median(cpu for _, cpu in seconds)
    values = {"median": statistics.median(ordered), "fastest": ordered[0], "p90": late, "cpu": cores}
    return {name: round(1000 * value, 1) for name, value in values.items()}


def load() -> float:
    """Return the load average of the last minute; timings are valid if it does not exceed `--threads`."""
    return os.getloadavg()[0]


if __name__ == "__main__":
    main()
