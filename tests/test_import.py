"""Side effects of `import vispe`: imported modules and global state.

The programs run in forks of one process that has imported torch, which is slow to import, and nothing else.
"""

import importlib
import inspect
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import vispe

HEAVY = {
    "scipy", "sklearn", "skimage", "skops", "tifffile", "matplotlib", "pandas", "jsonargparse", "rich", "onnx",
    "transformers", "open_clip", "accelerate", "tensorboard", "dask", "zarr", "napari",
}  # fmt: skip

PROGRAM = """
import gc, json, random, sys, warnings
import einops, numpy, timm, torch

def state():
    return [
        torch.get_rng_state().tolist(), list(random.getstate()[1]), numpy.random.get_state()[1].tolist(),
        str(torch.get_default_dtype()), torch.get_num_threads(), torch.is_grad_enabled(), len(warnings.filters),
        torch.cuda.is_initialized(), gc.isenabled(), gc.get_threshold(),
    ]

before, modules = state(), {m.partition(".")[0] for m in sys.modules}
import vispe
ours = sorted({m.partition(".")[0] for m in sys.modules} - modules)
print(json.dumps({"ours": ours, "same": state() == before}))
"""


ALONE = """
import json, sys
import vispe

slow = {"timm", "torchvision", "torch._dynamo", "torch._inductor", "sympy", "triton", "scipy", "sklearn"}
first = sorted(slow & set(sys.modules))
encodings = [vispe.create_encoding(name, dim=24, num_heads=3, depth=2, grid=(2, 3)) for name in ("alibi2d", "sincos2d")]
layer = vispe.Attention(24, 3, "rope_axial")
listed = sorted(set(vispe.__all__) - set(dir(vispe)))
then = sorted(slow & set(sys.modules))
from vispe import symmetrize
same = [vispe.images.symmetry.symmetrize is symmetrize, vispe.convert is vispe.hosts.convert.convert]
try:
    vispe.nothing
except AttributeError as error:
    text = str(error)
timm = "timm" in sys.modules
import vispe.train

lazy = [name for name in sys.modules if name.startswith(("vispe.train.data", "vispe.train.retrofit."))]
import vispe.train.retrofit.config
from vispe.train import Retrofit, retrofit

same += [Retrofit is vispe.train.Retrofit is vispe.train.retrofit.__globals__["Retrofit"], callable(retrofit)]
print(json.dumps([first, then, listed, same, text, timm, lazy]))
"""

LISTED = """
import json, sys
import vispe
import vispe.encodings.registry as registry

def loaded():
    return sorted(n for n in registry._FILES if registry._FILES[n] in sys.modules)

first = loaded()
vispe.create_encoding("alibi2d", num_heads=2)
second = loaded()
names = vispe.list_encodings()
print(json.dumps([first, second, len(names) == len(registry._FILES), loaded() == sorted(registry._FILES)]))
"""

START = """
import json, os, sys
import torch

for program in json.load(sys.stdin):
    sys.stdout.flush()
    child = os.fork()
    if not child:
        exec(program, {"__name__": "__main__"})
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.fixture(scope="module")
def outputs():
    """Return the parsed output of each program."""
    programs = [PROGRAM, ALONE, LISTED]
    process = subprocess.run(
        [sys.executable, "-c", START],
        input=json.dumps(programs),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return dict(zip(programs, map(json.loads, process.stdout.splitlines()), strict=True))


def test_import_loads_only_required_packages(outputs):
    ours = set(outputs[PROGRAM]["ours"])
    assert not ours & HEAVY
    assert not {m for m in ours - {"vispe"} if m not in sys.stdlib_module_names}


def test_import_does_not_change_global_state(outputs):
    assert outputs[PROGRAM]["same"]


def test_timm_is_imported_only_when_needed(outputs):
    first, then, missing, identical, text, timm, _ = outputs[ALONE]
    assert [first, then, missing] == [[], [], []]
    assert identical == [True] * 4
    assert text == "module 'vispe' has no attribute 'nothing'"
    assert timm


def test_encodings_are_imported_when_requested(outputs):
    first, second, *all_listed = outputs[LISTED]
    assert [first, second, all_listed] == [[], ["alibi2d"], [True, True]]


def test_names_of_train_are_imported_when_requested(outputs):
    assert outputs[ALONE][-1] == []


def _names(pattern):
    """Return the names of modules of vispe whose files match, found without importing them."""
    root = Path(vispe.__file__).parent
    paths = (p.relative_to(root.parent).with_suffix("").parts for p in root.rglob(pattern))
    names = {".".join(p[:-1] if p[-1] == "__init__" else p) for p in paths if p[-1] != "__main__"}
    return sorted(names - {"vispe"})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of optional packages, such as napari
@pytest.mark.parametrize(
    "pattern", ["__init__.py", "attention/**/*.py", pytest.param("*.py", marks=pytest.mark.slow)]
)
def test_every_module_is_an_attribute_of_its_package(pattern):
    """`import a.b.c as x` fails or binds another object if a package has another attribute of this name."""
    failed = []
    for name in _names(pattern):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:  # optional dependency
            continue
        namespace = {}
        exec(f"import {name} as x", namespace)
        if vars(namespace["x"]) is not vars(module):
            failed.append(name)
    assert not failed


def test_functions_with_the_name_of_a_package_remain_functions():
    import vispe.train

    assert "q" in inspect.signature(vispe.attention).parameters
    for function in (vispe.attention, vispe.train.retrofit):
        assert inspect.isfunction(function)
        assert pickle.loads(pickle.dumps(function)) is function
