"""Every public golden case of an encoding that vispe has, and the runner's own rules."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.golden.__main__ import main
from tests.golden.runner import NOT_IMPLEMENTED, run_case

HERE = Path(__file__).parent
VECTORS = sorted((HERE / "golden" / "vectors").glob("*.npz"))
DONE = (
    "alibi2d",
    "alibi_slopes",
    "comrope",
    "coord_encoders",
    "debias",
    "fourier",
    "grape",
    "group_pe",
    "gta",
    "head_health",
    "hope_vlm",
    "irpe",
    "liere",
    "lightnet",
    "linear_probe",
    "loope",
    "mrope",
    "peg",
    "pesi",
    "ppe",
    "rope2d",
    "rope_dhr",
    "rope_freqs",
    "seqpe",
    "sincos2d",
    "three_cell",
    "v2pe",
    "videorope",
    "vrope",
)  # encodings that must not be skipped


@pytest.mark.parametrize("path", VECTORS, ids=lambda p: p.stem)
def test_golden(path):
    result = run_case(path)
    if result.status == "SKIP" and path.stem.split("__")[0] not in DONE:
        assert result.reason == NOT_IMPLEMENTED
        pytest.skip(f"{path.stem.split('__')[0]} is {NOT_IMPLEMENTED}")
    assert result.status == "PASS", str(result)


def write(path, meta, **arrays):
    np.savez(path, meta=np.array(json.dumps(meta)), **arrays)
    return path


@pytest.fixture
def sincos(tmp_path):
    def make(name="sincos2d__case", change=0.0, **extra):
        with np.load(HERE / "golden" / "vectors" / "sincos2d__dinosaw_3x5.npz") as z:
            meta, table = json.loads(str(z["meta"])), z["out.pos_embed"]
        meta["config"].update(extra.pop("config", {}))
        return write(tmp_path / f"{name}.npz", meta, **{"out.pos_embed": table + change}, **extra)

    return make


def test_an_honest_case_passes(sincos):
    assert run_case(sincos()).status == "PASS"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"change": 1e-3}, "differs in 240 of 240 values"),
        ({"config": {"surprise": 1}}, "not read: ['config.surprise']"),
        ({"in.x": np.zeros(2)}, "not read: ['in.x']"),
        ({"param.w": np.zeros(2)}, "not read: ['param.w']"),
        ({"out.more": np.zeros(2)}, "not computed: ['more']"),
    ],
)
def test_the_runner_fails_what_is_wrong_or_unread(sincos, arguments, reason):
    result = run_case(sincos(**arguments))
    assert result.status == "FAIL"
    assert reason in result.reason


def test_a_wrong_shape_fails(sincos):
    assert "has shape" in run_case(sincos(config={"h": 4})).reason


def test_a_broken_file_fails(tmp_path):
    (tmp_path / "x__y.npz").write_bytes(b"nothing")
    assert run_case(tmp_path / "x__y.npz").status == "FAIL"


def test_the_command_reports_and_exits(sincos, tmp_path, monkeypatch, capsys):
    sincos("sincos2d__good")
    sincos("sincos2d__bad", change=1.0)
    write(tmp_path / "later__one.npz", {"encoding": "later", "config": {}, "tolerance": {"rtol": 0.5}})
    command = [sys.executable, "-m", "tests.golden", str(tmp_path), "--json", str(tmp_path / "out.json")]
    done = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 1
    assert lines[0] == "SKIP later__one 0 0.5 not implemented"
    assert lines[1].startswith("FAIL sincos2d__bad 0.5 1e-05 table: pos_embed differs")
    assert lines[2].startswith("PASS sincos2d__good")
    assert lines[-1] == "1 passed, 1 failed, 1 skipped"
    assert [r["status"] for r in json.loads((tmp_path / "out.json").read_text())] == ["SKIP", "FAIL", "PASS"]
    monkeypatch.setattr(sys, "argv", [*command[2:], "-k", "good"])
    assert main() == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 passed, 0 failed, 0 skipped"
