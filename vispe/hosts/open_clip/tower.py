"""Converted image towers of open_clip.

Conversion itself is in `vispe.hosts.common.conversion.convert`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.fx
from open_clip.transformer import VisionTransformer
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vispe.encodings.base import Additive
from vispe.errors import OptionError
from vispe.grid import Grid, Positions
from vispe.hosts.common import fx_leaves, overlapping_patches
from vispe.hosts.common.context import Context
from vispe.hosts.common.conversion.converted_class import make_converted_class
from vispe.hosts.common.layer_access import feature_blocks
from vispe.hosts.common.state_dict_loading import LoadsWeights
from vispe.hosts.open_clip.attention import LAYERS, attentions

OVERRIDDEN = ("forward", "_embeds", "forward_intermediates", "lock", "_load_from_state_dict")


class ConvertedClipTower(LoadsWeights, VisionTransformer):
    """Mixin of converted image towers of open_clip."""

    vispe_attentions = attentions
    vispe_layers = LAYERS

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return the image features (b, output_dim) of images, and the tokens if `output_tokens`."""
        x, context, _ = self._vispe_embed(x)
        for i, block in enumerate(self.transformer.resblocks):
            x = self._vispe_block(i, block, x, context)
        pooled, tokens = self._pool(x)
        if self.proj is not None:
            pooled = pooled @ self.proj
        return (pooled, tokens) if self.output_tokens else pooled

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        stop_early: bool = False,
        normalize_intermediates: bool = False,
        intermediates_only: bool = False,
        output_fmt: str = "NCHW",
        output_extra_tokens: bool = False,
    ) -> dict[str, Tensor | list[Tensor]]:
        """Return features of several blocks; arguments and results as in open_clip.

        Raises:
            OptionError: there is no such block or output format.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise OptionError(f"output_fmt must be NCHW or NLC, got {output_fmt!r}.")
        blocks = self.transformer.resblocks
        selected, last = feature_blocks(len(blocks), indices, "tower")
        x, context, shape = self._vispe_embed(x)
        outputs: list[Tensor] = []
        for i, block in enumerate(blocks[: last + 1] if stop_early else blocks):
            x = self._vispe_block(i, block, x, context)
            if i in selected:
                outputs.append(self.ln_post(x) if normalize_intermediates else x)
        patches = [t[:, 1:] for t in outputs]
        if output_fmt == "NCHW":
            patches = [t.unflatten(1, shape).permute(0, 3, 1, 2).contiguous() for t in patches]
        output: dict[str, Tensor | list[Tensor]] = {"image_intermediates": patches}
        if output_extra_tokens:
            output["image_intermediates_prefix"] = [t[:, :1] for t in outputs]
        if intermediates_only:
            return output
        pooled, _ = self._pool(x)
        return {**output, "image_features": pooled if self.proj is None else pooled @ self.proj}

    def _vispe_embed(self, image: Tensor) -> tuple[Tensor, Context, tuple[int, int]]:
        """Return tokens with additive encodings (b, n, d), the context for the blocks, and the shape of the grid."""
        self._vispe_check_layers()
        image = fx_leaves.one_size(image)
        x = self.conv1(image)
        shape = (x.shape[2], x.shape[3])
        x = x.flatten(2).transpose(1, 2)
        encodings = self._vispe_shared()
        prepared_by = (self.vispe.reference, self._vispe_all(), self._vispe_cache(image))
        spacing = overlapping_patches.spacing_of(self.conv1)
        pos = fx_leaves.positions(image, x.shape[1], shape, 1, *prepared_by, None, spacing)
        x = torch.cat([self.class_embedding.to(x.dtype).expand(x.shape[0], 1, -1), x], dim=1)
        if self.positional_embedding is not None:
            table = self.positional_embedding
            if spacing is None:
                table = resampled(table, self.grid_size, shape)
            else:
                table = overlapping_patches.table_at(table[None], self.grid_size, shape, spacing, 1)[0]
            x = x + table.to(x.dtype)
        for encoding in encodings:
            if isinstance(encoding, Additive):
                x = fx_leaves.add(encoding, x, pos, image)
        x, pos = self._vispe_drop(x, pos)
        if self.transformer.grad_checkpointing and torch.compiler.is_compiling():
            pos.memo = None  # positions are not cached while compiling, so no other forward pass is affected
        return self.ln_pre(x), Context(pos, encodings, None, False), shape

    def _embeds(self, x: Tensor) -> Tensor:
        """Return the input tokens (b, n, d) of the blocks for images, with additive encodings.

        Raises:
            UnsupportedCombination: a sampler in training draws positions that would differ from those of
                attention.
        """
        self._vispe_refuse_draws("_embeds")
        return self._vispe_embed(x)[0]

    def _vispe_loop_grid(self, shape: tuple[int, ...], prefix: int | None) -> Grid:
        spacing, reference = overlapping_patches.spacing_of(self.conv1), self.vispe.reference
        return Grid(shape, prefix=1 if prefix is None else prefix, reference=reference, spacing=spacing)

    def _vispe_drop(self, x: Tensor, pos: Positions) -> tuple[Tensor, Positions]:
        """Drop patches by the same random numbers as open_clip, with their coordinates."""
        drop = self.patch_dropout
        if isinstance(drop, nn.Identity) or not self.training or drop.prob == 0:
            return x, pos
        b, patches = x.shape[0], x.shape[1] - 1
        count = max(1, int(patches * (1 - drop.prob)))
        index = torch.randn(b, patches).topk(count, dim=-1).indices.to(x.device) + 1
        keep = torch.cat([index.new_zeros(b, 1), index], 1)
        return x.gather(1, keep[..., None].expand(-1, -1, x.shape[-1])), pos.gather(keep)

    def _vispe_block(self, layer: int, block: nn.Module, x: Tensor, context: Context) -> Tensor:
        mask = context if self.vispe.inside else None
        if self.transformer.grad_checkpointing:
            x = checkpoint(block, x, attn_mask=mask, use_reentrant=False)
        else:
            x = block(x, attn_mask=mask)
        return context.mix(x, layer)

    def lock(self, unlocked_groups: int = 0, freeze_bn_stats: bool = False) -> None:
        """Freeze all but the last groups, as open_clip does; shared encodings belong to the stem."""
        detached = self.positional_embedding is None
        if detached:  # open_clip's groups contain the table
            self.positional_embedding = nn.Parameter(self.class_embedding.new_empty(0))
        try:
            super().lock(unlocked_groups=unlocked_groups, freeze_bn_stats=freeze_bn_stats)
        finally:
            if detached:
                self.register_parameter("positional_embedding", None)
        if self.pos_enc is not None and self.class_embedding.requires_grad:
            self.pos_enc.requires_grad_(True)
        for path in self.vispe.fixed:
            self.get_parameter(path).requires_grad_(False)

    def prune_intermediate_layers(self, *args: Any, **options: Any) -> list[int]:
        """Remove the blocks after the last requested feature, as open_clip does, and their parameters in encodings."""
        indices = super().prune_intermediate_layers(*args, **options)
        for encoding in self._vispe_shared():
            encoding.truncate(len(self.transformer.resblocks))
        return indices

    def _vispe_table_names(self) -> tuple[str, ...]:
        return ("positional_embedding",)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _new_converted, (self.vispe.stock,), self.__getstate__()


@torch.fx.wrap
def resampled(table: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """Return open_clip's table (1 + h * w, d) for another grid; the row of the class token is unchanged."""
    if tuple(old) == tuple(new):
        return table
    return resample_abs_pos_embed(table[None], new_size=list(new), old_size=list(old), num_prefix_tokens=1)[0]


def _new_converted(stock: type[VisionTransformer]) -> nn.Module:
    cls = converted_class(stock)
    return cls.__new__(cls)


@cache
def converted_class(stock: type[VisionTransformer]) -> type[ConvertedClipTower]:
    """Return the converted class of an image tower's class.

    Raises:
        UnsupportedHost: the class is a subclass of open_clip's that overrides methods replaced by vispe.
    """
    return make_converted_class(
        ConvertedClipTower, stock, VisionTransformer, OVERRIDDEN, "open_clip", "tower"
    )


VispeVisionTransformer = converted_class(VisionTransformer)
