"""`eval/bench/first.py` compiles in its stage `precompile` what its later stages launch."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
from tests.attention.triton.compiled.stand_in_driver import stand_in_gpu
from vispe import Grid

BENCH = Path(__file__).parents[4] / "eval/bench"


@pytest.fixture
def precompile(monkeypatch, fresh_kernels):
    """The module of the jobs, which is imported from the folder of the programs."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module("precompile")
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == BENCH:
            del sys.modules[name]


def compiled_by(precompile, kind, select=lambda job: True):
    """Return the kernels that the selected jobs of a kind compile."""
    with stand_in_gpu(90, compiles=False) as gpu:
        for job in precompile.jobs(dry=False):
            if job[0] == kind and select(job):
                precompile.launch(job, "cpu")
    assert gpu.signatures
    return set(gpu.signatures)


def test_kernels(precompile):
    compiled = compiled_by(precompile, "kernel", lambda job: job[2:] == (64, "bfloat16", "long"))
    with stand_in_gpu(90, compiles=False) as gpu:
        for kernel in precompile.KERNELS:
            for grid, batch in importlib.import_module("tune").WORK["long"]:
                for stored in precompile.strips(kernel, "bfloat16"):
                    batch = min(batch, 16)
                    precompile.work(kernel, grid, batch, 64, torch.bfloat16, "cpu", stored)(0)
    assert set(gpu.signatures) <= compiled


def test_operands_of_the_tuned_gradient_of_the_bias(precompile, monkeypatch):
    from vispe.attention.backends.triton.grid import launch_backward

    operands = []
    monkeypatch.setattr(launch_backward, "run_bias", lambda *args: operands.append(args))
    with stand_in_gpu(90, compiles=False):
        precompile.work("grad_bias", Grid((3, 4), 1), 2, 16, torch.float32, "cpu", "float32")(0)
    _, q, *_, delta = operands[0][:6]
    assert delta.shape == q.shape[:3]


@pytest.mark.slow
def test_rows_of_the_quick_protocol(precompile):
    compiled = compiled_by(precompile, "row")
    with stand_in_gpu(90, compiles=False) as gpu:
        for kind, case, *rest in precompile.jobs(dry=False):
            if kind == "row":
                other = replace(case, batch=min(case.batch, 16) + 1)
                precompile.launch((kind, other, *rest), "cpu", batch=other.batch)
    assert set(gpu.signatures) <= compiled


@pytest.mark.slow
def test_models(precompile):
    latency = importlib.import_module("latency")
    compiled = compiled_by(precompile, "model", lambda job: "patch16" in job[1])
    with stand_in_gpu(90, compiles=False) as gpu:
        for arch, size, _ in latency.MODELS[:2]:
            for spec in latency.ENCODINGS:
                for step in latency.step_functions(arch, size, 3, spec, "cpu", depth=2).values():
                    step()
    assert set(gpu.signatures) <= compiled


def test_jobs_cover_all_stages(precompile):
    jobs = precompile.jobs(dry=False)
    assert {job[0] for job in jobs} == {"kernel", "check", "row", "tiny", "replay", "model"}
    assert len({precompile.name_of(job) for job in jobs}) == len(jobs)
    assert [job[0] for job in precompile.jobs(dry=True)] == list(dict.fromkeys(job[0] for job in jobs))
