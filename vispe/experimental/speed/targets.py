"""Performance targets, and their comparison with the results.

A ratio is the time of the named contender divided by that of vispe, so higher is better; the worst case counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vispe.attention.bias.strip.layout import layout_of

LONG = 1025  # tokens
SDPA = ("sdpa flash, no bias", "sdpa cudnn, no bias", "sdpa efficient, no bias")
DENSE = tuple(f"sdpa {k}, dense bias {w}" for w in ("cached", "built") for k in ("efficient", "cudnn"))
OURS = ("vispe", "vispe, table")
Row = dict[str, Any]


class BenchmarkRecords:
    """Lookup of the records of a run."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = [r for r in rows if "ms" in r]
        self.by_key = {(r["case"], r["mode"], r["contender"]): r for r in self.rows}

    def ms(self, case: str, mode: str, names: Iterable[str]) -> float | None:
        """Return the shortest time of several contenders, None without any."""
        times = [self.by_key[key]["ms"] for n in names if (key := (case, mode, n)) in self.by_key]
        return min(times, default=None)

    def ratio(
        self, names: Iterable[str], *, modes: tuple[str, ...] = ("forward",), base_mode: str | None = None,
        ours: Iterable[str] = OURS[:1], width: int | None = 64, tokens: int = LONG, batch: int = 1,
    ) -> tuple[float, str] | None:  # fmt: skip
        """Return the worst ratio over all cases of the fastest of `names` to one of `ours`, and its case."""
        ratios = []
        names = tuple(names)
        for row in self.rows:
            if row["contender"] not in ours or row["mode"] not in modes or row["tokens"] < tokens:
                continue
            if row["batch"] < batch or width not in (None, row["width"]):
                continue
            base = self.ms(row["case"], base_mode or row["mode"], names)
            if base is not None:
                ratios.append((round(base / row["ms"], 3), f"{row['case']} {row['mode']} {row['contender']}"))
        return min(ratios, default=None)


def judge(state: dict[str, Any]) -> list[Row]:
    """Return each target with its result and a verdict: 'stretch', 'must', 'missed' or 'not measured'.

    Raises:
        KeyError: the state has no environment or rows.

    Example:
        >>> judge({"environment": {"device": "cpu"}, "rows": []})[0]["verdict"]
        'not measured'
    """
    rows = BenchmarkRecords(state["rows"])
    if state["environment"]["device"] == "cpu":
        return _cpu(rows)
    unbiased, learned = ("vispe, no bias",), ("slopes", "table")
    targets = [
        ("T1", "forward with a bias / without, ours", 0.90, 0.97, rows.ratio(unbiased, ours=OURS, width=None)),
        ("T2", "forward d64 / SDPA flash without bias", 1.0, 1.2, rows.ratio(SDPA[:1])),
        ("T3", "forward d64 / best SDPA without bias", 0.85, 1.0, rows.ratio(SDPA)),
        ("T4a", "forward d128 / SDPA flash without bias", 0.95, 1.1, rows.ratio(SDPA[:1], width=128)),
        ("T4b", "forward d128 / SDPA cuDNN without bias", 0.65, 0.9, rows.ratio(SDPA[1:2], width=128)),
        ("T5", "forward / SDPA with a dense bias", 1.5, 2.5, rows.ratio(DENSE, width=None)),
        ("T6a", "forward / FlexAttention, distance", 1.3, 1.6, rows.ratio(["flex, distance"], width=None)),
        ("T6b", "forward / FlexAttention, table", 1.2, 1.5,
         rows.ratio(["flex, table"], width=None, ours=OURS[1:])),
        ("T7", "forward and backward, frozen or slopes / ours without bias", 0.88, 0.95,
         rows.ratio(unbiased, modes=("frozen", "slopes"), base_mode="frozen", width=None)),
        ("T8", "forward and backward, learned table / ours without bias, b >= 8", 0.65, 0.75,
         rows.ratio(unbiased, modes=learned[1:], base_mode="frozen", width=None, batch=8)),
        ("T9", "forward and backward, learned table / FlexAttention", 3.0, 10.0,
         rows.ratio(["flex, table"], modes=learned[1:], width=None)),
    ]  # fmt: skip
    return [*(_verdict(*target) for target in targets), _memory(rows), _largest(state), _latency(state)]


