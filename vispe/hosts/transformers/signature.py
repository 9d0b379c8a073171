"""Methods of made classes keep the signatures of the classes that they replace."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
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
        setattr(made, name, _typed(getattr(made, name), getattr(made.vispe_stock, name), more))  # type: ignore[attr-defined]


def _typed(ours: Callable[..., Any], stock: Callable[..., Any], more: dict[str, Any]) -> Callable[..., Any]:
    """Return `ours` with the signature and the words of `stock`, and more keywords before its last ones."""
    signature = inspect.signature(stock)
    parameters = list(signature.parameters.values())
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in more.items()
        if name not in signature.parameters
    ]
    last = [p for p in parameters if p.kind is p.VAR_KEYWORD]
    order = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)[1:]

    @wraps(stock)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) > len(order):
            raise TypeError(f"{stock.__qualname__} takes {len(order)} arguments by place, got {len(args)}.")
        return ours(self, **dict(zip(order, args, strict=False)), **kwargs)

    first = [p for p in parameters if p not in last]
    method.__signature__ = signature.replace(parameters=[*first, *added, *last])  # type: ignore[attr-defined]
    return method
