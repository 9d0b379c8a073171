"""Benchmark of the memory of attention with a position bias on a CPU, forward and backward, by number of tokens.

    python eval/bench/attention_memory.py [alibi2d ...] [--grid-sizes 32 64 128] [--out
    eval/results/attention_memory.json]

Each row is measured in a separate process with one thread: the peak resident memory above that after creating the
inputs (one image, 6 heads of 64 channels, float32), and the CPU time of one step. The step includes all values that a
model computes once per grid. 'none' is SDPA without a bias. Rows of other specs remain in the file.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from timing import environment
from torch.nn import functional as F

from vispe import Grid, attention, create_encoding

RESULTS = Path(__file__).parents[1] / "results"
HEADS, HEAD_DIM = 6, 64
SPECS = (
    "none",
    "alibi2d",
    "alibi2d(slopes=geometric)",
    "lookhere",
    "alibi2d(slopes=learned)",
    "rpb",
    "irpe",
    "irpe(on=qk)",
    "shaw",
)
MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("specs", nargs="*", default=SPECS)
    parser.add_argument(
        "--grid-sizes", type=int, nargs="+", default=(32, 64, 128), help="patches along each side"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "attention_memory.json")
    parser.add_argument("--row", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        print(json.dumps(measure(args.specs[0], args.grid_sizes[0])))
        return
    old = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    rows = {(row["encoding"], row["tokens"]): row for row in old}
    for side in args.grid_sizes:
        for spec in args.specs:
            command = [sys.executable, __file__, spec, "--grid-sizes", str(side), "--row"]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            row = json.loads(done.stdout)
            rows[spec, side * side] = row
            print(row, flush=True)
            text = json.dumps({"environment": environment(), "rows": list(rows.values())}, indent=1)
            args.out.write_text(text + "\n")


def measure(spec: str, side: int) -> dict[str, Any]:
    """Return the peak memory in MiB and the CPU time in seconds of one step, forward and backward."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    grid, width = Grid((side, side)), HEADS * HEAD_DIM
    encoding = None
    if spec != "none":
        encoding = create_encoding(spec, dim=width, num_heads=HEADS, grid=grid.shape, depth=1)
        for parameter in encoding.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
    q, k, v, cotangent = torch.randn(4, 1, HEADS, grid.tokens, HEAD_DIM).unbind()
    q, k, v = (t.clone().requires_grad_() for t in (q, k, v))
    # the first call of a kernel allocates memory that does not depend on its inputs
    F.scaled_dot_product_attention(q[:, :, :64], k[:, :, :64], v[:, :, :64])
    baseline, start = peak(), time.process_time()
    if encoding is None:
        out = F.scaled_dot_product_attention(q, k, v)
    else:
        out = attention(q, k, v, bias=encoding.bias(grid.positions(), 0))
    out.backward(cotangent)
    seconds = time.process_time() - start
    memory = (peak() - baseline) / MIB
    return {
        "encoding": spec,
        "tokens": grid.tokens,
        "mib": round(memory, 1),
        "cpu_seconds": round(seconds, 2),
    }


def peak() -> int:
    """Return the peak resident memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
