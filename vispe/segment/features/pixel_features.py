"""Common interface of filters and tokens: features of any piece of a page, and of labelled pixels."""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

import numpy as np

from vispe.backbones.device import choose_device
from vispe.errors import InputError, OptionError, counted
from vispe.segment.features import micro_features
from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.features.filters.filters2d import Filters
from vispe.segment.features.filters.filters3d import Filters3D, Stack
from vispe.segment.features.prepared_page import PreparedPage, filled
from vispe.segment.features.stored_features import StoredFeatures, StoredMaps
from vispe.segment.features.token_basis import TokenBasis
from vispe.segment.features.token_features import TokenMaps, TokenModel, token_maps

BLOCK = 512
"""Side in pixels of the blocks in which filters are computed, by default."""


_LEAST = 64  # smallest side of a tile, in pixels


class Features:
    """Feature extractor of a `FeatureConfig`.

    Args:
        config: the configuration.
        seed: seed of random weights and of the sample for the basis.
        device: torch device; `'auto'` uses a GPU if available.
        basis: principal components, when loaded from a model file.

    Attributes:
        stored: model outputs of pages, computed ahead; None computes all.

    Raises:
        InputError: the weights do not match the fingerprint.
    """

    def __init__(
        self, config: FeatureConfig, *, seed: int = 0, device: str = "auto", basis: TokenBasis | None = None
    ) -> None:
        self.device = choose_device(device)
        self.stored: StoredFeatures | None = None
        self.seed, self.basis = seed, basis
        self._half = False
        self._filters = _filters(config, self.device)
        self.tile = config.tile
        self._model = None
        if config.kind != "filters":
            self._model = self._load(config)
            fingerprint = self._model.fingerprint()
            if config.fingerprint not in (None, fingerprint):
                raise InputError(
                    f"the weights of {config.model} differ from those used in training (sha256 {fingerprint[:12]}, "
                    f"expected {config.fingerprint[:12]}). Pass the same checkpoint with weights."
                )
            shifts = self._model.shifts if isinstance(self._model, TokenModel) else None
            config = replace(config, fingerprint=fingerprint, token_shifts=shifts)
        self.config = config

    @property
    def learns(self) -> bool:
        """Whether `fit` learns parameters."""
        return isinstance(self._model, TokenModel)

    def filter_scale(self, channels: int) -> tuple[int, float] | None:
        """Return the number of filters, and the factor of their standardised values for a linear classifier.

        A colour image has three times the filters of a grey image, but as many features of the model. Without a factor
        the filters would outweigh them, because the penalty counts features. None: all features count equally.
        """
        separate = isinstance(self._model, micro_features.DenseModel) and channels != 3
        if self._filters is None or self._model is None or channels == 1 or separate:
            return None
        return len(self._filters.names(channels)), channels**-0.5

    def filter_names(self, channels: int) -> list[str]:
        """Return the names of the filters, which precede the features of the model."""
        return [] if self._filters is None else self._filters.names(channels)

    def fit(self, pages: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Fit the principal components of tokens to training pages; a no-op for filters and vispe_micro.

        Args:
            pages: grey levels (h, w, c) float32 and mask of pixels with data (h, w) bool, for each page.
        """
        if isinstance(self._model, TokenModel):
            maps_of_pages = [self._maps(page, valid) for page, valid in pages]
            maps = [
                m for page_maps in maps_of_pages if isinstance(page_maps, TokenMaps) for m in page_maps.maps
            ]
            self.basis = TokenBasis.fit(maps, self.config.components, self.seed)

    def within(self, stack: Stack | None, number: int) -> "Features":
        """Return these features for page `number` of a stack, whose neighbouring pages 3D filters need."""
        if stack is None or not isinstance(self._filters, Filters3D):
            return self
        features = copy(self)
        features._filters = self._filters.within(stack, number)
        return features

    def prepare(self, page: np.ndarray, valid: np.ndarray) -> PreparedPage:
        """Run the parts that need the complete page: the model, tile by tile.

        Args:
            page: (h, w, c) float32 grey levels in [0, 1].
            valid: (h, w) bool, pixels with data.
        """
        maps = self._maps(page, valid) if self._model is not None else None
        return PreparedPage(page, valid, self._filters, maps, self.tile or BLOCK, self.device)

    def model_maps(
        self, page: np.ndarray, valid: np.ndarray
    ) -> tuple[TokenMaps | micro_features.DenseMaps, np.ndarray]:
        """Return the outputs of the model for a page, and its input (h, w, c) without missing values.

        Raises:
            OptionError: there is no model.
        """
        if self._model is None:
            raise OptionError(
                "features=filters has no model whose outputs could be stored. Use features=both or tokens."
            )
        return self._maps(page, valid), filled(page, valid, 0)

    def shrink(self) -> str | None:
        """Reduce the memory of the next attempt: half the tile, then bfloat16, then the CPU.

        Returns:
            Description of the reduction; None if no further reduction is possible.
        """
        side = self.tile or (self._model.tile if isinstance(self._model, TokenModel) else BLOCK)
        # a model with a fixed input size cannot use smaller tiles
        if side // 2 >= _LEAST and (self._model is None or self._model.flexible):
            self.tile = side // 2
            return f"out of memory: the tile was halved to {self.tile} px."
        on_gpu = self.device != "cpu"
        if on_gpu and self._model is not None and not self._half:
            self._half = True
            self._model = self._load(self.config)
            return "out of memory: the model now runs in bfloat16."
        if on_gpu:
            self.device, self._half = "cpu", False
            self._model = self._load(self.config) if self._model is not None else None
            self._filters = _filters(self.config, self.device)
            return "out of memory: continuing on the CPU."
        return None

    def _load(self, config: FeatureConfig) -> TokenModel | micro_features.DenseModel:
        if config.model == micro_features.NAME:
            return micro_features.DenseModel(config.weights, self.device, self._half)
        options = {"pos_embed": config.pos_embed, "weights": config.weights, "layers": config.layers}
        options |= {"stride": config.token_stride, "shifts": config.token_shifts}
        return TokenModel(config.model or "", **options, seed=self.seed, device=self.device, half=self._half)

    def _maps(self, page: np.ndarray, valid: np.ndarray) -> TokenMaps | micro_features.DenseMaps | StoredMaps:
        # the model needs finite input: no data is shown as black
        finite = filled(page, valid, 0)
        load = None if self.stored is None or self._half else self.stored.find(finite, self.tile)
        if isinstance(self._model, micro_features.DenseModel):
            maps = micro_features.DenseMaps(self._model, finite, self.tile)
            return maps if load is None else StoredMaps(maps, load)
        maps = token_maps(self._model, finite, self.tile, self.basis, load)
        if self.basis is not None and maps.width != self.basis.mean.shape[0]:
            raise InputError(
                f"the image has {counted(page.shape[-1], 'channel')}, which give {counted(maps.width, 'feature')} "
                f"per token, but the model was trained with {self.basis.mean.shape[0]}. Select channels with channel."
            )
        return maps


def _filters(config: FeatureConfig, device: str) -> Filters | None:
    if config.kind == "tokens":
        return None
    return (Filters3D if config.filters_3d else Filters)(config.sigmas, device)
