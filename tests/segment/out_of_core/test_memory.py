"""Memory limit for images larger than memory."""

import json
import subprocess
import sys

import numpy as np
import pytest

from tests.cases import cases
from tests.segment.out_of_core.stores import scene, scribbled, write_store, zarr
from vispe.errors import OptionError
from vispe.segment import pipeline
from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.out_of_core.memory_plan import parse_memory

PROGRAM = """
import json, resource, sys
from vispe.segment import pipeline

model, small, large, out, memory = sys.argv[1:]
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
pipeline.apply(model, [small], out + "/small", memory=memory)  # what is imported late is there now
before = peak()
report = pipeline.apply(model, [large], out + "/large", memory=memory)
print(json.dumps({"before": before, "after": peak(), "record": report.images[0]}))
"""


@cases(
    ("text", "size"),
    [("2 GiB", 2**31), ("500MB", 500 * 2**20), ("1.5g", 3 * 2**29), ("64 KiB", 2**16), ("7", 7), (9, 9)],
)
def test_memory_sizes_are_parsed(text, size):
    assert parse_memory(text) == size


@cases("text", ["", "many", "2 XB", "-1 GB", "0", "1e9"])
def test_invalid_memory_sizes_raise(text):
    with pytest.raises(OptionError, match=r"is not an amount of memory\. Use a value such as '2 GiB'"):
        parse_memory(text)


@pytest.mark.slow
@pytest.mark.parametrize(("features", "limit", "side"), [("filters", 48, 8000), ("both", 100, 700)])
def test_peak_memory_stays_below_the_limit(tmp_path, features, limit, side):
    """With filters the image is ten times the memory; with the slower vispe_micro it has several blocks."""
    values, phase = scene(128, 128)
    write_store(tmp_path / "small.zarr", values[:32, :32])
    training_store = write_store(tmp_path / "taught.zarr", values)
    config = FeatureConfig("filters", sigmas=(1.0,), tile=128)
    if features == "both":
        config = FeatureConfig("both", sigmas=(1.0,), model="vispe_micro", tile=128)
    labels = scribbled(tmp_path / "l.png", phase, 0.02)
    pipeline.segment([training_store], tmp_path / "out", labels=[labels], features=config)
    root = zarr.create_array(
        store=str(tmp_path / "large.zarr"),
        shape=(side, side),
        chunks=(256, 256),
        dtype=np.float64,
        dimension_names=("y", "x"),
    )
    block = np.tile(values, (4, side // 128 + 1))[:, :side]
    for top in range(0, side, 512):
        root[top : top + 512] = block[: min(512, side - top)]
    if features == "filters":
        assert side * side * 8 >= 10 * limit * 2**20
    arguments = [str(tmp_path / name) for name in ("out/model.vispe", "small.zarr", "large.zarr", "results")]
    actual = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments, f"{limit} MiB"],
        check=True,
        capture_output=True,
        text=True,
    )
    messages = json.loads(actual.stdout)
    assert messages["record"]["height"] == side
    assert messages["after"] - messages["before"] <= limit * 2**20, messages
