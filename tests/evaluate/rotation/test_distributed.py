"""Results of several processes equal those of one."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from timm.models import VisionTransformer

from tests.evaluate.rotation.cases import field
from vispe.errors import ShapeError
from vispe.evaluate.rotation import Measurement, Processes, VisionModel, measure
from vispe.evaluate.rotation.distributed import filled

ROOT = Path(__file__).resolve().parents[3]
CASES = {  # sizes of images, size of a batch
    "three over two": (((40, 40), (40, 40), (41, 44)), 1),
    "one over two": (((40, 40),), 1),
}
DRAWN = ("d4", "position", "layers", "fingerprint", "quadrant")


def cases(processes):
    """Reports of all cases as JSON."""
    torch.manual_seed(0)
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 2, "num_classes": 0}
    f = VisionModel(VisionTransformer(**options, dynamic_img_size=True).eval())
    actual = {}
    for name, (sizes, batch_size) in CASES.items():
        images = [field(s, k, finest=0.05).float() for k, s in enumerate(sizes)]
        truths = [(x[0] > 0).numpy().astype(np.int64) + 1 for x in images]
        options = {"metrics": DRAWN, "batch_size": batch_size, "seed": 3}
        report = measure(f, images, truths=truths, processes=processes, **options)
        actual[name] = {
            "report": report.to_dict(),
            "mean": report.fingerprint.mean.tolist(),
            "poses": {k: v.tolist() for k, v in report.poses.items()},
        }
    return actual


def main(out):
    """Run the cases in one process and save the results."""
    torch.set_num_threads(1)
    processes = Processes.started()
    assert processes.count == 2
    (out / f"{processes.rank}.json").write_text(json.dumps(cases(processes)))

    def strange(images):
        if images.shape[-1] == 24:
            raise ShapeError("an image of 24 px")
        return images

    try:
        measure(
            strange,
            [torch.rand(1, 16, 16), torch.rand(1, 24, 24)],
            patch_size=1,
            processes=processes,
            metrics=["d4"],
        )
    except ShapeError as error:
        (out / f"error{processes.rank}").write_text(str(error))
    from vispe.cli.main import main as command

    code = command(["rotate", "skimage:coins", "x.png"])  # both are told, neither waits
    words = ["rotate", f"{__file__}:blocks", "--textures", "1", "--metrics", "d4", "--crop", "32", "--json"]
    (out / f"code{processes.rank}").write_text(f"{code} {command(words)}")


def blocks(images):
    """Means of squares of 8 pixels."""
    return torch.nn.functional.avg_pool2d(images, 8)


@pytest.fixture(scope="module")
def separate(tmp_path_factory):
    """The folder that two real processes wrote to."""
    out = tmp_path_factory.mktemp("separate")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code = f"import pathlib, {__name__} as cases; cases.main(pathlib.Path({str(out)!r}))"
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code],
            cwd=ROOT,
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    outputs = [process.communicate(timeout=300) for process in started]
    assert [p.returncode for p in started] == [0, 0], outputs
    return out, outputs


@pytest.fixture(scope="module")
def single_process():
    """Return the results of a single process."""
    return json.loads(json.dumps(cases(None)))


@pytest.mark.slow
def test_two_processes_equal_one(separate, single_process):
    out, _ = separate
    for rank in (0, 1):
        together = json.loads((out / f"{rank}.json").read_text())
        assert list(together) == list(single_process)
        for name, expected in single_process.items():
            assert together[name] == expected, name
    values = [r["values"] for r in single_process["three over two"]["report"]["rows"]]
    assert len(values) > 100
    assert all(len(v) == 3 for v in values)


def test_shares_of_batches_are_whole_batches():
    counts = []

    def f(images):
        counts.append(len(images))
        return images

    images = [torch.rand(1, 8, 8, generator=torch.Generator().manual_seed(k)) for k in range(5)]
    reports = [measure(f, images, patch_size=1, metrics=["position"], batch_size=b) for b in (1, 2, 5)]
    poses = [1] * 8  # of the first image
    assert counts == [1] * 5 + poses + [2, 2, 1] + poses + [5] + poses
    for report in reports[1:]:
        for first, second in zip(reports[0].result.rows, report.result.rows, strict=True):
            np.testing.assert_array_equal(first.values, second.values)


@pytest.mark.slow
def test_an_error_of_one_process_reaches_all(separate):
    out, _ = separate
    for rank in (0, 1):
        assert (out / f"error{rank}").read_text() == "an image of 24 px"


@pytest.mark.slow
def test_the_command_prints_once(separate):
    out, outputs = separate
    assert [(out / f"code{rank}").read_text() for rank in (0, 1)] == ["2 0", "2 0"]
    report = json.loads(outputs[0][0])
    assert report["images"] == ["texture 0, random field"]
    assert report["verdict"].startswith("features under rotation and reflection: invariant")
    assert outputs[1][0] == ""


def test_shares_are_consecutive_and_cover_everything():
    for n in range(6):
        for count in range(1, 5):
            shares = [list(Processes(rank, count).share(n)) for rank in range(count)]
            assert [k for share in shares for k in share] == list(range(n))
            sizes = [len(s) for s in shares]
            assert max(sizes) - min(sizes) <= 1
            assert n == 0 or sizes[0] == max(sizes)
            assert sizes[-1] == min(sizes)


def test_images_without_rows_become_nan():
    row = Measurement("15°", "error", np.array([1.0, 2.0]), floors={"blur": np.array([0.1, 0.2])})
    (actual,) = filled([(1, None), (2, (row,)), (2, None)])
    np.testing.assert_array_equal(actual.values, [np.nan, 1, 2, np.nan, np.nan])
    np.testing.assert_array_equal(actual.floors["blur"], [np.nan, 0.1, 0.2, np.nan, np.nan])
    assert filled([(3, None)]) == ()


def test_an_error_of_a_single_process_is_raised():
    with pytest.raises(ShapeError, match="wrong"):
        Processes().joined(1, ShapeError("wrong"))
    assert Processes().joined("all") == ["all"]
    assert Processes().device("auto") == "auto"
