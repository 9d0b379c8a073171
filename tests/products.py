"""Parts of products of cases for the fast suite; the long tests run every combination.

`pairwise` of tests/cases.py has every pair of values, which is every combination where a test has two arguments.
Families of models differ from each other as schemes do, so here each value occurs with some values of the others.
"""

import inspect
import math
from collections.abc import Callable, Iterable
from itertools import product

import pytest

from tests.cases import _looping, combined, sampled


def diagonal(sizes: list[int], times: float) -> list[tuple[int, ...]]:
    """Return combinations of indices with each value of the longest axis `times` times, spread over the others.

    `times` below one is the fraction of these values that occur once.
    """
    longest = max(range(len(sizes)), key=lambda k: sizes[k])
    others = list(product(*(range(n) for k, n in enumerate(sizes) if k != longest)))
    step = max(1, round(0.618 * len(others)))  # neighbours differ in all arguments
    while math.gcd(step, len(others)) > 1:
        step += 1
    chosen: list[tuple[int, ...]] = []
    count, times = (sizes[longest], times) if times >= 1 else (math.ceil(times * sizes[longest]), 1)
    for n in range(count):
        value = n * sizes[longest] // count
        for k in range(min(times, len(others))):
            row = list(others[(n * times + k) * step % len(others)])
            row.insert(longest, value)
            chosen.append(tuple(row))
    return chosen


def partly(times: float) -> Callable[[Callable], Callable]:
    """Return a decorator over stacked `cases` for a part of the combinations; all of them where long tests run.

    With several arguments each value of the longest axis occurs `times` times, in combination with values of the
    others in turn, or once for this fraction of its values; with one argument there are `times` values, evenly over
    all and the first included.
    """

    def decorate(test: Callable) -> Callable:
        axes = test._axes
        sizes = [len(rows) for rows in axes]

        def rows(extent: str) -> list:
            if extent == "all":
                return combined(sampled(list(product(*axes))))
            if len(axes) == 1:
                step = max(1, sizes[0] / times)
                return combined([axes[0][int(k * step)]] for k in range(min(times, sizes[0])))
            chosen = diagonal(sizes, times)
            return combined([row[k] for row, k in zip(axes, indices, strict=True)] for indices in chosen)

        looped = _looping(test, rows, axes)
        extent = inspect.Parameter("extent", inspect.Parameter.KEYWORD_ONLY)
        looped.__signature__ = inspect.Signature([*looped.__signature__.parameters.values(), extent])
        extents = ["part", pytest.param("all", marks=pytest.mark.slow)]
        return pytest.mark.parametrize("extent", extents)(looped)

    return decorate


def slow_except(values: Iterable, fast: Iterable) -> list:
    """Return values for `pytest.mark.parametrize`, those that are not in `fast` for the long tests only.

    A tuple has the values of several arguments.
    """
    fast = list(fast)
    return [
        v if v in fast else pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=pytest.mark.slow)
        for v in values
    ]
