"""Features of one page, piece by piece, and of selected pixels."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from vispe.errors import InputError
from vispe.segment.classify.estimators.linear import Linear
from vispe.segment.features import micro_features
from vispe.segment.features.blend import window
from vispe.segment.features.filters.filters2d import Filters
from vispe.segment.features.stored_features import StoredMaps
from vispe.segment.features.threads import in_order
from vispe.segment.features.tiles import STEP, blocks, grid_points
from vispe.segment.features.token_features import TokenMaps


class PreparedPage:
    """Features of one page, computed piece by piece; created by `Features.prepare`."""

    def __init__(
        self,
        page: np.ndarray,
        valid: np.ndarray,
        filters: Filters | None,
        maps: TokenMaps | micro_features.DenseMaps | StoredMaps | None,
        block: int,
        device: str = "cpu",
    ) -> None:
        # filters treat NaN as missing (normalised convolution)
        self._page = filled(page, valid, np.nan)
        self._filters, self._maps, self._device = filters, maps, device
        height, self._width = valid.shape
        if maps is None:
            self.pieces = blocks(height, self._width, block)
        else:
            self.pieces = [maps.inside(i) for i in range(len(maps.regions))]

    @property
    def notes(self) -> tuple[str, ...]:
        """Messages for the user about this page."""
        return self._maps.notes if self._maps is not None else ()

    @property
    def threads(self) -> int:
        """Number of pieces computed in parallel; 1 if a single piece already uses all cores of the device."""
        return torch.get_num_threads() if self._device == "cpu" else 1

    def weight(self, number: int) -> np.ndarray | None:
        """Return the blending weight (rows, columns) of a piece; None if pieces do not overlap."""
        if self._maps is None or not self.overlapping:
            return None
        # the window is that of the full tile, cropped to the page
        return window(*self._maps.regions[number].shape)[self._maps.crop(number)]

    @property
    def overlapping(self) -> bool:
        """Whether pieces overlap."""
        return self._maps is not None and len(self.pieces) > 1

    def compute(self, number: int) -> np.ndarray:
        """Return the features of a piece, (f, rows, columns) float32."""
        parts = self.parts(number)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def parts(self, number: int) -> list[np.ndarray]:
        """Return the features as `compute`, without a copy: those of filters and of maps, each (f', rows, columns)."""
        parts = []
        if self._filters is not None:
            parts.append(self._filters.planes(self._page, self.pieces[number]))
        if self._maps is not None:
            parts.append(self._maps.planes(number))
        return parts

    def sampled(self, number: int, planes: np.ndarray | None = None) -> np.ndarray:
        """Return the features (rows, columns, f) float32 of a piece at the points of `sample_grid`.

        Args:
            number: index of the piece.
            planes: its filters (f', rows, columns), if already computed.
        """
        piece = self.pieces[number]
        top, bottom, left, right = grid_points(piece)
        # centres of the grid cells, relative to the corner of the piece
        y, x = (
            np.mgrid[top:bottom, left:right] * STEP
            + STEP // 2
            - np.array([piece.top, piece.left])[:, None, None]
        )
        parts = []
        if self._filters is not None:
            if planes is None:
                planes = self._filters.planes(self._page, piece, again=True)
            parts.append(planes[:, y, x].transpose(1, 2, 0))
        if self._maps is not None:
            tokens = self._maps.at(number, y.ravel(), x.ravel())
            parts.append(tokens.reshape(*y.shape, tokens.shape[-1]))
        return np.concatenate(parts, -1)

    def scores(self, number: int, linear: Linear, look: Callable[[np.ndarray], None] | None = None) -> Tensor:
        """Return the scores of a linear classifier for a piece, (k, rows, columns) float32.

        `look` is called with the features of the piece at the grid points, as from `sampled`.
        """
        if look is not None and self._filters is None:
            look(self.sampled(number))
        if self._filters is None:
            scores = self._maps.project(number, linear.weight, linear.mean)
            return scores + linear.bias[:, None, None]
        # the weights of a linear classifier split into those of filters and of maps, whose scores are summed
        filtered = self._filters.planes(self._page, self.pieces[number])
        if look is not None:
            look(self.sampled(number, filtered))
        planes = torch.from_numpy(filtered)
        n_filters = len(planes)
        scores = linear.scores(planes.flatten(1)).view(-1, *planes.shape[1:])
        if self._maps is not None:
            scores += self._maps.project(number, linear.weight[:, n_filters:], linear.mean[n_filters:])
        return scores

    def gather(self, mask: np.ndarray) -> np.ndarray:
        """Return the features (n, f) of the pixels in `mask` (h, w), in row-major order.

        A pixel covered by several tiles gets the features of the tile whose centre is nearest.

        Raises:
            InputError: an empty mask.
        """
        return self.gather_indices(np.flatnonzero(mask))

    def gather_indices(self, indices: np.ndarray) -> np.ndarray:
        """Return the features (n, f) as `gather`, of pixels with flat indices y * width + x (n,), ascending."""
        if not len(indices):
            raise InputError("no pixel was selected. Select at least one pixel with data.")
        rows, columns = np.divmod(indices, self._width)
        # group pixels by the piece whose features they get, so that each piece is computed once
        owner = self._owners(rows, columns)
        groups = [(int(number), np.flatnonzero(owner == number)) for number in np.unique(owner)]

        def work(index: int) -> np.ndarray:
            number, index = groups[index]
            y, x = rows[index], columns[index]
            parts = []
            if self._filters is not None:
                parts.append(self._filters.at(self._page, y, x))
            if self._maps is not None:
                piece = self.pieces[number]
                parts.append(self._maps.at(number, y - piece.top, x - piece.left))
            return np.concatenate(parts, 1)

        out: np.ndarray | None = None
        for (_, index), parts in zip(groups, in_order(work, len(groups), self.threads), strict=True):
            out = np.empty((len(indices), parts.shape[1]), np.float32) if out is None else out
            out[index] = parts
        return out

    def _owners(self, y: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Return the index (n,) of the piece whose centre is nearest, for each pixel in row-major order."""
        owner = np.zeros(len(y), np.int32)
        best = np.full(len(y), -1, np.float32)
        for number, piece in enumerate(self.pieces):
            # y is ascending, so the rows of a piece are a slice
            inside = np.arange(*np.searchsorted(y, (piece.top, piece.bottom)))
            inside = inside[(x[inside] >= piece.left) & (x[inside] < piece.right)]
            if not len(inside):
                continue
            weight = self.weight(number)
            distance_weight = 1 if weight is None else weight[y[inside] - piece.top, x[inside] - piece.left]
            better = inside[distance_weight > best[inside]]
            owner[better] = number
            best[inside] = np.maximum(best[inside], distance_weight)
        return owner


def filled(page: np.ndarray, valid: np.ndarray, value: float) -> np.ndarray:
    """Fill pixels without data; a page of `vispe.segment.out_of_core` fills its windows itself."""
    if not isinstance(page, np.ndarray):
        return page.filled(value)
    return page if valid.all() else np.where(valid[..., None], page, np.float32(value))
