"""The kernels for tokens that are anywhere, compiled for GPUs that are not there; counts are the most
of Triton 3.6, 3.8 and 3.9."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
from tests.attention.triton.test_compiled import SHARED

GATHER, EUCLIDEAN = {"GATHER": True}, {"METRIC": 1, "LEARNED": True}
CASES = [  # kernel, architecture, width, modes, tiles where they are not those of strips, instructions per score
    ("forward_coords", 90, 64, {"PACKED": True}, None, 8.4),
    ("forward_coords", 90, 64, EUCLIDEAN, None, 16.2),
    ("forward_coords", 90, 64, GATHER, None, 13.8),
    ("grad_q_coords", 90, 64, EUCLIDEAN, None, 18.9),
    ("grad_kv_coords", 90, 64, GATHER, None, 17.3),
    ("grad_kv_coords", 80, 64, GATHER, [32, 128, 8, 1], 21.0),
    ("grad_table", 90, 64, GATHER, None, 13.1),
]


@pytest.mark.slow
def test_machine_code(fresh_kernels):
    from tests.attention.triton.compiled import report as compiled

    for name, arch, width, modes, size, wanted in CASES:
        report = compiled(name, arch, width, torch.bfloat16, modes=modes, size=size)
        plain = min(report["loops"], key=lambda loop: loop["per_score"])
        assert plain["per_score"] <= 1.05 * wanted, report
        assert plain["spills"] == 0, report
        assert plain["matrix"] > 0, report
        assert bool(report["sqrt"]) == ("METRIC" in modes), report
        assert report["shared"] <= SHARED[report["arch"]], report
