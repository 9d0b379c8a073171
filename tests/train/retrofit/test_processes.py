"""Two processes with the same global batch do what one does."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.train.processes import two_processes
from tests.train.tiny import RandomImages, config
from tests.train.worker import TOGETHER, together
from vispe.backbones.distributed import Processes
from vispe.errors import OptionError
from vispe.train.retrofit.distillation import retrofit
from vispe.train.retrofit.trainer import Training
from vispe.train.retrofit.training_log import read_log


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """What two processes wrote, and one."""
    pytest.importorskip("accelerate")
    position = tmp_path_factory.mktemp("together")
    two_processes("together", position / "two")
    plain = Training._update
    try:
        together(str(position / "one"))
    finally:
        Training._update = plain
    return position


@pytest.mark.slow
def test_gradients_of_the_global_batch_are_the_same(folders):
    one, first, second = (torch.load(folders / name) for name in ("one.0.pt", "two.0.pt", "two.1.pt"))
    assert one.keys() == first.keys() == second.keys()
    assert len(one) > 20
    for name, grad in one.items():
        assert torch.equal(first[name], second[name])
        assert (first[name] - grad).abs().max() <= 1e-6 * max(1.0, float(grad.abs().max())), name
        assert grad.abs().max() > 0 or "pos_enc" in name


@pytest.mark.slow
def test_losses_and_results_are_the_same(folders):
    one, two = (read_log(folders / name / "log.jsonl") for name in ("one", "two"))
    assert [line["step"] for line in two] == [1, 2, 3, 4, 5]
    for key in ("loss", "distill", "d4", "class_token", "place", "grad_norm", "cosine"):
        assert [line[key] for line in two] == pytest.approx([line[key] for line in one], abs=5e-5)
    assert two[0]["loss"] == pytest.approx(one[0]["loss"], abs=1e-6)
    cards = [json.loads((folders / name / "card.json").read_text()) for name in ("one", "two")]
    assert cards[0]["blanked"] == cards[1]["blanked"]
    assert len(cards[0]["blanked"]) == 3
    assert [card["processes"] for card in cards] == [1, 2]
    weights = [load_file(folders / name / "student.safetensors") for name in ("one", "two")]
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[0].items():
        # Adam moves what has no gradient either way
        assert (value - weights[1][name]).abs().max() <= 5e-4, name


def test_a_batch_that_cannot_be_shared_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(Processes, "_accelerated", classmethod(lambda cls, device: cls(0, 3)))
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(
        OptionError, match=r"stages\[0\].batch_size must be a multiple of the 3 processes, got 4"
    ):
        retrofit(config(tmp_path, **TOGETHER), source=RandomImages())


def test_a_launcher_must_not_contradict(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert Processes.training("cpu", "bf16").count == 1
    with pytest.raises(OptionError, match="must be that of the config, amp=no, got bf16"):
        Processes.training("cpu", "no")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(OptionError, match="FSDP"):
        Processes.training("cpu")


def test_one_device_for_several_processes_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(OptionError, match="on which all of them would run"):
        Processes.training("cuda:0")


def test_sums_of_one_process_are_its_values():
    single, values = Processes.training("cpu"), [torch.arange(4.0), torch.ones(2, 3)]
    single.sum_(values)
    assert torch.equal(values[0], torch.arange(4.0))
    assert single.total(2.5) == 2.5
    assert single.main
