"""Benchmark of attention with a position bias: fused kernels against all other backends on this machine.

    python eval/bench/attention.py [--minutes 9] [--out eval/results/attention_<device>.json]
    python eval/bench/attention.py --device cpu
    TRITON_INTERPRET=1 python eval/bench/attention.py --dry-run      (tiny tensors, without times)

All kernels are checked against float64 first; a failed check stops the program, unless --force. Rows are measured in
order of importance and stored one by one: an interrupted run resumes, and after a change of the kernels only their rows
are measured again. With one thread, CPU time of the process is measured, which depends little on other processes.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from pathlib import Path

import torch
from timing import environment

import vispe
from vispe.experimental.speed import Bench, judge, plan_for, table

RESULTS = Path(__file__).parents[1] / "results"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="cuda if there is one, else cpu")
    parser.add_argument("--minutes", type=float, help="stop before the next row when they are over")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--fresh", action="store_true", help="measure all again, also what the file has")
    parser.add_argument("--force", action="store_true", help="time kernels also when a check fails")
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny tensors; results are stored only with --out"
    )
    parser.add_argument("--threads", type=int, default=1, help="of a CPU")
    parser.add_argument("--quick", action="store_true", help="what `vispe bench attention` measures")
    args = parser.parse_args()
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(args.threads)
    kind = "dry" if args.dry_run else "quick" if args.quick else "protocol"
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    out = args.out or RESULTS / f"attention_{re.sub(r'[^a-z0-9]+', '_', name.lower())}.json"
    path = args.out if kind != "protocol" else out
    facts = {k: v for k, v in environment().items() if k in ("commit", "machine", "cpu")}
    bench = Bench(
        plan_for(kind, device), device, path, fresh=args.fresh, minutes=args.minutes, say=say, extra=facts
    )
    passed = bench.check()
    if passed is False and not args.force:
        say("A check failed, so nothing is timed; --force times it all the same.")
        return 1
    missing = bench.run() if passed is not None else -1
    bench.state["targets"] = judge(bench.state)
    bench.save()
    print(table(bench.state))
    if missing:
        say(
            "The time was over before the checks were done."
            if missing < 0
            else f"{missing} rows are not measured yet."
        )
    return 0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "(?i).*(kernel|attention)", UserWarning)  # of SDPA, at length
    say(f"vispe {vispe.__version__}")
    sys.exit(main())
