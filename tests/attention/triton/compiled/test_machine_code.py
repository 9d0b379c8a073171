"""Machine code of the kernels: no spills, wide loads of the bias, no square roots, few instructions per score.

Instructions per score are those of the loop without masks. Kernels are compiled by vispe's own launches without a
GPU. With `VISPE_TRITON=FOLDER`, which has another version of Triton (`pip install --target FOLDER --no-deps
triton==3.6.0`), all tests of this folder also run with that version.
"""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.cases import cases

pytest.importorskip("triton", reason="Triton is not installed")
from tests.attention.triton.compiled.calls import LaunchCase
from tests.attention.triton.compiled.machine_code import count, plain_loop
from tests.attention.triton.compiled.stand_in_driver import SHARED, stand_in_gpu

OTHER = os.environ.get("VISPE_TRITON")
COUNTED = {  # forward, grad_q and grad_kv at 64 columns, by Triton's version and compute capability
    "3.6": {80: (12.8, 13.3, 17.8), 90: (11.9, 10.4, 11.9), 100: (12.8, 12.4, 17.7)},
    "3.9": {80: (12.7, 13.3, 17.6), 90: (11.9, 10.4, 13.2), 100: (12.8, 10.6, 14.4)},
}
PASSES = ("forward", "grad_q", "grad_kv")
SPLIT = {  # float32 by three products of TF32, by compute capability and head_dim, and spills in the loop
    # exact products take 178, 258 and 325
    (90, 64): {"forward": (37.1, 8), "grad_q": (47.1, 8), "grad_kv": (70.3, 8)},
    (80, 64): {"forward": (68.8, 8), "grad_q": (90.1, 8), "grad_kv": (117.0, 8)},
    # the tiles of 128 columns spill more than 250 registers in the loop, and take 393 and 651 for grad_q and grad_kv
    (90, 96): {"forward": (58.8, 0), "grad_q": (71.8, 0), "grad_kv": (107.4, 102)},
    (80, 96): {"forward": (136.8, 0), "grad_q": (186.0, 0), "grad_kv": (275.0, 0)},
}
WIDER = {  # 72 columns as 64 + 32, and spills: on 8.0 some gradients exceed the registers
    90: {"forward": (10.9, 0), "grad_q": (12.5, 0), "grad_kv": (16.5, 0), "grad_bias": (12.2, 0)},
    80: {"forward": (15.7, 0), "grad_q": (17.3, 0), "grad_kv": (25.5, 8), "grad_bias": (19.4, 0)},
}
# tiles of 9.0 were measured: four programs with 128 registers each take more instructions, and less time
DECOMPOSED = {"decomposed_forward": 11.9, "decomposed_grad_q": 13.8, "decomposed_grad_kv": 19.0}
GATED = {  # and spills in the loop
    "forward": (16.3, 4), "grad_q": (15.5, 0), "grad_kv": (18.6, 16), "grad_bias": (18.0, 0),
}  # fmt: skip
# bias, compute capability, kernel, instructions per score; the tiles of 9.0 are those measured with the kernels of
# grids, 64 x 64 instead of 128 x 128: up to 2.9 more instructions, but more thread blocks per multiprocessor
COORDS = [
    ("packed", 90, "forward_coords", 11.3),
    ("slopes", 90, "forward_coords", 18.7),
    ("table", 90, "forward_coords", 16.6),
    ("slopes", 90, "grad_q_coords", 18.9),
    ("table", 90, "grad_kv_coords", 17.3),
    ("table", 80, "grad_kv_coords", 21.0),
    ("table", 90, "grad_table", 14.0),
]
SPILLS = {("3.6", "grad_kv", 80): 1}


def version():
    """Return which row of `COUNTED` applies to this Triton: the newest one up to its version."""
    import triton

    version = tuple(map(int, triton.__version__.split(".")[:2]))
    return max((v for v in COUNTED if tuple(map(int, v.split("."))) <= version), default="3.6")


@cache
def reports(family, bias, arch=90, head_dim=64, dtype="bfloat16"):
    from tests.attention.triton.compiled import machine_code

    return machine_code.reports(LaunchCase(family, bias, dtype, head_dim, "long", arch))


