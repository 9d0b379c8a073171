"""Evaluation of the out-of-distribution warning of `vispe apply`.

Models are trained on the scribbles of one image of a set, and of four. Each is tested on the other images of its set
(false alarms and failures), on modified images of its set (inverted, another gamma, blurred, half and twice the
magnification, noisy), and on images of other sets with the same number of channels. Features, summary and score are
those of `vispe.segment`; mIoU is that of the classifier on every eighth pixel along each axis, without class weights.
`loss` is the difference to a model trained on the scribbles of the unmodified image. Rows hold the distance in units of
the largest distance of a held-out part: 1 over the margins of `vispe.segment.classify.out_of_distribution` is the
limit. Finished trainings are stored, so that an interrupted run resumes; `--fresh` discards them.

    python eval/segment/domain.py ../shared/data/microscopy
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
import checkout  # noqa: F401  (finds vispe)
import numpy as np
from scipy.ndimage import gaussian_filter
from skimage.transform import resize

from vispe.images.normalize import normalize
from vispe.images.read import read_image
from vispe.segment.classify.out_of_distribution import MARGIN, MARGIN_ONE, feature_sums, fit_distribution
from vispe.segment.classify.pixel_classifier import PixelClassifier
from vispe.segment.features.pixel_features import Features
from vispe.segment.features.sample_grid import Sample, offsets, sample
from vispe.segment.features.tiles import Region
from vispe.segment.live.array_image import micrograph
from vispe.segment.pipeline import DEFAULT
from vispe.utils.files import write_json
from vispe.utils.version import versions

RESULT = Path(__file__).resolve().parents[1] / "results" / "domain.json"
CHANGES = ("same", "inverted", "gamma", "blurred", "half", "double", "noisy")
DRAWS, SEVERAL, OTHERS, FAILED = 5, 4, 6, 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="folder of the micrograph sets")
    parser.add_argument("--cache", type=Path, help="folder in which features are cached for another call")
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    options = parser.parse_args()
    rows: dict[str, Any] = {}
    if RESULT.exists() and not options.fresh:
        state = json.loads(RESULT.read_text())
        if state["versions"] != versions():
            raise SystemExit(f"{RESULT} was made with other versions; use --fresh.")
        rows = state["rows"]
    with tempfile.TemporaryDirectory() as folder:
        recorded = Seen(options.data, options.cache or Path(folder))
        for train in trainings(recorded.sets):
            key = " ".join((train[0].parents[1].name, *(path.stem for path in train)))
            if key in rows:
                continue
            rows[key] = measure(train, recorded)
            write_json(RESULT, {**facts(rows), "rows": rows}, force=True)
            print(key, f"{len(rows[key])} rows", flush=True)
    result = facts(rows)
    write_json(RESULT, {**result, "rows": rows}, force=True)
    print(json.dumps(result["summary"], indent=1))


class Seen:
    """The features of every image on the lattice, changed and unchanged; computed once.

    Args:
        data: folder of the sets.
        folder: where they are stored.
    """

    def __init__(self, data: Path, folder: Path) -> None:
        folders = sorted(path for path in data.iterdir() if (path / "images").is_dir())
        self.sets = [sorted((path / "images").glob("*.png")) for path in folders]
        self.folder, self._features = folder, Features(DEFAULT, device="cpu")
        folder.mkdir(parents=True, exist_ok=True)
        self._known: dict[tuple[Path, str], dict[str, np.ndarray]] = {}

    def __call__(self, path: Path, change: str = "same") -> dict[str, np.ndarray]:
        """Return 'features' (n, f) and 'truth' (n,); unchanged also what a training needs."""
        key = path, change
        if key not in self._known:
            retained = self.folder / f"{path.parents[1].name} {path.stem} {change}.npz"
            if not retained.exists():
                np.savez(retained, **self._computed(path, change))
            with np.load(retained) as result:
                self._known[key] = dict(result)
        return self._known[key]

    def _computed(self, path: Path, change: str) -> dict[str, np.ndarray]:
        raw, truth = read_image(path).pages[0], self._labels(path, "masks")
        figure, truth = changed(raw, truth, change)
        image = micrograph(figure, axes="YXC")
        page = normalize(image, "stack", (0.5, 99.5))[0][0]
        prepared = self._features.prepare(page, image.valid[0])
        rows, columns = offsets(Region(0, truth.shape[0], 0, truth.shape[1]))
        positions = (rows[:, None] * truth.shape[1] + columns).ravel()
        result = {"features": prepared.gather_indices(positions), "truth": truth.ravel()[positions]}
        if change == "same":
            drawn = self._labels(path, "scribbles")
            taught = sample(prepared, image.valid[0])
            result |= {"own": prepared.gather(drawn > 0), "classes": drawn[drawn > 0].astype(np.int64)}
            result |= {f"sample.{key}": value for key, value in vars(taught).items()}
        return result

    @staticmethod
    def _labels(path: Path, folder: str) -> np.ndarray:
        return read_image(path.parents[1] / folder / path.name).pages[0][..., 0]


def changed(raw: np.ndarray, truth: np.ndarray, change: str) -> tuple[np.ndarray, np.ndarray]:
    """Change an image (h, w, c), and its truth (h, w) with it."""
    if change == "same":
        return raw, truth
    grey = raw.astype(np.float32) / max(float(raw.max()), 1)
    (height, width), low, high = truth.shape, *np.percentile(grey, (0.5, 99.5))
    middle = slice(height // 4, height // 4 + height // 2), slice(width // 4, width // 4 + width // 2)
    if change == "half":
        size = height // 2, width // 2
        small = resize(truth, size, order=0, preserve_range=True, anti_aliasing=False).astype(truth.dtype)
        return resize(grey, (*size, raw.shape[2]), order=1, anti_aliasing=True), small
    if change == "double":
        part = truth[middle]
        size = 2 * part.shape[0], 2 * part.shape[1]
        return resize(grey[middle], (*size, raw.shape[2]), order=1), part.repeat(2, 0).repeat(2, 1)
    noise = np.random.default_rng(0).normal(0, 0.1 * (high - low), grey.shape).astype(np.float32)
    images = {
        "inverted": lambda: 1 - grey,
        "gamma": lambda: grey**2,
        "blurred": lambda: gaussian_filter(grey, (2, 2, 0)),
        "noisy": lambda: grey + noise,
    }
    return images[change](), truth


def trainings(sets: list[list[Path]]) -> Iterator[list[Path]]:
    """Yield each image alone, and draws of `SEVERAL` images (all but one where there are fewer)."""
    for images in sets:
        yield from ([path] for path in images)
    for images in sets:
        random, count = np.random.default_rng(1), min(SEVERAL, len(images) - 1)
        drawn = {tuple(sorted(random.permutation(len(images))[:count].tolist())) for _ in range(DRAWS)}
        yield from ([images[i] for i in one] for one in sorted(drawn))


def measure(train: list[Path], recorded: Seen) -> dict[str, Any]:
    """Train on images and ask about all others -> image and change: distance, mIoU, loss; of other sets: distance."""
    taught = [recorded(path) for path in train]
    samples = [Sample(*(one[f"sample.{key}"] for key in ("features", "patch", "part"))) for one in taught]
    domain = fit_distribution(samples)
    own = next(images for images in recorded.sets if train[0] in images)
    count = int(max(recorded(path)["classes"].max() for path in own))
    classifier = learnt(taught, count)
    margin = MARGIN_ONE if len(train) == 1 else MARGIN

    def distance(one: dict[str, np.ndarray]) -> float:
        return round(margin * domain.score(feature_sums(domain.codes(one["features"]))), 4)

    rows: dict[str, Any] = {}
    for path in own:
        best = miou(learnt([recorded(path)], count), recorded(path))
        for change in CHANGES[path in train :]:
            one = recorded(path, change)
            score = miou(classifier, one)
            rows[f"{path.stem} {change}"] = [distance(one), round(score, 4), round(best - score, 4)]
    width = taught[0]["features"].shape[1]
    for images in recorded.sets:
        if images is not own and recorded(images[0])["features"].shape[1] == width:
            rows |= {f"other {path.stem}": [distance(recorded(path))] for path in images[:OTHERS]}
    return rows


def learnt(taught: list[dict[str, np.ndarray]], count: int) -> PixelClassifier:
    """Fit the default classifier to the scribbles of images."""
    features, classes = (np.concatenate([one[key] for one in taught]) for key in ("own", "classes"))
    return PixelClassifier("logistic", count).fit(features, classes)


def miou(classifier: PixelClassifier, one: dict[str, np.ndarray]) -> float:
    """Score a classifier on the lattice, over the classes present in truth or result."""
    result, truth = classifier.probabilities(one["features"]).argmax(1), one["truth"]
    shares = [
        ((result == k) & (truth == k)).sum() / either
        for k in range(classifier.n_classes)
        if (either := ((result == k) | (truth == k)).sum())
    ]
    return float(np.mean(shares))


def facts(rows: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that are stored with the rows."""
    return {
        "what": __doc__.splitlines()[0],
        "versions": versions(),
        "margins": {"one page": MARGIN_ONE, "several": MARGIN},
        "columns": ["distance over the largest of a held-out part", "mIoU", "loss"],
        "summary": summary(rows),
    }


