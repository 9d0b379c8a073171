"""Score weights of vispe_micro as `vispe segment` uses them, on synthetic tasks that training never saw.

    python -m models.micro.validate runs/micro/weights.safetensors [--folders pictures/] [--count 30]

Whole pictures of 512 pixels with strokes on 0.6 % of the pixels, over the picture or in one corner, and the classifiers
of the command on filters, on vispe_micro and on both. This is what settings were chosen by.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from models import training_images as data
from models.micro.geometry import Random
from models.micro.tasks import HELD, task
from vispe.segment.classify.pixel_classifier import PixelClassifier
from vispe.segment.features.pixel_features import FeatureConfig, Features

KINDS = {"filters": "filters", "micro": "tokens", "both": "both"}
_SHARE = 0.006  # of the pixels that are drawn on
_SEEN = 30_000  # pixels that are scored


def validate(
    weights: Path, pictures: Sequence[np.ndarray], count: int = 30, side: int = 512
) -> dict[str, dict[str, float]]:
    """Return the mean IoU by strokes, classifier and features, over `count` tasks.

    Args:
        weights: safetensors file.
        pictures: real pictures (3, h, w) uint8 that training did not see.
        count: tasks.
        side: of a picture in pixels.
    """
    scores: dict[str, dict[str, list[float]]] = {}
    sets = {
        name: Features(
            FeatureConfig("filters")
            if kind == "filters"
            else FeatureConfig(kind, model="vispe_micro", weights=str(weights))
        )
        for name, kind in KINDS.items()
    }
    for number in range(count):
        random = np.random.default_rng([2**30, number])
        one = task(random, side, pictures)
        grey = float(np.ptp(one.image, axis=0).max()) < 1e-3
        page = np.ascontiguousarray(one.image[:1] if grey else one.image).transpose(1, 2, 0)
        everywhere = np.ones(one.labels.shape, bool)
        seen = np.zeros(one.labels.size, bool)
        seen[random.permutation(one.labels.size)[:_SEEN]] = True
        seen = seen.reshape(one.labels.shape)
        drawn = {place: strokes(random, one.labels, place == "corner") for place in ("spread", "corner")}
        for name, features in sets.items():
            prepared = features.prepare(page, everywhere)
            asked = prepared.gather(seen)
            for place, mask in drawn.items():
                if mask is None:
                    continue
                samples = prepared.gather(mask)
                for kind in ("logistic", "forest"):
                    classifier = PixelClassifier(kind, int(one.labels.max()) + 1)
                    classifier.fit(samples, one.labels[mask].astype(int) + 1)
                    found = classifier.probabilities(asked).argmax(1)
                    row = scores.setdefault(f"{place}, {kind}", {})
                    row.setdefault(name, []).append(_iou(found, one.labels[seen]))
    return {
        key: {name: round(float(np.mean(v)), 4) for name, v in row.items()} | {"tasks": len(row["both"])}
        for key, row in scores.items()
    }


def strokes(random: Random, labels: np.ndarray, corner: bool) -> np.ndarray | None:
    """Draw wandering strokes 3 pixels wide in every phase -> (side, side) bool; None where a phase has no room."""
    side = labels.shape[0]
    drawn = np.zeros(labels.shape, bool)
    phases = int(labels.max()) + 1
    for phase in range(phases):
        inside = labels == phase
        if corner:
            inside[side // 2 :] = False
            inside[:, side // 2 :] = False
        if inside.sum() < 30:
            return None
        wanted = _SHARE * inside.size / phases / (2 if corner else 1)
        for _ in range(60):
            y, x = divmod(int(random.choice(np.flatnonzero(inside))), side)
            angle = random.uniform(0, 2 * np.pi)
            for _ in range(60):
                angle += 0.3 * random.standard_normal()
                y, x = y + np.sin(angle), x + np.cos(angle)
                row, column = int(y), int(x)
                if not (1 <= y < side - 1 and 1 <= x < side - 1) or not inside[row, column]:
                    break
                pen = (slice(row - 1, row + 2), slice(column - 1, column + 2))
                drawn[pen] |= inside[pen]
            if (drawn & inside).sum() >= wanted:
                break
    return drawn


def _iou(found: np.ndarray, truth: np.ndarray) -> float:
    phases = np.union1d(np.unique(found), np.unique(truth))
    return float(
        np.mean([((found == k) & (truth == k)).sum() / ((found == k) | (truth == k)).sum() for k in phases])
    )


def main(words: Sequence[str] | None = None) -> None:
    """Validate and print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("weights", type=Path)
    parser.add_argument(
        "--folders", type=Path, nargs="*", default=[], help="folders of real pictures, as in training"
    )
    parser.add_argument("--count", type=int, default=30)
    given = parser.parse_args(words)
    pictures = [p.numpy() for source in (data.installed(), data.folders(given.folders)) for p in source]
    print(json.dumps(validate(given.weights, pictures[::HELD], given.count), indent=1))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
