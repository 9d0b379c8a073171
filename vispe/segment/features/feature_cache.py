"""Features of one page that stay in memory, for labels that change while the picture does not."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from vispe.errors import InputError
from vispe.segment.classify.pixel_classifier import Linear
from vispe.segment.features.coarse_features import CoarseMaps
from vispe.segment.features.filters import Filters
from vispe.segment.features.micro_features import DenseMaps
from vispe.segment.features.pixel_features import BLOCK, Features, PreparedPage
from vispe.segment.features.threads import in_order
from vispe.segment.features.tiles import Region, blocks
from vispe.segment.features.token_features import TokenMaps

MEMORY = 4 << 30
"""Bytes that the features of a page may take where nothing else is given."""

_STRIDE = 2  # pixels between the values of vispe_micro
_BAND = 1 << 16  # pixels that are scored at once


class KeptFeatures(Features):
    """`Features` that computes those of one page only once.

    Attributes:
        memory: bytes that they may take.
    """

    memory: int = MEMORY
    _page: np.ndarray | None = None
    _kept: KeptPage | None = None

    def keep(self, page: np.ndarray) -> None:
        """Name the page, this very array, whose features stay from now on; those of the page before are given up."""
        if page is not self._page:
            self._page, self._kept = page, None

    @property
    def nbytes(self) -> int:
        """Bytes that the features in memory take; 0 before their first use."""
        return self._kept.nbytes if self._kept is not None else 0

    def prepare(self, page: np.ndarray, valid: np.ndarray) -> PreparedPage:
        """As `Features.prepare`; the page that `keep` named is prepared once.

        Raises:
            InputError: its features need more than `memory`.
        """
        if page is not self._page:
            return super().prepare(page, valid)
        if self._kept is None:
            maps = self._maps(page, valid) if self._model is not None else None
            wanted = _needed(page, self._filters, maps)
            if wanted > self.memory:
                h, w = valid.shape
                raise InputError(
                    f"the features of {h} x {w} px need {wanted / 2**30:.1f} GiB in memory, more than the "
                    f"{self.memory / 2**30:.1f} GiB allowed; cut the image, take filters alone, or use vispe segment."
                )
            block = self.tile or BLOCK
            self._kept = KeptPage(page, valid, self._filters, maps, block, self.device)
        self._kept.renew(self.basis)
        return self._kept

    def apply(self, page: np.ndarray, valid: np.ndarray, linear: Linear | None) -> None:
        """Get ready to predict a page with a linear classifier; does nothing for pages that are not kept."""
        if page is self._page and isinstance(kept := self.prepare(page, valid), KeptPage):
            kept.apply(linear)

    def shrink(self) -> str | None:
        """As `Features.shrink`; what was in memory is given up."""
        self._kept = None
        return super().shrink()

    def _maps(self, page: np.ndarray, valid: np.ndarray) -> TokenMaps | DenseMaps:
        """Take tokens from memory while their basis is fitted anew."""
        if page is self._page and self._kept is not None and self._kept.tokens is not None:
            return self._kept.tokens
        return super()._maps(page, valid)


class KeptPage(PreparedPage):
    """A `PreparedPage` whose filters and maps are in memory; takes the same arguments."""

    def __init__(
        self,
        page: np.ndarray,
        valid: np.ndarray,
        filters: Filters | None,
        maps: TokenMaps | DenseMaps | None,
        block: int,
        device: str = "cpu",
    ) -> None:
        self.tokens = maps if isinstance(maps, TokenMaps) else None
        threads = torch.get_num_threads() if device == "cpu" else 1
        held = KeptMaps(maps, threads) if isinstance(maps, DenseMaps) else maps
        super().__init__(page, valid, filters, held, block, device)
        if filters is not None:
            self._filters = KeptFilters(filters, self._page, block, threads)
        self._windows: dict[int, np.ndarray | None] = {}
        self._scored: tuple[Linear, Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        parts = [part for part in (self._filters, self._maps) if isinstance(part, KeptFilters | KeptMaps)]
        tokens = sum(m.nbytes for m in self.tokens.maps) if self.tokens is not None else 0
        return tokens + sum(part.nbytes for part in parts)

    def renew(self, basis: object) -> None:
        """Take over the principal components of tokens."""
        if self.tokens is not None:
            self.tokens.basis = basis

    def weight(self, number: int) -> np.ndarray | None:
        """As `PreparedPage.weight`, computed once."""
        if number not in self._windows:
            self._windows[number] = super().weight(number)
        return self._windows[number]

    def apply(self, linear: Linear | None) -> None:
        """Sum what filters add to the scores of a linear classifier over the page, once for all pieces."""
        if linear is not None and isinstance(self._filters, KeptFilters):
            self._scored = linear, self._filters.scores(linear)

    def scores(self, number: int, linear: Linear, look: Callable[[np.ndarray], None] | None = None) -> Tensor:
        """As `PreparedPage.scores`; quick after `apply` with the same classifier."""
        if look is not None or self._scored is None or self._scored[0] is not linear:
            return super().scores(number, linear, look)
        found = self._scored[1][(slice(None), *self.pieces[number].slices)]
        if self._maps is None:
            return found
        own = len(self._filters.values)
        return self._maps.project(number, linear.weight[:, own:], linear.mean[own:]).add_(found)


class KeptFilters(Filters):
    """The filters of a page, computed.

    Args:
        filters: which.
        page: (h, w, c) float32, NaN where there is no data.
        block: side of the pieces in which they are computed, in pixels.
        threads: pieces at once.
    """

    def __init__(self, filters: Filters, page: np.ndarray, block: int, threads: int) -> None:
        super().__init__(filters.sigmas, str(filters.device))
        pieces = blocks(*page.shape[:2], block)
        self._threads = threads
        self.values = np.empty((len(self.names(page.shape[2])), *page.shape[:2]), np.float32)
        found = in_order(lambda number: filters.planes(page, pieces[number]), len(pieces), threads)
        for piece, planes in zip(pieces, found, strict=True):
            self.values[(slice(None), *piece.slices)] = planes

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.values.nbytes

    def planes(self, page: np.ndarray, region: Region | None = None) -> np.ndarray:
        """Return a view of what `Filters.planes` gives for the page of the constructor; `page` is not read."""
        return self.values if region is None else self.values[(slice(None), *region.slices)]

    def at(self, page: np.ndarray, y: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Return the features (n, f) of pixels; `page` is not read."""
        return self.values[:, y, x].T

    def scores(self, linear: Linear) -> Tensor:
        """Return the share of the filters in the scores of a linear classifier, with its bias: (k, h, w)."""
        flat = torch.from_numpy(self.values).flatten(1)
        out = torch.empty((len(linear.bias), flat.shape[1]))

        def work(number: int) -> None:
            part = slice(number * _BAND, (number + 1) * _BAND)
            out[:, part] = linear.scores(flat[:, part])

        deque(in_order(work, -(-flat.shape[1] // _BAND), self._threads), maxlen=0)
        return out.view(-1, *self.values.shape[1:])


class KeptMaps(CoarseMaps):
    """The maps of vispe_micro for all tiles of a page, computed.

    Args:
        maps: which.
        threads: tiles at once.
    """

    def __init__(self, maps: DenseMaps, threads: int) -> None:
        super().__init__(maps.regions, maps.offset, maps.frame, maps.notes)
        self.width = maps.width
        self._held = list(in_order(maps.coarse, len(maps.regions), threads))

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(one.nbytes for one in self._held)

    def coarse(self, number: int, again: bool = False) -> Tensor:
        """As `CoarseMaps.coarse`; `again` makes no difference."""
        return self._held[number]


def _needed(page: np.ndarray, filters: Filters | None, maps: TokenMaps | DenseMaps | None) -> int:
    """Bytes that the features of a page will take."""
    values = page.shape[0] * page.shape[1] * len(filters.names(page.shape[2])) if filters is not None else 0
    if isinstance(maps, TokenMaps):
        values += sum(m.size for m in maps.maps)
    elif maps is not None:
        values += sum(r.shape[0] * r.shape[1] for r in maps.regions) * maps.width // _STRIDE**2
    return 4 * values
