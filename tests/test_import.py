"""What `import vispe` brings into a program, and what it leaves alone. One process, as torch is slow to import."""

import json
import subprocess
import sys

import pytest

HEAVY = {
    "scipy", "sklearn", "skimage", "skops", "tifffile", "matplotlib", "pandas", "jsonargparse", "rich", "onnx",
    "transformers", "open_clip", "accelerate", "tensorboard", "dask", "zarr", "napari",
}  # fmt: skip

PROGRAM = """
import json, random, sys, warnings
import einops, numpy, timm, torch

def state():
    return [
        torch.get_rng_state().tolist(), list(random.getstate()[1]), numpy.random.get_state()[1].tolist(),
        str(torch.get_default_dtype()), torch.get_num_threads(), torch.is_grad_enabled(), len(warnings.filters),
        torch.cuda.is_initialized(),
    ]

before, modules = state(), {m.partition(".")[0] for m in sys.modules}
import vispe
ours = sorted({m.partition(".")[0] for m in sys.modules} - modules)
print(json.dumps({"ours": ours, "same": state() == before}))
"""


@pytest.fixture(scope="module")
def found():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_import_brings_only_the_required_packages(found):
    ours = set(found["ours"])
    assert not ours & HEAVY
    assert not {m for m in ours - {"vispe"} if m not in sys.stdlib_module_names}


def test_import_changes_nothing_of_the_program(found):
    assert found["same"]
