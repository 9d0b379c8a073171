"""Contracts: names and parameters of other libraries that vispe relies on, and how missing ones are reported.

A contract names private functions, overridden methods, and attributes that constructors set. Names that a library
documents and has never changed need none.
"""

from __future__ import annotations

import inspect
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

VARIABLE = "**"  # instead of a keyword: the function accepts arbitrary keywords


@dataclass(frozen=True)
class Contract:
    """A name of a library, and what vispe assumes of it.

    Attributes:
        name: importable name, ``module:Class.method``.
        assumes: the assumption, a clause after "vispe assumes that".
        keywords: parameters passed by keyword, separated by spaces, as in all lists of names here; ``a|b`` if the name
            differs between versions, ``**`` for arbitrary ones.
        positional: first parameters without `self`, in the order in which they are passed.
        attributes: attributes of the class, or set by its constructor.
        since: oldest version of the library with the name; older ones are not checked.
        on_demand: whether the name belongs to one family of models, and is only checked for models with a class of its
            module.
    """

    name: str
    assumes: str
    keywords: str = ""
    positional: str = ""
    attributes: str = ""
    since: str = ""
    on_demand: bool = False

    @property
    def module(self) -> str:
        """The module to import."""
        return self.name.partition(":")[0]


@dataclass(frozen=True)
class Library:
    """A library, its contracts, and the newest version for which they were tested.

    Attributes:
        name: import name.
        distribution: name of the package for pip.
        tested: newest tested version; without the last number if this one counts bug fixes only.
        contracts: the names on which vispe relies.
    """

    name: str
    distribution: str
    tested: str
    contracts: tuple[Contract, ...]

    @property
    def version(self) -> str:
        """The installed version."""
        return str(import_module(self.name).__version__)


def release(version: str) -> tuple[int, ...]:
    """Return the release numbers of a version: (5, 17, 0) for ``'5.17.0.dev0'``."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def method_contract(cls: type, method: str, assumes: str, **requirements: str) -> Iterator[Contract]:
    """Yield the contract of a method of a class, unless the method is defined outside the library of its module."""
    owner = next((c for c in cls.__mro__ if method in vars(c)), cls)
    if owner.__module__.startswith("transformers.") and "<locals>" not in owner.__qualname__:
        yield Contract(f"{owner.__module__}:{owner.__qualname__}.{method}", assumes, **requirements)  # type: ignore[arg-type]


def problems(library: Library, contracts: Iterable[Contract] | None = None) -> Iterator[str]:
    """Yield one sentence for each name or parameter that the installed version does not have.

    Args:
        library: the library, which is imported.
        contracts: the contracts to check; all of the library by default.
    """
    version, reported = library.version, set()
    for contract in library.contracts if contracts is None else contracts:
        if contract.since and release(version) < release(contract.since):
            continue
        for problem in _violations(contract):
            if problem not in reported:
                reported.add(problem)
                yield (
                    f"{library.name} {version}: {problem}, and vispe assumes that {contract.assumes}; run "
                    f"`pip install --force-reinstall --no-deps {library.distribution}=={library.tested}`, or install a "
                    "newer vispe."
                )


def _violations(contract: Contract) -> Iterator[str]:
    """Yield what is missing; only the outermost missing name if names in it cannot exist either."""
    module, _, path = contract.name.partition(":")
    try:
        owner: Any = sys.modules.get(module) or import_module(module)
    except ImportError:
        yield f"the module {module} is missing"
        return
    where = module
    for name in path.split(".") if path else ():
        where = f"{where}.{name}"
        if not hasattr(owner, name):
            yield f"{where} is missing"
            return
        owner = getattr(owner, name)
    if (contract.keywords or contract.positional) and not _is_patched(owner, module):
        yield from _missing_parameters(contract, where, inspect.signature(owner).parameters)
    if contract.attributes and (assigned := _assigned(owner)) is not None:
        for name in contract.attributes.split():
            if name not in assigned and not hasattr(owner, name):
                yield f"{where} must have the attribute {name!r}, which its constructor does not set"


def _is_patched(function: Any, module: str) -> bool:
    """Return whether other code has replaced a function of a module, which then has another signature."""
    # built-in functions, and functions that were imported from a submodule, are not patches
    defined = getattr(inspect.unwrap(function), "__module__", None) if inspect.isroutine(function) else None
    return defined is not None and defined.partition(".")[0] not in (module.partition(".")[0], "builtins")


def _constructor(cls: type) -> types.FunctionType | None:
    """Return the constructor that a class defines, or None if other code has replaced it and does not call it.

    torch.compile replaces the constructor of `nn.Module` for the rest of the process by a closure over it.
    """
    pending = [vars(cls)["__init__"]]
    while pending:
        function = inspect.unwrap(pending.pop())
        if function.__module__ == cls.__module__:
            return function
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        pending.extend(content for content in cells if inspect.isfunction(content))
    return None


def _missing_parameters(
    contract: Contract, where: str, parameters: Mapping[str, inspect.Parameter]
) -> Iterator[str]:
    """Yield each missing keyword, and the first parameter at another position."""
    names = [name for name in parameters if name != "self"]
    got = f"got {', '.join(names) or 'no parameter'}"
    order = contract.positional.split()
    moved = next((name for i, name in enumerate(order) if names[i : i + 1] != [name]), None)
    if moved is not None:
        number = order.index(moved) + 1
        yield f"parameter {number} of {where} must be {moved!r}, {got}"
    kinds = {p.kind for p in parameters.values()}
    for keyword in contract.keywords.split():
        if keyword == moved:
            continue
        if keyword == VARIABLE:
            if inspect.Parameter.VAR_KEYWORD not in kinds:
                yield f"{where} must accept arbitrary keywords, {got}"
        elif not any(name in names for name in keyword.split("|")):
            yield f"{where} must have the parameter {' or '.join(map(repr, keyword.split('|')))}, {got}"


def _assigned(cls: type) -> set[str] | None:
    """Return the names in the constructors of a class and its bases: of attributes, and of registered buffers.

    None if a constructor cannot be read.
    """
    names: set[str] = set()
    for base in cls.__mro__:
        if not inspect.isfunction(vars(base).get("__init__")):
            continue  # none, or that of a built-in class
        constructor = _constructor(base)
        if constructor is None:
            return None
        code = constructor.__code__
        names.update(code.co_names, (c for c in code.co_consts if isinstance(c, str)))
    return names