def _verdict(
    name: str, description: str, must: float, stretch: float, value: tuple[float, str] | None
) -> Row:
    row: Row = {"target": name, "what": description, "must": must, "stretch": stretch}
    if value is None:
        return {**row, "verdict": "not measured"}
    verdict = "stretch" if value[0] >= stretch else "must" if value[0] >= must else "missed"
    return {**row, "found": value[0], "at": value[1], "verdict": verdict}


def _memory(rows: BenchmarkRecords) -> Row:
    """Check the extra memory against the strip, 8 bytes per query, and 8 bytes per token once."""
    description = "extra memory / (strip + 8 bytes per query), forward and frozen; never n x n"
    ratios, square = [], []
    for r in rows.rows:
        if r["contender"] not in OURS or r["tokens"] < LONG or "extra_mib" not in r:
            continue
        dense = r["heads"] * r["tokens"] ** 2 * 2 / 2**20
        if max(r["extra_mib"], r["extra_first_mib"]) >= dense:
            square.append(f"{r['case']} {r['mode']}")
        if r["contender"] == "vispe" and r["mode"] in ("forward", "frozen"):
            ratios.append((round(r["extra_mib"] / _strip_mib(r), 3), f"{r['case']} {r['mode']}"))
    if not ratios:
        return _verdict("T10", description, 1.05, 1.0, None)
    worst, at = max(ratios)
    verdict = "missed" if square or worst > 1.05 else "stretch" if worst <= 1.0 else "must"
    return {**_verdict("T10", description, 1.05, 1.0, (worst, at)), "verdict": verdict, "n_x_n": square}


def _strip_mib(row: Row) -> float:
    shape, _, prefix = row["case"].split()[0].partition("+")
    layout = layout_of(tuple(map(int, shape.split("x"))), int(prefix))
    size = 4 if row["dtype"] == "float32" else 2
    strip = row["heads"] * layout.copies * layout.copy_length * size
    each_token = row["tokens"] * (4 + 4 + 8 * 2 + 1)  # run starts, coordinates
    return (strip + 8 * row["batch"] * row["heads"] * row["tokens"] + each_token) / 2**20


def _largest(state: dict[str, Any]) -> Row:
    row: Row = {"target": "T11", "what": "largest grid that trains with a learned table, h16 b1",
                "must": "128x128", "stretch": "256x256"}  # fmt: skip
    tried = [r for r in state["rows"] if r["contender"] == "vispe, largest"]
    if not tried:
        return {**row, "verdict": "not measured"}
    works = {r["case"].split("+")[0]: r["tokens"] for r in tried if "ms" in r}
    best = max(works, key=lambda name: works[name], default="none")
    tokens = works.get(best, 0)
    verdict = "stretch" if tokens >= 256**2 else "must" if tokens >= 128**2 else "missed"
    return {**row, "found": best, "verdict": verdict}


def _latency(state: dict[str, Any]) -> Row:
    description, new = "kernels compiled for a new grid", state.get("new_grid")
    if not new:
        return _verdict("T12", description, 0, 0, None)
    at = ", ".join(f"{g} {s} s" for g, s in zip(new["grids"], new["seconds"], strict=True))
    count = sum(new["compiled"][1:])
    return {**_verdict("T12", description, 0, 0, (count, at)), "verdict": "missed" if count else "stretch"}


def _cpu(rows: BenchmarkRecords) -> list[Row]:
    """Check the CPU path: time of SDPA without a bias divided by ours, in eval mode."""
    base = SDPA[:1]
    short = rows.ratio(base, tokens=257)
    worst = None
    for row in rows.rows:
        if row["tokens"] == 257 and row["contender"] == "vispe" and row["mode"] == "forward":
            ms = rows.ms(row["case"], "forward", base)
            pair = (round(ms / row["ms"], 3), row["case"]) if ms else None
            worst = min(filter(None, (worst, pair)), default=None)
    return [
        _verdict("C1", "forward at 257 tokens / SDPA without bias", round(1 / 1.15, 3), 1.0, worst),
        _verdict("C2", "forward up to 2049 tokens / SDPA without bias", round(1 / 1.35, 3), 1.0, short),
    ]
