"""The kernels of decomposed biases compiled for a GPU that is not there; counts measured with Triton 3.9."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
ROOT = Path(__file__).resolve().parents[2]
OWN = {"HAS_OWN": True, "HAS_OTHER": False, "BA": 128, "W": 32}
OTHER = OWN | {"HAS_OWN": False, "HAS_OTHER": True}
CASES = {  # instructions per score in the loop, with 32 columns of a grid in a panel
    "decomposed_forward": (OWN | {"R": 4}, (128, 128, 8, 2), 8.9),
    "decomposed_grad_q": (OWN | {"R": 2}, (128, 64, 8, 2), 13.3),
    "decomposed_grad_kv": (OTHER | {"R": 2}, (64, 128, 8, 2), 15.4),
}


@pytest.mark.slow
def test_machine_code(tmp_path):
    cases = [
        {"name": name, "arch": 90, "width": 64, "dtype": "bfloat16", "modes": modes, "size": size}
        for name, (modes, size, _) in CASES.items()
    ]
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.triton.compiled", json.dumps(cases)],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for report in map(json.loads, done.stdout.splitlines()):
        # the loop over rows, which that over panels holds; that over prefix tokens has tiles of 16
        inner = report["loops"][0]
        assert inner["per_score"] <= 1.1 * CASES[report["kernel"]][2], report
        assert inner["spills"] == 0, report
        assert inner["matrix"] > 0, report
        assert report["sqrt"] == 0, report
        assert report["shared"] <= 227 * 1024, report
