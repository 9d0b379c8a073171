"""Choice of the number of clusters: grey-level peaks and the silhouette of the features.

In multi-scale features the pixels near a boundary are intermediate between the phases, and the silhouette nearly
always favours two clusters. Phases that differ in grey appear as peaks of the histogram, for any number of
phases. So three or more peaks determine K. With fewer peaks, grey levels alone do not distinguish the phases,
and the silhouette determines K. `eval/segment/cluster_count.py` compares this with the gap statistic and
stability; neither beats the silhouette.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vispe.errors import counted

CHOICES = range(2, 9)
"""Numbers of clusters considered by `'auto'`."""

_BINS = 256
_WIDTH = 0.05  # standard deviation of the kernel, as a fraction of the range of grey levels
_DEPTH = 0.1  # minimal prominence of a peak, as a fraction of its height
_LEAST = 0.02  # minimal prominence of a peak, as a fraction of the highest peak
_RARE = 0.5  # percent of the pixels ignored at either end of the range


@dataclass(frozen=True, eq=False)
class Choice:
    """A chosen number of clusters, with its evidence.

    Attributes:
        silhouette: mean silhouette by K.
        peaks: grey levels (m,) of the peaks, ascending.
        levels: (256,) grey levels.
        density: (256,) smoothed frequency of these levels; the largest is 1.
        n_classes: K.
    """

    silhouette: Mapping[int, float]
    peaks: np.ndarray
    levels: np.ndarray = field(repr=False)
    density: np.ndarray = field(repr=False)
    n_classes: int

    @property
    def by(self) -> str:
        """Criterion that decided: 'grey peaks' or 'silhouette'."""
        return "grey peaks" if _decides(len(self.peaks), self.silhouette) else "silhouette"

    def facts(self) -> dict[str, Any]:
        """Return the entries of the report."""
        return {
            "silhouette": {str(k): v for k, v in self.silhouette.items()},
            "grey_peaks": [float(p) for p in self.peaks],
            "chosen_by": self.by,
        }

    def note(self) -> str:
        """Return a sentence on the chosen K."""
        scores = ", ".join(f"{k}: {value:.3f}" for k, value in self.silhouette.items())
        best, peaks = _largest(self.silhouette), len(self.peaks)
        if self.by == "silhouette":
            why = f"it has the largest silhouette ({scores}); grey levels have {counted(peaks, 'peak')}"
        else:
            why = (
                f"grey levels have {counted(peaks, 'peak')}; the silhouette is largest for {best} ({scores})"
            )
        return f"K = {self.n_classes} chosen: {why}; use cluster=K for another number."


def choose(silhouette: Mapping[int, float], grey: np.ndarray) -> Choice:
    """Choose a number of clusters.

    Args:
        silhouette: mean silhouette by K, for each candidate K.
        grey: (n,) grey levels of the pixels.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> choose({2: 0.4, 3: 0.3, 4: 0.2}, rng.normal(np.repeat([0.2, 0.5, 0.9], 500), 0.03)).n_classes
        3
    """
    peaks, levels, density = grey_peaks(grey)
    count = len(peaks) if _decides(len(peaks), silhouette) else _largest(silhouette)
    return Choice(silhouette, peaks, levels, density, count)


def grey_peaks(grey: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the peaks of the distribution of grey levels (n,).

    Kernel density estimate with a Gaussian of 5 % of the range of levels; a peak counts if its prominence is at least
    10 % of its height.

    Returns:
        Levels of the peaks (m,), all levels (256,) and their smoothed frequency (256,).
    """
    from scipy.ndimage import gaussian_filter1d
    from scipy.signal import peak_prominences

    low, high = np.percentile(grey, (_RARE, 100 - _RARE))
    span = float(high - low)
    if span <= 0:
        return np.array([float(low)]), np.full(_BINS, float(low)), np.ones(_BINS)
    # margin for the kernel on either side
    bounds = (float(low) - 0.2 * span, float(high) + 0.2 * span)
    counts, edges = np.histogram(grey, _BINS, bounds)
    density = gaussian_filter1d(counts.astype(float), _WIDTH * span / (edges[1] - edges[0]), mode="constant")
    density /= density.max()
    levels = (edges[1:] + edges[:-1]) / 2
    # a plateau counts as one peak, at its left end
    inner = np.r_[0.0, density, 0.0]
    tops = np.flatnonzero((inner[1:-1] > inner[:-2]) & (inner[1:-1] >= inner[2:]))
    prominence = peak_prominences(inner, tops + 1)[0]
    peaks = tops[(prominence >= _DEPTH * density[tops]) & (prominence >= _LEAST)]
    return levels[peaks], levels, density


def _decides(peaks: int, silhouette: Mapping[int, float]) -> bool:
    return peaks > 2 and peaks in silhouette


def _largest(silhouette: Mapping[int, float]) -> int:
    return max(silhouette, key=lambda k: (silhouette[k], -k))
