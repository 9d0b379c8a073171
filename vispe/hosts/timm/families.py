"""Families of convertible timm models, and access to their own position information."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import DiffAttention, resample_abs_pos_embed
from timm.models import Eva, NaFlexVit, VisionTransformer
from timm.models.naflexvit import NaFlexEmbeds
from timm.models.vision_transformer import DiffParallelScalingBlock
from torch import nn

from vispe.encodings.base import Additive, Biased, Encoding
from vispe.encodings.registry import encoding_class
from vispe.errors import UnsupportedCombination, UnsupportedHost, counted
from vispe.grid import Grid
from vispe.hosts.common.context import HostState
from vispe.hosts.common.conversion.training_grid import with_training_grid
from vispe.hosts.common.host_family import HostFamily, Layers, table_like
from vispe.hosts.common.layer_access import layer_in
from vispe.hosts.timm import eva, naflex, vit
from vispe.hosts.timm.attention import SWAPS, attentions, stock_type


@dataclass(frozen=True)
class _Timm(HostFamily):
    """A family of timm models; the defaults are those of plain ViTs.

    Attributes:
        base: timm's class.
        converted_class: function from a model class to its converted class.
        overridden: methods that the converted class replaces.
        mask_at: index of the mask among the arguments of a block after the tokens; None for any.
        has_late_prefix: whether prefix tokens can be excluded from the first blocks.
        table_keyword: value of timm's own `pos_embed` argument for an absolute table.
    """

    base: type[nn.Module]
    converted_class: Callable[[Any], type[Any]]
    overridden: tuple[str, ...]
    mask_at: int | None = 0
    has_late_prefix: bool = False
    table_keyword: str | None = None

    builder = "timm.create_model(...)"
    known = tuple(SWAPS)

    stock_type = staticmethod(stock_type)
    attentions = staticmethod(attentions)

    def swaps(self, model: Any) -> Iterator[tuple[str, nn.Module, type[Any] | None]]:
        return ((path, module, SWAPS.get(stock_type(module))) for _, path, module in attentions(model))

    def grid(self, model: Any) -> tuple[int, ...] | None:
        """Return the grid of the training resolution; None if the model has no fixed grid."""
        grid = model.patch_embed.grid_size
        return None if grid is None else tuple(grid)

    def reference(self, model: Any) -> tuple[int, ...] | None:
        """Return the grid of pretraining; None if the model does not store one.

        A model built for another image size rescales the coordinates of its rotary embedding to this grid.
        """
        shape = getattr(getattr(model, "rope", None), "ref_feat_shape", None)
        return None if shape is None else tuple(shape)

    def facts(self, model: Any, layers: Layers) -> dict[str, Any]:
        return {
            "dim": model.embed_dim,
            "num_heads": getattr(layers[0][2], "num_heads", None) if layers else None,
            "head_dim": next((m.head_dim for _, _, m in layers if hasattr(m, "head_dim")), None),
            "depth": len(model.blocks),
            "grid": self.grid(model),
        }

    def grid_text(self, model: Any) -> str:
        tokens = model.num_prefix_tokens
        return f"{self.grid(model)}, trained at {model.vispe.reference}, {counted(tokens, 'prefix token')}"

    def has_absolute_table(self, model: Any) -> bool:
        return model.pos_embed is not None

    def detach_table(self, model: Any) -> Any:
        detached = (model.pos_embed, tuple(model.patch_embed.grid_size))
        model.register_parameter("pos_embed", None)
        return detached

    def attach_table(self, model: Any, detached: Any) -> None:
        table, old = detached
        grid = tuple(model.patch_embed.grid_size)
        prefix = 0 if model.no_embed_class else model.num_prefix_tokens

        def resample(values: torch.Tensor) -> torch.Tensor:
            return resample_abs_pos_embed(values, new_size=grid, old_size=old, num_prefix_tokens=prefix)

        model.pos_embed = table_like(table, next(model.parameters()), resample if grid != old else None)

    def has_rope(self, model: Any) -> bool:
        return getattr(model, "rope", None) is not None

    def detach_rope(self, model: Any) -> tuple[nn.Module, torch.dtype]:
        detached = (model.rope, next(model.parameters()).dtype)
        model.rope = None
        return detached

    def attach_rope(self, model: Any, detached: tuple[nn.Module, torch.dtype]) -> None:
        rope, dtype = detached
        like = next(model.parameters())
        rope = rope.to(like.device) if like.dtype == dtype else rope.to(like)
        if getattr(rope, "feat_shape", None) is not None and hasattr(model, "patch_embed"):
            grid = list(model.patch_embed.grid_size)
            if list(rope.feat_shape) != grid:
                rope.update_feat_shape(grid)
        model.rope = rope.train(model.training)

    def check_widths(self, terms: Sequence[dict[str, Any]], layers: Layers) -> None:
        """Raise an error if `head_dim` differs between layers, and a term is built for one `head_dim`."""
        widths = {m.head_dim: path for _, path, m in layers if hasattr(m, "head_dim")}
        for term in terms if len(widths) > 1 else ():
            cls = encoding_class(term["name"])
            if "head_dim" in inspect.signature(cls).parameters:
                raise UnsupportedCombination(
                    f"{cls.name} needs the same head_dim in all layers, got {' and '.join(map(str, widths))} in "
                    f"{' and '.join(widths.values())}. Use an additive encoding."
                )

    def check_model(self, model: Any, stock: type[Any], terms: list[dict[str, Any]]) -> None:
        if self.grid(model) is None:
            raise UnsupportedHost(
                f"{stock.__name__}: the patch embedding must have a fixed grid, got None. Build the model with an "
                "img_size."
            )

    def check_parts(self, model: Any, parts: Sequence[Encoding], layers: Layers) -> None:
        """Raise where relative values would be added to values wider than queries, as in differential attention."""
        pos = Grid(self.grid(model)).positions(next(model.parameters()).device)
        wide = [m for m in layers if isinstance(m[2], DiffAttention | DiffParallelScalingBlock)]
        for e in parts:
            for layer, path, module in wide if isinstance(e, Biased) else ():
                if e.active(layer) and e.value_term(pos, layer) is not None:
                    raise UnsupportedCombination(
                        f"{e.name} adds relative values of head_dim {module.head_dim}, but the values of {path} are "
                        "twice as wide (differential attention). Use an encoding of queries and keys."
                    )

    def check_inside(self, model: Any) -> None:
        for i, outer in enumerate(model.blocks):
            _, block = layer_in("", outer)
            arguments = [*inspect.signature(block.forward).parameters][1:]
            takes_mask = "attn_mask" in arguments
            if self.mask_at is not None:
                takes_mask = arguments[self.mask_at : self.mask_at + 1] == ["attn_mask"]
            if not takes_mask:
                raise UnsupportedHost(
                    f"blocks.{i}: the forward pass of {type(block).__name__} must take attn_mask after the tokens to "
                    f"pass positions to its attention, got {arguments or 'no argument'}. Use an additive encoding."
                )

    def resolved(
        self, terms: list[dict[str, Any]], parts: Sequence[Encoding], grid: Any
    ) -> list[dict[str, Any]]:
        return with_training_grid(terms, parts, grid)

    def after_convert(self, model: Any, old: HostState | None) -> None:
        """Replace `pos_embed` in timm's record of constructor arguments by the encoding."""
        args = getattr(model, "_model_args", {})
        model.vispe.args = old.args if old else args.get("pos_embed")
        model._model_args = args

    def after_restore(self, model: Any, state: HostState) -> None:
        args = {k: v for k, v in vars(model).pop("_model_args", {}).items() if k != "pos_embed"}
        if state.args is not None:
            args["pos_embed"] = state.args
        if args:
            model._model_args = args


