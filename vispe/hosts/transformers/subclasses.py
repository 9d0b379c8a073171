"""Dynamic subclasses of transformers' classes, with the names that checkpoints record.

Converted models can be pickled, as `rebuilt` creates the same class again. Calling such a class builds an
instance of the stock class, and converts the instance if its configuration names an encoding.
"""

from __future__ import annotations

import contextvars
import functools
import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

from vispe.errors import UnsupportedHost

# one class for each pair, for the lifetime of the process
_SUBCLASSES: dict[tuple[type, type], type] = {}
# called with each model that is built by calling a dynamic subclass, and with that class
_CALLBACKS: list[Callable[[nn.Module, type], None]] = []
converting = contextvars.ContextVar("converting", default=False)  # whether the next loaded model is converted


class Named:
    """Mixin of the class of a model that is built with the encoding named in its configuration."""


def converted_subclass(stock: type, mixin: type) -> type:
    """Return the subclass of `mixin` and `stock`, in this order; the same class for the same arguments."""
    if (stock, mixin) not in _SUBCLASSES:
        namespace = {
            "__module__": stock.__module__,
            "__qualname__": stock.__qualname__,
            "__doc__": stock.__doc__,
            "__reduce_ex__": _reduce,
            "vispe_stock": stock,
        }
        if issubclass(stock, nn.Module):
            namespace["__init__"] = _building(stock)
        _SUBCLASSES[stock, mixin] = type(stock.__name__, (mixin, stock), namespace)
    return _SUBCLASSES[stock, mixin]


def stock_of(cls: type) -> type | None:
    """Return the stock class of a dynamic subclass; None for other classes."""
    return cls.__dict__.get("vispe_stock")


def complete_with(complete: Callable[[nn.Module, type], None]) -> None:
    """Register the function that is called with each model built by calling a dynamic subclass, and with that class."""
    _CALLBACKS[:] = [complete]


def _building(stock: type) -> Any:
    """Return the constructor of a dynamic subclass, which builds the stock model and then converts it."""

    @functools.wraps(stock.__init__)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if stock_of(type(self)) is not stock:
            raise UnsupportedHost(
                f"{type(self).__qualname__} must not derive from the class of a converted {stock.__name__}. Derive it "
                f"from {stock.__module__}.{stock.__name__} and call vispe.convert on the model."
            )
        requested = type(self)
        self.__class__ = stock
        stock.__init__(self, *args, **kwargs)
        if isinstance(self, nn.Module):
            for complete in _CALLBACKS:
                complete(self, requested)

    return __init__


def rebuilt(module: str, stock: str, mixin_module: str, mixin: str) -> Any:
    """Return an uninitialised object of a dynamic subclass; for pickle."""
    stock_in, mixin_in = importlib.import_module(module), importlib.import_module(mixin_module)
    cls = converted_subclass(getattr(stock_in, stock), getattr(mixin_in, mixin))
    return cls.__new__(cls)


def _reduce(self: Any, protocol: int) -> tuple[Any, ...]:
    stock, mixin = type(self).vispe_stock, type(self).__mro__[1]
    state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__
    return rebuilt, (stock.__module__, stock.__qualname__, mixin.__module__, mixin.__qualname__), state
