"""Specs of encodings stored in state dicts.

A state dict of torch contains, in addition to its tensors, metadata per module (its `_metadata`), which `torch.save`
stores. The spec is part of this metadata: it adds no entry, so the state dict still loads without vispe, and encodings
without weights are distinguished. The metadata is lost in safetensors files and in copies such as dict(state_dict).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from vispe.encodings.spec import spec_to_text
from vispe.errors import EncodingMismatch

KEY = "vispe"
_AUTO = "reference"  # the training grid, which a host supplies if it is None
Terms = Sequence[Mapping[str, Any]]


def keep(destination: Any, prefix: str, terms: Terms, grid: Sequence[int] | None = None) -> None:
    """Store the spec of a module in the metadata of a state dict.

    Args:
        destination: the state dict; without metadata it is left unchanged.
        prefix: prefix of the module in it.
        terms: the spec, see `vispe.encodings.registry.plain_terms`.
        grid: grid shape of the module's tables, if it has any.
    """
    metadata = getattr(destination, "_metadata", None)
    if metadata is not None:
        saved: dict[str, Any] = {"spec": _plain(terms)}
        if grid is not None:
            # shape of the tables, needed to resample them for another grid
            saved["grid"] = list(grid)
        # keys of the metadata have no trailing dot
        metadata.setdefault(prefix[:-1], {})[KEY] = saved


def saved_terms(local_metadata: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the spec stored in a module's metadata, or None."""
    saved = local_metadata.get(KEY)
    return (
        cast("list[dict[str, Any]]", saved["spec"]) if isinstance(saved, dict) and "spec" in saved else None
    )


def saved_grid(local_metadata: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the grid shape of a module's tables stored in its metadata, or None."""
    grid = cast("dict[str, Any]", local_metadata.get(KEY) or {}).get("grid")
    return None if grid is None else tuple(grid)


def check_same_spec(local_metadata: Mapping[str, Any], terms: Terms, what: str) -> None:
    """Raise if a state dict stores another spec than that of the module that it is loaded into.

    The training grid is compared only if both specs contain it.

    Args:
        local_metadata: metadata of the module in the state dict.
        terms: spec of the module; empty for none.
        what: description of the module for the message.

    Raises:
        EncodingMismatch: the specs differ; the message names both.
    """
    saved = saved_terms(local_metadata)
    if saved is None or _same(saved, terms):
        return
    raise EncodingMismatch(
        f"The weights were saved with the encoding {named(saved)}, but the {what} has {named(terms)}. Load them into "
        "a model with the same encoding, then exchange it with vispe.convert; dict(state_dict) omits the stored spec."
    )


def named(terms: Terms) -> str:
    """Return a spec as text for messages."""
    return repr(spec_to_text(terms)) if terms else "none"


def _plain(value: Any) -> Any:
    """Return terms with tuples replaced by lists, as read from a file."""
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in cast("Mapping[str, Any]", value).items()}
    return [_plain(v) for v in cast("Sequence[Any]", value)] if isinstance(value, list | tuple) else value


def _same(saved: Terms, terms: Terms) -> bool:
    saved, terms = _plain(saved), _plain(terms)
    if len(saved) != len(terms):
        return False
    for saved_term, term in zip(saved, terms, strict=True):
        # None means that the host supplies the grid, so it agrees with any
        grids = saved_term.get(_AUTO), term.get(_AUTO)
        if None not in grids and grids[0] != grids[1]:
            return False
        if {k: v for k, v in saved_term.items() if k != _AUTO} != {
            k: v for k, v in term.items() if k != _AUTO
        }:
            return False
    return True
