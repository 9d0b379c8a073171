"""Data-parallel and sharded training on two processes equals training on one."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.hosts.distributed_worker import gradients, model
from tests.hosts.helpers import close, image

pytestmark = pytest.mark.slow  # two processes that import everything
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def actual(tmp_path_factory) -> list[dict]:
    """Return the results saved by the two processes."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("torch is built without gloo")
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.hosts.distributed_worker"]
    workers = [
        subprocess.Popen([*command, str(rank), str(folder)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    try:
        errors = [worker.communicate(timeout=150)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert all(worker.returncode == 0 for worker in workers), "\n".join(errors)[-3000:]
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


@pytest.fixture(scope="module")
def single() -> tuple[dict, torch.Tensor]:
    """Return gradients and outputs of one process for the full batch."""
    ours = model()
    expected = gradients(ours, image(4, 3, 32, 24))
    return expected, model()(image(4, 3, 32, 24)).detach()


@pytest.mark.parametrize("way", ["ddp", "ddp checkpointed", "fsdp"])
def test_gradients_equal_those_of_one_process(way, actual, single):
    for rank in (0, 1):
        assert {n for n in actual[rank][way] if "pos_enc" in n} == {
            "pos_enc.weight", "blocks.0.attn.pos_enc.slope", "blocks.1.attn.pos_enc.slope",
        }  # fmt: skip
        close(actual[rank][way], single[0])


def test_sharded_outputs_equal_those_of_one_process(actual, single):
    for rank in (0, 1):
        close(actual[rank]["fsdp out"], single[1][2 * rank : 2 * rank + 2])


def test_coordinates_stay_float32_under_sharded_mixed_precision(actual):
    """300 columns: in bfloat16, neighbouring positions beyond 256 would coincide."""
    ours = model("alibi2d.local", img_size=(8, 8 * 300)).to(torch.bfloat16)
    expected = ours(image(4, 3, 8, 8 * 300).to(torch.bfloat16)).float()
    for rank in (0, 1):
        assert actual[rank]["fsdp bf16 coordinates"] == ["torch.float32"] * 2
        out = actual[rank]["fsdp bf16 out"]
        assert out.dtype == torch.bfloat16
        assert (out.float() - expected[2 * rank : 2 * rank + 2]).abs().max() <= 0.02 * expected.abs().max()