@pytest.mark.compiles
@pytest.mark.slow
@pytest.mark.parametrize(
    ("bias", "arch"),
    [("distance", 80), ("distance", 90), ("distance", 100), ("hidden", 90), ("grouped", 90), ("table", 90)],
)
def test_loops_of_grids(fresh_kernels, bias, arch):
    """Loops with skipped tiles, shared key heads or a float16 copy of a table are the same loops."""
    compiled = reports("grid", bias, arch)
    for kernel, most in zip(PASSES, COUNTED[version()][arch], strict=True):
        report = compiled[kernel]
        loop = plain_loop(report)
        assert loop["per_score"] <= 1.1 * most, report
        assert loop["spills"] <= SPILLS.get((version(), kernel, arch), 0), report
        assert loop["matrix"] > 0, report
        assert _wide(report, loop), report
        assert report["sqrt"] == 0, report


@pytest.mark.slow
def test_gradient_of_a_bias(fresh_kernels):
    report = reports("grid", "slopes")["grad_bias"]
    assert report["loops"][0]["spills"] == 0, report
    assert report["sqrt"] == 0, report


@pytest.mark.compiles
@pytest.mark.slow
@pytest.mark.parametrize(("arch", "head_dim"), SPLIT)
def test_float32_on_tensor_cores(fresh_kernels, arch, head_dim):
    compiled = reports("grid", "table", arch, head_dim, "tf32x3")
    for kernel, (most, spills) in SPLIT[arch, head_dim].items():
        report = compiled[kernel]
        loop = plain_loop(report)
        assert loop["per_score"] <= 1.1 * most, report
        assert loop["matrix"] > 0, report
        assert loop["spills"] <= spills, report
        # GPUs of compute capability 12 use the tiles of 8.0
        assert report["shared"] <= SHARED[120 if arch == 80 else arch], report


@pytest.mark.compiles
@pytest.mark.slow
@pytest.mark.parametrize("arch", WIDER)
def test_heads_of_64_and_32_columns(fresh_kernels, arch, monkeypatch):
    from vispe.attention.backends.triton.tiles import table_for

    compiled = reports("grid", "distance", arch, 72)
    compiled = compiled | {"grad_bias": reports("grid", "slopes", arch, 72)["grad_bias"]}
    # one tile of 128 columns may exceed the shared memory
    monkeypatch.setitem(SHARED, arch, 1 << 20)
    for (_, tokens, _), by_width in table_for("half", arch < 90).items():
        if tokens == "long":
            monkeypatch.setitem(by_width, 128, by_width[96])
    padded = reports.__wrapped__("grid", "distance", arch, 128)
    monkeypatch.undo()
    for kernel, (most, spills) in WIDER[arch].items():
        report = compiled[kernel]
        loop = plain_loop(report)
        assert loop["per_score"] <= 1.1 * most, report
        assert loop["spills"] <= spills, report
        assert report["shared"] <= SHARED[120 if arch == 80 else arch], report
        if kernel in padded:
            assert report["shared"] < padded[kernel]["shared"], (report, padded[kernel])
            # narrow tiles do not take longer than those of 128 columns
            narrow, wide = (
                max(loop["scores"] * loop["per_score"] for loop in r["loops"])
                for r in (report, padded[kernel])
            )
            assert narrow <= 1.1 * wide, (report, padded[kernel])


@pytest.mark.slow
def test_dropout(fresh_kernels):
    """A few integer operations per score; the limits are the most of Triton 3.6, 3.8 and 3.9."""
    plain, dropped = reports("grid", "table"), reports("grid", "dropout")
    for kernel, more in {"forward": 10.9, "grad_q": 12.7, "grad_kv": 13.5, "grad_bias": 11.6}.items():
        loop = plain_loop(dropped[kernel])
        # the forward kernel has a limit of 128 registers
        assert loop["spills"] <= (4 if kernel == "forward" else 0), dropped[kernel]
        assert loop["per_score"] <= 1.05 * (plain_loop(plain[kernel])["per_score"] + more), dropped[kernel]


@pytest.mark.slow
def test_one_pass_has_fewer_instructions_than_two(fresh_kernels):
    plain = reports("grid", "table")
    once, queries, keys = (
        plain_loop(r) for r in (reports("grid", "once")["grad_kv"], plain["grad_q"], plain["grad_kv"])
    )
    assert once["spills"] == 0
    assert once["per_score"] <= 0.92 * (queries["per_score"] + keys["per_score"])
    # five matrix products instead of seven
    assert once["matrix"] < queries["matrix"] + keys["matrix"]


@pytest.mark.slow
def test_decomposed(fresh_kernels):
    compiled = reports("decomposed", "query")
    for kernel, most in DECOMPOSED.items():
        report = compiled[kernel]
        # the innermost loop over rows, inside that over panels; the loop over prefix tokens has tiles of 16
        inner = report["loops"][0]
        assert inner["per_score"] <= 1.05 * most, report
        assert inner["spills"] <= 4, report
        assert inner["matrix"] > 0, report
        assert report["sqrt"] == 0, report


