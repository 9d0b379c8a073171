"""Kernels compiled by vispe's own launches without a GPU.

The long tests take a sample of families of kernels, dtypes, head_dims, lengths and compute capabilities, and the
complete product with VISPE_EVERY=1. `eval/bench/launch_matrix.py` records the resources of the complete product.
"""

import os
from itertools import combinations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
from tests.attention.triton.compiled.calls import (
    BIASES,
    DTYPES,
    LaunchCase,
    all_cases,
    pairwise_cases,
    run,
)
from tests.attention.triton.compiled.stand_in_driver import SHARED, stand_in_gpu
from tests.products import slow_except
from vispe import Grid

EVERY = os.environ.get("VISPE_EVERY") == "1"
FEW = (
    LaunchCase("decomposed", "query", "bfloat16", 16, "short", 90),
    LaunchCase("rotary", "half", "float16", 64, "short", 80),
)
# these exceeded the shared memory of a GPU, or spilled most registers
REGRESSIONS = (
    LaunchCase("grid", "once", "tf32x3", 96, "long", 90),
    LaunchCase("grid", "dropout", "float32", 100, "long", 90),
    LaunchCase("grid", "dropout", "float32", 100, "short", 90),
)
KERNELS = {
    "forward", "row_sums", "grad_q", "grad_kv", "grad_bias", "forward_coords", "grad_q_coords", "grad_kv_coords",
    "grad_table", "decomposed_forward", "decomposed_grad_q", "decomposed_grad_kv", "rotate", "grad_tables",
}  # fmt: skip
# the dtype of these follows the bias or a compile-time constant
SEVERAL_DTYPES = {"S", "RUNS", "DTABLE"}


def compiled(case):
    """Return names and resources of all kernels of a case."""
    with stand_in_gpu(case.arch) as gpu:
        run(case)
    return [{"kernel": kernel.name, **kernel.resources} for kernel in gpu.launches]


def most_spilled(case):
    """Return the largest number of bytes of registers that a thread may spill: more, and tiles are too large."""
    if case.head_dim == 100 and DTYPES[case.dtype] != torch.float32:
        return 5000  # rows of 200 bytes are read 8 bytes at a time
    if case.bias == "slopes and table" and case.dtype == "float32" and case.head_dim > 64:
        return 4000
    return 2048


def check(case):
    kernels = compiled(case)
    assert kernels
    for kernel in kernels:
        assert kernel["registers"] <= 255, kernel
        assert kernel["spilled"] <= most_spilled(case), kernel
        assert kernel["shared"] <= SHARED[case.arch], kernel


@pytest.mark.parametrize("case", FEW, ids=str)
def test_a_few_kernels_compile(case, fresh_kernels):
    check(case)


@pytest.mark.compiles
@pytest.mark.slow
@pytest.mark.parametrize(
    "case", list(all_cases() if EVERY else dict.fromkeys((*pairwise_cases(), *REGRESSIONS))), ids=str
)
def test_all_kernels_compile(case, fresh_kernels):
    check(case)


def test_the_sample_has_all_pairs():
    def pairs(cases):
        columns = {(case.family, *case[2:]) for case in cases}
        return {(i, j, case[i], case[j]) for case in columns for i, j in combinations(range(5), 2)}

    assert pairs(pairwise_cases()) == pairs(all_cases())
    assert {case[:2] for case in pairwise_cases()} == {case[:2] for case in all_cases()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_operands_have_one_dtype_whether_present_or_missing(dtype, fresh_kernels):
    """A stand-in of another dtype is another kernel, or one that does not compile."""
    dtypes = {}
    with stand_in_gpu(90, compiles=False) as gpu:
        for family, biases in BIASES.items():
            for bias in biases:
                run(LaunchCase(family, bias, dtype, 64, "short", 90))
    for (kernel, _), signature in gpu.signatures.items():
        for argument, type_ in signature.items():
            if type_.startswith("*") and argument not in SEVERAL_DTYPES:
                dtypes.setdefault((kernel, argument), set()).add(type_)
    assert {kernel for kernel, _ in dtypes} == KERNELS
    assert {operand: sorted(several) for operand, several in dtypes.items() if len(several) > 1} == {}


SIZES = ((1, 2), (16, 2), (3, 16), (16, 12))  # batch sizes and heads: 1, multiples of 16, others
# with the same layout of strips
OTHER_GRIDS = (Grid((16, 16), 0), Grid((14, 20), 1), Grid((16, 18), 1))


ALL_BIASES = [(family, bias) for family, biases in BIASES.items() for bias in biases]


@pytest.mark.parametrize(("family", "bias"), slow_except(ALL_BIASES, ALL_BIASES[::3]))
def test_other_sizes_launch_the_same_kernels(family, bias, fresh_kernels):
    """Triton compiles a kernel again where an integer is 1 or a multiple of 16, unless told not to."""
    case = LaunchCase(family, bias, "bfloat16", 64, "short", 90)
    with stand_in_gpu(90, compiles=False) as gpu:
        run(case)
        kernels = set(gpu.signatures)
        for batch, heads in SIZES:
            run(case, batch, heads)
        # panels of decomposed biases depend on the grid
        for grid in OTHER_GRIDS if family != "decomposed" else ():
            run(case, grid=grid)
    assert set(gpu.signatures) == kernels
