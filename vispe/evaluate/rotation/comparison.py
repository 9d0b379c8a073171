"""How far what a model gives for a moved image, brought back, agrees with what it gives at rest: the numbers of rows.

The measures take two maps (d, h, w) of the same shape, the second one already brought back to the pose of the first,
and optionally the positions that count, (h, w) bool. They compute in float64.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vispe.backbones.batching import batches
from vispe.errors import OptionError, ShapeError
from vispe.symmetry.d4 import D4, IDENTITY, Element

CHUNK = 1 << 22
"""Distances held at once by the rank test."""

Pair = tuple[Hashable, Iterable[Any], Iterable[Any]]
"""Name of a move, what each image of a batch gives at rest, and what it gives moved, brought back."""


def compared(
    images: Iterable[Tensor],
    pairs: Callable[[Tensor], Iterable[Pair]],
    scores: Mapping[str, Callable[[Any, Any], float]],
    batch_size: int = 1,
) -> dict[tuple[Any, str], np.ndarray]:
    """Compare what a model gives for moved images with what it gives at rest; one batch is held.

    Args:
        images: (c, H, W) each.
        pairs: is called with a batch (b, c, H, W) and yields what is compared, for every batch the same moves.
        scores: numbers of two maps, by name.
        batch_size: images of equal size that the model sees at once.

    Returns:
        (n,) numbers, one for each image, by move and score.

    >>> shifted = lambda batch: [("roll", batch, batch.roll(1, -1))]
    >>> compared(torch.eye(2)[None, None], shifted, {"error": error})
    {('roll', 'error'): array([2.])}
    """
    values: dict[tuple[Any, str], list[float]] = {}
    for batch in batches(images, batch_size):
        for move, still, back in pairs(batch):
            for one, other in zip(still, back, strict=True):
                for name, score in scores.items():
                    values.setdefault((move, name), []).append(score(one, other))
    return {key: np.array(numbers) for key, numbers in values.items()}


def poses_of(elements: Sequence[Element], what: str) -> list[Element]:
    """Return the poses besides the identity, each once, or say that there is none.

    >>> [g.name for g in poses_of(D4[:3], "Equivariance")]
    ['rot90', 'rot180']
    """
    poses = [g for g in dict.fromkeys(elements) if g != IDENTITY]
    if not poses:
        raise OptionError(f"{what} needs a pose besides the identity; give elements=D4.")
    return poses


def label_of(elements: Sequence[Element]) -> str:
    """Return the name of the mean over poses: 'D4' for all of them."""
    kept = set(elements) - {IDENTITY}
    return "D4" if kept == set(D4) - {IDENTITY} else f"mean of {len(kept)} poses"


def shuffled(maps: Tensor, rng: np.random.Generator) -> Tensor:
    """Return a map (d, h, w) with its tokens in random order, what a model without any order would give."""
    order = torch.from_numpy(rng.permutation(maps[0].numel())).to(maps.device)
    return maps.flatten(1)[:, order].reshape(maps.shape)


def error(first: Tensor, second: Tensor, valid: Tensor | None = None) -> float:
    """Return the centred equivariance error sqrt(Σ|G - F|² / Σ|Z|²), Z = F minus its mean over positions.

    >>> maps = torch.arange(12.0).reshape(1, 3, 4)
    >>> error(maps, maps), error(maps, 11 - maps)
    (0.0, 2.0)

    With Y likewise of G, r = |Y|/|Z|, c the correlation of Y and Z, and m the distance of the means against the root
    mean square of Z, it is sqrt(1 + r² - 2rc + m²). So 0 is exact, 1.41 (√2) two unrelated maps of one spread and mean,
    2 opposite ones, and there is no upper limit. NaN when F does not vary over positions.
    """
    f, g = _tokens(first, second, valid)
    signal = (f - f.mean(1, keepdim=True)).square().sum()
    return _root_ratio((g - f).square().sum(), signal, f)


def error_uncentred(first: Tensor, second: Tensor, valid: Tensor | None = None) -> float:
    """Return sqrt(Σ|G - F|² / Σ|F|²); a large mean in F hides everything, so this is for comparison with papers."""
    f, g = _tokens(first, second, valid)
    return _root_ratio((g - f).square().sum(), f.square().sum(), f)


def cosine(first: Tensor, second: Tensor, valid: Tensor | None = None) -> float:
    """Return 1 minus the mean cosine between the tokens at each position; 0 at best."""
    return _cosine(*_tokens(first, second, valid))


def cosine_centred(first: Tensor, second: Tensor, valid: Tensor | None = None) -> float:
    """Return `cosine` after each map's mean over positions was taken out."""
    return _cosine(*_centred(first, second, valid))


def cka(first: Tensor, second: Tensor, valid: Tensor | None = None) -> float:
    """Return linear CKA of the maps as tokens x channels, 1 at best.

    It does not see rotations of feature space, so it is a lenient companion of `error`.
    """
    z, y = _centred(first, second, valid)
    if z.shape[0] <= z.shape[1]:  # channels are fewer: (d, d) products
        cross = (z @ y.T).square().sum()
        own = (z @ z.T).square().sum() * (y @ y.T).square().sum()
    else:
        a, b = z.T @ z, y.T @ y
        cross, own = (a * b).sum(), a.square().sum() * b.square().sum()
    return float(cross / own.sqrt()) if float(own) > 0 else float("nan")


