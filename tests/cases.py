"""Loops over cases in one test item: `cases` replaces `pytest.mark.parametrize` and reports every failing case.

`cases` has the arguments of `pytest.mark.parametrize` and is stacked in the same way. A test item costs about as much
as a hundred small tensor operations, so short cases share one; tests that are marked slow are parametrized, so that
they can be sampled and distributed over workers. Function-scoped fixtures are shared by all cases of a test, except
`tmp_path`, `monkeypatch` and captured output, which are separate for each case.
"""

import contextlib
import functools
import inspect
import itertools
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

SHOWN = 3  # tracebacks per report
# without an accelerator `torch.manual_seed` formats the stack once per absent kind of device, which takes 1 ms
SEED_TORCH = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed


def seed_everything() -> None:
    """Seed the global generators, before every test and every case."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - libraries that are called draw from the global state
    SEED_TORCH(0)


def label(value: Any, name: str, index: int) -> str:
    """Return the name of a value in reports, by the rules of pytest."""
    if value is None or isinstance(value, str | bool | int | float | complex):
        return str(value)
    short = getattr(value, "__name__", None) or (str(value) if isinstance(value, torch.dtype) else None)
    return short or f"{name}{index}"


def axis(names: str | Sequence[str], values: Iterable, ids: Any = None) -> list[tuple[str, dict[str, Any]]]:
    """Return (name of the case, arguments) for each value of `pytest.mark.parametrize`."""
    several = not isinstance(names, str) or "," in names
    names = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
    rows = []
    for index, value in enumerate(values):
        assert not getattr(value, "marks", ()), "a case with marks needs pytest.mark.parametrize"
        parts, name = (value.values, value.id) if hasattr(value, "marks") else (value, None)
        parts = tuple(parts) if several or hasattr(value, "marks") else (value,)
        assert len(parts) == len(names), f"{len(names)} names {names}, {len(parts)} values {parts}"
        if name is None and ids is not None and not callable(ids):
            ids = list(ids)
            name = ids[index] if ids[index] is None else str(ids[index])
        if name is None:
            chosen = [ids(p) if callable(ids) else None for p in parts]
            shown = [
                label(p, n, index) if c is None else str(c)
                for p, n, c in zip(parts, names, chosen, strict=True)
            ]
            name = "-".join(shown)
        rows.append((name, dict(zip(names, parts, strict=True))))
    return rows


def combined(rows: Iterable[tuple]) -> list[tuple[str, dict[str, Any]]]:
    """Return (name, arguments) for each combination of one case per axis."""
    return [
        ("-".join(name for name, _ in row), {k: v for _, arguments in row for k, v in arguments.items()})
        for row in rows
    ]


def pairs_covered(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return few combinations of indices that contain every pair of values of two axes."""
    axes = range(len(sizes))
    if len(sizes) < 2:
        return [(k,) for k in range(sizes[0])]
    left = {
        (i, a, j, b)
        for i, j in itertools.combinations(axes, 2)
        for a in range(sizes[i])
        for b in range(sizes[j])
    }
    rows = []
    while left:
        i, a, j, b = min(left)
        row: dict[int, int] = {i: a, j: b}
        for axis_ in axes:  # extend by the value that covers most of what is left
            if axis_ not in row:
                gains = [
                    sum(
                        ((o, v, axis_, new) if o < axis_ else (axis_, new, o, v)) in left
                        for o, v in row.items()
                    )
                    for new in range(sizes[axis_])
                ]
                # ties take turns, so that no value is tried more often than others
                start = len(rows) % sizes[axis_]
                row[axis_] = max(range(sizes[axis_]), key=lambda n: (gains[n], -((n - start) % sizes[axis_])))
        left -= {(i, row[i], j, row[j]) for i, j in itertools.combinations(axes, 2)}
        rows.append(tuple(row[k] for k in axes))
    return rows


def is_requested(name: str) -> bool:
    """Return whether a case, or a set of parameters of pytest, has the value VISPE_CASE; True without it."""
    value = os.environ.get("VISPE_CASE")
    return not value or f"-{value}-" in f"-{name}-"


def sampled(rows: list) -> list:
    """Return at most VISPE_SAMPLE rows, evenly over all, the first included; all rows without."""
    count = int(os.environ.get("VISPE_SAMPLE", "0")) or len(rows)
    step = max(len(rows) / count, 1)
    return [rows[int(k * step)] for k in range(min(count, len(rows)))]


