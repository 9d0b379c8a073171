"""Validation of options by their type annotations.

An annotation is a `Literal`, ``bool``, ``str``, ``Path``, a dataclass, one of the number types below (``int`` and
``float`` are `Integer` and `FiniteFloat`), a list, sequence or tuple of these (sequences become tuples), a dict, or a
union. Other annotations accept any value. NumPy scalars are converted to Python numbers.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cache, wraps
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, ParamSpec, TypeVar, Union, cast, get_args, get_origin

import numpy as np

from vispe.errors import OptionError, counted, did_you_mean

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Interval:
    """Range of an option: of finite numbers in ``Annotated[float, Limits(...)]`` (or ``int``), of lengths for tuples.

    Args:
        least: inclusive lower bound.
        above: exclusive lower bound.
        most: inclusive upper bound.
        below: exclusive upper bound.
        step: integers must be multiples of it.

    Example:
        >>> Interval(least=0, below=1).words("number")
        'number of 0 or more and below 1'
    """

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    step: int = 1

    def accept(self, value: float) -> bool:
        """Return whether a number is finite and within the limits."""
        return (
            math.isfinite(value)
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
            and (self.step == 1 or value % self.step == 0)
        )

    def words(self, noun: str) -> str:
        """Return the noun with the accepted range, such as 'number above 0'."""
        if self.least is not None and self.most is not None:
            return f"{noun} from {_plain(self.least)} to {_plain(self.most)}"
        bounds_by_text = {"of {} or more": self.least, "above {}": self.above, "below {}": self.below}
        bounds_by_text["up to {}"] = self.most
        bounds = [text.format(_plain(bound)) for text, bound in bounds_by_text.items() if bound is not None]
        bounds += [f"divisible by {self.step}"] if self.step > 1 else []
        return f"{noun} {' and '.join(bounds)}".rstrip()


def _plain(bound: float) -> str:
    """Return a number with all digits of an integer."""
    return f"{bound:g}" if isinstance(bound, float) else str(bound)


FiniteFloat = Annotated[float, Interval()]
PositiveFloat = Annotated[float, Interval(above=0)]
NonNegativeFloat = Annotated[float, Interval(least=0)]
UnitInterval = Annotated[float, Interval(least=0, most=1)]
Probability = Annotated[float, Interval(least=0, below=1)]
Integer = Annotated[int, Interval()]
PositiveInt = Annotated[int, Interval(above=0)]
NonNegativeInt = Annotated[int, Interval(least=0)]
# the seeds that NumPy, PyTorch and scikit-learn accept
Seed = Annotated[int, Interval(least=0, most=(1 << 32) - 1)]
Axes = Annotated[int, Interval(least=1, most=3)]
PositiveEvenInt = Annotated[int, Interval(above=0, step=2)]
Shape = Annotated[tuple[PositiveInt, ...], Interval(least=1, most=3)]
Spacing = Annotated[tuple[PositiveFloat, ...], Interval(least=1, most=3)]


def read_option(option: str, value: Any, annotation: Any) -> Any:
    """Return a validated value, with lists converted to tuples.

    Raises:
        OptionError: the annotation does not accept the value.

    >>> read_option("layers", [0, 3], tuple[NonNegativeInt, ...] | None)
    (0, 3)
    """
    try:
        return _read(annotation, value)
    except ValueError:
        words = _words(annotation)
        hint = did_you_mean(value, _names(annotation)) if isinstance(value, str) else ""
        if words.startswith("one of"):
            raise OptionError(f"{option} must be {words}, got {value!r}.{hint}") from None
        verb = "is" if words == "true or false" else "needs"
        raise OptionError(f"{option} {verb} {words}, got {option}={value!r}.{hint}") from None


_NUMBERS = {int: Integer, float: FiniteFloat}


def _is_class(annotation: Any) -> bool:
    """Whether values must be instances of the annotation."""
    return annotation in (bool, str, dict, NoneType) or is_dataclass(annotation)


def _choices(annotation: Any) -> list[Any]:
    """Return the values that an annotation enumerates."""
    if annotation is bool:
        return [False, True]
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    is_union = get_origin(annotation) in (Union, UnionType)
    return [value for option in get_args(annotation) for value in _choices(option)] if is_union else []


def _names(annotation: Any) -> list[str]:
    """Return the names that an annotation accepts."""
    return [value for value in _choices(annotation) if isinstance(value, str)]


def _read(annotation: Any, value: Any) -> Any:
    annotation = _NUMBERS.get(annotation, annotation) if isinstance(annotation, type) else annotation
    origin, args = get_origin(annotation), get_args(annotation)
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
    annotation = _NUMBERS.get(annotation, annotation) if isinstance(annotation, type) else annotation
    origin, args = get_origin(annotation), get_args(annotation)
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


def declared(cls: type) -> dict[str, Any]:
    """Return the options declared in the body of a class, name to annotation as written, without `ClassVar`."""
    annotations = inspect.get_annotations(cls)
    return {
        n: a
        for n, a in annotations.items()
        if get_origin(a) is not ClassVar and not str(a).startswith("ClassVar")
    }


def option_signature(cls: type, root: type, first: Sequence[str] = ()) -> inspect.Signature:
    """Return the options of a class as keyword-only parameters with their defaults.

    Options of the class precede those of its bases up to `root`, except that base options in `first` come first. A
    `ClassVar` fixes an option of a base, which is then not a parameter. Options of a class that defines `__init__`, and
    of its bases, are excluded, since its constructor handles them.
    """
    classes = cls.__mro__[: cls.__mro__.index(root)]
    with_init = [i for i, base in enumerate(classes) if "__init__" in vars(base)]
    classes = classes[with_init[-1] + 1 :] if with_init else classes
    options: dict[str, Any] = {}
    names: set[str] = set()
    for i, base in enumerate(classes):
        new = {name: note for name, note in declared(base).items() if name not in names}
        leading = {name: new.pop(name) for name in first if i and name in new}
        options = {**leading, **options, **new}
        names |= inspect.get_annotations(base).keys()
    return inspect.Signature(
        [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=getattr(cls, name, inspect.Parameter.empty),
                annotation=note,
            )
            for name, note in options.items()
        ]
    )


# cache of `_annotations`; a dict, since Dynamo would trace into functools.cache
_ANNOTATIONS: dict[type, dict[str, Any]] = {}


def _annotations(cls: type) -> dict[str, Any]:
    """Return the options of a class and its bases, name to evaluated annotation; subclasses take precedence."""
    if cls not in _ANNOTATIONS:
        notes: dict[str, Any] = {}
        for base in cls.__mro__:
            if names := declared(base):
                evaluated = inspect.get_annotations(base, eval_str=True)
                notes = {**{n: evaluated[n] for n in names}, **notes}
        _ANNOTATIONS[cls] = notes
    return _ANNOTATIONS[cls]


def option_choices(cls: type) -> dict[str, list[Any]]:
    """Return the values of the options of a class that enumerate them: those of a `Literal`, and False and True.

    >>> @dataclass
    ... class Recipe:
    ...     normalize: Literal["max", "none"] | None = None
    ...     wrap: bool = True
    ...     depth: int = 12
    >>> option_choices(Recipe)
    {'normalize': ['max', 'none'], 'wrap': [False, True]}
    """
    return {name: values for name, note in _annotations(cls).items() if (values := _choices(note))}


def check_options(owner: object, names: Sequence[str] | None = None) -> None:
    """Validate the options `names` of `owner` (all by default) by its annotations, and set the converted values.

    Dataclasses among the values are validated too, with dotted names such as ``stages[0].lr``.

    Raises:
        OptionError: a value is not accepted; the message contains owner, option, value and accepted values.
    """
    title = type(owner).__name__
    try:
        _check(owner, names, "")
    except OptionError as error:
        title = title if "name" in _annotations(type(owner)) else getattr(owner, "name", title)
        raise OptionError(f"{title}: {error}") from None


def _check(owner: object, names: Sequence[str] | None, prefix: str) -> None:
    known = _annotations(type(owner))
    for name in known if names is None else names:
        option = f"{prefix}{name}"
        value = read_option(option, getattr(owner, name), known[name])
        object.__setattr__(owner, name, value)
        entries: list[tuple[int | None, Any]] = [(None, value)]
        if get_origin(known[name]) is list:
            entries = list(enumerate(cast("list[Any]", value)))
        for key, entry in entries:
            if is_dataclass(entry) and not isinstance(entry, Options | type):
                _check(entry, None, f"{option}." if key is None else f"{option}[{key}].")


@dataclass(frozen=True)
class Options:
    """Base class of dataclasses of options, whose fields are validated by their annotations.

    >>> @dataclass(frozen=True)
    ... class Smoothing(Options):
    ...     radius: NonNegativeInt = 0
    >>> Smoothing(radius=-1)
    Traceback (most recent call last):
    vispe.errors.OptionError: Smoothing: radius needs an integer of 0 or more, got radius=-1.
    """

    def __post_init__(self) -> None:
        check_options(self)


def check_per_axis(option: str, value: Sequence[float] | None, axes: int) -> None:
    """Raise `OptionError` unless the option is None or has one number per axis."""
    if value is not None and len(value) != axes:
        raise OptionError(
            f"{option} needs one number for each of {counted(axes, 'axis')}, got {option}={list(value)}."
        )


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function to validate its arguments by their annotations.

    Raises:
        OptionError: on call, if an argument is not accepted.

    >>> @checked
    ... def half(*, size: PositiveInt) -> float:
    ...     return size / 2
    >>> half(size=0)
    Traceback (most recent call last):
    vispe.errors.OptionError: half: size needs an integer above 0, got size=0.
    """
    signature = inspect.signature(function)
    owner = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]

    @cache
    def known() -> dict[str, Any]:
        # on the first call, as annotations may name classes that the module defines later
        return inspect.get_annotations(function, eval_str=True)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        for name, value in bound.arguments.items():
            if name in known():
                try:
                    bound.arguments[name] = read_option(name, value, known()[name])
                except OptionError as error:
                    raise OptionError(f"{owner}: {error}") from None
        return function(*bound.args, **bound.kwargs)

    return call
