"""Spectrum of features: RankMe, alpha-ReQ and stable rank.

Follows "RankMe" (arXiv 2210.02885), "alpha-ReQ: Assessing Representation Quality in Self-Supervised Learning by
measuring eigenspectrum decay", and "Rethinking Positional Encoding" (arXiv 2107.02561) for stable rank and distance
preservation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vispe.errors import OptionError, ShapeError, counted
from vispe.evaluate.measure.audited_model import AuditedModel
from vispe.evaluate.measure.base import Accumulator, Measure, Outcome

if TYPE_CHECKING:
    from vispe.backbones.attention_recorder import LayerAttention

WINDOW = (3, 99)  # first and last rank, from 0, of the power law; smaller for short spectra
OUTLIERS = 4  # channels of largest norm that are removed for the detail `without_outliers`


def rankme(x: Tensor, eps: float = 1e-7) -> float:
    """Return RankMe of features (n, d): exp of the entropy of the singular values, not centred (arXiv 2210.02885).

    Args:
        x: one row per token.
        eps: added to every normalised singular value, as in the paper.

    >>> round(rankme(torch.eye(4)), 3)
    4.0
    """
    return _rankme(torch.linalg.svdvals(_matrix(x)), eps)


def eigenspectrum(x: Tensor) -> Tensor:
    """Return the fractions of variance of centred features (n, d) along their principal axes, largest first."""
    x = _matrix(x)
    power = _powers(x - x.mean(0)).flip(0)
    return power / power.sum()


def alpha_req(shares: Tensor, first: int, last: int) -> float:
    """Return the exponent alpha of a power law, ln fraction = -alpha ln rank, least squares weighted by 1 / rank.

    Args:
        shares: return value of `eigenspectrum`.
        first: first fitted rank, from 0.
        last: last fitted rank, included.

    Raises:
        OptionError: the spectrum has too few ranks, or fewer than two are fitted.

    >>> round(alpha_req(torch.arange(1.0, 41.0).double() ** -1.5, 3, 29), 6)
    1.5
    """
    if not 0 <= first < last < len(shares):
        raise OptionError(
            f"alpha_req: ranks {first} to {last} need a spectrum of more than {counted(last, 'entry')}, got "
            f"{len(shares)}. Use a smaller last rank."
        )
    rank = torch.arange(first + 1, last + 2, dtype=torch.float64)
    line = torch.stack([-rank.log(), torch.ones_like(rank)], 1)
    weighted = line / rank[:, None]
    return float(
        torch.linalg.solve(line.T @ weighted, weighted.T @ shares[first : last + 1].double().log())[0]
    )


def stable_rank(x: Tensor) -> float:
    """Return the sum of squared singular values divided by the largest, for features (n, d), not centred.

    >>> stable_rank(torch.eye(3))
    3.0
    """
    power = _powers(_matrix(x))
    return float(power.sum() / power[-1])


def width(table: Tensor, threshold: float = 0.1) -> tuple[Tensor, float]:
    """Return inner products of rows (n, d) on a circle with the middle one, and half the fraction above a threshold.

    A wide similarity generalises, a narrow one memorises ("Rethinking Positional Encoding", arXiv 2107.02561).
    """
    table = _matrix(table)
    similarity = table @ table[len(table) // 2]
    return similarity, float((similarity > threshold).double().mean() / 2)


def preservation(table: Tensor, positions: Tensor) -> float:
    """Return Spearman's rho between cosines of centred rows (n, d) and negative distances of positions (n, axes)."""
    rows = _matrix(table) - _matrix(table).mean(0)
    rows = rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-300)
    distance = torch.cdist(positions.double(), positions.double())
    upper = torch.triu_indices(len(rows), len(rows), 1)
    from scipy.stats import spearmanr

    return float(spearmanr((rows @ rows.T)[*upper].numpy(), -distance[*upper].numpy()).statistic)


class Spectrum(Measure):
    """RankMe of the patches of an image relative to the maximum rank, as collapse = 1 - ratio.

    Follows "RankMe" (arXiv 2210.02885); the details add alpha-ReQ ("alpha-ReQ: Assessing Representation Quality in
    Self-Supervised Learning by measuring eigenspectrum decay") and stable rank (arXiv 2107.02561).
    """

    name = "spectrum"
    family = "features"
    order = 3
    limit = 0.1
    question = "Are features collapsed onto few directions?"
    number = "1 - RankMe / min(patches, channels)"
    misleads = (
        "Massive channels lower the rank without a collapse (the details contain it without the four largest); "
        "homogeneous images have few directions."
    )
    papers = (
        "RankMe, https://arxiv.org/abs/2210.02885",
        (
            "alpha-ReQ: Assessing Representation Quality in Self-Supervised Learning by measuring "
            "eigenspectrum decay"
        ),
        "Rethinking Positional Encoding, https://arxiv.org/abs/2107.02561",
    )
    needs = frozenset({"maps"})
    layered = True
    controls = ("random",)

    def on_layer(self, acc: Accumulator, captured: LayerAttention) -> None:
        """Add the collapse of the input of a layer."""
        acc.layer(layers=_collapse(captured.x[0, captured.grid.prefix :].cpu()))

    def on_features(self, acc: Accumulator, maps: Tensor) -> None:
        """Add ranks and power-law exponent of the final features."""
        x = maps.flatten(1).T
        without_massive = x.square().sum(0).argsort(descending=True)[OUTLIERS:]
        shares, rank = eigenspectrum(x), _rankme(_powers(x).sqrt())
        first, last = WINDOW if len(shares) > WINDOW[1] + 1 else (min(3, len(shares) // 4), len(shares) // 2)
        acc.note(
            collapse=_collapse(x, rank),
            without_outliers=_collapse(x[:, without_massive]),
            rankme=rank,
            stable=stable_rank(x),
            stable_centred=float(1 / shares[0]),  # the fractions sum to 1
            window=(first, last),
            alpha=alpha_req(shares, first, last)
            if last > first and float(shares[last]) > 0
            else float("nan"),
        )

    def summarize(self, acc: Accumulator, audited: AuditedModel) -> Outcome:
        """Return the mean collapse over images."""
        values = acc.column("collapse")
        names = ("rankme", "alpha", "stable", "stable_centred", "without_outliers")
        details = {name: float(np.nanmean(acc.column(name))) for name in names}
        layers = acc.column("layers").mean(0) if "layers" in acc.records[0] else ()
        details["window"] = acc.records[0]["window"]
        return Outcome(float(values.mean()), values, layers, details=details)


def _matrix(x: Tensor) -> Tensor:
    if x.ndim != 2 or not len(x):
        raise ShapeError(
            f"spectrum: features must be (n, d) with n > 0, got {tuple(x.shape)}. Flatten the tokens."
        )
    return x.double()


def _rankme(values: Tensor, eps: float = 1e-7) -> float:
    total = values.sum()
    if float(total) == 0:
        return 1.0  # all-zero features count as collapsed
    return float(torch.special.entr(values / total + eps).sum().exp())


def _powers(x: Tensor) -> Tensor:
    """Return squared singular values in ascending order, from the smaller Gram matrix."""
    x = x if x.shape[0] >= x.shape[1] else x.T
    x = x.double()
    gram = (x.T @ x).numpy()
    # numpy's solver takes a third of the time of torch's for a few hundred channels
    return torch.from_numpy(np.linalg.eigvalsh(gram)).clamp(min=0)


def _collapse(x: Tensor, rank: float | None = None) -> float:
    return 1 - min(1.0, (_rankme(_powers(x).sqrt()) if rank is None else rank) / min(x.shape))
