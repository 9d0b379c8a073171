"""Resumed runs on image files: results are identical to those of an uninterrupted run."""

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
    """Write four images, labels of two of them and the truth of one."""
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
    """Working directory with the inputs."""
    monkeypatch.chdir(tmp_path)
    write_inputs()
    return tmp_path


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Contents of the result folder of an uninterrupted run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("whole"))
        write_inputs()
        assert vispe(f"{COMMANDS['labels']} -o whole") == 0
        return contents("whole")


def without_timings(value):
    """Return a report without timings and memory, which differ between runs."""
    if isinstance(value, dict):
        drop = ("seconds", "seconds_per_megapixel", "peak_memory_mb")
        return {key: without_timings(entry) for key, entry in value.items() if key not in drop}
    return [without_timings(entry) for entry in value] if isinstance(value, list) else value


def contents(folder):
    """Return all files of a folder, including hidden ones: their bytes, or the reproducible part of a report."""
    actual = {}
    for path in sorted(Path(folder).rglob("*")):
        name = str(path.relative_to(folder))
        if path.name == "report.json":
            text = path.read_text(encoding="utf-8").replace(f'"{folder}/', '"OUT/')
            actual[name] = without_timings(json.loads(text))
        elif path.name == "report.csv":
            rows = list(csv.DictReader(io.StringIO(path.read_text())))
            actual[name] = [{k: v for k, v in row.items() if not k.endswith("seconds")} for row in rows]
        else:
            actual[name] = path.read_bytes() if path.is_file() else None
    return actual


def run_with_kills(jobs):
    """Run commands that are killed at some events, and return stderr."""
    jobs = [([int(event) for event in events], command.split()) for events, command in jobs]
    process = subprocess.run(
        [sys.executable, "-m", "tests.segment.kills", json.dumps(jobs)],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "PYTHONPATH": str(Path(outputs.__file__).parents[3])},
        check=True,
    )
    assert json.loads(process.stdout.splitlines()[-1]) == [0] * len(jobs), process.stderr
    return process.stderr


