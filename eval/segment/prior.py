"""Evaluation of class priors: mean IoU and area fractions of micrographs and of synthetic tasks.

Probabilities are computed once for each image and stored in a folder: one classifier per image from its own strokes
(spread over the image, and in one corner), and one from a third of each set that is tested on the rest. Synthetic tasks
are those of `models.micro.tasks`, by formula, from seeds that no training used. Every prior is applied and scored: mean
IoU of the label map, mean absolute error of its fractions in percentage points, and the calibration error over all
pixels. An interrupted run resumes.

    python eval/segment/prior.py ../shared/data/microscopy --cache stored/
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
import checkout  # noqa: F401  (finds vispe)
import numpy as np
from PIL import Image

from vispe.images.normalize import normalize
from vispe.images.read import read_image
from vispe.segment.classify.calibration import calibrate, calibration_error, concatenate_ids, label_scribbles
from vispe.segment.classify.class_prior import PRIORS, estimate, reweigh, tempered, weights
from vispe.segment.classify.pixel_classifier import PixelClassifier
from vispe.segment.classify.probability_histogram import count
from vispe.segment.features.feature_cache import CachedFeatures
from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.features.micro_features import NAME
from vispe.segment.model.prediction import predict_page
from vispe.segment.types import PostProcessing
from vispe.utils.files import atomic_path
from vispe.utils.version import versions

RESULT = Path(__file__).resolve().parents[1] / "results" / "segment_prior.json"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "micrographs" / "fractions.md"
MARK = r"(<!-- priors: [^\n]*-->\n).*?(<!-- end of priors -->)"
MODES = [
    *((layout, kind, "logistic") for kind in ("both", "filters") for layout in ("spread", "corner")),
    *((layout, kind, "forest") for kind in ("both", "filters") for layout in ("spread", "corner")),
    *((f"x{part}", "both", "logistic") for part in range(3)),
    ("spread", "both", "boosting"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="folder of the micrograph sets")
    parser.add_argument("--cache", type=Path, required=True, help="folder for probabilities")
    parser.add_argument("--synthetic", type=int, default=90, help="synthetic tasks")
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    if RESULT.exists() and (result := json.loads(RESULT.read_text()))["versions"] == versions():
        rows = result["rows"]
    done = {(row["mode"], row["set"], row["image"]) for row in rows}
    for number in range(options.synthetic):
        for layout in ("spread", "corner"):
            mode = f"synthetic, {layout}, both, logistic"
            if (mode, "synthetic", str(number)) not in done and (
                result := synthetic(options.cache, number, layout)
            ):
                rows.append({"mode": mode, "set": "synthetic", "image": str(number), **score(*result)})
    save(rows, "synthetic")
    for layout, kind, classifier in MODES:
        mode = f"{layout}, {kind}, {classifier}"
        for name, image, training in images(options.data, layout):
            if (mode, name, image) in done:
                continue
            prob, calibration = predicted(
                options.data, options.cache, name, image, training, layout, kind, classifier
            )
            truth = np.asarray(Image.open(options.data / name / "masks" / f"{image}.png"))
            rows.append({"mode": mode, "set": name, "image": image, **score(prob, truth, calibration)})
        save(rows, mode)


def images(data: Path, layout: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yield set, image and the images that are drawn on."""
    for folder in sorted(path for path in data.iterdir() if (path / "images").is_dir()):
        drawn = "scribbles_corner" if layout == "corner" else "scribbles"
        names = [path.stem for path in sorted((folder / drawn).glob("*.png"))]
        for name in names:
            if not layout.startswith("x"):
                yield folder.name, name, [name]
            elif names.index(name) % 3 != int(layout[1:]):
                yield folder.name, name, names[int(layout[1:]) :: 3]


