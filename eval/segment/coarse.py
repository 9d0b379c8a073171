"""Upper bound of the benefit of a coarse teacher for vispe_micro: features of a large model in addition to its own.

A network of the same size that was taught by another model can at best add that model's features to its own. So one
linear classifier per image gets filters and vispe_micro; the same and the principal components of a block of the large
model, one token for 14 pixels; and, as a control for the effect of coarse features alone, the same and vispe_micro's
features averaged over 16 pixels. Images are synthetic tasks, which decide whether a network is trained, and
micrographs. Classes are not weighted. Finished rows are stored; `--fresh` discards them.

    python eval/segment/coarse.py ../shared/data/microscopy --weights dinov2_vits14.safetensors
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
import checkout  # noqa: F401  (finds vispe)
import numpy as np
from scipy.ndimage import uniform_filter
from tokens import SYNTHETIC, Picture, Setting, digest, images, opened

from vispe.segment.classify.pixel_classifier import PixelClassifier
from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.features.micro_features import NAME
from vispe.segment.features.pixel_features import Features
from vispe.segment.metrics import mean_iou
from vispe.utils.files import atomic_path
from vispe.utils.version import versions

RESULT = Path(__file__).resolve().parents[1] / "results" / "segment_coarse.json"
MODEL = "vit_small_patch14_dinov2"
SIDE = 16  # pixels that the control is averaged over, as many as a token of the trunk of vispe_micro
OWN, TAUGHT, AVERAGED = "filters and vispe_micro", "and the large model", "and its own average"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="folder of the micrograph sets")
    parser.add_argument("--weights", required=True, help="checkpoint file, or random")
    parser.add_argument("--layer", default="8", help="block of the large model")
    parser.add_argument("--synthetic", type=int, default=60, help="synthetic tasks")
    parser.add_argument(
        "--sets", nargs="*", help="sets of micrographs; all by default, none where no name follows"
    )
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    options = parser.parse_args()
    provenance = {
        "model": MODEL, "layer": options.layer, "weights": digest(options.weights), "versions": versions(),
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    if RESULT.exists() and not options.fresh:
        state = json.loads(RESULT.read_text())
        if {key: state[key] for key in provenance} != provenance:
            raise SystemExit(f"{RESULT} was made with other weights or versions; use --fresh.")
        rows = state["rows"]
    done = {(row["set"], row["image"]) for row in rows}
    filters, micro = Features(FeatureConfig("filters")), Features(FeatureConfig("tokens", model=NAME))
    large = Features(Setting(14, 1, options.layer, 1).config(MODEL, options.weights))
    for name, image in images(options.data, options.sets, None, options.synthetic):
        if (name, image) not in done:
            rows.append(
                {
                    "set": name,
                    "image": image,
                    **measure(opened(options.data, name, image), filters, micro, large),
                }
            )
            save(provenance, rows)
            print(*rows[-1].values(), sep=" | ", flush=True)
    save(provenance, rows)
    print(json.dumps(summary(rows), indent=1))


def measure(image: Picture, filters: Features, micro: Features, large: Features) -> dict[str, float]:
    """Return the mean IoU over all pixels of an image with each set of features, taught by its strokes."""
    valid = np.ones(image.truth.shape, bool)
    first, recorded = (dense(features, image.page, valid) for features in (filters, micro))
    near = uniform_filter(recorded.reshape(*valid.shape, -1), (SIDE, SIDE, 0)).reshape(recorded.shape)
    beside = {OWN: (), TAUGHT: (dense(large, image.page, valid),), AVERAGED: (near,)}
    return {
        words: score(image, np.concatenate([first, recorded, *more], 1)) for words, more in beside.items()
    }


def dense(features: Features, page: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """Return the features of all pixels (h w, f)."""
    features.basis = None
    if features.learns:
        features.fit([(page, valid)])
    return features.prepare(page, valid).gather_indices(np.arange(valid.size))


def score(image: Picture, features: np.ndarray) -> float:
    """Return the mean IoU of a linear classifier."""
    scribbles = image.drawn.ravel()
    classes = int(max(image.truth.max(), scribbles.max()))
    fitted = PixelClassifier("logistic", classes).fit(features[scribbles > 0], scribbles[scribbles > 0])
    labels = fitted.probabilities(features).argmax(1).reshape(image.truth.shape) + 1
    return round(mean_iou(labels, image.truth, classes), 4)


def save(made: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Write the rows, one per line, and their summary."""
    state = {"what": __doc__.splitlines()[0], **made, "summary": summary(rows)}
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    with atomic_path(RESULT, force=True) as temporary:
        temporary.write_text(f'{json.dumps(state, separators=(",", ":"))[:-1]},\n"rows":[\n{lines}\n]}}\n')


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return means of each set, and differences from filters and vispe_micro with intervals of 95 % over images."""
    random = np.random.default_rng(0)
    out: dict[str, Any] = {}
    for name in (*dict.fromkeys(row["set"] for row in rows), "micrographs"):
        group_rows = [
            row for row in rows if row["set"] == name or (name == "micrographs" and row["set"] != SYNTHETIC)
        ]
        if not group_rows:
            continue
        out[name] = {
            "pictures": len(group_rows),
            OWN: round(float(np.mean([row[OWN] for row in group_rows])), 4),
        }
        for words in (TAUGHT, AVERAGED):
            gain = np.array([row[words] - row[OWN] for row in group_rows])
            means = gain[random.integers(0, len(gain), (4000, len(gain)))].mean(1)
            ends = np.quantile(means, (0.025, 0.975))
            out[name][words] = [round(float(x), 4) for x in (gain.mean(), *ends)]
    return out


if __name__ == "__main__":
    main()
