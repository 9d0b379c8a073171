"""Evaluation of `vispe segment --clean` on micrographs with ground truth: mean IoU and boundary F1 before and after.

Each image by itself, trained on its own scribbles with the default features and logistic regression, and scored on all
pixels. The radius and the penalty of the filter were chosen on the first two images of each set by name ('seen'), among
radii of 2, 4 and 8 px and penalties of 0.001 and 0.01; the next two were evaluated once. Finished rows are stored;
`--fresh` discards them.

    python eval/segment/clean.py ../shared/data/microscopy
"""

from __future__ import annotations

import argparse
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

from vispe.images.normalize import normalize
from vispe.images.read import read_image
from vispe.segment.classify.guided_filter import PENALTY, RADIUS, clean
from vispe.segment.metrics import scores
from vispe.segment.pipeline import segment
from vispe.utils.files import write_json

RESULT = Path(__file__).resolve().parents[1] / "results" / "clean.json"
KEYS = ("miou", "mean_boundary_f1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="folder of the micrograph sets")
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    options = parser.parse_args()
    settings = {"radius": RADIUS, "penalty": PENALTY}
    rows: list[dict[str, Any]] = []
    if RESULT.exists() and not options.fresh:
        state = json.loads(RESULT.read_text())
        if {key: state[key] for key in settings} != settings:
            raise SystemExit(f"{RESULT} was made with another filter; use --fresh.")
        rows = state["rows"]
    done = {(r["set"], r["image"]) for r in rows}
    for folder in sorted(path for path in options.data.iterdir() if (path / "scribbles").is_dir()):
        # unseen images first: they count
        for number, path in sorted(
            enumerate(sorted((folder / "images").glob("*.png"))[:4]), key=lambda p: -p[0]
        ):
            if (folder.name, path.stem) in done:
                continue
            rows.append({"set": folder.name, "image": path.stem, "seen": number < 2, **measure(path)})
            state = {"what": __doc__.splitlines()[0], **settings, "summary": summary(rows), "rows": rows}
            write_json(RESULT, state, force=True)
            print(*rows[-1].values(), flush=True)
    print(json.dumps(summary(rows), indent=1))


def measure(path: Path) -> dict[str, Any]:
    """Segment an image from its scribbles and score it before and after."""
    folder = path.parents[1]
    with tempfile.TemporaryDirectory() as out:
        segment([path], out, labels=[folder / "scribbles" / path.name], classifier="logistic")
        prob = tifffile.imread(Path(out) / f"{path.stem}_prob.tif")
    pages, _ = normalize(read_image(path), "stack", (0.5, 99.5))
    truth = np.asarray(Image.open(folder / "masks" / path.name)).astype(int) + 1
    count = max(len(prob), int(truth.max()))
    before = scores(prob.argmax(0) + 1, truth, count)
    after = scores(clean(prob, pages[0].mean(-1), np.ones(truth.shape, bool)).argmax(0) + 1, truth, count)
    return {
        f"{key}_{when}": round(s[key], 4)
        for key in KEYS
        for when, s in (("before", before), ("after", after))
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Average before and after by group and by set, and count the images that became worse."""
    groups = {"seen": [r for r in rows if r["seen"]], "unseen": [r for r in rows if not r["seen"]]}
    groups |= {name: [r for r in rows if r["set"] == name] for name in dict.fromkeys(r["set"] for r in rows)}
    result: dict[str, Any] = {}
    for name, group_rows in groups.items():
        if not group_rows:
            continue
        result[name] = {"images": len(group_rows)}
        for key in KEYS:
            before, after = (
                np.array([r[f"{key}_{when}"] for r in group_rows]) for when in ("before", "after")
            )
            result[name][key] = [round(float(before.mean()), 4), round(float(after.mean()), 4)]
            result[name][f"{key}_worse"] = int((after < before - 0.001).sum())
    return result


if __name__ == "__main__":
    main()
