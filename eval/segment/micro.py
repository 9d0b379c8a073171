"""Evaluation of vispe_micro in addition to filters in `vispe segment`, on all micrographs, with the same classifier.

One classifier per image from its own scribbles (spread over the image, and in one corner), scored on the whole image,
and for the superalloy one classifier from four images scored on the eight others; with filters, with vispe_micro alone
and with both. Classes are not weighted by their frequency (`--prior uniform`); `prior.py` measures that effect. Every
run goes through `vispe.segment.pipeline`. The micrographs were not used for training or selection of the model.
Finished rows are stored, so that an interrupted run resumes; `--fresh` discards them.

    python eval/segment/micro.py ../shared/data/microscopy
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
import checkout  # noqa: F401  (finds vispe)
import numpy as np
from filters import CROSS, TRAIN

from vispe.backbones.micro import WEIGHTS
from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.features.micro_features import NAME
from vispe.segment.pipeline import MODEL_NAME, PostProcessing, ScoreOptions, apply, segment
from vispe.utils.files import write_json
from vispe.utils.version import versions

RESULT = Path(__file__).resolve().parents[1] / "results" / "segment_micro.json"
KINDS = ("filters", "tokens", "both")
CLASSIFIERS = ("logistic", "forest")
PLAIN = PostProcessing(prior="uniform")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="folder of the micrograph sets")
    parser.add_argument("--classifiers", nargs="+", choices=CLASSIFIERS, default=list(CLASSIFIERS))
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    options = parser.parse_args()
    provenance = {"weights": hashlib.sha256(WEIGHTS.read_bytes()).hexdigest(), "versions": versions()}
    rows: list[dict[str, Any]] = []
    if RESULT.exists() and not options.fresh:
        state = json.loads(RESULT.read_text())
        if {k: state[k] for k in provenance} != provenance:
            raise SystemExit(f"{RESULT} was made with other weights or versions; use --fresh.")
        rows = state["rows"]
    done = {tuple(r[k] for k in ("set", "scribbles", "classifier", "features", "image")) for r in rows}
    for job in jobs(options.data, options.classifiers):
        key = (job["set"], job["scribbles"], job["classifier"], job["features"])
        if done.issuperset((*key, path.stem) for path in job["score"]):
            continue
        rows += measure(job)
        state = {"what": __doc__.splitlines()[0], **provenance, "summary": summary(rows), "rows": rows}
        write_json(RESULT, state, force=True)
        print(*key, f"mIoU {np.mean([r['miou'] for r in rows[-len(job['score']) :]]):.3f}", flush=True)
    print(json.dumps(summary(rows), indent=1))


def jobs(data: Path, classifiers: list[str]) -> Iterator[dict[str, Any]]:
    """Yield every training with the images it is scored on."""
    for classifier in classifiers:
        for kind in KINDS:
            identity = {"classifier": classifier, "features": kind}
            for folder in sorted(path for path in data.iterdir() if (path / "images").is_dir()):
                for name in ("scribbles", "scribbles_corner"):
                    scribbles = "corner" if name.endswith("corner") else "spread"
                    for label in sorted((folder / name).glob("*.png")):
                        image = folder / "images" / label.name
                        own = {"train": [image], "labels": [label], "score": [image]}
                        yield {"set": folder.name, "scribbles": scribbles, **identity, **own}
            images = sorted((data / CROSS / "images").glob("*.png"))
            yield {
                "set": f"{CROSS} across images", "scribbles": "spread", **identity,
                "train": [p for p in images if p.stem in TRAIN],
                "labels": [data / CROSS / "scribbles" / f"{name}.png" for name in TRAIN],
                "score": [p for p in images if p.stem not in TRAIN],
            }  # fmt: skip


def measure(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Run one training and score it -> one row per scored image."""
    scoring = ScoreOptions(
        [path.parents[1] / "masks" / path.name for path in job["score"]], include_labelled=True
    )
    with tempfile.TemporaryDirectory() as folder:
        own = job["train"] == job["score"]
        report = segment(
            job["train"], Path(folder, "train"), labels=job["labels"], classifier=job["classifier"],
            features=FeatureConfig(job["features"], model=None if job["features"] == "filters" else NAME),
            scoring=scoring if own else None, post=PLAIN,
        )  # fmt: skip
        if not own:
            model = Path(folder, "train", MODEL_NAME)
            report = apply(model, job["score"], Path(folder, "score"), scoring=scoring, post=PLAIN)
    if report.failures:
        raise SystemExit(f"failed: {report.failures}")
    identity = {key: job[key] for key in ("set", "scribbles", "classifier", "features")}
    return [
        {
            **identity,
            "image": Path(record["image"]).stem,
            "miou": record["scores"]["miou"],
            "mean_boundary_f1": record["scores"]["mean_boundary_f1"],
            "phase_fraction_error_pp": record["scores"]["phase_fraction_mean_abs_error_pp"],
        }
        for record in report.images
    ]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Give the paired gain over filters of each classifier, and what corner scribbles cost beyond what filters lose."""
    score = {(r["classifier"], r["features"], r["set"], r["scribbles"], r["image"]): r["miou"] for r in rows}
    result: dict[str, Any] = {}
    for classifier, kind in dict.fromkeys((r["classifier"], r["features"]) for r in rows):
        if kind == "filters":
            continue
        gains: dict[str, list[float]] = {}
        corner: dict[str, list[float]] = {}
        for (c, k, name, scribbles, image), value in score.items():
            base = score.get((classifier, "filters", name, scribbles, image))
            if (c, k) != (classifier, kind) or base is None:
                continue
            if scribbles == "spread":
                gains.setdefault(name, []).append(value - base)
            elif (c, k, name, "spread", image) in score:
                spread, plain = (score[(c, x, name, "spread", image)] for x in (kind, "filters"))
                corner.setdefault(name, []).append((spread - value) - (plain - base))
        result[f"{classifier}, {kind}"] = {"gain": _means(gains), "corner costs more": _means(corner)}
    return result


def _means(parts: dict[str, list[float]]) -> dict[str, Any]:
    """Average each set, and all images with a bootstrap interval of 95 %."""
    values = np.array([v for part in parts.values() for v in part])
    if not len(values):
        return {}
    draws = np.random.default_rng(0).choice(values, (4000, len(values))).mean(1)
    return {
        "all": round(float(values.mean()), 4),
        "interval": [round(float(q), 4) for q in np.quantile(draws, (0.025, 0.975))],
        "images": len(values),
        "sets": {name: round(float(np.mean(part)), 4) for name, part in parts.items()},
    }


if __name__ == "__main__":
    main()
