"""A run that was killed goes on; nothing that is finished is overwritten unasked."""

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


class Killed(Exception):
    """Stands for a process that ends in the middle."""


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
        recorded = []
        original = store_run.run_block

        def counted(*args):
            if after is not None and len(recorded) == after:
                raise Killed
            recorded.append(args)
            original(*args)

        if monkeypatch is not None:
            monkeypatch.setattr(store_run, "run_block", counted)
        passed = {"labels": [labels], "features": FILTERS, **options}
        try:
            report = pipeline.segment(stores, out, **passed)
        finally:
            if monkeypatch is not None:
                monkeypatch.setattr(store_run, "run_block", original)
        return report, recorded

    return run


@pytest.mark.parametrize("after", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_run_goes_on_where_it_stopped(tmp_path, task, monkeypatch, after):
    task(tmp_path / "whole")
    out = tmp_path / "out"
    with pytest.raises(Killed):
        task(out, monkeypatch, after)
    said = []
    watch = ProgressCallbacks()
    watch.note = said.append
    report, recorded = task(out, monkeypatch, watch=watch)
    assert len(recorded) == 2 * 4 - after
    assert [Path(record["image"]).name for record in report.images] == ["a.zarr", "b.zarr"]
    assert contents(out) == contents(tmp_path / "whole")
    assert not (out / NAME).exists()
    assert not list(out.glob("*.partial"))
    assert said[0] == f"resuming the unfinished run in {out}."
    assert (f"a.zarr: {after} of 4 blocks are already done." in report.notes) is (after < 4)


@pytest.mark.slow
def test_a_block_that_was_half_written_is_computed_again(tmp_path, task, monkeypatch):
    task(tmp_path / "whole")
    out = tmp_path / "out"
    with pytest.raises(Killed):
        task(out, monkeypatch, 3)
    (out / "a_seg.partial" / "done" / "0.0.1.json").unlink()
    (out / "a_seg.partial" / "raw" / "c" / "0" / "0" / "0" / "1").unlink()
    (out / "a_seg.partial" / "raw" / "c" / "0" / "0" / "0" / "1.abc.partial").write_bytes(
        b"left by a killed write"
    )
    _, recorded = task(out, monkeypatch)
    assert len(recorded) == 6
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.slow
def test_other_options_do_not_go_on(tmp_path, task, monkeypatch):
    out = tmp_path / "out"
    with pytest.raises(Killed):
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
    _, recorded = task(out, monkeypatch, force=True, post=PostProcessing(smooth=2))
    assert len(recorded) == 8


@pytest.mark.slow
def test_finished_results_are_overwritten_with_force_alone(tmp_path, task):
    out = tmp_path / "out"
    task(out)
    before = contents(out)
    with pytest.raises(InputError, match=r"a_seg\.ome\.zarr exists; add --force to overwrite it"):
        task(out)
    assert contents(out) == before
    task(out, force=True)
    assert contents(out) == before


def test_an_image_is_never_its_own_result(tmp_path, task):
    task(tmp_path / "out")
    model, store = tmp_path / "out" / "model.vispe", tmp_path / "out" / "a_seg.ome.zarr"
    with pytest.raises(InputError, match="channel"):
        pipeline.apply(model, [store], tmp_path / "out2")
    inside = write_store(tmp_path / "c_seg.ome.zarr", np.zeros((20, 30), np.uint8))
    same = write_store(tmp_path / "c.zarr", np.zeros((20, 30), np.uint8))
    with pytest.raises(InputError, match="is an input and would be overwritten"):
        pipeline.apply(model, [same, inside], tmp_path, force=True)


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
def test_what_cannot_be_done_is_refused_in_one_sentence(tmp_path, task, options, error, message):
    with pytest.raises(error, match=message) as caught:
        pipeline.segment(
            [tmp_path / "a.zarr"], tmp_path / "out", **{"labels": [tmp_path / "a.png"], **options}
        )
    assert "\n" not in str(caught.value)


def test_an_image_of_a_batch_that_cannot_be_read_is_left_out(tmp_path, task):
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
def test_a_process_that_is_killed_goes_on_byte_for_byte(tmp_path):
    values, phase = scene(700, 900)
    store = write_store(tmp_path / "a.ome.zarr", values.astype(np.uint8), chunk=128)
    labels = scribbled(tmp_path / "a.png", phase, 0.001)

    def command(out):
        words = [
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
        return [*words, "--features", "filters", "--tile", "64", "--memory", "31 MB"]

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
    resumed = subprocess.run(command(out), check=True, capture_output=True, text=True)
    assert "blocks are already done" in resumed.stderr
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.parametrize("command", ["segment", "apply"])
def test_a_refused_run_leaves_nothing(tmp_path, task, command):
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
def test_a_model_of_an_earlier_run_is_not_taken_for_that_of_a_run_that_was_killed(
    tmp_path, task, monkeypatch
):
    task(tmp_path / "whole")
    out = tmp_path / "out"
    task(out, features=FeatureConfig(sigmas=(2.0,), tile=48))
    with monkeypatch.context() as patched:
        patched.setattr("vispe.segment.pipeline.segmenters.train", None)
        with pytest.raises(TypeError):  # ends while training
            task(out, force=True)
    task(out)
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.slow
def test_two_runs_in_one_folder(tmp_path, task):
    with (
        lock_folder(tmp_path / "out"),
        pytest.raises(InputError, match="is in use by another vispe process"),
    ):
        task(tmp_path / "out")
    task(tmp_path / "out")


def test_force_removes_unfinished_results_of_its_own_images_only(tmp_path, task, monkeypatch):
    out = tmp_path / "out"
    with pytest.raises(Killed):
        task(out, monkeypatch, 6)
    model = tmp_path / "model.vispe"
    model.write_bytes((out / "model.vispe").read_bytes())
    earlier = {path.name for path in out.iterdir()} - {NAME}
    assert {"a_seg.ome.zarr", "b_seg.partial"} <= earlier
    lone = write_store(tmp_path / "c.zarr", scene(90, 120)[0].astype(np.uint8))
    report = pipeline.apply(model, [lone], out, force=True)
    names = {path.name for path in out.iterdir()}
    assert names == {*earlier, "c_seg.ome.zarr", "c_overlay.png", "report.html"}
    assert report.notes[0] == f"{out} contains unfinished results of other images: b_seg.partial."
    resumed = pipeline.apply(model, [tmp_path / "a.zarr", tmp_path / "b.zarr"], out, force=True)
    assert len(resumed.images) == 2
    assert not list(out.glob("*.partial*"))


@pytest.mark.parametrize(
    "name",
    slow_except(["..", ".", "", "photos", "../thesis.txt", "a.txt"], ["..", "photos", "../thesis.txt"]),
)
def test_names_in_a_state_file_remove_nothing(tmp_path, task, name):
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
def test_force_replaces_no_folder_of_another_program(tmp_path, task, name, kind):
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
def test_a_full_disk_stops_at_the_first_image_and_the_same_call_goes_on(tmp_path, task, monkeypatch):
    task(tmp_path / "whole")
    out = tmp_path / "out"
    original = progress.write_block

    def full(*args):
        original(*args)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(progress, "write_block", full)
        with pytest.raises(DiskFull, match=r"^disk full: the result of a\.zarr does not fit, .*out has "):
            task(out)
    task(out)
    assert contents(out) == contents(tmp_path / "whole")
