"""Evaluation of the default classifier of `vispe segment`, and of intervals of area fractions, on all micrographs.

Three classifiers are trained on the same scribbles: logistic regression with all colour filters at full strength (the
default of earlier versions), with scaled colour filters, and the ensemble. Scribbles are those of the image (spread
over it, or in one corner), or of a third of each set, for the images of the other thirds. Scores are of a random sample
of pixels of each image, the same for all classifiers: mean IoU of the label map, errors of the area fractions in
percentage points, and coverage and width of their intervals. Differences are paired, with bootstrap intervals of 95 %
over images.

    python eval/segment/ensemble.py ../shared/data/microscopy --cache features/
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
import checkout  # noqa: F401  (finds vispe)
import numpy as np
from scribble_features import features_of, read_arguments, scale_of, sets

from vispe.segment.classify.calibration import calibrate, concatenate_ids
from vispe.segment.classify.class_prior import area_estimate, estimate, interval, reweigh, weights
from vispe.segment.classify.pixel_classifier import PixelClassifier
from vispe.segment.classify.probability_histogram import count
from vispe.utils.files import atomic_path
from vispe.utils.version import versions

RESULT = Path(__file__).resolve().parents[1] / "results" / "segment_ensemble.json"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "micrographs" / "fractions.md"
MARK = r"(<!-- {}: [^\n]*-->\n).*?(<!-- end of {} -->)"
CLASSIFIERS = {
    "logistic, full colour": ("logistic", False),
    "logistic": ("logistic", True),
    "ensemble": ("ensemble", True),
}
BEFORE, NOW = "logistic, full colour", "ensemble"
MODES = ("spread", "corner", "across")
_FITTED: dict[tuple[Any, ...], tuple[PixelClassifier, dict[str, Any]]] = {}


def main() -> None:
    data, cache = read_arguments(__doc__.splitlines()[0])
    rows: list[dict[str, Any]] = []
    if RESULT.exists() and (result := json.loads(RESULT.read_text()))["versions"] == versions():
        rows = result["rows"]
    done = {(row["mode"], row["set"], row["image"]) for row in rows}
    for folder, names in sets(data):
        parts = {name: features_of(folder, name, cache) for name in names}
        for mode, part in [("spread", 0), ("corner", 0), *(("across", third) for third in range(3))]:
            for name in names:
                training = names[part::3] if mode == "across" else [name]
                if mode == "across" and name in training:
                    continue
                mode_name = f"across {part}" if mode == "across" else mode
                kind = "corner" if mode == "corner" else "spread"
                training = [n for n in training if f"{kind}_y" in parts[n]]
                if not training or (mode_name, folder.name, name) in done:
                    continue
                rows += measure(parts, name, training, kind, {"mode": mode_name, "set": folder.name})
        save(rows)
        print(folder.name, flush=True)
    print(json.dumps(summary(rows), indent=1))


def measure(
    parts: dict[str, dict[str, np.ndarray]],
    name: str,
    training: Sequence[str],
    kind: str,
    same: dict[str, Any],
) -> list[dict[str, Any]]:
    """Train each classifier and score it on an image -> one row for each classifier."""
    x, y = (np.concatenate([parts[n][f"{kind}_{key}"] for n in training]) for key in ("x", "y"))
    of = concatenate_ids([parts[n][f"{kind}_of"] for n in training])
    n_classes = max(*(len(parts[n]["true"]) for n in (*training, name)), int(y.max()))
    filter_scale = scale_of(parts[name])
    rows: list[dict[str, Any]] = []
    for classifier, (kind_of_classifier, scaled) in CLASSIFIERS.items():
        if scaled and filter_scale is None and kind_of_classifier == "logistic":
            rows.append({**rows[0], "classifier": classifier})  # grey images have no scaled filters
            continue
        key = (same["set"], *training, kind, classifier, n_classes)
        if key not in _FITTED:
            scale = filter_scale if scaled else None
            fitted = PixelClassifier(kind_of_classifier, n_classes).fit(x, y, scale=scale)
            _FITTED[key] = fitted, calibrate(fitted, x, y, of, scale=scale)
        fitted, facts = _FITTED[key]
        prob = fitted.planes(np.ascontiguousarray(parts[name]["scored_x"].T))
        scores = score(prob, parts[name]["scored_y"], parts[name]["true"], facts, kind_of_classifier)
        rows.append({**same, "image": name, "classifier": classifier, **scores})
    return rows


def score(
    prob: np.ndarray, truth: np.ndarray, true: np.ndarray, facts: dict[str, Any], kind: str
) -> dict[str, Any]:
    """Score probabilities (K, n) with the prior of the image."""
    n_classes, n = prob.shape
    true = np.pad(true, (0, n_classes - len(true)))
    counts = count(prob)
    prior = estimate(counts)
    pixels, doubt = (value / n for value in area_estimate(counts, prior))
    labels = reweigh(prob.copy(), weights(prior, "sqrt")).argmax(0)
    unions = [((labels == k) | (truth == k)).sum() for k in range(n_classes)]
    intersections = [((labels == k) & (truth == k)).sum() for k in range(n_classes)]
    bounds = [interval(*pair, kind) for pair in zip(pixels, doubt, strict=True)]
    in_map = np.bincount(labels, minlength=n_classes) / n
    return {
        "miou": round(float(np.mean([b / u for b, u in zip(intersections, unions, strict=True) if u])), 4),
        "error_pp": round(100 * float(np.abs(pixels - true).mean()), 3),
        "map_error_pp": round(100 * float(np.abs(in_map - true).mean()), 3),
        "covered": [bool(low <= t <= high) for (low, high), t in zip(bounds, true, strict=True)],
        "width_pp": round(100 * float(np.mean([high - low for low, high in bounds])), 2),
        "temperature": facts["temperature"],
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Average by mode and classifier, and give the paired gain over the default of earlier versions by set."""
    table: dict[str, Any] = {}
    for mode in MODES:
        mode_rows = [row for row in rows if row["mode"].startswith(mode)]
        base = {(r["mode"], r["set"], r["image"]): r["miou"] for r in mode_rows if r["classifier"] == BEFORE}
        for classifier in CLASSIFIERS:
            chosen = [r for r in mode_rows if r["classifier"] == classifier]
            if not chosen:
                continue
            gains = np.array([r["miou"] - base[r["mode"], r["set"], r["image"]] for r in chosen])
            draws = np.random.default_rng(0).choice(gains, (4000, len(gains))).mean(1)
            sets = dict.fromkeys(r["set"] for r in chosen)
            of_set = {s: [g for g, r in zip(gains, chosen, strict=True) if r["set"] == s] for s in sets}
            mean = lambda key, by=chosen: float(np.mean([r[key] for r in by]))  # noqa: E731
            table[f"{mode}, {classifier}"] = {
                "images": len(chosen),
                "miou": round(mean("miou"), 4),
                "gain": round(float(gains.mean()), 4),
                "interval": [round(float(q), 4) for q in np.quantile(draws, (0.025, 0.975))],
                "worse": int((gains < -0.001).sum()),
                "worst": round(float(gains.min()), 4),
                "sets": {s: round(float(np.mean(g)), 4) for s, g in of_set.items()},
                "miou_of_sets": {
                    s: round(mean("miou", [r for r in chosen if r["set"] == s]), 4) for s in sets
                },
                "error_pp": round(mean("error_pp"), 3),
                "map_error_pp": round(mean("map_error_pp"), 3),
                "coverage": round(float(np.mean([c for r in chosen for c in r["covered"]])), 4),
                "width_pp": round(mean("width_pp"), 2),
            }
    return table


