"""Absolute and relative position tables of models whose attention layers have their own grids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from vispe.hosts.common.host_family import table_like
from vispe.hosts.transformers.subclasses import converted_subclass
from vispe.hosts.transformers.vision.position_embeddings import WithoutTable
from vispe.hosts.windows.model_table import MODELS, attentions, known, stock_type
from vispe.hosts.windows.timm import DetachedBias

# relative tables of an attention layer: parameters, or an MLP
RELATIVE = (
    "rel_pos_h",
    "rel_pos_w",
    "relative_position_bias_table",
    "relative_position_bias.relative_position_bias_table",
    "cpb_mlp",
    "rel_pos",
)
# models that resample their table in every call, so that a table of zeros is sufficient
_UNTABLED = ("transformers.models.vitdet.", "transformers.models.sam3.")
_UNCONDITIONAL = ("torchvision.", "monai.")  # libraries that add their absolute table unconditionally
# tables that transformers initialises in place; the absolute one of SAM is also added
_INITIALISED = dict.fromkeys(("rel_pos_h", "rel_pos_w", "relative_position_bias_table"), "transformers.")
_INITIALISED["pos_embed"] = ("transformers.models.sam.", "transformers.models.sam_hq.")
_NETWORK = [f"rel_pos.mlp.fc{n}.{name}" for n in (1, 2) for name in ("weight", "bias")]
# names in state dicts, after the path of the layer
_STATE = (*RELATIVE[:4], "cpb_mlp.0.weight", "cpb_mlp.0.bias", "cpb_mlp.2.weight")
_STATE = (*_STATE, "rel_pos.relative_position_bias_table", *_NETWORK)


def table_names(model: nn.Module) -> tuple[str, ...]:
    """Return the state dict names of all tables, detached ones included."""
    relative = [f"{path}.{name}" for _, path, _ in attentions(model) for name in _STATE]
    return (*relative, table) if (table := MODELS[known(type(model))]) else tuple(relative)


def tables_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (path, module, attribute) of every absolute or relative table, detached ones included."""
    if path := MODELS[known(type(model))]:
        holder, _, name = path.rpartition(".")
        yield path, model.get_submodule(holder), name
    for _, path, module in attentions(model):
        for name in RELATIVE:
            inside, _, last = name.rpartition(".")
            if not inside or inside in module._modules:
                yield f"{path}.{name}", module.get_submodule(inside), last


def in_use(holder: nn.Module, name: str) -> bool:
    """Return whether a table of `tables_of` is currently in use."""
    if name == "rel_pos":
        return not isinstance(holder._modules.get(name), DetachedBias | None)
    if name == "cpb_mlp":
        return len(holder._modules.get(name) or ()) > 0
    return holder._parameters.get(name) is not None


def detach_tables(model: nn.Module) -> dict[str, Any]:
    """Remove the tables in use; return each by path, with the window that it belongs to."""
    detached: dict[str, Any] = {}
    for path, holder, name in tables_of(model):
        if in_use(holder, name):
            detached[path] = (getattr(holder, name), getattr(holder, "window_size", None))
            _detach(known(type(model)), path, holder, name)
    return detached


def _detach(kind: str, path: str, holder: Any, name: str) -> None:
    """Replace the table `name` of a module by what its forward pass needs without the table."""
    if name == "rel_pos":
        holder.rel_pos = DetachedBias(holder.rel_pos.window_size)
    elif name == "cpb_mlp":
        # the name stays registered, but not as None, below which torch accepts every checkpoint entry
        holder._modules[name] = nn.Sequential()
    elif kind.startswith(_UNTABLED) and name == "position_embeddings":
        holder.vispe_size = holder._parameters.pop(name).shape
        holder.__class__ = converted_subclass(type(holder), WithoutTable)
    elif path == MODELS[kind] and kind.startswith(_UNCONDITIONAL):
        del holder._parameters[name]
        holder.__dict__[name] = 0
    elif kind.startswith(_INITIALISED.get(name, ())):
        # not a buffer, which could remain on the meta device; torch adds a CPU scalar on any device
        del holder._parameters[name]
        holder.__dict__[name] = torch.zeros((), device="cpu")
    else:
        holder.register_parameter(name, None)


def attach_tables(model: nn.Module, detached: dict[str, Any]) -> None:
    """Put detached tables back, resampled by timm if the window of their layer has changed."""
    like = next(model.parameters())
    for path, holder, name in list(tables_of(model)):
        if path not in detached:
            continue
        table, window = detached[path]
        if name == "rel_pos":
            current, holder.rel_pos = holder.rel_pos.window_size, table.to(like.device, like.dtype)
            table.set_window_size(current)  # timm resamples it
            continue
        if isinstance(table, nn.Module):
            holder._modules[name] = table.to(like.device, like.dtype)
            continue
        if isinstance(holder, WithoutTable):
            holder.__class__ = stock_type(holder)
            del holder.vispe_size
        vars(holder).pop(name, None)
        setattr(holder, name, table_like(table, like))
        current = getattr(holder, "window_size", None)
        if name == "relative_position_bias_table" and current != window:  # timm resamples it
            holder.window_size = window
            holder.set_window_size(current)
