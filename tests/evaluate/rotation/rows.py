"""Results with known values for tests of figures."""

import numpy as np

from vispe.evaluate.rotation import D4, Fingerprint, Measurement, RotationResult
from vispe.evaluate.rotation.metrics.quadrant_gap import QUADRANTS
from vispe.evaluate.rotation.record_key import Key
from vispe.evaluate.rotation.report import RotationReport

POSES = [g.name for g in D4[1:]]
NAN = float("nan")


def row(
    question, metric, mean, n=6, part="full", control=False, amount=(), layer=None, training="", **floors
):
    """Return a row of n images about a mean, NaN if the mean is NaN."""
    noise = np.linspace(-0.01, 0.01, n) if n > 1 else np.zeros(1)
    key = Key(question, metric, part, amount, layer, training)
    return Measurement.of(
        key, mean + noise, control=control, floors={k: np.full(n, v) for k, v in floors.items()}
    )


def d4_rows(n=6):
    return [
        row("D4", "error", 0.7, n),
        row("D4 worst", "error", 0.9, n),
        row("D4", "error", 0.2, n, "position code"),
        *(row(g, "error", 0.4 + 0.1 * k, n) for k, g in enumerate(POSES)),
        *(row(g, "error", 0.1 + 0.05 * k, n, "position code") for k, g in enumerate(POSES)),
        row("identity", "error", 0.0, n, control=True),
        row("shuffled", "error", 1.4, n, control=True),
        row("D4", "error", 0.8, n, "random weights", control=True),
    ]


def angle_rows(n=6, metric="error", part="full"):
    actual = []
    for a in range(0, 360, 15):
        tilted = bool(a % 90)
        if metric == "error":
            value, floors = (
                0.5 + 0.001 * a if a else 0.0,
                {"round trip": 0.3 * tilted, "features": 0.1 * tilted},
            )
        else:
            value, floors = 0.9 - 0.001 * a, {"labels turned": 1.0 - 0.02 * tilted}
        actual.append(row("angle", metric, value, n, part, amount=(a,), **floors))
    return [row("all angles", metric, 0.6, n, part, blur=0.3), *actual] if metric == "error" else actual


def layer_rows(n=6):
    return [
        *(row("D4", "error", 0.1 * (k + 1), n, layer=k) for k in range(5)),
        *(row("none", "r2", 0.2 * k - 0.3, n, layer=k) for k in range(5)),
        *(row("D4", "error", 0.05 * k, n, "position code", layer=k) for k in range(5)),
    ]


def shift_rows(n=6):
    shifts = [(4, 0), (0, 4), (4, 4), (12, 8), (1, 1), (2, 2), (3, 3)]
    rolls = [row("roll", "error", 0.1 * max(s), n, amount=s) for s in shifts]
    crops = [row("crop shift", "error", 0.05 * max(s), n, amount=s) for s in shifts if max(s) <= 4]
    means = [
        row("roll, whole patches", "error", 0.5, n),
        row("crop shift, parts of a patch", "error", 0.1, n),
    ]
    return [*means, *rolls, *crops]


def quadrant_rows(n=6):
    return [
        row("four corners", "quadrant_gap", -0.2, n),
        *(row(q, "quadrant_gap", -0.1 * (k + 1), n) for k, q in enumerate(QUADRANTS)),
        *(
            row(q, "quadrant_gap", 0.05 * (k - 1.5), n, "spread everywhere", True)
            for k, q in enumerate(QUADRANTS)
        ),
        row("four corners", "accuracy", 0.8, n, "quadrant of the scribbles"),
    ]


def label_rows(n=6):
    return [
        *(row(t, m, 0.9, n) for m in ("miou", "ari") for t in ("D4", *POSES)),
        *(row(t, "miou", 0.8, n, "clusters fitted once") for t in ("D4", *POSES)),
        *angle_rows(n, "miou"),
        row("roll, random phases", "miou", 0.7, n),
    ]


def pose_rows(n=6):
    return [
        *angle_rows(n, "accuracy"),
        *angle_rows(n, "accuracy", "trained on all poses"),
        *(row("all poses", m, 0.5, n) for m in ("accuracy_mean", "accuracy_worst", "accuracy_spread")),
        row("all poses", "phase_spread", 3.0, n, "pores <i>"),
        row("all poses", "phase_error", -2.0, n, "pores <i>"),
    ]


def position_rows(n=6):
    return [row("none", "r2", 0.4, n), row("shuffled positions", "r2", -0.2, n, control=True)]


def lie_rows(n=6):
    return [row("Lie rotation", "lie", 3.0, n)]


def score_rows(n=6):
    return [row("rolls of 0 to 7 px", "argmax", 0.9, n), row("shift by any amount", "score_change", 0.01, n)]


def result(rows, n=6, **settings):
    return RotationResult(tuple(rows), tuple(f"image {k}" for k in range(n)), settings)


def print_(snr=12.0, d=4, shape=(3, 5), components=3, notes=()):
    rng = np.random.default_rng(0)
    return Fingerprint(
        mean=rng.normal(size=(d, *shape)),
        snr=snr,
        snr_uncentred=1.0,
        channel_snr=np.ones(d),
        channel_r2=np.array([0.2, 0.9, -0.5, NAN])[:d],
        components=rng.normal(size=(components, *shape)),
        explained=np.array([0.5, 0.3, 0.1])[:components],
        n_images=40,
        notes=notes,
    )


def report(rows=(), n=6, **others):
    return RotationReport("a model", result(rows, n, patch=4), **others)
