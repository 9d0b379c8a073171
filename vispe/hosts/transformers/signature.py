"""Signatures of overridden methods of dynamic subclasses, equal to those of the stock classes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any

from vispe.errors import counted


def copy_signatures(cls: type, *names: str, **extra: Any) -> None:
    """Set the signatures of methods of a dynamic subclass to those of the stock class.

    Callers inspect signatures: trainers look for the dataset columns that a model accepts, and `generate` for
    the keywords that it can pass on. Positional arguments are mapped to the names that they have in the stock
    class.

    Args:
        cls: a class with `vispe_stock`, the stock class.
        *names: methods.
        **extra: additional keywords of the overridden methods, and their types.
    """
    for name in names:
        ours, stock = getattr(cls, name), getattr(cls.vispe_stock, name)  # type: ignore[attr-defined]
        setattr(cls, name, _with_signature(_named(ours, stock), stock, extra))


def copy_signature_only(cls: type, name: str, **extra: Any) -> None:
    """Set the signature of a method without wrapping it; for methods that call `by_name` themselves."""
    ours, stock = getattr(cls, name), getattr(cls.vispe_stock, name)  # type: ignore[attr-defined]
    copied = FunctionType(ours.__code__, ours.__globals__, name, ours.__defaults__, ours.__closure__)
    setattr(cls, name, _with_signature(copied, stock, extra))


def positional_names(stock: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the positional arguments of a method, without `self`."""
    parameters = inspect.signature(stock).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)[1:]


def by_name(
    owner: str, order: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return all arguments of a call as keywords.

    Raises:
        TypeError: there are more positional arguments than `owner` takes, or one is passed twice.
    """
    if len(args) > len(order):
        raise TypeError(f"{owner} takes {counted(len(order), 'positional argument')}, got {len(args)}.")
    return dict(**dict(zip(order, args, strict=False)), **kwargs)


def _named(ours: Callable[..., Any], stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return `ours` with the positional arguments of `stock`."""
    order = positional_names(stock)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return ours(self, **by_name(stock.__qualname__, order, args, kwargs))

    return method


def _with_signature(method: Any, stock: Callable[..., Any], extra: dict[str, Any]) -> Callable[..., Any]:
    """Set the signature and docstring of `stock` on a method, with extra keywords before ``**kwargs``."""
    signature = inspect.signature(stock)
    parameters = list(signature.parameters.values())
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in extra.items()
        if name not in signature.parameters
    ]
    last = [p for p in parameters if p.kind is p.VAR_KEYWORD]
    first = [p for p in parameters if p not in last]
    wraps(stock)(method).__signature__ = signature.replace(parameters=[*first, *added, *last])
    return method
