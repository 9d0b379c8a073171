"""Taking the tables of position out of transformers' vision towers, and bringing them back.

Such a table is an embedding or a parameter that is added to tokens, or a module that adds to the logits of attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from vispe.hosts.common.checks import moved
from vispe.hosts.transformers.subclasses import positioned
from vispe.hosts.transformers.vision.families import family_of, stock_type

Kept = dict[str, tuple[Any, tuple[str, ...]]]


class NoTable(nn.Module):
    """Stands where an absolute table was, and adds nothing; of its buffer only device and dtype count.

    Args:
        table: what was there.
    """

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.size = (table.num_embeddings, table.embedding_dim)
        self.register_buffer("zero", table.weight.detach().new_zeros(1), persistent=False)

    @property
    def weight(self) -> Tensor:
        """Zeros, new every time: they are resampled, and transformers may initialise them."""
        return self.zero.new_zeros(self.size)

    def forward(self, ids: Tensor) -> Tensor:
        """Return zeros (..., d) for ids (...)."""
        return self.zero.new_zeros(1).expand(*ids.shape, self.size[1])


class Untabled(nn.Module):
    """Embeddings whose table was a parameter, and is zero now."""

    vispe_size: torch.Size

    @property
    def position_embeddings(self) -> Tensor:
        """Zeros, new every time: they are resampled, and transformers may initialise them."""
        return next(self.parameters()).new_zeros(self.vispe_size)


def table_names(tower: nn.Module) -> tuple[str, ...]:
    """Return the names of the state of every table that the stock tower has or may have."""
    found: list[str] = []
    for path in _paths(tower):
        found += (path, f"{path}.weight", f"{path}.relative_position_bias_table")
    return tuple(found)


def has_tables(tower: nn.Module) -> bool:
    """Whether a tower has a table in use."""
    return any(_held(tower, path) is not None for path in _paths(tower))


def take_tables(tower: nn.Module) -> Kept:
    """Take every table out of a tower, and return them by path, with the names that stood after them."""
    kept: Kept = {}
    for path in _paths(tower):
        table = _held(tower, path)
        if table is None:
            continue
        holder, name = _holder(tower, path)
        kept[path] = table, () if name in holder.__dict__ else _after(holder, name)
        if name in holder.__dict__:  # a plain tensor, such as fixed sines and cosines
            holder.__dict__[name] = table.new_zeros((1,) * table.ndim)
        elif isinstance(table, nn.Embedding):
            setattr(holder, name, NoTable(table))
        elif isinstance(table, nn.Module):
            # not a registered None, below which torch takes every entry of a checkpoint for known
            del holder._modules[name]
            holder.__dict__[name] = None
        elif family_of(tower).bare:
            holder.register_parameter(name, None)
        else:
            del holder._parameters[name]
            holder.vispe_size = table.shape
            holder.__class__ = positioned(type(holder), Untabled)
    return kept


def put_tables(tower: nn.Module, kept: Kept) -> None:
    """Bring tables back, on the device and in the dtype that a tower has now."""
    like = next(tower.parameters())
    for path, (table, after) in kept.items():
        holder, name = _holder(tower, path)
        if isinstance(holder.__dict__.get(name), Tensor):
            holder.__dict__[name] = table
            continue
        if isinstance(holder, Untabled):
            holder.__class__ = stock_type(holder)
            del holder.vispe_size
        holder.__dict__.pop(name, None)
        is_parameter = isinstance(table, nn.Parameter)
        setattr(holder, name, moved(table, like) if is_parameter else table.to(like.device, like.dtype))
        members = _members(holder, name)
        for follower in after:  # the order of a state dict is that of before
            members[follower] = members.pop(follower)


def never_loaded(tower: nn.Module, kept: Kept | None) -> bool:
    """Whether tables that were taken out never got values, as the weights were saved without them."""
    tables = (table for table, _ in (kept or {}).values())
    values = (v for t in tables for v in ([t] if isinstance(t, Tensor) else t.parameters()))
    return any(v.is_meta for v in values) and not next(tower.parameters()).is_meta


def _held(tower: nn.Module, path: str) -> Any:
    """Return the table at a path; None where there is none now."""
    holder, name = _holder(tower, path)
    plain = holder.__dict__.get(name)
    if isinstance(plain, Tensor):
        return None if plain.numel() == 1 else plain
    found = holder._parameters.get(name, holder._modules.get(name))
    return None if isinstance(found, NoTable) else found


def _members(holder: nn.Module, name: str) -> dict[str, Any]:
    """Return the parameters of a module, or the modules in it, whichever `name` is one of."""
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
    """Return the module that holds a table, and the name of the table there."""
    holder, _, name = path.rpartition(".")
    return tower.get_submodule(holder), name
