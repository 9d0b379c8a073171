"""Attribute access of packages: lazy names (PEP 562), and functions with the name of a package."""

import importlib
import sys
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any


def lazy_exports(
    package: str, names: Mapping[Any, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package that imports names on first access.

    Args:
        package: `__name__` of the package.
        names: public name to the module that defines it.

    >>> __getattr__, __dir__ = lazy_exports(__name__, {"symmetrize": "vispe.images.symmetry.symmetrization"})
    """

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(names[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *names})


def share_namespace(function: Callable[..., Any], package: str) -> None:
    """Share the attributes of a package with the function that hides it, so that its submodules can be imported.

    `import a.b.c as x` reads attribute `b` of `a`, then `c` of that: without this, it fails if `b` is a function.

    Args:
        function: a function that has the name of the package and is an attribute of its parent package.
        package: full name of the package, which has been imported.
    """
    if isinstance(function, FunctionType):
        # the same dictionary, not a copy: submodules may be imported later
        function.__dict__ = vars(sys.modules[package])
