"""Evaluation of the number of clusters that `--cluster` selects: how often it equals the number of phases.

Each image by itself: textures of vispe with 2 to 6 phases of their own grey level in noise, and the micrographs of each
set, whose number of classes is that of the truth. Compared with vispe are the silhouette alone (the earlier method),
the gap statistic with the rule of one standard error (Tibshirani, Walther and Hastie, 2001), and stability (clusters of
two halves of the pixels, compared by the adjusted Rand index). The method was tuned on 'seen' images (the first three
of each set by name, and two seeds); 'unseen' ones, the next three, and three seeds with other grains and more noise,
were evaluated once. Finished rows are stored; `--fresh` discards them.

    python eval/segment/cluster_count.py ../shared/data/microscopy
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
import checkout  # noqa: F401  (finds vispe)
import numpy as np
from PIL import Image

from vispe.images.normalize import normalize
from vispe.images.read import read_image
from vispe.images.textures import voronoi
from vispe.segment.classify.clustering import PixelClusters
from vispe.segment.features.pixel_features import Features
from vispe.segment.pipeline import DEFAULT
from vispe.utils.files import write_json

RESULT = Path(__file__).resolve().parents[1] / "results" / "cluster_count.json"
METHODS = ("silhouette", "gap", "stability", "vispe")
PIXELS, PART, REFERENCES, HALVES, MOST = 4000, 2000, 4, 4, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="folder of the micrograph sets")
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if RESULT.exists() and not options.fresh:
        rows = json.loads(RESULT.read_text())["rows"]
    done = {(r["set"], r["image"]) for r in rows}
    features = Features(DEFAULT)
    for job in jobs(options.data):
        if (job["set"], job["image"]) in done:
            continue
        page, truth = job.pop("read")()
        rows.append({**job, **measure(features, page, truth)})
        write_json(
            RESULT, {"what": __doc__.splitlines()[0], "summary": summary(rows), "rows": rows}, force=True
        )
        print(*rows[-1].values(), flush=True)
    print(json.dumps(summary(rows), indent=1))


def jobs(data: Path) -> Iterator[dict[str, Any]]:
    """Yield every image with how it is made or read."""
    for phases in range(2, 7):
        for seed in (0, 1, 10, 11, 12):
            recorded = seed < 10
            made = {"grain": 32 if recorded else 20, "noise": 0.03 if recorded else 0.04}
            name = f"{phases} phases, seed {seed}"
            yield {
                "set": "textures",
                "image": name,
                "seen": recorded,
                "read": lambda p=phases, s=seed, m=made: texture(p, s, **m),
            }
    for folder in sorted(path for path in data.iterdir() if (path / "images").is_dir()):
        for number, path in enumerate(sorted((folder / "images").glob("*.png"))[:6]):
            yield {
                "set": folder.name,
                "image": path.stem,
                "seen": number < 3,
                "read": lambda p=path: micrograph(p),
            }


def texture(phases: int, seed: int, grain: float, noise: float) -> tuple[np.ndarray, np.ndarray]:
    """Draw grains of phases with a grey level each, in noise -> (h, w, 1) and the phases (h, w)."""
    sample = voronoi(seed, grain=grain, fractions=tuple(np.full(phases, 1 / phases)), period=256)
    truth = sample.render(256)[1].numpy()
    grey = 0.1 + 0.8 * truth / (phases - 1) + np.random.default_rng(seed).normal(0, noise, truth.shape)
    return np.clip(grey, 0, 1).astype(np.float32)[..., None], truth


def micrograph(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read a micrograph and its truth."""
    pages, _ = normalize(read_image(path), "stack", (0.5, 99.5))
    return pages[0], np.asarray(Image.open(path.parents[1] / "masks" / path.name))


def measure(features: Features, page: np.ndarray, truth: np.ndarray) -> dict[str, Any]:
    """Choose the number of clusters by each method."""
    from sklearn.preprocessing import StandardScaler

    mask = np.zeros(truth.size, bool)
    mask[np.random.default_rng(0).permutation(truth.size)[:PIXELS]] = True
    mask = mask.reshape(truth.shape)
    result = features.prepare(page, np.ones(truth.shape, bool)).gather(mask)
    choice = PixelClusters("auto").fit(result, page[mask].mean(-1)).choice
    if choice is None:
        raise SystemExit("PixelClusters('auto') made no choice.")
    points = StandardScaler().fit_transform(result)[:PART]
    return {
        "phases": len(np.unique(truth)),
        "silhouette": max(choice.silhouette, key=lambda k: (choice.silhouette[k], -k)),
        "gap": gap(points),
        "stability": stability(points),
        "vispe": choice.n_classes,
    }


def gap(points: np.ndarray) -> int:
    """Choose by the gap statistic on ten principal components, against pixels spread evenly over their box."""
    from sklearn.cluster import KMeans
    from sklearn.decomposition import PCA

    points = PCA(10, random_state=0).fit_transform(points)
    rng = np.random.default_rng(0)
    even = [rng.uniform(points.min(0), points.max(0), points.shape) for _ in range(REFERENCES)]

    def spread(x: np.ndarray, k: int) -> float:
        return float(np.log(KMeans(k, n_init=2, random_state=0).fit(x).inertia_))

    logs = np.array([[spread(x, k) for x in even] for k in range(1, MOST + 1)])
    gaps = logs.mean(1) - [spread(points, k) for k in range(1, MOST + 1)]
    doubt = logs.std(1) * np.sqrt(1 + 1 / REFERENCES)
    fits = [k for k in range(1, MOST) if gaps[k - 1] >= gaps[k] - doubt[k]]
    return fits[0] if fits else MOST


def stability(points: np.ndarray) -> int:
    """Choose the number whose clusters agree most between two halves of the pixels."""
    from sklearn.cluster import KMeans
    from sklearn.metrics import adjusted_rand_score

    rng = np.random.default_rng(0)
    orders = [rng.permutation(len(points)) for _ in range(HALVES)]

    def alike(k: int) -> float:
        scores = []
        for order in orders:
            one, two = points[order[::2]], points[order[1::2]]
            first, second = (KMeans(k, n_init=2, random_state=0).fit(x) for x in (one, two))
            scores.append(adjusted_rand_score(first.predict(two), second.labels_))
        return float(np.mean(scores))

    return max(range(2, MOST + 1), key=alike)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the fraction of images with the correct number, by method and group."""
    groups = {
        "seen textures": [r for r in rows if r["seen"] and r["set"] == "textures"],
        "seen micrographs": [r for r in rows if r["seen"] and r["set"] != "textures"],
        "unseen textures": [r for r in rows if not r["seen"] and r["set"] == "textures"],
        "unseen micrographs": [r for r in rows if not r["seen"] and r["set"] != "textures"],
    }
    for name in dict.fromkeys(r["set"] for r in rows):
        groups[name] = [r for r in rows if r["set"] == name]
    return {
        name: {
            "pictures": len(own),
            **{m: round(float(np.mean([r[m] == r["phases"] for r in own])), 3) for m in METHODS},
        }
        for name, own in groups.items()
        if own
    }


if __name__ == "__main__":
    main()
