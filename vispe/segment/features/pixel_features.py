"""One interface over filters and tokens: the features of any piece of a page, and of labelled pixels."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vispe.backbones.device import choose_device
from vispe.errors import InputError, OptionError, did_you_mean
from vispe.segment.classify.pixel_classifier import Linear
from vispe.segment.features import micro_features
from vispe.segment.features.filters import SIGMAS, Filters
from vispe.segment.features.filters3d import Filters3D, Stack
from vispe.segment.features.threads import in_order
from vispe.segment.features.tiles import STEP, blocks, lattice, window
from vispe.segment.features.token_features import TokenBasis, TokenMaps, TokenModel, token_maps

KINDS = ("filters", "tokens", "both")
BLOCK = 512
"""Side of the pieces that filters are computed in, in pixels, where no tile size is given."""

OF_TOKENS = ("token_stride", "token_shifts", "layers")
"""Options of tokens; None is the default."""

_LEAST = 64  # tiles are not halved below this, in pixels


@dataclass(frozen=True)
class FeatureConfig:
    """What decides the features of a pixel; JSON-able.

    Attributes:
        kind: `'filters'`, `'tokens'` or `'both'`.
        sigmas: scales of the filters, in pixels.
        model: `'vispe_micro'`, which comes with the package, or a timm model.
        pos_embed: positional encoding that replaces the model's own.
        weights: checkpoint file, `'random'` (timm), or None for the pretrained weights.
        fingerprint: SHA-256 of the weights that were used; checked when the model is loaded again.
        tile: side of a tile in pixels; None chooses.
        components: principal components of the tokens of a timm model.
        filters_3d: filters of the volume too, for Z stacks.
        token_stride: pixels between the tokens of a timm model, a divisor of its patch; the patch if None. There are
            (patch / stride)^2 times as many tokens, and attention costs the square of that.
        token_shifts: looks along each axis, each moved by a part of the stride; costs its square in passes. None is 2
            for a model of timm or open_clip with one map and an even stride, else 1.
        layers: blocks whose outputs are joined, negative from the end; the last if None.
    """

    kind: str = "filters"
    sigmas: tuple[float, ...] = SIGMAS
    model: str | None = None
    pos_embed: str | None = None
    weights: str | None = None
    fingerprint: str | None = None
    tile: int | None = None
    components: int = 32
    filters_3d: bool = False
    token_stride: int | None = None
    token_shifts: int | None = None
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            hint = did_you_mean(self.kind, KINDS)
            raise OptionError(f"features={self.kind!r} is not one of {', '.join(KINDS)}.{hint}")
        if self.kind != "filters" and not self.model:
            raise OptionError(
                f"features={self.kind!r} needs a model; give --model vispe_micro or a timm name."
            )
        for name in ("model", "pos_embed", "weights"):
            if self.kind == "filters" and getattr(self, name) is not None:
                value = getattr(self, name)
                raise OptionError(
                    f"{name}={value!r} has no effect on features=filters; use --features both or tokens with --model."
                )
        if self.filters_3d and self.kind == "tokens":
            raise OptionError("filters_3d has no effect on features=tokens; use --features both or filters.")
        if self.layers is not None:
            object.__setattr__(self, "layers", tuple(self.layers))
        self._check_tokens()
        if self.model == micro_features.NAME:
            micro_features.check_options(self.pos_embed, self.of_tokens())
        if self.tile is not None and self.tile < 16:
            raise OptionError(f"tile={self.tile} px is too small; use 16 or more, or leave it out.")

    def of_tokens(self) -> dict[str, Any]:
        """Return those of `token_stride`, `token_shifts` and `layers` that were given."""
        found = {name: getattr(self, name) for name in OF_TOKENS}
        return {name: value for name, value in found.items() if value is not None}

    def _check_tokens(self) -> None:
        """Raise OptionError for options of tokens that no model could have."""
        if self.kind == "filters" and (asked := self.of_tokens()):
            name, value = next(iter(asked.items()))
            raise OptionError(
                f"{name}={value!r} has no effect on features=filters; use --features both or tokens with --model."
            )
        for name in ("token_stride", "token_shifts"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise OptionError(
                    f"{name}={value!r} must be a whole number from 1 on; leave it out for the default."
                )
        if self.layers is not None and (not self.layers or len(set(self.layers)) < len(self.layers)):
            listed = ",".join(map(str, self.layers)) or "none"
            raise OptionError(
                f"layers={listed} names a block twice or none; name each block once, such as 5,8,11."
            )


class Features:
    """Computes features as a `FeatureConfig` says.

    Args:
        config: what to compute.
        seed: of random weights and of the sample that the basis is fitted on.
        device: torch device; `'auto'` takes a GPU when there is one.
        basis: principal components, when they come from a model file.

    Raises:
        InputError: weights are not the ones that the fingerprint names.
    """

    def __init__(
        self, config: FeatureConfig, *, seed: int = 0, device: str = "auto", basis: TokenBasis | None = None
    ) -> None:
        self.device = choose_device(device)
        self.seed, self.basis = seed, basis
        self._half = False
        self._filters = _filters(config, self.device)
        self.tile = config.tile
        self._model = None
        if config.kind != "filters":
            self._model = self._load(config)
            found = self._model.fingerprint()
            if config.fingerprint not in (None, found):
                raise InputError(
                    f"the weights of {config.model} are not those of the training (sha256 {found[:12]}, expected "
                    f"{config.fingerprint[:12]}); give the same checkpoint with --weights."
                )
            shifts = self._model.shifts if isinstance(self._model, TokenModel) else None
            config = replace(config, fingerprint=found, token_shifts=shifts)
        self.config = config

    @property
    def learns(self) -> bool:
        """Whether `fit` has anything to do."""
        return isinstance(self._model, TokenModel)

    def fit(self, pages: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Fit the principal components of the tokens to training pages; filters and vispe_micro need nothing.

        Args:
            pages: (h, w, c) float32 grey levels and (h, w) bool of pixels with data, for each page.
        """
        if isinstance(self._model, TokenModel):
            found = [self._maps(page, valid) for page, valid in pages]
            maps = [m for one in found if isinstance(one, TokenMaps) for m in one.maps]
            self.basis = TokenBasis.fit(maps, self.config.components, self.seed)

    def within(self, stack: Stack | None, number: int) -> "Features":
        """Return these features for page `number` of a stack, whose other pages 3D filters look at."""
        if stack is None or not isinstance(self._filters, Filters3D):
            return self
        found = copy(self)
        found._filters = self._filters.within(stack, number)
        return found

    def prepare(self, page: np.ndarray, valid: np.ndarray) -> "PreparedPage":
        """Run what needs the whole page: the model, tile by tile.

        Args:
            page: (h, w, c) float32 grey levels in [0, 1].
            valid: (h, w) bool, pixels with data.
        """
        maps = self._maps(page, valid) if self._model is not None else None
        return PreparedPage(page, valid, self._filters, maps, self.tile or BLOCK, self.device)

    def shrink(self) -> str | None:
        """Need less memory next time: half the tile, then bfloat16, then the CPU.

        Returns:
            What was done, in words; None when nothing is left to try.
        """
        side = self.tile or (self._model.tile if isinstance(self._model, TokenModel) else BLOCK)
        if side // 2 >= _LEAST and (self._model is None or self._model.flexible):
            self.tile = side // 2
            return f"out of memory: the tile was halved to {self.tile} px."
        on_gpu = self.device != "cpu"
        if on_gpu and self._model is not None and not self._half:
            self._half = True
            self._model = self._load(self.config)
            return "out of memory: the model runs in bfloat16 now."
        if on_gpu:
            self.device, self._half = "cpu", False
            self._model = self._load(self.config) if self._model is not None else None
            self._filters = _filters(self.config, self.device)
            return "out of memory: the work goes on on the CPU."
        return None

    def _load(self, config: FeatureConfig) -> TokenModel | micro_features.DenseModel:
        if config.model == micro_features.NAME:
            return micro_features.DenseModel(config.weights, self.device, self._half)
        named = {"pos_embed": config.pos_embed, "weights": config.weights, "layers": config.layers}
        named |= {"stride": config.token_stride, "shifts": config.token_shifts}
        return TokenModel(config.model or "", **named, seed=self.seed, device=self.device, half=self._half)

    def _maps(self, page: np.ndarray, valid: np.ndarray) -> TokenMaps | micro_features.DenseMaps:
        filled = _filled(page, valid, 0)
        if isinstance(self._model, micro_features.DenseModel):
            return micro_features.DenseMaps(self._model, filled, self.tile)
        maps = token_maps(self._model, filled, self.tile, self.basis)
        if self.basis is not None and maps.width != self.basis.mean.shape[0]:
            raise InputError(
                f"the image has {page.shape[-1]} channel(s) and gives {maps.width} values per token, but "
                f"the model was trained with {self.basis.mean.shape[0]}; choose channels with --channel."
            )
        return maps


