"""Removal of files: only entries of an output folder that vispe wrote, never the target of a link."""

import ast
import json
from pathlib import Path

import pytest

from vispe.errors import InputError
from vispe.segment.run.results_folder.lock import LOCK, lock_folder
from vispe.train.retrofit.checkpoint import RunFolder
from vispe.utils.files import check_no_link, remove

PACKAGE = Path(__file__).parents[1] / "vispe"


@pytest.mark.parametrize("name", ["..", ".", "../thesis.txt", "deep/a.txt"])
def test_only_direct_entries_of_the_folder_are_removed(tmp_path, name):
    out = tmp_path / "out"
    (out / "deep").mkdir(parents=True)
    files = [tmp_path / "thesis.txt", out / "deep" / "a.txt"]
    for file in files:
        file.write_text("mine")
    with pytest.raises(InputError, match="is not an entry of"):
        remove(out / name, out)
    assert all(file.read_text() == "mine" for file in files)


def test_removing_a_link_does_not_remove_its_target(tmp_path):
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.txt").write_text("mine")
    link = tmp_path / "out"
    link.symlink_to(tmp_path / "foreign", target_is_directory=True)
    with pytest.raises(InputError, match="is a link"):
        check_no_link(link)
    remove(link, tmp_path)
    assert not link.is_symlink()
    assert (tmp_path / "foreign" / "thesis.txt").read_text() == "mine"


def test_folders_are_removed_only_in_two_modules():
    """`shutil.rmtree` accepts any path, so all other modules call `vispe.utils.files.remove`."""
    calls = []
    for file in sorted(PACKAGE.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "rmtree" in text or "removedirs" in text else ():
            if isinstance(node, ast.Attribute) and node.attr in ("rmtree", "removedirs"):
                calls.append(file.relative_to(PACKAGE).as_posix())
    # staging removes the hidden folder with a random name that the same call has made
    assert calls == ["segment/run/results_folder/staging.py", "utils/files.py"]


def test_the_lock_file_is_not_opened_through_a_link(tmp_path):
    target = tmp_path / "profile"
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / LOCK).symlink_to(target)
    with pytest.raises(InputError, match=r"\.vispe\.lock is a link"), lock_folder(tmp_path / "out"):
        pass
    assert not target.exists()


FOREIGN = {
    "state": "state/notes/thesis.txt",
    "state numbers": "state/2024/thesis.txt",
    "tensorboard": "tensorboard/other/thesis.txt",
    "weights": "student.safetensors",
    "log": "log.jsonl",
    "card": "card.json",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_force_deletes_only_files_written_by_a_retrofit(tmp_path, name):
    path = tmp_path / FOREIGN[name]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")
    with pytest.raises(InputError, match=r"exists and is not a file of a retrofit\. Set another `out`"):
        RunFolder(tmp_path).begin({"seed": 1}, force=True)
    assert path.read_text() == "mine"


@pytest.mark.parametrize("name", ["state", "tensorboard", "log.jsonl", "card.json"])
def test_force_deletes_nothing_through_links(tmp_path, name):
    out, foreign = tmp_path / "out", tmp_path / "foreign"
    out.mkdir()
    foreign.mkdir()
    (foreign / "000000001").mkdir()
    (foreign / "000000001" / "thesis.txt").write_text("mine")
    (out / "run.json").write_text(json.dumps({"seed": 2}))
    (out / name).symlink_to(foreign)
    with pytest.raises(InputError, match="exists and is not a file of a retrofit"):
        RunFolder(out).begin({"seed": 1}, force=True)
    (out / "run.json").unlink()
    if name == "state":
        with pytest.raises(InputError, match="is a link"):
            RunFolder(out).save(1, {}, {})
    assert (foreign / "000000001" / "thesis.txt").read_text() == "mine"


def test_trust_remote_code_is_always_false():
    """On a terminal transformers prompts to run such code, unless `trust_remote_code` is False."""
    calls = []
    for file in sorted(PACKAGE.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "from_pretrained" in text else ():
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr == "from_pretrained" and "Auto" in ast.unparse(node.func.value):
                keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
                calls.append((file.name, keywords.get("trust_remote_code")))
    assert len(calls) >= 6
    assert {said for _, said in calls} == {"False"}, calls
