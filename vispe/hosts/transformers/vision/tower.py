"""Converted vision towers of transformers.

Conversion itself is in `vispe.hosts.common.conversion.convert`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids, get_vision_window_index

from vispe.encodings.base import Encoding
from vispe.errors import UnsupportedCombination
from vispe.grid import Grid, Positions
from vispe.hosts.common import fx_leaves
from vispe.hosts.common.context import Context
from vispe.hosts.common.packed_positions import packed
from vispe.hosts.common.state_dict_loading import LoadsWeights
from vispe.hosts.transformers.signature import copy_signatures
from vispe.hosts.transformers.subclasses import stock_of
from vispe.hosts.transformers.vision.attention import (
    ClipAttention,
    ConvertedAttention,
    GridAttention,
    InternAttention,
    InternEncoder,
    InternLayer,
    JepaAttention,
    JepaLayer,
    PackedAttention,
    VideoMaeAttention,
)
from vispe.hosts.transformers.vision.dense_prediction import (
    DptEncoder,
    NestedEncoder,
    NestedLayer,
    SapiensAttention,
)
from vispe.hosts.transformers.vision.families import attentions, family_of, pair, prefix_of
from vispe.hosts.transformers.vision.packed_tokens import PackedContext, seeded_prepare, split_chunks
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


def _loaded(value: Tensor) -> bool:
    """Return whether transformers has loaded a parameter or buffer from a checkpoint."""
    return getattr(value, "_is_hf_initialized", False)


class PackedTower(ConvertedVisionTower):
    """The towers of the Qwen family."""

    def forward(self, hidden_states: Tensor, grid_thw: Tensor, **kwargs: Any) -> Any:
        """Return the output of transformers for the concatenated patches of images and videos (tokens, d)."""
        ids = get_vision_position_ids(grid_thw, self.spatial_merge_size, kwargs=kwargs)
        ends = get_vision_cu_seqlens(grid_thw, kwargs=kwargs)
        kwargs.update(position_ids=ids, cu_seqlens=ends)
        grids = [(int(t), int(h), int(w)) for t, h, w in grid_thw.tolist()]
        device, state = hidden_states.device, self.vispe
        prepare = seeded_prepare(self._vispe_all(), self.training)

        def bound(pos: Positions) -> Context:
            return Context(prepare(pos), self._vispe_shared(), None, False)

        windows, global_layers = None, ()
        if hasattr(self, "fullatt_block_indexes"):
            sizes = (self.spatial_merge_size, self.window_size, self.patch_size)
            order, window_ends = get_vision_window_index(grid_thw, *sizes, kwargs=kwargs)
            kwargs.update(window_index=order, cu_window_seqlens=window_ends)
            # windows are permutations of merge units of spatial_merge_size squared tokens each
            unit, order = self.spatial_merge_size**2, order.to(ids.device)
            ids = ids.unflatten(0, (-1, unit)).index_select(0, order).flatten(0, 1)
            windows = split_chunks(ids, window_ends, grids, device, bound, state.reference)
            global_layers = self.fullatt_block_indexes
        frames = split_chunks(ids, ends, grids, device, bound, state.reference)
        context = PackedContext(frames, windows, global_layers, state.keep_rope)
        return super().forward(hidden_states, grid_thw, vispe_context=context, **kwargs)


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


class PlainTower(GridTower):
    """ViT, DINOv2, DINOv3 and similar models."""

    def forward(self, pixel_values: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the output of transformers for images (b, c, height, width)."""
        pixel_values = fx_leaves.one_size(pixel_values)
        context = self._vispe_context(pixel_values)
        return super().forward(pixel_values, *args, vispe_context=context, **kwargs)


class RadioTower(GridTower):
    """RADIO, for images of one size."""

    def forward(self, pixel_values: Tensor, image_grid_hw: Tensor | None = None, **kwargs: Any) -> Any:
        """Return the output of transformers for images (b, c, height, width).

        Raises:
            UnsupportedCombination: patches of images of different sizes are packed.
        """
        if image_grid_hw is not None:
            raise UnsupportedCombination(
                f"{type(self).__qualname__}: packed images are not supported after conversion, got image_grid_hw. Pass "
                "images of one size (b, c, height, width)."
            )
        pixel_values = fx_leaves.one_size(pixel_values)
        return super().forward(pixel_values, vispe_context=self._vispe_context(pixel_values), **kwargs)