def save(rows: list[dict[str, Any]]) -> None:
    """Write the rows, and the tables of the documentation."""
    table = summary(rows)
    state = {"what": __doc__.splitlines()[0], "versions": versions(), "table": table}
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    with atomic_path(RESULT, force=True) as temporary:
        temporary.write_text(f'{json.dumps(state)[:-1]},\n"rows": [\n{lines}\n]}}\n')
    page = PAGE.read_text()
    for mark, text in (
        ("classifiers", table_of_classifiers(table)),
        ("intervals", table_of_intervals(table)),
    ):
        pattern = MARK.format(mark, mark)
        page = re.sub(
            pattern, lambda result, text=text: f"{result[1]}{text}\n{result[2]}", page, flags=re.DOTALL
        )
    PAGE.write_text(page)


def table_of_classifiers(table: dict[str, Any]) -> str:
    """Write the table of mean IoU by set, and the gain over the default of earlier versions."""
    names = list(table[f"{MODES[0]}, {NOW}"]["sets"])
    lines = [
        "| scribbles, classifier | images | mean IoU | gain (95 %) | worse in | worst | "
        + " | ".join(names)
        + " |"
    ]
    lines.append("|" + "---|" * (6 + len(names)))
    for mode, one in table.items():
        cells = [f"{one['miou_of_sets'][n]:.3f}" if n in one["miou_of_sets"] else "" for n in names]
        low, high = one["interval"]
        gain = "" if mode.endswith(BEFORE) else f"{one['gain']:+.3f} ({low:.3f} to {high:.3f})"
        worst = ("", "") if mode.endswith(BEFORE) else (str(one["worse"]), f"{one['worst']:+.3f}")
        row = [mode, str(one["images"]), f"{one['miou']:.3f}", gain, *worst, *cells]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def table_of_intervals(table: dict[str, Any]) -> str:
    """Write the table of errors of fractions, and of coverage and width of their intervals."""
    lines = [
        "| scribbles, classifier | images | error as reported, pp | of the map, pp | coverage | width, pp |"
    ]
    lines.append("|---|---|---|---|---|---|")
    for mode, one in table.items():
        row = [mode, str(one["images"]), f"{one['error_pp']:.1f}", f"{one['map_error_pp']:.1f}"]
        row += [f"{100 * one['coverage']:.0f} %", f"{one['width_pp']:.1f}"]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
