"""The fused kernels on the CPU: Triton's interpreter must be chosen before kernels are made, so in another process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
FOLDER = Path(__file__).parent


# one of tables, fixed distances, gates, coordinates and rotations
FEW = {
    "check_attention.py": "test_gradients_of_all_offsets_sum_to_zero",
    "check_again.py": "test_repeated_calls_equal_the_first",
    "check_gates.py": "test_gated_distances",
    "check_coords.py": "test_samples_that_share_their_tokens_and_many_tiles",
    "check_rotary.py": "test_numbers_of_tokens",
}


def run(words, sample):
    """Run checks in one process, whose start takes as long as many of them."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words],
        env=os.environ | {"TRITON_INTERPRET": "1"} | sample, cwd=FOLDER.parents[2], capture_output=True, text=True,
        timeout=1200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_few_in_the_interpreter():
    run([f"{FOLDER / file}::{test}" for file, test in FEW.items()], {"VISPE_SAMPLE": "1"})


@pytest.mark.slow
def test_in_the_interpreter():
    files = sorted(str(path) for path in FOLDER.glob("check_*.py"))
    # CI runs one set of parameters of each test
    run(files, {"VISPE_SAMPLE": "1"} if os.environ.get("VISPE_SAMPLE") else {})
