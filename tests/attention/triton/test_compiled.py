"""The fused kernels compiled for GPUs that are not there: no spills, wide loads of the bias, no square roots.

Instructions per score are those of the loop without masks. With `VISPE_TRITON=FOLDER`, where another version of Triton
lies (`pip install --target FOLDER --no-deps triton==3.6.0`), they are counted with that one as well.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")
OTHER = os.environ.get("VISPE_TRITON")
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
COUNTED = {  # forward, grad_q and grad_kv at 64 columns, by Triton's version and compute capability
    "3.6": {80: (12.8, 13.3, 17.8), 90: (9.0, 9.4, 11.9), 100: (9.5, 11.0, 17.7)},
    "3.9": {80: (12.7, 13.3, 17.6), 90: (9.3, 10.4, 13.2), 100: (8.9, 10.6, 14.4)},
}
SPLIT = [  # float32 by three products of TF32; exactly multiplied, they take 178, 258 and 325
    ("forward", 90, 37.1), ("grad_q", 90, 47.1), ("grad_kv", 90, 70.3),
    ("forward", 80, 68.8), ("grad_q", 80, 90.1), ("grad_kv", 80, 117.0),
]  # fmt: skip
WIDER = [  # 72 columns as 64 + 32; on 8.0 some gradients leave registers
    ("forward", 90, 10.9, 0), ("grad_q", 90, 12.5, 0), ("grad_kv", 90, 16.5, 0), ("grad_bias", 90, 12.2, 0),
    ("forward", 80, 15.7, 0), ("grad_q", 80, 17.3, 0), ("grad_kv", 80, 25.5, 8), ("grad_bias", 80, 19.4, 0),
]  # fmt: skip
SPILLS = {("3.6", "grad_kv", 80): 1}


def version():
    """Return which row of the table this Triton is measured by: the newest one up to its own."""
    own = tuple(map(int, triton.__version__.split(".")[:2]))
    return max((v for v in COUNTED if tuple(map(int, v.split("."))) <= own), default="3.6")


PER_SCORE = {
    (kernel, arch, 64): count
    for arch, counts in COUNTED[version()].items()
    for kernel, count in zip(("forward", "grad_q", "grad_kv"), counts, strict=True)
}


@pytest.fixture(scope="module")
def reports(fresh_kernels):
    from tests.attention.triton.compiled import report

    made = {case: report(*case, torch.bfloat16) for case in [*PER_SCORE, ("grad_bias", 90, 64)]}
    # loops over what a bias shows are the same loops
    hiding = [case for case in PER_SCORE if case[1] == 90]
    made |= {(*case, "hides"): report(*case, torch.bfloat16, modes={"SKIP": True}) for case in hiding}
    # so are those of query heads that share keys, and of tables that are read from a copy
    made |= {(*case, "groups"): report(*case, torch.bfloat16, modes={"groups": 2}) for case in hiding}
    copied = {"wide": True, "modes": {"HAS_COPY": True}}
    return made | {(*case, "copy"): report(*case, torch.bfloat16, **copied) for case in hiding}


@pytest.mark.slow
def test_machine_code(reports):
    for case, report in reports.items():
        if case[0] == "grad_bias":
            continue
        wanted = PER_SCORE[case[:3]]
        plain = max(report["loops"], key=lambda loop: (loop["scores"], -loop["per_score"]))
        assert plain["per_score"] <= 1.1 * wanted, report
        assert plain["spills"] <= SPILLS.get((version(), *case[:2]), 0), report
        assert plain["matrix"] > 0, report
        assert _wide(report, plain), report
    for report in reports.values():
        assert report["sqrt"] == 0, report
        assert report["shared"] <= SHARED[report["arch"]], report
        assert report["loops"][0]["spills"] == 0 or report["kernel"] != "grad_bias", report


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "arch", "most"), SPLIT)
def test_float32_on_tensor_cores(fresh_kernels, kernel, arch, most):
    from tests.attention.triton.compiled import report

    found = report(kernel, arch, 64, torch.float32, product="tf32x3")
    plain = max(found["loops"], key=lambda loop: (loop["scores"], -loop["per_score"]))
    assert plain["per_score"] <= 1.1 * most, found
    assert plain["matrix"] > 0, found
    assert plain["spills"] <= 8, found
    # GPUs of compute capability 12 read the rows of 80, and have 99 KB
    assert found["shared"] <= (99 * 1024 if arch == 80 else SHARED[arch]), found


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "arch", "most", "spills"), WIDER)
def test_heads_of_64_and_32_columns(fresh_kernels, kernel, arch, most, spills):
    from tests.attention.triton.compiled import report

    found = report(kernel, arch, 72, torch.bfloat16)
    plain = max(found["loops"], key=lambda loop: (loop["scores"], -loop["per_score"]))
    padded = report(kernel, arch, 128, torch.bfloat16, size=found["size"])
    assert plain["per_score"] <= 1.1 * most, found
    assert plain["spills"] <= spills, found
    assert found["shared"] < padded["shared"], (found, padded)
    assert found["shared"] <= (99 * 1024 if arch == 80 else SHARED[arch]), found
    # narrow tiles do not take longer than those of 128 columns
    narrow, wide = (max(loop["scores"] * loop["per_score"] for loop in r["loops"]) for r in (found, padded))
    assert narrow <= 1.1 * wide, (found, padded)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "more"), [("forward", 10.9), ("grad_q", 12.7), ("grad_kv", 13.5), ("grad_bias", 11.6)]
)
def test_dropout(fresh_kernels, kernel, more):
    """A few integers for each score; `more` is the most of Triton 3.6, 3.8 and 3.9."""
    from tests.attention.triton.compiled import report

    def plain(**modes):
        found = report(kernel, 90, 64, torch.bfloat16, modes=modes)
        return max(found["loops"], key=lambda loop: (loop["scores"], -loop["per_score"]))

    dropped = plain(DROP=True)
    assert dropped["spills"] == 0
    assert dropped["per_score"] <= 1.05 * (plain()["per_score"] + more)


@pytest.mark.slow
def test_one_pass_takes_less_than_two(fresh_kernels):
    from tests.attention.triton.compiled import report

    def plain(kernel, **modes):
        found = report(kernel, 90, 64, torch.bfloat16, modes=modes)
        return max(found["loops"], key=lambda loop: (loop["scores"], -loop["per_score"]))

    once, queries, keys = plain("grad_kv", ONCE=True), plain("grad_q"), plain("grad_kv")
    assert once["spills"] == 0
    assert once["per_score"] <= 0.8 * (queries["per_score"] + keys["per_score"])
    # five matrix products instead of seven
    assert once["matrix"] < queries["matrix"] + keys["matrix"]


@pytest.mark.slow
@pytest.mark.skipif(OTHER is None, reason="VISPE_TRITON names no folder with another version of Triton")
@pytest.mark.parametrize("name", ["test_compiled", "test_compiled_context", "test_compiled_coords"])
def test_machine_code_with_another_triton(tmp_path, name):
    """In a process of its own, which finds that version first."""
    path = os.pathsep.join(filter(None, (OTHER, os.environ.get("PYTHONPATH"))))
    own = {k: v for k, v in os.environ.items() if k != "VISPE_TRITON"}
    tests = f"{Path(__file__).with_name(name)}.py"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            "slow",
            "-p",
            "no:cacheprovider",
            tests,
        ],  # all but this test
        env=own | {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("tokens", "prefix", "size", "most"),
    [
        (1025, 1, 128, 1.05),
        (257, 1, 64, 1.20),
        (1370, 1, 128, 1.07),
        (4096, 0, 128, 1.0),
        (1029, 5, 128, 1.04),
    ],
)
def test_few_scores_are_computed_in_vain(tokens, prefix, size, most):
    from vispe.attention.backends.triton.grid.launch import tiles_of

    whole = (tokens - prefix) // size
    wide = whole + (tokens - whole * size > 32)
    queries = wide * size + (tiles_of(tokens, prefix, size, "queries") - wide) * 16
    keys = whole * size + (tiles_of(tokens, prefix, size) - whole) * 32
    assert min(queries, keys) >= tokens
    assert queries * keys <= most * tokens**2


def _wide(report, loop):
    """Whether the bias of a tile comes 16 bytes at a time: on sm_100 it is copied, like keys and values."""
    queries, keys, warps, *_ = report["size"]
    bias = queries * keys * 2 // (16 * 32 * warps)
    operands = (
        2 * (queries if report["kernel"] == "grad_kv" else keys) * report["width"] * 2 // (16 * 32 * warps)
    )
    copied = report["arch"] == 100
    return loop["wide_copies"] >= bias + operands if copied else loop["wide_loads"] >= bias
