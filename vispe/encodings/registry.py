"""Registry of encodings: names, presets, spec strings, and errors that suggest the closest name.

A spec describes an encoding. It is a name ``'alibi2d'``, a preset ``'alibi2d.dinosaw'``, options
``'alibi2d(slopes=learned,wrap=false)'`` (``:`` is accepted for ``=``), a sum ``'rope_axial+alibi2d'``, a dict
``{'name': ..., option: ...}``, a list of these (a sum), or an `Encoding`.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, TypeGuard, TypeVar, cast

from vispe.encodings.base import HOST_FACTS, Additive, Biased, Encoding, Mixing, Rotary
from vispe.encodings.parts.positions.sampler import Sampler
from vispe.encodings.spec import SCHEME_NAMES, parse_text
from vispe.errors import OptionError, UnknownEncoding, VispeError, did_you_mean

Spec = Any
E = TypeVar("E", bound=type[Encoding])
KINDS: dict[str, type[Encoding]] = {
    "additive": Additive,
    "rotary": Rotary,
    "bias": Biased,
    "mixing": Mixing,
    "positions": Sampler,
}
_REGISTRY: dict[str, type[Encoding]] = {}
# encoding name to module, from file names alone: importing vispe imports no encoding
_FILES = {
    file.stem: ".".join(("vispe.encodings", *file.relative_to(Path(__file__).parent).with_suffix("").parts))
    for kind in KINDS
    for file in sorted(Path(__file__).with_name(kind).rglob("[a-z]*.py"))
}


def register(cls: E) -> E:
    """Class decorator: register an `Encoding` under its `name`.

    Raises:
        OptionError: the name is missing, not lower snake case, or used by another class.

    Example:
        >>> from vispe.encodings.base import Biased
        >>> class Tilt(Biased):
        ...     name = "tilt"
        >>> register(Tilt) is Tilt
        True
    """
    name = cls.name
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise OptionError(f"{cls.__name__} needs a lower_snake name to be registered, got name={name!r}.")
    # the same class may be registered again, but no other class under its name
    if _FILES.get(name, cls.__module__) != cls.__module__ or _REGISTRY.get(name, cls) is not cls:
        raise OptionError(
            f"The name {name!r} is already used by {encoding_class(name).__qualname__}. Choose another name."
        )
    _REGISTRY[name] = cls
    return cls


@cache
def _load_plugins() -> None:
    """Import the third-party modules of the entry-point group `vispe.encodings`."""
    for point in metadata.entry_points(group="vispe.encodings"):
        try:
            loaded = point.load()
        except Exception as error:  # one broken package must not disable all encodings
            source = point.dist.name if point.dist else "an unknown package"
            warnings.warn(
                f"The encoding {point.name!r} of {source} cannot be loaded from {point.value!r}, got "
                f"{type(error).__name__}: {error}. Update or uninstall the package.",
                RuntimeWarning,
                stacklevel=2,
            )
            continue
        if inspect.isclass(loaded) and issubclass(loaded, Encoding):
            register(loaded)
        elif not inspect.ismodule(loaded):  # a module registers its classes itself
            raise OptionError(
                f"The entry point {point.name!r} of group vispe.encodings must be a class derived from vispe.Encoding, "
                f"or a module that registers one, got {loaded!r}."
            )


def _find_class(name: str) -> type[Encoding] | None:
    """Return the class registered as `name`, importing its module if necessary, or None."""
    if name not in _REGISTRY and name in _FILES:
        defined = vars(import_module(_FILES[name])).values()
        # the module may have been imported while another registry was in use, as in tests
        classes = [c for c in defined if inspect.isclass(c) and issubclass(c, Encoding)]
        _REGISTRY.update((name, c) for c in classes if c.name == name and c.__module__ == _FILES[name])
    return _REGISTRY.get(name)


def encoding_classes() -> dict[str, type[Encoding]]:
    """Return all classes by name, importing their modules if necessary."""
    _load_plugins()
    classes = {name: _find_class(name) for name in {**_FILES, **_REGISTRY}}
    return {name: cls for name, cls in classes.items() if cls is not None}


def natural_order(names: Iterable[str]) -> list[str]:
    """Return names sorted, with digits compared as integers."""
    return sorted(names, key=lambda n: [int(t) if t.isdigit() else t for t in re.split(r"(\d+)", n)])


def encoding_class(name: str) -> type[Encoding]:
    """Return the class that is registered as `name`.

    Raises:
        UnknownEncoding: the name does not exist; the message lists close matches (including position schemes if
            `vispe.multimodal` is imported) and all names.

    Example:
        >>> encoding_class("alibi2d").__name__
        'Alibi2D'
    """
    cls = _find_class(name)
    if cls is None:
        _load_plugins()
        cls = _find_class(name)
    if cls is None:
        # presets included, to suggest similar names
        names = [
            n for name, c in encoding_classes().items() for n in (name, *(f"{name}.{p}" for p in c.presets))
        ]
        if name in SCHEME_NAMES:
            raise UnknownEncoding(
                f"There is no encoding {name!r}: it is a position scheme for the language model of a vision-language "
                f"model. Use vispe.convert(model, {name!r}) there, or vispe.multimodal.create_scheme({name!r})."
            )
        hint = did_you_mean(name, [*names, *SCHEME_NAMES])
        raise UnknownEncoding(
            f"There is no encoding {name!r}.{hint} Known: {', '.join(natural_order(encoding_classes()))}."
        )
    return cls


def parse_spec(spec: Spec) -> list[dict[str, Any]]:
    """Return a spec as a list of dicts with 'name' and checked options; presets are resolved.

    Raises:
        UnknownEncoding: a name or preset does not exist.
        OptionError: the text cannot be parsed, or an option does not exist.

    Example:
        >>> parse_spec("rope_axial+alibi2d(slopes=learned)")
        [{'name': 'rope_axial'}, {'name': 'alibi2d', 'slopes': 'learned'}]
    """
    if isinstance(spec, Encoding):
        return [dict(part.spec) for part in spec.parts()]
    if isinstance(spec, str) and spec.strip():
        return [check_term(*term) for term in parse_text(spec)]
    if isinstance(spec, Mapping):
        options = {str(k): v for k, v in cast("Mapping[Any, Any]", spec).items()}
        if not isinstance(options.get("name"), str):
            raise OptionError(f"An encoding as dict needs a 'name', got keys {sorted(options)}.")
        return [check_term(options.pop("name"), options)]
    if is_list(spec):
        return [term for member in spec for term in parse_spec(member)]
    raise OptionError(f"An encoding must be a name, a dict, a list of these or an Encoding, got {spec!r}.")


def is_list(spec: Spec) -> TypeGuard[Sequence[Any]]:
    """Return whether a spec is a list with at least one member, which is a sum."""
    return isinstance(spec, Sequence) and not isinstance(spec, str) and len(cast("Sequence[Any]", spec)) > 0


def plain_terms(spec: Spec) -> list[dict[str, Any]]:
    """Return a spec as `parse_spec` does, without `HOST_FACTS` and without options at their defaults.

    Equivalent specs give equal results, so these are compared and stored with weights.

    Raises:
        UnknownEncoding: a name or preset does not exist.
        OptionError: the text cannot be parsed, or an option does not exist.

    Example:
        >>> plain_terms("alibi2d(slopes=learned)") == plain_terms({"name": "alibi2d", "slopes": "learned"})
        True
    """
    return [_plain(term) for term in parse_spec(spec)]


def _plain(term: dict[str, Any]) -> dict[str, Any]:
    defaults = {
        p.name: _json(p.default) for p in inspect.signature(encoding_class(term["name"])).parameters.values()
    }
    value = {k: _json(v) for k, v in term.items() if k not in HOST_FACTS}
    return {k: v for k, v in value.items() if k == "name" or v != defaults[k]}


def _json(value: Any) -> Any:
    """Return a value with tuples replaced by lists, as read from a file."""
    return [_json(v) for v in cast("Sequence[Any]", value)] if isinstance(value, list | tuple) else value


def check_term(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return a term with name and options, those of a preset included, after checking that they exist."""
    base, dot, preset = name.partition(".")
    cls = encoding_class(base)
    if dot and preset not in cls.presets:
        full = [f"{base}.{p}" for p in cls.presets]
        raise UnknownEncoding(
            f"There is no preset {name!r}.{did_you_mean(name, full)} Known: {', '.join(full) or 'none'}."
        )
    accepted = inspect.signature(cls).parameters
    for option in options:
        if option not in accepted:
            raise OptionError(
                f"{base} has no option {option!r}.{did_you_mean(option, accepted)} "
                f"It accepts: {', '.join(accepted) or 'none'}."
            )
    # options override those of the preset
    return {"name": base, **(cls.presets[preset] if preset else {}), **options}


def spec_error(spec: Spec) -> VispeError | None:
    """Return what is wrong with a spec, or None: to ask whether a name is one of ours without raising."""
    try:
        parse_spec(spec)
    except VispeError as error:
        return error
    return None
