"""Vision towers of Hugging Face models as a family that can be converted."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from vispe.encodings.attention_layer import attend
from vispe.encodings.base import Encoding
from vispe.encodings.parts.preparation import prepare
from vispe.encodings.registry import encoding_class
from vispe.errors import OptionError, UnsupportedCombination, UnsupportedHost, counted
from vispe.grid import Grid
from vispe.hosts.common.conversion.checks import check_outside, refuse_patched
from vispe.hosts.common.host_family import HostFamily, Layers
from vispe.hosts.transformers.subclasses import converted_subclass
from vispe.hosts.transformers.vision.class_table import SWAPS, swapped
from vispe.hosts.transformers.vision.families import (
    VIDEO_KINDS,
    attentions,
    family_of,
    family_of_class,
    heads_of,
    prefix_of,
    reference_of,
    stock_type,
    width_of,
)
from vispe.hosts.transformers.vision.position_embeddings import (
    attach_tables,
    detach_tables,
    has_tables,
    never_loaded,
)


class _Tower(HostFamily):
    """The towers of transformers; `family_of` returns the paths of their modules."""

    title = "transformers "
    noun = "tower"
    builder = "from_pretrained"
    unfused = "the attention implementation is eager"
    always_inside = True

    def converted_class(self, stock: type[Any]) -> type[Any]:
        family = family_of_class(stock)
        _check_class("The tower", stock, family.path, family.tower)
        return converted_subclass(stock, SWAPS[family.kind][0])

    stock_type = staticmethod(stock_type)
    attentions = staticmethod(attentions)

    def swaps(self, model: Any) -> Iterator[tuple[str, nn.Module, type[Any]]]:
        for path, module, mixin in swapped(model):
            yield path, module, converted_subclass(stock_type(module), mixin)

    def facts(self, model: Any, layers: Layers) -> dict[str, Any]:
        heads, width = heads_of(layers[0][2])
        return {
            "dim": width_of(layers[0][2]),
            "num_heads": heads,
            "head_dim": width,
            "depth": len(layers),
            "grid": reference_of(model),
        }

    def grid_text(self, model: Any) -> str:
        trained = model.vispe.reference or "any"
        return f"of each image, trained at {trained}, {counted(prefix_of(model), 'prefix token')}"

    has_absolute_table = staticmethod(has_tables)
    detach_table = staticmethod(detach_tables)
    attach_table = staticmethod(attach_tables)

    def has_rope(self, model: Any) -> bool:
        return family_of(model).rope

    def check_model(self, model: Any, stock: type[Any], terms: list[dict[str, Any]]) -> None:
        family = family_of(model)
        if family.computed and getattr(model.config, family.computed):
            raise UnsupportedHost(
                f"{stock.__name__} computes its absolute table in the forward pass, so it cannot be removed, got "
                f"config.{family.computed}=True. Use a model with a learned table."
            )
        for _, path, module in attentions(model):
            _check_class(path, stock_type(module), family.path, family.attention)
            refuse_patched(module, path, self.patchable)
        for term in terms:
            _check_kind(term, reference_of(model), stock)

    def check_parts(self, model: Any, parts: Sequence[Encoding], layers: Layers) -> None:
        """Run the encodings once, so that those that need inputs the tower does not supply raise their errors."""
        heads, width = heads_of(layers[0][2])
        like = next(model.parameters())
        shape = (2, 2, 4) if family_of(model).kind in VIDEO_KINDS else (2, 4)
        pos = Grid(shape, prefix=prefix_of(model)).positions(like.device)
        x = like.new_zeros(1, pos.tokens, width_of(layers[0][2]))
        q = like.new_zeros(1, heads, pos.tokens, width)
        devices = [like.device] if like.is_cuda else []
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            pos = prepare(parts, pos)
            attend(q, q, q, parts, pos, 0, x, backend="reference")

    def check_detached(self, model: Any, table: Any) -> None:
        """Raise an error if the table has no values, as the weights were saved without it."""
        if never_loaded(model, table):
            raise UnsupportedCombination(
                f"This {stock_type(model).__name__} was saved without its absolute table, which cannot be restored. "
                "Load the stock model that was converted."
            )


TOWER = _Tower()


def host_family_of(model: nn.Module) -> HostFamily | None:
    """Return the family of a tower of transformers; None for other models."""
    return None if family_of(model) is None else TOWER


def _check_class(path: str, cls: type[Any], module: str, name: str) -> None:
    """Raise `UnsupportedHost` for subclasses of transformers' own class, whose forward pass is replaced."""
    if (cls.__module__, cls.__name__) != (module, name):
        raise UnsupportedHost(
            f"{path} must be of transformers' own class {name}, whose forward pass is replaced, got {cls.__name__} of "
            f"{cls.__module__}. Convert a stock tower."
        )


def _check_kind(term: dict[str, Any], grid: tuple[int, ...] | None, stock: type[nn.Module]) -> None:
    """Raise when an encoding does not act inside attention, or needs a training grid that the tower does not have."""
    cls = encoding_class(term["name"])
    check_outside(cls, 2 if grid is None else len(grid), stock)
    option = inspect.signature(cls).parameters.get("grid")
    if grid is None and option is not None and option.default is option.empty and "grid" not in term:
        raise OptionError(
            f"{cls.name} has a table for one grid, but {stock.__name__} was trained without a fixed grid. Pass "
            "grid=[h, w], rows and columns of an image for which the table is built."
        )
