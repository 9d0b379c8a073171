"""Options that are checked by their annotations: what they accept is said once, where they are declared.

An annotation is a `Literal`, ``bool``, one of the numbers below, a tuple of these (lists become tuples), or a union.
Other annotations accept everything. Numbers of numpy become those of Python.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, ParamSpec, TypeVar, Union, cast, get_args, get_origin

import numpy as np

from vispe.errors import OptionError

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Limits:
    """What an option accepts: ``Annotated[float, Limits(...)]`` or ``int`` finite numbers, a tuple so many entries.

    Args:
        least: the smallest number.
        above: in place of it, a number below all that are accepted.
        most: the largest number.
        below: in place of it, a number above all that are accepted.
        step: whole numbers must be multiples of it.

    Example:
        >>> Limits(least=0, below=1).words("number")
        'number of 0 or more and below 1'
    """

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    step: int = 1

    def accept(self, value: float) -> bool:
        """Whether a number is within the limits."""
        return (
            math.isfinite(value)
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
            and (self.step == 1 or value % self.step == 0)
        )

    def words(self, noun: str) -> str:
        """Return the noun with what is accepted, such as 'number above 0'."""
        if self.least is not None and self.most is not None:
            return f"{noun} from {self.least:g} to {self.most:g}"
        ends = {"of {:g} or more": self.least, "above {:g}": self.above, "below {:g}": self.below}
        ends["up to {:g}"] = self.most
        bounds = [text.format(end) for text, end in ends.items() if end is not None]
        bounds += [f"divisible by {self.step}"] if self.step > 1 else []
        return f"{noun} {' and '.join(bounds)}".rstrip()


Number = Annotated[float, Limits()]
Positive = Annotated[float, Limits(above=0)]
NotNegative = Annotated[float, Limits(least=0)]
Share = Annotated[float, Limits(least=0, most=1)]
Chance = Annotated[float, Limits(least=0, below=1)]
Integer = Annotated[int, Limits()]
Whole = Annotated[int, Limits(above=0)]
Count = Annotated[int, Limits(least=0)]
Axes = Annotated[int, Limits(least=1, most=3)]
Even = Annotated[int, Limits(above=0, step=2)]
Shape = Annotated[tuple[Whole, ...], Limits(least=1, most=3)]
Spacing = Annotated[tuple[Positive, ...], Limits(least=1, most=3)]


def read_option(option: str, value: Any, annotation: Any) -> Any:
    """Return a value as its annotation wants it, tuples for lists, or raise `OptionError`.

    >>> read_option("layers", [0, 3], tuple[Count, ...] | None)
    (0, 3)
    """
    try:
        return _read(annotation, value)
    except ValueError:
        words = _words(annotation)
        if words.startswith("one of"):
            raise OptionError(f"{option} must be {words}, got {value!r}.") from None
        verb = "is" if words == "true or false" else "needs"
        raise OptionError(f"{option} {verb} {words}, got {option}={value!r}.") from None


def _read(annotation: Any, value: Any) -> Any:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        for one in args:
            try:
                return _read(one, value)
            except ValueError:
                continue
        raise ValueError
    if origin is Annotated and get_origin(args[0]) is tuple:
        read = _read(args[0], value)
        if not args[1].accept(len(read)):
            raise ValueError
        return read
    if origin is Annotated:
        return _number(value, *args)
    if origin is tuple:
        return _items(value, args)
    if origin is Literal:
        fits = any(type(value) is type(choice) and value == choice for choice in args)
    else:
        fits = annotation not in (bool, NoneType) or isinstance(value, annotation)
    if not fits:
        raise ValueError
    return value


def _number(value: Any, kind: Callable[[Any], float], limits: Limits) -> float:
    """Return a number, checked, those of numpy as `kind`, float or int; truth values are no numbers."""
    number = not isinstance(value, bool) and isinstance(value, Integral if kind is int else Real)
    if not number or not limits.accept(float(value)):
        raise ValueError
    return kind(value) if isinstance(value, np.generic) else cast("float", value)


def _items(value: Any, kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the entries of a list or tuple, each as its kind; ``(kind, ...)`` is any number of one kind."""
    if not isinstance(value, list | tuple | np.ndarray):
        raise ValueError
    entries = cast("Sequence[Any]", value)
    each = kinds[:1] * len(entries) if kinds[-1] is ... else kinds
    return tuple(_read(kind, entry) for kind, entry in zip(each, entries, strict=True))


