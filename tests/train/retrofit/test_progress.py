"""Encodings follow a retrofit: progress and seeds come from the step, so a run that goes on draws the same."""

import pytest
import torch

from tests.products import slow_except
from tests.train.tiny import config, training
from vispe.backbones.distributed import POSITIONS, Processes
from vispe.encodings.base import Encoding
from vispe.train.retrofit.checkpoint import RunFolder
from vispe.train.retrofit.config import Student

SHIFT = "shift(reach=20,curriculum=[0,9])+sincos2d"


class Stop(Exception):
    pass


def stop(number, total, line):
    if number == 3:
        raise Stop


def test_the_loop_reports_its_progress(tmp_path, monkeypatch):
    run, messages = training(config(tmp_path, student=Student(SHIFT))), []
    plain = Encoding.on_progress

    def on_progress(self, progress, seed):
        messages.append((self.name, progress, seed))
        plain(self, progress, seed)

    for encoding in {type(m) for m in run.student.modules() if isinstance(m, Encoding)}:
        monkeypatch.setattr(encoding, "on_progress", on_progress)
    run.run()
    run.finished()
    shift = [(progress, seed) for name, progress, seed in messages if name == "shift"]
    seeds = [Processes().seed(0, step, POSITIONS) for step in range(7)]
    assert shift == [*((step / 7, seed) for step, seed in enumerate(seeds)), (1.0, None)]
    assert {progress for name, progress, _ in messages if name == "sincos2d"} == {p for p, _ in shift}


@pytest.mark.parametrize("spec", slow_except([SHIFT, "rfs(reach=28)+rope_axial"], [SHIFT]))
def test_a_resumed_run_has_equal_draws(tmp_path, spec):
    requested = {"student": Student(spec), "save_steps": 1}
    uninterrupted = training(config(tmp_path / "whole", **requested))
    uninterrupted.run()
    with pytest.raises(Stop):
        training(config(tmp_path / "parts", **requested)).run(stop)
    resumed = training(config(tmp_path / "parts", **requested))
    resumed.resume(RunFolder(tmp_path / "parts").load())
    resumed.run()
    state = resumed.student.state_dict()
    for name, value in uninterrupted.student.state_dict().items():
        assert torch.equal(state[name], value), name


@pytest.mark.slow
def test_the_curriculum_matters(tmp_path):
    actual = []
    for spec in (SHIFT, "shift(reach=20,curriculum=[9,9])+sincos2d"):
        run = training(config(tmp_path / spec[-12:-9], student=Student(spec)))
        run.run()
        actual.append(run.student.state_dict())
    assert any(not torch.equal(actual[0][name], actual[1][name]) for name in actual[0])


@pytest.mark.parametrize("spec", ["rfs(reach=9)+rope_axial", "rope_dinov3.released", "rpb_cpb.vit_relpos"])
def test_chunks_are_drawn_identically(tmp_path, spec):
    actual = []
    for chunk in (None, 1):
        student = Student(spec)
        run = training(config(tmp_path / str(chunk), micro_batch_size=chunk, student=student))
        run.optimizer = torch.optim.SGD(run.trained, lr=0.0)
        run._update(run.plan[0].batches.load(0), 4, 0.0)
        actual.append([p.grad for p in run.trained if p.grad is not None])
    for one, other in zip(*actual, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_seeds_differ_by_run_step_process_and_purpose():
    seeds = {
        Processes(rank, 2).seed(run, step, purpose)
        for rank in (0, 1)
        for run in (0, 1)
        for step in (0, 1)
        for purpose in (POSITIONS, 11)
    }
    assert len(seeds) == 16
    assert all(0 <= seed < 2**63 for seed in seeds)
