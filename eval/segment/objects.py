"""Evaluation of `vispe segment --objects` against instance masks, with Otsu's threshold and a watershed as baseline.

One classifier per image from its own scribbles (spread over the image), with logistic regression and otherwise the
defaults. The baseline without learning is Otsu's threshold on the smoothed image (whether objects are bright or dark is
taken from the ground truth), then a watershed on the distance transform with peak distances of at least 10 px. Objects
below 10 px are omitted everywhere. Average precision is TP / (TP + FP + FN) at an intersection over union above 0.5.
Rows are stored, so that an interrupted run resumes; `--fresh` discards them.

    python eval/segment/objects.py ../shared/data/microscopy
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
import checkout  # noqa: F401  (finds vispe)
import numpy as np
import tifffile
from PIL import Image
from scipy.ndimage import distance_transform_edt
from skimage.color import rgb2gray
from skimage.feature import peak_local_max
from skimage.filters import gaussian, threshold_otsu
from skimage.measure import label
from skimage.segmentation import watershed

from vispe.backbones.micro import WEIGHTS
from vispe.segment.objects.split import NECK
from vispe.segment.pipeline import MODEL_NAME, ObjectOptions, apply, segment
from vispe.utils.files import write_json
from vispe.utils.version import versions

RESULT = Path(__file__).resolve().parents[1] / "results" / "objects.json"
LEAST = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="folder of the micrograph sets")
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    options = parser.parse_args()
    provenance = {
        "weights": hashlib.sha256(WEIGHTS.read_bytes()).hexdigest(),
        "neck": NECK,
        "versions": versions(),
    }
    rows: list[dict[str, Any]] = []
    if RESULT.exists() and not options.fresh:
        state = json.loads(RESULT.read_text())
        if {k: state[k] for k in provenance} != provenance:
            raise SystemExit(f"{RESULT} was made with other weights, rules or versions; use --fresh.")
        rows = state["rows"]
    done = {(r["set"], r["image"]) for r in rows}
    for truth in sorted(options.data.glob("*/instances/*.png")):
        key = (truth.parents[1].name, truth.stem)
        if key in done or not (truth.parents[1] / "scribbles" / truth.name).is_file():
            continue
        rows += measure(truth)
        state = {"what": __doc__.splitlines()[0], **provenance, "summary": summary(rows), "rows": rows}
        write_json(RESULT, state, force=True)
        print(*key, *(f"{r['method']} {r['ap50']:.3f}" for r in rows[-3:]), flush=True)
    print(json.dumps(summary(rows), indent=1))


def measure(path: Path) -> list[dict[str, Any]]:
    """Score the three ways on one image -> one row for each."""
    folder, truth = path.parents[1], np.asarray(Image.open(path)).astype(int)
    image = folder / "images" / path.name
    result = {"otsu + watershed": otsu(np.asarray(Image.open(image)), truth)}
    with tempfile.TemporaryDirectory() as place:
        out = Path(place, "split")
        report = segment(
            [image], out, labels=[folder / "scribbles" / path.name], objects=_options("split", 2),
            classifier="logistic",
        )  # fmt: skip
        if len(report.run["classes"]) != 2:
            raise SystemExit(f"{image} has other classes than background and objects")
        result["vispe, split"] = tifffile.imread(out / f"{path.stem}_objects.tif").astype(int)
        apply(out / MODEL_NAME, [image], Path(place, "keep"), objects=_options("keep", 2))
        result["vispe, keep"] = tifffile.imread(Path(place, "keep", f"{path.stem}_objects.tif")).astype(int)
    identity = {"set": folder.name, "image": path.stem, "true_count": len(np.unique(truth)) - 1}
    return [{**identity, "method": name, **score(each, truth)} for name, each in result.items()]


def _options(touching: str, number: int) -> ObjectOptions:
    return ObjectOptions([f"class {number}"], touching, LEAST)


def otsu(image: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Threshold and watershed, as in scikit-image's own example."""
    grey = rgb2gray(image[..., :3]) if image.ndim == 3 else image
    smooth = gaussian(grey.astype(float), 1)
    mask = smooth > threshold_otsu(smooth)
    if smooth[truth > 0].mean() < smooth[truth == 0].mean():
        mask = ~mask
    depth = distance_transform_edt(mask)
    peaks = peak_local_max(depth, min_distance=10, labels=label(mask))
    markers = np.zeros(mask.shape, int)
    markers[tuple(peaks.T)] = np.arange(1, len(peaks) + 1)
    segments = watershed(-depth, markers, mask=mask)
    sizes = np.bincount(segments.ravel())
    return np.where(sizes[segments] >= LEAST, segments, 0)


def score(result: np.ndarray, truth: np.ndarray) -> dict[str, Any]:
    """Match objects of two maps (h, w) that overlap by more than half of their union."""
    _, a = np.unique(result, return_inverse=True)
    _, b = np.unique(truth, return_inverse=True)
    a, b = a.reshape(result.shape), b.reshape(truth.shape)
    pairs = np.zeros((a.max() + 1, b.max() + 1), int)
    np.add.at(pairs, (a, b), 1)
    union = pairs.sum(1, keepdims=True) + pairs.sum(0, keepdims=True) - pairs
    # above one half an object has at most one partner
    hits = int(((pairs / union)[1:, 1:] > 0.5).sum())
    n, m = a.max(), b.max()
    return {
        "count": int(n),
        "hits": hits,
        "ap50": hits / max(n + m - hits, 1),
        "count_error": (int(n) - int(m)) / max(int(m), 1),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Average each method over each set, and over all images with a bootstrap interval of 95 %."""
    out: dict[str, Any] = {}
    for name in dict.fromkeys(r["method"] for r in rows):
        method_rows = [r for r in rows if r["method"] == name]
        values = np.array([r["ap50"] for r in method_rows])
        draws = np.random.default_rng(0).choice(values, (4000, len(values))).mean(1)
        sets = {
            s: [r for r in method_rows if r["set"] == s] for s in dict.fromkeys(r["set"] for r in method_rows)
        }
        out[name] = {
            "images": len(method_rows),
            "ap50": round(float(values.mean()), 4),
            "interval": [round(float(q), 4) for q in np.quantile(draws, (0.025, 0.975))],
            "mean_abs_count_error": round(float(np.mean([abs(r["count_error"]) for r in method_rows])), 4),
            "sets": {
                s: {
                    "images": len(part),
                    "ap50": round(float(np.mean([r["ap50"] for r in part])), 4),
                    "mean_abs_count_error": round(float(np.mean([abs(r["count_error"]) for r in part])), 4),
                }
                for s, part in sets.items()
            },
        }
    return out


if __name__ == "__main__":
    main()
