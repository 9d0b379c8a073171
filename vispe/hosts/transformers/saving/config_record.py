"""What the configuration of a model of transformers says of its position scheme and its encoding.

``config.vispe`` stands on the configuration of each part: the scheme on that of the model, the encoding on that of its
vision tower, which is nested in the former. It is plain JSON, so transformers saves, copies and nests it as any other
entry. timm's towers in transformers get ``model_args['pos_embed']`` beside it, from which timm builds them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from torch import nn

from vispe.errors import InputError
from vispe.hosts.common.context import HostState
from vispe.hosts.transformers.language.families import FAMILIES, text_of
from vispe.hosts.transformers.vision.families import family_of
from vispe.hosts.windows import families
from vispe.multimodal import Scheme
from vispe.multimodal.layered import scheme_of
from vispe.version import __version__

KEY = "vispe"
WORD = "pos_embed"  # timm's name for the encoding
_ENTRIES = (
    "version",
    "scheme",
    "late_rotation",
    "parallel",
    "self_extend",
    "encoding",
    "keep_abs",
    "keep_rope",
    WORD,
)


def read(config: Any) -> dict[str, Any]:
    """Return what a configuration names, empty where that is nothing.

    Raises:
        InputError: it is not what this version of vispe writes.
    """
    entry = getattr(config, KEY, None)
    if entry is None:
        return {}
    if not isinstance(entry, dict) or (unknown := sorted(set(entry) - set(_ENTRIES))):
        strange = unknown if isinstance(entry, dict) else entry
        raise InputError(
            f"config.vispe has {strange!r}, which vispe {__version__} does not know; it was written by "
            f"{entry.get('version', 'another version') if isinstance(entry, dict) else 'another program'}."
        )
    return entry


def write(model: nn.Module) -> list[Any]:
    """Let the configurations of a model name what its parts have now, and return these configurations."""
    parts = list(_converted(model))
    for module, entry in parts:
        before, config = read(module.config), module.config
        if hasattr(module, "timm_model"):
            arguments = config.model_args or {}
            first = {WORD: arguments[WORD]} if WORD in arguments and not before else {}
            entry |= {WORD: before[WORD]} if WORD in before else first
            config.model_args = {**arguments, WORD: _plain(module.timm_model.vispe.saved)}
        setattr(config, KEY, {"version": __version__, **_plain(entry)})
    return [module.config for module, _ in parts]


def erase(model: nn.Module) -> None:
    """Take out of the configurations of a model what its parts do not have any more."""
    kept = {id(module.config) for module, _ in _converted(model)}
    for module in model.modules():
        config = getattr(module, "config", None)
        if KEY not in getattr(config, "__dict__", ()) or id(config) in kept:
            continue
        entry = read(config)
        delattr(config, KEY)
        if hasattr(module, "timm_model"):
            arguments = {k: v for k, v in (config.model_args or {}).items() if k != WORD}
            arguments |= {WORD: entry[WORD]} if WORD in entry else {}
            config.model_args = arguments or None


def missing(model: nn.Module) -> Iterator[tuple[nn.Module, dict[str, Any]]]:
    """Yield (part, entry) of everything that configurations name and that the model does not have."""
    there = {(id(part.config), kind): _plain(entry) for part, entry in _converted(model) for kind in entry}
    for module in model.modules():
        for kind in ("scheme", "encoding"):
            if not _takes(module, kind) or kind not in (entry := read(module.config)):
                continue
            have = there.get((id(module.config), kind))
            if have is None or any(entry.get(k) != v for k, v in have.items() if k != WORD):
                yield module, entry


def names(model: nn.Module) -> bool:
    """Return whether the configuration of any part names something that the part can have."""
    kinds = ("scheme", "encoding")
    return any(_takes(m, kind) and kind in read(m.config) for m in model.modules() for kind in kinds)


def shown(entry: dict[str, Any]) -> str:
    """Return what an entry names, in words."""
    if "scheme" in entry:
        return f"the position scheme {scheme_of(entry['scheme'])}"
    return f"the encoding {' + '.join(term['name'] for term in entry['encoding'])}"


def _takes(module: nn.Module, kind: str) -> bool:
    """Whether a module is a part that has a scheme, or an encoding."""
    if not hasattr(getattr(module, "config", None), "to_dict"):
        return False
    if kind == "scheme":
        return isinstance(text_of(module), nn.Module) and getattr(module.config, "model_type", "") in FAMILIES
    return (
        family_of(module) is not None
        or families.family_of(module) is not None
        or "timm_model" in module._modules
    )


def _converted(model: nn.Module) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield (part, entry) of every converted part."""
    for module in model.modules():
        if not hasattr(getattr(module, "config", None), "to_dict"):
            continue
        scheme = vars(module).get("vispe_scheme")
        if isinstance(scheme, Scheme):
            text: Any = text_of(module)
            late = bool(text.vispe_late)
            more = {"parallel": text.vispe_beside, "self_extend": text.vispe_extend}
            more = {name: value for name, value in more.items() if value is not None}
            yield module, {"scheme": {"name": scheme.name, **scheme.options()}, "late_rotation": late, **more}
        state = vars(module._modules.get("timm_model") or module).get("vispe")
        if isinstance(state, HostState):
            spec = state.resolved or state.spec
            yield module, {"encoding": spec, "keep_abs": state.keep_abs, "keep_rope": state.keep_rope}


def _plain(entry: Any) -> Any:
    """Return an entry as it comes back from a file."""
    return json.loads(json.dumps(entry))
