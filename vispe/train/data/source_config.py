"""Sources as a recipe writes them: a list of `{folder: ...}`, `{tar: ...}`, `{hub: ...}` and `{synthetic: ...}`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from vispe.errors import OptionError, did_you_mean
from vispe.train.data.dataset import Concat, Mixture, Source
from vispe.train.data.hub_dataset import HubSource
from vispe.train.data.image_folder import FolderSource
from vispe.train.data.synthetic import SyntheticSource
from vispe.train.data.tar_dataset import TarSource

KINDS: dict[str, type[Source]] = {
    "folder": FolderSource,
    "tar": TarSource,
    "hub": HubSource,
    "synthetic": SyntheticSource,
}


def from_config(entries: Sequence[Mapping[str, Any]]) -> Source:
    """Return the source that a recipe describes.

    Each entry names one kind and its place, or how many synthetic pictures, beside options of `FolderSource`,
    `TarSource`, `HubSource` or `SyntheticSource`, and, if several sources are mixed, a weight each. Without weights
    every picture is seen as often as any other.

    >>> from_config([{"synthetic": 60, "weight": 2}, {"synthetic": 10, "seed": 7, "weight": 1}]).describe()["kind"]
    'mixture'

    Args:
        entries: one or more.

    Raises:
        OptionError: no entry, an entry without a kind or with several, an unknown option, or weights for some only.
        InputError, MissingExtra: see the sources.
    """
    if isinstance(entries, str | Mapping) or not isinstance(entries, Sequence) or not entries:
        raise OptionError(
            f"data={entries!r} is not a list of sources; write one such as [{{folder: pictures}}]."
        )
    built = [_built(number, entry) for number, entry in enumerate(entries)]
    sources, weights = [source for source, _ in built], [weight for _, weight in built]
    given = [weight for weight in weights if weight is not None]
    if given and len(given) < len(weights):
        missing = weights.index(None)
        raise OptionError(
            f"data[{missing}] has no weight, and others have; give one to each source or to none."
        )
    if given:
        mixture = Mixture(sources, given)
        return mixture if len(sources) > 1 else sources[0]
    return Concat(sources) if len(sources) > 1 else sources[0]


def _built(number: int, entry: Mapping[str, Any]) -> tuple[Source, Any]:
    if not isinstance(entry, Mapping):
        raise OptionError(f"data[{number}]={entry!r} is not a source; write it such as {{folder: pictures}}.")
    kinds = [kind for kind in KINDS if kind in entry]
    if len(kinds) != 1:
        named = " and ".join(kinds) if kinds else "none"
        hint = "" if kinds else "".join(did_you_mean(str(key), KINDS) for key in entry)
        raise OptionError(
            f"data[{number}] must name exactly one of {', '.join(KINDS)}, and it names {named} (its keys: "
            f"{', '.join(map(str, entry))}).{hint}"
        )
    (kind,) = kinds
    place, *options = inspect.signature(KINDS[kind]).parameters
    known = [*options, "weight"]
    for key in entry:
        if key != kind and key not in known:
            hint = did_you_mean(str(key), known)
            raise OptionError(
                f"data[{number}] has the option {key!r}, and {kind} knows {', '.join(known)}.{hint}"
            )
    given = {key: value for key, value in entry.items() if key not in (kind, "weight")}
    return KINDS[kind](**{place: entry[kind]}, **given), entry.get("weight")
