import csv
import json
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from vispe.cli.main import main
from vispe.segment.materials.statistics import measure

WORDS = "--labels drawn.png --classes dark,bright --features filters"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    mask = (np.mgrid[:70, :83][1] // 9 % 2).astype(np.uint8)
    grey = np.clip(60 + 120 * mask + rng.normal(0, 5, mask.shape), 0, 255).astype(np.uint8)
    Image.fromarray(grey).save(tmp_path / "a.png")
    micron = {"axes": "YX", "PhysicalSizeX": 0.5, "PhysicalSizeXUnit": "µm"}
    micron |= {"PhysicalSizeY": 0.5, "PhysicalSizeYUnit": "µm"}
    tifffile.imwrite(tmp_path / "b.ome.tif", grey, metadata=micron)
    tifffile.imwrite(
        tmp_path / "stack.tif", np.stack([grey, grey[::-1]]), metadata={"axes": "ZYX"}, imagej=True
    )
    scribbles = np.where(rng.random(mask.shape) < 0.2, mask + 1, 0).astype(np.uint8)
    Image.fromarray(scribbles).save(tmp_path / "drawn.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rows(path):
    with Path(path).open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_command_statistics_equal_those_of_the_label_map(folder, capsys):
    assert main(f"segment a.png {WORDS} --materials -o out".split()) == 0
    assert "without an ASTM grain size number" in " ".join(capsys.readouterr().err.split())
    (record,) = json.loads(Path("out/report.json").read_text())["images"]
    labels = np.asarray(Image.open("out/a_seg.png"))
    actual, curves = measure(labels, ["dark", "bright"])
    assert record["materials"] == {"unit": "px", "pages": [actual]}
    assert record["files"]["materials"] == "out/a_materials.csv"
    table = rows("out/a_materials.csv")
    assert list(table[0]) == ["page", "class", "curve", "at", "at_unit", "value"]
    assert len(table) == len(curves)
    assert [row["value"] for row in table] == ["" if c["value"] is None else str(c["value"]) for c in curves]
    (row,) = rows("out/report.csv")
    dark = actual["classes"]["dark"]
    assert float(row["materials.class.dark.mean_intercept"]) == dark["mean_intercept"]
    assert float(row["materials.class.dark.mean_intercept_high"]) == dark["mean_intercept_ci95"][1]
    assert row["materials.patches.grain_size_number"] == ""
    assert row["materials.unit"] == "px"
    # vertical boundaries
    assert abs(dark["elongation"]["degrees"] - 90) < 2


@pytest.mark.slow
def test_pixel_size_of_a_file_converts_statistics_to_microns(folder, capsys):
    assert main(f"segment a.png {WORDS} --materials -o out".split()) == 0
    capsys.readouterr()
    assert main(["apply", "out/model.vispe", "b.ome.tif", "--materials", "-o", "more"]) == 0
    before, after = (
        json.loads(Path(name, "report.json").read_text())["images"][0]["materials"]
        for name in ("out", "more")
    )
    assert after["unit"] == "um"
    px, um = before["pages"][0]["classes"]["dark"], after["pages"][0]["classes"]["dark"]
    assert um["mean_intercept"] == pytest.approx(px["mean_intercept"] / 2)
    assert um["surface_per_volume"] == pytest.approx(px["surface_per_volume"] * 2)
    number = -6.643856 * np.log10(um["mean_intercept"] / 1000) - 3.288
    assert um["grain_size_number"] == pytest.approx(number)
    assert float(rows("more/report.csv")[0]["materials.class.dark.grain_size_number"]) == pytest.approx(
        number
    )
    assert "without an ASTM" not in capsys.readouterr().err


@pytest.mark.slow
def test_each_page_of_a_stack_is_measured(folder):
    assert main(f"segment a.png {WORDS} -o out".split()) == 0
    assert main(["apply", "out/model.vispe", "stack.tif", "--materials", "-o", "more"]) == 0
    (record,) = json.loads(Path("more/report.json").read_text())["images"]
    first, second = record["materials"]["pages"]
    assert first["patches"]["mean_intercept"] == pytest.approx(second["patches"]["mean_intercept"], rel=1e-9)
    assert {row["page"] for row in rows("more/stack_materials.csv")} == {"0", "1"}
    (row,) = rows("more/report.csv")
    assert "materials.patches.mean_intercept_low" not in row
    mean = (first["patches"]["mean_intercept"] + second["patches"]["mean_intercept"]) / 2
    assert float(row["materials.patches.mean_intercept"]) == pytest.approx(mean)


def test_existing_tables_are_not_overwritten_without_force(folder, capsys):
    Path("out").mkdir()
    Path("out/a_materials.csv").write_text("mine")
    command = f"segment a.png {WORDS} --materials -o out".split()
    assert main(command) == 2
    assert "a_materials.csv exists; add --force" in " ".join(capsys.readouterr().err.split())
    assert Path("out/a_materials.csv").read_text() == "mine"
    assert main([*command, "--force"]) == 0
    assert rows("out/a_materials.csv")


def test_pages_that_exceed_the_memory_are_rejected(folder, capsys):
    assert main(f"segment stack.tif {WORDS} --label-page 0 --memory 24MiB --materials -o out".split()) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "is too small for stack.tif: materials need complete pages, which take" in message
