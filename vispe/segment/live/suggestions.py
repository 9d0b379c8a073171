"""Where the next strokes would teach a segmentation most.

A place counts for how unsure the model is there, plus a constant, times how unlike its features are to those of pixels
that are labelled already or chosen before: borders of well-known classes are unsure everywhere and alike, and a class
that was never drawn can be taken for another one without a doubt. Places are chosen greedily, the best one first, as in
weighted core-sets; each keeps its distance from strokes, from the others and from pixels without data.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.ndimage import distance_transform_edt, uniform_filter

from vispe.errors import OptionError
from vispe.segment.live.live_segmentation import Live
from vispe.segment.run.prediction import Prediction

COUNT = 5
"""Places that are suggested where nothing else is asked for."""

MOST = 100
"""Places that can be asked for."""

_NEW = 0.3  # added to uncertainty, so that what looks new counts where the model is sure, too
_STEP = 4  # pixels between candidates
_MOST = 20_000  # candidates; of more, every n-th
_APART = 4  # distance between places in radii
_SURE = 0.2  # mean uncertainty below which a place is chosen for its features
_LABELLED = 2000  # labelled pixels that features are compared with; of more, every n-th


@dataclass(frozen=True)
class Place:
    """A place where a stroke is wanted.

    Attributes:
        x, y: its middle in pixels, from the upper left corner.
        radius: in pixels; the disc is what the numbers are about.
        page: of a stack, from 0.
        uncertainty: mean over the disc's square, 0 to 1.
        classes: the two classes that share it, the likelier one first.
        reason: in words.
    """

    x: int
    y: int
    radius: int
    page: int
    uncertainty: float
    classes: tuple[str, ...]
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Return it JSON-able."""
        return {**asdict(self), "classes": list(self.classes)}


def suggest(live: Live, count: int = COUNT, found: Prediction | None = None) -> list[Place]:
    """Choose places on the page whose features are kept, the best one first.

    Args:
        live: with a model; the labels that it was given are kept clear of.
        count: places at most.
        found: what the model predicts of the page; None predicts.

    Returns:
        Fewer than `count` where there is no room for more, perhaps none.

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
        >>> [place.page for place in suggest(live, 2)]
        [0, 0]
    """
    if not isinstance(count, int) or not 1 <= count <= MOST:
        raise OptionError(f"count={count} must be a whole number of places from 1 to {MOST}.")
    found = live.predict() if found is None else found
    valid = found.labels > 0
    radius = radius_for(*valid.shape)
    drawn = live.drawn()
    places = candidates(valid, drawn, radius)
    if not len(places):
        return []
    unsure, shares = _means(found, valid, radius, places)
    # labelled pixels are what the features of candidates are compared with
    known = drawn[:: -(-len(drawn) // _LABELLED)] if len(drawn) else drawn
    together = np.unique(np.concatenate([places, known]))
    features = live.gather(together)
    features = (features - features.mean(0)) / (features.std(0) + 1e-6)
    own, labelled = (features[np.searchsorted(together, some)] for some in (places, known))
    order = choose(np.divmod(places, valid.shape[1]), unsure, own, labelled, count, _APART * radius)
    return [_place(live, int(places[i]), radius, float(unsure[i]), shares[:, i]) for i in order]


def radius_for(height: int, width: int) -> int:
    """Return the radius of the discs in pixels: a fiftieth of the shorter side, 3 to 24."""
    return int(np.clip(round(min(height, width) / 50), 3, 24))


def candidates(valid: np.ndarray, drawn: np.ndarray, radius: int) -> np.ndarray:
    """Return places y * width + x (n,), ascending, whose discs hold data and touch no label.

    Args:
        valid: (h, w) bool, pixels with data.
        drawn: labelled places.
        radius: of the discs in pixels.
    """
    free = np.pad(valid, 1)
    clear = distance_transform_edt(free)[1:-1, 1:-1] > radius
    if len(drawn):
        empty = np.ones(valid.shape, bool)
        empty.ravel()[drawn] = False
        clear &= distance_transform_edt(empty) > 2 * radius
    lattice = np.zeros(valid.shape, bool)
    lattice[_STEP // 2 :: _STEP, _STEP // 2 :: _STEP] = True
    places = np.flatnonzero(clear & lattice)
    return places[:: max(-(-len(places) // _MOST), 1)]


def choose(
    at: tuple[np.ndarray, np.ndarray],
    unsure: np.ndarray,
    features: np.ndarray,
    labelled: np.ndarray,
    count: int,
    apart: float,
) -> list[int]:
    """Choose candidates greedily by (uncertainty + 0.3) times distance in features to all that is known.

    Args:
        at: rows and columns (n,) of the candidates.
        unsure: (n,) uncertainty, 0 to 1.
        features: (n, f) standardised.
        labelled: (m, f) of pixels with labels; m may be 0.
        count: places at most.
        apart: smallest distance between places in pixels.

    Returns:
        Numbers of candidates, the best one first.
    """
    y, x = (place.astype(np.float64) for place in at)
    near = np.full(len(y), np.inf)
    for one in labelled:
        np.minimum(near, np.square(features - one).sum(1), out=near)
    # without labels the first is chosen by uncertainty alone
    near = np.where(np.isfinite(near), near, 1.0)
    left, order = np.ones(len(y), bool), []
    while left.any() and len(order) < count:
        value = np.where(left, (unsure + _NEW) * np.sqrt(near), -1)
        best = int(value.argmax())
        order.append(best)
        far = np.square(features - features[best]).sum(1)
        near = np.minimum(near, far) if len(labelled) or len(order) > 1 else far
        left &= np.hypot(y - y[best], x - x[best]) >= apart
    return order


def _means(
    found: Prediction, valid: np.ndarray, radius: int, places: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Average uncertainty (n,) and probabilities (K, n) over the square around each place, where there is data."""

    def mean(values: np.ndarray) -> np.ndarray:
        sums = uniform_filter(np.where(valid, values, 0).astype(np.float64), 2 * radius + 1, mode="constant")
        return sums.ravel()[places] / weight

    weight = uniform_filter(valid.astype(np.float64), 2 * radius + 1, mode="constant").ravel()[places]
    return mean(np.nan_to_num(found.uncertainty)), np.stack([mean(each) for each in found.prob])


def _place(live: Live, place: int, radius: int, unsure: float, shares: np.ndarray) -> Place:
    """Describe a chosen place."""
    names = live.model.names
    y, x = divmod(place, live.image.pages.shape[2])
    order = np.argsort(-shares, kind="stable")[:2]
    classes = tuple(names[k] for k in order)
    reason = f"between {' and '.join(classes)}" if len(classes) > 1 else f"unlike other {classes[0]}"
    if unsure < _SURE:
        reason = f"taken for {classes[0]}, but unlike what is labelled"
    return Place(x, y, radius, live.page, round(unsure, 4), classes, reason)
