"""Output pipes that a reader such as `head` closes: commands succeed, write their files and print nothing more."""

import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from tests.products import slow_except
from vispe.cli.main import main

pytestmark = pytest.mark.skipif(os.name == "nt", reason="pipes close in another way on Windows")

TINY = ["test_vit", "--weights", "random"]
PROBE = ["--noise", "1", "--masks", "1", "--img-size", "64", "--step", "2", "--no-layers"]
COMMANDS = {
    "list": (["list"], []),
    "info": (["info"], []),
    "cite": (["cite", "alibi2d"], []),
    "doctor": (["doctor", "test_vit", "--device", "cpu", "--img-size", "32"], []),
    "plot": (["plot", "alibi2d", "--grid", "5x5", "-o", "out/bias.png"], ["bias.png"]),
    "health": (["health", *TINY, "--noise", "1", "--img-size", "64", "-o", "out"],
               ["heads.png", "report.html", "report.json"]),
    "probe": (["probe", *TINY, *PROBE, "-o", "out"], ["probe.png", "report.html", "report.json"]),
    "probe as JSON": (["probe", *TINY, *PROBE, "--json", "-o", "out"], ["probe.png", "report.html", "report.json"]),
    "rotate": (["rotate", *TINY, "--textures", "1", "--quick", "--metrics", "d4", "-o", "out"],
               ["report.html", "report.json"]),
    "segment": (["segment", "a.png", "b.png", "--features", "filters", "--cluster", "2", "-o", "out"],
                ["a_seg.png", "b_seg.png"]),
    "threecell": (["threecell", "alibi2d", "--seeds", "1", "--steps", "2", "-o", "out"],
                  ["report.html"]),
}  # fmt: skip

LONG = {"threecell", "rotate", "probe"}  # the others share their final code


@pytest.fixture
def closed_pipe():
    """Return the write end of a pipe whose read end is closed."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.mark.parametrize("name", slow_except(COMMANDS, {*COMMANDS} - LONG))
def test_commands_succeed_and_write_their_files(name, closed_pipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for image in ("a.png", "b.png"):
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 48), np.uint8)).save(image)
    words, files = COMMANDS[name]
    streams = [os.fdopen(os.dup(closed_pipe), "w", buffering=1) for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", streams[0])
        patch.setattr(sys, "stderr", streams[1])
        code = main(words)
        assert sys.stdout is streams[0]
    for stream in streams:
        stream.close()
    assert code == 0
    assert set(files) <= {path.name for path in (tmp_path / "out").rglob("*")}


def test_errors_keep_their_exit_code(closed_pipe, monkeypatch):
    with os.fdopen(os.dup(closed_pipe), "w", buffering=1) as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        assert main(["info", "no_such_encoding"]) == 2


@pytest.mark.slow  # in the fast suite with a test of tests/cli/test_main.py
@pytest.mark.parametrize("both", [False, True])
def test_python_prints_nothing_on_exit(closed_pipe, both):
    code = "import sys; from vispe.cli.main import main; sys.exit(main(['--help']))"
    streams = {"stdout": closed_pipe, "stderr": closed_pipe if both else subprocess.PIPE}
    process = subprocess.run([sys.executable, "-c", code], **streams, check=False)
    assert process.returncode == 0
    assert not process.stderr


@pytest.mark.slow
def test_processes_without_standard_streams():
    code = "import sys; sys.stdout = sys.stderr = None; from vispe.cli.main import main; sys.exit(main(['list']))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_files_are_written_before_anything_is_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("health", "probe", "rotate", "threecell"):
        words, files = COMMANDS[name]

        class CheckedStream:
            def __getattr__(self, name):
                return getattr(sys.__stdout__, name)

            def write(self, text, files=files):
                assert set(files) <= {path.name for path in tmp_path.rglob("*")}, text
                return len(text)

        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", CheckedStream())
            assert main([*words, "--force"] if name != "threecell" else words) == 0
        for path in (tmp_path / "out").glob("*"):
            path.unlink()
