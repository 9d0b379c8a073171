"""Instruction counts of a forward loop that reads the strip of a bias through a tensor descriptor or pointers.

    python eval/bench/strip_descriptor.py [--out eval/results/strip_descriptor.json]

A tensor descriptor copies a box of the strip to shared memory in one instruction (TMA), without addresses per thread.
The loop is that of `forward` for one head of 64 channels in half precision on a grid of whole tiles, compiled for
compute capability 9.0 without a GPU. A box has the queries of one row, so a grid of 32 columns takes two boxes per tile
of 64 queries. Counts are per score and per thread, without latencies.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from timing import environment, version
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vispe.attention.backends.triton.grid.column_tiles import (
    load_rows,
    load_tokens,
    matmul_nt,
    scaled,
    store_rows,
    weighted_sum,
    zeros,
)
from vispe.attention.backends.triton.grid.forward import softmax_weights
from vispe.attention.backends.triton.tiles import Tiles

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))
from tests.attention.triton.compiled.machine_code import (
    count,
    plain_loop,
    report,
)  # (tests are not installed)
from tests.attention.triton.compiled.stand_in_driver import Kernel

RESULTS = Path(__file__).parents[1] / "results"
TILES = (Tiles(64, 64, 4, 2, 128), Tiles(128, 64, 8, 2))  # the measured one, and the one before it
COLUMNS = (32, 64, 128)
POINTERS = ("Q", "K", "V", "ADDRESS", "OUT")
NUMBERS = ("qn", "kn", "vn", "on", "n", "c")


@triton.jit
def forward_loop(Q, K, V, S, ADDRESS, OUT, qn, kn, vn, on, n, c, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                 COLUMNS: tl.constexpr, BOX: tl.constexpr):  # fmt: skip
    """Write the output of one tile of queries; with BOX, S is a descriptor (COLUMNS, rows of the strip * COLUMNS)."""
    first = tl.program_id(0) * BM
    i = first + tl.arange(0, BM)
    q = load_rows(Q, i, qn, n, D, D, False)
    row_max = tl.full((BM,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BM,), tl.float32)
    acc = zeros(BM, D)
    if BOX:
        # keys of query row y start at row (height - 1 - y) of the strip
        at = n - COLUMNS - first // COLUMNS * COLUMNS
    else:
        address = tl.multiple_of(tl.load(ADDRESS + i), 8)
    for start in range(0, n // BN * BN, BN):
        u = start + tl.arange(0, BN)
        if BOX:
            if BM > COLUMNS:
                rows = tl.join(S.load([0, at + start]), S.load([0, at - COLUMNS + start]))
                bias = rows.permute(2, 0, 1).reshape(BM, BN)
            else:
                bias = S.load([first % COLUMNS, at + start])
        else:
            bias = tl.load(S + address[:, None] + u[None, :])
        x = matmul_nt(q, load_tokens(K, u, kn, n, n, D, D, False), bias.to(tl.float32), "ieee")
        weight, rescale, row_max, row_sum = softmax_weights(x, row_max, row_sum, c)
        v = load_tokens(V, u, vn, n, n, D, D, False)
        acc = weighted_sum(weight, v, scaled(acc, rescale[:, None]), "ieee")
    store_rows(OUT, scaled(acc, (1.0 / row_sum)[:, None]), i, i < n, on, D, D)


def counts(size: Tiles, columns: int, box: bool, strip: str) -> dict[str, Any]:
    """Return the resources of the kernel and the counts of its loop."""
    constants = {"D": 64, "BM": size.queries, "BN": size.keys, "COLUMNS": columns, "BOX": box}
    block = f"tensordesc<{strip}[{min(columns, size.queries)}, {size.keys}]>"
    types = {
        **dict.fromkeys(POINTERS, "*fp16"), **dict.fromkeys(NUMBERS, "i32"), **dict.fromkeys(constants, "constexpr"),
        "ADDRESS": "*i32", "c": "fp32", "S": block if box else f"*{strip}",
    }  # fmt: skip
    names = forward_loop.arg_names
    aligned = (*POINTERS, *NUMBERS[:-1], *(() if box else ("S",)))
    source = ASTSource(
        forward_loop,
        {name: types[name] for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=size.options)
    kernel = Kernel(source, compiled.metadata)
    kernel.binary = compiled.asm["cubin"]
    counted, opcodes = report(kernel), [opcode for opcode, _, _ in kernel.instructions]
    loop = plain_loop(counted)
    return {
        "registers": counted["registers"], "spilled_bytes": counted["spilled"],
        "shared_kib": round(counted["shared"] / 1024, 1), "per_score": loop["per_score"], "loads": loop["loads"],
        "barriers": count(opcodes, "BAR", "SYNCS"),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "strip_descriptor.json")
    args = parser.parse_args()
    rows = []
    for size in TILES:
        for strip in ("fp16", "fp32"):
            for columns, box in ((64, False), *((c, True) for c in COLUMNS if size.queries <= 2 * c)):
                key = {"tiles": list(size), "strip": strip, "columns": columns, "descriptor": box}
                rows.append(key | {"triton": version("triton")} | counts(size, columns, box, strip))
                print(rows[-1], flush=True)
    text = ",\n  ".join(json.dumps(row) for row in rows)
    args.out.write_text(
        f'{{\n "environment": {json.dumps(environment("triton"))},\n "rows": [\n  {text}\n ]\n}}\n'
    )


if __name__ == "__main__":
    main()
