"""Kernels compiled for a GPU that need not be there, and what their machine code holds."""

import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vispe.attention.backends.triton.content.decomposed import decomposed_forward
from vispe.attention.backends.triton.content.decomposed_backward import decomposed_grad_kv, decomposed_grad_q
from vispe.attention.backends.triton.content.gated import (
    gated_forward,
    gated_grad_kv,
    gated_grad_profile,
    gated_grad_q,
)
from vispe.attention.backends.triton.coords.backward import grad_kv_coords, grad_q_coords, grad_table
from vispe.attention.backends.triton.coords.forward import forward_coords
from vispe.attention.backends.triton.grid.backward import grad_kv, grad_q
from vispe.attention.backends.triton.grid.bias_gradient import grad_bias
from vispe.attention.backends.triton.grid.forward import forward
from vispe.attention.backends.triton.grid.launch import tile_of
from vispe.attention.backends.triton.tiles import Tiles, rows_of, tiles

KERNELS = {
    "forward": forward, "grad_q": grad_q, "grad_kv": grad_kv, "grad_bias": grad_bias, "forward_coords": forward_coords,
    "grad_q_coords": grad_q_coords, "grad_kv_coords": grad_kv_coords, "grad_table": grad_table,
    "decomposed_forward": decomposed_forward, "decomposed_grad_q": decomposed_grad_q,
    "decomposed_grad_kv": decomposed_grad_kv, "gated_forward": gated_forward, "gated_grad_q": gated_grad_q,
    "gated_grad_kv": gated_grad_kv, "gated_grad_profile": gated_grad_profile,
}  # fmt: skip
HALF = ("Q", "K", "V", "OUT", "GRAD", "DQ", "DK", "DV")
POINTERS = {"S": "*fp16", "COPY": "*fp16", "ADDRESS": "*i32", "VISIBLE": "*i32", "BASE": "*i32", "KEEP": "*i1",
            "UNIT": "*fp64", "SEED": "*i64", "CELL": "*i32", "SEGMENT": "*i32"}  # fmt: skip
SINGLE = ("EDGE", "LSE", "DELTA", "RUNS", "ENDS", "SUM", "TABLE", "COORDS", "PERIOD", "SLOPE", "STEEP", "DTABLE", "OWN",
          "OTHER", "GRAD_OWN", "ROW", "COL", "DROW", "DCOL")  # fmt: skip
FLOATS = {"c", "scale", "drop"}
FREE = ("sh", "eh", "th", "cb", "pb", "wb")  # strides that are any number
ANY = {"n", "p"}  # not specialised: any number of tokens, with the same code
TOKENS = 4097


def compile_kernel(name, arch, width, dtype, has_bias=True, has_keep=False, size=None, wide=False,
                   modes=None, product="ieee"):  # fmt: skip
    """Return what Triton made of one kernel, as for contiguous tensors with `width` columns.

    `wide`: the bias of half-precision inputs is stored in float32 (with a copy in float16 where `modes` has HAS_COPY).
    `modes`: what else kernels are compiled for.
    `product`: how float32 is multiplied.
    """
    kernel = KERNELS[name]
    of = name.removesuffix("_coords").removeprefix("gated_")
    of = "grad_bias" if of in ("grad_table", "grad_profile") else of
    size = Tiles(*size) if size else tiles(of, width, TOKENS, rows_of(dtype, product), arch < 90)
    letters = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    power = tile_of(width)
    constants = {
        "D": width, "BD": power, "E": width, "BE": power, "BM": size.queries, "BN": size.keys,
        "HAS_BIAS": has_bias, "HAS_KEEP": has_keep, "HAS_COPY": False, "DOT": product, "SHARED": True, "FIXED": False,
        "SKIP": False, "ONCE": False, "DROP": False,
        "GATHER": False, "METRIC": 0, "AXES": 2, "WRAP": False, "PACKED": False,
        "LEARNED": False, "groups": 1,
    } | (modes or {})  # fmt: skip
    if constants["groups"] > 1:  # any number of them, with the same code
        del constants["groups"]
    signature, attrs, chosen = {}, {}, {}
    for place, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
            chosen[(place,)] = constants[argument]
            continue
        if argument in HALF:
            signature[argument] = f"*{letters}"
        elif argument in SINGLE:
            signature[argument] = "*fp32"
        elif argument in POINTERS:
            signature[argument] = POINTERS[argument]
        else:
            signature[argument] = "fp32" if argument in FLOATS else "i32"
        if signature[argument] == "*fp16" and argument == "S" and (wide or dtype == torch.float32):
            signature[argument] = "*fp32"
        size_of_grid = name.startswith("decomposed") and argument in ("gh", "gw")
        stride = len(argument) == 2 and argument not in FREE and not size_of_grid
        if signature[argument].startswith("*") or stride or argument == "sh":
            attrs[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, chosen, attrs)
    options = {**size.options, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options), size


def machine_code(binary):
    """Return the lines of instructions of a compiled kernel."""
    tool = next(Path(triton.__file__).parent.rglob("nvdisasm"))
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(binary.asm["cubin"])
        text = subprocess.run([tool, "-c", cubin], capture_output=True, text=True, check=True).stdout
    return re.findall(
        r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);|^(\.L_\w+):", text, re.M
    )


def report(name, arch, width, dtype, has_bias=True, **options):
    """Return counts of instructions: the whole kernel, and its tightest loop with matrix products."""
    binary, size = compile_kernel(name, arch, width, dtype, has_bias, **options)
    lines = machine_code(binary)
    labels, ops, loops = {}, [], []
    for _, op, operands, label in lines:
        if label:
            labels[label] = len(ops)
            continue
        target = re.search(r"\.L_\w+", operands)
        if op.startswith("BRA") and target and target[0] in labels:
            loops.append((labels[target[0]], len(ops)))
        ops.append(op)
    exact = dtype == torch.float32 and options.get("product", "ieee") == "ieee"
    matrix = ("FFMA",) if exact else ("HGMMA", "HMMA", "UTCHMMA")
    loops = [ops[a : b + 1] for a, b in loops if any(o.startswith(matrix) for o in ops[a : b + 1])]
    threads = size.warps * 32
    per_tile = size.queries * size.keys / threads

    def count(body, *starts):
        return sum(o.startswith(starts) for o in body)

    def scores(body):
        # every score takes one exponential, and narrow tiles have fewer than the whole ones
        return max(1, min(per_tile, count(body, "MUFU.EX2")))

    return {
        "kernel": name, "arch": arch, "width": width, "dtype": str(dtype), "bias": has_bias, "size": list(size),
        "shared": binary.metadata.shared, "spills": count(ops, "LDL", "STL"),
        "sqrt": count(ops, "MUFU.SQRT", "MUFU.RSQ"),
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
