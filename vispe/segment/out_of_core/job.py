"""What a run on a large image asks for, and one block of it."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, dataclass

import numpy as np

from vispe.segment.features.sample_grid import Seen
from vispe.segment.out_of_core.intensity_limits import Limits

_ONE = threading.Lock()  # one block at a time in a process, so that memory is bounded


@dataclass(frozen=True)
class Job:
    """Everything that decides the result for one image; JSON-able, so that other processes can do the same.

    Attributes:
        image: path of the image.
        state: fingerprint of the image's files.
        channel, z, axes: how it is read.
        limits: grey limits of each page.
        model: path of the model file.
        sha256: of that file.
        weights, tile, device: as in `vispe.segment.pipeline.apply`.
        smooth: radius in pixels.
        prior: what classes are weighed by, one of `vispe.segment.classify.class_prior.PRIORS`.
        work: folder of the unfinished result.
        chunk: side of a chunk of the result in pixels.
        reduction: pixels in a row that become one in the picture.
        picture: page that is drawn.
        threads: at most so many pieces at once.
        priors: frequencies of the classes on each page, when they are known; None: nothing is weighed.
    """

    image: str
    state: str
    channel: str | None
    z: str | None
    axes: str | None
    limits: tuple[Limits, ...]
    model: str
    sha256: str
    weights: str | None
    tile: int | None
    device: str
    smooth: int
    prior: str
    work: str
    chunk: int
    reduction: int
    picture: int
    threads: int
    priors: tuple[tuple[float, ...], ...] | None = None

    def dumps(self) -> str:
        """Write as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> Job:
        """Read from JSON."""
        found = json.loads(text)
        found["limits"] = tuple(None if one is None else tuple(one) for one in found["limits"])
        if found["priors"] is not None:
            found["priors"] = tuple(map(tuple, found["priors"]))
        return cls(**found)


@dataclass(frozen=True, eq=False)
class Block:
    """What the classifier says of a region.

    Attributes:
        prob: (K, h, w) float32, neither weighed nor smoothed; 0 where there is no data.
        twice: (h, w) bool, pixels in several tiles.
        differ: of these, those to which two tiles give different classes.
        picture: reduced grey, or None.
        seen: what the features look like; None where the model has nothing to compare them with.
    """

    prob: np.ndarray
    twice: np.ndarray
    differ: np.ndarray
    picture: np.ndarray | None
    seen: Seen | None = None