COMMANDS = {
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
@pytest.mark.parametrize("way", COMMANDS)
def test_repeatedly_killed_runs_equal_uninterrupted_runs(data, way):
    if way in ("apply", "trust"):
        assert vispe(f"segment in/a.png --labels a_labels.png {FAST} -o first") == 0
    rng = np.random.default_rng(list(COMMANDS).index(way))
    events = [2, 5, *rng.integers(6, 40, 4), *rng.integers(20, 90, 2)]
    stderr = run_with_kills([([], f"{COMMANDS[way]} -o whole"), (events, f"{COMMANDS[way]} -o parts")])
    assert "resuming the unfinished run in parts" in stderr
    assert contents("parts") == contents("whole")


@posix
@pytest.mark.slow
@pytest.mark.parametrize("first", range(1, 10))
def test_runs_killed_at_any_event_equal_uninterrupted_runs(data, first):
    command = f"segment in/a.png in/b.png --labels a_labels.png {FAST}"
    events = range(first, 46, 9)
    run_with_kills(
        [([], f"{command} -o whole"), *(([event], f"{command} -o parts{event}") for event in events)]
    )
    expected = contents("whole")
    for event in events:
        assert contents(f"parts{event}") == expected, event


class Stop(BaseException):
    """Ends a run immediately, as a kill does, but not the test."""


def run_until(monkeypatch, words, after):
    """Run a command that is stopped after `after` images."""
    images, original = [], batch_run.Batch._segment

    def segment_or_stop(self, image, by):
        if len(images) == after:
            raise Stop
        images.append(image)
        return original(self, image, by)

    with monkeypatch.context() as patched:
        patched.setattr(batch_run.Batch, "_segment", segment_or_stop)
        with pytest.raises(Stop):
            main(words.split())


def test_resume_skips_training_and_finished_images(data, monkeypatch, capsys):
    command = f"{COMMANDS['labels']} -o out"
    run_until(monkeypatch, command, 2)
    assert json.loads(Path("out", NAME).read_text().splitlines()[-1])["image"] == "in/b.png"
    assert not Path("out", LOCK).exists()
    mtimes = {path: path.stat().st_mtime_ns for path in Path("out").iterdir() if "report" not in path.name}
    monkeypatch.setattr("vispe.segment.pipeline.segmenters.train", None)
    segmented_images = []
    original = batch_run.Batch._segment
    monkeypatch.setattr(
        batch_run.Batch,
        "_segment",
        lambda run, image, by: segmented_images.append(image.path.name) or original(run, image, by),
    )
    assert vispe(command) == 0
    assert segmented_images == ["c.png", "d.png"]
    assert len(capsys.readouterr().out.splitlines()) == 2 + 4  # two of the first run, then all
    assert all(path.stat().st_mtime_ns == mtime for path, mtime in mtimes.items() if path.name != NAME)
    assert not Path("out", NAME).exists()
    assert vispe(command) == 2
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


def test_resume_with_other_arguments_or_files_is_rejected(data, monkeypatch, capsys):
    command = f"{COMMANDS['labels']} -o out"
    run_until(monkeypatch, command, 1)
    contents_before = contents("out")
    for change, difference in CHANGES.items():
        action, _, path = change.partition(" ")
        if action == "touch":
            times = Path(path).stat()
            os.utime(path, ns=(1, 1))
        elif action == "remove":
            Path(path).rename("removed.png")
        assert vispe(command if path.endswith(".png") else f"{command} {change}") == 2
        assert (
            f"vispe: out contains an unfinished run with other {difference}. Repeat that command to resume it, use "
            "force" in capsys.readouterr().err
        ), change
        assert contents("out") == contents_before
        if action == "touch":
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        elif action == "remove":
            Path("removed.png").rename(path)
    assert vispe(command) == 0  # nothing else has changed


def test_force_removes_only_temporary_files_of_its_images(data, monkeypatch, capsys):
    run_until(monkeypatch, f"{COMMANDS['labels']} -o out", 2)
    (Path("out") / ".d.partial-0123456789ab").mkdir()
    (Path("out") / ".d.partial-0123456789ab" / "d_prob.tif").write_bytes(b"x")
    Path("out/.d_seg.partial-0123456789ab.png").write_bytes(b"x")
    Path("foreign").mkdir()
    Path("foreign/thesis.txt").write_bytes(b"mine")
    Path("out/.d.partial-ba9876543210").symlink_to(Path("foreign").resolve(), target_is_directory=True)
    names = ["note.txt", ".hidden", ".other.partial-0123456789ab.png", "z_seg.png", ".d.partial-short.png"]
    for name in names:
        Path("out", name).write_bytes(b"mine")
    earlier_results = {path.name for path in Path("out").glob("[ab]_*")}
    assert "a_seg.png" in earlier_results
    command = f"apply out/model.vispe in/d.png -o out {FAST}".replace(f" {FAST}", "")
    assert vispe(f"{command} --force") == 0
    remaining = {path.name for path in Path("out").iterdir()}
    results = {"d_seg.png", "d_prob.tif", "d_uncertainty.png", "d_overlay.png", "report.json", "report.csv"}
    results.add("report.html")
    assert remaining == {*names, *results, *earlier_results, "model.vispe"}
    assert all(Path("out", name).read_bytes() == b"mine" for name in names)
    assert Path("foreign/thesis.txt").read_bytes() == b"mine"
    assert "out contains results of an earlier unfinished run: a_overlay.png, " in capsys.readouterr().err


def test_force_keeps_files_older_than_the_unfinished_run(data, monkeypatch):
    Path("out").mkdir()
    Path("out/c_overlay.png").write_bytes(b"mine")
    run_until(monkeypatch, f"{COMMANDS['labels']} -o out --force", 1)
    assert vispe(f"segment in/a.png --labels a_labels.png {FAST} -o out --force") == 0
    assert Path("out/c_overlay.png").read_bytes() == b"mine"
    assert not Path("out", NAME).exists()


def test_force_restarts_instead_of_resuming(data, monkeypatch, capsys, uninterrupted):
    run_until(monkeypatch, f"{COMMANDS['labels']} -o out", 2)
    assert vispe(f"{COMMANDS['labels']} -o out --force") == 0
    assert "resuming" not in capsys.readouterr().err
    assert contents("out") == uninterrupted


def test_removed_results_are_recomputed(data, monkeypatch, uninterrupted):
    run_until(monkeypatch, f"{COMMANDS['labels']} -o out", 3)
    Path("out/a_prob.tif").unlink()
    assert vispe(f"{COMMANDS['labels']} -o out") == 0
    assert contents("out") == uninterrupted


def test_modified_models_are_retrained(data, monkeypatch, uninterrupted):
    run_until(monkeypatch, f"{COMMANDS['labels']} -o out", 1)
    Path("out/model.vispe").write_bytes(b"?")
    assert vispe(f"{COMMANDS['labels']} -o out") == 0
    assert contents("out") == uninterrupted


def test_truncated_journal_lines_are_ignored(data, monkeypatch, uninterrupted):
    run_until(monkeypatch, f"{COMMANDS['labels']} -o out", 2)
    path = Path("out", NAME)
    path.write_bytes(path.read_bytes()[:-9])
    run_until(monkeypatch, f"{COMMANDS['labels']} -o out", 1)
    assert len(path.read_bytes().splitlines()) == 2 + 2
    assert vispe(f"{COMMANDS['labels']} -o out") == 0
    assert contents("out") == uninterrupted


def test_failed_images_are_retried(data, monkeypatch, capsys, uninterrupted):
    original = image_pipeline.read_image

    def failing(path, **how):
        if path.name == "c.png":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return original(path, **how)

    with monkeypatch.context() as patched:
        patched.setattr(image_pipeline, "read_image", failing)
        assert vispe(f"{COMMANDS['labels']} -o out") == 1
    assert vispe(f"{COMMANDS['labels']} -o out") == 0
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
def test_rejected_runs_write_nothing(data, words):
    Image.fromarray(np.zeros((9, 9), np.uint8)).save("wrong.png")
    Image.fromarray(np.zeros((40, 51, 3), np.uint8)).save("in/rgb.png")
    assert vispe(f"segment in/a.png --labels a_labels.png {FAST} -o first") == 0
    assert vispe(words) == 2
    assert not Path("out").exists()


# --- one process at a time ---


def test_locked_output_folders_are_rejected(data, capsys):
    command = f"{COMMANDS['labels']} -o out"
    with lock_folder(Path("out")):
        for more in ("", " --force"):
            assert vispe(command + more) == 2
            assert (
                "out is in use by another vispe process. Wait until it has finished"
                in capsys.readouterr().err
            )
        assert [path.name for path in Path("out").iterdir()] == [LOCK]
    assert not Path("out").exists()
    assert vispe(command) == 0


@pytest.mark.slow
@posix
def test_one_of_two_concurrent_processes_is_rejected(data):
    command = [sys.executable, "-m", "vispe", *f"{COMMANDS['micro']} -o out --force".split()]
    env = {**os.environ, "PYTHONPATH": str(Path(outputs.__file__).parents[3])}
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) for _ in range(2)]
    stderr = [process.communicate(timeout=500)[1] for process in processes]
    codes = [process.returncode for process in processes]
    assert 0 in codes
    assert vispe(f"{COMMANDS['micro']} -o whole") == 0
    assert contents("out") == contents("whole")
    if codes != [0, 0]:  # both 0: one began after the other had ended
        assert sorted(codes) == [0, 2]
        assert "in use by another vispe process" in "".join(stderr)