@contextlib.contextmanager
def isolated(fixtures: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """Yield fixtures with the folder, patches and output of one case alone."""
    own = dict(fixtures)
    if "caplog" in own:
        own["caplog"].clear()
    for capture in {"capsys", "capfd"} & set(own):
        own[capture].readouterr()
    with pytest.MonkeyPatch.context() as patch:
        if "tmp_path" in own:
            own["tmp_path"] = own["tmp_path"] / name
            own["tmp_path"].mkdir()
        if "monkeypatch" in own:
            own["monkeypatch"] = patch
        yield own


def run_cases(
    function: Callable, rows: Sequence[tuple[str, dict[str, Any]]], *args: Any, **fixtures: Any
) -> None:
    """Call the function with each case; fail at the end with all cases that failed, skip if all were skipped."""
    assert rows, "there are no cases"
    failures, skipped = [], []
    for index, (name, arguments) in enumerate(rows):
        seed_everything()
        try:
            with isolated(fixtures, str(index)) as own:
                function(*args, **own, **arguments)
        except pytest.skip.Exception as reason:
            skipped.append(f"[{name}] {reason}")
        except (Exception, pytest.fail.Exception):
            failures.append((name, pytest.ExceptionInfo.from_current()))
    if failures:
        lines = [f"{len(failures)} of {len(rows)} cases fail:"]
        lines += [f"  [{name}] {(info.exconly().splitlines() or [''])[0][:200]}" for name, info in failures]
        for name, info in failures[:SHOWN]:
            info.traceback = info.traceback[1:]  # without run_cases
            lines += ["", f"____ [{name}]", str(info.getrepr(style="short"))]
        pytest.fail("\n".join(lines), pytrace=False)
    if len(skipped) == len(rows):
        pytest.skip("; ".join(dict.fromkeys(skipped)))


def _looping(decorated: Callable, rows_of: Callable[[str], list], axes: list) -> Callable:
    """Return a test without the arguments of the axes, which loops over `rows_of(extent)`."""
    function = getattr(decorated, "_function", decorated)
    names = {name for rows in axes for _, arguments in rows[:1] for name in arguments}

    @functools.wraps(decorated)  # with its marks
    def test(*args: Any, extent: str = "all", **fixtures: Any) -> None:
        rows = rows_of(extent)
        requested = [row for row in rows if is_requested(row[0])]
        if rows and not requested:  # a part of a product may lack the value
            pytest.skip(f"none of {len(rows)} cases has the value {os.environ['VISPE_CASE']}")
        run_cases(function, requested, *args, **fixtures)

    parameters = inspect.signature(function).parameters
    assert names <= set(parameters), f"{function.__name__} has no arguments {sorted(names - set(parameters))}"
    test.__signature__ = inspect.Signature([p for name, p in parameters.items() if name not in names])
    test._function, test._axes = function, axes
    return test


def cases(names: str | Sequence[str], values: Iterable, ids: Any = None) -> Callable[[Callable], Callable]:
    """Return a decorator that loops over values, with the arguments of `pytest.mark.parametrize`."""
    rows = axis(names, values, ids)

    def decorate(function: Callable) -> Callable:
        axes = [rows, *getattr(function, "_axes", [])]
        return _looping(function, lambda _: combined(itertools.product(*axes)), axes)

    return decorate


def pairwise(test: Callable) -> Callable:
    """Let stacked `cases` run every pair of values; every combination as well where long tests run."""
    axes = test._axes

    def rows(extent: str) -> list:
        if extent == "all":
            return combined(sampled(list(itertools.product(*axes))))
        chosen = pairs_covered([len(row) for row in axes])
        return combined([row[k] for row, k in zip(axes, indices, strict=True)] for indices in chosen)

    looped = _looping(test, rows, axes)
    extent = inspect.Parameter("extent", inspect.Parameter.KEYWORD_ONLY)
    looped.__signature__ = inspect.Signature([*looped.__signature__.parameters.values(), extent])
    extents = ["pairs", pytest.param("all", marks=pytest.mark.slow)]
    return pytest.mark.parametrize("extent", extents)(looped)
