"""Similarity measures of two feature maps, of the original and of a transformed image.

The measures take two maps (d, h, w) of the same shape, where the transform of the second has been undone, and
optionally a mask (h, w) bool of valid positions. They are computed in float64.
"""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from vispe.errors import OptionError, ShapeError, counted

CHUNK = 1 << 22
"""Max number of distances in memory in `rank`."""


def error(first: Tensor, second: Tensor, valid: Tensor | None = None) -> float:
    """Return the centred equivariance error sqrt(Σ|G - F|² / Σ|Z|²), Z = F minus its mean over positions.

    >>> maps = torch.arange(12.0).reshape(1, 3, 4)
    >>> error(maps, maps), error(maps, 11 - maps)
    (0.0, 2.0)

    With Y = G minus its mean, r = |Y|/|Z|, c the correlation of Y and Z, and m the distance of the means relative to
    the root mean square of Z, it is sqrt(1 + r² - 2rc + m²). So 0 means exact equivariance, 1.41 (√2) two
    unrelated maps of equal mean and variance, and 2 opposite maps; there is no upper bound. NaN if F is
    constant over positions.
    """
    f, g = _tokens(first, second, valid)
    signal = (f - f.mean(1, keepdim=True)).square().sum()
    return _root_ratio((g - f).square().sum(), signal, f)


def error_uncentred(first: Tensor, second: Tensor, valid: Tensor | None = None) -> float:
    """Return sqrt(Σ|G - F|² / Σ|F|²), for comparison with papers; dominated by the mean of F if that is large."""
    f, g = _tokens(first, second, valid)
    return _root_ratio((g - f).square().sum(), f.square().sum(), f)


def cosine(first: Tensor, second: Tensor, valid: Tensor | None = None) -> float:
    """Return 1 minus the mean cosine similarity of tokens at equal positions; 0 at best."""
    return _cosine(*_tokens(first, second, valid))


def cosine_centred(first: Tensor, second: Tensor, valid: Tensor | None = None) -> float:
    """Return `cosine` of the maps minus their means over positions."""
    return _cosine(*_centred(first, second, valid))


def cka(first: Tensor, second: Tensor, valid: Tensor | None = None) -> float:
    """Return the linear CKA of the maps as tokens x channels, 1 at best.

    It is invariant to rotations of feature space, and therefore more lenient than `error`.
    """
    z, y = _centred(first, second, valid)
    if z.shape[0] <= z.shape[1]:  # fewer channels than tokens: use (d, d) products
        cross = (z @ y.T).square().sum()
        norms = (z @ z.T).square().sum() * (y @ y.T).square().sum()
    else:
        a, b = z.T @ z, y.T @ y
        cross, norms = (a * b).sum(), a.square().sum() * b.square().sum()
    return float(cross / norms.sqrt()) if float(norms) > 0 else float("nan")


def subspace(first: Tensor, second: Tensor, valid: Tensor | None = None, *, components: int = 8) -> float:
    """Return the mean squared cosine of the principal angles between the leading components, 1 at best.

    The first `components` principal components of each map (fewer if its rank is lower) span a space of patterns over
    positions; two random spaces over n positions give about components / n.
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
    """Return the fraction of tokens of F whose nearest neighbour among the tokens of G has the same position.

    The chance level is 1 / n; ties, up to rounding, share the hit. Not meaningful on periodic images.
    """
    f, g = (t.T.contiguous() for t in _tokens(first, second, valid))
    mean = f.mean(0)
    f, g = f - mean, g - mean  # centring does not change distances, but reduces rounding errors
    length = g.square().sum(1)
    rounding = 64 * torch.finfo(f.dtype).eps * float(length.max() + f.square().sum(1).max())
    rows, hits = max(1, CHUNK // len(g)), 0.0
    for start in range(0, len(f), rows):
        part = f[start : start + rows]
        distance = length - 2 * part @ g.T  # squared distance up to a constant per row
        tied = distance <= distance.min(1, keepdim=True).values + rounding
        hit = tied[torch.arange(len(part)), torch.arange(start, start + len(part))]
        hits += float((hit / tied.sum(1)).sum())
    return hits / len(f)


MEASURES: Mapping[str, Callable[..., float]] = {
    f.__name__: f for f in (error, error_uncentred, cosine, cosine_centred, cka, subspace, rank)
}
"""Measures of two maps, the headline first."""


class InvariantShare:
    """Fraction of the variance of a map that is invariant to poses: |mean_g F_g - μ|² / mean_g |F_g - μ|².

    μ is the mean of F over positions. The value is 1 for equivariant features, and 1 / number of poses for
    unrelated maps. Only running sums are stored.

    Args:
        first: map (d, h, w) at the reference pose, which counts as one of the poses.
    """

    def __init__(self, first: Tensor) -> None:
        self._mu = first.double().mean((-2, -1), keepdim=True)
        self._sum, self._power, self._count = torch.zeros_like(first, dtype=torch.float64), 0.0, 0
        self.add(first)

    def add(self, other: Tensor) -> None:
        """Add the map of another pose, with the pose undone."""
        deviation = other.double() - self._mu
        self._sum += deviation
        self._power += float(deviation.square().sum())
        self._count += 1

    def value(self) -> float:
        """Return the fraction; NaN if the maps are constant."""
        if self._power == 0:
            return float("nan")
        return float((self._sum / self._count).square().sum()) / (self._power / self._count)


def measures_named(names: Iterable[str]) -> dict[str, Callable[..., float]]:
    """Return measures by name, without 'invariant_share', which is not a function of two maps.

    Raises:
        OptionError: an unknown measure.
    """
    known = (*MEASURES, "invariant_share")
    unknown = next((n for n in names if n not in known), None)
    if unknown is not None:
        raise OptionError(
            f"measures: unknown measure of feature maps, got {unknown!r}. Use one of {', '.join(known)}."
        )
    return {n: MEASURES[n] for n in names if n in MEASURES}


def _tokens(first: Tensor, second: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return both maps as (d, n) float64, at valid positions."""
    if first.shape != second.shape or first.ndim != 3:
        raise ShapeError(
            f"compare: feature maps must have one shape (d, h, w), got {tuple(first.shape)} and {tuple(second.shape)}. "
            "Use images whose grid is the same for every pose."
        )
    f, g = first.double().flatten(1), second.double().flatten(1)
    if valid is None:
        return f, g
    if valid.shape != first.shape[1:] or not valid.any():
        raise ShapeError(
            f"compare: valid must be a non-empty mask {tuple(first.shape[1:])}, got {tuple(valid.shape)} with "
            f"{counted(int(valid.sum()), 'position')}. Use a larger image or a smaller margin."
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
    nonzero = product > 0
    return float((1 - (f * g).sum(0)[nonzero] / product[nonzero]).mean())


def _root_ratio(difference: Tensor, signal: Tensor, f: Tensor) -> float:
    """Return sqrt(difference / signal); NaN if the signal is rounding error."""
    noise = f.square().sum() * (8 * torch.finfo(torch.float64).eps) ** 2
    if float(signal) <= float(noise):
        return float("nan")
    return float((difference / signal).sqrt())
