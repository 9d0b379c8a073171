"""Summary of a score over images."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vispe.errors import InputError


def summarize(
    results: Sequence[Mapping[str, Any]], key: str, seed: int = 0, *, higher_is_better: bool = True
) -> dict[str, Any]:
    """Summarise one score over images.

    Args:
        results: one dict of `scores` for each image.
        key: the score; dots reach into nested dicts: 'miou', 'iou.matrix'.  Images where it is None are
            excluded.
        seed: seed of the bootstrap.
        higher_is_better: whether the worst image is the lowest (True) or the furthest from 0 (False, for
            errors).

    Returns:
        'n' images, 'mean', 'median', 'std' (sample standard deviation), 'worst', and 'ci95': the [low, high]
        95 % percentile bootstrap interval of the mean over images (10 000 resamples).  'std' and 'ci95' are None
        for one image, where the spread is undefined, and all but 'n' are None if no image has the score.

    Raises:
        InputError: an image has no such key.
    """
    values = np.array([v for v in (_lookup(r, key) for r in results) if v is not None], np.float64)
    n = len(values)
    if n == 0:
        return {"n": 0, "mean": None, "median": None, "std": None, "worst": None, "ci95": None}
    interval = None
    if n > 1:
        # bootstrap over images: resampled means (10 000,)
        draws = np.random.default_rng(seed).integers(0, n, (10_000, n))
        interval = np.percentile(values[draws].mean(1), [2.5, 97.5]).tolist()
    worst = values.min() if higher_is_better else values[np.abs(values).argmax()]
    return {
        "n": n,
        "mean": float(values.mean()),
        "median": float(np.median(values)),
        "std": float(values.std(ddof=1)) if n > 1 else None,
        "worst": float(worst),
        "ci95": interval,
    }


def _lookup(result: Mapping[str, Any], key: str) -> float | None:
    node: Any = result
    rest = key
    while isinstance(node, Mapping):
        if rest in node:  # names may contain dots
            return node[rest]
        first, _, rest = rest.partition(".")
        node = node.get(first)
    raise InputError(f"unknown score {key!r}. Available scores: {', '.join(map(str, result))}.")
