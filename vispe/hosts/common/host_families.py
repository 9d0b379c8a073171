"""The one list of families of models that can be converted, by library; each library is imported on demand."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from vispe.errors import UnsupportedHost
from vispe.hosts.common.host_family import HostFamily

Find = Callable[[nn.Module], HostFamily | None]


def _windows() -> Find:
    from vispe.hosts.windows.families import family_of

    return family_of


def _timm() -> Find:
    from vispe.hosts.timm.families import family_of

    return family_of


def _open_clip() -> Find:
    from vispe.hosts.open_clip.convert import family_of

    return family_of


def _transformers() -> Find:
    from vispe.hosts.transformers.vision.host_family import host_family_of

    return host_family_of


FAMILIES: tuple[tuple[str | None, Callable[[], Find]], ...] = (
    (None, _windows),  # models of several libraries, found by the names of their classes
    ("timm", _timm),
    ("open_clip", _open_clip),
    ("transformers", _transformers),
)
"""Library, and what imports its function from a model to its family, in order of precedence."""


def made_by(model: nn.Module, library: str) -> bool:
    """Return whether the class of a model, or one of its base classes, is defined by a library."""
    return any(c.__module__.partition(".")[0] == library for c in type(model).__mro__)


def family_or_none(model: nn.Module) -> HostFamily | None:
    """Return access to the parts of a model, converted or not; None if no library of vispe supports its class."""
    finds = (find() for library, find in FAMILIES if library is None or made_by(model, library))
    return next((family for find in finds if (family := find(model)) is not None), None)


def family_of(model: nn.Module) -> HostFamily:
    """Return access to the parts of a model, converted or not.

    Raises:
        UnsupportedHost: no library of vispe supports its class.
    """
    family = family_or_none(model)
    if family is None:
        from vispe.hosts.unwrap import unsupported_message  # imports the tables of all libraries

        raise UnsupportedHost(unsupported_message(model))
    return family
