"""Reversible monkey patches of methods and functions of other libraries."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple


class Patch(NamedTuple):
    """A monkey patch: a method or function that is replaced by a wrapper around it.

    Attributes:
        owner: the class or module that defines the method or function.
        name: attribute name in `owner`.
        wrap: function from the original to its wrapper.
    """

    owner: Any
    name: str
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]

    def install(self) -> None:
        """Replace the original by its wrapper; idempotent."""
        original = inspect.getattr_static(self.owner, self.name)
        if hasattr(original, "vispe_original"):
            return
        function = getattr(original, "__func__", original)  # unwrap a classmethod
        wrapped: Any = functools.wraps(function)(self.wrap(function))
        wrapped = classmethod(wrapped) if isinstance(original, classmethod) else wrapped
        wrapped.vispe_original = original
        setattr(self.owner, self.name, wrapped)

    def uninstall(self) -> None:
        """Restore the original."""
        current = inspect.getattr_static(self.owner, self.name)
        setattr(self.owner, self.name, getattr(current, "vispe_original", current))
