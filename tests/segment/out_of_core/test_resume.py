"""Killed runs are resumed; finished results are not overwritten without force."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.products import slow_except
from tests.segment.out_of_core.stores import scene, scribbled, write_store
from vispe.errors import InputError, OptionError
from vispe.segment import pipeline
from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.out_of_core import progress, store_run
from vispe.segment.pipeline import LabelOptions, PostProcessing, ReadOptions, ScoreOptions
from vispe.segment.run.reports.run_report import ProgressCallbacks
from vispe.segment.run.results_folder.disk_space import DiskFull
from vispe.segment.run.results_folder.lock import lock_folder
from vispe.segment.run.results_folder.resume import NAME

FILTERS = FeatureConfig(sigmas=(1.0,), tile=48)


class Interrupted(Exception):
    """Raised to interrupt a run, as a killed process."""


def contents(folder):
    """Return the bytes of every file of the stores and images in a folder."""
    files = [p for p in sorted(folder.rglob("*")) if p.is_file() and not p.name.startswith("report")]
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


@pytest.fixture
def task(tmp_path, small_blocks):
    """Two stores with labels for the first, and a run that may be stopped after some blocks."""
    values, phase = scene(90, 120)
    stores = [
        write_store(tmp_path / "a.zarr", values.astype(np.uint8)),
        write_store(tmp_path / "b.zarr", values[::-1].astype(np.uint8), version="0.4"),
    ]
    labels = scribbled(tmp_path / "a.png", phase)

    def run(out, monkeypatch=None, after=None, **options):
        finished_blocks = []
        original = store_run.run_block

        def run_or_interrupt(*args):
            if after is not None and len(finished_blocks) == after:
                raise Interrupted
            finished_blocks.append(args)
            original(*args)

        if monkeypatch is not None:
            monkeypatch.setattr(store_run, "run_block", run_or_interrupt)
        arguments = {"labels": [labels], "features": FILTERS, **options}
        try:
            report = pipeline.segment(stores, out, **arguments)
        finally:
            if monkeypatch is not None:
                monkeypatch.setattr(store_run, "run_block", original)
        return report, finished_blocks

    return run


@pytest.mark.parametrize("after", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_runs_resume_at_the_first_unfinished_block(tmp_path, task, monkeypatch, after):
    task(tmp_path / "whole")
    out = tmp_path / "out"
    with pytest.raises(Interrupted):
        task(out, monkeypatch, after)
    messages = []
    watch = ProgressCallbacks()
    watch.note = messages.append
    report, finished_blocks = task(out, monkeypatch, watch=watch)
    assert len(finished_blocks) == 2 * 4 - after
    assert [Path(record["image"]).name for record in report.images] == ["a.zarr", "b.zarr"]
    assert contents(out) == contents(tmp_path / "whole")
    assert not (out / NAME).exists()
    assert not list(out.glob("*.partial"))
    assert messages[0] == f"resuming the unfinished run in {out}."
    assert (f"a.zarr: {after} of 4 blocks are already done." in report.notes) is (after < 4)


@pytest.mark.slow
def test_partially_written_blocks_are_recomputed(tmp_path, task, monkeypatch):
    task(tmp_path / "whole")
    out = tmp_path / "out"
    with pytest.raises(Interrupted):
        task(out, monkeypatch, 3)
    (out / "a_seg.partial" / "done" / "0.0.1.json").unlink()
    (out / "a_seg.partial" / "raw" / "c" / "0" / "0" / "0" / "1").unlink()
    (out / "a_seg.partial" / "raw" / "c" / "0" / "0" / "0" / "1.abc.partial").write_bytes(
        b"left by a killed write"
    )
    _, finished_blocks = task(out, monkeypatch)
    assert len(finished_blocks) == 6
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.slow
def test_resume_with_other_options_raises(tmp_path, task, monkeypatch):
    out = tmp_path / "out"
    with pytest.raises(Interrupted):
        task(out, monkeypatch, 2)
    with pytest.raises(
        InputError, match=r"out contains an unfinished run with other post. Repeat that command"
    ):
        task(out, post=PostProcessing(smooth=2))
    with pytest.raises(InputError, match="unfinished run with other labelling, seed"):
        task(out, seed=1, labelling=LabelOptions(max_classes=9))
    (tmp_path / "a.zarr" / "0" / "c" / "0" / "0").touch()
    with pytest.raises(InputError, match="unfinished run with other images"):
        task(out)
    _, finished_blocks = task(out, monkeypatch, force=True, post=PostProcessing(smooth=2))
    assert len(finished_blocks) == 8


@pytest.mark.slow
def test_finished_results_are_overwritten_only_with_force(tmp_path, task):
    out = tmp_path / "out"
    task(out)
    contents_before = contents(out)
    with pytest.raises(InputError, match=r"a_seg\.ome\.zarr exists; add --force to overwrite it"):
        task(out)
    assert contents(out) == contents_before
    task(out, force=True)
    assert contents(out) == contents_before


def test_inputs_are_never_overwritten_by_results(tmp_path, task):
    task(tmp_path / "out")
    model, store = tmp_path / "out" / "model.vispe", tmp_path / "out" / "a_seg.ome.zarr"
    with pytest.raises(InputError, match="channel"):
        pipeline.apply(model, [store], tmp_path / "out2")
    existing_result = write_store(tmp_path / "c_seg.ome.zarr", np.zeros((20, 30), np.uint8))
    input_store = write_store(tmp_path / "c.zarr", np.zeros((20, 30), np.uint8))
    with pytest.raises(InputError, match="is an input and would be overwritten"):
        pipeline.apply(model, [input_store, existing_result], tmp_path, force=True)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"post": PostProcessing(min_area=9, clean=True), "memory": "27 MB"},
            InputError,
            r"memory=27 MiB is too small for a\.zarr: min_area and clean need complete pages, which take",
        ),
        ({"memory": "much"}, OptionError, "memory='much' is not an amount of memory"),
        ({"memory": "1 MB"}, InputError, r"memory=1 MiB is too small for a\.zarr: the smallest blocks need"),
        (
            {"scoring": ScoreOptions(truth=("t.png",))},
            OptionError,
            "truth is not supported for images processed in block",
        ),
        (
            {"trust": True, "materials": True, "memory": "26 MB"},
            InputError,
            "materials and trust need complete pages",
        ),
        (
            {"labels": (), "cluster": 3},
            OptionError,
            "cluster is not supported for images processed in blocks",
        ),
        ({"labelling": LabelOptions(dense=True)}, OptionError, "dense=True is not supported"),
        ({"reading": ReadOptions(z="3")}, InputError, "z must select pages of the image"),
        (
            {"features": FeatureConfig("both", model="vit_tiny_patch16_224", weights="random")},
            InputError,
            "but vit_tiny_patch16_224 needs feature maps",
        ),
        (
            {"features": FeatureConfig(filters_3d=True)},
            InputError,
            "3D filters need several pages. Train without",
        ),
    ],
)
def test_unsupported_options_raise_one_line_errors(tmp_path, task, options, error, message):
    with pytest.raises(error, match=message) as caught:
        pipeline.segment(
            [tmp_path / "a.zarr"], tmp_path / "out", **{"labels": [tmp_path / "a.png"], **options}
        )
    assert "\n" not in str(caught.value)


def test_batches_skip_unreadable_images(tmp_path, task):
    values, phase = scene(60, 70)
    good = write_store(tmp_path / "g.zarr", values.astype(np.uint8))
    (tmp_path / "bad.zarr").mkdir()
    report = pipeline.segment(
        [good, tmp_path / "bad.zarr"],
        tmp_path / "out",
        labels=[scribbled(tmp_path / "g.png", phase)],
        features=FILTERS,
    )
    assert report.exit_code == 1
    assert "bad.zarr is not a readable OME-Zarr image" in report.failures[0]["reason"]
    assert (tmp_path / "out" / "g_seg.ome.zarr").is_dir()


@pytest.mark.slow
def test_killed_processes_resume_with_identical_results(tmp_path):
    values, phase = scene(700, 900)
    store = write_store(tmp_path / "a.ome.zarr", values.astype(np.uint8), chunk=128)
    labels = scribbled(tmp_path / "a.png", phase, 0.001)

    def command(out):
        arguments = [
            sys.executable,
            "-m",
            "vispe.cli.main",
            "segment",
            str(store),
            "--labels",
            str(labels),
            "-o",
            str(out),
        ]
        return [*arguments, "--features", "filters", "--tile", "64", "--memory", "31 MB"]

    subprocess.run(command(tmp_path / "whole"), check=True, capture_output=True)
    out = tmp_path / "out"
    process = subprocess.Popen(command(out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    done = out / "a_seg.partial" / "done"
    while process.poll() is None and len(list(done.glob("*.json"))) < 3:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert done.is_dir(), "the process was done before it could be killed"
    blocks = len(list(done.glob("[0-9]*.json")))
    assert 3 <= blocks < 6 * 8
    completed = subprocess.run(command(out), check=True, capture_output=True, text=True)
    assert "blocks are already done" in completed.stderr
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.parametrize("command", ["segment", "apply"])
def test_rejected_runs_write_nothing(tmp_path, task, command):
    out = tmp_path / "deep" / "out"
    if command == "segment":
        with pytest.raises(InputError, match=r"memory=1 MiB is too small for a\.zarr"):
            pipeline.segment(
                [tmp_path / "a.zarr"], out, labels=[tmp_path / "a.png"], features=FILTERS, memory="1 MB"
            )
    else:
        task(tmp_path / "first")
        with pytest.raises(InputError, match=r"memory=1 MiB is too small for b\.zarr"):
            pipeline.apply(tmp_path / "first" / "model.vispe", [tmp_path / "b.zarr"], out, memory="1 MB")
    assert not out.parent.exists()


@pytest.mark.slow
def test_interrupted_training_does_not_reuse_an_earlier_model(tmp_path, task, monkeypatch):
    task(tmp_path / "whole")
    out = tmp_path / "out"
    task(out, features=FeatureConfig(sigmas=(2.0,), tile=48))
    with monkeypatch.context() as patched:
        patched.setattr("vispe.segment.pipeline.segmenters.train", None)
        with pytest.raises(TypeError):  # interrupted during training
            task(out, force=True)
    task(out)
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.slow
def test_concurrent_runs_in_one_folder_raise(tmp_path, task):
    with (
        lock_folder(tmp_path / "out"),
        pytest.raises(InputError, match="is in use by another vispe process"),
    ):
        task(tmp_path / "out")
    task(tmp_path / "out")


def test_force_removes_unfinished_results_of_its_images_only(tmp_path, task, monkeypatch):
    out = tmp_path / "out"
    with pytest.raises(Interrupted):
        task(out, monkeypatch, 6)
    model = tmp_path / "model.vispe"
    model.write_bytes((out / "model.vispe").read_bytes())
    earlier_files = {path.name for path in out.iterdir()} - {NAME}
    assert {"a_seg.ome.zarr", "b_seg.partial"} <= earlier_files
    other_store = write_store(tmp_path / "c.zarr", scene(90, 120)[0].astype(np.uint8))
    report = pipeline.apply(model, [other_store], out, force=True)
    names = {path.name for path in out.iterdir()}
    assert names == {*earlier_files, "c_seg.ome.zarr", "c_overlay.png", "report.html"}
    assert report.notes[0] == f"{out} contains unfinished results of other images: b_seg.partial."
    resumed_report = pipeline.apply(model, [tmp_path / "a.zarr", tmp_path / "b.zarr"], out, force=True)
    assert len(resumed_report.images) == 2
    assert not list(out.glob("*.partial*"))


@pytest.mark.parametrize(
    "name",
    slow_except(["..", ".", "", "photos", "../thesis.txt", "a.txt"], ["..", "photos", "../thesis.txt"]),
)
def test_file_names_in_a_state_file_are_never_removed(tmp_path, task, name):
    out = tmp_path / "home" / "out"
    (out / "photos").mkdir(parents=True)
    files = [out.parent / "thesis.txt", out / "photos" / "a.txt", out / "a.txt"]
    for file in files:
        file.write_text("of another program")
    lines = [
        {"asked": {"images": {name: ""}}},
        {"image": name, "record": {"files": {"labels": name}}, "notes": []},
    ]
    (out / NAME).write_text("".join(json.dumps(line) + "\n" for line in lines))
    task(out, force=True)
    assert all(file.read_text() == "of another program" for file in files)


@pytest.mark.parametrize("name", ["a_seg.ome.zarr", "a_seg.partial"])
@pytest.mark.parametrize("kind", ["folder", "link"])
def test_force_does_not_replace_folders_of_other_programs(tmp_path, task, name, kind):
    out, foreign = tmp_path / "out", tmp_path / "foreign"
    out.mkdir()
    path = out / name if kind == "folder" else foreign
    path.mkdir()
    (path / "thesis.txt").write_text("of another program")
    if kind == "link":
        (out / name).symlink_to(foreign, target_is_directory=True)
    reason = "is a link" if kind == "link" else "is not (a result|an unfinished result) of vispe"
    with pytest.raises(InputError, match=reason):
        task(out, force=True)
    assert (path / "thesis.txt").read_text() == "of another program"
    assert (out / name).exists()


@pytest.mark.slow
def test_full_disk_stops_the_run_which_can_be_resumed(tmp_path, task, monkeypatch):
    task(tmp_path / "whole")
    out = tmp_path / "out"
    original = progress.write_block

    def fail_when_full(*args):
        original(*args)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(progress, "write_block", fail_when_full)
        with pytest.raises(DiskFull, match=r"^disk full: the result of a\.zarr does not fit, .*out has "):
            task(out)
    task(out)
    assert contents(out) == contents(tmp_path / "whole")
