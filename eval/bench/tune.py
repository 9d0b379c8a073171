"""Choose the tiles of the fused kernels on this GPU, and write them into vispe/attention/backends/triton/tiles.json.

    python eval/bench/tune.py [--minutes 9] [--kernels forward grad_q] [--widths 64] [--dtypes half] [--out FILE]
    TRITON_INTERPRET=1 python eval/bench/tune.py --dry-run --out FILE      (tiny tensors)

Every candidate is checked against float64 before it is timed. A row of the file changes if a candidate is at least 2 %
faster than the current tiles, and then has the name of the GPU. The file is written after each row, and rows of this
GPU are not measured again without --fresh. The library itself never tunes at run time.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import torch
from timing import version

from vispe import Grid
from vispe.attention.backends.triton import tiles
from vispe.attention.bias.strip.float16_runs import pack_with_copy
from vispe.attention.bias.strip.layout import layout_of
from vispe.attention.bias.strip.packed import pack
from vispe.experimental.speed.correctness import LIMITS, check
from vispe.experimental.speed.timing import timed, warm

KERNELS = ("forward", "grad_q", "grad_kv", "grad_bias")
WIDTHS = (64, 96, 128)
DTYPES = {"half": "bfloat16", "float32": "float32", "tf32x3": "float32"}
# at most six a row: few instructions per score and no spills in the loop, or two programs a multiprocessor, as compiled
# with Triton 3.6 for compute capability 9.0; the last number is a limit of registers
HALF = {
    ("forward", 64): (
        (64, 64, 4, 2, 128), (64, 64, 4, 3), (128, 64, 8, 2, 128), (64, 128, 4, 2), (64, 64, 4, 2, 168),
        (64, 32, 4, 3, 128),
    ),
    ("grad_q", 64): (
        (64, 64, 4, 3), (64, 64, 4, 2), (64, 128, 4, 2), (64, 64, 4, 2, 168), (64, 64, 4, 3, 168), (64, 32, 4, 3, 168),
    ),
    ("grad_kv", 64): ((64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 2, 168), (32, 64, 4, 2), (64, 32, 4, 2)),
    ("grad_bias", 64): ((64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3, 168), (64, 64, 4, 4), (64, 32, 4, 3)),
    ("forward", 96): ((128, 64, 8, 2), (64, 128, 4, 2), (64, 64, 4, 2), (128, 128, 8, 1), (64, 64, 4, 3)),
    ("grad_q", 96): ((128, 64, 8, 1), (128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 1)),
    ("grad_kv", 96): ((64, 128, 8, 1), (64, 128, 8, 2), (64, 64, 4, 1), (32, 128, 8, 2), (64, 64, 8, 2)),
    ("grad_bias", 96): ((128, 64, 8, 2), (64, 64, 4, 1), (64, 64, 4, 2), (128, 64, 8, 1), (64, 64, 8, 1)),
    ("forward", 128): (
        (128, 128, 8, 2), (64, 128, 4, 2), (64, 64, 4, 2), (128, 64, 8, 2), (64, 64, 4, 2, 128), (64, 64, 4, 3),
    ),
    ("grad_q", 128): ((128, 128, 8, 2), (64, 128, 4, 2), (64, 64, 4, 2), (128, 64, 8, 2), (64, 64, 4, 3)),
    ("grad_kv", 128): (
        (64, 128, 8, 1), (32, 128, 8, 2), (32, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 3), (32, 128, 8, 3),
    ),
    ("grad_bias", 128): ((64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 8, 2), (128, 64, 8, 2), (64, 128, 8, 2)),
}  # fmt: skip
OTHER = {
    "float32": ((32, 32, 4, 1), (32, 32, 8, 1), (16, 32, 4, 1), (32, 64, 8, 1), (64, 32, 8, 1), (64, 64, 8, 1)),
    "tf32x3": ((128, 64, 8, 2), (128, 32, 8, 1), (64, 64, 4, 2), (64, 64, 8, 2), (32, 128, 8, 1), (32, 64, 8, 1)),
}  # fmt: skip
WORK = {  # grid, prefix, samples; with 12 heads
    "short": ((Grid((14, 14), 1), 512), (Grid((16, 16), 1), 512)),
    "long": ((Grid((32, 32), 1), 32), (Grid((37, 37), 1), 16), (Grid((64, 64)), 4)),
}
ODD = {"short": Grid((9, 11), 5), "long": Grid((23, 29), 5)}  # where candidates are checked
TINY = {"short": ((Grid((3, 4), 1), 1),), "long": ((Grid((3, 4), 1), 1),)}
KINDS = {"float16": "distance", "float32": "table"}  # that have such a strip in half precision
MARGIN = 0.98


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS)
    parser.add_argument("--widths", nargs="+", type=int, choices=WIDTHS, default=WIDTHS)
    parser.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES), default=tuple(DTYPES))
    parser.add_argument("--tokens", nargs="+", choices=tuple(WORK), default=("long", "short"))
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no candidate after these")
    parser.add_argument("--out", type=Path, default=tiles.FILE)
    parser.add_argument("--fresh", action="store_true", help="measure rows of this GPU again")
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny tensors on the CPU, in the interpreter; needs --out"
    )
    args = parser.parse_args()
    if args.dry_run and args.out == tiles.FILE:
        parser.error("--dry-run needs --out: its times mean nothing")
    if not args.dry_run and not torch.cuda.is_available():
        parser.error("tiles are measured on a GPU, and torch finds none")
    end = time.monotonic() + 60 * args.minutes
    device = "cpu" if args.dry_run else "cuda"
    older = not args.dry_run and torch.cuda.get_device_capability() < (9, 0)
    gpu = "the interpreter" if args.dry_run else torch.cuda.get_device_name()
    origin = f"{gpu}, triton {version('triton')}"
    rows = json.loads((args.out if args.out.exists() else tiles.FILE).read_text())
    order = product(args.dtypes, args.widths, args.tokens, args.kernels)
    for dtype, width, tokens, kernel, strip_ in ((*o, s) for o in order for s in strips(o[3], o[0])):
        key = {"sm": 80 if older else 90, "width": width, "dtype": dtype, "strip": strip_, "tokens": tokens,
               "kernel": kernel}  # fmt: skip
        row = next((r for r in rows if key.items() <= r.items()), None)
        # exact float32 has no rows for 96 columns
        if row is None or (row["from"] == origin and not args.fresh):
            continue
        # products of float32 are split where torch may round them
        torch.set_float32_matmul_precision("high" if dtype == "tf32x3" else "highest")
        best = tune(key, tiles.Tiles(*row["tiles"]), device, older, end)
        if best is None:
            say("The time is over; run again to go on.")
            break
        # without a limit of registers there is no fifth number
        row |= {"tiles": list(best[:4] if best.registers == 0 else best), "from": origin}
        write(args.out, rows)
    return 0


def tune(key: dict[str, Any], now: tiles.Tiles, device: str, older: bool, end: float) -> tiles.Tiles | None:
    """Return the best tiles of one row; None if the time limit was reached before all candidates were measured."""
    dry = device == "cpu"
    dtype = getattr(torch, DTYPES[key["dtype"]])
    known = HALF[key["kernel"], key["width"]] if key["dtype"] == "half" else OTHER[key["dtype"]]
    candidates = dict.fromkeys([now, *(tiles.Tiles(*c) for c in known[: 2 if dry else None])])
    width = 16 if dry else key["width"]
    works = [
        work(key["kernel"], grid, batch, width, dtype, device, key["strip"])
        for grid, batch in (TINY if dry else WORK)[key["tokens"]]
    ]
    result: dict[tiles.Tiles, list[float]] = {}
    for size in candidates:
        if time.monotonic() > end:
            return None
        with trying(key, size, older):
            try:
                wrong = check_tiles(key, width, dtype, device)
                result[size] = [] if wrong else [milliseconds(run, device) for run in works]
            except Exception as error:  # such tiles do not fit on this GPU
                wrong = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"[:150]
        summary = wrong or ", ".join(f"{ms:.4g} ms" for ms in result[size])
        say(f"{' '.join(str(v) for v in key.values())} {tuple(size)}: {summary}")
    result = {size: times for size, times in result.items() if times}
    if not result:
        return now
    base = result.get(now, [math.inf] * len(works))
    score = {s: statistics.geometric_mean([t / b if b < math.inf else t for t, b in zip(times, base, strict=True)])
             for s, times in result.items()}  # fmt: skip
    best = min(score, key=lambda s: score[s])
    return now if now in score and score[best] > MARGIN else best


@contextmanager
def trying(key: dict[str, Any], size: tiles.Tiles, older: bool) -> Iterator[None]:
    """Let one kernel run with other tiles."""
    entries = tiles.table_for(key["dtype"], older)[key["kernel"], key["tokens"], key["strip"]]
    before = entries[key["width"]]
    entries[key["width"]] = size
    try:
        yield
    finally:
        entries[key["width"]] = before


def check_tiles(key: dict[str, Any], width: int, dtype: torch.dtype, device: str) -> str | None:
    """Return the error of the candidate tiles, or None."""
    grid = Grid((3, 4), 1) if device == "cpu" else ODD[key["tokens"]]
    limits = LIMITS[DTYPES[key["dtype"]]]
    slack = 2 if device == "cpu" else 1  # the interpreter cuts bfloat16 where a GPU rounds
    kinds = (KINDS[key["strip"]],) if key["dtype"] == "half" else ("distance", "table")
    for kind in kinds:
        errors = check(grid, width, dtype, kind, device, "triton")["errors"]
        for name, error in errors.items():
            if not error <= slack * limits[name != "out"]:
                return f"wrong: {name} with {kind} has a relative error of {error:.1e}"
    return None


def strips(kernel: str, dtype: str) -> tuple[str, ...]:
    """Return in which dtypes a kernel finds its strip: distances in half precision, tables in float32 and a copy."""
    return ("float32",) if dtype in ("float32", "tf32x3") or kernel == "grad_bias" else ("float16", "float32")


def work(
    kernel: str, grid: Grid, batch: int, width: int, dtype: torch.dtype, device: str, stored: str
) -> Callable[[int], Any]:
    """Return what is timed: the launch of one kernel (with that of its companion, for gradients of q, k and v).

    'grad_once': of the gradients of q, k and v in one pass.
    """
    from vispe.attention.backends.triton.grid.launch import run_forward
    from vispe.attention.backends.triton.grid.launch_backward import run_backward, run_bias

    heads = 2 if device == "cpu" else 12
    batch = max(1, batch // 8) if dtype == torch.float32 else batch
    make = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=make, device=device)

    layout = layout_of(grid.shape, grid.prefix)
    table = random(heads, *(2 * n - 1 for n in grid.shape))
    scale = width**-0.5
    copy = None
    if stored == "float32" and dtype != torch.float32:
        packed, edge, copy = pack_with_copy(table, None, layout, scale, dtype)
    else:
        packed, edge = pack(table, None, layout, scale, getattr(torch, stored))
    address, base = layout.patches_first(device)
    q, k, v, grad = (random(batch, grid.tokens, heads, width).to(dtype).transpose(1, 2) for _ in range(4))
    bias = (packed, address, edge)
    end = None, layout.selected, scale, None, copy
    out, lse = run_forward(q, k, v, *bias, *end)
    if kernel == "forward":
        return lambda _: run_forward(q, k, v, *bias, *end)
    arguments = (grad, q, k, v, out, lse, *bias, *end)
    if kernel != "grad_bias":
        return lambda _: run_backward(*arguments, once=kernel == "grad_once")
    *_, delta = run_backward(*arguments)
    sharers = layout.sharers
    return lambda _: run_bias(
        grad, q, k, v, lse, delta, *bias, None, base, layout.selected, scale, layout.length, sharers, False
    )


def milliseconds(run: Callable[[int], Any], device: str) -> float:
    """Return the median time of a launch."""
    warm(run, device, 0.0 if device == "cpu" else 0.05)
    return statistics.median(timed(run, device, 1 if device == "cpu" else 50)[0])


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write the table, a row a line."""
    path.write_text("[\n" + ",\n".join(f" {json.dumps(row)}" for row in rows) + "\n]\n")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
