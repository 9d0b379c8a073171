"""Image sources from a recipe: a list of `{folder: ...}`, `{tar: ...}`, `{hub: ...}` and `{synthetic: ...}`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from vispe.errors import OptionError, did_you_mean
from vispe.train.data.dataset import ConcatSource, Mixture, Source
from vispe.train.data.hub_dataset import HubSource
from vispe.train.data.image_folder import FolderSource
from vispe.train.data.synthetic import SyntheticSource
from vispe.train.data.tar_dataset import TarSource
from vispe.utils.option_values import read_option

KINDS: dict[str, type[Source]] = {
    "folder": FolderSource,
    "tar": TarSource,
    "hub": HubSource,
    "synthetic": SyntheticSource,
}


def from_config(entries: Sequence[Mapping[str, Any]]) -> Source:
    """Return the image source of a recipe.

    Each entry contains one kind with its location, or the number of synthetic images, options of `FolderSource`,
    `TarSource`, `HubSource` or `SyntheticSource`, and, for mixtures, a weight. Without weights every image has the same
    frequency.

    >>> from_config([{"synthetic": 60, "weight": 2}, {"synthetic": 10, "seed": 7, "weight": 1}]).describe()["kind"]
    'mixture'

    Args:
        entries: one or more entries.

    Raises:
        OptionError: no entry, an entry without a kind or with several, an unknown option, a value of another type, or
            weights for some only.
        InputError: an unreadable source.
        MissingExtra: a library is not installed.
    """
    if isinstance(entries, str | Mapping) or not isinstance(entries, Sequence) or not entries:
        raise OptionError(f"data must be a list of sources, such as [{{folder: images}}], got {entries!r}.")
    parsed = [_parse_entry(number, entry) for number, entry in enumerate(entries)]
    sources, weights = [source for source, _ in parsed], [weight for _, weight in parsed]
    set_weights = [weight for weight in weights if weight is not None]
    if set_weights and len(set_weights) < len(weights):
        missing = weights.index(None)
        raise OptionError(
            f"data[{missing}] has no weight, but others have. Set it for all sources or for none."
        )
    if set_weights:
        mixture = Mixture(sources, set_weights)
        return mixture if len(sources) > 1 else sources[0]
    return ConcatSource(sources) if len(sources) > 1 else sources[0]


def _parse_entry(number: int, entry: Mapping[str, Any]) -> tuple[Source, Any]:
    if not isinstance(entry, Mapping):
        raise OptionError(f"data[{number}] must be a source, such as {{folder: images}}, got {entry!r}.")
    kinds = [kind for kind in KINDS if kind in entry]
    if len(kinds) != 1:
        named = " and ".join(kinds) if kinds else "none"
        hint = "" if kinds else "".join(did_you_mean(str(key), KINDS) for key in entry)
        raise OptionError(
            f"data[{number}] must contain exactly one of {', '.join(KINDS)}, got {named} (keys: "
            f"{', '.join(map(str, entry))}).{hint}"
        )
    (kind,) = kinds
    location, *options = inspect.signature(KINDS[kind]).parameters
    allowed = [*options, "weight"]
    for key in entry:
        if key != kind and key not in allowed:
            hint = did_you_mean(str(key), allowed)
            raise OptionError(
                f"data[{number}]: options of {kind} are {', '.join(allowed)}, got {key!r}.{hint}"
            )
    hints = inspect.get_annotations(KINDS[kind].__init__, eval_str=True)
    if kind == "hub":
        hints[location] = str  # objects have no spelling in a recipe
    values = {
        (location if key == kind else key): read_option(
            f"data[{number}].{key}", value, hints[location if key == kind else key]
        )
        for key, value in entry.items()
        if key != "weight"
    }
    if values[location] == ():
        raise OptionError(f"data[{number}].{kind} must have at least one entry, got an empty list.")
    return KINDS[kind](**values), entry.get("weight")