def predicted(
    data: Path,
    keep: Path,
    folder: str,
    image: str,
    training: Sequence[str],
    layout: str,
    kind: str,
    classifier: str,
) -> tuple[np.ndarray, dict[str, Any]]:
    """Return probabilities (K, h, w) at temperature 1, and the calibration of the classifier."""
    own = "corner" if layout == "corner" else "spread"
    parts = [labelled(data, keep, folder, name, own, kind) for name in training]
    features, classes = (np.concatenate([part[key] for part in parts]) for key in ("X", "y"))
    of = concatenate_ids([label_scribbles(part["places"], part["y"], tuple(part["shape"])) for part in parts])
    masks = (np.asarray(Image.open(data / folder / "masks" / f"{name}.png")).max() for name in training)
    fitted = PixelClassifier(classifier, int(max(*masks, classes.max() - 1, 1)) + 1)
    stored = keep / f"{folder}~{image}~{layout}~{kind}~{classifier}.npy"
    checked = stored.with_suffix(".json")
    if not checked.exists():
        checked.write_text(json.dumps(calibrate(fitted, features, classes, of)))
        fitted.temperature = 1.0
    if not stored.exists():
        fitted.fit(features, classes)
        page, valid, source = opened(data / folder / "images" / f"{image}.png", kind)
        source.apply(page, valid, fitted.linear)
        result = predict_page(
            page, valid, source, fitted, PostProcessing(prior="uniform"), lambda share: None
        )
        np.save(stored, result.prob)
    return np.load(stored), json.loads(checked.read_text())


def opened(path: Path, kind: str) -> tuple[np.ndarray, np.ndarray, CachedFeatures]:
    """Read an image and get ready to compute its features."""
    image = read_image(path)
    page = np.ascontiguousarray(normalize(image, "stack", (0.5, 99.5))[0][0])
    source = CachedFeatures(FeatureConfig(kind, model=None if kind == "filters" else NAME))
    source.keep(page)
    return page, image.valid[0], source


def labelled(data: Path, keep: Path, folder: str, name: str, layout: str, kind: str) -> dict[str, np.ndarray]:
    """Return positions, classes and features of the labelled pixels of an image."""
    stored = keep / f"{folder}~{name}~{layout}~{kind}.npz"
    if not stored.exists():
        drawn = "scribbles_corner" if layout == "corner" else "scribbles"
        labels = np.asarray(Image.open(data / folder / drawn / f"{name}.png")).astype(np.int64)
        page, valid, source = opened(data / folder / "images" / f"{name}.png", kind)
        positions = np.flatnonzero(labels)
        result = source.prepare(page, valid).gather_indices(positions)
        np.savez(stored, X=result, y=labels.ravel()[positions], places=positions, shape=labels.shape)
    with np.load(stored) as result:
        return dict(result)


def synthetic(keep: Path, number: int, layout: str) -> tuple[np.ndarray, np.ndarray, dict[str, Any]] | None:
    """Return probabilities, truth and calibration of a synthetic task; None where a corner lacks a phase."""
    from models.micro.tasks import task
    from models.micro.validate import strokes as draw

    stored = keep / f"synthetic~{number}~{layout}.npz"
    if not stored.exists():
        random = np.random.default_rng([2**31, number])
        one = task(random, 384)
        drawn = {where: draw(random, one.labels, where == "corner") for where in ("spread", "corner")}[layout]
        if drawn is None:
            return None
        grey = float(np.ptp(one.image, axis=0).max()) < 1e-3
        page = np.ascontiguousarray((one.image[:1] if grey else one.image).transpose(1, 2, 0), np.float32)
        valid, source = np.ones(drawn.shape, bool), CachedFeatures(FeatureConfig("both", model=NAME))
        source.keep(page)
        positions = np.flatnonzero(drawn)
        classes = one.labels.ravel()[positions].astype(np.int64) + 1
        features = source.prepare(page, valid).gather_indices(positions)
        fitted = PixelClassifier("logistic", int(one.labels.max()) + 1).fit(features, classes)
        calibration = calibrate(fitted, features, classes, label_scribbles(positions, classes, drawn.shape))
        fitted.temperature = 1.0
        source.apply(page, valid, fitted.linear)
        result = predict_page(
            page, valid, source, fitted, PostProcessing(prior="uniform"), lambda share: None
        )
        np.savez_compressed(stored, prob=result.prob, truth=one.labels, calibration=json.dumps(calibration))
    with np.load(stored) as result:
        return result["prob"], result["truth"], json.loads(str(result["calibration"]))


