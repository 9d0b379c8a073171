"""timm's `VisionTransformer` and `VisionTransformerDistilled` as they run with a positional encoding of vispe.

Conversion itself is in `vispe.hosts.timm_convert`.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from timm.layers import patch_dropout_forward, resample_abs_pos_embed
from timm.models import VisionTransformer, checkpoint
from timm.models.deit import VisionTransformerDistilled
from torch import Tensor, nn

from vispe.base import Additive, Encoding
from vispe.errors import OptionError, ShapeError, UnsupportedHost
from vispe.grid import Grid, Positions
from vispe.hosts.context import Context, HostState
from vispe.hosts.timm_attention import attentions, encodings_of, shared_encodings

_logger = logging.getLogger(__name__)
OVERRIDDEN = ("forward_features", "forward_intermediates", "_pos_embed", "_load_from_state_dict")


class HostedViT(VisionTransformer):
    """The parts of a timm ViT that change when it is converted."""

    vispe: HostState

    @property
    def _model_args(self) -> dict[str, Any]:
        """What timm's hub configuration saves; the encoding in it is always the one that the model has."""
        return self.__dict__.get("_model_args", {})

    @_model_args.setter
    def _model_args(self, args: dict[str, Any]) -> None:
        self.__dict__["_model_args"] = {**args, "pos_embed": self.vispe.saved}

    def forward_features(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Return the normed tokens (b, n, d) of images (b, c, height, width)."""
        x, context, _ = self._vispe_embed(x, attn_mask, is_causal)
        for block in self.blocks:
            x = self._vispe_block(block, x, context)
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
        """Return features of several blocks; arguments and results as in timm."""
        if output_fmt not in ("NCHW", "NLC"):
            raise OptionError(f"output_fmt must be NCHW or NLC, got {output_fmt!r}.")
        take, last = _taken(len(self.blocks), indices)
        x, context, shape = self._vispe_embed(x, attn_mask, is_causal)
        taken: list[Tensor] = []
        for i, block in enumerate(self.blocks[: last + 1] if stop_early else self.blocks):
            x = self._vispe_block(block, x, context)
            if i in take:
                taken.append(self.norm(x) if norm else x)
        p = self.num_prefix_tokens
        prefix, patches = [t[:, :p] for t in taken], [t[:, p:] for t in taken]
        if output_fmt == "NCHW":
            patches = [t.unflatten(1, shape).permute(0, 3, 1, 2).contiguous() for t in patches]
        with_prefix = return_prefix_tokens and p > 0
        if output_dict:
            result: dict[str, Any] = {"image_intermediates": patches}
            if with_prefix:
                result["image_intermediates_prefix"] = prefix
            return result if intermediates_only else {**result, "image_features": self.norm(x)}
        found: list[Any] = list(zip(patches, prefix, strict=True)) if with_prefix else patches
        return found if intermediates_only else (self.norm(x), found)

    def _vispe_embed(
        self, image: Tensor, mask: Tensor | None, is_causal: bool
    ) -> tuple[Tensor, Context | None, tuple[int, int]]:
        """Return tokens with their additive encodings, the context for the blocks, and the grid's shape."""
        x = self.patch_embed(image)
        if x.ndim == 4:
            shape = (x.shape[1], x.shape[2])
            x = x.flatten(1, 2)
        else:
            shape = tuple(self.patch_embed.grid_size)
        grid = Grid(shape, prefix=self.num_prefix_tokens, reference=self.vispe.reference)
        if x.shape[1] != grid.patches:
            raise ShapeError(
                f"The patch embedding gave {x.shape[1]} tokens for an image of {tuple(image.shape[-2:])} pixels but "
                f"its grid is {shape}; build the model with dynamic_img_size=True or call set_input_size."
            )
        pos = self.vispe.cache(grid, image)
        encodings = shared_encodings(self)
        for encoding in (*encodings, *self._vispe_layered()):
            pos = encoding.prepare(pos)
        extra = self.dist_token if isinstance(self, VisionTransformerDistilled) else self.reg_token
        prefix = [t for t in (self.cls_token, extra) if t is not None]
        x = torch.cat([*(t.expand(x.shape[0], -1, -1) for t in prefix), x], dim=1)
        if self.pos_embed is not None:
            x = x + self._vispe_abs_table(shape)
        for encoding in encodings:
            if isinstance(encoding, Additive):
                x = x + encoding.table(pos, image).to(x.dtype)
        x = self.pos_drop(x)
        x, pos = self._vispe_drop(x, pos)
        if self.grad_checkpointing and torch.compiler.is_compiling():
            pos.memo = None  # fresh while compiling, so no other forward pass loses it
        return self.norm_pre(x), Context(pos, encodings, mask, is_causal), shape

    def _vispe_layered(self) -> tuple[Encoding, ...]:
        """Return the per-layer encodings of the first layer that has them: one of each, to prepare positions."""
        if self.vispe.layered:
            for _, _, module in attentions(self):
                if module.pos_enc is not None:
                    return module.pos_enc.parts()
        return ()

    def _vispe_abs_table(self, shape: tuple[int, int]) -> Tensor:
        """Return timm's own absolute table for the grid, with zeros for prefix tokens that have no entry."""
        entries = 0 if self.no_embed_class else self.num_prefix_tokens
        old = self.patch_embed.grid_size
        table = resample_abs_pos_embed(
            self.pos_embed, new_size=shape, old_size=old, num_prefix_tokens=entries
        )
        missing = self.num_prefix_tokens - entries
        return torch.cat([table.new_zeros(1, missing, table.shape[-1]), table], 1) if missing else table

    def _vispe_drop(self, x: Tensor, pos: Positions) -> tuple[Tensor, Positions]:
        """Drop patches as timm does, and their coordinates with them."""
        drop = self.patch_drop
        if isinstance(drop, nn.Identity):
            return x, pos
        x, keep = patch_dropout_forward(x, drop.prob, drop.num_prefix_tokens, drop.ordered, drop.training)
        if keep is None:
            return x, pos
        prefix = torch.arange(drop.num_prefix_tokens, device=keep.device).expand(keep.shape[0], -1)
        return x, pos.gather(torch.cat([prefix, keep + drop.num_prefix_tokens], 1))

    def _vispe_block(self, block: nn.Module, x: Tensor, context: Context) -> Tensor:
        if self.vispe.inside:
            masks: tuple[Any, ...] = (context,)
        elif context.mask is None and not context.is_causal:
            masks = ()
        else:  # stock attention takes plain masks only
            masks = (context.mask, context.is_causal)
        if self.grad_checkpointing:  # positional, as reentrant checkpointing demands
            return checkpoint(block, x, *masks)
        return block(x, *masks)

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters that must not decay."""
        return super().no_weight_decay() | {
            f"{path}.{name}" for path, e in encodings_of(self) for name in e.no_weight_decay()
        }

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return timm's parameter groups, with the shared encodings in the stem."""
        groups = super().group_matcher(coarse=coarse)
        return {**groups, "stem": rf"{groups['stem']}|^pos_enc"}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for path, encoding in encodings_of(self):  # names of released checkpoints, beside their module
            encoding.adopt(state_dict, prefix + path.removesuffix("pos_enc"), f"{prefix}{path}.")
        ours = {
            f"{prefix}{path}.{name}": p
            for path, e in encodings_of(self)
            for name, p in e.state_dict().items()
        }
        if not any(name in state_dict for name in ours):  # a checkpoint of the stock model
            state_dict.update(ours)
            if self.pos_embed is None and state_dict.pop(f"{prefix}pos_embed", None) is not None:
                _logger.info(
                    "The checkpoint's absolute table is not used: this model has %s.", self.vispe.spec
                )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _new_hosted, (self.vispe.stock,), self.__getstate__()


def _taken(depth: int, indices: int | list[int] | None) -> tuple[set[int], int]:
    """Return which blocks to take features from, and the last of them."""
    if indices is None or isinstance(indices, int):
        count = depth if indices is None else indices
        take = list(range(depth - count, depth))
    else:
        take = [i + depth if i < 0 else i for i in indices]
    if not take or min(take) < 0 or max(take) >= depth:
        raise OptionError(f"Features of blocks {indices} were asked, but the model has {depth} blocks.")
    return set(take), max(take)


def _new_hosted(stock: type[VisionTransformer]) -> nn.Module:
    cls = hosted(stock)
    return cls.__new__(cls)


@cache
def hosted(stock: type[VisionTransformer]) -> type[VisionTransformer]:
    """Return the converted counterpart of a ViT class.

    Raises:
        UnsupportedHost: the class is a subclass of timm's that changes what vispe replaces.
    """
    known = (VisionTransformer, VisionTransformerDistilled)
    family = (
        VisionTransformerDistilled if issubclass(stock, VisionTransformerDistilled) else VisionTransformer
    )
    if stock not in known:
        changed = [n for n in OVERRIDDEN if getattr(stock, n) is not getattr(family, n)]
        if changed:
            raise UnsupportedHost(
                f"{stock.__name__} is a subclass of timm's {family.__name__} with its own {', '.join(changed)}, which "
                "vispe would replace; convert a plain timm ViT, or use vispe.Attention in your own blocks."
            )
    return type(
        f"Vispe{stock.__name__}", (HostedViT, stock), {"__module__": __name__, "__doc__": stock.__doc__}
    )


VispeVisionTransformer = hosted(VisionTransformer)
VispeVisionTransformerDistilled = hosted(VisionTransformerDistilled)
