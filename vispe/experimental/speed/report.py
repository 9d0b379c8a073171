"""Text report of the benchmark: all records, the targets, and the fastest contender of each case."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from vispe.errors import counted
from vispe.experimental.speed.cases import MODES, is_forward
from vispe.experimental.speed.targets import OURS, SDPA
from vispe.utils.report.table import text_table

Row = dict[str, Any]
HEAD = (
    "contender", "ms", "spread", "TFLOP/s", "/ no-bias SDPA", "/ ours no bias", "MiB", "error", "cold s",
)  # fmt: skip


def groups(rows: list[Row]) -> Iterator[tuple[str, str, list[Row]]]:
    """Yield the rows of each case and mode."""
    order = {mode: k for k, mode in enumerate(MODES)}
    first = {case: k for k, case in enumerate(dict.fromkeys(r["case"] for r in rows))}
    ranked = sorted(rows, key=lambda r: (first[r["case"]], order[r["mode"]]))
    for (case, mode), group in groupby(ranked, key=lambda r: (r["case"], r["mode"])):
        yield case, mode, list(group)


def bases(rows: list[Row], case: str, mode: str) -> tuple[float | None, float | None]:
    """Return the times without a bias: of the fastest SDPA, and ours."""
    mode = "forward" if is_forward(mode) else "frozen"
    times = {r["contender"]: r["ms"] for r in rows if (r["case"], r["mode"]) == (case, mode) and "ms" in r}
    return min((times[n] for n in SDPA if n in times), default=None), times.get("vispe, no bias")


def table(state: dict[str, Any]) -> str:
    """Return all rows and targets.

    Raises:
        KeyError: the state has no environment, checks or rows.

    Example:
        >>> environment = {"device": "cpu", "cpu": "x86_64", "threads": 1, "versions": {"torch": "2.9"}}
        >>> print(table({"environment": environment, "checks": [], "rows": []}).strip())
        x86_64, 1 thread; torch 2.9; 0 of 0 checks passed
    """
    lines = [_about(state), ""]
    for case, mode, group in groups(state["rows"]):
        best, unbiased = bases(state["rows"], case, mode)
        measured = [HEAD, *(_cells(r, best, unbiased) for r in group if "ms" in r)]
        lines += [f"{case}: {MODES[mode]}", *_aligned(measured), *_failures(group), ""]
    targets = state.get("targets") or []
    if targets:
        keys = ("target", "must", "stretch", "found", "verdict", "what", "at")
        cells = [tuple(str(t.get(key, "")) for key in keys) for t in targets]
        lines += _aligned([(*keys[:-1], "worst at"), *cells], left=(0, 4, 5, 6))
    return "\n".join(lines)


def winners(state: dict[str, Any]) -> str:
    """Return, for every case and mode, the fastest exact contender with a bias, and the time of vispe.

    Raises:
        KeyError: the state has no environment, checks or rows.

    Example:
        >>> environment = {"device": "cpu", "cpu": "x86_64", "threads": 1, "versions": {"torch": "2.9"}}
        >>> print(winners({"environment": environment, "checks": [], "rows": []}).strip())
        x86_64, 1 thread; torch 2.9; 0 of 0 checks passed
    """
    lines = [_about(state), ""]
    for case, mode, group in groups(state["rows"]):
        _, unbiased = bases(state["rows"], case, mode)
        biased = [r for r in group if not r["contender"].endswith(("no bias", "largest"))]
        exact = sorted((r for r in biased if "ms" in r and r["exact"]), key=lambda r: r["ms"])
        if not exact:
            continue
        best = exact[0]
        parts = [f"{best['contender']} wins with {best['ms']:.3g} ms"]
        if unbiased:
            parts.append(f"{best['ms'] / unbiased:.2f} times the time without a bias")
        others = [r for r in exact if r["contender"] not in OURS]
        mine = next((r for r in exact if r["contender"] == "vispe"), None)
        if mine is not None and best is not mine:
            parts.append(f"vispe is at {mine['ms']:.3g} ms")
        elif others and others[0] is not best:
            parts.append(f"next {others[0]['contender']} with {others[0]['ms']:.3g} ms")
        lines.append(f"{case}, {MODES[mode]}: {'; '.join(parts)}.")
    failed = list(dict.fromkeys(r["contender"] for r in state["rows"] if "failure" in r))
    lines += [f"Did not run in some case: {', '.join(failed)}."] if failed else []
    return "\n".join(lines)


def _failures(group: list[Row]) -> list[str]:
    """Return what did not run, each reason once."""
    reasons: dict[str, list[str]] = {}
    for row in group:
        if "failure" in row:
            reasons.setdefault(row["failure"], []).append(row["contender"])
    return [f"  did not run: {'; '.join(names)}: {reason}" for reason, names in reasons.items()]


def _about(state: dict[str, Any]) -> str:
    facts = state["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    name = (
        f"{facts['cpu']}, {counted(facts['threads'], 'thread')}"
        if facts["device"] == "cpu"
        else facts["device"]
    )
    passed = sum(c["passed"] for c in state["checks"])
    return f"{name}; {versions}; {passed} of {counted(len(state['checks']), 'check')} passed"


def _cells(row: Row, best: float | None, unbiased: float | None) -> tuple[str, ...]:
    low, high = row["spread_ms"]
    return (
        row["contender"] + ("" if row["exact"] else " (not exact)"),
        f"{row['ms']:.4g}", f"{low:.4g}-{high:.4g}", f"{row['tflops']:.4g}",
        f"{best / row['ms']:.2f}" if best else "", f"{unbiased / row['ms']:.2f}" if unbiased else "",
        f"{row['extra_mib']:.4g}" if "extra_mib" in row else "", f"{row['error']:.1e}", f"{row['cold_s']:.3g}",
    )  # fmt: skip


def _aligned(cells: list[tuple[str, ...]], left: tuple[int, ...] = (0,)) -> list[str]:
    return [f"  {line}" for line in text_table(cells, left).splitlines()]
