"""Counts of instructions in the machine code of kernels."""

import re

from tests.attention.triton.compiled.calls import run
from tests.attention.triton.compiled.stand_in_driver import stand_in_gpu


def reports(case):
    """Return `report` of each kernel that a case launches, by name; the last launch of a kernel counts."""
    with stand_in_gpu(case.arch) as gpu:
        run(case)
    return {kernel.name: report(kernel) for kernel in gpu.launches}


def plain_loop(report):
    """Return the loop without masks of a kernel of grids, whose tiles are whole."""
    return max(report["loops"], key=lambda loop: (loop["scores"], -loop["per_score"]))


def tile(kernel):
    """Return the queries and keys of a tile: tokens that stay and tokens of the loop, for decomposed biases."""
    sizes = kernel.constants
    return (sizes["BM"], sizes["BN"]) if "BM" in sizes else (sizes["BA"], sizes["R"] * sizes["W"])


def report(kernel):
    """Return the resources of an attention kernel and its counts: in all, and per loop with matrix products."""
    labels, ops, loops = {}, [], []
    for op, operands, label in kernel.instructions:
        if label:
            labels[label] = len(ops)
            continue
        target = re.search(r"\.L_\w+", operands)
        if op.startswith("BRA") and target and target[0] in labels:
            loops.append((labels[target[0]], len(ops)))
        ops.append(op)
    exact = kernel.signature.get("Q") == "*fp32" and kernel.constants["DOT"] == "ieee"
    matrix = ("FFMA",) if exact else ("HGMMA", "HMMA", "UTCHMMA")
    loops = [ops[a : b + 1] for a, b in loops if any(o.startswith(matrix) for o in ops[a : b + 1])]
    counts = {
        "kernel": kernel.name, "arch": kernel.arch, **kernel.resources, "warps": kernel.warps,
        "spills": count(ops, "LDL", "STL"), "sqrt": count(ops, "MUFU.SQRT", "MUFU.RSQ"),
    }  # fmt: skip
    if not loops:
        return counts
    queries, keys = tile(kernel)
    per_thread = queries * keys / (32 * kernel.warps)

    def scores(body):
        # every score takes one exponential; narrow tiles have fewer scores
        return max(1, min(per_thread, count(body, "MUFU.EX2")))

    return counts | {
        "tile": (queries, keys), "width": kernel.constants["D"],
        "loops": [
            {
                "scores": scores(body), "per_score": round(len(body) / scores(body), 2),
                "spills": count(body, "LDL", "STL"),
                "wide_loads": count(body, "LDG.E.128"), "loads": count(body, "LDG"),
                "wide_copies": sum(o.startswith("LDGSTS") and o.endswith("128") for o in body),
                "matrix": count(body, *matrix),
            }
            for body in loops
        ],
    }  # fmt: skip


def count(ops, *starts):
    """Return the number of opcodes with one of the prefixes."""
    return sum(op.startswith(starts) for op in ops)
