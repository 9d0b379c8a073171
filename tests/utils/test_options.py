"""Validation of options by their annotations, in dataclasses, functions and encodings."""

import inspect
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pytest

import vispe
from tests.cases import cases
from vispe.errors import OptionError
from vispe.utils.interval import Interval
from vispe.utils.option_values import read_option
from vispe.utils.options import (
    FiniteFloat,
    Integer,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveEvenInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Seed,
    Shape,
    UnitInterval,
    check_options,
    checked,
)

VALID = [
    (PositiveInt, 3, 3),
    (PositiveInt, np.int64(3), 3),
    (NonNegativeInt, 0, 0),
    (Integer, -2, -2),
    (PositiveEvenInt, 4, 4),
    (FiniteFloat, -1, -1),
    (PositiveFloat, np.float32(0.5), 0.5),
    (UnitInterval, 1, 1),
    (bool, False, False),
    (bool, np.True_, True),
    (Seed, (1 << 32) - 1, (1 << 32) - 1),
    (Literal["a", "b"], "b", "b"),
    (PositiveFloat | None, None, None),
    (PositiveInt | Literal["head"], "head", "head"),
    (PositiveInt | tuple[FiniteFloat, ...], [1, 2.5], (1.0, 2.5)),
    (Shape, [4, 5], (4, 5)),
    (Shape, np.array([4, 5]), (4, 5)),
    (tuple[PositiveInt, PositiveInt], (4, 5), (4, 5)),
    (Any, {"free": 1}, {"free": 1}),
    (object, 3, 3),
]

INVALID = [
    (PositiveInt, 0, "x needs an integer above 0, got x=0"),
    (PositiveInt, 10**400, f"x needs an integer above 0, got x={10**400}"),
    (Seed, 1 << 32, "x needs an integer from 0 to 4294967295, got x=4294967296"),
    (list[int], np.array(3), "x needs a list of integers, got x=array"),
    (PositiveInt, True, "x needs an integer above 0, got x=True"),
    (PositiveInt, 2.0, "x needs an integer above 0, got x=2.0"),
    (NonNegativeInt, -1, "x needs an integer of 0 or more, got x=-1"),
    (Integer, 0.5, "x needs an integer, got x=0.5"),
    (PositiveEvenInt, 3, "x needs an integer above 0 and divisible by 2, got x=3"),
    (FiniteFloat, float("nan"), "x needs a finite number, got x=nan"),
    (PositiveFloat, float("inf"), "x needs a number above 0, got x=inf"),
    (PositiveFloat, "1", "x needs a number above 0, got x='1'"),
    (NonNegativeFloat, -0.1, "x needs a number of 0 or more, got x=-0.1"),
    (UnitInterval, 1.5, "x needs a number from 0 to 1, got x=1.5"),
    (Probability, 1, "x needs a number of 0 or more and below 1, got x=1"),
    (Annotated[float, Interval(above=0, most=1)], 2, "x needs a number above 0 and up to 1, got x=2"),
    (bool, 1, "x is true or false, got x=1"),
    (bool | None, 1, "x is true or false, got x=1"),
    (Literal["a", "b"], "c", "x must be one of a, b, got 'c'"),
    (Literal[0, 1], True, "x must be one of 0, 1, got True"),
    (PositiveFloat | None, 0, "x needs a number above 0, got x=0"),
    (PositiveInt | Literal["head"], "h", "x needs an integer above 0, or head, got x='h'"),
    (Shape, (), r"x needs a list of 1 to 3 integers above 0, got x=\(\)"),
    (Shape, [1, 2, 3, 4], "x needs a list of 1 to 3 integers above 0"),
    (tuple[PositiveInt, PositiveInt], [1], r"x needs a list of 2 integers above 0, got x=\[1\]"),
    (tuple[FiniteFloat, ...], 3, "x needs a list of finite numbers, got x=3"),
]


@cases(("annotation", "arguments", "expected"), VALID)
def test_valid_values_are_converted(annotation, arguments, expected):
    value = read_option("x", arguments, annotation)
    assert value == expected
    assert type(value) is type(expected)


@cases(("annotation", "arguments", "message"), INVALID)
def test_invalid_values_raise(annotation, arguments, message):
    with pytest.raises(OptionError, match=rf"^{message}"):
        read_option("x", arguments, annotation)


def test_fields_of_a_dataclass_are_validated():
    @dataclass(frozen=True)
    class Ring:
        name: ClassVar[str] = "ring"
        radius: PositiveFloat = 1.0
        centre: tuple[FiniteFloat, FiniteFloat] = (0.0, 0.0)

    ring = Ring(2, [1, 0])
    check_options(ring, ("radius", "centre"))
    assert (ring.radius, ring.centre) == (2.0, (1.0, 0.0))
    with pytest.raises(OptionError, match=r"^ring: radius needs a number above 0, got radius=0\.$"):
        check_options(Ring(0), ("radius", "centre"))


def test_arguments_of_a_function_are_validated():
    @checked
    def spiral(turns: PositiveInt, *, pitch: PositiveFloat = 2):
        """Return both."""
        return turns, pitch

    assert spiral(3) == (3, 2.0)
    assert spiral.__doc__ == "Return both."
    assert list(inspect.signature(spiral).parameters) == ["turns", "pitch"]
    with pytest.raises(OptionError, match="pitch needs a number above 0"):
        spiral(3, pitch=0)
    with pytest.raises(TypeError):
        spiral()


class Base(vispe.Encoding):
    dim: PositiveInt
    axes: PositiveInt = 2
    base: PositiveFloat = 10.0
    learned: bool = False


class Child(Base):
    base = 100.0
    scale: PositiveFloat = 1.0
    learned: ClassVar[bool] = True


class CustomConstructor(Child):
    def __init__(self, *, dim: int) -> None:
        super().__init__(dim=dim, scale=3)


class Plain(vispe.Encoding):
    weight: Any  # not an option: the class defines its own constructor

    def __init__(self, *, gain: float = 1.0) -> None:
        super().__init__()
        self.gain = gain


def test_options_of_encodings_are_constructor_arguments():
    options = {p.name: p.default for p in inspect.signature(Child).parameters.values()}
    assert list(options) == ["dim", "axes", "scale", "base"]
    assert options["base"] == 100.0
    child = Child(dim=4, scale=2)
    assert child.config == {"name": "", "dim": 4, "axes": 2, "scale": 2.0, "base": 100.0}
    assert child.learned is True
    with pytest.raises(TypeError, match="learned"):
        Child(dim=4, learned=False)
    with pytest.raises(TypeError, match="dim"):
        Child()


def test_encodings_with_their_own_constructor():
    assert list(inspect.signature(CustomConstructor).parameters) == ["dim"]
    assert (CustomConstructor(dim=4).dim, CustomConstructor(dim=4).scale, CustomConstructor(dim=4).base) == (
        4,
        3.0,
        100.0,
    )
    assert Plain(gain=2.0).config == {"name": "", "gain": 2.0}
