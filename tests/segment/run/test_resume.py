"""A run on image files that was killed goes on, and ends with the bytes of a run that was not."""

import csv
import errno
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.cases import cases
from tests.cli.test_segment import scene, vispe
from vispe.cli.main import main
from vispe.errors import InputError
from vispe.images import write as outputs
from vispe.segment.run import batch_run, image_pipeline
from vispe.segment.run.reports.run_report import ProgressCallbacks
from vispe.segment.run.results_folder import lock, resume
from vispe.segment.run.results_folder.disk_space import DiskFull, disk_space_guard
from vispe.segment.run.results_folder.lock import LOCK, lock_folder
from vispe.segment.run.results_folder.resume import NAME, Journal

posix = pytest.mark.skipif(os.name != "posix", reason="processes are killed and forked")
FAST = "--features filters"


def write_inputs():
    """Four images, labels of two of them, a truth of one."""
    Path("in").mkdir()
    for seed, name in enumerate("abcd"):
        grey, mask, scribbles = scene(seed)
        Image.fromarray(grey).save(f"in/{name}.png")
        if name in "ab":
            Image.fromarray(scribbles).save(f"{name}_labels.png")
        if name == "b":
            Image.fromarray(mask).save("b_truth.png")


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A current folder with the inputs."""
    monkeypatch.chdir(tmp_path)
    write_inputs()
    return tmp_path


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Contents of the results of a run that was not interrupted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("whole"))
        write_inputs()
        assert vispe(f"{WAYS['labels']} -o whole") == 0
        return contents("whole")


def timeless(value):
    """A report without what no two runs have in common."""
    if isinstance(value, dict):
        drop = ("seconds", "seconds_per_megapixel", "peak_memory_mb")
        return {key: timeless(one) for key, one in value.items() if key not in drop}
    return [timeless(one) for one in value] if isinstance(value, list) else value


def contents(folder):
    """Every file of a folder, hidden ones too: its bytes, or what counts of a report."""
    actual = {}
    for path in sorted(Path(folder).rglob("*")):
        name = str(path.relative_to(folder))
        if path.name == "report.json":
            text = path.read_text(encoding="utf-8").replace(f'"{folder}/', '"OUT/')
            actual[name] = timeless(json.loads(text))
        elif path.name == "report.csv":
            rows = list(csv.DictReader(io.StringIO(path.read_text())))
            actual[name] = [{k: v for k, v in row.items() if not k.endswith("seconds")} for row in rows]
        else:
            actual[name] = path.read_bytes() if path.is_file() else None
    return actual


def killed(jobs):
    """Run commands that are killed at some events; returns what was said."""
    jobs = [([int(moment) for moment in moments], words.split()) for moments, words in jobs]
    done = subprocess.run(
        [sys.executable, "-m", "tests.segment.kills", json.dumps(jobs)],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "PYTHONPATH": str(Path(outputs.__file__).parents[3])},
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == [0] * len(jobs), done.stderr
    return done.stderr


WAYS = {
    "labels": f"segment in --labels a_labels.png,b_labels.png --truth b_truth.png {FAST}",
    "forest": f"segment in --labels a_labels.png --classifier forest {FAST}",
    "cluster": f"segment in --cluster {FAST}",
    "spectral": f"segment in --cluster 2 --cluster-method spectral {FAST}",
    "micro": "segment in --labels a_labels.png --smooth 1 --min-area 3",
    "apply": "apply first/model.vispe in --truth b_truth.png",
    "trust": "apply first/model.vispe in/a.png in/b.png --trust",
}


@posix
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_runs_that_are_killed_again_and_again_end_as_ones_that_are_not(data, way):
    if way in ("apply", "trust"):
        assert vispe(f"segment in/a.png --labels a_labels.png {FAST} -o first") == 0
    random = np.random.default_rng(list(WAYS).index(way))
    moments = [2, 5, *random.integers(6, 40, 4), *random.integers(20, 90, 2)]
    said = killed([([], f"{WAYS[way]} -o whole"), (moments, f"{WAYS[way]} -o parts")])
    assert "resuming the unfinished run in parts" in said
    assert contents("parts") == contents("whole")


@posix
@pytest.mark.slow
@pytest.mark.parametrize("first", range(1, 10))
def test_every_moment_of_a_small_run(data, first):
    words = f"segment in/a.png in/b.png --labels a_labels.png {FAST}"
    moments = range(first, 46, 9)
    killed([([], f"{words} -o whole"), *(([moment], f"{words} -o parts{moment}") for moment in moments)])
    expected = contents("whole")
    for moment in moments:
        assert contents(f"parts{moment}") == expected, moment


class Stop(BaseException):
    """Ends a run at once, as a kill does, but lets the test go on."""


def stopped(monkeypatch, words, after):
    """Run a command that ends after so many images."""
    done, uninterrupted = [], batch_run.Batch._segment

    def counted(self, image, by):
        if len(done) == after:
            raise Stop
        done.append(image)
        return uninterrupted(self, image, by)

    with monkeypatch.context() as patched:
        patched.setattr(batch_run.Batch, "_segment", counted)
        with pytest.raises(Stop):
            main(words.split())


def test_training_and_finished_images_are_not_done_again(data, monkeypatch, capsys):
    words = f"{WAYS['labels']} -o out"
    stopped(monkeypatch, words, 2)
    assert json.loads(Path("out", NAME).read_text().splitlines()[-1])["image"] == "in/b.png"
    assert not Path("out", LOCK).exists()
    before = {path: path.stat().st_mtime_ns for path in Path("out").iterdir() if "report" not in path.name}
    monkeypatch.setattr("vispe.segment.pipeline.segmenters.train", None)
    recorded = []
    original = batch_run.Batch._segment
    monkeypatch.setattr(
        batch_run.Batch,
        "_segment",
        lambda run, image, by: recorded.append(image.path.name) or original(run, image, by),
    )
    assert vispe(words) == 0
    assert recorded == ["c.png", "d.png"]
    assert len(capsys.readouterr().out.splitlines()) == 2 + 4  # two before, then all
    assert all(path.stat().st_mtime_ns == when for path, when in before.items() if path.name != NAME)
    assert not Path("out", NAME).exists()
    assert vispe(words) == 2
    assert "add --force to overwrite them" in capsys.readouterr().err


CHANGES = {
    "--smooth 2": "post",
    "--seed 3": "seed",
    "--classifier forest": "classifier",
    "--truth-zero ignore": "scoring",
    "--clip 1,99": "reading",
    "--trust": "trust",
    "--classes x,y": "labelling",
    "touch in/d.png": "images",
    "touch a_labels.png": "files",
    "remove in/d.png": "images",
}


def test_a_run_with_other_arguments_or_files_is_refused(data, monkeypatch, capsys):
    words = f"{WAYS['labels']} -o out"
    stopped(monkeypatch, words, 1)
    before = contents("out")
    for change, named in CHANGES.items():
        action, _, path = change.partition(" ")
        if action == "touch":
            times = Path(path).stat()
            os.utime(path, ns=(1, 1))
        elif action == "remove":
            Path(path).rename("removed.png")
        assert vispe(words if path.endswith(".png") else f"{words} {change}") == 2
        assert (
            f"vispe: out contains an unfinished run with other {named}. Repeat that command to resume it, use "
            "force" in capsys.readouterr().err
        ), change
        assert contents("out") == before
        if action == "touch":
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        elif action == "remove":
            Path("removed.png").rename(path)
    assert vispe(words) == 0  # nothing else has changed


def test_force_removes_temporary_files_of_its_own_images_and_nothing_else(data, monkeypatch, capsys):
    stopped(monkeypatch, f"{WAYS['labels']} -o out", 2)
    (Path("out") / ".d.partial-0123456789ab").mkdir()
    (Path("out") / ".d.partial-0123456789ab" / "d_prob.tif").write_bytes(b"x")
    Path("out/.d_seg.partial-0123456789ab.png").write_bytes(b"x")
    Path("foreign").mkdir()
    Path("foreign/thesis.txt").write_bytes(b"mine")
    Path("out/.d.partial-ba9876543210").symlink_to(Path("foreign").resolve(), target_is_directory=True)
    names = ["note.txt", ".hidden", ".other.partial-0123456789ab.png", "z_seg.png", ".d.partial-short.png"]
    for name in names:
        Path("out", name).write_bytes(b"mine")
    earlier = {path.name for path in Path("out").glob("[ab]_*")}
    assert "a_seg.png" in earlier
    words = f"apply out/model.vispe in/d.png -o out {FAST}".replace(f" {FAST}", "")
    assert vispe(f"{words} --force") == 0
    remaining = {path.name for path in Path("out").iterdir()}
    results = {"d_seg.png", "d_prob.tif", "d_uncertainty.png", "d_overlay.png", "report.json", "report.csv"}
    results.add("report.html")
    assert remaining == {*names, *results, *earlier, "model.vispe"}
    assert all(Path("out", name).read_bytes() == b"mine" for name in names)
    assert Path("foreign/thesis.txt").read_bytes() == b"mine"
    assert "out contains results of an earlier unfinished run: a_overlay.png, " in capsys.readouterr().err


def test_force_keeps_what_was_there_before_the_run_that_did_not_end(data, monkeypatch):
    Path("out").mkdir()
    Path("out/c_overlay.png").write_bytes(b"mine")
    stopped(monkeypatch, f"{WAYS['labels']} -o out --force", 1)
    assert vispe(f"segment in/a.png --labels a_labels.png {FAST} -o out --force") == 0
    assert Path("out/c_overlay.png").read_bytes() == b"mine"
    assert not Path("out", NAME).exists()


def test_force_does_not_go_on(data, monkeypatch, capsys, uninterrupted):
    stopped(monkeypatch, f"{WAYS['labels']} -o out", 2)
    assert vispe(f"{WAYS['labels']} -o out --force") == 0
    assert "resuming" not in capsys.readouterr().err
    assert contents("out") == uninterrupted


def test_a_result_that_was_removed_is_made_again(data, monkeypatch, uninterrupted):
    stopped(monkeypatch, f"{WAYS['labels']} -o out", 3)
    Path("out/a_prob.tif").unlink()
    assert vispe(f"{WAYS['labels']} -o out") == 0
    assert contents("out") == uninterrupted


def test_a_model_that_was_changed_is_trained_again(data, monkeypatch, uninterrupted):
    stopped(monkeypatch, f"{WAYS['labels']} -o out", 1)
    Path("out/model.vispe").write_bytes(b"?")
    assert vispe(f"{WAYS['labels']} -o out") == 0
    assert contents("out") == uninterrupted


def test_a_line_that_breaks_off_does_not_count(data, monkeypatch, uninterrupted):
    stopped(monkeypatch, f"{WAYS['labels']} -o out", 2)
    path = Path("out", NAME)
    path.write_bytes(path.read_bytes()[:-9])
    stopped(monkeypatch, f"{WAYS['labels']} -o out", 1)
    assert len(path.read_bytes().splitlines()) == 2 + 2
    assert vispe(f"{WAYS['labels']} -o out") == 0
    assert contents("out") == uninterrupted


def test_images_that_failed_are_tried_again(data, monkeypatch, capsys, uninterrupted):
    original = image_pipeline.read_image

    def failing(path, **how):
        if path.name == "c.png":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return original(path, **how)

    with monkeypatch.context() as patched:
        patched.setattr(image_pipeline, "read_image", failing)
        assert vispe(f"{WAYS['labels']} -o out") == 1
    assert vispe(f"{WAYS['labels']} -o out") == 0
    assert contents("out") == uninterrupted


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "segment in/a.png --labels c.txt -o out/deep/er",
        f"segment in/a.png --labels wrong.png {FAST} -o out/deep/er",
        f"segment in/a.png --labels a_labels.png --filters-3d {FAST} -o out/deep/er",
        "apply first/model.vispe in/rgb.png -o out/deep/er",
    ],
)
def test_a_refused_run_leaves_nothing(data, words):
    Image.fromarray(np.zeros((9, 9), np.uint8)).save("wrong.png")
    Image.fromarray(np.zeros((40, 51, 3), np.uint8)).save("in/rgb.png")
    assert vispe(f"segment in/a.png --labels a_labels.png {FAST} -o first") == 0
    assert vispe(words) == 2
    assert not Path("out").exists()


# --- one process at a time ---


def test_a_folder_that_is_being_written_is_refused(data, capsys):
    words = f"{WAYS['labels']} -o out"
    with lock_folder(Path("out")):
        for more in ("", " --force"):
            assert vispe(words + more) == 2
            assert (
                "out is in use by another vispe process. Wait until it has finished"
                in capsys.readouterr().err
            )
        assert [path.name for path in Path("out").iterdir()] == [LOCK]
    assert not Path("out").exists()
    assert vispe(words) == 0


@pytest.mark.slow
@posix
def test_of_two_simultaneous_processes_one_is_refused(data):
    words = [sys.executable, "-m", "vispe", *f"{WAYS['micro']} -o out --force".split()]
    env = {**os.environ, "PYTHONPATH": str(Path(outputs.__file__).parents[3])}
    both = [subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=env) for _ in range(2)]
    said = [one.communicate(timeout=500)[1] for one in both]
    codes = [one.returncode for one in both]
    assert 0 in codes
    assert vispe(f"{WAYS['micro']} -o whole") == 0
    assert contents("out") == contents("whole")
    if codes != [0, 0]:  # both 0: one began after the other had ended
        assert sorted(codes) == [0, 2]
        assert "in use by another vispe process" in "".join(said)


@posix
def test_a_lock_is_free_when_its_process_was_killed(data):
    process = os.fork()  # a new interpreter imports for seconds
    if process == 0:
        with lock_folder(Path("out")):
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL
    assert Path("out", LOCK).exists()
    with lock_folder(Path("out")):
        pass
    assert not Path("out", LOCK).exists()


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def none(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.FileLock, "acquire", none)
    with lock_folder(tmp_path / "a"):
        (tmp_path / "a" / "b").touch()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]


# --- a full disk ---


def test_a_disk_that_is_too_small_is_said_before_the_first_image(data, monkeypatch, capsys, uninterrupted):
    monkeypatch.setattr(
        "vispe.segment.run.results_folder.disk_space.shutil.disk_usage", lambda _: Usage(9000)
    )
    assert vispe(f"{WAYS['labels']} -o out") == 2
    said = capsys.readouterr().err
    assert (
        "disk full: the result of a.png needs 16.32 kB, out has 9 kB. Free some space and repeat the command"
        in said
    )
    assert sorted(path.name for path in Path("out").iterdir()) == ["model.vispe", NAME]
    monkeypatch.undo()
    monkeypatch.chdir(data)
    assert vispe(f"{WAYS['labels']} -o out") == 0
    assert contents("out") == uninterrupted


class Usage:
    """What `shutil.disk_usage` gives."""

    def __init__(self, free):
        self.free = free


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="asks the system which file is meant")
@pytest.mark.parametrize("kind", ["_prob", "_uncertainty", "_overlay", "_seg", "report", NAME])
def test_a_disk_that_runs_full_stops_the_run_and_leaves_nothing_partial(
    data, monkeypatch, capsys, kind, uninterrupted
):
    original, count = os.fsync, [0]

    def full(number):
        link = Path(f"/proc/self/fd/{number}")
        name = link.readlink().name if link.is_symlink() else ""
        if kind in name:
            count[0] += 1
            if count[0] > (2 if kind in ("report", NAME) else 1):
                raise OSError(errno.ENOSPC, "No space left on device")
        return original(number)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        assert vispe(f"{WAYS['labels']} -o out") == 2
    said = capsys.readouterr().err
    assert said.count("disk full: ") == 1
    assert "out has " in said
    names = {path.name for path in Path("out").iterdir()}
    assert not [name for name in names if name.startswith(".")]
    for stem in "abcd":
        assert sum(name.startswith(f"{stem}_") for name in names) in (0, 4)
    assert not any(name.startswith("d_") for name in names)
    assert vispe(f"{WAYS['labels']} -o out") == 0
    assert contents("out") == uninterrupted


def test_which_errors_say_that_a_disk_is_full(tmp_path):
    for error in (
        OSError(errno.ENOSPC, "x"),
        OSError(errno.EDQUOT, "x"),
        OSError("16 requested and 5 written"),
    ):
        with (
            pytest.raises(DiskFull, match=r"^disk full: it does not fit, .* has [\d.]+ [kMGT]?B"),
            disk_space_guard(tmp_path, "it"),
        ):
            raise error
    with pytest.raises(PermissionError), disk_space_guard(tmp_path, "it"):
        raise PermissionError(errno.EACCES, "x")
    with pytest.raises(DiskFull, match=r"needs 1e\+06 TB"), disk_space_guard(tmp_path, "it", least=10**18):
        pass


# --- the record itself ---


def test_the_record_of_a_run(tmp_path):
    requested = resume.to_json({"a": (1, 2), "b": Path("x"), "w": ProgressCallbacks is ProgressCallbacks})
    state = Journal(tmp_path, requested, False)
    assert (state.resumes, state.empty, state.model) == (False, True, None)
    state.start([tmp_path / "a_seg.png"])
    state.trained("abc", ["n"])
    (tmp_path / "a_seg.png").touch()
    state.finished(
        Path("a.png"), {"x": np.float32(0.1), "files": {"labels": "elsewhere/a_seg.png"}}, ["n", "m"]
    )
    resumed = Journal(tmp_path, requested, False)
    assert (resumed.resumes, resumed.model, resumed.notes) == (True, "abc", ["n", "m"])
    expected = {"x": float(np.float32(0.1)), "files": {"labels": str(tmp_path / "a_seg.png")}}
    assert resumed.record(Path("a.png")) == expected
    (tmp_path / "a_seg.png").unlink()
    assert resumed.record(Path("a.png")) is None
    assert resumed.record(Path("b.png")) is None
    resumed.end()
    assert not (tmp_path / NAME).exists()


@cases("name", ["../a_seg.png", "thesis.txt", "photos", ".", "..", "", "a_seg.png"])
def test_names_in_a_journal_remove_nothing(tmp_path, name):
    out = tmp_path / "out"
    (out / "photos").mkdir(parents=True)
    files = [tmp_path / "a_seg.png", out / "thesis.txt", out / "photos" / "a.txt", out / "a_seg.png"]
    for file in files:
        file.write_bytes(b"of another program")
    lines = [
        {"asked": {}, "targets": [name, str(tmp_path / "a_seg.png")], "before": []},
        {"model": "0", "notes": []},
        {"image": "a.png", "record": {"files": {"labels": name}}, "notes": []},
    ]
    (out / NAME).write_text("".join(json.dumps(line) + "\n" for line in lines))
    state = Journal(out, {"seed": 1}, force=True)
    state.remaining([])
    state.start([out / "b_seg.png"])
    assert all(file.read_bytes() == b"of another program" for file in files)


def test_a_journal_that_is_a_link_is_refused(tmp_path):
    target = tmp_path / "profile"
    target.write_text("")
    (tmp_path / NAME).symlink_to(target)
    with pytest.raises(InputError, match=r"unfinished\.jsonl is a link, .*Remove the link"):
        Journal(tmp_path, {"seed": 1}, force=True)
