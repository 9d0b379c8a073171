"""Old names of modules, which answer with a DeprecationWarning until version 0.3; pickles read them too."""

import importlib
import sys
import warnings
from collections.abc import Sequence
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

_FOLDERS = {  # moved whole
    "vispe.micro": "vispe.backbones.micro",
    "vispe.napari": "vispe.segment.napari",
    "vispe.evaluate.textures": "vispe.images.textures",
    "vispe.evaluate.attention_bench": "vispe.evaluate.speed",
}


@cache
def moved() -> dict[str, list[str]]:
    """Return the modules that hold the names of each old module."""
    lines = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines()
    entries = (line.split(": ") for line in lines if not line.startswith("#"))
    return {f"vispe.{old}": [f"vispe.{name}" for name in new.split()] for old, new in entries}


def now(name: str) -> list[str]:
    """Return the modules that hold what the module `name` held; an empty list where it never moved."""
    for old, new in _FOLDERS.items():
        if name not in moved() and (name == old or name.startswith(f"{old}.")):
            return [new + name[len(old) :]]
    return moved().get(name, [])


class _Old(ModuleType):
    """A module under its old name."""

    def __getattr__(self, name: str) -> object:
        if not name.startswith("__"):
            for module in now(self.__name__):
                try:
                    return getattr(importlib.import_module(module), name)
                except AttributeError:
                    continue
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


class _Finder(MetaPathFinder, Loader):
    """Asked last, when no module of that name exists."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        ours = name.startswith("vispe.") and now(name)
        return ModuleSpec(name, self, is_package=name in _FOLDERS) if ours else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Old(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        homes = " and ".join(now(module.__name__))
        text = f"{module.__name__} is now {homes}; the old name goes with vispe 0.3."
        warnings.warn(text, DeprecationWarning, stacklevel=2)


def await_old_names() -> None:
    """Let imports of old names find the new modules."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