def score(prob: np.ndarray, truth: np.ndarray, calibration: dict[str, Any]) -> dict[str, Any]:
    """Score every prior on one image: truth (h, w) from 0."""
    prob = tempered(prob, calibration["temperature"])
    classes, n = len(prob), truth.size
    true = np.bincount(truth.ravel(), minlength=classes)[:classes] / n
    counts = count(prob)
    prior = estimate(counts)
    row: dict[str, Any] = {
        "temperature": calibration["temperature"],
        "ece": calibration["expected_calibration_error"],
    }
    for how in PRIORS:
        weight = weights(prior, how)
        result = prob if weight is None else reweigh(prob.copy(), weight)
        labels = result.argmax(0)
        share = np.bincount(labels.ravel(), minlength=classes) / n
        unions = [((labels == k) | (truth == k)).sum() for k in range(classes)]
        both = [((labels == k) & (truth == k)).sum() for k in range(classes)]
        row[how] = {
            "miou": round(float(np.mean([b / u for b, u in zip(both, unions, strict=True) if u])), 4),
            "map_error_pp": round(100 * float(np.abs(share - true).mean()), 3),
        }
        flat = result.reshape(classes, -1)[:, ::3].T
        every = np.full(len(flat), 1 / len(flat))
        row[how]["image_ece"] = round(calibration_error(flat, truth.ravel()[::3] + 1, every), 4)
    return row


def save(rows: list[dict[str, Any]], said: str) -> None:
    """Write the rows and their table, and print what is new."""
    table = {
        mode: summary([r for r in rows if r["mode"] == mode])
        for mode in dict.fromkeys(r["mode"] for r in rows)
    }
    own = [r for r in rows if r["mode"].startswith("x")]
    if own:
        table["across images, both, logistic"] = summary(own)
    state = {"what": __doc__.splitlines()[0], "versions": versions(), "table": table}
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    with atomic_path(RESULT, force=True) as temporary:
        temporary.write_text(f'{json.dumps(state)[:-1]},\n"rows": [\n{lines}\n]}}\n')
    page = PAGE.read_text()
    page = re.sub(MARK, lambda result: f"{result[1]}{table_of(table)}\n{result[2]}", page, flags=re.DOTALL)
    PAGE.write_text(page)
    print(said, json.dumps(table.get(said, {})), flush=True)


def table_of(table: dict[str, Any]) -> str:
    """Write the table of docs/how-to/micrographs/fractions.md."""
    lines = [
        "| scribbles, features, classifier | images | mean IoU uniform | sqrt | gain (95 %) | worse in | worst | em | "
        "fractions uniform, pp | sqrt, pp |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for mode, one in table.items():
        if mode.startswith("x"):
            continue
        gain, (low, high) = one["sqrt"]["gain"], one["sqrt"]["interval"]
        lines.append(
            f"| {mode} | {one['images']} | {one['uniform']['miou']:.3f} | {one['sqrt']['miou']:.3f} | "
            f"{gain:+.3f} ({low:.3f} to {high:.3f}) | {one['sqrt']['worse']} | {one['sqrt']['worst']:+.3f} | "
            f"{one['em']['miou']:.3f} | {one['uniform']['map_error_pp']:.1f} | {one['sqrt']['map_error_pp']:.1f} |"
        )
    return "\n".join(lines)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Average rows; gains over no prior with bootstrap intervals of 95 % over images."""
    out: dict[str, Any] = {"images": len(rows)}
    for how in PRIORS:
        gain = np.array([row[how]["miou"] - row["uniform"]["miou"] for row in rows])
        draws = np.random.default_rng(0).choice(gain, (4000, len(gain))).mean(1)
        out[how] = {key: round(float(np.mean([row[how][key] for row in rows])), 4) for key in rows[0][how]}
        if how != "uniform":
            out[how] |= {
                "gain": round(float(gain.mean()), 4),
                "interval": [round(float(q), 4) for q in np.quantile(draws, (0.025, 0.975))],
                "worse": int((gain < 0).sum()),
                "worst": round(float(gain.min()), 4),
            }
    known = [row["ece"] for row in rows if row["ece"] is not None]
    out["strokes_ece"] = round(float(np.mean(known)), 4) if known else None
    out["not_calibrated"] = len(rows) - len(known)
    return out


if __name__ == "__main__":
    main()
