"""Detaching and restoring the position tables of transformers' vision towers.

A table is an embedding or a parameter added to tokens, or a module that returns a bias of the attention logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from vispe.hosts.common.host_family import table_like
from vispe.hosts.transformers.subclasses import converted_subclass
from vispe.hosts.transformers.vision.families import family_of, stock_type
from vispe.utils.offloading import device_of
from vispe.utils.parameters import parameters_of

Detached = dict[str, tuple[Any, tuple[str, ...]]]  # path: table, names of the members after the table


class DetachedTable(nn.Module):
    """Placeholder of a detached absolute table, which returns zeros; it has no tensors that a model must move or load.

    Args:
        table: the detached table.
    """

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.size = (table.num_embeddings, table.embedding_dim)

    @property
    def weight(self) -> Tensor:
        """Zeros, created in every call: transformers reads their shape, and may initialise them in place."""
        return torch.zeros(self.size, device="cpu")

    def forward(self, ids: Tensor) -> Tensor:
        """Return zeros (..., d) for ids (...); integers, so that a sum has the dtype of the other term."""
        return ids.new_zeros(1).expand(*ids.shape, self.size[1])


class WithoutEmbedding(nn.Module):
    """Mixin of embeddings whose table is a `DetachedTable`, which is not resampled."""

    def interpolate_pos_encoding(self, embeddings: Tensor, height: int, width: int) -> Tensor:
        """Return zeros for an image (height, width) whose tokens are added to them."""
        del height, width
        return embeddings.new_zeros(1)

    @staticmethod
    def resize_positional_embeddings(
        positional_embeddings: Tensor, spatial_shapes: Tensor, max_length: int
    ) -> Tensor:
        """Return zeros for patches of images with grids (b, 2) in SigLIP 2."""
        del positional_embeddings, max_length
        return spatial_shapes.new_zeros(1)


class WithoutTable(nn.Module):
    """Mixin of embeddings with a detached table that was a parameter."""

    vispe_size: torch.Size

    @property
    def position_embeddings(self) -> Tensor:
        """Zeros, created in every call: transformers resamples them, and may initialise them in place."""
        return parameters_of(self)[0].new_zeros(self.vispe_size, device=device_of(self))

    @property
    def position_embedding(self) -> Tensor:
        """The same zeros under the name of the table in RADIO."""
        return self.position_embeddings


def table_names(tower: nn.Module) -> tuple[str, ...]:
    """Return the possible state dict names of all tables of the stock tower."""
    names: list[str] = []
    for path in _paths(tower):
        names += (path, f"{path}.weight", f"{path}.relative_position_bias_table")
    return tuple(names)


def has_tables(tower: nn.Module) -> bool:
    """Return whether a table is currently in use."""
    return any(_table_at(tower, path) is not None for path in _paths(tower))


def detach_tables(tower: nn.Module) -> Detached:
    """Remove every table from a tower, and return them by path, with the names of the members after them."""
    detached: Detached = {}
    for path in _paths(tower):
        table = _table_at(tower, path)
        if table is None:
            continue
        holder, name = _holder(tower, path)
        detached[path] = table, () if name in holder.__dict__ else _after(holder, name)
        if name in holder.__dict__:  # a plain tensor, such as fixed sines and cosines
            holder.__dict__[name] = table.new_zeros((1,) * table.ndim)
        elif isinstance(table, nn.Embedding):
            setattr(holder, name, DetachedTable(table))
            if holder is not tower:
                holder.__class__ = converted_subclass(type(holder), WithoutEmbedding)
        elif isinstance(table, nn.Module):
            # not registered as None, as torch accepts every checkpoint entry below a registered None
            del holder._modules[name]
            holder.__dict__[name] = None
        elif family_of(tower).bare:
            holder.register_parameter(name, None)
        else:
            del holder._parameters[name]
            holder.vispe_size = table.shape
            holder.__class__ = converted_subclass(type(holder), WithoutTable)
    return detached


def attach_tables(tower: nn.Module, detached: Detached) -> None:
    """Restore tables, in the current device and dtype of the tower."""
    like = next(tower.parameters())
    for path, (table, after) in detached.items():
        holder, name = _holder(tower, path)
        if isinstance(holder.__dict__.get(name), Tensor):
            holder.__dict__[name] = table
            continue
        if isinstance(holder, WithoutTable | WithoutEmbedding):
            holder.__class__ = stock_type(holder)
            vars(holder).pop("vispe_size", None)
        holder.__dict__.pop(name, None)
        is_parameter = isinstance(table, nn.Parameter)
        setattr(holder, name, table_like(table, like) if is_parameter else table.to(like.device, like.dtype))
        members = _members(holder, name)
        for follower in after:  # restores the order of the state dict
            members[follower] = members.pop(follower)


def never_loaded(tower: nn.Module, detached: Detached | None) -> bool:
    """Return whether detached tables have no values, as the weights were saved without them."""
    tables = (table for table, _ in (detached or {}).values())
    values = (v for t in tables for v in ([t] if isinstance(t, Tensor) else t.parameters()))
    return any(v.is_meta for v in values) and not next(tower.parameters()).is_meta


def _table_at(tower: nn.Module, path: str) -> Any:
    """Return the table at a path; None if none is in use."""
    holder, name = _holder(tower, path)
    plain = holder.__dict__.get(name)
    if isinstance(plain, Tensor):
        return None if plain.numel() == 1 else plain
    table = holder._parameters.get(name, holder._modules.get(name))
    return None if isinstance(table, DetachedTable) else table


def _members(holder: nn.Module, name: str) -> dict[str, Any]:
    """Return the dict of parameters or of submodules of a module, whichever contains `name`."""
    return holder._parameters if name in holder._parameters else holder._modules


def _after(holder: nn.Module, name: str) -> tuple[str, ...]:
    names = list(_members(holder, name))
    return tuple(names[names.index(name) + 1 :])


def _paths(tower: nn.Module) -> Iterator[str]:
    for path in family_of(tower).tables:
        if "*" in path:
            before, after = path.split("*")
            yield from (f"{before}{i}{after}" for i, _ in enumerate(tower.get_submodule(before.rstrip("."))))
        else:
            yield path


def _holder(tower: nn.Module, path: str) -> tuple[nn.Module, str]:
    """Return the module of a table, and its attribute name there."""
    holder, _, name = path.rpartition(".")
    return tower.get_submodule(holder), name
