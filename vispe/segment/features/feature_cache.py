"""Cached features of one page, for interactive use where labels change but the image does not."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from vispe.errors import InputError
from vispe.segment.classify.estimators.linear import Linear
from vispe.segment.features.coarse_features import CoarseMaps
from vispe.segment.features.filters.filters2d import Filters
from vispe.segment.features.micro_features import DenseMaps
from vispe.segment.features.pixel_features import BLOCK, Features
from vispe.segment.features.prepared_page import PreparedPage
from vispe.segment.features.stored_features import StoredMaps
from vispe.segment.features.threads import in_order
from vispe.segment.features.tiles import Region, blocks
from vispe.segment.features.token_features import TokenMaps

MEMORY = 4 << 30
"""Default memory limit in bytes of the cached features of a page."""

_STRIDE = 2  # stride of vispe_micro in pixels
_BAND = 1 << 16  # pixels scored per chunk


class CachedFeatures(Features):
    """`Features` with a cache for one page, or for several.

    Attributes:
        memory: memory limit in bytes.
        retain: whether the features of earlier pages remain cached, as far as `memory` permits; False: they are
            dropped.
    """

    memory: int = MEMORY
    retain: bool = False
    _page: np.ndarray | None = None
    _cached_page: CachedPage | None = None
    _earlier: tuple[tuple[np.ndarray, CachedPage], ...] = ()  # retained pages, the most recent one last

    def keep(self, page: np.ndarray) -> None:
        """Select the page (compared by identity) whose features are cached."""
        if page is self._page:
            return
        earlier = self._earlier
        if self.retain and self._page is not None and self._cached_page is not None:
            earlier += ((self._page, self._cached_page),)
        self._page, self._cached_page = (
            page,
            next((cached for other, cached in earlier if other is page), None),
        )
        self._earlier = tuple(pair for pair in earlier if pair[0] is not page)

    @property
    def nbytes(self) -> int:
        """Bytes of the cached features; 0 before their first use."""
        selected = self._cached_page.nbytes if self._cached_page is not None else 0
        return selected + sum(cached.nbytes for _, cached in self._earlier)

    def prepare(self, page: np.ndarray, valid: np.ndarray) -> PreparedPage:
        """Return the result of `Features.prepare`; the page selected by `keep` is prepared only once.

        Raises:
            InputError: the features of the page exceed `memory`.
        """
        if page is not self._page:
            retained = next((cached for other, cached in self._earlier if other is page), None)
            return super().prepare(page, valid) if retained is None else retained
        if self._cached_page is None:
            maps = self._maps(page, valid) if self._model is not None else None
            # check before computing: features are several times as large as the image
            required = _needed(page, self._filters, maps)
            if required > self.memory:
                h, w = valid.shape
                raise InputError(
                    f"the features of {h} x {w} px need {required / 2**30:.1f} GiB of memory, limit "
                    f"{self.memory / 2**30:.1f} GiB. Crop the image, use features=filters, or run vispe segment."
                )
            while self._earlier and required + self.nbytes > self.memory:
                self._earlier = self._earlier[1:]
            block = self.tile or BLOCK
            self._cached_page = CachedPage(page, valid, self._filters, maps, block, self.device)
        self._cached_page.set_basis(self.basis)
        return self._cached_page

    def apply(self, page: np.ndarray, valid: np.ndarray, linear: Linear | None) -> None:
        """Precompute the prediction of a page with a linear classifier; a no-op for uncached pages."""
        if page is self._page and isinstance(cached_page := self.prepare(page, valid), CachedPage):
            cached_page.apply(linear)

    def shrink(self) -> str | None:
        """As `Features.shrink`; the cache is dropped."""
        self._cached_page, self._earlier = None, ()
        return super().shrink()

    def _maps(self, page: np.ndarray, valid: np.ndarray) -> TokenMaps | DenseMaps | StoredMaps:
        """Return the cached tokens, for fitting their basis again."""
        if page is self._page and self._cached_page is not None and self._cached_page.tokens is not None:
            return self._cached_page.tokens
        return super()._maps(page, valid)


class CachedPage(PreparedPage):
    """`PreparedPage` with cached filters and maps; takes the same arguments."""

    def __init__(
        self,
        page: np.ndarray,
        valid: np.ndarray,
        filters: Filters | None,
        maps: TokenMaps | DenseMaps | StoredMaps | None,
        block: int,
        device: str = "cpu",
    ) -> None:
        self.tokens = maps if isinstance(maps, TokenMaps) else None
        threads = torch.get_num_threads() if device == "cpu" else 1
        cached_maps = CachedMaps(maps, threads) if isinstance(maps, DenseMaps | StoredMaps) else maps
        super().__init__(page, valid, filters, cached_maps, block, device)
        if filters is not None:
            self._filters = CachedFilters(filters, self._page, block, threads)
        self._windows: dict[int, np.ndarray | None] = {}
        self._scored: tuple[Linear, Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the cached features."""
        parts = [part for part in (self._filters, self._maps) if isinstance(part, CachedFilters | CachedMaps)]
        tokens = sum(m.nbytes for m in self.tokens.maps) if self.tokens is not None else 0
        return tokens + sum(part.nbytes for part in parts)

    def set_basis(self, basis: object) -> None:
        """Set the principal components of tokens."""
        if self.tokens is not None:
            self.tokens.basis = basis

    def weight(self, number: int) -> np.ndarray | None:
        """As `PreparedPage.weight`, computed once."""
        if number not in self._windows:
            self._windows[number] = super().weight(number)
        return self._windows[number]

    def apply(self, linear: Linear | None) -> None:
        """Precompute the contribution of filters to the scores of a linear classifier, for the complete page."""
        if linear is not None and isinstance(self._filters, CachedFilters):
            self._scored = linear, self._filters.scores(linear)

    def scores(self, number: int, linear: Linear, look: Callable[[np.ndarray], None] | None = None) -> Tensor:
        """As `PreparedPage.scores`; fast after `apply` with the same classifier."""
        if look is not None or self._scored is None or self._scored[0] is not linear:
            return super().scores(number, linear, look)
        # scores are additive: those of the filters are precomputed for the page, with the bias
        filter_scores = self._scored[1][(slice(None), *self.pieces[number].slices)]
        if self._maps is None:
            return filter_scores
        n_filters = len(self._filters.values)
        return self._maps.project(number, linear.weight[:, n_filters:], linear.mean[n_filters:]).add_(
            filter_scores
        )


