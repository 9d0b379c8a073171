"""Subclasses of transformers' classes, made when they are needed; they keep the names that checkpoints record.

Every class is found again under its name in this module, so converted models can be pickled. Calling such a class
builds the stock class, and converts it where the configuration that it is built from names an encoding.
"""

from __future__ import annotations

import contextvars
import functools
import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

from vispe.errors import UnsupportedHost

# classes, not results: one for each pair for the life of the process
_MADE: dict[tuple[type, type], type] = {}
# called with each model that is built by calling a made class, and with that class
_COMPLETING: list[Callable[[nn.Module, type], None]] = []
converting = contextvars.ContextVar("converting", default=False)  # whether the next model is loaded converted


class Named:
    """Mixed into the class of a model that is to be built with what its configuration names."""


def positioned(stock: type, mixin: type) -> type:
    """Return the subclass of `stock` with `mixin` in front; the same one every time."""
    if (stock, mixin) not in _MADE:
        inside = {
            "__module__": stock.__module__,
            "__qualname__": stock.__qualname__,
            "__doc__": stock.__doc__,
            "__reduce_ex__": _reduce,
            "vispe_stock": stock,
        }
        if issubclass(stock, nn.Module):
            inside["__init__"] = _building(stock)
        _MADE[stock, mixin] = type(stock.__name__, (mixin, stock), inside)
    return _MADE[stock, mixin]


def stock_of(made: type) -> type | None:
    """Return the class that a subclass was made from, or None if it was not made here."""
    return made.__dict__.get("vispe_stock")


def complete_with(complete: Callable[[nn.Module, type], None]) -> None:
    """Call `complete` with each model that is built by calling a made class, and with that class."""
    _COMPLETING[:] = [complete]


def _building(stock: type) -> Any:
    """Return the constructor of a made class: conversion puts the object into its class once it is complete."""

    @functools.wraps(stock.__init__)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if stock_of(type(self)) is not stock:
            raise UnsupportedHost(
                f"{type(self).__qualname__} derives from the class of a converted {stock.__name__}, which only "
                f"vispe.convert can complete; derive it from {stock.__module__}.{stock.__name__} and convert the model."
            )
        asked = type(self)
        self.__class__ = stock
        stock.__init__(self, *args, **kwargs)
        if isinstance(self, nn.Module):
            for complete in _COMPLETING:
                complete(self, asked)

    return __init__


def rebuilt(module: str, stock: str, mixin_module: str, mixin: str) -> Any:
    """Return an empty object of a made class; for pickle."""
    made, mixed = importlib.import_module(module), importlib.import_module(mixin_module)
    kind = positioned(getattr(made, stock), getattr(mixed, mixin))
    return kind.__new__(kind)


def _reduce(self: Any, protocol: int) -> tuple[Any, ...]:
    stock, mixin = type(self).vispe_stock, type(self).__mro__[1]
    state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__
    return rebuilt, (stock.__module__, stock.__qualname__, mixin.__module__, mixin.__qualname__), state
