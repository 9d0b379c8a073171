"""Evaluation of `vispe segment --cluster` on micrographs with ground truth, by features and by method.

Clusters are found on each image by itself, and once on all images of a set together (the first three by name), K being
the number of classes in the truth; they are matched one to one to the classes, and scored on all pixels. Every run goes
through `vispe.segment.pipeline`. The result determines only the default features of `--cluster`; no other setting was
tuned on these micrographs. Finished rows are stored, so that an interrupted run resumes; `--fresh` discards them.

    python eval/segment/cluster.py ../shared/data/microscopy
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

from vispe.backbones.micro import WEIGHTS
from vispe.images.labels.truth_files import read_truth
from vispe.segment.classify.clustering import METHODS
from vispe.segment.features.feature_config import KINDS, FeatureConfig
from vispe.segment.features.micro_features import NAME
from vispe.segment.pipeline import ScoreOptions, segment
from vispe.utils.files import write_json
from vispe.utils.version import versions

RESULT = Path(__file__).resolve().parents[1] / "results" / "cluster.json"
FITS = ("each image", "all images of the set")
IMAGES = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="folder of the micrograph sets")
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    options = parser.parse_args()
    provenance = {"weights": hashlib.sha256(WEIGHTS.read_bytes()).hexdigest(), "versions": versions()}
    rows: list[dict[str, Any]] = []
    if RESULT.exists() and not options.fresh:
        state = json.loads(RESULT.read_text())
        if {key: state[key] for key in provenance} != provenance:
            raise SystemExit(f"{RESULT} was made with other weights or versions; use --fresh.")
        rows = state["rows"]
    done = {tuple(r[k] for k in ("fit", "method", "features", "set", "image")) for r in rows}
    for job in jobs(options.data):
        key = tuple(job[k] for k in ("fit", "method", "features", "set"))
        if done.issuperset((*key, path.stem) for path in job["images"]):
            continue
        rows += measure(job)
        state = {
            "what": __doc__.splitlines()[0],
            **provenance,
            "summary": summary(rows),
            "rows": rows,
        }
        write_json(RESULT, state, force=True)
        result = rows[-len(job["images"]) :]
        print(
            *key,
            *(f"{k} {np.mean([r[k] for r in result]):.3f}" for k in ("miou", "adjusted_rand")),
            flush=True,
        )
    print(json.dumps(summary(rows), indent=1))


def jobs(data: Path) -> Iterator[dict[str, Any]]:
    """Yield every clustering with the images it is found on."""
    for fit in FITS:
        for method in METHODS:
            for kind in KINDS:
                for folder in sorted(path for path in data.iterdir() if (path / "images").is_dir()):
                    images = sorted((folder / "images").glob("*.png"))[:IMAGES]
                    identity = {"fit": fit, "method": method, "features": kind, "set": folder.name}
                    for paths in [images] if fit == FITS[1] else [[path] for path in images]:
                        yield {**identity, "images": paths}


def measure(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Find clusters on the images of a job and score them -> one row per image."""
    truth = [path.parents[1] / "masks" / path.name for path in job["images"]]
    count = len(set().union(*(_classes(path) for path in truth)))
    if count < 2:
        raise SystemExit(f"{truth} has fewer than two classes.")
    kind = job["features"]
    with tempfile.TemporaryDirectory() as folder:
        report = segment(
            job["images"], Path(folder, "out"), cluster=count, cluster_method=job["method"],
            features=FeatureConfig(kind, model=None if kind == "filters" else NAME), scoring=ScoreOptions(truth),
        )  # fmt: skip
    if report.failures:
        raise SystemExit(f"failed: {report.failures}")
    identity = {key: job[key] for key in ("fit", "method", "features", "set")}
    return [
        {
            **identity,
            "image": Path(record["image"]).stem,
            "clusters": count,
            **{key: record["scores"][key] for key in ("miou", "adjusted_rand")},
            "seconds": record["seconds"],
        }
        for record in report.images
    ]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Average each fit, method and kind of features over sets, each set over its images."""
    result: dict[str, Any] = {}
    for key in dict.fromkeys((r["fit"], r["method"], r["features"]) for r in rows):
        group_rows = [r for r in rows if (r["fit"], r["method"], r["features"]) == key]
        sets: dict[str, dict[str, float]] = {}
        for name in dict.fromkeys(r["set"] for r in group_rows):
            set_rows = [r for r in group_rows if r["set"] == name]
            sets[name] = {
                k: round(float(np.mean([r[k] for r in set_rows])), 4) for k in ("miou", "adjusted_rand")
            }
        mean = {k: round(float(np.mean([s[k] for s in sets.values()])), 4) for k in ("miou", "adjusted_rand")}
        result[", ".join(key)] = {"mean of the sets": mean, "images": len(group_rows), "sets": sets}
    return result


def _classes(path: Path) -> set[int]:
    from PIL import Image

    with Image.open(path) as image:
        shape = (1, image.height, image.width)
    return set(np.unique(read_truth(path, shape)).tolist()) - {0}


if __name__ == "__main__":
    main()
