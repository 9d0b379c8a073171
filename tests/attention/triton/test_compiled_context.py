"""The kernels of biases that read content, compiled for a GPU that is not there; counts are the most of Triton 3.6,
3.8 and 3.9."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
OWN = {"HAS_OWN": True, "HAS_OTHER": False, "BA": 128, "W": 32}
OTHER = OWN | {"HAS_OWN": False, "HAS_OTHER": True}
CASES = {  # instructions per score in the loop, with 32 columns of a grid in a panel
    "decomposed_forward": (OWN | {"R": 4}, (128, 128, 8, 2), 9.2),
    "decomposed_grad_q": (OWN | {"R": 2}, (128, 64, 8, 2), 13.8),
    "decomposed_grad_kv": (OTHER | {"R": 2}, (64, 128, 8, 2), 18.0),
}
GATED = {  # in the loop without masks, both gates there; and what leaves registers, with Triton 3.6 alone
    "gated_forward": (12.2, 0), "gated_grad_q": (14.6, 0), "gated_grad_kv": (18.6, 26),
    "gated_grad_profile": (21.0, 0),
}  # fmt: skip


@pytest.mark.slow
def test_machine_code(fresh_kernels):
    from tests.attention.triton.compiled import report as compiled

    for name, (modes, size, wanted) in CASES.items():
        report = compiled(name, 90, 64, torch.bfloat16, modes=modes, size=size)
        # the loop over rows, which that over panels holds; that over prefix tokens has tiles of 16
        inner = report["loops"][0]
        assert inner["per_score"] <= 1.05 * wanted, report
        assert inner["spills"] == 0, report
        assert inner["matrix"] > 0, report
        assert report["sqrt"] == 0, report
        assert report["shared"] <= 227 * 1024, report
    for name, (wanted, spills) in GATED.items():
        report = compiled(name, 90, 64, torch.bfloat16)
        plain = min(report["loops"], key=lambda loop: loop["per_score"])
        assert plain["per_score"] <= 1.05 * wanted, report
        assert plain["spills"] <= spills, report
        assert plain["matrix"] > 0, report
        assert report["shared"] <= 227 * 1024, report
