"""The kernels for tokens that are anywhere, compiled for GPUs that are not there; counts are of Triton 3.9."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
from tests.triton.test_compiled import ROOT, SHARED

GATHER, EUCLIDEAN = {"GATHER": True}, {"METRIC": 1, "LEARNED": True}
CASES = [  # kernel, architecture, width, modes, tiles where they are not those of strips, instructions per score
    ("forward_coords", 90, 64, {"PACKED": True}, None, 7.4),
    ("forward_coords", 90, 64, EUCLIDEAN, None, 16.2),
    ("forward_coords", 90, 64, GATHER, None, 14.0),
    ("grad_q_coords", 90, 64, EUCLIDEAN, None, 19.0),
    ("grad_kv_coords", 90, 64, GATHER, None, 18.7),
    ("grad_kv_coords", 80, 64, GATHER, [32, 128, 8, 1], 24.4),
    ("grad_kv_coords", 90, 128, GATHER, [32, 128, 8, 1], 24.1),
    ("grad_table", 90, 64, GATHER, None, 15.5),
]


@pytest.mark.slow
def test_machine_code(tmp_path):
    cases = [
        {"name": name, "arch": arch, "width": width, "dtype": "bfloat16", "modes": modes, "size": size}
        for name, arch, width, modes, size, _ in CASES
    ]
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.triton.compiled", json.dumps(cases)],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for line, (*_, modes, _, wanted) in zip(done.stdout.splitlines(), CASES, strict=True):
        report = json.loads(line)
        plain = min(report["loops"], key=lambda loop: loop["per_score"])
        assert plain["per_score"] <= 1.1 * wanted, report
        assert plain["spills"] == 0, report
        assert plain["matrix"] > 0, report
        assert bool(report["sqrt"]) == ("METRIC" in modes), report
        assert report["shared"] <= SHARED[report["arch"]], report
