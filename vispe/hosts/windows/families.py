"""Models whose attention layers have their own grids: SAM, Swin, MaxViT, torchvision's ViT, MONAI's networks.

`vispe.hosts.windows.model_table` lists the classes of models, with their absolute tables, and those of attention
layers. Every attention layer gets its own encodings, for its heads and its window. The steps of a conversion are in
`vispe.hosts.common.conversion.convert`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from vispe.encodings.attention_layer import attend
from vispe.encodings.base import Encoding
from vispe.encodings.parts.preparation import prepare
from vispe.encodings.registry import encoding_class
from vispe.errors import UnsupportedHost, counted
from vispe.grid import Grid
from vispe.hosts.common.context import HostState
from vispe.hosts.common.conversion.checks import check_outside
from vispe.hosts.common.host_family import HostFamily, Layers
from vispe.hosts.common.state_dict_loading import LoadsWeights
from vispe.hosts.transformers.subclasses import converted_subclass
from vispe.hosts.windows.attention import LayerGrid
from vispe.hosts.windows.model_table import (
    LIKE_SAM,
    PARTS,
    SITES,
    attentions,
    grid_of,
    heads_of,
    known,
    name_of,
    prefix_of,
    stock_type,
    width_of,
)
from vispe.hosts.windows.position_tables import attach_tables, detach_tables, in_use, table_names, tables_of
from vispe.hosts.windows.transformers import DetachedRotary


class ConvertedWindows(LoadsWeights):
    """Mixin of converted models; the forward pass is unchanged, attention layers apply their encodings."""

    vispe_attentions = attentions

    def _vispe_table_names(self) -> tuple[str, ...]:
        return table_names(self)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        if not any(".pos_enc." in name for name in state_dict):
            # encodings may adopt tables of the stock model; all other tables would be unexpected entries
            self._vispe_rename(state_dict, prefix)
            if any(".pos_enc." in name for name in state_dict):
                for name in self._vispe_unused(state_dict, prefix):
                    del state_dict[name]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


class AnySizePatches(nn.Module):
    """Patch embedding of transformers' SAM and its derivatives for images of any size, without the absolute table."""

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return the feature map (b, h, w, d) of images (b, c, height, width)."""
        return self.projection(pixel_values).permute(0, 2, 3, 1)


class _Windows(HostFamily):
    """The models of `MODELS`."""

    builder = "its own constructor"
    unfused = "attention weights are exposed to hooks"
    always_inside = True
    per_layer = True
    has_block_hook = False

    stock_type = staticmethod(stock_type)
    attentions = staticmethod(attentions)

    def converted_class(self, stock: type[Any]) -> type[Any]:
        return converted_subclass(stock, ConvertedWindows)

    def swaps(self, model: Any) -> Iterator[tuple[str, nn.Module, type[Any]]]:
        for _, path, module in attentions(model):
            yield path, module, converted_subclass(stock_type(module), SITES[name_of(module)])
        for path, module in model.named_modules():
            if name_of(module) in PARTS:
                yield path, module, converted_subclass(stock_type(module), PARTS[name_of(module)])

    def facts(self, model: Any, layers: Layers) -> dict[str, Any]:
        return self.layer_facts(model, layers[0][2], {"depth": len(layers)})

    def layer_facts(self, model: Any, attention: nn.Module, facts: dict[str, Any]) -> dict[str, Any]:
        heads, inner = heads_of(attention)
        return {
            "dim": width_of(attention),
            "num_heads": heads,
            "head_dim": inner // heads,
            "depth": facts["depth"],
            "grid": grid_of(model, attention),
        }

    def grid_text(self, model: Any) -> str:
        grids = dict.fromkeys(grid_of(model, m) for _, _, m in attentions(model))
        return f"of each window: {', '.join(map(str, grids))}, {counted(prefix_of(model), 'prefix token')}"

    def has_absolute_table(self, model: Any) -> bool:
        return any(in_use(holder, name) for _, holder, name in tables_of(model))

    def detach_table(self, model: Any) -> Any:
        return detach_tables(model)

    def attach_table(self, model: Any, detached: Any) -> None:
        attach_tables(model, detached)

    def has_rope(self, model: Any) -> bool:
        return any(not isinstance(m.rotary_emb, DetachedRotary) for m in _rotary_layers(model))

    def detach_rope(self, model: Any) -> tuple[nn.ModuleList, torch.dtype]:
        detached = nn.ModuleList(layer.rotary_emb for layer in _rotary_layers(model))
        for layer in _rotary_layers(model):
            layer.rotary_emb = DetachedRotary()
        return detached, next(model.parameters()).dtype

    def attach_rope(self, model: Any, detached: tuple[nn.ModuleList, torch.dtype]) -> None:
        like = next(model.parameters())
        for layer, rotary in zip(_rotary_layers(model), detached[0], strict=True):
            layer.rotary_emb = rotary.to(like.device)

    def check_model(self, model: Any, stock: type[Any], terms: list[dict[str, Any]]) -> None:
        layer = next((module for _, _, module in attentions(model)), None)
        for term in terms:
            axes = 2 if layer is None else len(grid_of(model, layer))
            check_outside(encoding_class(term["name"]), axes, stock)
        if getattr(model, "rope_global", None) is not None:
            raise UnsupportedHost(
                f"{stock.__name__}: its own rotary embedding cannot be removed, got use_rope=True. Build it with "
                "use_rope=False."
            )
        if not any(True for _ in attentions(model)):
            raise UnsupportedHost(
                f"{stock.__name__}: the model must have attention layers, got one with convolutions only."
            )
        if not isinstance(getattr(model, "patch_drop", nn.Identity()), nn.Identity):
            raise UnsupportedHost(
                f"{stock.__name__}: patch dropout is not supported, as the remaining patches do not form a grid. Build "
                "it without patch_drop_rate."
            )

    def check_parts(self, model: Any, parts: Sequence[Encoding], layers: Layers) -> None:
        """Run the encodings once, so that those that need inputs the model does not supply raise their errors."""
        heads, inner = heads_of(layers[0][2])
        like = next(model.parameters())
        grid = Grid(grid_of(model, layers[0][2]), prefix=prefix_of(model))
        with torch.no_grad(), torch.random.fork_rng(devices=[like.device] if like.is_cuda else []):
            pos = prepare(parts, grid.positions(like.device))
            x = like.new_zeros(1, pos.tokens, width_of(layers[0][2]))
            q = like.new_zeros(1, heads, pos.tokens, inner // heads)
            attend(q, q, q, parts, pos, 0, x, backend="reference")

    def after_convert(self, model: Any, old: HostState | None) -> None:
        trained, state = old.layer_grids if old else {}, model.vispe
        for _, path, module in attentions(model):
            # windows may have changed since the first conversion
            state.layer_grids[path] = trained.get(path, grid_of(model, module))
            module.vispe_grid = LayerGrid(state.layer_grids[path], prefix_of(model), state.keep_abs)
        patches = getattr(model, "patch_embed", None)
        if known(type(model)) in LIKE_SAM and not in_use(model, "pos_embed"):
            patches.__class__ = converted_subclass(stock_type(patches), AnySizePatches)

    def before_strip(self, model: Any) -> None:
        for _, _, module in attentions(model):
            del module.vispe_grid
            module.__dict__.pop("vispe_shape", None)
        if isinstance(patches := getattr(model, "patch_embed", None), AnySizePatches):
            patches.__class__ = stock_type(patches)


WINDOWS = _Windows()


def family_of(model: nn.Module) -> HostFamily | None:
    """Return `WINDOWS` for a supported model, None for others."""
    return WINDOWS if known(type(model)) else None


def _rotary_layers(model: nn.Module) -> list[Any]:
    """Return the layers that have their own rotary embedding."""
    return [m for m in model.modules() if "rotary_emb" in m._modules]
