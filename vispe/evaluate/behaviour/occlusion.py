"""Occlusion of strips: positional bias of the descriptor of an image.

Our image form of studies of text embedders: "Quantifying Positional Biases in Text Embedding Models", "Dwell in the
Beginning: How Language Models Embed Long Documents for Dense Retrieval" and "Benchmarking the Myopic Trap: Positional
Bias in Information Retrieval" (the position sensitivity index, PSI). Content is not uniform: photographs have objects
in the centre. Therefore one strip per image is selected, and the image is rolled so that the strip is
occluded at every position. The effect of content cancels: a descriptor without positional information gives
all positions the same weight.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from vispe.evaluate.behaviour.rolls import K, raise_if_refused, rolled, rolls, starts, step_or_refusal
from vispe.evaluate.measure.audited_model import AuditedModel
from vispe.evaluate.measure.base import Accumulator, Measure, Outcome
from vispe.evaluate.measure.perturbed_runs import PerturbedRuns
from vispe.hosts.slot_calibration import psi

FILLINGS = ("mean", "mirror", "noise")
DRAWS = 200  # random permutations for the chance level of PSI
TINY = 1e-9  # smaller importance is rounding error

Span = tuple[int, int]


def mirrored(n: int, span: Span) -> Tensor:
    """Return row indices (n,) int64 in which a span is replaced by its mirror image at the nearer end, cyclically.

    >>> mirrored(6, (2, 4)).tolist(), mirrored(4, (0, 2)).tolist()
    ([0, 1, 1, 4, 4, 5], [3, 2, 2, 3])
    """
    a, b = span
    rows, at = torch.arange(n), torch.arange(a, b)
    rows[a:b] = torch.where(at - a <= b - 1 - at, 2 * a - 1 - at, 2 * b - 1 - at) % n
    return rows


def occlude(image: Tensor, part: tuple[Span, Span], filling: str, noise: Tensor) -> Tensor:
    """Return an image (c, H, W) with a rectangle of pixels occluded by `filling`.

    Args:
        image: treated as periodic by 'mirror'.
        part: (first, last) of rows and columns, last excluded.
        filling: 'mean' of the image; 'mirror', reflection of the adjacent pixels; or 'noise' of the same mean and
            standard deviation.
        noise: (c, H, W), standard normal.
    """
    (top, bottom), (left, right) = part
    h, w = image.shape[-2:]
    if filling == "mirror" and (top, bottom) == (0, h):
        filler = image[:, :, mirrored(w, (left, right))]
    elif filling == "mirror":
        filler = image[:, mirrored(h, (top, bottom))]
    else:
        filler = image.mean((-2, -1), keepdim=True).expand_as(image)
        if filling == "noise":
            filler = filler + noise * image.std((-2, -1), keepdim=True)
    changed = image.clone()
    changed[:, top:bottom, left:right] = filler[:, top:bottom, left:right]
    return changed


def excess(shares: np.ndarray, moved: np.ndarray, picks: Sequence[int] | np.ndarray | None = None) -> float:
    """Return the larger PSI of rows and columns, minus its mean over random cyclic permutations of positions.

    PSI = 1 - min / max of the mean importance, which is positive by noise alone.

    Args:
        shares: importance at each position relative to the mean over positions, (images, 2, K).
        moved: the same with positions permuted cyclically in each image, (draws, images, 2, K).
        picks: indices of images; by default each once.
    """
    # weight of an image: how often it was drawn
    picks = np.arange(len(shares)) if picks is None else np.asarray(picks)
    weight = np.bincount(picks, minlength=len(shares)) / len(picks)
    importance = np.tensordot(weight, shares, 1)
    chance = np.einsum("n,pnak->pak", weight, moved)
    return float(_psi(importance).max() - _psi(chance).max(-1).mean())


class Occlusion(Measure):
    """Importance of an occluded strip at each position: ten forward passes in addition to those of `shift`.

    Follows "Quantifying Positional Biases in Text Embedding Models", "Dwell in the Beginning" and "Benchmarking the
    Myopic Trap" (position sensitivity index), which insert, remove and group passages of text.
    """

    name = "strips"
    family = "behaviour"
    order = 2
    limit = 0.05
    question = "Does the descriptor favour a part of the image?"
    number = "1 - min / max importance of a strip over positions (PSI), minus the chance level"
    misleads = (
        "Occluded images are out of distribution, so the importance depends on the filling; images get one of three "
        "fillings in rotation, and the details report each."
    )
    papers = (
        "Quantifying Positional Biases in Text Embedding Models",
        "Dwell in the Beginning: How Language Models Embed Long Documents for Dense Retrieval",
        "Benchmarking the Myopic Trap: Positional Bias in Information Retrieval",
    )

    def rerun(self, acc: Accumulator, runs: PerturbedRuns) -> None:
        """Occlude rows, columns and a central block, roll the original and occluded images, compare descriptors."""
        step = step_or_refusal(acc, runs, K)
        if step is None:
            return
        image, (h, w), number = runs.image, step.grid, runs.number
        filling = FILLINGS[number % len(FILLINGS)]
        noise = torch.randn(image.shape, generator=runs.generator(8))
        offsets = rolls(number, step)
        top, left = (starts(n)[number % K] for n in (h, w))
        # a roll by half of the sides moves the centre of the image to its corners
        middle, far = ((h // 4, h - h // 4), (w // 4, w - w // 4)), offsets[(number + K // 2) % K]
        removed = {
            "rows": (((top, top + h // K), (0, w)), offsets),
            "columns": (((0, h), (left, left + w // K)), offsets),
            "centre": (middle, [(0, 0), far]),
        }
        for word, (part, shifts) in removed.items():
            rows, cols = ((a * step.pixels, b * step.pixels) for a, b in part)
            changed = occlude(image, (rows, cols), filling, noise)
            for offset in shifts:
                name, original = rolled(image, step, offset)
                occluded = f"{name}, no {word}"
                pairs = (
                    (runs.pooled(name, original), runs.pooled(occluded, rolled(changed, step, offset)[1])),
                    (runs.maps(name).mean((1, 2)), runs.maps(occluded).mean((1, 2))),
                )
                lost = [1 - float(cosine_similarity(a.double(), b.double(), 0)) for a, b in pairs]
                acc.layer(**{word: lost[0], f"patches_{word}": lost[1]})
        acc.note(filling=FILLINGS.index(filling))

    def summarize(self, acc: Accumulator, audited: AuditedModel) -> Outcome:
        """Return the excess of PSI; the details have the importance by position, centre and corners, and filling."""
        raise_if_refused(acc)
        raw = np.stack([acc.column("rows"), acc.column("columns")], 1)
        shares, moved = _chance(raw)
        slopes = np.polyfit((np.arange(K) + 0.5) / K, shares.mean(0).T, 1)[0]
        centre, used = acc.column("centre"), acc.column("filling")
        patches = np.stack([acc.column("patches_rows"), acc.column("patches_columns")], 1)
        details = {
            "importance of rows": raw[:, 0].mean(0).tolist(),
            "importance of columns": raw[:, 1].mean(0).tolist(),
            "slope down and right, per side": slopes.tolist(),
            "centre minus corners, over their sum": _contrast(centre),
            "PSI of what is left": float(_psi(1 - raw.mean(0)).max()),
            "value for the mean of patches": excess(*_chance(patches)),
        }
        for k in np.unique(used).astype(int):
            mask = used == k
            details[f"filled with {FILLINGS[k]}"] = {
                "importance": float(raw[mask].mean()),
                "PSI": float(_psi(shares[mask].mean(0)).max()),
                "centre minus corners": _contrast(centre[mask]),
            }
        value = excess(shares, moved)
        return Outcome(
            value,
            control={"places by chance": 0.0},
            statistic=lambda picks: excess(shares, moved, picks),
            units=len(shares),
            note=""
            if len(shares) > 1
            else "One image cannot separate an effect from chance, so the value is 0.",
            details=details,
        )


def _psi(scores: np.ndarray) -> np.ndarray:
    return psi(torch.from_numpy(scores)).numpy()


def _contrast(pairs: np.ndarray) -> float:
    """Return (a - b) / (a + b) of the mean importances (images, 2)."""
    a, b = pairs.mean(0)
    return float((a - b) / (a + b)) if a + b > TINY else 0.0


def _chance(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return relative importances (images, 2, K), and random cyclic permutations of them per image and direction."""
    mean = raw.mean(-1, keepdims=True)
    shares = np.divide(raw, mean, out=np.ones_like(raw), where=mean > TINY)
    # under the null hypothesis the importance is invariant to cyclic shifts of the position
    by = np.random.default_rng(0).integers(0, K, (DRAWS, *shares.shape[:2], 1))
    return shares, np.take_along_axis(shares[None], (np.arange(K) + by) % K, -1)
