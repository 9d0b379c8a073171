"""The benchmark of attention: its programs run end to end on tiny tensors, with correct verdicts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vispe.attention.backends import triton as fused
from vispe.attention.backends.triton import tiles
from vispe.errors import InputError, OptionError
from vispe.experimental.speed import (
    Bench,
    BenchmarkPlan,
    Case,
    benchmark,
    environment,
    judge,
    plan_for,
    structured_calls,
    table,
    winners,
)
from vispe.experimental.speed.case_inputs import CaseInputs
from vispe.experimental.speed.cases import STRUCTURED
from vispe.experimental.speed.contenders import Contender, contenders, ours
from vispe.experimental.speed.correctness import run_check
from vispe.experimental.speed.structured_calls import KINDS, Structured, exact_rows
from vispe.experimental.speed.timing import measure

ROOT = Path(__file__).parents[3]
TINY = Case((3, 4), 1, 2, 2, 16, "float32")
PLAN = BenchmarkPlan(
    (TINY,), ("forward", "table"), reps=2, slow=False, check_shapes=(((3, 4), 1, 16),),
    check_dtypes=("float32",), warmup=0.0,
)  # fmt: skip


def program(*words, folder):
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(folder)}
    command = [sys.executable, "-m", "tests.attention.triton.interpreter", *words]
    process = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process


@pytest.mark.slow
def test_the_dry_run_enters_every_path(tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed")
    out = tmp_path / "attention.json"
    process = program(
        "eval/bench/attention.py", "--dry-run", "--device", "cpu", "--out", str(out), folder=tmp_path
    )
    state = json.loads(out.read_text())
    assert [c["bias"] for c in state["checks"]] == [
        "none", "distance", "slopes", "table", "padding", "dropped", "decomposed", "gated", "rotary",
    ]  # fmt: skip
    assert all(c["passed"] for c in state["checks"])
    rows = {(r["mode"], r["contender"]): r for r in state["rows"]}
    plan = plan_for("dry", "cpu")
    expected = {(m, c.name) for c in contenders(plan, "cpu") for m in c.modes} | {("table", "vispe, largest")}
    assert set(rows) == expected
    for mode in ("forward", "frozen", "slopes", "table"):
        assert rows[mode, "vispe"]["error"] < 6e-4
        assert f"{rows[mode, 'vispe']['ms']:.4g}" in process.stdout
    for mode in STRUCTURED:
        assert rows[mode, "vispe"]["error"] < 6e-4
        assert rows[mode, "sdpa, dense bias built"]["error"] < 6e-4
    assert rows["forward", "flex, table"]["error"] < 6e-4
    assert "viable" in rows["forward", "sdpa cudnn, no bias"]["failure"]
    assert "flash_attn.cute" in rows["forward", "flex flash, distance"]["failure"]
    assert "flash_attn_interface" in rows["forward", "flash-attention 3, no bias"]["failure"]
    assert rows["forward", "flex max-autotune, distance"]["error"] < 6e-4
    assert rows["forward", "sdpa, 8 extra columns"]["exact"] is False
    assert len(state["new_grid"]["seconds"]) == 2
    assert "running" not in state


@pytest.mark.slow
def test_the_tuner_writes_its_trials(tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed")
    out = tmp_path / "tiles.json"
    words = [
        "--dry-run",
        "--kernels",
        "forward",
        "--dtypes",
        "float32",
        "--tokens",
        "short",
        "--widths",
        "64",
    ]
    program("eval/bench/tune.py", *words, "--out", str(out), folder=tmp_path)
    before, after = json.loads(tiles.FILE.read_text()), json.loads(out.read_text())
    changed = [a for a, b in zip(after, before, strict=True) if a != b]
    assert [(r["kernel"], r["width"], r["dtype"], r["tokens"]) for r in changed] == [
        ("forward", 64, "float32", "short")
    ]
    assert changed[0]["from"].startswith("the interpreter, triton ")


@pytest.mark.slow
def test_the_first_stages_run_dry_and_resume(tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed")
    words = ["eval/bench/first.py", "--dry-run", "--num-workers", "1", "--out", str(tmp_path)]
    program(*words, folder=tmp_path)
    actual = json.loads((tmp_path / "first.json").read_text())
    assert list(actual) == [
        "facts", "precompile", "ceilings", "quick", "kernels", "replay", "models", "sanitizer",
    ]  # fmt: skip
    compiled = actual["precompile"]["result"]
    assert len(compiled) == 6  # a job of each kind
    assert all(isinstance(seconds, float) for seconds in compiled.values()), compiled
    assert actual["quick"]["result"]["failed"] == []
    # what is there is not measured again, what failed is
    actual["kernels"] = {"failure": "exit 1"}
    (tmp_path / "first.json").write_text(json.dumps(actual))
    lines = (tmp_path / "kernels.jsonl").read_text().split("\n")
    (tmp_path / "kernels.jsonl").write_text("\n".join(lines[:4]))
    program(*words, folder=tmp_path)
    report = json.loads((tmp_path / "first.json").read_text())
    assert report["facts"] == actual["facts"]
    # two strips of forward, grad_q and grad_once, one of grad_bias, clocks
    assert len(report["kernels"]["result"]) == 8
    assert len(report["replay"]["result"]) == 4
    assert len(report["models"]["result"]) == 6


def test_every_row_of_the_table_of_tiles_occurs_once():
    rows = json.loads(tiles.FILE.read_text())
    keys = {(r["sm"], r["width"], r["dtype"], r["strip"], r["tokens"], r["kernel"]) for r in rows}
    # exact float32 for two widths, split float32 for three; half precision with float32 and float16 strips for three
    assert len(keys) == len(rows) == 2 * 2 * (2 * 4 + 3 * 4 + 3 * (4 + 3))
    assert {r["strip"] for r in rows if r["dtype"] != "half" or r["kernel"] == "grad_bias"} == {"float32"}
    assert tiles.tiles("forward", 64, 4096, "half")[:4] == (64, 64, 4, 2)
    assert tiles.tiles("forward", 65, 4096, "half")[:4] == (128, 128, 8, 2)
    assert tiles.tiles("forward", 97, 4096, "half")[:4] == (64, 64, 4, 2)
    assert tiles.tiles("grad_kv", 64, 512, "half")[:4] == (64, 64, 4, 2)
    assert tiles.tiles("grad_kv", 64, 513, "half", older=True)[:4] == (32, 128, 8, 2)
    assert tiles.tiles("forward", 128, 4096, "float32", older=True)[:4] == (16, 32, 8, 1)
    assert tiles.tiles("forward", 64, 4096, "tf32x3")[:4] == (128, 64, 8, 2)


def test_a_run_on_a_cpu_is_saved_and_resumes(tmp_path):
    path, messages = tmp_path / "a.json", []
    first = Bench(PLAN, "cpu", path, minutes=0, say=messages.append)
    assert first.check() is None
    assert first.run() == len(first.tasks())
    bench = Bench(PLAN, "cpu", path, say=messages.append)
    assert bench.check()
    assert bench.run() == 0
    rows = json.loads(path.read_text())["rows"]
    assert {r["contender"] for r in rows if r["mode"] == "table"} == {
        "vispe",
        "sdpa, dense bias built",
        "eager",
    }
    assert all(r["error"] < 2e-6 for r in rows if r["exact"])
    assert all(r["error"] < 2e-2 for r in rows)
    lines = len(messages)
    resumed = Bench(PLAN, "cpu", path, say=messages.append)
    assert resumed.check()
    assert resumed.run() == 0
    assert len(messages) == lines
    assert json.loads(path.read_text())["rows"] == rows


def test_changed_kernels_are_measured_again(tmp_path):
    path = tmp_path / "a.json"
    bench = Bench(PLAN, "cpu", path)
    bench.state["rows"] = [{"case": str(TINY), "mode": "forward", "contender": n} for n in ("vispe", "eager")]
    bench.state["checks"] = [{"passed": True}]
    bench.save()
    stored = json.loads(path.read_text())
    stored["environment"]["kernels"] = "others"
    path.write_text(json.dumps(stored))
    resumed = Bench(PLAN, "cpu", path)
    assert [r["contender"] for r in resumed.state["rows"]] == ["eager"]
    assert resumed.state["checks"] == []
    stored["environment"]["versions"]["torch"] = "1.0"
    path.write_text(json.dumps(stored))
    with pytest.raises(InputError, match=r"a.json was measured with versions .*1\.0.*Use a new file"):
        Bench(PLAN, "cpu", path)
    assert Bench(PLAN, "cpu", path, fresh=True).state["rows"] == []


def test_failures_become_rows_and_crashes_are_retried_once(tmp_path, monkeypatch):
    def broken(setup):
        raise RuntimeError("cannot\nat all")

    rivals = [
        Contender("broken", "mode", broken, ("forward",)),
        Contender("fatal", "mode", ours("mode"), ("forward",)),
    ]
    monkeypatch.setattr(benchmark, "contenders", lambda plan, device: rivals)
    path = tmp_path / "a.json"
    bench = Bench(PLAN, "cpu", path)
    key = f"{TINY} | forward | fatal"
    bench.state["running"] = {"key": key, "tries": 2}
    bench.save()
    bench = Bench(PLAN, "cpu", path)
    bench.state["running"] = {"key": key, "tries": 2}
    monkeypatch.setattr(benchmark, "contenders", lambda plan, device: rivals[1:])
    assert bench.run() == 0
    monkeypatch.setattr(benchmark, "contenders", lambda plan, device: rivals)
    assert bench.run() == 0
    failures = {r["contender"]: r["failure"] for r in bench.state["rows"]}
    assert failures == {"broken": "RuntimeError: cannot", "fatal": "the process ended 2 times while this ran"}
    text = table(bench.state)
    assert "did not run: broken: RuntimeError: cannot" in text
    assert "Did not run in some case: fatal, broken." in winners(bench.state)


def test_a_wrong_result_is_detected(monkeypatch):
    record = {"dtype": "float32", "grid": "3x4+1", "width": 16, "bias": "table"}
    assert run_check(record, "cpu", "auto")["passed"]
    right = structured_calls.attention
    monkeypatch.setattr(
        structured_calls,
        "attention",
        lambda *a, backend, **o: right(*a, backend=backend, **o) * (1 + 1e-4 * (backend == "auto")),
    )
    actual = run_check(record, "cpu", "auto")
    assert not actual["passed"]
    assert actual["errors"]["out"] == pytest.approx(1e-4, rel=0.1)
    assert "BackendUnavailable" in run_check(record, "cpu", "lowrank")["failure"]


@pytest.mark.parametrize("mode", STRUCTURED)
def test_exact_rows_of_other_paths_equal_the_reference(mode):
    setup = CaseInputs(Case((3, 4), 2, 2, 3, 16, "float32"), mode, "cpu")
    what, (q, k, v, _) = setup.structured(), (t.detach().double() for t in setup.sets[0])
    expected = what.double().attend(q, k, v, "reference")
    rows = torch.arange(0, setup.case.tokens, 2)
    for head in range(3):
        actual = exact_rows(what.sample(head), q[0, head], k[0, head], v[0, head], rows)
        torch.testing.assert_close(actual, expected[0, head, rows])
    assert setup.error(expected, "structured")[0] < 1e-12
    assert len(setup.leaves) == (2 if mode in ("decomposed", "gated") else 0)
    with pytest.raises(OptionError, match=r"mode must be one of .*got 'table'"):
        CaseInputs(setup.case, "table", "cpu").structured()


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_result_of_another_path_is_detected(kind, monkeypatch):
    record = {"dtype": "float32", "grid": "3x4+1", "width": 16, "bias": kind}
    actual = run_check(record, "cpu", "auto")
    assert actual["passed"]
    assert ("dbias" in actual["errors"]) == (kind in ("decomposed", "gated"))
    bias = Structured.bias
    monkeypatch.setattr(
        Structured, "bias", lambda self, q: None if q.dtype == torch.float32 else bias(self, q)
    )
    assert not run_check(record, "cpu", "auto")["passed"]


def test_the_exact_result_equals_the_reference():
    for mode in ("slopes", "table"):
        setup = CaseInputs(Case((3, 4), 2, 2, 3, 16, "float32"), mode, "cpu")
        dense = setup.bias().dense()[0, 1]
        rows = torch.arange(setup.case.tokens)
        torch.testing.assert_close(setup.bias_rows(setup.kind, 1, rows).float(), dense.detach())


@pytest.mark.gpu
def test_memory_and_events_on_a_gpu():
    setup = CaseInputs(Case((32, 32), 1, 2, 2), "forward", "cuda", "triton")
    row = measure(Contender("vispe", "mode", ours("mode")), setup, BenchmarkPlan((setup.case,), reps=50))
    assert row["error"] < 4e-3
    assert 0 < row["extra_mib"] < 1025**2 * 2 * 2 / 2**20
    assert row["reps"] == 50


def entry(case, mode, contender, ms, **fields):
    return {
        "case": str(case), "mode": mode, "contender": contender, "ms": ms, "tokens": case.tokens, "batch": case.batch,
        "heads": case.heads, "width": case.width, "dtype": case.dtype, "exact": True, "error": 1e-3, "cold_s": 1.0,
        "spread_ms": [ms, ms], "tflops": 1.0, **fields,
    }  # fmt: skip


@pytest.fixture
def measured():
    """Return rows like those of a GPU."""
    one, wide = Case((32, 32), 1, 64, 12), Case((32, 32), 1, 64, 16, 128)
    small, big = Case((14, 14), 1, 512, 12), Case((128, 128), 0, 1, 16)
    memory = {"extra_mib": 7.6, "extra_first_mib": 9.0}
    rows = [
        entry(one, "forward", "vispe", 1.0, **memory), entry(one, "forward", "vispe, table", 1.1, **memory),
        entry(one, "forward", "vispe, no bias", 0.98), entry(one, "forward", "sdpa flash, no bias", 1.3),
        entry(one, "forward", "sdpa cudnn, no bias", 0.8),
        entry(one, "forward", "sdpa efficient, dense bias cached", 2.0),
        entry(one, "forward", "flex, distance", 1.4), entry(small, "forward", "vispe", 5.0),
        entry(small, "forward", "sdpa flash, no bias", 1.0), entry(wide, "forward", "vispe", 2.0),
        entry(wide, "forward", "sdpa flash, no bias", 2.0), entry(wide, "forward", "sdpa cudnn, no bias", 1.2),
        entry(one, "frozen", "vispe, no bias", 4.0), entry(one, "frozen", "vispe", 4.1, **memory),
        entry(one, "table", "vispe", 5.0, **memory), entry(one, "table", "flex, table", 60.0),
        entry(big, "table", "vispe, largest", 50.0),
        {"case": "256x256+0 b1", "mode": "table", "contender": "vispe, largest", "failure": "no", "tokens": 65536},
    ]  # fmt: skip
    new = {"grids": ["a", "b", "c"], "seconds": [1.0, 0.1, 0.1], "compiled": [5, 0, 1]}
    environment = {"device": "GPU", "versions": {"torch": "2"}}
    return {"environment": environment, "rows": rows, "checks": [{"passed": True}], "new_grid": new}


def test_targets(measured):
    actual = {t["target"]: t for t in judge(measured)}
    verdicts = {name: t["verdict"] for name, t in actual.items()}
    assert verdicts == {
        "T1": "missed", "T2": "stretch", "T3": "missed", "T4a": "must", "T4b": "missed", "T5": "must", "T6a": "must",
        "T6b": "not measured", "T7": "stretch", "T8": "stretch", "T9": "stretch", "T10": "must", "T11": "must",
        "T12": "missed",
    }  # fmt: skip
    assert actual["T1"]["found"] == 0.891
    assert actual["T1"]["at"].endswith("vispe, table")
    assert actual["T3"]["found"] == 0.8
    assert actual["T10"]["n_x_n"] == []
    measured["rows"][1]["extra_first_mib"] = 30.0
    assert {t["target"]: t for t in judge(measured)}["T10"]["verdict"] == "missed"


def test_report_and_winners(measured):
    text = winners(measured)
    assert (
        "32x32+1 b64 h12 d64 bfloat16, forward pass, fixed bias: vispe wins with 1 ms; 1.02 times the time without"
        in text
    )
    assert "next flex, distance with 1.4 ms" in text
    assert "Did not run in some case: vispe, largest." in text
    measured["targets"] = judge(measured)
    lines = table(measured).splitlines()
    (row,) = [line.split() for line in lines if line.startswith("  sdpa efficient")]
    assert row[-3:] == ["0.49", "1.0e-03", "1"]
    assert any(line.split()[:2] == ["T12", "0"] and "missed" in line for line in lines)


def test_plans():
    plan = plan_for("protocol", "cuda")
    assert len(plan.cases) == len(set(plan.cases)) == 11 * 3 + 3 + 3
    assert plan.cases[0].tokens == 1025
    assert {c.dtype for c in plan.cases} == {"bfloat16", "float16"}
    assert plan.reps >= 50
    assert all(1e8 < c.batch * c.heads * c.tokens**2 < 5e9 for c in plan.cases)
    assert plan_for("protocol", "cpu").cases[0].tokens == 257
    with pytest.raises(OptionError, match="There is no plan 'all'; choose protocol, quick or dry"):
        plan_for("all", "cpu")


def test_the_kernels_are_part_of_the_environment(tmp_path, monkeypatch):
    assert Path(fused.__file__).with_name("tiles.json").exists()
    before = benchmark.environment("cpu")["kernels"]
    assert len(before) == 16
    for name in ("tiles.json", "grid/forward.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    monkeypatch.setattr(environment.triton, "__file__", str(tmp_path / "__init__.py"))
    first = benchmark.environment("cpu")["kernels"]
    (tmp_path / "grid" / "forward.py").write_text("y")
    assert len({before, first, benchmark.environment("cpu")["kernels"]}) == 3
