"""The computing: one block of the result from the pieces of the page that touch it, in their order on the page.

`prepare_page` hands a page that is read through a window to what computes pages in memory.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from vispe.errors import InputError, require
from vispe.images.paths import check_file
from vispe.segment.features.pixel_features import FeatureConfig, Features, PreparedPage
from vispe.segment.features.sample_grid import Seen
from vispe.segment.features.tiles import Region
from vispe.segment.model.model_file import Model, load_model
from vispe.segment.out_of_core.image_source import open_image
from vispe.segment.out_of_core.job import _ONE, Block, Job
from vispe.segment.out_of_core.lazy_page import LazyPage, LazyValid, Window
from vispe.segment.run.prediction import assemble, piece_threads


class Engine:
    """A model and an image, opened; computes blocks of any size.

    Args:
        job: what to compute.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        if file_digest(job.model) != job.sha256:
            raise InputError(f"{job.model} is not the model of the run so far; begin anew with --force.")
        self.model = load_model(job.model)
        self.image = open_image(job.image, channel=job.channel, z=job.z, axes=job.axes)
        self.features = open_features(self.model, job.weights, job.tile, job.device)
        self._page: tuple[int, Window, PreparedPage, np.ndarray] | None = None

    def block(self, page: int, region: Region) -> Block:
        """Compute a region of a page."""
        window, prepared, ends = self._pages(page)
        classifier = self.model.classifier
        touching = (ends[:, 0] < region.bottom) & (ends[:, 1] > region.top)
        touching &= (ends[:, 2] < region.right) & (ends[:, 3] > region.left)
        numbers = [int(i) for i in np.flatnonzero(touching)]
        window.load(window_region(ends[numbers], reach(self.features), *self.image.shape))
        threads = min(self.job.threads, piece_threads(self.features, classifier))
        valid = LazyValid(window)
        seen = None if self.model.domain is None else Seen.empty(region, self.model.domain)
        prob, blend = assemble(
            prepared, numbers, region, valid, classifier, threads, lambda share: None, seen
        )
        empty = np.zeros(region.shape, bool)
        twice, differ = (empty, empty) if blend is None else blend.marks
        picture = _reduced(window.cut(region)[0], self.job.reduction) if page == self.job.picture else None
        return Block(prob, twice, differ, picture, seen)

    def _pages(self, page: int) -> tuple[Window, PreparedPage, np.ndarray]:
        if self._page is None or self._page[0] != page:
            window = Window(self.image, page, self.job.limits[page])
            prepared = prepare_page(self.features, window)
            ends = np.array([(p.top, p.bottom, p.left, p.right) for p in prepared.pieces])
            self._page = page, window, prepared, ends
        return self._page[1:]


def prepare_page(features: Features, window: Window) -> PreparedPage:
    """Prepare a page that is read through a window: its list of pieces is that of the whole page."""
    return features.prepare(LazyPage(window), LazyValid(window))  # type: ignore[arg-type] - indexed like arrays


def open_features(model: Model, weights: str | None, tile: int | None, device: str) -> Features:
    """Build the features of a model, which must be computed tile by tile.

    Raises:
        InputError: the tokens of a timm model, which need the whole page at once.
    """
    config = model.features
    refuse_whole(config)
    if weights is not None:
        config = replace(config, weights=weights)
    if tile is not None:
        config = replace(config, tile=tile)
    return Features(config, seed=model.seed, device=device, basis=model.basis)


def refuse_whole(config: object) -> None:
    """Raise InputError for features that need a whole page, or several, at once."""
    from vispe.segment.features import micro_features

    model = getattr(config, "model", None)
    if not isinstance(config, FeatureConfig) or model not in (None, micro_features.NAME):
        raise InputError(
            f"images that are read block by block are segmented with filters and {micro_features.NAME}, not with {model}, whose "
            f"maps of a whole page are held at once; train with --model {micro_features.NAME} or --features filters."
        )
    if config.filters_3d:
        raise InputError(
            "images that are read block by block are segmented page by page, but 3D filters look at several; train "
            "without --filters-3d."
        )


def reach(features: Features) -> int:
    """Pixels around a piece that its features depend on, besides the piece itself."""
    return 0 if features._filters is None else features._filters.reach


def window_region(ends: np.ndarray, margin: int, height: int, width: int) -> Region:
    """Return the rectangle around pieces (n, 4: top, bottom, left, right) with a margin, inside the page."""
    low, high = ends.min(0), ends.max(0)
    whole = Region(int(low[0]), int(high[1]), int(low[2]), int(high[3]))
    return grown_by(whole, margin, height, width)


def file_digest(path: str | Path) -> str:
    """Return the SHA-256 of a file."""
    path = Path(path)
    check_file(path, "give the model.vispe file that vispe segment wrote")
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def few_at_once() -> Iterator[None]:
    """Let zarr hold few chunks at once, so that memory is bounded."""
    for module in ("zarr", "ome_zarr"):
        require(module, "big", "segmenting images block by block")
    import zarr

    with zarr.config.set({"async.concurrency": 2, "threading.max_workers": 2}):
        yield


@lru_cache(maxsize=1)
def engine(text: str) -> Engine:
    """Open what a job (as JSON) needs, once in each process."""
    return Engine(Job.loads(text))


def run_block(text: str, page: int, ends: tuple[int, int, int, int]) -> None:
    """Compute one block of a job (as JSON), write it and record it; a task of a cluster."""
    from vispe.segment.out_of_core.progress import write_block

    with _ONE, few_at_once():
        opened = engine(text)
        region = Region(*ends)
        write_block(opened.job, page, region, opened.block(page, region))


def grown_by(region: Region, margin: int, height: int, width: int) -> Region:
    """Add a margin to a region, inside the page."""
    top, bottom = max(region.top - margin, 0), min(region.bottom + margin, height)
    return Region(top, bottom, max(region.left - margin, 0), min(region.right + margin, width))


def _reduced(grey: np.ndarray, step: int) -> np.ndarray:
    """Average squares of step x step pixels, at the end of the page what is left of them -> float32."""
    if step == 1:
        return grey.copy()
    rows, columns = (np.arange(0, n, step) for n in grey.shape[:2])
    sums = np.add.reduceat(np.add.reduceat(grey, rows, axis=0, dtype=np.float64), columns, axis=1)
    counts = np.outer(np.diff([*rows, grey.shape[0]]), np.diff([*columns, grey.shape[1]]))
    return (sums / counts[..., None]).astype(np.float32)
