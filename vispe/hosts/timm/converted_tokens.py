"""Forward pass of converted timm models that embed an image, run blocks and normalise: ViT and Eva."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx
from timm.layers import resample_abs_pos_embed
from timm.models import checkpoint
from torch import Tensor, nn

from vispe.encodings.base import Additive
from vispe.errors import OptionError
from vispe.grid import Positions
from vispe.hosts.common import fx_leaves, overlapping_patches
from vispe.hosts.common.context import Context
from vispe.hosts.common.layer_access import feature_blocks
from vispe.hosts.timm.converted import ConvertedTimm

torch.fx.wrap("resample_abs_pos_embed")  # timm registers this function as a leaf of torch.fx as well


class ConvertedTokens(ConvertedTimm):
    """Forward pass of families that embed an image, run blocks and normalise; every block gets a `Context`."""

    def forward_features(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Return the normalised tokens (b, n, d) of images (b, c, height, width)."""
        x, context, _ = self._vispe_embed(x, attn_mask, is_causal)
        for i, block in enumerate(self.blocks):
            x = self._vispe_block(block, x, context, i)
        return self.norm(x)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Any:
        """Return features of several blocks; arguments and results as in timm.

        Raises:
            OptionError: there is no such block or output format.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise OptionError(f"output_fmt must be NCHW or NLC, got {output_fmt!r}.")
        selected, last = feature_blocks(len(self.blocks), indices)
        x, context, shape = self._vispe_embed(x, attn_mask, is_causal)
        outputs: list[Tensor] = []
        for i, block in enumerate(self.blocks[: last + 1] if stop_early else self.blocks):
            x = self._vispe_block(block, x, context, i)
            if i in selected:
                outputs.append(self.norm(x) if norm else x)
        p = self.num_prefix_tokens
        prefix, patches = [t[:, :p] for t in outputs], [t[:, p:] for t in outputs]
        if output_fmt == "NCHW":
            patches = [t.unflatten(1, shape).permute(0, 3, 1, 2).contiguous() for t in patches]
        with_prefix = return_prefix_tokens and p > 0
        if output_dict:
            result: dict[str, Any] = {"image_intermediates": patches}
            if with_prefix:
                result["image_intermediates_prefix"] = prefix
            return result if intermediates_only else {**result, "image_features": self.norm(x)}
        features: list[Any] = list(zip(patches, prefix, strict=True)) if with_prefix else patches
        return features if intermediates_only else (self.norm(x), features)

    def _vispe_embed(
        self, image: Tensor, mask: Tensor | None, is_causal: bool
    ) -> tuple[Tensor, Context, tuple[int, int]]:
        """Return tokens with additive encodings (b, n, d), the context for the blocks, and the shape of the grid."""
        self._vispe_check_layers()
        image = fx_leaves.one_size(image)
        if not isinstance(is_causal, torch.fx.Proxy):
            is_causal = bool(is_causal)  # a tensor in legacy ONNX export
        x, shape = self._vispe_flattened(self.patch_embed(image))
        any_size = not (self.dynamic_img_size or getattr(self.patch_embed, "strict_img_size", True))
        pos = self._vispe_positions(image, x, shape, self.patch_embed if any_size else None)
        x = self._vispe_tokens(x, shape, pos, image)
        x, pos, rope = self._vispe_drop(x, pos, self._vispe_rope(shape))
        if self.grad_checkpointing and torch.compiler.is_compiling():
            pos.memo = None  # positions are not cached while compiling, so no other forward pass is affected
        return self.norm_pre(x), Context(pos, self._vispe_shared(), mask, is_causal, rope), shape

    def _pos_embed(self, x: Tensor) -> Tensor:
        """Return tokens (b, n, d) of patches with additive encodings; arguments as in timm.

        Raises:
            ShapeError: the patches do not match the grid, or an encoding reads the image.
            UnsupportedCombination: a sampler in training draws positions that would differ from those of
                attention.
        """
        return self._vispe_assemble(x)[0]

    def _vispe_assemble(self, x: Tensor) -> tuple[Tensor, Positions, tuple[int, int]]:
        """Return tokens, positions and grid of patches, for callers that run the blocks themselves."""
        self._vispe_refuse_draws("_pos_embed")
        x, shape = self._vispe_flattened(x)
        pos = self._vispe_positions(x, x, shape, None)
        return self._vispe_tokens(x, shape, pos, None), pos, shape

    def _vispe_flattened(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Return the output of the patch embedding as tokens (b, n, d), and the shape of the grid."""
        if self.dynamic_img_size:
            return x.flatten(1, 2), (x.shape[1], x.shape[2])
        return x, tuple(self.patch_embed.grid_size)

    def _vispe_positions(
        self, source: Tensor, x: Tensor, shape: tuple[int, int], embed: nn.Module | None
    ) -> Positions:
        """Return the prepared positions of tokens (b, n, d); `source` and `embed` as in `fx_leaves.positions`."""
        prepared_by = (self.vispe.reference, self._vispe_all(), self._vispe_cache(source))
        return fx_leaves.positions(
            source, x.shape[1], shape, self.num_prefix_tokens, *prepared_by, embed, self._vispe_spacing
        )

    def _vispe_tokens(
        self, x: Tensor, shape: tuple[int, int], pos: Positions, image: Tensor | None
    ) -> Tensor:
        """Return prefix tokens and patches (b, n, d) with the absolute table and all additive encodings."""
        prefix = [t for t in (self.cls_token, self._vispe_second_token()) if t is not None]
        if prefix:
            x = torch.cat([*(t.expand(x.shape[0], -1, -1) for t in prefix), x], dim=1)
        if self.pos_embed is not None:
            x = x + self._vispe_abs_table(shape)
        for encoding in self._vispe_shared():
            if isinstance(encoding, Additive):
                x = fx_leaves.add(encoding, x, pos, image)
        return self.pos_drop(x)

    def _vispe_second_token(self) -> Tensor | None:
        """Return the tokens (1, m, d) after the class token, if any."""
        return self.reg_token

    def _vispe_rope(self, shape: tuple[int, int]) -> Any:
        """Return the model's own rotary embedding for a grid; None if none is in use."""
        del shape

    def _vispe_drop(self, x: Tensor, pos: Positions, rope: Any) -> tuple[Tensor, Positions, Any]:
        """Drop patches as timm does, with their coordinates and rotations."""
        raise NotImplementedError

    @property
    def _vispe_spacing(self) -> tuple[float, float] | None:
        return overlapping_patches.spacing_of(getattr(self.patch_embed, "proj", None))

    def _vispe_abs_table(self, shape: tuple[int, int]) -> Tensor:
        """Return timm's own absolute table for the grid (1, n, d), with zeros for prefix tokens without an entry."""
        entries = 0 if self.no_embed_class else self.num_prefix_tokens
        old = self.patch_embed.grid_size
        if self._vispe_spacing is None:
            table = resample_abs_pos_embed(self.pos_embed, shape, old, entries)
        else:
            table = overlapping_patches.table_at(self.pos_embed, old, shape, self._vispe_spacing, entries)
        missing = self.num_prefix_tokens - entries
        return torch.cat([table.new_zeros(1, missing, table.shape[-1]), table], 1) if missing else table

    def _vispe_block(self, block: nn.Module, x: Tensor, context: Context, layer: int) -> Tensor:
        """Return the tokens (b, n, d) after a block and the mixing encodings behind it."""
        arguments = self._vispe_arguments(context, layer)
        if self.grad_checkpointing:  # positional, as reentrant checkpointing requires
            return context.mix(checkpoint(block, x, *arguments), layer)
        return context.mix(block(x, *arguments), layer)

    def _vispe_arguments(self, context: Context, layer: int) -> tuple[Any, ...]:
        """Return the positional arguments of a block after the tokens."""
        del layer
        if self.vispe.inside:
            return (context,)
        if context.mask is None and not context.is_causal:
            return ()
        return (context.mask, context.is_causal)  # stock attention accepts tensor masks only
