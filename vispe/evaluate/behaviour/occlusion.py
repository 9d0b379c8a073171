"""Does the descriptor of an image favour a part of it? A strip is removed, and what is missing is measured.

Content is not uniform: objects stand in the middle of photographs. So one strip of each image is taken, the image is
rolled around until this strip stands at each place in turn, and there it is removed. Content cancels, and a descriptor
without places weighs all places alike, exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from vispe.evaluate.audit.audited_model import Host
from vispe.evaluate.audit.measure import Family, Kept, Measure, Outcome
from vispe.evaluate.behaviour.perturbed_runs import Reruns
from vispe.evaluate.behaviour.rolls import K, refuse, rolled, rolls, starts, step_or_note
from vispe.hosts.slot_calibration import psi

FILLINGS = ("mean", "mirror", "noise")
DRAWS = 200
TINY = 1e-9  # importance below which it is rounding

Span = tuple[int, int]


def mirrored(n: int, span: Span) -> Tensor:
    """Return, for each of n rows, itself, or in the span that beyond its nearer end, (n,) int64; rows go on around.

    >>> mirrored(6, (2, 4)).tolist(), mirrored(4, (0, 2)).tolist()
    ([0, 1, 1, 4, 4, 5], [3, 2, 2, 3])
    """
    a, b = span
    rows, at = torch.arange(n), torch.arange(a, b)
    rows[a:b] = torch.where(at - a <= b - 1 - at, 2 * a - 1 - at, 2 * b - 1 - at) % n
    return rows


def without(picture: Tensor, part: tuple[Span, Span], filling: str, noise: Tensor) -> Tensor:
    """Return a picture (c, H, W) without rows and columns of pixels: their place is taken by `filling`.

    Args:
        picture: goes on around.
        part: rows and columns, from and to.
        filling: 'mean' of the picture; 'mirror', what lies beside the part; or 'noise' of its mean and spread.
        noise: (c, H, W), normal.
    """
    (top, bottom), (left, right) = part
    h, w = picture.shape[-2:]
    if filling == "mirror" and (top, bottom) == (0, h):
        other = picture[:, :, mirrored(w, (left, right))]
    elif filling == "mirror":
        other = picture[:, mirrored(h, (top, bottom))]
    else:
        other = picture.mean((-2, -1), keepdim=True).expand_as(picture)
        if filling == "noise":
            other = other + noise * picture.std((-2, -1), keepdim=True)
    changed = picture.clone()
    changed[:, top:bottom, left:right] = other[:, top:bottom, left:right]
    return changed


def excess(shares: np.ndarray, moved: np.ndarray, picks: Sequence[int] | np.ndarray | None = None) -> float:
    """Return the larger PSI of rows and columns, minus what it is where places change their names by chance.

    PSI = 1 - min/max of the mean shares, which noise alone makes positive.

    Args:
        shares: importance at each place over that at all, (images, 2, K).
        moved: the same with places moved on in each image, (draws, images, 2, K).
        picks: numbers of images; by default each once.
    """
    # each image counts as often as it was drawn
    picks = np.arange(len(shares)) if picks is None else np.asarray(picks)
    weight = np.bincount(picks, minlength=len(shares)) / len(picks)
    found = np.tensordot(weight, shares, 1)
    chance = np.einsum("n,pnak->pak", weight, moved)
    return float(_psi(found).max() - _psi(chance).max(-1).mean())


class Strips(Measure):
    """Importance of a strip at each place: ten passes beside those of `shift`, three more without it."""

    name: ClassVar[str] = "strips"
    family: ClassVar[Family] = "behaviour"
    asks: ClassVar[str] = "Does the descriptor favour a part of the image?"
    number: ClassVar[str] = "1 - least / most importance of a strip by its place (PSI), minus that by chance"
    misleads: ClassVar[str] = (
        "Removed parts are unlike any picture, so the importance depends on what takes their place; images get one of "
        "three fillings in turn, and the details have each."
    )

    def ask(self, kept: Kept, reruns: Reruns) -> None:
        """Remove a row, a column and a block, roll the image with and without them, and compare descriptors."""
        step = step_or_note(kept, reruns, K)
        if step is None:
            return
        image, (h, w), number = reruns.image, step.grid, reruns.number
        filling = FILLINGS[number % len(FILLINGS)]
        noise = torch.randn(image.shape, generator=reruns.generator(8))
        offsets = rolls(number, step)
        top, left = (starts(n)[number % K] for n in (h, w))
        # rolled by half, the middle of the image stands in its corners
        middle, far = ((h // 4, h - h // 4), (w // 4, w - w // 4)), offsets[(number + K // 2) % K]
        removed = {
            "rows": (((top, top + h // K), (0, w)), offsets),
            "columns": (((0, h), (left, left + w // K)), offsets),
            "centre": (middle, [(0, 0), far]),
        }
        for word, (part, places) in removed.items():
            rows, cols = ((a * step.pixels, b * step.pixels) for a, b in part)
            changed = without(image, (rows, cols), filling, noise)
            for offset in places:
                name, whole = rolled(image, step, offset)
                rest = f"{name}, no {word}"
                pairs = (
                    (reruns.pooled(name, whole), reruns.pooled(rest, rolled(changed, step, offset)[1])),
                    (reruns.maps(name).mean((1, 2)), reruns.maps(rest).mean((1, 2))),
                )
                lost = [1 - float(cosine_similarity(a.double(), b.double(), 0)) for a, b in pairs]
                kept.layer(**{word: lost[0], f"patches_{word}": lost[1]})
        kept.note(filling=FILLINGS.index(filling))

    def finish(self, kept: Kept, host: Host) -> Outcome:
        """Return the excess of PSI, with the importance by place, middle and corners, and filling."""
        refuse(kept)
        raw = np.stack([kept.column("rows"), kept.column("columns")], 1)
        shares, moved = _chance(raw)
        slopes = np.polyfit((np.arange(K) + 0.5) / K, shares.mean(0).T, 1)[0]
        middle, used = kept.column("centre"), kept.column("filling")
        patches = np.stack([kept.column("patches_rows"), kept.column("patches_columns")], 1)
        details = {
            "importance of rows": raw[:, 0].mean(0).tolist(),
            "importance of columns": raw[:, 1].mean(0).tolist(),
            "slope down and right, per side": slopes.tolist(),
            "centre minus corners, over their sum": _contrast(middle),
            "PSI of what is left": float(_psi(1 - raw.mean(0)).max()),
            "value for the mean of patches": excess(*_chance(patches)),
        }
        for k in np.unique(used).astype(int):
            some = used == k
            details[f"filled with {FILLINGS[k]}"] = {
                "importance": float(raw[some].mean()),
                "PSI": float(_psi(shares[some].mean(0)).max()),
                "centre minus corners": _contrast(middle[some]),
            }
        value = excess(shares, moved)
        return Outcome(
            value,
            control={"places by chance": 0.0},
            statistic=lambda picks: excess(shares, moved, picks),
            units=len(shares),
            note="" if len(shares) > 1 else "One image alone cannot tell an effect from chance: 0.",
            details=details,
        )


def _psi(scores: np.ndarray) -> np.ndarray:
    return psi(torch.from_numpy(scores)).numpy()


def _contrast(pairs: np.ndarray) -> float:
    """Difference of two importances over their sum, of means of (images, 2)."""
    a, b = pairs.mean(0)
    return float((a - b) / (a + b)) if a + b > TINY else 0.0


def _chance(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shares of an importance (images, 2, K), and shares moved on by chance in each image and direction."""
    whole = raw.mean(-1, keepdims=True)
    shares = np.divide(raw, whole, out=np.ones_like(raw), where=whole > TINY)
    # without an effect of places a strip is as important at the next one
    by = np.random.default_rng(0).integers(0, K, (DRAWS, *shares.shape[:2], 1))
    return shares, np.take_along_axis(shares[None], (np.arange(K) + by) % K, -1)
