"""Validation of a value by a type annotation, and the words for what an annotation accepts.

An annotation is a `Literal`, ``bool``, ``str``, ``Path``, a dataclass, ``int``, ``float`` (finite), a number type of
`vispe.utils.options`, a list, sequence or tuple of these (sequences become tuples), a dict, or a union. Other
annotations accept any value. NumPy scalars are converted to Python numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

import numpy as np

from vispe.errors import OptionError, did_you_mean
from vispe.utils.interval import Interval


def read_option(option: str, value: Any, annotation: Any) -> Any:
    """Return a validated value, with lists converted to tuples.

    Raises:
        OptionError: the annotation does not accept the value.

    >>> read_option("layers", [0, 3], tuple[int, ...] | None)
    (0, 3)
    """
    try:
        return _read(annotation, value)
    except ValueError:
        words = _words(annotation)
        names = [choice for choice in choices(annotation) if isinstance(choice, str)]
        hint = did_you_mean(value, names) if isinstance(value, str) else ""
        if words.startswith("one of"):
            raise OptionError(f"{option} must be {words}, got {value!r}.{hint}") from None
        verb = "is" if words == "true or false" else "needs"
        raise OptionError(f"{option} {verb} {words}, got {option}={value!r}.{hint}") from None


def _is_class(annotation: Any) -> bool:
    """Whether values must be instances of the annotation."""
    return annotation in (bool, str, dict, NoneType) or is_dataclass(annotation)


def choices(annotation: Any) -> list[Any]:
    """Return the values that an annotation enumerates.

    >>> choices(Literal["max", "none"] | None)
    ['max', 'none']
    """
    if annotation is bool:
        return [False, True]
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    is_union = get_origin(annotation) in (Union, UnionType)
    return [value for option in get_args(annotation) for value in choices(option)] if is_union else []


def _origin_and_args(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the parts of a generic annotation; `int` and `float` are annotated finite numbers."""
    if annotation in (int, float):
        return Annotated, (annotation, Interval())
    return get_origin(annotation), get_args(annotation)


def _read(annotation: Any, value: Any) -> Any:
    origin, args = _origin_and_args(annotation)
    if origin in (Union, UnionType):
        for option in args:
            try:
                return _read(option, value)
            except ValueError:
                continue
        raise ValueError
    if origin is Annotated and get_origin(args[0]) is tuple:
        items = _read(args[0], value)
        if not args[1].accept(len(items)):
            raise ValueError
        return items
    if origin is Annotated:
        return _number(value, *args)
    if origin is tuple:
        return _items(value, args)
    if origin is list or (origin is Sequence and _is_checked(args[0])):
        return (list if origin is list else tuple)(_items(value, (*args, ...)))
    if origin is Literal:
        accepted = any(type(value) is type(choice) and value == choice for choice in args)
    elif annotation is Path:
        accepted = isinstance(value, str | Path)
    elif annotation is bool and isinstance(value, np.bool_):
        return bool(cast("Any", value))
    else:
        annotation = origin if origin is dict else annotation
        accepted = not _is_class(annotation) or isinstance(value, annotation)
    if not accepted:
        raise ValueError
    return value


def _is_checked(annotation: Any) -> bool:
    """Whether an annotation restricts values, for items of a sequence, which may be lazy otherwise."""
    known = get_origin(annotation) in (Annotated, Literal, tuple, list) or annotation in (int, float, Path)
    is_union = get_origin(annotation) in (Union, UnionType)
    return known or _is_class(annotation) or (is_union and all(map(_is_checked, get_args(annotation))))


def _number(value: Any, kind: Callable[[Any], float], limits: Interval) -> float:
    """Return a validated number; NumPy scalars are converted to `kind`, bools are not numbers."""
    number = not isinstance(value, bool) and isinstance(value, Integral if kind is int else Real)
    try:
        accepted = number and limits.accept(float(value))
    except OverflowError:  # integers above the range of float64
        accepted = False
    if not accepted:
        raise ValueError
    return kind(value) if isinstance(value, np.generic) else cast("float", value)


def _items(value: Any, kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the validated entries of a list or tuple; ``(kind, ...)`` accepts any length."""
    if not isinstance(value, list | tuple | np.ndarray) or (isinstance(value, np.ndarray) and not value.ndim):
        raise ValueError
    entries = cast("Sequence[Any]", value)
    each = kinds[:1] * len(entries) if kinds[-1] is ... else kinds
    return tuple(_read(kind, entry) for kind, entry in zip(each, entries, strict=True))


def _words(annotation: Any, many: bool = False) -> str:
    """Return a description of the accepted values, in the plural for entries of a list."""
    origin, args = _origin_and_args(annotation)
    if origin in (Union, UnionType):
        return ", or ".join(_words(option, many) for option in args if option is not NoneType)
    if origin is Annotated and get_origin(args[0]) is tuple:
        count = args[1].words("").removeprefix(" from ").removeprefix(" of ")
        return f"a list of {count} {_words(get_args(args[0])[0], many=True)}"
    if origin is Annotated:
        kind, limits = args
        noun = "an integer" if kind is int else "a number" if limits != Interval() else "a finite number"
        return limits.words(f"{noun.partition(' ')[2]}s" if many else noun)
    if origin is tuple:
        return f"a list of {'' if args[-1] is ... else f'{len(args)} '}{_words(args[0], many=True)}"
    if origin in (list, Sequence):
        return f"a list of {_words(args[0], many=True)}"
    if origin is Literal:
        return f"{'one of ' if len(args) > 1 else ''}{', '.join(map(str, args))}"
    nouns = {str: "string", Path: "path", dict: "dict"}
    if (noun := nouns.get(origin or annotation)) is not None:
        return f"{noun}s" if many else f"a {noun}"
    if is_dataclass(annotation):
        name = getattr(annotation, "__name__", "")
        return f"{name} objects" if many else f"an instance of {name}"
    return "true or false" if annotation is bool else getattr(annotation, "__name__", str(annotation))
