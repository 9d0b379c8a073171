"""Is what features say spread over many directions, or collapsed onto few? RankMe, alpha-ReQ and stable rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor

from vispe.errors import OptionError, ShapeError
from vispe.evaluate.audit.audited_model import Host, Need
from vispe.evaluate.audit.measure import Family, Kept, Measure, Outcome, View

if TYPE_CHECKING:
    from vispe.backbones.attention_recorder import Seen

WINDOW = (3, 99)  # ranks of the power law, from 0, where there are as many
OUTLIERS = 4


def rankme(x: Tensor, eps: float = 1e-7) -> float:
    """Return RankMe of features (n, d): exp of the entropy of the singular values, not centred (arXiv 2210.02885).

    Args:
        x: one row a token.
        eps: is added to every share, as the paper does.

    >>> round(rankme(torch.eye(4)), 3)
    4.0
    """
    return _rankme(torch.linalg.svdvals(_matrix(x)), eps)


def eigenspectrum(x: Tensor) -> Tensor:
    """Return the shares of variance of centred features (n, d) along their principal directions, largest first."""
    x = _matrix(x)
    power = _powers(x - x.mean(0)).flip(0)
    return power / power.sum()


def alpha_req(shares: Tensor, first: int, last: int) -> float:
    """Return the exponent of the power law of a spectrum: ln share = -alpha ln rank, weighted by 1 / rank.

    Args:
        shares: of `eigenspectrum`.
        first: first rank that is fitted, from 0.
        last: last one, included.

    Raises:
        OptionError: there are not as many ranks, or fewer than two are asked.

    >>> round(alpha_req(torch.arange(1.0, 41.0).double() ** -1.5, 3, 29), 6)
    1.5
    """
    if not 0 <= first < last < len(shares):
        raise OptionError(
            f"A power law over ranks {first} to {last} needs more than {last}, got {len(shares)}."
        )
    rank = torch.arange(first + 1, last + 2, dtype=torch.float64)
    line = torch.stack([-rank.log(), torch.ones_like(rank)], 1)
    weighed = line / rank[:, None]
    return float(torch.linalg.solve(line.T @ weighed, weighed.T @ shares[first : last + 1].double().log())[0])


def stable_rank(x: Tensor) -> float:
    """Return the sum of squared singular values over the largest, (n, d), not centred.

    >>> stable_rank(torch.eye(3))
    3.0
    """
    power = _powers(_matrix(x))
    return float(power.sum() / power[-1])


def width(table: Tensor, threshold: float = 0.1) -> tuple[Tensor, float]:
    """Return inner products of rows (n, d) on a circle with the middle one, and half the share above a threshold.

    A wide similarity generalises, a narrow one memorises (Rethinking positional encoding).
    """
    table = _matrix(table)
    similarity = table @ table[len(table) // 2]
    return similarity, float((similarity > threshold).double().mean() / 2)


def preservation(table: Tensor, places: Tensor) -> float:
    """Return Spearman's rho of the cosine of centred rows (n, d) with the nearness of their places (n, axes)."""
    rows = _matrix(table) - _matrix(table).mean(0)
    rows = rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-300)
    far = torch.cdist(places.double(), places.double())
    above = torch.triu_indices(len(rows), len(rows), 1)
    from scipy.stats import spearmanr

    return float(spearmanr((rows @ rows.T)[*above].numpy(), -far[*above].numpy()).statistic)


class Spectrum(Measure):
    """RankMe of the patches of an image against the largest possible; smaller is more collapsed."""

    name: ClassVar[str] = "spectrum"
    family: ClassVar[Family] = "features"
    asks: ClassVar[str] = "Are features collapsed onto few directions?"
    number: ClassVar[str] = "1 - RankMe / the largest rank that patches and channels allow"
    misleads: ClassVar[str] = (
        "Few channels of large size lower the rank without a collapse: the details have it without the four largest; "
        "plain pictures have few directions."
    )
    needs: ClassVar[frozenset[Need]] = frozenset({"maps"})
    layered: ClassVar[bool] = True
    controls: ClassVar[tuple[View, ...]] = ("random",)

    def see(self, kept: Kept, seen: Seen) -> None:
        """Keep the collapse of the patches that a layer gets."""
        kept.layer(layers=_collapse(seen.x[0, seen.grid.prefix :].cpu()))

    def end(self, kept: Kept, maps: Tensor) -> None:
        """Keep ranks and exponent of the final features."""
        x = maps.flatten(1).T
        loud = x.square().sum(0).argsort(descending=True)[OUTLIERS:]
        shares, rank = eigenspectrum(x), _rankme(_powers(x).sqrt())
        first, last = WINDOW if len(shares) > WINDOW[1] + 1 else (min(3, len(shares) // 4), len(shares) // 2)
        kept.note(
            collapse=_collapse(x, rank),
            without_outliers=_collapse(x[:, loud]),
            rankme=rank,
            stable=stable_rank(x),
            stable_centred=float(1 / shares[0]),  # they sum to 1
            window=(first, last),
            alpha=alpha_req(shares, first, last)
            if last > first and float(shares[last]) > 0
            else float("nan"),
        )

    def finish(self, kept: Kept, host: Host) -> Outcome:
        """Return the mean collapse over images."""
        values = kept.column("collapse")
        names = ("rankme", "alpha", "stable", "stable_centred", "without_outliers")
        details = {name: float(np.nanmean(kept.column(name))) for name in names}
        layers = kept.column("layers").mean(0) if "layers" in kept.records[0] else ()
        details["window"] = kept.records[0]["window"]
        return Outcome(float(values.mean()), values, layers, details=details)


def _matrix(x: Tensor) -> Tensor:
    if x.ndim != 2 or not len(x):
        raise ShapeError(f"A spectrum needs features (n, d) of tokens, got {tuple(x.shape)}.")
    return x.double()


def _rankme(values: Tensor, eps: float = 1e-7) -> float:
    total = values.sum()
    if float(total) == 0:
        return 1.0  # features that are all 0 have collapsed
    return float(torch.special.entr(values / total + eps).sum().exp())


def _powers(x: Tensor) -> Tensor:
    """Return squared singular values, smallest first, by the smaller Gram matrix, which is quicker."""
    x = x if x.shape[0] >= x.shape[1] else x.T
    x = x.double()
    gram = (x.T @ x).numpy()
    # the solver of numpy takes a third of the time of torch's on a few hundred channels
    return torch.from_numpy(np.linalg.eigvalsh(gram)).clamp(min=0)


def _collapse(x: Tensor, rank: float | None = None) -> float:
    return 1 - min(1.0, (_rankme(_powers(x).sqrt()) if rank is None else rank) / min(x.shape))
