"""Exported positions equal those of the functions of the engines, if the engines are installed."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from tests.cases import cases

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def program():
    sys.path.insert(0, str(ROOT / "eval"))
    location = importlib.util.spec_from_file_location("engine_positions", ROOT / "eval/engine_positions.py")
    module = importlib.util.module_from_spec(location)
    sys.modules[location.name] = module  # dataclasses look their module up
    location.loader.exec_module(module)
    sys.path.remove(str(ROOT / "eval"))
    return module


@cases("name", ["vllm", "sglang"])
def test_installed_engines(program, name):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed; eval/engine_positions.py accepts a wheel")
    for row in program.measured(program.Engine(name, None), list(program.FAMILIES), 5, seed=1):
        if "max_difference" in row:
            assert row["max_difference"] == 0, row
        elif "after=side" not in row["scheme"]:
            assert row["equal_positions"] == row["equal_deltas"] == row["prompts"], row


@cases("name", ["vllm", "sglang"])
def test_recorded_results(name):
    rows = json.loads((ROOT / "eval/results/engine_positions.json").read_text())["rows"]
    rows = [row for row in rows if row["engine"] == name]
    compared = [row for row in rows if "family" in row]
    assert {row["family"] for row in compared} >= {
        "qwen2_vl",
        "qwen2_5_vl",
        "qwen3_vl",
        "glm4v",
        "ernie4_5_vl_moe",
    }
    for row in compared:
        equal = row["equal_positions"] == row["equal_deltas"] == row["prompts"]
        # transformers numbers text after a long video differently, if no text separates its frames
        assert equal or ("after=side" in row["scheme"] and row["first_difference"][0]["video_grid_thw"]), row
    rotated = [row["max_difference"] for row in rows if "family" not in row]
    assert rotated == [0.0] * 6


def test_functions_are_compiled_without_the_imports_of_their_module(program, tmp_path):
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "a.py").write_text(
        "import no_such_kernel\n\n\n"
        "class Base(no_such_kernel.Layer):\n"
        "    def double(self, x: no_such_kernel.Type):\n        return 2 * helper(x)\n\n"
        "    def other(self):\n        return no_such_kernel\n\n\n"
        "def helper(x):\n    return x + 1\n"
    )
    engine = program.Engine("vllm", tmp_path)
    functions = engine.compiled("vllm/a.py", "Base.double", "helper")
    assert functions["Base"]().double(3) == 8
    assert not hasattr(functions["Base"], "other")
    assert engine.version == "unknown"
    with pytest.raises(AttributeError, match=r"vllm/a\.py of vllm has no missing\."):
        engine.compiled("vllm/a.py", "missing")


def test_a_package_that_is_not_installed(program):
    with pytest.raises(
        FileNotFoundError, match=r"no_such_engine is not installed\. Pass a wheel or a folder"
    ):
        program.Engine("no_such_engine", None)
