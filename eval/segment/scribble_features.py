"""Features of labelled and scored pixels of the public micrographs, computed once and cached."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
import checkout  # noqa: F401  (finds vispe)
import numpy as np
from PIL import Image

from vispe.images.normalize import normalize
from vispe.images.read import read_image
from vispe.segment.classify.calibration import label_scribbles
from vispe.segment.features.pixel_features import Features
from vispe.segment.pipeline import DEFAULT

PIXELS = 30_000
"""Scored pixels of an image."""


def read_arguments(description: str) -> tuple[Path, Path]:
    """Return the folder of the micrograph sets and that of the cache, which is created, from the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("data", type=Path, help="folder of the micrograph sets")
    parser.add_argument("--cache", type=Path, required=True, help="folder for features")
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    return options.data, options.cache


def sets(data: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield the folder of each set of micrographs and the names of its images, in order."""
    for folder in sorted(path for path in data.iterdir() if (path / "images").is_dir()):
        yield folder, sorted(path.stem for path in (folder / "images").glob("*.png"))


def scale_of(part: dict[str, np.ndarray]) -> tuple[int, float] | None:
    """Return the result of `Features.filter_scale` for an image of `features_of`."""
    n_scaled, factor = part["scale"].tolist()
    return (int(n_scaled), factor) if n_scaled else None


def features_of(folder: Path, name: str, cache: Path) -> dict[str, np.ndarray]:
    """Return features and classes of the labelled pixels and of the scored pixels of an image."""
    stored = cache / f"{folder.name}~{name}.npz"
    if not stored.exists():
        image = read_image(folder / "images" / f"{name}.png")
        page = np.ascontiguousarray(normalize(image, "stack", (0.5, 99.5))[0][0])
        features = Features(DEFAULT, device="cpu")
        truth = np.asarray(Image.open(folder / "masks" / f"{name}.png"))
        n_scored = min(PIXELS, truth.size)
        index = {"scored": np.sort(np.random.default_rng(0).choice(truth.size, n_scored, replace=False))}
        out = {
            "true": np.bincount(truth.ravel()) / truth.size,
            "scored_y": truth.ravel()[index["scored"]],
            "scale": np.array(features.filter_scale(page.shape[-1]) or (0, 1.0)),
        }
        for kind, drawn in (("spread", "scribbles"), ("corner", "scribbles_corner")):
            path = folder / drawn / f"{name}.png"
            if path.exists():
                labels = np.asarray(Image.open(path)).astype(np.int64)
                index[kind] = np.flatnonzero(labels)
                out[f"{kind}_y"] = labels.ravel()[index[kind]]
                out[f"{kind}_of"] = label_scribbles(index[kind], out[f"{kind}_y"], labels.shape)
        union = np.unique(np.concatenate(list(index.values())))
        gathered = features.prepare(page, image.valid[0]).gather_indices(union)
        out |= {f"{kind}_x": gathered[np.searchsorted(union, own)] for kind, own in index.items()}
        np.savez(stored, **out)
    with np.load(stored) as result:
        return dict(result)
