"""Methods of made classes keep the signatures of the classes that they replace."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any


def like_stock(made: type, *names: str, **more: Any) -> None:
    """Give methods of a made class the signature that they have in the class that it was made from.

    Callers ask for it: which columns of a data set a model takes, which keywords `generate` may pass on. Arguments
    given by place go where they go in that class.

    Args:
        made: a class with `vispe_stock`, the class that it was made from.
        *names: methods.
        **more: keywords that ours takes besides, and their types.
    """
    for name in names:
        ours, stock = getattr(made, name), getattr(made.vispe_stock, name)  # type: ignore[attr-defined]
        setattr(made, name, _dressed(_named(ours, stock), stock, more))


def signed_like_stock(made: type, name: str, **more: Any) -> None:
    """Do as `like_stock` with a method that calls `by_name` itself: no other call comes between."""
    ours, stock = getattr(made, name), getattr(made.vispe_stock, name)  # type: ignore[attr-defined]
    copied = FunctionType(ours.__code__, ours.__globals__, name, ours.__defaults__, ours.__closure__)
    setattr(made, name, _dressed(copied, stock, more))


def order_of(stock: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the arguments that a method takes by place."""
    parameters = inspect.signature(stock).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)[1:]


def by_name(
    owner: str, order: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return all arguments of a call by name.

    Raises:
        TypeError: there are more by place than `owner` takes, or one comes twice.
    """
    if len(args) > len(order):
        raise TypeError(f"{owner} takes {len(order)} arguments by place, got {len(args)}.")
    return dict(**dict(zip(order, args, strict=False)), **kwargs)


def _named(ours: Callable[..., Any], stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return `ours`, taking arguments by place where `stock` does."""
    order = order_of(stock)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return ours(self, **by_name(stock.__qualname__, order, args, kwargs))

    return method


def _dressed(method: Any, stock: Callable[..., Any], more: dict[str, Any]) -> Callable[..., Any]:
    """Give a method the signature and the words of `stock`, and more keywords before its last ones."""
    signature = inspect.signature(stock)
    parameters = list(signature.parameters.values())
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in more.items()
        if name not in signature.parameters
    ]
    last = [p for p in parameters if p.kind is p.VAR_KEYWORD]
    first = [p for p in parameters if p not in last]
    wraps(stock)(method).__signature__ = signature.replace(parameters=[*first, *added, *last])
    return method
