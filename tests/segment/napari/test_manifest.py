"""Manifest of the napari plugin."""

import json
import tomllib
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FILE = ROOT / "vispe" / "segment" / "napari" / "napari.yaml"


@pytest.fixture(scope="module")
def npe2():
    pytest.importorskip("npe2", reason="npe2 comes with the extra napari")
    with warnings.catch_warnings(action="ignore"):  # warnings of pydantic about the classes of npe2
        import npe2

        return npe2


@pytest.mark.filterwarnings("ignore")
def test_manifest_is_valid_and_an_entry_point_of_the_package(npe2):
    manifest = npe2.PluginManifest.from_file(FILE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["napari.manifest"] == {"vispe": "vispe.segment.napari:napari.yaml"}
    assert manifest.name == project["name"] == "vispe"
    commands = {c.id: c.python_name for c in manifest.contributions.commands}
    contributed = [w.command for w in manifest.contributions.widgets]
    contributed += [s.command for s in manifest.contributions.sample_data]
    assert sorted(contributed) == sorted(commands)
    assert json.loads(manifest.json())["display_name"] == "vispe"


@pytest.mark.slow  # imports napari and Qt
@pytest.mark.filterwarnings("ignore")
def test_all_commands_of_the_manifest_can_be_imported(npe2, monkeypatch):
    pytest.importorskip("napari", reason="napari comes with the extra napari")
    pytest.importorskip("qtpy", reason="napari works without Qt, too, but not its widgets")
    monkeypatch.setenv("QT_QPA_PLATFORM", "offscreen")
    npe2.PluginManifest.from_file(FILE).validate_imports()
