"""The fused kernels on the CPU: Triton's interpreter must be chosen before kernels are made, so in another process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
FOLDER = Path(__file__).parent


@pytest.mark.slow
def test_in_the_interpreter():
    """One process for all files: its start takes as long as many tests."""
    files = sorted(str(path) for path in FOLDER.glob("check_*.py"))
    # CI runs one set of parameters of each test
    sample = {"VISPE_SAMPLE": "1"} if os.environ.get("VISPE_SAMPLE") else {}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        env=os.environ | {"TRITON_INTERPRET": "1"} | sample, cwd=FOLDER.parents[2], capture_output=True, text=True,
        timeout=1200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
