"""Benchmark of time and memory of `vispe segment` against common alternatives on the same image and labels.

    python eval/bench/segment_peers.py [--megapixels 1 4] [--rounds 2]

- `skimage_forest`: `skimage.feature.multiscale_basic_features` (intensity, edges, texture; sigma 1 to 16) and a random
  forest of scikit-learn with 100 trees, as in scikit-image's example of trainable segmentation.
- `vispe_filters_forest`: `vispe segment --features filters --classifier forest`.
- `dinov2_s`: patch tokens of timm's vit_small_patch14_dinov2 as `vispe segment --features tokens` computes them; the
  weights are random, which takes the same time.
- `vispe_default`: `vispe segment --classifier logistic`, the fastest classifier.

Every run is a separate process, from the start of Python to the written label map. The rows of a size are measured
interleaved, round by round; the fastest round is reported. Ratios are to `skimage_forest`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from segment import inputs
from timing import environment

PEER = """
import sys
import numpy as np
from PIL import Image
from skimage.feature import multiscale_basic_features
from skimage.future import predict_segmenter
from sklearn.ensemble import RandomForestClassifier

image, labels, out = sys.argv[1:]
grey = np.asarray(Image.open(image)) / np.float32(255)
drawn = np.asarray(Image.open(labels))
found = multiscale_basic_features(grey, sigma_min=1, sigma_max=16)
forest = RandomForestClassifier(100, class_weight="balanced", n_jobs=-1, random_state=0)
forest.fit(found[drawn > 0], drawn[drawn > 0])
Image.fromarray(predict_segmenter(found, forest).astype(np.uint8)).save(out)
"""
VISPE = {
    "vispe_filters_forest": ["--features", "filters", "--classifier", "forest"],
    "dinov2_s": ["--features", "tokens", "--model", "vit_small_patch14_dinov2", "--weights", "random"],
    "vispe_default": ["--classifier", "logistic"],
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megapixels", type=float, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parents[1] / "results" / "segment_peers.json"
    )
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for size in arguments.megapixels:
            image, labels = inputs(size, Path(folder))
            best: dict[str, dict] = {}
            for _ in range(arguments.rounds):
                for name in ("skimage_forest", *VISPE):
                    row = measure(name, image, labels, Path(folder) / "out")
                    if name not in best or row["wall_s"] < best[name]["wall_s"]:
                        best[name] = row
            base = best["skimage_forest"]["wall_s"]
            for name, row in best.items():
                rows.append(
                    {"megapixels": size, "name": name, **row, "speed": round(base / row["wall_s"], 2)}
                )
                print(*(f"{k}={v}" for k, v in rows[-1].items()), flush=True)
    packages = ("scikit-image", "scikit-learn", "scipy", "numpy", "pillow")
    result = {"environment": environment(*packages), "rounds": arguments.rounds, "rows": rows}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


def measure(name: str, image: Path, labels: Path, out: Path) -> dict[str, float]:
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    command = [sys.executable, "-c", PEER, str(image), str(labels), str(out / "labels.png")]
    if name in VISPE:
        command = [sys.executable, "-m", "vispe", "segment", str(image), "--labels", str(labels)]
        command += ["-o", str(out), *VISPE[name]]
    start = time.perf_counter()
    pid = os.spawnv(os.P_NOWAIT, sys.executable, command)
    _, status, usage = os.wait4(pid, 0)
    if status:
        raise SystemExit(f"{name} failed on {image}")
    return {
        "wall_s": round(time.perf_counter() - start, 2),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 2),
        "peak_memory_gib": round(usage.ru_maxrss / 2**20, 2),
    }


if __name__ == "__main__":
    main()
