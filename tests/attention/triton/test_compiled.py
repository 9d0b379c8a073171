"""The fused kernels compiled for GPUs that are not there: no spills, wide loads of the bias, no square roots.

Instructions per score are those of the loop without masks, measured with Triton 3.9.
"""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
PER_SCORE = {
    ("forward", 80, 64): 12.6, ("grad_q", 80, 64): 12.9, ("grad_kv", 80, 64): 20.9,
    ("forward", 90, 64): 9.1, ("grad_q", 90, 64): 10.2, ("grad_kv", 90, 64): 15.0,
    ("forward", 100, 64): 8.6, ("grad_q", 100, 64): 10.2, ("grad_kv", 100, 64): 17.7,
}  # fmt: skip


@pytest.fixture(scope="module")
def reports(fresh_kernels):
    from tests.attention.triton.compiled import report

    made = {case: report(*case, torch.bfloat16) for case in [*PER_SCORE, ("grad_bias", 90, 64)]}
    # loops over what a bias shows are the same loops
    hiding = [case for case in PER_SCORE if case[1] == 90]
    return made | {(*case, "hides"): report(*case, torch.bfloat16, modes={"SKIP": True}) for case in hiding}


@pytest.mark.slow
def test_machine_code(reports):
    for case, report in reports.items():
        if case[0] == "grad_bias":
            continue
        wanted = PER_SCORE[case[:3]]
        plain = min(report["loops"], key=lambda loop: loop["per_score"])
        assert plain["per_score"] <= 1.1 * wanted, report
        assert plain["spills"] == 0, report
        assert plain["matrix"] > 0, report
        assert _wide(report, plain), report
    for report in reports.values():
        assert report["sqrt"] == 0, report
        assert report["shared"] <= SHARED[report["arch"]], report
        assert report["loops"][0]["spills"] == 0 or report["kernel"] != "grad_bias", report


def _wide(report, loop):
    """Whether the bias of a tile comes 16 bytes at a time: on sm_100 it is copied, like keys and values."""
    queries, keys, warps, _ = report["size"]
    bias = queries * keys * 2 // (16 * 32 * warps)
    operands = (
        2 * (queries if report["kernel"] == "grad_kv" else keys) * report["width"] * 2 // (16 * 32 * warps)
    )
    copied = report["arch"] == 100
    return loop["wide_copies"] >= bias + operands if copied else loop["wide_loads"] >= bias
