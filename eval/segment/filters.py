"""Evaluation of `vispe segment` with filter features on micrographs, within and across images.

One classifier per image from its own scribbles (the first four images of each set in sorted order; scribbled pixels
count; classes are not weighted by their frequency, as with `--prior uniform`), and for the superalloy one classifier
from four images scored on the eight others. Every run goes through `vispe.segment.pipeline`, so the result is that of
the command. Finished rows are stored in the result file, so that an interrupted run resumes; `--fresh` discards them.

    python eval/segment/filters.py ../shared/data/microscopy
"""

import argparse
import json
import platform
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
import checkout  # noqa: F401  (finds vispe)
import numpy as np

from vispe.segment.pipeline import MODEL_NAME, PostProcessing, ScoreOptions, apply, segment
from vispe.utils.files import write_json
from vispe.utils.version import versions

RESULT = Path(__file__).resolve().parents[1] / "results" / "segment_filters.json"
CLASSIFIERS = ("logistic", "forest", "boosting")
TRAIN = ("spot1_0d_0", "spot3_0d_3", "spot5_0d_0", "spot7_0d_5")
CROSS = "superalloy_nasa"
PLAIN = PostProcessing(prior="uniform")

# mIoU of the same 26 filters with scikit-learn, measured independently: (logistic, forest), spread and corner
REFERENCE = {
    "ebc_nasa": {"spread": (0.383, 0.504)},
    "nuclei_brightfield_dsb2018": {"spread": (0.700, 0.664), "corner": (0.724, 0.698)},
    "nuclei_fluorescence_dsb2018": {"spread": (0.903, 0.863), "corner": (0.915, 0.880)},
    "nuclei_histology_dsb2018": {"spread": (0.850, 0.852), "corner": (0.820, 0.834)},
    "powder_sem_ampis": {"spread": (0.913, 0.941), "corner": (0.933, 0.932)},
    "steel_spheroidite_ampis": {"spread": (0.695, 0.727), "corner": (0.647, 0.684)},
    "superalloy_nasa": {"spread": (0.596, 0.635), "corner": (0.551, 0.588)},
    "superalloy_nasa across images": {"spread": (0.472, 0.500)},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="folder of the micrograph sets")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    options = parser.parse_args()
    state: dict[str, Any] = {"rows": []}
    if RESULT.exists() and not options.fresh:
        state = json.loads(RESULT.read_text())
        if state["seed"] != options.seed or state["versions"] != versions():
            raise SystemExit(f"{RESULT} was made with another seed or other versions; use --fresh.")
    done = {(r["set"], r["classifier"], r["scribbles"], r["image"]) for r in state["rows"]}
    for job in jobs(options.data):
        rows = [(job["set"], job["classifier"], job["scribbles"], path.stem) for path in job["score"]]
        if done.issuperset(rows):
            continue
        state["rows"] += measure(job, options.seed)
        state = {
            "what": __doc__.splitlines()[0],
            "seed": options.seed,
            "versions": versions(),
            "machine": f"{platform.machine()}, {platform.system()}, CPU",
            "table": table(state["rows"]),
            "rows": state["rows"],
        }
        write_json(RESULT, state, force=True)
        print(rows[0][:3], f"{len(rows)} image(s)", flush=True)
    show(state["table"])


def jobs(data: Path) -> Iterator[dict[str, Any]]:
    """Yield every training with the images it is scored on."""
    for classifier in CLASSIFIERS:
        for folder in sorted(path for path in data.iterdir() if (path / "images").is_dir()):
            for scribbles in ("scribbles", "scribbles_corner"):
                if (folder / scribbles).is_dir():
                    for path in sorted((folder / "images").glob("*.png"))[:4]:
                        yield {
                            "set": folder.name,
                            "classifier": classifier,
                            "scribbles": "corner" if scribbles.endswith("corner") else "spread",
                            "train": [path],
                            "labels": [folder / scribbles / path.name],
                            "score": [path],
                        }
        images = sorted((data / CROSS / "images").glob("*.png"))
        yield {
            "set": f"{CROSS} across images",
            "classifier": classifier,
            "scribbles": "spread",
            "train": [p for p in images if p.stem in TRAIN],
            "labels": [data / CROSS / "scribbles" / f"{name}.png" for name in TRAIN],
            "score": [p for p in images if p.stem not in TRAIN],
        }


def measure(job: dict[str, Any], seed: int) -> list[dict[str, Any]]:
    """Run one training and score it -> one row per scored image."""
    truth = [path.parents[1] / "masks" / path.name for path in job["score"]]
    scoring = ScoreOptions(truth, include_labelled=True)
    with tempfile.TemporaryDirectory() as folder:
        own = job["train"] == job["score"]
        report = segment(
            job["train"],
            Path(folder, "train"),
            labels=job["labels"],
            classifier=job["classifier"],
            scoring=scoring if own else None,
            post=PLAIN,
            seed=seed,
        )
        if not own:
            report = apply(
                Path(folder, "train", MODEL_NAME),
                job["score"],
                Path(folder, "score"),
                scoring=scoring,
                post=PLAIN,
            )
    if report.failures:
        raise SystemExit(f"failed: {report.failures}")
    return [
        {
            "set": job["set"],
            "classifier": job["classifier"],
            "scribbles": job["scribbles"],
            "image": Path(record["image"]).stem,
            "miou": record["scores"]["miou"],
            "mean_dice": record["scores"]["mean_dice"],
            "mean_boundary_f1": record["scores"]["mean_boundary_f1"],
            "phase_fraction_error_pp": record["scores"]["phase_fraction_mean_abs_error_pp"],
            "seconds_per_megapixel": record["seconds_per_megapixel"],
        }
        for record in report.images
    ]


def table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Average the rows of each set, classifier and kind of scribbles, alongside the reference."""
    out = []
    for key in dict.fromkeys((r["set"], r["classifier"], r["scribbles"]) for r in rows):
        name, classifier, scribbles = key
        own = [r for r in rows if (r["set"], r["classifier"], r["scribbles"]) == key]
        values = np.array([r["miou"] for r in own])
        expected = dict(zip(CLASSIFIERS, REFERENCE.get(name, {}).get(scribbles, ()), strict=False))
        reference = expected.get(classifier)
        out.append(
            {
                "set": name,
                "classifier": classifier,
                "scribbles": scribbles,
                "images": len(values),
                "miou": round(float(values.mean()), 4),
                "std": round(float(values.std()), 4),
                "reference": reference,
                "above_reference": None if reference is None else round(float(values.mean()) - reference, 4),
                "mean_boundary_f1": round(float(np.mean([r["mean_boundary_f1"] for r in own])), 4),
                "phase_fraction_error_pp": round(
                    float(np.mean([r["phase_fraction_error_pp"] for r in own])), 3
                ),
            }
        )
    return sorted(
        out, key=lambda r: (r["set"], r["scribbles"] != "spread", CLASSIFIERS.index(r["classifier"]))
    )


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    for r in rows:
        against = (
            ""
            if r["reference"] is None
            else f"  reference {r['reference']:.3f} ({r['above_reference']:+.3f})"
        )
        print(
            f"{r['set']:<32} {r['scribbles']:<7} {r['classifier']:<9} n={r['images']}  "
            f"mIoU {r['miou']:.3f} +- {r['std']:.3f}{against}"
        )


if __name__ == "__main__":
    main()
