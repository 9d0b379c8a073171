"""The spec of an encoding, kept with its weights.

A state dict of torch carries, beside its tensors, a few plain values for each module (its `_metadata`), which
`torch.save` keeps. The spec goes there: it adds no entry, so a state dict loads wherever it did before, and tells apart
encodings that have no weights. safetensors drops it, and so does whoever makes a new dict of the entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from vispe.encodings.spec import as_text
from vispe.errors import EncodingMismatch

KEY = "vispe"
_AUTO = "reference"  # the training grid, which a host supplies where it is not given
Terms = Sequence[Mapping[str, Any]]


def keep(destination: Any, prefix: str, terms: Terms, grid: Sequence[int] | None = None) -> None:
    """Keep the spec of a module in the state dict that is being made.

    Args:
        destination: the state dict; one without metadata is left as it is.
        prefix: of the module in it.
        terms: the spec, see `vispe.encodings.registry.plain_terms`.
        grid: shape of the grid that its tables are for, if it has any.
    """
    metadata = getattr(destination, "_metadata", None)
    if metadata is not None:
        saved: dict[str, Any] = {"spec": _plain(terms)}
        if grid is not None:
            saved["grid"] = list(grid)
        metadata.setdefault(prefix[:-1], {})[KEY] = saved


def saved_terms(local_metadata: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the spec that a state dict has for a module, or None where it keeps none."""
    saved = local_metadata.get(KEY)
    return (
        cast("list[dict[str, Any]]", saved["spec"]) if isinstance(saved, dict) and "spec" in saved else None
    )


def saved_grid(local_metadata: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the grid that the tables of a module are for, or None where a state dict does not say it."""
    grid = cast("dict[str, Any]", local_metadata.get(KEY) or {}).get("grid")
    return None if grid is None else tuple(grid)


def refuse_other(local_metadata: Mapping[str, Any], terms: Terms, what: str) -> None:
    """Raise when a state dict keeps another spec than that of the module which it is loaded into.

    The training grid is compared where both sides say it.

    Args:
        local_metadata: what the state dict has for the module.
        terms: spec of the module; empty for none.
        what: what the module is called.

    Raises:
        EncodingMismatch: they differ; both are named.
    """
    saved = saved_terms(local_metadata)
    if saved is None or _same(saved, terms):
        return
    raise EncodingMismatch(
        f"The weights were saved with the encoding {named(saved)}, but the {what} has {named(terms)}; load them into "
        "one with the same encoding, and exchange it afterwards (vispe.convert). dict(state_dict) leaves the spec out."
    )


def named(terms: Terms) -> str:
    """Return a spec for a message."""
    return repr(as_text(terms)) if terms else "none"


def _plain(value: Any) -> Any:
    """Return terms with lists for tuples, as they come back from a file."""
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in cast("Mapping[str, Any]", value).items()}
    return [_plain(v) for v in cast("Sequence[Any]", value)] if isinstance(value, list | tuple) else value


def _same(saved: Terms, ours: Terms) -> bool:
    saved, ours = _plain(saved), _plain(ours)
    if len(saved) != len(ours):
        return False
    for one, other in zip(saved, ours, strict=True):
        grids = one.get(_AUTO), other.get(_AUTO)
        if None not in grids and grids[0] != grids[1]:
            return False
        if {k: v for k, v in one.items() if k != _AUTO} != {k: v for k, v in other.items() if k != _AUTO}:
            return False
    return True