def subspace(first: Tensor, second: Tensor, valid: Tensor | None = None, *, components: int = 8) -> float:
    """Return the mean squared cosine of the principal angles between the leading components, 1 at best.

    Each map's first `components` principal components (fewer if its rank is lower) span a space of patterns over the
    positions; two random spaces among n positions give about components/n.
    """
    z, y = _centred(first, second, valid)
    bases = []
    for part in (z, y):
        small = part.shape[0] <= part.shape[1]
        power, vectors = torch.linalg.eigh(part @ part.T if small else part.T @ part)
        count = min(components, int((power > power[-1] * 1e-12).sum())) if float(power[-1]) > 0 else 0
        leading = vectors[:, len(power) - count :]
        bases.append(torch.linalg.qr(part.T @ leading)[0] if small else leading)
    if min(b.shape[1] for b in bases) == 0:
        return float("nan")
    angles = torch.linalg.svdvals(bases[0].T @ bases[1])
    return float(angles.square().mean())


def rank(first: Tensor, second: Tensor, valid: Tensor | None = None) -> float:
    """Return the share of tokens of F whose nearest neighbour among the tokens of G is the one at their position.

    Chance is 1/n; ties, up to rounding, share the point. Meaningless on images that repeat themselves.
    """
    f, g = (t.T.contiguous() for t in _tokens(first, second, valid))
    mean = f.mean(0)
    f, g = f - mean, g - mean  # distances stay, rounding is less
    length = g.square().sum(1)
    rounding = 64 * torch.finfo(f.dtype).eps * float(length.max() + f.square().sum(1).max())
    rows, hits = max(1, CHUNK // len(g)), 0.0
    for start in range(0, len(f), rows):
        part = f[start : start + rows]
        far = length - 2 * part @ g.T  # squared, without what is common to a row
        tied = far <= far.min(1, keepdim=True).values + rounding
        own = tied[torch.arange(len(part)), torch.arange(start, start + len(part))]
        hits += float((own / tied.sum(1)).sum())
    return hits / len(f)


MEASURES: Mapping[str, Callable[..., float]] = {
    f.__name__: f for f in (error, error_uncentred, cosine, cosine_centred, cka, subspace, rank)
}
"""The measures of a pair of maps, the headline first."""


class InvariantShare:
    """The share of a map's signal that survives averaging over poses: |mean_g F_g - μ|² / mean_g |F_g - μ|².

    μ is the mean of F over positions. 1 is equivariant; poses that have nothing in common leave 1/number of poses.
    Only sums are kept.

    Args:
        first: map (d, h, w) at the pose of reference; it counts as one of the poses.
    """

    def __init__(self, first: Tensor) -> None:
        self._mu = first.double().mean((-2, -1), keepdim=True)
        self._sum, self._power, self._count = torch.zeros_like(first, dtype=torch.float64), 0.0, 0
        self.add(first)

    def add(self, other: Tensor) -> None:
        """Take in the map of another pose, brought back."""
        away = other.double() - self._mu
        self._sum += away
        self._power += float(away.square().sum())
        self._count += 1

    def value(self) -> float:
        """Return the share; NaN when the maps do not vary."""
        if self._power == 0:
            return float("nan")
        return float((self._sum / self._count).square().sum()) / (self._power / self._count)


def measures_named(names: Iterable[str]) -> dict[str, Callable[..., float]]:
    """Return the measures of these names without 'invariant_share', which is not one of a pair of maps.

    Raises:
        OptionError: a measure that does not exist.
    """
    known = (*MEASURES, "invariant_share")
    unknown = next((n for n in names if n not in known), None)
    if unknown is not None:
        raise OptionError(
            f"There is no measure {unknown!r} of two feature maps; they are {', '.join(known)}."
        )
    return {n: MEASURES[n] for n in names if n in MEASURES}


def _tokens(first: Tensor, second: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both maps as (d, n) float64, of the positions that count."""
    if first.shape != second.shape or first.ndim != 3:
        raise ShapeError(
            f"Two feature maps (d, h, w) of one shape are compared, got {tuple(first.shape)} and "
            f"{tuple(second.shape)}; does every pose give the same grid?"
        )
    f, g = first.double().flatten(1), second.double().flatten(1)
    if valid is None:
        return f, g
    if valid.shape != first.shape[1:] or not valid.any():
        raise ShapeError(
            f"The positions that count must be a mask {tuple(first.shape[1:])} that is true somewhere, got "
            f"{tuple(valid.shape)} with {int(valid.sum())} positions."
        )
    chosen = valid.flatten().to(f.device)
    return f[:, chosen], g[:, chosen]


def _centred(first: Tensor, second: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    f, g = _tokens(first, second, valid)
    return f - f.mean(1, keepdim=True), g - g.mean(1, keepdim=True)


def _cosine(f: Tensor, g: Tensor) -> float:
    product = f.norm(dim=0) * g.norm(dim=0)
    if not bool((product > 0).any()):
        return float("nan")
    kept = product > 0
    return float((1 - (f * g).sum(0)[kept] / product[kept]).mean())


def _root_ratio(difference: Tensor, signal: Tensor, f: Tensor) -> float:
    """sqrt(difference / signal); NaN where the signal is nothing but rounding."""
    noise = f.square().sum() * (8 * torch.finfo(torch.float64).eps) ** 2
    if float(signal) <= float(noise):
        return float("nan")
    return float((difference / signal).sqrt())