class MaskedTower(GridTower):
    """The encoder of ViTMAE, with a random subset of the patches."""

    def forward(self, pixel_values: Tensor, noise: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """Return the output of transformers for images (b, c, height, width); noise (b, n) selects patches."""
        pixel_values, patch = fx_leaves.one_size(pixel_values), pair(self.config.patch_size)
        patches = (pixel_values.shape[-2] // patch[0]) * (pixel_values.shape[-1] // patch[1])
        # the noise is drawn here, because positions depend on the selected patches
        if noise is None:
            noise = torch.rand(pixel_values.shape[0], patches, device=pixel_values.device)
        keep = noise.argsort(1)[:, : int(patches * (1 - self.config.mask_ratio))]
        context = self._vispe_context(pixel_values, keep)
        return super().forward(pixel_values, noise, *args, vispe_context=context, **kwargs)


class ClipTower(GridTower):
    """The towers of CLIP and SigLIP."""

    def forward(self, pixel_values: Tensor, interpolate_pos_encoding: bool = False, **kwargs: Any) -> Any:
        """Return the output of transformers for images (b, c, height, width)."""
        pixel_values = fx_leaves.one_size(pixel_values)
        kwargs["vispe_context"] = self._vispe_context(pixel_values)
        return super().forward(pixel_values, interpolate_pos_encoding=interpolate_pos_encoding, **kwargs)


class PatchesTower(ConvertedVisionTower):
    """The tower of SigLIP 2, with a separate grid for each image, and padding after its patches."""

    def forward(
        self, pixel_values: Tensor, pixel_attention_mask: Tensor, spatial_shapes: Tensor, **kwargs: Any
    ) -> Any:
        """Return the output of transformers for patches (b, n, d) of images with grids (b, 2) of rows and columns."""
        sizes = [(int(h), int(w)) for h, w in spatial_shapes.tolist()]
        index = torch.arange(pixel_values.shape[1], device=pixel_values.device)
        columns = spatial_shapes[:, 1:].to(index.device)
        coord = torch.stack([index // columns, index % columns], -1)
        valid = index < spatial_shapes.prod(1).to(index.device)[:, None]
        state = self.vispe

        def positions(size: tuple[int, int]) -> Positions:
            return state.cache(Grid(size, reference=state.reference), pixel_values)

        prepare = seeded_prepare(self._vispe_all(), self.training)
        pos = prepare(packed(coord * valid[..., None], valid, sizes, self._vispe_all(), positions))
        context = Context(pos, self._vispe_shared(), None, False, mixed=len(set(sizes)) > 1)
        return super().forward(
            pixel_values, pixel_attention_mask, spatial_shapes, vispe_context=context, **kwargs
        )


class VideoTower(ConvertedVisionTower):
    """Towers with videos of one size, and tokens of several frames, rows and columns each (tubelets)."""

    def _vispe_video_positions(self, frames: int, height: int, width: int, like: Tensor) -> Positions:
        """Return the positions of the tubelets of a video, not yet prepared."""
        patch, config = pair(self.config.patch_size), self.config
        shape = (frames // config.tubelet_size, height // patch[0], width // patch[1])
        return self.vispe.cache(Grid(shape, reference=self.vispe.reference), like)

    def _vispe_loop_grid(self, shape: tuple[int, ...], prefix: int | None) -> Grid:
        return Grid(shape, prefix=prefix or 0, reference=self.vispe.reference)

    def _vispe_video_context(self, pos: Positions) -> Context:
        prepare = seeded_prepare(self._vispe_all(), self.training)
        return Context(prepare(pos), self._vispe_shared(), None, False, rope=self.vispe.keep_rope)


class VideoMaeTower(VideoTower):
    """The tower of VideoMAE, whose blocks are called here, as the stock forward pass passes no keywords to them."""

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(self, pixel_values: Tensor, bool_masked_pos: Tensor | None = None, **kwargs: Any) -> Any:
        """Return the output of transformers for videos (b, t, c, height, width), optionally with masked tubelets."""
        del kwargs  # read by the decorators, as in transformers
        pixel_values = fx_leaves.one_size(pixel_values)
        frames, _, height, width = pixel_values.shape[1:]
        pos = self._vispe_video_positions(frames, height, width, pixel_values)
        if bool_masked_pos is not None:
            # indices of the visible tubelets in order; their number is the same for all videos
            visible = int((~bool_masked_pos[0]).sum())
            pos = fx_leaves.gather(pos, bool_masked_pos.long().argsort(dim=1, stable=True)[:, :visible])
        x = self.embeddings(pixel_values, bool_masked_pos)
        x = self.encoder(x, vispe_context=self._vispe_video_context(pos)).last_hidden_state
        output = sys.modules[type(self).__module__].BaseModelOutput
        return output(last_hidden_state=x if self.layernorm is None else self.layernorm(x))


class JepaTower(VideoTower):
    """The encoder of V-JEPA 2; its predictor is not changed."""

    def forward(self, pixel_values_videos: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the output of transformers for videos (b, t, c, height, width)."""
        pixel_values_videos = fx_leaves.one_size(pixel_values_videos)
        frames, _, height, width = pixel_values_videos.shape[1:]
        repeats = self.config.tubelet_size  # shorter videos are repeated this number of times
        frames = frames * repeats if frames < repeats else frames
        pos = self._vispe_video_positions(frames, height, width, pixel_values_videos)
        return super().forward(
            pixel_values_videos, *args, vispe_context=self._vispe_video_context(pos), **kwargs
        )


class InternTower(GridTower):
    """The tower of InternVL, whose blocks are called here, as the stock forward pass passes no keywords to them."""

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(self, pixel_values: Tensor, bool_masked_pos: Tensor | None = None, **kwargs: Any) -> Any:
        """Return the output of transformers for images (b, c, height, width)."""
        del kwargs  # read by the decorators, as in transformers
        pixel_values = fx_leaves.one_size(pixel_values)
        x = self.embeddings(pixel_values, bool_masked_pos=bool_masked_pos)
        x = self.encoder(x, vispe_context=self._vispe_context(pixel_values)).last_hidden_state
        output = sys.modules[type(self).__module__].InternVLVisionModelOutputWithPooling
        return output(last_hidden_state=self.layernorm(x))


_INTERN = (("encoder", InternEncoder), ("encoder.layer.*", InternLayer))
_NESTED = (("encoder", NestedEncoder), ("encoder.layer.*", NestedLayer))
# kind of a family: mixins of the tower, of its attention layers, and of other modules by path
SWAPS: dict[
    str, tuple[type[ConvertedVisionTower], type[nn.Module], tuple[tuple[str, type[nn.Module]], ...]]
] = {
    "packed": (PackedTower, PackedAttention, ()),
    "clip": (ClipTower, ClipAttention, ()),
    "grid": (PlainTower, GridAttention, ()),
    "plain": (PlainTower, ClipAttention, ()),
    "self": (PlainTower, VideoMaeAttention, ()),
    "dpt": (PlainTower, VideoMaeAttention, (("encoder", DptEncoder),)),
    "nested": (PlainTower, VideoMaeAttention, _NESTED),
    "radio": (RadioTower, GridAttention, ()),
    "nested_radio": (RadioTower, VideoMaeAttention, _NESTED),
    "sapiens": (PlainTower, SapiensAttention, ()),
    "masked": (MaskedTower, GridAttention, ()),
    "intern": (InternTower, InternAttention, _INTERN),
    "patches": (PatchesTower, ClipAttention, ()),
    "film": (VideoMaeTower, VideoMaeAttention, ()),
    "jepa": (JepaTower, JepaAttention, (("encoder.layer.*", JepaLayer),)),
}


def swapped(tower: nn.Module) -> Iterator[tuple[str, nn.Module, type[nn.Module]]]:
    """Yield (path, module, mixin) of every module inside a tower whose class is replaced."""
    _, attention, others = SWAPS[family_of(tower).kind]
    yield from ((path, module, attention) for _, path, module in attentions(tower))
    for path, mixin in others:
        if path.endswith(".*"):
            yield from ((path, block, mixin) for block in tower.get_submodule(path[:-2]))
        else:
            yield path, tower.get_submodule(path), mixin
