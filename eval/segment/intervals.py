"""Comparison of predictors of the error of area fractions: terms of the page, and a bootstrap over scribbles.

For each public micrograph and each labelled class, the half width of an interval is a weighted sum of terms, with
weights fitted by quantile regression. Coverage and width are given for weights fitted to all sets, and for weights that
are fitted to the other sets.

    python eval/segment/intervals.py ../shared/data/microscopy --cache features/
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
import checkout  # noqa: F401  (finds vispe)
import numpy as np
from scipy.optimize import linprog
from scribble_features import features_of, read_arguments, scale_of, sets

from vispe.segment.classify.class_prior import area_estimate, areas, estimate, posterior
from vispe.segment.classify.pixel_classifier import PixelClassifier
from vispe.segment.classify.probability_histogram import count
from vispe.utils.files import write_json
from vispe.utils.version import versions

RESULT = Path(__file__).resolve().parents[1] / "results" / "segment_intervals.json"
DRAWS, TREES, PIXELS = 12, 8, 4096  # of the bootstrap: resamples, trees of each, labelled pixels of each
QUANTILE = 0.9
TERMS = {
    "doubt (now)": ("doubt",),
    "ambiguous, change of the weighting": ("ambiguous", "weighting"),
    "bootstrap": ("bootstrap", "constant"),
    "ambiguous, bootstrap": ("ambiguous", "bootstrap"),
    "ambiguous, bootstrap, change of the weighting": ("ambiguous", "bootstrap", "weighting"),
}


def main() -> None:
    data, cache = read_arguments(__doc__.splitlines()[0])
    rows: list[dict[str, Any]] = []
    for folder, names in sets(data):
        for name in names:
            features = features_of(folder, name, cache)
            for kind in ("spread", "corner"):
                if f"{kind}_y" in features:
                    identity = {"set": folder.name, "image": name, "scribbles": kind}
                    rows += [identity | row for row in measure(features, kind)]
        print(folder.name, flush=True)
    save(rows)


def save(rows: list[dict[str, Any]]) -> None:
    """Write the rows and their summary."""
    table = summary(rows)
    state = {"what": __doc__.splitlines()[0], "versions": versions(), "table": table, "rows": rows}
    write_json(RESULT, state, force=True)
    print(json.dumps(table, indent=1))


def measure(part: dict[str, np.ndarray], kind: str) -> list[dict[str, Any]]:
    """Train the default classifier and its resamples -> error and terms of each labelled class."""
    x, y, of = (part[f"{kind}_{key}"] for key in ("x", "y", "of"))
    n_classes, scored = max(len(part["true"]), int(y.max())), part["scored_x"]
    scale = scale_of(part)
    fitted = PixelClassifier("ensemble", n_classes).fit(x, y, scale=scale)
    histogram = count(fitted.planes(np.ascontiguousarray(scored.T)))
    prior, n = estimate(histogram), len(scored)
    fractions, doubt = (value / n for value in area_estimate(histogram, prior))
    likely = posterior(histogram.probabilities(), prior)
    root = np.sqrt(prior)
    change = np.abs(areas(histogram, prior)[0] - areas(histogram, root / root.sum())[0]) / n
    ambiguous = (histogram.counts[:, None] * likely * (1 - likely)).sum(0) / n
    random, draws = np.random.default_rng(0), []
    scribbles = [np.unique(of[y == k]) for k in np.unique(y)]
    for number in range(DRAWS):
        chosen = np.concatenate([random.choice(each, len(each)) for each in scribbles])
        index = np.concatenate([np.flatnonzero(of == one) for one in chosen])
        index = index[:: -(-len(index) // PIXELS)]
        resampled = PixelClassifier("ensemble", n_classes, trees=TREES, seed=number)
        resampled.fit(x[index], y[index], scale=scale)
        own = count(resampled.planes(np.ascontiguousarray(scored[::3].T)))
        draws.append(area_estimate(own, estimate(own))[0] / len(scored[::3]))
    true = np.pad(part["true"], (0, n_classes - len(part["true"])))
    terms = {"doubt": doubt, "ambiguous": ambiguous, "weighting": change, "bootstrap": np.std(draws, 0)}
    return [
        {"class": int(k), "error": round(float(abs(fractions[k - 1] - true[k - 1])), 5)}
        | {name: round(float(value[k - 1]), 5) for name, value in terms.items()}
        for k in np.unique(y)
    ]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return coverage and width for each choice of terms, and the quantiles of the error."""
    error, sets = np.array([row["error"] for row in rows]), np.array([row["set"] for row in rows])
    out: dict[str, Any] = {"fractions": len(rows), "mean_error_pp": round(100 * float(error.mean()), 2)}
    out["error_quantiles_pp"] = {
        str(q): round(100 * float(np.quantile(error, q)), 2) for q in (0.5, 0.9, 0.95)
    }
    for name, terms in TERMS.items():
        x = np.array([[1.0 if term == "constant" else row[term] for term in terms] for row in rows])
        weights, half = quantile_weights(x, error), np.zeros(len(rows))
        for each in np.unique(sets):
            test = sets == each
            half[test] = x[test] @ quantile_weights(x[~test], error[~test])
        out[name] = {"weights": [round(float(w), 3) for w in weights]}
        for which, widths in (("all sets", x @ weights), ("other sets", half)):
            coverage, width = float((error <= widths + 1e-9).mean()), 200 * float(widths.mean())
            out[name][which] = {"coverage": round(coverage, 3), "width_pp": round(width, 1)}
    return out


def quantile_weights(x: np.ndarray, error: np.ndarray) -> np.ndarray:
    """Return the weights (m,) >= 0 of the terms (n, m) whose sum is a quantile of the error (n,)."""
    n, m = x.shape
    cost = np.r_[np.zeros(m), np.full(n, QUANTILE), np.full(n, 1 - QUANTILE)]
    system = np.c_[x, np.eye(n), -np.eye(n)]
    return linprog(cost, A_eq=system, b_eq=error, bounds=[(0, None)] * (m + 2 * n), method="highs").x[:m]


if __name__ == "__main__":
    main()
