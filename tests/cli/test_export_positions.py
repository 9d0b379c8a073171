"""`vispe export-positions`: three files with everything that an inference engine needs."""

import json

import pytest

from tests.hosts.transformers.tiny import config
from vispe.cli.main import main
from vispe.hosts.transformers.serving import load_positions


@pytest.fixture
def folder(tmp_path):
    """Return a folder with a saved configuration."""
    config("qwen2_5_vl").save_pretrained(tmp_path / "model")
    return tmp_path


def test_exported_files_load_again(folder, capsys):
    words = ["export-positions", str(folder / "model"), "-o", str(folder / "out"), "--scheme", "videorope"]
    assert main([*words, "--positions", "99", "--grid-thw", "4x8x9", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["rows"] == 99 + report["below"]
    assert report["mrope_section"] is None
    loaded = load_positions(folder / "out")
    assert str(loaded.rows.scheme) == "videorope"
    assert loaded.positions([5, 6, 7])[0].tolist() == [[0, 1, 2]] * 3
    assert main(words) == 2
    assert "exist" in capsys.readouterr().err
    assert main([*words, "--force"]) == 0
    assert "needs TableRotary" in capsys.readouterr().out


def test_the_mrope_section_is_printed(folder, capsys):
    assert main(["export-positions", str(folder / "model"), "-o", str(folder / "out")]) == 0
    assert "mrope_section [6, 5, 5]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--grid-thw", "64x64"], "--grid-thw is frames x rows x columns"),
        (["--scheme", "mropey"], "mropey"),
        (["--scheme", "circlerope"], "nearest=True"),
        (["--positions", "0"], "positions"),
    ],
)
def test_invalid_arguments_raise_a_one_line_error(folder, capsys, words, line):
    assert main(["export-positions", str(folder / "model"), "-o", str(folder / "out"), *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert line in err
    assert not (folder / "out").exists()
