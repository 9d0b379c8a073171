"""The fused kernels on the CPU: Triton's interpreter must be chosen before kernels are made, so in own processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
FOLDER = Path(__file__).parent


@pytest.mark.parametrize("name", sorted(p.name for p in FOLDER.glob("check_*.py")))
def test_in_the_interpreter(name):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(FOLDER / name)],
        env=os.environ | {"TRITON_INTERPRET": "1"}, cwd=FOLDER.parents[1], capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