class _NaFlex(_Timm):
    """`NaFlexVit`, with its table in the embedding module, and packed patches of several grids."""

    has_block_hook = False

    def grid(self, model: Any) -> tuple[int, ...] | None:
        grid = model.embeds.pos_embed_grid_size
        return None if grid is None else tuple(grid)

    def has_absolute_table(self, model: Any) -> bool:
        return model.embeds.pos_embed_type != "none"

    def detach_table(self, model: Any) -> Any:
        embeds = model.embeds
        names = [n for n in ("pos_embed", "pos_embed_y", "pos_embed_x") if getattr(embeds, n) is not None]
        detached = (embeds.pos_embed_type, {name: getattr(embeds, name) for name in names})
        for name in names:
            embeds.register_parameter(name, None)
        embeds.pos_embed_type = "none"
        return detached

    def attach_table(self, model: Any, detached: Any) -> None:
        kind, tables = detached
        for name, table in tables.items():
            setattr(model.embeds, name, table_like(table, next(model.parameters())))
        model.embeds.pos_embed_type = kind

    def after_convert(self, model: Any, old: HostState | None) -> None:
        super().after_convert(model, old)
        model.embeds.pos_drop.__class__ = naflex.LaterDropout
        if type(model.embeds) is NaFlexEmbeds and any(isinstance(e, Additive) for e in model._vispe_shared()):
            model.embeds.__class__ = naflex.ConvertedEmbeds

    def before_strip(self, model: Any) -> None:
        if isinstance(model.embeds, naflex.ConvertedEmbeds):
            model.embeds.__class__ = NaFlexEmbeds
        model.embeds.pos_drop.__class__ = nn.Dropout


VIT = _Timm(
    VisionTransformer, vit.converted_class, vit.OVERRIDDEN, has_late_prefix=True, table_keyword="learn"
)
EVA = _Timm(Eva, eva.converted_class, eva.OVERRIDDEN, mask_at=1)
NAFLEX = _NaFlex(NaFlexVit, naflex.converted_class, naflex.OVERRIDDEN, mask_at=None, table_keyword="learned")
FAMILIES = (VIT, EVA, NAFLEX)


def family_of(model: nn.Module) -> _Timm | None:
    """Return the family of a model; None if its class is not supported."""
    return next((f for f in FAMILIES if isinstance(model, f.base)), None)
