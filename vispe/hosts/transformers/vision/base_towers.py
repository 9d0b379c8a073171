"""Base classes of converted vision towers: initialisation of weights, and contexts of images and of videos."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from vispe.encodings.base import Encoding
from vispe.grid import Grid, Positions
from vispe.hosts.common import fx_leaves
from vispe.hosts.common.context import Context
from vispe.hosts.common.state_dict_loading import LoadsWeights
from vispe.hosts.transformers.signature import copy_signatures
from vispe.hosts.transformers.subclasses import stock_of
from vispe.hosts.transformers.vision.attention import ConvertedAttention
from vispe.hosts.transformers.vision.families import attentions, pair, prefix_of
from vispe.hosts.transformers.vision.packed_tokens import seeded_prepare
from vispe.hosts.transformers.vision.position_embeddings import table_names


class ConvertedVisionTower(LoadsWeights):
    """Base class of converted vision towers."""

    vispe_attentions = attentions
    vispe_layers = (ConvertedAttention,)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Copy the signature of `forward` from the stock class; callers inspect it for the inputs of a model."""
        super().__init_subclass__(**kwargs)
        if stock_of(cls) is not None:
            copy_signatures(cls, "forward")

    def _vispe_table_names(self) -> tuple[str, ...]:
        return table_names(self)

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise a module; the tower, which comes last, also initialises its encodings."""
        super()._init_weights(module)  # type: ignore[misc]
        for part in self.modules() if module is self else ():
            # buffers too: random frequencies that are not trained are loaded, and must not be drawn again
            if isinstance(part, Encoding) and not any(map(_loaded, (*part.parameters(), *part.buffers()))):
                part.reset_parameters()


class GridTower(ConvertedVisionTower):
    """Towers with a batch of images of one size, and patches in row-major order."""

    def _vispe_context(self, pixel_values: Tensor, keep: Tensor | None = None) -> Context:
        """Return the context of images (b, c, height, width); `keep` (b, m) are the indices of remaining patches."""
        self._vispe_check_layers()
        patch = pair(self.config.patch_size)
        shape = (pixel_values.shape[-2] // patch[0], pixel_values.shape[-1] // patch[1])
        grid = Grid(shape, prefix=prefix_of(self), reference=self.vispe.reference)
        prepare = seeded_prepare(self._vispe_all(), self.training)
        pos = prepare(self.vispe.cache(grid, pixel_values))
        pos = pos if keep is None else fx_leaves.gather(pos, keep)
        return Context(pos, self._vispe_shared(), None, False, rope=self.vispe.keep_rope)

    def _vispe_loop_grid(self, shape: tuple[int, ...], prefix: int | None) -> Grid:
        return Grid(
            shape, prefix=prefix_of(self) if prefix is None else prefix, reference=self.vispe.reference
        )


class VideoTower(ConvertedVisionTower):
    """Towers with videos of one size, and tokens of several frames, rows and columns each (tubelets)."""

    def _vispe_video_positions(self, frames: int, height: int, width: int, like: Tensor) -> Positions:
        """Return the positions of the tubelets of a video, not yet prepared."""
        self._vispe_check_layers()
        patch, config = pair(self.config.patch_size), self.config
        shape = (frames // config.tubelet_size, height // patch[0], width // patch[1])
        return self.vispe.cache(Grid(shape, reference=self.vispe.reference), like)

    def _vispe_loop_grid(self, shape: tuple[int, ...], prefix: int | None) -> Grid:
        return Grid(shape, prefix=prefix or 0, reference=self.vispe.reference)

    def _vispe_video_context(self, pos: Positions) -> Context:
        prepare = seeded_prepare(self._vispe_all(), self.training)
        return Context(prepare(pos), self._vispe_shared(), None, False, rope=self.vispe.keep_rope)


def _loaded(value: Tensor) -> bool:
    """Return whether transformers has loaded a parameter or buffer from a checkpoint."""
    return getattr(value, "_is_hf_initialized", False)
