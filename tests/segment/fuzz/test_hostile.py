"""Files that declare more than they contain: rejected with little time and memory, in a separate process."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.cases import cases
from tests.segment.fuzz import corpus
from vispe.errors import InputError
from vispe.images.formats import size_limits
from vispe.images.labels.label_files import read_labels
from vispe.images.read import read_image

FILES = {name: (data, pattern) for name, data, pattern in corpus.hostile()}
ALONE = Path(__file__).with_name("run_alone.py")
unix = pytest.mark.skipif(sys.platform == "win32", reason="limits of memory and time are set as on Unix")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Outcome of each file: kind, text, increase of peak memory in MB, seconds of CPU."""
    folder = tmp_path_factory.mktemp("hostile")
    return read_alone(folder, {name: data for name, (data, _) in FILES.items()})


def read_alone(folder, files):
    """Read files in a separate process -> {name: [kind, text, MB, seconds]}."""
    paths = corpus.write(folder, files)
    root = str(Path(__file__).resolve().parents[3])
    process = subprocess.run(
        [sys.executable, str(ALONE), *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=500,
        stdin=subprocess.PIPE,
        cwd=root,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert process.returncode == 0, process.stderr[-2000:]
    return {Path(path).name: values for path, *values in map(json.loads, process.stdout.splitlines())}


@unix
@cases("name", FILES)
def test_malicious_files_raise_with_little_memory_and_time(outcomes, name):
    kind, ome_xml, megabytes, seconds = outcomes[name]
    assert kind == "refused", (kind, ome_xml)
    assert re.search(FILES[name][1], ome_xml), ome_xml
    assert name in ome_xml
    assert "\n" not in ome_xml
    assert len(ome_xml) < 600
    assert megabytes < 400
    assert seconds < 15  # generous: a file that hangs takes hundreds of seconds


def test_size_limit_depends_on_file_size_and_memory(monkeypatch, tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(bytes(10_000_000))
    large = size_limits.LARGE
    monkeypatch.setattr(size_limits, "machine_memory", lambda: 10**12)
    size_limits.check_size(path, (large,), 8)
    size_limits.check_size(path, (1_900_000_000,), 8)
    size_limits.check_size(path, (8, 1_900_000_000), 1)
    with pytest.raises(
        InputError, match=r"2100000000 values \(2\.1 GB\) in a file of 10 MB.*limit 200 to 1 above 1\.074 GB"
    ):
        size_limits.check_size(path, (2_100_000_000,), 8)
    size_limits.check_size(path, (2_100_000_000,), 8, trusted=True)
    size_limits.check_size(path, (2_100_000_000,), 8, stored=11_000_000)
    monkeypatch.setattr(size_limits, "machine_memory", lambda: 4_000_000_000)
    with pytest.raises(
        InputError, match=r"at most half of the memory of 4 GB, got 2100000000 values \(2\.1 GB\)"
    ):
        size_limits.check_size(path, (2_100_000_000,), 8, trusted=True)
    with pytest.raises(InputError, match=r"OME-Zarr"):  # bits become bytes
        size_limits.check_size(path, (2_100_000_000,), 1)
    monkeypatch.setattr(size_limits, "machine_memory", lambda: None)
    size_limits.check_size(path, (2_100_000_000,), 8, trusted=True)


@unix
def test_machine_memory_respects_resource_limits(monkeypatch):
    import resource

    memory = size_limits.machine_memory()
    assert memory > 1 << 28
    monkeypatch.setattr(resource, "getrlimit", lambda _: (123_456_789, resource.RLIM_INFINITY))
    assert size_limits.machine_memory() == min(memory, 123_456_789)
    monkeypatch.setattr("os.sysconf", lambda name: 1000)
    assert size_limits.machine_memory() == 1000 * 1000


def test_label_images_of_the_expected_shape_may_compress_more(tmp_path, monkeypatch):
    monkeypatch.setattr(
        size_limits.check_size, "__kwdefaults__", {**size_limits.check_size.__kwdefaults__, "free": 1000}
    )
    monkeypatch.setattr("vispe.images.formats.decode.LARGE", 1000)
    labels = np.zeros((1200, 1000), np.uint8)
    labels[3, :500], labels[7, :500] = 1, 2
    Image.fromarray(labels).save(tmp_path / "l.png", optimize=True)
    with pytest.raises(InputError, match=r"decompression bomb, got 1200 x 1000 values \(1\.2 MB"):
        read_image(tmp_path / "l.png")
    np.testing.assert_array_equal(read_labels(tmp_path / "l.png", (1, 1200, 1000)).values[0], labels)
    with pytest.raises(InputError, match="bomb"):
        read_labels(tmp_path / "l.png", (1, 1000, 1000))


def test_out_of_memory_is_an_input_error(monkeypatch, tmp_path):
    def raise_memory_error(*_, **__):
        raise MemoryError("Unable to allocate 2.33 GiB")

    Image.fromarray(corpus.grey()).save(tmp_path / "a.png")
    monkeypatch.setattr("vispe.images.read.image_file._plain_colours", raise_memory_error)
    with pytest.raises(InputError, match=r"a\.png: out of memory \(Unable to allocate 2\.33 GiB\)"):
        read_image(tmp_path / "a.png")


def test_ome_planes_in_files_of_the_same_folder_are_read(tmp_path):
    import tifffile

    planes = [corpus.grey(np.uint8, 5, 7) for _ in range(2)]
    tiff_data = "".join(
        f'<TiffData FirstZ="{z}" IFD="0" PlaneCount="1"><UUID FileName="{name}">urn:uuid:{z}</UUID></TiffData>'
        for z, name in enumerate(("a.ome.tif", "b.ome.tif"))
    )
    ome_xml = (
        '<?xml version="1.0"?><OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06" UUID="urn:uuid:{}">'
        '<Image ID="I"><Pixels ID="P" DimensionOrder="XYZCT" Type="uint8" SizeX="7" SizeY="5" SizeZ="2" SizeC="1" '
        f'SizeT="1">{tiff_data}</Pixels></Image></OME>'
    )
    for z, (name, plane) in enumerate(zip("ab", planes, strict=True)):
        tifffile.imwrite(
            tmp_path / f"{name}.ome.tif", plane, description=ome_xml.replace("{}", str(z)), metadata=None
        )
    np.testing.assert_array_equal(read_image(tmp_path / "a.ome.tif").pages[..., 0], np.stack(planes))
    (tmp_path / "b.ome.tif").unlink()
    with pytest.raises(InputError, match="1 of 2 planes of the OME metadata are missing"):
        read_image(tmp_path / "a.ome.tif")


@unix
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_tiff_tags_raise_only_vispe_errors(tmp_path, seed):
    good = [f for f in corpus.good() if f.data[:4] == b"II*\0"]
    files = {
        f"{seed}_{n}_{good[n % len(good)].name}": corpus.strange_tags(
            good[n % len(good)].data, seed * 1000 + n
        )
        for n in range(250)
    }
    outcomes = read_alone(tmp_path / "in", files)
    assert len(outcomes) == len(files)
    bad = {
        name: values
        for name, values in outcomes.items()
        if values[0] not in ("read", "refused") or values[2] > 500
    }
    assert not bad, bad
