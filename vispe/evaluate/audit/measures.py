"""Measures by name, found in the folders of their families."""

import importlib
import pkgutil
from collections.abc import Sequence
from functools import cache

from vispe.errors import UnknownName, did_you_mean
from vispe.evaluate.measure.base import FAMILIES, Measure


@cache
def _import_families() -> None:
    for family in FAMILIES:
        package = importlib.import_module(f"vispe.evaluate.{family}")
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{module.name}")


def all_measures() -> dict[str, type[Measure]]:
    """Return all measures by name, in the order of the report: by family, then by `order`.

    Experimental measures are included once `vispe.experimental.measures` is imported.
    """
    _import_families()
    by_name = {kind.name: kind for kind in Measure.__subclasses__() if kind.__module__.startswith("vispe.")}
    ranked = sorted(by_name, key=lambda n: (FAMILIES.index(by_name[n].family), by_name[n].order, n))
    return {name: by_name[name] for name in ranked}


def choose(only: Sequence[str] | None = None) -> list[Measure]:
    """Return the requested measures: by names or families, or by default those of the report.

    Raises:
        UnknownName: a measure or family does not exist.

    >>> [m.name for m in choose(["probe"])]
    ['probe']
    """
    known = all_measures()
    if only is None:
        return [kind() for kind in known.values() if kind.default]
    for name in only:
        if name not in known and name not in FAMILIES:
            names = [*FAMILIES, *known]
            raise UnknownName(
                f"choose: unknown measure or family, got {name!r}.{did_you_mean(name, names)} Use one of "
                f"{', '.join(names)}; import vispe.experimental.measures for experimental ones."
            )
    return [k() for k in known.values() if k.name in only or (k.family in only and k.default)]
