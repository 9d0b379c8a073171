import json

import pytest
from PIL import Image

from vispe.cli.main import main

QUICK = ["--steps", "2", "--seeds", "1"]


@pytest.fixture
def tiny_recipe(monkeypatch):
    """Replace the default recipe by a tiny one."""
    from vispe.experimental.three_cell import trainer

    defaults = (5, 32, 1, 2, 1.0, 8, 2, 4, 1e-3, 20)
    monkeypatch.setattr(trainer.ThreeCellRecipe.__init__, "__defaults__", defaults)


def failed(capsys, *words):
    assert main(["threecell", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_the_table_is_printed(capsys, tiny_recipe):
    assert main(["threecell", "none", "alibi2d(wrap=false)", *QUICK]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert lines[0].split("|")[1].strip() == "encoding"
    assert {line.split("|")[1].strip() for line in lines[2:]} == {
        "none", "alibi2d(wrap=false)", "(best constant answer)",
    }  # fmt: skip


def test_results_are_written_and_extended(capsys, tiny_recipe, tmp_path):
    out = tmp_path / "out"
    assert main(["threecell", "none", *QUICK, "-o", str(out)]) == 0
    assert sorted(p.name for p in out.iterdir()) == ["report.html", "three_cell.json", "three_cell.png"]
    first = json.loads((out / "three_cell.json").read_text())
    capsys.readouterr()
    assert main(["threecell", "none", "learned", *QUICK, "-o", str(out), "--json"]) == 0
    printed, err = capsys.readouterr()
    rows = json.loads(printed)
    assert [r["encoding"] for r in rows] == ["learned", "none"]
    assert rows[1] == first["rows"][0]  # was not trained again
    assert "written: " in err
    page = (out / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 1
    assert "<td class=left>learned</td>" in page
    assert "(best constant answer)" in page
    assert set(first["versions"]) == {"vispe", "torch", "timm"}
    with Image.open(out / "three_cell.png") as image:
        assert image.size[0] > 1200
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "report.html").write_text("mine")
    assert "report.html exists and is not of this benchmark" in failed(
        capsys, "none", "--steps", "3", "-o", str(tmp_path / "mine")
    )
    assert (tmp_path / "mine" / "report.html").read_text() == "mine"
    assert "another recipe (steps 2)" in failed(capsys, "none", "--steps", "3", "-o", str(out))


def test_invalid_arguments_raise(capsys, tiny_recipe):
    assert "Did you mean 'learned'" in failed(capsys, "none", "learnt", *QUICK)
    assert "--seeds must be 1 or more" in failed(capsys, "none", "--seeds", "0")
    assert "encodings and seeds must be distinct" in failed(capsys, "none", "none", *QUICK)
    assert "threecell: missing required argument" in failed(capsys)
