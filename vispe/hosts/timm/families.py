"""The families of timm models that vispe converts, and where each keeps its own position information."""

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
from vispe.errors import UnsupportedCombination, UnsupportedHost
from vispe.grid import Grid
from vispe.hosts.common import convert
from vispe.hosts.common.checks import moved, with_training_grid
from vispe.hosts.common.context import HostState
from vispe.hosts.common.layer_access import layer_in
from vispe.hosts.timm import eva, naflex, vit
from vispe.hosts.timm.attention import SWAPS, attentions, stock_type


@dataclass(frozen=True)
class _Timm(convert.Family):
    """What differs between families when a model is converted; this is what plain ViTs do.

    Attributes:
        base: timm's class.
        hosted: gives the converted counterpart of a class.
        overridden: methods that the counterpart replaces.
        mask_at: which argument of a block, counted after the tokens, is its mask; None for any.
        holds_back: whether prefix tokens can be kept out of the first blocks.
        word: the word of timm's own constructor for its absolute table, with which a model is built that keeps it.
    """

    base: type[nn.Module]
    hosted: Callable[[Any], type[Any]]
    overridden: tuple[str, ...]
    mask_at: int | None = 0
    holds_back: bool = False
    word: str | None = None

    builder = "timm.create_model(...)"
    known = tuple(SWAPS)

    stock_type = staticmethod(stock_type)
    attentions = staticmethod(attentions)

    def swaps(self, model: Any) -> Iterator[tuple[str, nn.Module, type[Any] | None]]:
        return ((path, module, SWAPS.get(stock_type(module))) for _, path, module in attentions(model))

    def grid(self, model: Any) -> tuple[int, ...] | None:
        """Return the grid of the training resolution, None when the model has none."""
        grid = model.patch_embed.grid_size
        return None if grid is None else tuple(grid)

    def reference(self, model: Any) -> tuple[int, ...] | None:
        """Return the grid of pretraining, None where the model does not name one other than its own.

        A model that is built for another size of images rescales the coordinates of its rotary embedding to it.
        """
        shape = getattr(getattr(model, "rope", None), "ref_feat_shape", None)
        return None if shape is None else tuple(shape)

    def facts(self, model: Any, layers: convert.Layers) -> dict[str, Any]:
        return {
            "dim": model.embed_dim,
            "num_heads": getattr(layers[0][2], "num_heads", None) if layers else None,
            "head_dim": next((m.head_dim for _, _, m in layers if hasattr(m, "head_dim")), None),
            "depth": len(model.blocks),
            "grid": self.grid(model),
        }

    def where(self, model: Any) -> str:
        tokens = model.num_prefix_tokens
        return f"{self.grid(model)}, trained at {model.vispe.reference}, {tokens} prefix tokens"

    def has_table(self, model: Any) -> bool:
        return model.pos_embed is not None

    def take_table(self, model: Any) -> Any:
        kept = (model.pos_embed, tuple(model.patch_embed.grid_size))
        model.register_parameter("pos_embed", None)
        return kept

    def put_table(self, model: Any, kept: Any) -> None:
        table, old = kept
        grid = tuple(model.patch_embed.grid_size)
        prefix = 0 if model.no_embed_class else model.num_prefix_tokens

        def resample(values: torch.Tensor) -> torch.Tensor:
            return resample_abs_pos_embed(values, new_size=grid, old_size=old, num_prefix_tokens=prefix)

        model.pos_embed = moved(table, next(model.parameters()), resample if grid != old else None)

    def has_rope(self, model: Any) -> bool:
        return getattr(model, "rope", None) is not None

    def take_rope(self, model: Any) -> tuple[nn.Module, torch.dtype]:
        kept = (model.rope, next(model.parameters()).dtype)
        model.rope = None
        return kept

    def put_rope(self, model: Any, kept: tuple[nn.Module, torch.dtype]) -> None:
        rope, dtype = kept
        like = next(model.parameters())
        rope = rope.to(like.device) if like.dtype == dtype else rope.to(like)
        if getattr(rope, "feat_shape", None) is not None and hasattr(model, "patch_embed"):
            grid = list(model.patch_embed.grid_size)
            if list(rope.feat_shape) != grid:
                rope.update_feat_shape(grid)
        model.rope = rope.train(model.training)

    def check_widths(self, terms: Sequence[dict[str, Any]], layers: convert.Layers) -> None:
        """Raise where the heads of the layers differ in width, and a term is built for one width."""
        widths = {m.head_dim: path for _, path, m in layers if hasattr(m, "head_dim")}
        for term in terms if len(widths) > 1 else ():
            cls = encoding_class(term["name"])
            if "head_dim" in inspect.signature(cls).parameters:
                raise UnsupportedCombination(
                    f"{cls.name} works on heads of one width, but those of {' and '.join(widths.values())} differ; "
                    "use an additive encoding."
                )

    def check_model(self, model: Any, stock: type[Any], terms: list[dict[str, Any]]) -> None:
        if self.grid(model) is None:
            raise UnsupportedHost(
                f"The patch embedding of {stock.__name__} has no grid; build the model with an img_size."
            )

    def check_parts(self, model: Any, parts: Sequence[Encoding], layers: convert.Layers) -> None:
        """Raise where relative values meet values that are wider than queries, as in differential attention."""
        pos = Grid(self.grid(model)).positions(next(model.parameters()).device)
        wide = [m for m in layers if isinstance(m[2], DiffAttention | DiffParallelScalingBlock)]
        for e in parts:
            for layer, path, module in wide if isinstance(e, Biased) else ():
                if e.active(layer) and e.value_term(pos, layer) is not None:
                    raise UnsupportedCombination(
                        f"{e.name} adds to values of width {module.head_dim}, but {path} has queries of that width and "
                        "values of twice it; take an encoding of queries and keys."
                    )

    def check_inside(self, model: Any) -> None:
        for i, outer in enumerate(model.blocks):
            _, block = layer_in("", outer)
            arguments = [*inspect.signature(block.forward).parameters][1:]
            reached = "attn_mask" in arguments
            if self.mask_at is not None:
                reached = arguments[self.mask_at : self.mask_at + 1] == ["attn_mask"]
            if not reached:
                raise UnsupportedHost(
                    f"blocks.{i} is a {type(block).__name__} whose forward takes {arguments or 'nothing'} after the "
                    "tokens and not attn_mask, so nothing reaches its attention; use an additive encoding."
                )

    def resolved(
        self, terms: list[dict[str, Any]], parts: Sequence[Encoding], grid: Any
    ) -> list[dict[str, Any]]:
        return with_training_grid(terms, parts, grid)

    def finish(self, model: Any, old: HostState | None) -> None:
        """Keep what timm remembers of the arguments, with the encoding in their `pos_embed` from now on."""
        args = getattr(model, "_model_args", {})
        model.vispe.args = old.args if old else args.get("pos_embed")
        model._model_args = args

    def restored(self, model: Any, state: HostState) -> None:
        args = {k: v for k, v in vars(model).pop("_model_args", {}).items() if k != "pos_embed"}
        if state.args is not None:
            args["pos_embed"] = state.args
        if args:
            model._model_args = args