class CachedFilters(Filters):
    """Precomputed filters of a page.

    Args:
        filters: the filters to compute.
        page: (h, w, c) float32, NaN where there is no data.
        block: side in pixels of the blocks in which they are computed.
        threads: number of blocks computed in parallel.
    """

    def __init__(self, filters: Filters, page: np.ndarray, block: int, threads: int) -> None:
        super().__init__(filters.sigmas, str(filters.device))
        pieces = blocks(*page.shape[:2], block)
        self._threads = threads
        self.values = np.empty((len(self.names(page.shape[2])), *page.shape[:2]), np.float32)
        blocks_of_planes = in_order(lambda number: filters.planes(page, pieces[number]), len(pieces), threads)
        for piece, planes in zip(pieces, blocks_of_planes, strict=True):
            self.values[(slice(None), *piece.slices)] = planes

    @property
    def nbytes(self) -> int:
        """Bytes of the cached features."""
        return self.values.nbytes

    def planes(self, page: np.ndarray, region: Region | None = None, again: bool = False) -> np.ndarray:
        """Return a view of `Filters.planes` for the page of the constructor; `page` and `again` are ignored."""
        return self.values if region is None else self.values[(slice(None), *region.slices)]

    def at(self, page: np.ndarray, y: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Return the features (n, f) of pixels; `page` is ignored."""
        return self.values[:, y, x].T

    def scores(self, linear: Linear) -> Tensor:
        """Return the contribution of the filters to the scores of a linear classifier, with its bias: (k, h, w)."""
        flat = torch.from_numpy(self.values).flatten(1)
        out = torch.empty((len(linear.bias), flat.shape[1]))

        def work(number: int) -> None:
            part = slice(number * _BAND, (number + 1) * _BAND)
            out[:, part] = linear.scores(flat[:, part])

        # consume the generator; results are written in place
        deque(in_order(work, -(-flat.shape[1] // _BAND), self._threads), maxlen=0)
        return out.view(-1, *self.values.shape[1:])


class CachedMaps(CoarseMaps):
    """Precomputed maps of vispe_micro for all tiles of a page.

    Args:
        maps: the maps to compute.
        threads: number of tiles computed in parallel.
    """

    def __init__(self, maps: DenseMaps | StoredMaps, threads: int) -> None:
        super().__init__(maps.regions, maps.offset, maps.frame, maps.notes)
        self.width = maps.width
        self._held = list(in_order(maps.coarse, len(maps.regions), threads))

    @property
    def nbytes(self) -> int:
        """Bytes of the cached features."""
        return sum(one.nbytes for one in self._held)

    def coarse(self, number: int, again: bool = False) -> Tensor:
        """As `CoarseMaps.coarse`; `again` is ignored."""
        return self._held[number]


def _needed(
    page: np.ndarray, filters: Filters | None, maps: TokenMaps | DenseMaps | StoredMaps | None
) -> int:
    """Return the bytes required by the features of a page."""
    values = page.shape[0] * page.shape[1] * len(filters.names(page.shape[2])) if filters is not None else 0
    if isinstance(maps, TokenMaps):
        values += sum(m.size for m in maps.maps)
    elif maps is not None:
        values += sum(r.shape[0] * r.shape[1] for r in maps.regions) * maps.width // _STRIDE**2
    return 4 * values
