"""Every family from conversion to generation; CI also runs this file with the oldest supported transformers."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import vispe
from tests.cases import cases
from tests.hosts.transformers.tiny import FAMILIES, batch, make
from vispe.errors import MissingExtra
from vispe.hosts.transformers.version import OLDEST, release

ROOT = Path(__file__).resolve().parents[3]
LANGUAGE_ONLY = """
import sys
import vispe
from tests.hosts.transformers.tiny import batch, make

model = vispe.convert(make("llava"), "mrope_i")
model(**batch("llava", [3, "image", 2]).inputs)
assert not {"vispe.hosts.transformers.vision.convert", "vispe.hosts.transformers.vision.tower"} & set(sys.modules)
"""


@cases("family", FAMILIES)
def test_generation_equals_a_full_pass(family):
    model, prompt = make(family), batch(family, [7], [3, "image", 4, "wide", 2])
    vispe.convert(model, "mrope_i")
    vispe.convert(model, "alibi2d")
    tokens = model.generate(**prompt.inputs, max_new_tokens=3, do_sample=False)[:, -3:]
    with torch.no_grad():
        full = model(**prompt.with_tokens(tokens)).logits[:, -4:-1].argmax(-1)
    assert torch.equal(full, tokens)


@pytest.mark.parametrize("spec", ["mrope_i", "alibi2d"])
@pytest.mark.parametrize("version", ["4.57.6", "5.16.0", "5.16.1.dev0"])
def test_an_older_version_is_rejected_before_any_change(monkeypatch, version, spec):
    model = make("qwen2_vl")
    before = [type(m) for m in model.modules()]
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    expected = rf"needs transformers {OLDEST} or later, got {version}. Run: pip install -U 'vispe\[vlm\]'"
    with pytest.raises(MissingExtra, match=expected):
        vispe.convert(model, spec)
    assert [type(m) for m in model.modules()] == before


def test_the_extra_requires_the_oldest_version():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    bound = next(line for line in extras["vlm"] if line.startswith("transformers>="))
    assert release(OLDEST)[: bound.count(".") + 1] == release(bound)
    assert not any(release(OLDEST)[bound.count(".") + 1 :])


def test_versions_are_compared_as_numbers():
    assert release("5.9.0") < release(OLDEST) <= release("5.17.0") < release("5.100.0.dev0") < release("6.0")


@pytest.mark.slow
def test_language_models_import_no_vision_towers():
    done = subprocess.run(
        [sys.executable, "-c", LANGUAGE_ONLY],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
