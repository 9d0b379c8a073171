"""Registry of position schemes: names and spec strings, such as ``'mrope_i(spatial_reset=true)'``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar, cast

from vispe.encodings.metadata import list_encodings
from vispe.encodings.spec import SCHEME_NAMES, parse_text
from vispe.errors import OptionError, UnknownName, did_you_mean
from vispe.multimodal.scheme import Scheme

S = TypeVar("S", bound=type[Scheme])
_SCHEMES: dict[str, type[Scheme]] = {}
BAPA = "Balanced Position Assignment, https://arxiv.org/abs/2509.21984"
# other names of schemes: name, options and paper
ALIASES: dict[str, tuple[str, Mapping[str, Any], str]] = {"bapa": ("mousi", {"share": "all"}, BAPA)}
SCHEME_NAMES.update(ALIASES)


def register_scheme(cls: S) -> S:
    """Class decorator: register a `Scheme` under its `name`.

    Raises:
        OptionError: the name is used by another class.

    Example:
        >>> from vispe.multimodal.schemes.mrope import MRoPE
        >>> register_scheme(MRoPE) is MRoPE
        True
    """
    if cls.name in _SCHEMES and _SCHEMES[cls.name] is not cls:
        raise OptionError(
            f"The scheme name {cls.name!r} is already used by {_SCHEMES[cls.name].__qualname__}. Choose another name."
        )
    _SCHEMES[cls.name] = cls
    SCHEME_NAMES.add(cls.name)
    return cls


def list_schemes() -> list[str]:
    """Return the names of all position schemes, sorted.

    Example:
        >>> import vispe.multimodal
        >>> "mrope" in list_schemes()
        True
    """
    return sorted(_SCHEMES)


def scheme_class(name: str) -> type[Scheme]:
    """Return the class that is registered as `name`.

    Raises:
        UnknownName: the name does not exist; the message has close matches (including encodings) and all names.

    Example:
        >>> import vispe.multimodal
        >>> scheme_class("mrope").__name__
        'MRoPE'
    """
    name = ALIASES[name][0] if name in ALIASES else name
    if name not in _SCHEMES:
        encodings = list_encodings()
        if name.partition(".")[0] in encodings:
            raise UnknownName(
                f"There is no position scheme {name!r}: it is an encoding, for vision transformers. Use "
                f"vispe.create_encoding({name!r}), or vispe.convert(model, {name!r})."
            )
        hint = did_you_mean(name, [*_SCHEMES, *ALIASES, *encodings])
        raise UnknownName(f"There is no position scheme {name!r}.{hint} Known: {', '.join(list_schemes())}.")
    return _SCHEMES[name]


@dataclass(frozen=True)
class SchemeInfo:
    """Metadata of a position scheme with default options.

    Attributes:
        name: name in the registry.
        summary: one-line description.
        paper: title and link; empty without one.
        axes: coordinates of a token.
        options: option name to its default.
        text_exact: whether pure text is rotated exactly (bitwise) as by 1D RoPE.
        by_head: whether the allocation depends on the head; such schemes need attention over all keys,
            so they cannot be used in models with sliding windows.

    Example:
        >>> import vispe.multimodal
        >>> info = scheme_info("mrope")
        >>> info.axes, info.text_exact, info.by_head
        (3, True, False)
    """

    name: str
    summary: str
    paper: str
    axes: int
    options: dict[str, Any]
    text_exact: bool
    by_head: bool


def scheme_info(name: str) -> SchemeInfo:
    """Return the metadata of a position scheme, for example ``scheme_info('vrope')``.

    Raises:
        UnknownName: the scheme does not exist.

    Example:
        >>> import vispe.multimodal
        >>> scheme_info("vrope").axes
        4
    """
    cls = scheme_class(name)
    scheme = cls(**ALIASES[name][1]) if name in ALIASES else cls()
    paper = ALIASES[name][2] if name in ALIASES else scheme.paper
    by_head = not scheme.added and scheme.allocation(64, 8).ndim == 2
    return SchemeInfo(
        scheme.name, scheme.summary, paper, scheme.axes, scheme.options(), scheme.text_exact, by_head
    )


def create_scheme(spec: str | Mapping[str, Any] | Scheme, **options: Any) -> Scheme:
    """Return the scheme that a spec describes.

    Args:
        spec: a name, a name with options (``'mrope(stride=2)'``), a dict ``{'name': ..., option: ...}``, or a `Scheme`.
        **options: options, added to those of the spec.

    Raises:
        UnknownName: the scheme does not exist.
        OptionError: the option does not exist, or its value is invalid.

    Example:
        >>> import vispe.multimodal
        >>> print(create_scheme("mrope(stride=2)"))
        mrope(stride=2)
        >>> create_scheme("mrope", stride=3).stride
        3
    """
    if isinstance(spec, Scheme):
        if not options:
            return spec
        spec = {"name": spec.name, **spec.options()}
    if isinstance(spec, str):
        terms = parse_text(spec)
        if len(terms) != 1:
            raise OptionError(f"Position schemes cannot be summed, got {len(terms)} in {spec!r}. Use one.")
        name, values = terms[0]
    elif not isinstance(cast("object", spec), Mapping):
        raise OptionError(
            f"A position scheme is a name, a name with options, a dict with its name, or a Scheme, got {spec!r}."
        )
    else:
        values = dict(spec)
        name = str(values.pop("name", ""))
    cls = scheme_class(name)
    if name in ALIASES:
        alias = cls(**ALIASES[name][1])
        if values or options:
            raise OptionError(
                f"The scheme {name!r} is {alias} and has no options, got {', '.join((values | options).keys())}. Use "
                f"{cls.name} with these options."
            )
        return alias
    known = [f.name for f in fields(cast("Any", cls))]
    values = {**values, **options}
    for key in values:
        if key not in known:
            raise OptionError(
                f"The scheme {name!r} has no option {key!r}.{did_you_mean(key, known)} "
                f"It has: {', '.join(known) or 'none'}."
            )
    return cls(**{k: tuple(cast("list[object]", v)) if isinstance(v, list) else v for k, v in values.items()})