@posix
def test_lock_is_released_when_its_process_is_killed(data):
    process = os.fork()  # a new interpreter imports for seconds
    if process == 0:
        with lock_folder(Path("out")):
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL
    assert Path("out", LOCK).exists()
    with lock_folder(Path("out")):
        pass
    assert not Path("out", LOCK).exists()


def test_file_systems_without_locks_are_supported(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.FileLock, "acquire", fail)
    with lock_folder(tmp_path / "a"):
        (tmp_path / "a" / "b").touch()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]


# --- a full disk ---


def test_insufficient_disk_space_is_reported_before_the_first_image(data, monkeypatch, capsys, uninterrupted):
    monkeypatch.setattr(
        "vispe.segment.run.results_folder.disk_space.shutil.disk_usage", lambda _: Usage(9000)
    )
    assert vispe(f"{COMMANDS['labels']} -o out") == 2
    stderr = capsys.readouterr().err
    assert (
        "disk full: the result of a.png needs 16.32 kB, out has 9 kB. Free some space and repeat the command"
        in stderr
    )
    assert sorted(path.name for path in Path("out").iterdir()) == ["model.vispe", NAME]
    monkeypatch.undo()
    monkeypatch.chdir(data)
    assert vispe(f"{COMMANDS['labels']} -o out") == 0
    assert contents("out") == uninterrupted


class Usage:
    """Stand-in for the result of `shutil.disk_usage`."""

    def __init__(self, free):
        self.free = free


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="asks the system which file is meant")
@pytest.mark.parametrize("kind", ["_prob", "_uncertainty", "_overlay", "_seg", "report", NAME])
def test_full_disk_stops_the_run_without_partial_results(data, monkeypatch, capsys, kind, uninterrupted):
    original, count = os.fsync, [0]

    def fail_when_full(number):
        link = Path(f"/proc/self/fd/{number}")
        name = link.readlink().name if link.is_symlink() else ""
        if kind in name:
            count[0] += 1
            if count[0] > (2 if kind in ("report", NAME) else 1):
                raise OSError(errno.ENOSPC, "No space left on device")
        return original(number)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail_when_full)
        assert vispe(f"{COMMANDS['labels']} -o out") == 2
    stderr = capsys.readouterr().err
    assert stderr.count("disk full: ") == 1
    assert "out has " in stderr
    names = {path.name for path in Path("out").iterdir()}
    assert not [name for name in names if name.startswith(".")]
    for stem in "abcd":
        assert sum(name.startswith(f"{stem}_") for name in names) in (0, 4)
    assert not any(name.startswith("d_") for name in names)
    assert vispe(f"{COMMANDS['labels']} -o out") == 0
    assert contents("out") == uninterrupted


def test_errors_of_a_full_disk_are_recognised(tmp_path):
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


# --- journal ---


def test_journal_records_and_resumes_a_run(tmp_path):
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
def test_file_names_in_a_journal_are_never_removed(tmp_path, name):
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


def test_symlinked_journals_raise(tmp_path):
    target = tmp_path / "profile"
    target.write_text("")
    (tmp_path / NAME).symlink_to(target)
    with pytest.raises(InputError, match=r"unfinished\.jsonl is a link, .*Remove the link"):
        Journal(tmp_path, {"seed": 1}, force=True)