@pytest.mark.slow
def test_gated(fresh_kernels):
    compiled = reports("gated", "table")
    for kernel, (most, spills) in GATED.items():
        report = compiled[kernel]
        plain = plain_loop(report)
        assert plain["per_score"] <= 1.05 * most, report
        assert plain["spills"] <= spills, report
        assert plain["matrix"] > 0, report


@pytest.mark.compiles
@pytest.mark.slow
@pytest.mark.parametrize(("bias", "arch", "kernel", "most"), COORDS)
def test_coords(fresh_kernels, bias, arch, kernel, most):
    report = reports("coords", bias, arch)[kernel]
    plain = min(report["loops"], key=lambda loop: loop["per_score"])
    assert plain["per_score"] <= 1.05 * most, report
    assert plain["spills"] == 0, report
    assert plain["matrix"] > 0, report
    assert bool(report["sqrt"]) == (bias == "slopes"), report


@pytest.mark.slow
def test_exact_gradient_of_a_table_with_distances(fresh_kernels):
    """Without a limit of registers, ptxas allocates 32 of them and spills most of the rest: 990 instructions."""
    report = reports("coords", "slopes and table", head_dim=128, dtype="float32")["grad_table"]
    assert report["registers"] > 128, report
    assert plain_loop(report)["per_score"] <= 1.1 * 549, report


@pytest.mark.compiles
@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("bias", ["half", "per head", "interleaved", "learned"])
def test_rotations_load_and_store_16_bytes_at_a_time(fresh_kernels, bias, arch):
    from tests.attention.triton.compiled.calls import run

    with stand_in_gpu(arch) as gpu:
        run(LaunchCase("rotary", bias, "bfloat16", 64, "long", arch))
    assert {kernel.name for kernel in gpu.launches} >= {"grad_tables" if bias == "learned" else "rotate"}
    for kernel in gpu.launches:
        ops = [op for op, _, _ in kernel.instructions if op]
        assert count(ops, "LDL", "STL") == 0, kernel.name
        for kind in ("LDG", "STG"):
            wide = sum(op.startswith(kind) and ".128" in op for op in ops)
            assert wide == count(ops, kind) > 0, (kernel.name, kind)


@pytest.mark.slow
@pytest.mark.skipif(
    OTHER is None, reason="VISPE_TRITON is not set to a folder with another version of Triton"
)
@pytest.mark.parametrize("name", ["test_machine_code", "test_launches"])
def test_another_version_of_triton(tmp_path, name):
    """In a process of its own, which imports that version."""
    path = os.pathsep.join(filter(None, (OTHER, os.environ.get("PYTHONPATH"))))
    version = {k: v for k, v in os.environ.items() if k != "VISPE_TRITON"}
    if "VISPE_SAMPLE" in version:  # other kernels than this version of Triton compiles today
        version["VISPE_SAMPLE_DAY"] = str(int(version["VISPE_SAMPLE_DAY"]) + 1)
    command = [sys.executable, "-m", "pytest", "-q", "-m", "slow or not slow", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, Path(__file__).with_name(f"{name}.py")],
        env=version | {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@cases(
    ("tokens", "prefix", "size", "most"),
    [
        (1025, 1, 128, 1.05),
        (257, 1, 64, 1.20),
        (1370, 1, 128, 1.07),
        (4096, 0, 128, 1.0),
        (1029, 5, 128, 1.04),
    ],
)
def test_tiles_have_little_padding(tokens, prefix, size, most):
    from vispe.attention.backends.triton.grid.launch import tiles_of

    whole_tiles = (tokens - prefix) // size
    wide = whole_tiles + (tokens - whole_tiles * size > 32)
    queries = wide * size + (tiles_of(tokens, prefix, size, "queries") - wide) * 16
    keys = whole_tiles * size + (tiles_of(tokens, prefix, size) - whole_tiles) * 32
    assert min(queries, keys) >= tokens
    assert queries * keys <= most * tokens**2


def _wide(report, loop):
    """Whether the bias of a tile is read 16 bytes at a time: on sm_100 it is copied, like keys and values."""
    queries, keys = report["tile"]
    threads = 32 * report["warps"]
    bias = queries * keys * 2 // (16 * threads)
    operands = (
        2 * (queries if report["kernel"] == "grad_kv" else keys) * report["width"] * 2 // (16 * threads)
    )
    copied = report["arch"] == 100
    return loop["wide_copies"] >= bias + operands if copied else loop["wide_loads"] >= bias
