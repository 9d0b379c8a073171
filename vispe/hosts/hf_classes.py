"""Subclasses of transformers' classes, made when they are needed; they keep the names that checkpoints record.

Every class is found again under its name in this module, so converted models can be pickled.
"""

from __future__ import annotations

import importlib
from typing import Any

_MADE: dict[
    tuple[type, type], type
] = {}  # classes, not results: one for each pair for the life of the process


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
        _MADE[stock, mixin] = type(stock.__name__, (mixin, stock), inside)
    return _MADE[stock, mixin]


def stock_of(made: type) -> type | None:
    """Return the class that a subclass was made from, or None if it was not made here."""
    return made.__dict__.get("vispe_stock")


def rebuilt(module: str, stock: str, mixin_module: str, mixin: str) -> Any:
    """Return an empty object of a made class; for pickle."""
    kind = positioned(
        getattr(importlib.import_module(module), stock), getattr(importlib.import_module(mixin_module), mixin)
    )
    return kind.__new__(kind)


def _reduce(self: Any, protocol: int) -> tuple[Any, ...]:
    stock, mixin = type(self).vispe_stock, type(self).__mro__[1]
    state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__
    return rebuilt, (stock.__module__, stock.__qualname__, mixin.__module__, mixin.__qualname__), state
