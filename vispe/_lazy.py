"""Lazy attribute access for package `__init__` modules (PEP 562)."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_exports(
    package: str, names: Mapping[Any, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package that imports names on first access.

    Args:
        package: `__name__` of the package.
        names: public name to the module that defines it.

    >>> __getattr__, __dir__ = face(__name__, {"symmetrize": "vispe.symmetry.symmetrization"})
    """

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(names[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *names})