def _words(annotation: Any, many: bool = False) -> str:
    """Return what an annotation accepts, in the plural for the entries of a list."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return ", or ".join(_words(one, many) for one in args if one is not NoneType)
    if origin is Annotated and get_origin(args[0]) is tuple:
        count = args[1].words("").removeprefix(" from ").removeprefix(" of ")
        return f"a list of {count} {_words(get_args(args[0])[0], many=True)}"
    if origin is Annotated:
        kind, limits = args
        noun = "whole number" if kind is int else "number" if limits != Limits() else "finite number"
        return limits.words(noun.replace("number", "numbers") if many else f"a {noun}")
    if origin is tuple:
        return f"a list of {'' if args[-1] is ... else f'{len(args)} '}{_words(args[0], many=True)}"
    if origin is Literal:
        return f"{'one of ' if len(args) > 1 else ''}{', '.join(map(str, args))}"
    return "true or false" if annotation is bool else getattr(annotation, "__name__", str(annotation))


def declared(cls: type) -> dict[str, Any]:
    """Return the options that the body of one class declares, name to annotation as written; no `ClassVar`."""
    own = inspect.get_annotations(cls)
    return {
        n: a for n, a in own.items() if get_origin(a) is not ClassVar and not str(a).startswith("ClassVar")
    }


def option_signature(cls: type, root: type, first: Sequence[str] = ()) -> inspect.Signature:
    """Return the options of a class as keyword-only parameters with their defaults.

    Those of the class come before those of its bases up to `root`; of the latter, those in `first` come first of all.
    A `ClassVar` fixes an option of a base. Classes that derive from one with a constructor of its own, and this one,
    leave their options to it.
    """
    family = cls.__mro__[: cls.__mro__.index(root)]
    own = [i for i, base in enumerate(family) if "__init__" in vars(base)]
    family = family[own[-1] + 1 :] if own else family
    options: dict[str, Any] = {}
    known: set[str] = set()
    for i, base in enumerate(family):
        new = {name: note for name, note in declared(base).items() if name not in known}
        ahead = {name: new.pop(name) for name in first if i and name in new}
        options = {**ahead, **options, **new}
        known |= inspect.get_annotations(base).keys()
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


_NOTES: dict[type, dict[str, Any]] = {}  # compilers read a dict, and trace into what functools keeps


def _annotations(cls: type) -> dict[str, Any]:
    """Return the options of a class and its bases, name to annotation; that of the class itself counts most."""
    if cls not in _NOTES:
        notes: dict[str, Any] = {}
        for base in cls.__mro__:
            if names := declared(base):
                read = inspect.get_annotations(base, eval_str=True)
                notes = {**{n: read[n] for n in names}, **notes}
        _NOTES[cls] = notes
    return _NOTES[cls]


def check_options(owner: object, names: Sequence[str] | None = None) -> None:
    """Check the options `names` of `owner` by the annotations of its class, by default all, and set them as read.

    Raises:
        OptionError: a value is not accepted; the message has the owner's name, the option, the value and what is
            accepted.
    """
    known = _annotations(type(owner))
    for name in known if names is None else names:
        try:
            value = read_option(name, getattr(owner, name), known[name])
        except OptionError as error:
            raise OptionError(f"{getattr(owner, 'name', type(owner).__name__)}: {error}") from None
        object.__setattr__(owner, name, value)


def check_per_axis(option: str, value: Sequence[float] | None, axes: int) -> None:
    """Raise `OptionError` unless an option that is given has one number for each axis."""
    if value is not None and len(value) != axes:
        raise OptionError(f"{option} needs one number for each of {axes} axes, got {option}={list(value)}.")


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: check the arguments of a function by their annotations.

    >>> @checked
    ... def half(*, size: Whole) -> float:
    ...     return size / 2
    >>> half(size=0)
    Traceback (most recent call last):
    vispe.errors.OptionError: size needs a whole number above 0, got size=0.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        known = inspect.get_annotations(function, eval_str=True)
        for name, value in bound.arguments.items():
            bound.arguments[name] = read_option(name, value, known.get(name, Any))
        return function(*bound.args, **bound.kwargs)

    return call
