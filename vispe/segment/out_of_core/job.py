"""Job of a run on an out-of-core image, and the result of one block."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import numpy as np

from vispe.segment.features.sample_grid import FeatureGrid
from vispe.segment.out_of_core.intensity_limits import Limits


@dataclass(frozen=True)
class Job:
    """Everything that determines the result for one image; JSON-able, to be sent to other processes.

    Attributes:
        image: path of the image.
        state: fingerprint of the image's files.
        channel, z, axes: reading options.
        limits: grey limits of each page.
        model: path of the model file.
        sha256: SHA-256 of the model file.
        weights, tile, device: as in `vispe.segment.pipeline.apply`.
        smooth, min_area, clean: as in `vispe.segment.types.PostProcessing`.
        prior: class prior, one of `vispe.segment.classify.class_prior.PRIORS`.
        work: folder of the unfinished result.
        chunk: side of a chunk of the result in pixels.
        reduction: downscaling factor of the overlay.
        overlay_page: page shown in the overlay.
        threads: upper bound of pieces computed in parallel.
        priors: class frequencies of each page, once estimated; None: no reweighting.
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
    min_area: int
    clean: bool
    prior: str
    work: str
    chunk: int
    reduction: int
    overlay_page: int
    threads: int
    priors: tuple[tuple[float, ...], ...] | None = None

    def dumps(self) -> str:
        """Return the job as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> Job:
        """Return the job from JSON."""
        fields = json.loads(text)
        fields["limits"] = tuple(None if pair is None else tuple(pair) for pair in fields["limits"])
        if fields["priors"] is not None:
            fields["priors"] = tuple(map(tuple, fields["priors"]))
        return cls(**fields)


@dataclass(frozen=True, eq=False)
class PredictedBlock:
    """Output of the classifier for a region.

    Attributes:
        prob: (K, h, w) float32, before reweighting and smoothing; 0 where there is no data.
        twice: (h, w) bool, pixels covered by several tiles.
        differ: (h, w) bool, pixels covered by several tiles that predict different classes.
        thumbnail: downscaled grey levels, or None.
        feature_grid: summary of the features; None if the model has no reference to compare with.
    """

    prob: np.ndarray
    twice: np.ndarray
    differ: np.ndarray
    thumbnail: np.ndarray | None
    feature_grid: FeatureGrid | None = None
