"""Suggestion of the most informative locations for further scribbles.

The score of a location is its uncertainty plus a constant, times the distance of its features from those of labelled or
already selected pixels: borders of known classes are uncertain, but have similar features everywhere, and an
unlabelled class can be confused with another class at high confidence. Locations are selected greedily, the
best first, as in weighted core-sets; each location has a minimal distance from scribbles, from other
locations and from pixels without data.
"""

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import numpy as np
from scipy.ndimage import distance_transform_edt, uniform_filter

from vispe.segment.live.live_segmentation import Live
from vispe.segment.types import Prediction
from vispe.utils.interval import Interval
from vispe.utils.options import checked

COUNT = 5
"""Default number of suggestions."""

MOST = 100
"""Upper bound of the number of suggestions."""

_NEW = 0.3  # added to the uncertainty, so that novel features count at high confidence, too
_STEP = 4  # spacing of candidates in pixels
_MOST = 20_000  # upper bound of candidates; above, every n-th candidate is used
_MIN_DISTANCE = 4  # between suggestions, in radii
_SURE = 0.2  # mean uncertainty below which a location is selected for its features
_LABELLED = 2000  # upper bound of labelled pixels for comparison; above, every n-th is used


@dataclass(frozen=True)
class Suggestion:
    """A suggested location for a scribble.

    Attributes:
        x, y: its centre in pixels, from the upper left corner.
        radius: radius in pixels of the disc in which uncertainty and classes are measured.
        page: index of the page of a stack, from 0.
        uncertainty: mean over the square around the disc, 0 to 1.
        classes: the two most probable classes, in descending order.
        reason: human-readable explanation.
    """

    x: int
    y: int
    radius: int
    page: int
    uncertainty: float
    classes: tuple[str, ...]
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able dict."""
        return {**asdict(self), "classes": list(self.classes)}


@checked
def suggest(
    live: Live,
    count: Annotated[int, Interval(least=1, most=MOST)] = COUNT,
    prediction: Prediction | None = None,
) -> list[Suggestion]:
    """Suggest locations on the cached page, the best first.

    Args:
        live: session with a model; its labels are avoided.
        count: maximal number of suggestions.
        prediction: prediction of the page; None predicts.

    Returns:
        Up to `count` suggestions, fewer if no further location is available; possibly an empty list.

    Raises:
        OptionError: `count` is not 1 to `MOST`.
        InputError: no model yet.

    Example:
        >>> from vispe.segment.features.pixel_features import FeatureConfig
        >>> from vispe.segment.live import Live, micrograph
        >>> grey = np.random.default_rng(0).normal(80, 9, (64, 96)) + 60 * (np.arange(96) > 48)
        >>> labels = np.zeros((64, 96), int)
        >>> labels[10:14, 5:20], labels[10:14, 70:90] = 1, 2
        >>> live = Live(micrograph(grey), features=FeatureConfig(sigmas=(1.0, 2.0)))
        >>> _ = live.update(labels)
        >>> [suggestion.page for suggestion in suggest(live, 2)]
        [0, 0]
    """
    prediction = live.predict() if prediction is None else prediction
    valid = prediction.labels > 0
    radius = radius_for(*valid.shape)
    labelled_indices = live.drawn()
    locations = candidates(valid, labelled_indices, radius)
    if not len(locations):
        return []
    uncertainty, mean_prob = _means(prediction, valid, radius, locations)
    # reference for the novelty of candidates
    reference = (
        labelled_indices[:: -(-len(labelled_indices) // _LABELLED)]
        if len(labelled_indices)
        else labelled_indices
    )
    indices = np.unique(np.concatenate([locations, reference]))
    features = live.gather(indices)
    # standardise, so that distances weigh all features equally
    features = (features - features.mean(0)) / (features.std(0) + 1e-6)
    candidate_features, labelled = (
        features[np.searchsorted(indices, subset)] for subset in (locations, reference)
    )
    order = select_greedily(
        np.divmod(locations, valid.shape[1]),
        uncertainty,
        candidate_features,
        labelled,
        count,
        _MIN_DISTANCE * radius,
    )
    return [
        _suggestion(live, int(locations[i]), radius, float(uncertainty[i]), mean_prob[:, i]) for i in order
    ]


def radius_for(height: int, width: int) -> int:
    """Return the radius of the discs in pixels: a fiftieth of the shorter side, 3 to 24."""
    return int(np.clip(round(min(height, width) / 50), 3, 24))


def candidates(valid: np.ndarray, labelled_indices: np.ndarray, radius: int) -> np.ndarray:
    """Return flat indices y * width + x (n,), ascending, of pixels whose discs have data and contain no label.

    Args:
        valid: (h, w) bool, pixels with data.
        labelled_indices: flat indices of labelled pixels.
        radius: radius of the discs in pixels.
    """
    padded = np.pad(valid, 1)
    allowed = distance_transform_edt(padded)[1:-1, 1:-1] > radius
    if len(labelled_indices):
        unlabelled = np.ones(valid.shape, bool)
        unlabelled.ravel()[labelled_indices] = False
        allowed &= distance_transform_edt(unlabelled) > 2 * radius
    grid = np.zeros(valid.shape, bool)
    grid[_STEP // 2 :: _STEP, _STEP // 2 :: _STEP] = True
    indices = np.flatnonzero(allowed & grid)
    return indices[:: max(-(-len(indices) // _MOST), 1)]


def select_greedily(
    coordinates: tuple[np.ndarray, np.ndarray],
    uncertainty: np.ndarray,
    features: np.ndarray,
    labelled: np.ndarray,
    count: int,
    min_distance: float,
) -> list[int]:
    """Select candidates greedily by (uncertainty + 0.3) times distance in feature space to selected and labelled ones.

    Args:
        coordinates: rows and columns (n,) of the candidates.
        uncertainty: (n,) 0 to 1.
        features: (n, f) standardised.
        labelled: (m, f) of labelled pixels; m may be 0.
        count: maximal number of selected candidates.
        min_distance: minimal distance in pixels between selected candidates.

    Returns:
        Indices of candidates, the best first.
    """
    y, x = (coordinate.astype(np.float64) for coordinate in coordinates)
    squared_distance = np.full(len(y), np.inf)
    for labelled_features in labelled:
        np.minimum(squared_distance, np.square(features - labelled_features).sum(1), out=squared_distance)
    # without labels the first is selected by uncertainty alone
    squared_distance = np.where(np.isfinite(squared_distance), squared_distance, 1.0)
    available, order = np.ones(len(y), bool), []
    while available.any() and len(order) < count:
        # score: (uncertainty + constant) x distance to the nearest known pixel
        value = np.where(available, (uncertainty + _NEW) * np.sqrt(squared_distance), -1)
        best = int(value.argmax())
        order.append(best)
        to_best = np.square(features - features[best]).sum(1)
        squared_distance = (
            np.minimum(squared_distance, to_best) if len(labelled) or len(order) > 1 else to_best
        )
        available &= np.hypot(y - y[best], x - x[best]) >= min_distance
    return order


def _means(
    prediction: Prediction, valid: np.ndarray, radius: int, indices: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Average uncertainty (n,) and probabilities (K, n) over the valid pixels of the square around each location."""

    def mean(values: np.ndarray) -> np.ndarray:
        sums = uniform_filter(np.where(valid, values, 0).astype(np.float64), 2 * radius + 1, mode="constant")
        return sums.ravel()[indices] / weight

    weight = uniform_filter(valid.astype(np.float64), 2 * radius + 1, mode="constant").ravel()[indices]
    return mean(np.nan_to_num(prediction.uncertainty)), np.stack(
        [mean(class_prob) for class_prob in prediction.prob]
    )


def _suggestion(live: Live, index: int, radius: int, uncertainty: float, mean_prob: np.ndarray) -> Suggestion:
    names = live.model.names
    y, x = divmod(index, live.image.pages.shape[2])
    order = np.argsort(-mean_prob, kind="stable")[:2]
    classes = tuple(names[k] for k in order)
    reason = f"between {' and '.join(classes)}" if len(classes) > 1 else f"differs from other {classes[0]}"
    if uncertainty < _SURE:
        reason = f"predicted as {classes[0]}, but differs from the labelled pixels"
    return Suggestion(x, y, radius, live.page, round(uncertainty, 4), classes, reason)
