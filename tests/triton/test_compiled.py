"""The fused kernels compiled for GPUs that are not there: no spills, wide loads of the bias, no square roots.

Instructions per score are those of the loop without masks, measured with Triton 3.9.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
ROOT = Path(__file__).resolve().parents[2]
SHARED = {80: 163 * 1024, 90: 227 * 1024}
PER_SCORE = {
    ("forward", 80, 64): 12.6, ("grad_q", 80, 64): 12.9, ("grad_kv", 80, 64): 20.9,
    ("forward", 90, 64): 9.1, ("grad_q", 90, 64): 10.2, ("grad_kv", 90, 64): 15.0,
    ("forward", 90, 128): 13.4, ("grad_q", 90, 128): 12.4, ("grad_kv", 90, 128): 17.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    cases = [{"name": n, "arch": a, "width": w, "dtype": "bfloat16"} for n, a, w in PER_SCORE]
    cases.append({"name": "grad_bias", "arch": 90, "width": 64, "dtype": "bfloat16"})
    env = os.environ | {
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("kernels")), "TRITON_DEFAULT_FP_FUSION": "1",
    }  # fmt: skip
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.triton.compiled", json.dumps(cases)],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {(r["kernel"], r["arch"], r["width"]): r for r in found}


@pytest.mark.slow
def test_machine_code(reports):
    for case, wanted in PER_SCORE.items():
        report = reports[case]
        plain = min(report["loops"], key=lambda loop: loop["per_score"])
        assert plain["per_score"] <= 1.1 * wanted, report
        assert plain["spills"] == 0, report
        assert plain["matrix"] > 0, report
        assert plain["wide_loads"] >= 2, report
    for report in reports.values():
        assert report["sqrt"] == 0, report
        assert report["shared"] <= SHARED[report["arch"]], report
        assert report["loops"][0]["spills"] == 0 or report["kernel"] != "grad_bias", report
