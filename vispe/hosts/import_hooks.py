"""Sets up the front doors of timm, transformers and peft as soon as these are imported, before vispe or after.

They are slow to import (timm brings torchvision, which brings the compiler of torch), and much of vispe does without.
A program that imports timm still finds `vispe.hosts.timm.patch_constructors` in place as soon as its ``import timm`` is
done, and one that imports a model of transformers finds `vispe.hosts.transformers.saving.patch_save_load`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_DOORS = {
    "timm": "vispe.hosts.timm.patch_constructors",
    "transformers.modeling_utils": "vispe.hosts.transformers.saving.patch_save_load",
    "peft.peft_model": "vispe.hosts.transformers.saving.peft_adapters",
}


def await_hosts() -> None:
    """Install each front door now if its host is imported, else as soon as it is; once is enough, more does no harm."""
    for host in _DOORS:
        if sys.modules.get(host) is not None:
            _install(host)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _install(host: str) -> None:
    importlib.import_module(_DOORS[host]).install()


class _Finder(MetaPathFinder):
    """Finds the hosts where Python's other finders find them, and nothing else."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _DOORS:
            return None
        others = [find for f in sys.meta_path if f is not self and (find := getattr(f, "find_spec", None))]
        spec = next((found for find in others if (found := find(fullname, path, target))), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Runs a host with its own loader, leaves it as if that had been the only one, and installs the front door.

    Args:
        own: the loader that Python would have used.
    """

    def __init__(self, own: Loader) -> None:
        self.own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.own
        if module.__spec__ is not None:
            module.__spec__.loader = self.own
        self.own.exec_module(module)
        _install(module.__name__)
