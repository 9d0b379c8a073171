"""Converted class of a model class: a subclass of the mixin with the converted forward pass and of the stock class."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from vispe.errors import UnsupportedHost


def make_converted_class(
    mixin: type[Any],
    stock: type[nn.Module],
    family: type[nn.Module],
    overridden: Sequence[str],
    host: str,
    plain: str,
) -> type[Any]:
    """Return the converted class of a model class: a subclass of `mixin` and `stock`, in this order.

    Args:
        mixin: the overridden methods.
        stock: the original class.
        family: the class of the library that `stock` is or derives from.
        overridden: names of the methods that `mixin` replaces.
        host: name of the library.
        plain: models that can be converted instead, for the message.

    Raises:
        UnsupportedHost: `stock` is a subclass of `family` that overrides one of these methods itself.
    """
    changed = [n for n in overridden if getattr(stock, n) is not getattr(family, n)]
    if changed:
        raise UnsupportedHost(
            f"{stock.__name__} overrides {', '.join(changed)} of {host}'s {family.__name__}, which vispe would "
            f"replace. Convert a plain {plain}, or use vispe.Attention in your own blocks."
        )
    namespace = {"__module__": mixin.__module__, "__doc__": stock.__doc__, "__init__": _constructor_of(stock)}
    return type(f"Vispe{stock.__name__}", (mixin, stock), namespace)


def _constructor_of(stock: type[nn.Module]) -> Callable[..., None]:
    """Return the constructor of a converted class, which builds an instance of the stock class.

    Args:
        stock: the original class; its constructor may itself be patched to convert the instance.
    """

    @functools.wraps(stock.__init__, updated=())
    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        if vars(type(self)).get("__init__") is not __init__:
            raise UnsupportedHost(
                f"{type(self).__name__} must not derive from the class of a converted {stock.__name__}. Derive it from "
                f"{stock.__name__} and call vispe.convert on the model."
            )
        self.__class__ = stock
        self.__init__(*args, **kwargs)

    return __init__
