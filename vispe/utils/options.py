"""Options of classes and functions, validated by their annotations.

`vispe.utils.option_values` lists the supported annotations; those of numbers, shapes and spacings are below.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cache, wraps
from typing import Annotated, Any, ParamSpec, TypeVar, cast, get_origin

from vispe.errors import OptionError, counted
from vispe.utils.declared_options import annotations_of
from vispe.utils.interval import Interval
from vispe.utils.option_values import read_option

P = ParamSpec("P")
R = TypeVar("R")

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
        title = title if "name" in annotations_of(type(owner)) else getattr(owner, "name", title)
        raise OptionError(f"{title}: {error}") from None


def _check(owner: object, names: Sequence[str] | None, prefix: str) -> None:
    known = annotations_of(type(owner))
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
