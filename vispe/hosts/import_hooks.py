"""Import hooks that install the timm, transformers and peft patches when those libraries are imported.

The libraries are slow to import (timm imports torchvision, which imports torch's compiler), and much of vispe does not
need them. The patches of a library are installed as soon as its import is complete, whether that is before or after
``import vispe``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_PATCHES = {
    "timm": "vispe.hosts.timm.patch_constructors",
    "transformers.modeling_utils": "vispe.hosts.transformers.saving.patch_save_load",
    "peft.peft_model": "vispe.hosts.transformers.saving.peft_adapters",
}


def install_import_hooks() -> None:
    """Install the patches of imported libraries now, and those of other libraries on their import; idempotent."""
    for host in _PATCHES:
        if sys.modules.get(host) is not None:
            _install(host)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _install(host: str) -> None:
    try:
        importlib.import_module(_PATCHES[host]).install()
    except (ImportError, AttributeError, ValueError):
        from vispe.hosts.contracts.check import check_contract  # names what is missing

        check_contract(host.partition(".")[0])
        raise


class _Finder(MetaPathFinder):
    """Finder for the patched libraries only, which wraps the loader that Python's other finders return."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _PATCHES:
            return None
        # other finders locate the module; this finder only adds the installation of patches
        others = [find for f in sys.meta_path if f is not self and (find := getattr(f, "find_spec", None))]
        spec = next((spec for find in others if (spec := find(fullname, path, target))), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Loader that executes a module with Python's own loader and then installs the patches.

    Args:
        original: the loader that Python would have used; after loading, the module refers to this loader
            only.
    """

    def __init__(self, original: Loader) -> None:
        self.original = original

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.original.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.original
        if module.__spec__ is not None:
            module.__spec__.loader = self.original
        self.original.exec_module(module)
        _install(module.__name__)