def summary(rows: dict[str, Any]) -> dict[str, Any]:
    """Count alarms, for trainings on one image and on several."""
    out: dict[str, Any] = {}
    for name, several, margin in (("one image", False, MARGIN_ONE), ("several images", True, MARGIN)):
        own = {key: part for key, part in rows.items() if (len(key.split()) > 2) == several}
        if not own:
            continue
        result: dict[str, Any] = {"trainings": len(own), "sets": {}}
        for which in dict.fromkeys(key.split()[0] for key in own):
            result["sets"][which] = alarms({k: v for k, v in own.items() if k.split()[0] == which}, margin)
        result["all"] = alarms(own, margin)
        out[name] = result
    return out


def alarms(rows: dict[str, Any], margin: float) -> dict[str, Any]:
    """Count alarms among the rows of some trainings, by the tested images -> [alarms, tests]."""
    pairs = [(key.split()[-1], row) for part in rows.values() for key, row in part.items() if len(row) == 3]
    same = [row for change, row in pairs if change == "same"]

    def count(some: list[list[float]]) -> list[int]:
        return [sum(row[0] > margin for row in some), len(some)]

    out = {"same set": count(same)}
    out["same set, loss below 0.1"] = count([row for row in same if row[2] < FAILED])
    out["same set, loss from 0.1"] = count([row for row in same if row[2] >= FAILED])
    for change in CHANGES[1:]:
        own = [row for kind, row in pairs if kind == change]
        out[change] = count(own)
        out[f"{change}, loss from 0.1"] = count([row for row in own if row[2] >= FAILED])
    out["other sets"] = count([row for part in rows.values() for row in part.values() if len(row) == 1])
    loss = [row[2] for _, row in pairs]
    ranks = [np.argsort(np.argsort(each)) for each in ([row[0] for _, row in pairs], loss)]
    out["rank correlation of distance and loss"] = round(float(np.corrcoef(*ranks)[0, 1]), 3)
    return out


if __name__ == "__main__":
    main()
