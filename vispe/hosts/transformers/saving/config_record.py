"""Record of a conversion in the configuration of a model of transformers.

The configuration of each converted part has an entry ``config.vispe``: the scheme is stored in the model's
configuration, and the encoding in the nested configuration of the vision tower. It is plain JSON, so
transformers saves, copies and nests it like any other entry. timm's towers in transformers additionally get
``model_args['pos_embed']``, from which timm builds them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from vispe.errors import InputError
from vispe.hosts.common.context import HostState
from vispe.hosts.transformers.language.families import FAMILIES, language_model_of
from vispe.hosts.transformers.vision.families import family_of
from vispe.hosts.windows import families
from vispe.multimodal import Scheme
from vispe.multimodal.concatenated_scheme import scheme_of
from vispe.utils.version import __version__

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
    """Return the entry of a configuration; empty if there is none.

    Raises:
        InputError: the entry was not written by this version of vispe.
    """
    entry = getattr(config, KEY, None)
    if entry is None:
        return {}
    if not isinstance(entry, dict) or (unknown := sorted(set(entry) - set(_ENTRIES))):
        unsupported = unknown if isinstance(entry, dict) else entry
        raise InputError(
            f"config.vispe must have the entries of vispe {__version__}, got {unsupported!r}, written by "
            f"{entry.get('version', 'another version') if isinstance(entry, dict) else 'another program'}."
        )
    return entry


def write(model: nn.Module) -> list[Any]:
    """Write the current conversion of each part into its configuration, and return these configurations."""
    parts = list(_converted(model))
    for module, entry in parts:
        previous, config = read(module.config), module.config
        if hasattr(module, "timm_model"):
            # the original pos_embed is stored in the entry, for `erase`
            arguments = config.model_args or {}
            original = {WORD: arguments[WORD]} if WORD in arguments and not previous else {}
            entry |= {WORD: previous[WORD]} if WORD in previous else original
            config.model_args = {**arguments, WORD: _plain(module.timm_model.vispe.saved)}
        setattr(config, KEY, {"version": __version__, **_plain(entry)})
    return [module.config for module, _ in parts]


def erase(model: nn.Module) -> None:
    """Remove the entries of configurations whose parts are no longer converted."""
    _erase(model, (getattr(module, "config", None) for module in model.modules()))


@contextlib.contextmanager
def exact(model: nn.Module) -> Iterator[list[Any]]:
    """Context in which the configurations of a model describe exactly the conversions of its parts.

    Models built from one configuration share the configuration object, so its entries may belong to another
    model. At the end of the block, the configurations are restored.

    Yields:
        The configurations of the converted parts.
    """
    configs = list(_configs(model))
    before = [
        {name: vars(config)[name] for name in (KEY, "model_args") if name in vars(config)}
        for config in configs
    ]
    try:
        _erase(model, configs)
        yield write(model)
    finally:
        for config, entries in zip(configs, before, strict=True):
            vars(config).pop(KEY, None)
            for name, value in entries.items():
                setattr(config, name, value)


def _erase(model: nn.Module, configs: Iterable[Any]) -> None:
    """Remove the entries of configurations that do not belong to a converted part of a model."""
    converted = {id(module.config) for module, _ in _converted(model)}
    for config in configs:
        if KEY not in getattr(config, "__dict__", ()) or id(config) in converted:
            continue
        entry = read(config)
        delattr(config, KEY)
        if hasattr(config, "model_args"):
            arguments = {k: v for k, v in (config.model_args or {}).items() if k != WORD}
            arguments |= {WORD: entry[WORD]} if WORD in entry else {}
            config.model_args = arguments or None


def _configs(model: nn.Module) -> Iterator[Any]:
    """Yield each configuration of a model once, with those that are nested in it."""
    waiting, known = [getattr(module, "config", None) for module in model.modules()], set()
    while waiting:
        config = waiting.pop()
        if hasattr(config, "to_dict") and hasattr(config, "__dict__") and id(config) not in known:
            known.add(id(config))
            yield config
            waiting += vars(config).values()


def missing(model: nn.Module) -> Iterator[tuple[nn.Module, dict[str, Any]]]:
    """Yield (part, entry) of each conversion that is named in a configuration and not present in the model."""
    present = {(id(part.config), kind): _plain(entry) for part, entry in _converted(model) for kind in entry}
    for module in model.modules():
        for kind in ("scheme", "encoding"):
            if not _takes(module, kind) or kind not in (entry := read(module.config)):
                continue
            current = present.get((id(module.config), kind))
            if current is None or any(entry.get(k) != v for k, v in current.items() if k != WORD):
                yield module, entry


def names(model: nn.Module) -> bool:
    """Return whether the configuration of any part names a conversion that the part supports."""
    kinds = ("scheme", "encoding")
    return any(_takes(m, kind) and kind in read(m.config) for m in model.modules() for kind in kinds)


def shown(entry: dict[str, Any]) -> str:
    """Return the scheme or encoding of an entry, human-readable."""
    if "scheme" in entry:
        return f"the position scheme {scheme_of(entry['scheme'])}"
    return f"the encoding {' + '.join(term['name'] for term in entry['encoding'])}"


def _takes(module: nn.Module, kind: str) -> bool:
    """Return whether a module supports a conversion of a kind, 'scheme' or 'encoding'."""
    if not hasattr(getattr(module, "config", None), "to_dict"):
        return False
    if kind == "scheme":
        return (
            isinstance(language_model_of(module), nn.Module)
            and getattr(module.config, "model_type", "") in FAMILIES
        )
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
            text: Any = language_model_of(module)
            late = bool(text.vispe_text.late_rotation)
            options = {"parallel": text.vispe_text.parallel, "self_extend": text.vispe_text.self_extend}
            options = {name: value for name, value in options.items() if value is not None}
            yield (
                module,
                {"scheme": {"name": scheme.name, **scheme.options()}, "late_rotation": late, **options},
            )
        state = vars(module._modules.get("timm_model") or module).get("vispe")
        if isinstance(state, HostState):
            spec = state.resolved or state.spec
            yield module, {"encoding": spec, "keep_abs": state.keep_abs, "keep_rope": state.keep_rope}


def _plain(entry: Any) -> Any:
    """Return an entry as plain values, by a round trip through JSON."""
    return json.loads(json.dumps(entry))
