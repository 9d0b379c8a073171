"""Similarity of features of neighbouring patches on images with shuffled patches.

Follows "Position Information Emerges in Causal Transformers Without Positional Encodings via Similarity of Nearby
Embeddings", and "Latent Positional Information is in the Self-Attention Variance of Transformer Language Models Without
Positional Embeddings" for the origin of such patterns; the 2D profile is ours. A causal mask or an encoding
makes features of neighbours similar even in untrained models. Smooth image content has the same effect.
Therefore the headline is measured on images with patches in random order, in which neighbouring content is
unrelated.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from vispe.errors import ShapeError, UnsupportedHost, counted
from vispe.evaluate.attention.offset_tables import by_distance, by_offset, pairs
from vispe.evaluate.behaviour.rolls import raise_if_refused, shuffled, step_or_refusal
from vispe.evaluate.measure.audited_model import AuditedModel
from vispe.evaluate.measure.base import Accumulator, Measure, Outcome
from vispe.evaluate.measure.perturbed_runs import PerturbedRuns
from vispe.grid import Grid


def profile(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the mean cosine similarity of centred features at each distance 0, 1, ..., (distances,).

    Args:
        x: features of tokens (n, d).
        shape: (n,) for a sequence, or (h, w) for a grid with rounded Euclidean distances.

    Raises:
        ShapeError: the number of tokens does not match the shape.
    """
    if x.ndim != 2 or len(x) != np.prod(shape):
        raise ShapeError(
            f"profile: x must have {counted(np.prod(shape), 'token')} for shape={shape}, got {tuple(x.shape)}. "
            "Remove prefix tokens."
        )
    x = x - x.mean(0)
    x = x / x.norm(dim=1, keepdim=True).clamp(min=1e-12)
    grid = Grid((1, *shape) if len(shape) == 1 else tuple(shape))
    table = by_offset((x @ x.T)[None], grid)
    return (by_distance(table, grid) / by_distance(pairs(grid)[None], grid))[0]


def index(curve: Tensor) -> float:
    """Return the cosine of direct neighbours minus the mean beyond half of the largest distance, NaN for none."""
    # direct neighbours are never distant ones
    return float(curve[1] - curve[max(2, (len(curve) + 1) // 2) :].nanmean())


class NeighbourSimilarity(Measure):
    """Cosine of neighbours minus that of distant patches on images with shuffled patches: one more forward pass.

    Follows "Position Information Emerges in Causal Transformers Without Positional Encodings via Similarity of Nearby
    Embeddings"; the shuffled images are ours.
    """

    name = "neighbours"
    family = "features"
    order = 2
    limit = 0.05
    question = "Are features of neighbouring patches similar regardless of content?"
    number = "cosine of neighbours minus that of distant patches, patches in random order"
    misleads = "Shuffled images are out of distribution, so the model may behave differently on them."
    papers = (
        (
            "Position Information Emerges in Causal Transformers Without Positional Encodings via "
            "Similarity of Nearby Embeddings"
        ),
        (
            "Latent Positional Information is in the Self-Attention Variance of Transformer Language "
            "Models Without Positional Embeddings"
        ),
    )
    needs = frozenset({"maps"})
    controls = ("none",)
    reported_controls = ("random",)

    def rerun(self, acc: Accumulator, runs: PerturbedRuns) -> None:
        """Compute the profile of the original image and of the image with shuffled patches."""
        step = step_or_refusal(acc, runs, 3)
        if step is None:
            return
        mixed = shuffled(runs.image, step.pixels, runs.generator(1))
        for word, maps in (("plain", runs.maps()), ("mixed", runs.maps("shuffle 1", mixed))):
            curve = profile(maps.flatten(1).T, tuple(maps.shape[-2:]))
            acc.note(**{word: index(curve), f"{word}_profile": curve[:12]})

    def summarize(self, acc: Accumulator, audited: AuditedModel) -> Outcome:
        """Return the mean index of shuffled images."""
        raise_if_refused(acc)
        values = acc.column("mixed")
        if np.isnan(values).all():
            raise UnsupportedHost(
                "The feature grid is too small to separate neighbours from distant patches."
            )
        details = {
            "of the pictures themselves": float(acc.column("plain").mean()),
            "profile": acc.column("mixed_profile").mean(0).tolist(),
            "profile of the pictures themselves": acc.column("plain_profile").mean(0).tolist(),
        }
        return Outcome(float(values.mean()), values, control={"flat": 0.0}, details=details)
