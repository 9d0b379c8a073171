"""Check of a library before the first conversion of one of its models."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Iterable

from vispe.errors import UnsupportedHost
from vispe.hosts.contracts import open_clip, peft, timm, torch, transformers
from vispe.hosts.contracts.contract import Contract, Library, problems, release

LIBRARIES: dict[str, Library] = {
    host.LIBRARY.name: host.LIBRARY for host in (timm, open_clip, transformers, peft, torch)
}
_fulfilled: set[Contract] = set()
_compared: set[str] = set()  # libraries whose version was compared with the newest tested one


def check_contract(
    library: str, contracts: Iterable[Contract] | None = None, modules: Collection[str] = ()
) -> None:
    """Check that a library has the names on which vispe relies; each name is checked once per process.

    Args:
        library: import name, one of `LIBRARIES`.
        contracts: the contracts to check, such as those of one family of models; all of the library by default.
        modules: modules with a class of the model, whose own contracts are checked as well.

    Raises:
        UnsupportedHost: a name or parameter is missing.

    Warns:
        UserWarning: the installed version is newer than the newest tested one; once per process.
    """
    host = LIBRARIES[library]
    if contracts is None:
        contracts = (c for c in host.contracts if not c.on_demand or c.module in modules)
    pending = [contract for contract in contracts if contract not in _fulfilled]
    if pending:
        # one sentence, as the remedy is the same for all
        if (missing := next(problems(host, pending), None)) is not None:
            raise UnsupportedHost(missing)
        _fulfilled.update(pending)
    if library not in _compared:
        _compared.add(library)
        _warn_if_untested(host)


def check_contracts_of(*libraries: str, modules: Collection[str] = ()) -> None:
    """Check torch, the named libraries, and peft if it is imported, as adapters may wrap the model."""
    for library in ("torch", *libraries, *(["peft"] if "peft.peft_model" in sys.modules else [])):
        check_contract(library, modules=modules)


def _warn_if_untested(host: Library) -> None:
    """Warn at the line of the user's call if a library is newer than the newest tested version."""
    version, tested = host.version, release(host.tested)
    # of libraries with bug-fix releases, the first two numbers count
    if release(version)[: len(tested)] <= tested:
        return
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("vispe."):
        frame, level = frame.f_back, level + 1
    warnings.warn(
        f"{host.name} {version} is newer than {host.tested}, the newest version that this vispe was tested with. "
        "Install a newer vispe, or compare results with those of the tested version.",
        UserWarning,
        stacklevel=level,
    )
