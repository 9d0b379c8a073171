import json

import pytest
import torch

from vispe.cli.main import main
from vispe.experimental import speed as attention_bench
from vispe.experimental.speed import BenchmarkPlan, Case, benchmark


@pytest.fixture
def tiny_plan(monkeypatch):
    """Replace the benchmark plan by one that takes seconds."""
    case = Case((3, 4), 1, 1, 2, 16, "float32")
    plan = BenchmarkPlan((case,), ("forward", "table"), reps=2, slow=False, check_shapes=(((3, 4), 1, 16),),
                check_dtypes=("float32",), warmup=0.0)  # fmt: skip
    monkeypatch.setattr(attention_bench, "plan_for", lambda kind, device: plan)


def test_the_fastest_backend_is_printed(tiny_plan, capsys):
    assert main(["bench", "attention", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    title, _, forward, learned = out.splitlines()
    assert title.endswith("9 of 9 checks passed")
    assert forward.startswith("3x4+1 b1 h2 d16 float32, forward pass, fixed bias: ")
    assert " wins with " in learned
    assert err.count("ok   float32") == 9
    assert err.count(" ms, error ") == 12


def test_json_has_every_measurement(tiny_plan, capsys):
    assert main(["bench", "attention", "--device", "cpu", "--json"]) == 0
    state = json.loads(capsys.readouterr().out)
    assert state["missing"] == 0
    assert len(state["rows"]) == 12
    assert {t["verdict"] for t in state["targets"]} == {"not measured"}
    assert state["environment"]["versions"]["torch"] == torch.__version__


def test_nothing_is_timed_after_a_failed_check(tiny_plan, capsys, monkeypatch):
    monkeypatch.setattr(
        benchmark, "run_check", lambda record, *_: {**record, "failure": "no", "passed": False}
    )
    assert main(["bench", "attention", "--device", "cpu"]) == 1
    out, err = capsys.readouterr()
    assert out == "A check against float64 failed, so nothing was timed.\n"
    assert err.count("FAIL") == 9


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--minutes", "0"], "bench: --minutes must be above 0, got 0."),
        (["--minutes", "1e-9", "--device", "cpu"], "the checks did not finish in"),
        (["--device", "tpu"], "bench: --device must be"),
    ],
)
def test_invalid_arguments_raise(tiny_plan, capsys, words, message):
    assert main(["bench", "attention", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_gpu_raises(tiny_plan, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "attention", "--device", "cuda"]) == 2
    assert "torch finds no GPU, got --device cuda. Use --device cpu" in capsys.readouterr().err
