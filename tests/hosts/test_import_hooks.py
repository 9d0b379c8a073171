"""Patched constructors of timm are installed on its first import, in any order of imports."""

import importlib.util
import os
import pickle
import re
import subprocess
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest
import timm
import torch

from tests.hosts.helpers import SHAPE, image
from vispe.hosts import import_hooks

ROOT = Path(__file__).resolve().parents[2]
CHECK = """
import sys, timm
from importlib.machinery import SourceFileLoader
assert type(timm.__loader__) is type(timm.__spec__.loader) is SourceFileLoader
model = timm.create_model("vit_tiny_patch16_224", pos_embed="alibi2d", depth=1)
assert model.vispe.spec == [{"name": "alibi2d"}], model.vispe.spec
print("in place")
"""
VISPE_FIRST = """
import importlib.util, sys, threading
import vispe
assert "timm" not in sys.modules
assert importlib.util.find_spec("timm").origin.endswith("__init__.py")
assert "timm" not in sys.modules
def work():
    from timm import create_model
    create_model("vit_tiny_patch16_224", pos_embed="alibi2d", depth=1)
threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
IN_THE_MIDDLE = """
import vispe.hosts.timm.naflex
from vispe.hosts.timm import patch_constructors
"""
UNPICKLED = """
import pickle, sys
with open(sys.argv[1], "rb") as file:
    model, x, y = pickle.load(file)
assert model(x).equal(y)
"""


def run(*words, **options):
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=False, timeout=300, env=env, **options
    )


@pytest.mark.slow
@pytest.mark.parametrize("first", [VISPE_FIRST, IN_THE_MIDDLE], ids=["vispe", "middle"])
def test_timm_after_vispe(first):  # timm before it: see timm/test_patch_constructors.py
    done = run("-W", "error::ImportWarning", "-c", first + CHECK)
    assert done.stdout == "in place\n", done.stderr


@pytest.mark.slow
def test_a_pickled_model_under_torchrun(tmp_path):
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", pos_embed="alibi2d", **SHAPE).eval()
    (tmp_path / "model.pickle").write_bytes(pickle.dumps((model, image(), model(image()).detach())))
    (tmp_path / "script.py").write_text(UNPICKLED + CHECK)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "script.py", "model.pickle"]
    done = run(*words, cwd=tmp_path)
    assert done.stdout == "in place\n", done.stderr


@pytest.mark.slow
def test_under_pytest(tmp_path):
    (tmp_path / "conftest.py").write_text("import vispe\n")
    (tmp_path / "test_it.py").write_text(f"def test_it(capsys):\n    exec({CHECK!r}, {{}})\n")
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=tmp_path)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_installing_twice_has_no_effect():
    finders = list(sys.meta_path)
    import_hooks.install_import_hooks()
    assert sys.meta_path == finders
    assert (
        sum(type(f).__name__ == "_Finder" and type(f).__module__ == import_hooks.__name__ for f in finders)
        == 1
    )


def test_the_finder_handles_timm_only_and_delegates_to_other_finders(monkeypatch):
    finder = import_hooks._Finder()
    assert finder.find_spec("timm.models", timm.__path__) is None
    assert finder.find_spec("json", None) is None
    monkeypatch.setattr(sys, "meta_path", [finder, object(), PathFinder])
    spec = finder.find_spec("timm", None)
    assert spec is not None
    assert isinstance(spec.loader, import_hooks._Loader)
    assert isinstance(spec.loader.original, SourceFileLoader)
    assert spec.origin == timm.__file__
    monkeypatch.setattr(sys, "meta_path", [finder])
    assert importlib.util.find_spec("vispe").name == "vispe"
    assert finder.find_spec("timm", None) is None


def test_a_failed_import_can_be_repeated(monkeypatch):
    calls = []

    class FailingLoader:
        broken = True

        def create_module(self, spec):
            return ModuleType(spec.name)

        def exec_module(self, module):
            calls.append((module.__loader__, module.__spec__.loader))
            if self.broken:
                raise ImportError("half of it is missing")

    loader = FailingLoader()
    monkeypatch.setattr(import_hooks, "_install", lambda host: calls.append(f"door of {host}"))
    spec = ModuleSpec("timm", import_hooks._Loader(loader))
    module = importlib.util.module_from_spec(spec)
    assert module.__name__ == "timm"
    with pytest.raises(ImportError, match="half of it"):
        spec.loader.exec_module(module)
    assert calls == [(loader, loader)]
    loader.broken = False
    import_hooks._Loader(loader).exec_module(module)
    assert calls == [(loader, loader), (loader, loader), "door of timm"]


@pytest.mark.slow
def test_vispe_can_be_imported_without_timm():
    code = (
        "import sys; sys.modules['timm'] = None; import vispe; vispe.create_encoding('alibi2d', num_heads=2)"
    )
    done = run("-c", f"{code}; print('so far'); vispe.convert")
    assert done.stdout == "so far\n"
    assert re.search("(ModuleNotFound|Import)Error.*timm", done.stderr.splitlines()[-1])