class _NaFlex(_Timm):
    """`NaFlexVit`, whose table is in the module of its embedding, and which packs patches of several grids."""

    mixes = False

    def grid(self, model: Any) -> tuple[int, ...] | None:
        grid = model.embeds.pos_embed_grid_size
        return None if grid is None else tuple(grid)

    def has_table(self, model: Any) -> bool:
        return model.embeds.pos_embed_type != "none"

    def take_table(self, model: Any) -> Any:
        embeds = model.embeds
        names = [n for n in ("pos_embed", "pos_embed_y", "pos_embed_x") if getattr(embeds, n) is not None]
        kept = (embeds.pos_embed_type, {name: getattr(embeds, name) for name in names})
        for name in names:
            embeds.register_parameter(name, None)
        embeds.pos_embed_type = "none"
        return kept

    def put_table(self, model: Any, kept: Any) -> None:
        kind, tables = kept
        for name, table in tables.items():
            setattr(model.embeds, name, moved(table, next(model.parameters())))
        model.embeds.pos_embed_type = kind

    def finish(self, model: Any, old: HostState | None) -> None:
        super().finish(model, old)
        model.embeds.pos_drop.__class__ = naflex.LaterDropout
        if type(model.embeds) is NaFlexEmbeds and any(isinstance(e, Additive) for e in model._vispe_shared()):
            model.embeds.__class__ = naflex.HostedEmbeds

    def leave(self, model: Any) -> None:
        if isinstance(model.embeds, naflex.HostedEmbeds):
            model.embeds.__class__ = NaFlexEmbeds
        model.embeds.pos_drop.__class__ = nn.Dropout


VIT = _Timm(VisionTransformer, vit.hosted, vit.OVERRIDDEN, holds_back=True, word="learn")
EVA = _Timm(Eva, eva.hosted, eva.OVERRIDDEN, mask_at=1)
NAFLEX = _NaFlex(NaFlexVit, naflex.hosted, naflex.OVERRIDDEN, mask_at=None, word="learned")
FAMILIES = (VIT, EVA, NAFLEX)


def family_of(model: nn.Module) -> _Timm | None:
    """Return the family of a model, or None when vispe does not convert its kind."""
    return next((f for f in FAMILIES if isinstance(model, f.base)), None)
