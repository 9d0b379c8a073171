"""Converted vision towers of transformers, one class for each kind of forward pass."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids, get_vision_window_index

from vispe.errors import UnsupportedCombination
from vispe.grid import Grid, Positions
from vispe.hosts.common import fx_leaves
from vispe.hosts.common.context import Context
from vispe.hosts.common.packed_positions import packed
from vispe.hosts.transformers.vision.base_towers import ConvertedVisionTower, GridTower, VideoTower
from vispe.hosts.transformers.vision.families import pair
from vispe.hosts.transformers.vision.packed_tokens import PackedContext, seeded_prepare, split_chunks


class PackedTower(ConvertedVisionTower):
    """The towers of the Qwen family."""

    def forward(self, hidden_states: Tensor, grid_thw: Tensor, **kwargs: Any) -> Any:
        """Return the output of transformers for the concatenated patches of images and videos (tokens, d)."""
        self._vispe_check_layers()
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
        self._vispe_check_layers()
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
