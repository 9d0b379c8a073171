"""Evaluate weights of vispe_micro with the classifiers of `vispe segment` on synthetic validation tasks.

    python -m models.micro.validate runs/micro/weights.safetensors [--folders images/] [--num-tasks 30]

Images of 512 pixels with strokes on 0.6 % of the pixels, distributed over the image or restricted to one corner, are
classified with filters, with vispe_micro and with both. Settings were selected by this score.
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
from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.features.pixel_features import Features

KINDS = {"filters": "filters", "micro": "tokens", "both": "both"}
_SCRIBBLED_FRACTION = 0.006
_EVALUATED_PIXELS = 30_000


def validate(
    weights: Path, images: Sequence[np.ndarray], count: int = 30, side: int = 512
) -> dict[str, dict[str, float]]:
    """Return the mean IoU over `count` tasks, by strokes, classifier and features.

    Args:
        weights: safetensors file.
        images: real images (3, h, w) uint8 that were not used in training.
        count: number of tasks.
        side: image size in pixels.
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
        one = task(random, side, images)
        grey = float(np.ptp(one.image, axis=0).max()) < 1e-3
        page = np.ascontiguousarray(one.image[:1] if grey else one.image).transpose(1, 2, 0)
        everywhere = np.ones(one.labels.shape, bool)
        evaluated = np.zeros(one.labels.size, bool)
        evaluated[random.permutation(one.labels.size)[:_EVALUATED_PIXELS]] = True
        evaluated = evaluated.reshape(one.labels.shape)
        masks = {layout: strokes(random, one.labels, layout == "corner") for layout in ("spread", "corner")}
        for name, features in sets.items():
            prepared = features.prepare(page, everywhere)
            queries = prepared.gather(evaluated)
            for layout, mask in masks.items():
                if mask is None:
                    continue
                samples = prepared.gather(mask)
                for kind in ("logistic", "forest"):
                    classifier = PixelClassifier(kind, int(one.labels.max()) + 1)
                    classifier.fit(samples, one.labels[mask].astype(int) + 1)
                    predicted = classifier.probabilities(queries).argmax(1)
                    row = scores.setdefault(f"{layout}, {kind}", {})
                    row.setdefault(name, []).append(_iou(predicted, one.labels[evaluated]))
    return {
        key: {name: round(float(np.mean(v)), 4) for name, v in row.items()} | {"tasks": len(row["both"])}
        for key, row in scores.items()
    }


def strokes(random: Random, labels: np.ndarray, corner: bool) -> np.ndarray | None:
    """Draw random strokes 3 pixels wide in every phase -> (side, side) bool; None if a phase is too small."""
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
        min_pixels = _SCRIBBLED_FRACTION * inside.size / phases / (2 if corner else 1)
        for _ in range(60):
            y, x = divmod(int(random.choice(np.flatnonzero(inside))), side)
            angle = random.uniform(0, 2 * np.pi)
            for _ in range(60):
                angle += 0.3 * random.standard_normal()
                y, x = y + np.sin(angle), x + np.cos(angle)
                row, column = int(y), int(x)
                if not (1 <= y < side - 1 and 1 <= x < side - 1) or not inside[row, column]:
                    break
                brush = (slice(row - 1, row + 2), slice(column - 1, column + 2))
                drawn[brush] |= inside[brush]
            if (drawn & inside).sum() >= min_pixels:
                break
    return drawn


def _iou(predicted: np.ndarray, truth: np.ndarray) -> float:
    phases = np.union1d(np.unique(predicted), np.unique(truth))
    pairs = [(predicted == k, truth == k) for k in phases]
    return float(np.mean([(p & t).sum() / (p | t).sum() for p, t in pairs]))


def main(words: Sequence[str] | None = None) -> None:
    """Parse the command line, validate and print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("weights", type=Path)
    parser.add_argument(
        "--folders", type=Path, nargs="*", default=[], help="folders of real images, as in training"
    )
    parser.add_argument("--num-tasks", type=int, default=30)
    args = parser.parse_args(words)
    images = [p.numpy() for source in (data.installed(), data.folders(args.folders)) for p in source]
    print(json.dumps(validate(args.weights, images[::HELD], args.num_tasks), indent=1))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