class PreparedPage:
    """The features of one page, piece by piece; made by `Features.prepare`."""

    def __init__(
        self,
        page: np.ndarray,
        valid: np.ndarray,
        filters: Filters | None,
        maps: TokenMaps | micro_features.DenseMaps | None,
        block: int,
        device: str = "cpu",
    ) -> None:
        self._page = _filled(page, valid, np.nan)
        self._filters, self._maps, self._device = filters, maps, device
        height, self._width = valid.shape
        if maps is None:
            self.pieces = blocks(height, self._width, block)
        else:
            self.pieces = [maps.inside(i) for i in range(len(maps.regions))]

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know about this page."""
        return self._maps.notes if self._maps is not None else ()

    @property
    def threads(self) -> int:
        """Pieces that are worked on at once: one where the device uses all cores by itself."""
        return torch.get_num_threads() if self._device == "cpu" else 1

    def weight(self, number: int) -> np.ndarray | None:
        """Return the blending weight (rows, columns) of a piece; None where pieces do not overlap."""
        if self._maps is None or not self.overlapping:
            return None
        return window(*self._maps.regions[number].shape)[self._maps.crop(number)]

    @property
    def overlapping(self) -> bool:
        """Whether a pixel can lie in several pieces."""
        return self._maps is not None and len(self.pieces) > 1

    def compute(self, number: int) -> np.ndarray:
        """Return the features of a piece, (f, rows, columns) float32."""
        parts = []
        if self._filters is not None:
            parts.append(self._filters.planes(self._page, self.pieces[number]))
        if self._maps is not None:
            parts.append(self._maps.planes(number))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def sampled(self, number: int, planes: np.ndarray | None = None) -> np.ndarray:
        """Return the features (rows, columns, f) float32 of a piece on the lattice of `vispe.segment.features.sample_grid`.

        Args:
            number: of the piece.
            planes: its filters (f', rows, columns), where they are computed already.
        """
        piece = self.pieces[number]
        top, bottom, left, right = lattice(piece)
        # the point in the middle of each cell of the lattice, counted from the corner of the piece
        y, x = (
            np.mgrid[top:bottom, left:right] * STEP
            + STEP // 2
            - np.array([piece.top, piece.left])[:, None, None]
        )
        parts = []
        if self._filters is not None:
            planes = self._filters.planes(self._page, piece) if planes is None else planes
            parts.append(planes[:, y, x].transpose(1, 2, 0))
        if self._maps is not None:
            found = self._maps.at(number, y.ravel(), x.ravel())
            parts.append(found.reshape(*y.shape, found.shape[-1]))
        return np.concatenate(parts, -1)

    def scores(self, number: int, linear: Linear, look: Callable[[np.ndarray], None] | None = None) -> Tensor:
        """Return the scores of a linear classifier for a piece, (k, rows, columns) float32.

        `look` is called with the features of the piece on the lattice, as from `sampled`.
        """
        if look is not None and self._filters is None:
            look(self.sampled(number))
        if self._filters is None:
            found = self._maps.project(number, linear.weight, linear.mean)
            return found + linear.bias[:, None, None]
        filtered = self._filters.planes(self._page, self.pieces[number])
        if look is not None:
            look(self.sampled(number, filtered))
        planes = torch.from_numpy(filtered)
        own = len(planes)
        found = linear.scores(planes.flatten(1)).view(-1, *planes.shape[1:])
        if self._maps is not None:
            found += self._maps.project(number, linear.weight[:, own:], linear.mean[own:])
        return found

    def gather(self, mask: np.ndarray) -> np.ndarray:
        """Return the features (n, f) of the pixels in `mask` (h, w), row by row.

        A pixel in several tiles gets the features of the one that has it nearest to its middle.
        """
        return self.gather_places(np.flatnonzero(mask))

    def gather_places(self, places: np.ndarray) -> np.ndarray:
        """Return the features (n, f) as `gather`, of pixels given by y * width + x (n,), ascending."""
        if not len(places):
            raise InputError("no pixel was chosen; there is nothing to compute.")
        rows, columns = np.divmod(places, self._width)
        owner = self._owners(rows, columns)
        wanted = [(int(number), np.flatnonzero(owner == number)) for number in np.unique(owner)]

        def work(index: int) -> np.ndarray:
            number, own = wanted[index]
            y, x = rows[own], columns[own]
            found = []
            if self._filters is not None:
                found.append(self._filters.at(self._page, y, x))
            if self._maps is not None:
                piece = self.pieces[number]
                found.append(self._maps.at(number, y - piece.top, x - piece.left))
            return np.concatenate(found, 1)

        out: np.ndarray | None = None
        for (_, own), found in zip(wanted, in_order(work, len(wanted), self.threads), strict=True):
            out = np.empty((len(places), found.shape[1]), np.float32) if out is None else out
            out[own] = found
        return out

    def _owners(self, y: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Return the number of the piece that each pixel, in the order of rows, is nearest to the middle of."""
        owner = np.zeros(len(y), np.int32)
        best = np.full(len(y), -1, np.float32)
        for number, piece in enumerate(self.pieces):
            near = np.arange(*np.searchsorted(y, (piece.top, piece.bottom)))
            near = near[(x[near] >= piece.left) & (x[near] < piece.right)]
            if not len(near):
                continue
            weight = self.weight(number)
            own = 1 if weight is None else weight[y[near] - piece.top, x[near] - piece.left]
            better = near[own > best[near]]
            owner[better] = number
            best[near] = np.maximum(best[near], own)
        return owner


def _filters(config: FeatureConfig, device: str) -> Filters | None:
    """Build the filters of a configuration."""
    if config.kind == "tokens":
        return None
    return (Filters3D if config.filters_3d else Filters)(config.sigmas, device)


def _filled(page: np.ndarray, valid: np.ndarray, value: float) -> np.ndarray:
    """Give pixels without data a value; a page of `vispe.segment.out_of_core` does so itself, window by window."""
    if not isinstance(page, np.ndarray):
        return page.filled(value)
    return page if valid.all() else np.where(valid[..., None], page, np.float32(value))
