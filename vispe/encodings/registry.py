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

from vispe.encodings.base import (
    HOST_FACTS,
    Additive,
    Biased,
    Encoding,
    Mixing,
    Rotary,
)
from vispe.encodings.compose import Compose
from vispe.encodings.parts.positions.sampler import Sampler
from vispe.encodings.parts.preparation import check_samplers
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
_SIZES = ("dim", "num_heads", "head_dim", "depth")  # host facts that an encoding and its host must agree on
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
        return [dict(s) for s in (spec.spec if isinstance(spec, Compose) else [spec.spec])]
    if isinstance(spec, str) and spec.strip():
        return [check_term(*term) for term in parse_text(spec)]
    if isinstance(spec, Mapping):
        options = {str(k): v for k, v in cast("Mapping[Any, Any]", spec).items()}
        if not isinstance(options.get("name"), str):
            raise OptionError(f"An encoding as dict needs a 'name', got keys {sorted(options)}.")
        return [check_term(options.pop("name"), options)]
    if _is_list(spec):
        return [term for member in spec for term in parse_spec(member)]
    raise OptionError(f"An encoding must be a name, a dict, a list of these or an Encoding, got {spec!r}.")


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


def create_encoding(spec: Spec, **options: Any) -> Encoding:
    """Build an encoding.

    Args:
        spec: see the module's docstring.
        **options: options of the encoding (for a single one), and the facts of the host that it needs:
            `dim` (width of the tokens), `num_heads`, `head_dim` (channels of a head, if it differs from
            dim / num_heads), `depth` (blocks) and `grid` (shape of the token grid; encodings with an
            option `axes` are built for its axes, unless `axes` is given). Facts that an encoding does not
            use are ignored; an unknown option is an error.

    Returns:
        The encoding, or a `Compose` for a sum.

    Raises:
        UnknownEncoding: the encoding or preset does not exist.
        OptionError: an option is unknown or has an invalid value, or a required fact is missing.
        UnsupportedCombination: the members of a sum cannot be combined.

    Example:
        >>> create_encoding("alibi2d(slopes=learned)", num_heads=4).config["slopes"]
        'learned'
    """
    facts = {k: options.pop(k) for k in HOST_FACTS if k in options}
    if isinstance(spec, Encoding):
        if options:
            raise OptionError(
                f"create_encoding cannot apply options to an instance, got {sorted(options)} and a {spec.name}. "
                "Pass them to its constructor."
            )
        for part in spec.parts():
            sizes = {k: getattr(part, k) for k in _SIZES if hasattr(part, k)}
            if sizes.get("dim") and sizes.get("head_dim", 0) is None:  # None stands for dim / num_heads
                sizes["head_dim"] = sizes["dim"] // sizes["num_heads"]
            _agrees(part.name, sizes, facts)
        return spec
    if _is_list(spec) and len(spec) > 1:
        built = [create_encoding(member, **facts) for member in spec]  # instances are used unchanged
    elif _is_list(spec):
        return create_encoding(spec[0], **facts, **options)
    else:
        terms = parse_spec(spec)
        # options apply to a single encoding; for a sum, the error below is raised
        built = [_build({**term, **(options if len(terms) == 1 else {})}, facts) for term in terms]
    if options and len(built) > 1:
        raise OptionError(
            f"create_encoding cannot assign options to members of a sum, got {sorted(options)}. "
            "Write them into the spec."
        )
    if len(built) == 1:
        return built[0]
    check_samplers(built)
    return Compose(built)


def _is_list(spec: Spec) -> TypeGuard[Sequence[Any]]:
    return isinstance(spec, Sequence) and not isinstance(spec, str) and len(cast("Sequence[Any]", spec)) > 0


def _agrees(name: str, value: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Raise if an encoding and its host differ in width, number of heads or depth."""
    for fact in _SIZES:
        if value.get(fact) is not None and facts.get(fact) is not None and value[fact] != facts[fact]:
            raise OptionError(
                f"{name} has {fact}={value[fact]} but the model has {fact}={facts[fact]}. "
                f"Omit {fact}: the model supplies it."
            )


def _build(term: dict[str, Any], facts: dict[str, Any]) -> Encoding:
    options = dict(term)
    name = options.pop("name")
    check_term(name, options)
    _agrees(name, options, facts)
    cls = encoding_class(name)
    parameters = inspect.signature(cls).parameters
    supplied = {k: v for k, v in facts.items() if k in parameters and v is not None}
    axes = len(facts.get("grid") or ())
    if axes in cls.ndim and "axes" in parameters and parameters["axes"].default is not None:
        supplied["axes"] = axes  # without the option, the encoding is for the grid of the model
    if (
        "head_dim" not in parameters
        and "dim" in supplied
        and issubclass(cls, Biased | Rotary)
        and not cls.reads_tokens
    ):
        # a class without the option finds the width of its heads as dim / num_heads
        supplied["dim"] = (facts.get("head_dim") or 0) * (facts.get("num_heads") or 0) or supplied["dim"]
    sizes = {**supplied, **options}
    if sizes.get("head_dim") and sizes.get("dim") == sizes["head_dim"] * sizes.get("num_heads", 0):
        # the usual width is not part of the configuration
        supplied.pop("head_dim", None)
        options.pop("head_dim", None)
    # required options that neither the host nor the spec supplies
    missing = [
        p.name for p in parameters.values() if p.default is p.empty and p.name not in {**supplied, **options}
    ]
    if missing:
        raise OptionError(
            f"{name} needs {', '.join(missing)}. Pass create_encoding({name!r}, "
            f"{', '.join(f'{m}=...' for m in missing)})."
        )
    return cls(**{**supplied, **options})


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
