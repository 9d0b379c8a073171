"""Methods and functions of hosts, exchanged in place for wrappers that call them, and given back."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple


class Door(NamedTuple):
    """A method or function that is wrapped.

    Attributes:
        owner: the class or module that has it.
        name: its name there.
        wrap: returns the wrapper of the original.
    """

    owner: Any
    name: str
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]

    def install(self) -> None:
        """Put the wrapper in place; once is enough, more often does no harm."""
        original = inspect.getattr_static(self.owner, self.name)
        if hasattr(original, "vispe_original"):
            return
        function = getattr(original, "__func__", original)  # that of a classmethod
        wrapped: Any = functools.wraps(function)(self.wrap(function))
        wrapped = classmethod(wrapped) if isinstance(original, classmethod) else wrapped
        wrapped.vispe_original = original
        setattr(self.owner, self.name, wrapped)

    def uninstall(self) -> None:
        """Give the original back."""
        present = inspect.getattr_static(self.owner, self.name)
        setattr(self.owner, self.name, getattr(present, "vispe_original", present))
