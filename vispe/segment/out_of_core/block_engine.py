"""Computation of one block of the result from the intersecting pieces of the page, in page order.

`prepare_page` passes a page that is read through a window to the functions for pages in memory.
"""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from vispe.errors import InputError, require
from vispe.images.paths import check_file
from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.features.pixel_features import Features
from vispe.segment.features.prepared_page import PreparedPage
from vispe.segment.features.sample_grid import FeatureGrid
from vispe.segment.features.tiles import Region
from vispe.segment.model.model_file import load_model, open_features
from vispe.segment.model.piece_probabilities import piece_threads
from vispe.segment.model.prediction import assemble
from vispe.segment.out_of_core.job import Job, PredictedBlock
from vispe.segment.out_of_core.lazy_page import LazyPage, LazyValid, PageWindow
from vispe.segment.out_of_core.source.open_image import open_image

_BLOCK_LOCK = threading.Lock()  # one block at a time in a process, so that memory is bounded


class Engine:
    """An opened model and image; computes blocks of any size.

    Args:
        job: the job.

    Raises:
        InputError: the model file has changed.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        if file_digest(job.model) != job.sha256:
            raise InputError(f"{job.model} is not the model of the unfinished run. Use force to start again.")
        self.model = load_model(job.model)
        self.image = open_image(job.image, channel=job.channel, z=job.z, axes=job.axes)
        overrides = {"weights": job.weights, "tile": job.tile}
        config = replace(self.model.features, **{k: v for k, v in overrides.items() if v is not None})
        check_supported(config)
        self.features = open_features(self.model, job.device, config)
        self._page: tuple[int, PageWindow, PreparedPage, np.ndarray] | None = None

    def block(self, page: int, region: Region) -> PredictedBlock:
        """Compute the probabilities of a region of a page."""
        window, prepared, bounds = self._pages(page)
        classifier = self.model.classifier
        # pieces that intersect the region, by their bounds (top, bottom, left, right)
        touching = (bounds[:, 0] < region.bottom) & (bounds[:, 1] > region.top)
        touching &= (bounds[:, 2] < region.right) & (bounds[:, 3] > region.left)
        numbers = [int(i) for i in np.flatnonzero(touching)]
        window.load(window_region(bounds[numbers], reach(self.features), *self.image.shape))
        threads = min(self.job.threads, piece_threads(self.features, classifier))
        valid = LazyValid(window)
        feature_grid = None if self.model.domain is None else FeatureGrid.empty(region, self.model.domain)
        prob, blend = assemble(
            prepared, numbers, region, valid, classifier, threads, lambda fraction: None, feature_grid
        )
        empty = np.zeros(region.shape, bool)
        twice, differ = (empty, empty) if blend is None else blend.overlap_masks
        thumbnail = (
            _reduced(window.cut(region)[0], self.job.reduction) if page == self.job.overlay_page else None
        )
        return PredictedBlock(prob, twice, differ, thumbnail, feature_grid)

    def _pages(self, page: int) -> tuple[PageWindow, PreparedPage, np.ndarray]:
        if self._page is None or self._page[0] != page:
            window = PageWindow(self.image, page, self.job.limits[page])
            prepared = prepare_page(self.features, window)
            bounds = np.array([(p.top, p.bottom, p.left, p.right) for p in prepared.pieces])
            self._page = page, window, prepared, bounds
        return self._page[1:]


def prepare_page(features: Features, window: PageWindow) -> PreparedPage:
    """Prepare a page that is read through a window, with the same pieces as the complete page."""
    return features.prepare(LazyPage(window), LazyValid(window))  # type: ignore[arg-type] - indexed like arrays


def check_supported(config: object) -> None:
    """Raise InputError for features that need a complete page, or several pages, at once."""
    from vispe.segment.features import micro_features

    model = getattr(config, "model", None)
    if not isinstance(config, FeatureConfig) or model not in (None, micro_features.NAME):
        raise InputError(
            f"images processed in blocks support filters and {micro_features.NAME}, but {model} needs feature "
            f"maps of the complete page. Train with model={micro_features.NAME} or features=filters."
        )
    if config.filters_3d:
        raise InputError(
            "images processed in blocks are segmented page by page, but 3D filters need several pages. Train without "
            "filters_3d."
        )


def reach(features: Features) -> int:
    """Return the margin in pixels around a piece that its features depend on."""
    return 0 if features._filters is None else features._filters.reach


def window_region(bounds: np.ndarray, margin: int, height: int, width: int) -> Region:
    """Return the bounding rectangle of pieces (n, 4: top, bottom, left, right) with a margin, clipped to the page."""
    low, high = bounds.min(0), bounds.max(0)
    bounding_box = Region(int(low[0]), int(high[1]), int(low[2]), int(high[3]))
    return grown_by(bounding_box, margin, height, width)


def file_digest(path: str | Path) -> str:
    """Return the SHA-256 of a file."""
    path = Path(path)
    check_file(path, "pass the model.vispe file written by vispe segment")
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def limit_concurrency() -> Iterator[None]:
    """Limit the number of chunks that zarr reads concurrently, to bound the memory."""
    for module in ("zarr", "ome_zarr"):
        require(module, "big", "segmenting images block by block")
    import zarr

    with zarr.config.set({"async.concurrency": 2, "threading.max_workers": 2}):
        yield


@lru_cache(maxsize=1)
def engine(text: str) -> Engine:
    """Return the engine of a job (as JSON), cached per process."""
    return Engine(Job.loads(text))


def run_block(text: str, page: int, bounds: tuple[int, int, int, int]) -> None:
    """Compute, write and record one block of a job (as JSON); a task of a cluster."""
    from vispe.segment.out_of_core.progress import write_block

    with _BLOCK_LOCK, limit_concurrency():
        block_engine = engine(text)
        region = Region(*bounds)
        write_block(block_engine.job, page, region, block_engine.block(page, region))


def grown_by(region: Region, margin: int, height: int, width: int) -> Region:
    """Add a margin to a region, clipped to the page."""
    top, bottom = max(region.top - margin, 0), min(region.bottom + margin, height)
    return Region(top, bottom, max(region.left - margin, 0), min(region.right + margin, width))


def _reduced(grey: np.ndarray, step: int) -> np.ndarray:
    """Average squares of step x step pixels (smaller at the end of the page), as float32."""
    if step == 1:
        return grey.copy()
    rows, columns = (np.arange(0, n, step) for n in grey.shape[:2])
    sums = np.add.reduceat(np.add.reduceat(grey, rows, axis=0, dtype=np.float64), columns, axis=1)
    counts = np.outer(np.diff([*rows, grey.shape[0]]), np.diff([*columns, grey.shape[1]]))
    return (sums / counts[..., None]).astype(np.float32)
