"""Program that compares token densities: rows, resuming, and choice of the default."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

_spec = importlib.util.spec_from_file_location("tokens", Path(__file__).parents[2] / "eval/segment/tokens.py")
tokens = importlib.util.module_from_spec(_spec)
sys.modules["tokens"] = tokens  # its dataclasses look for their module
_spec.loader.exec_module(tokens)


@pytest.fixture
def data(tmp_path):
    truth = np.zeros((40, 48), np.uint8)
    truth[:, 20:] = 1
    grey = np.where(truth, 200, 60) + np.random.default_rng(0).normal(0, 20, truth.shape)
    scribbles = np.where(np.random.default_rng(1).random(truth.shape) < 0.1, truth + 1, 0).astype(np.uint8)
    for folder, array in (
        ("images", grey.clip(0, 255).astype(np.uint8)),
        ("masks", truth),
        ("scribbles", scribbles),
    ):
        (tmp_path / "steel" / folder).mkdir(parents=True)
        Image.fromarray(array).save(tmp_path / "steel" / folder / "a.png")
    return tmp_path


def run(monkeypatch, data, *words):
    common = [
        "tokens.py", str(data), "--model", "test_vit", "--weights", "random", "--synthetic", "0",
        "--layers", "last", "1,5", "--scales", "1", "1.5", "--result", str(data / "r.json"),
    ]  # fmt: skip
    monkeypatch.setattr("sys.argv", [*common, *words])
    tokens.main()
    return json.loads((data / "r.json").read_text())


def test_every_setting_is_measured_once(data, monkeypatch, capsys):
    options = ("--strides", "16", "8", "--shifts", "1", "3")
    actual = run(monkeypatch, data, *options)
    # 3 shifts do not divide a stride of 16 or 8 px
    assert [row["setting"] for row in actual["rows"]] == [
        f"stride {stride}, shifts 1, layers {layers}, x{scale}"
        for stride in (16, 8)
        for layers in ("last", "1,5")
        for scale in ("1", "1.5")
    ]
    assert all(0 < row["miou"] <= 1 for row in actual["rows"])
    capsys.readouterr()
    assert run(monkeypatch, data, *options)["rows"] == actual["rows"]
    assert "steel | a" not in capsys.readouterr().out
    more_rows = run(monkeypatch, data, "--strides", "4", "--shifts", "2", "--memory", "1e-4")["rows"]
    assert more_rows[: len(actual["rows"])] == actual["rows"]
    assert all(row["left_out"].startswith("maps of") for row in more_rows[len(actual["rows"]) :])
    task = tokens.drawn_task(0)
    corner = tokens.Picture(*(a[:48, :64] for a in (task.page, task.drawn, task.truth)))
    monkeypatch.setattr(tokens, "drawn_task", lambda number: corner)
    with_times = run(monkeypatch, data, "--times")
    assert with_times["rows"] == actual["rows"] + more_rows[len(actual["rows"]) :]
    seconds = with_times["summary"]["seconds_per_megapixel"]
    assert [*seconds] == [*(row["setting"] for row in with_times["rows"]), "filters and vispe_micro"]
    assert min(seconds.values()) > 0
    assert run(monkeypatch, data, *options)["summary"]["seconds_per_megapixel"] == seconds
    with pytest.raises(SystemExit, match="other weights or versions"):
        run(monkeypatch, data, "--weights", "other", *options)


def test_default_is_chosen_by_synthetic_tasks():
    score = {
        "cheap": [0.5, 0.6, 0.7],
        "good": [0.8, 0.9, 0.7],
        "dear": [0.81, 0.9, 0.7],
        "poor": [0.1, 0.1, 0.2],
    }
    by_task = {name: dict(zip("abc", values, strict=True)) for name, values in score.items()}
    seconds = {"cheap": 1, "good": 5, "dear": 50, "poor": 0.5}
    # `cheap` ties on a task, so three tasks cannot separate it from the best; `poor` is clearly worse
    assert tokens.chosen(by_task, seconds) == "cheap"
    by_task["cheap"]["c"] = 0.6
    assert tokens.chosen(by_task, seconds) == "good"
    assert tokens.chosen(by_task, {"good": 5}) is None
    by_task["dear"].pop("a")
    assert tokens.chosen(by_task, seconds) is None


def test_settings_are_parsed_from_their_names():
    setting = tokens.Setting(7, 1, "5,8,11", 3.5)
    assert tokens.parsed(str(setting)) == setting
