"""Patched methods of transformers: any order of imports, subclasses, and unaffected models."""

import copy
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import transformers

import vispe
from tests.hosts.transformers.saving.test_vision import build, outputs, same
from vispe.errors import InputError
from vispe.hosts.transformers.saving import patch_save_load

ROOT = Path(__file__).resolve().parents[4]
CHECK = """
import sys, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    model = transformers.AutoModel.from_pretrained(sys.argv[1])
assert len(caught) == 1 and "names the encoding alibi2d of vispe" in str(caught[0].message), caught
print("warned")
"""
ORDERS = {
    "transformers after vispe": "import vispe, sys\nassert 'transformers' not in sys.modules\nimport transformers",
    "vispe after transformers": "import transformers\nfrom transformers import CLIPVisionModel\nimport vispe",
}


class Mine(transformers.CLIPVisionModel):
    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        return super().from_pretrained(*args, **kwargs)


def save(model, folder):
    with warnings.catch_warnings(action="ignore"):
        model.save_pretrained(folder)


@pytest.mark.parametrize("order", [pytest.param(o, marks=pytest.mark.slow) for o in ORDERS])
def test_a_stock_load_warns_in_any_order_of_imports(order, tmp_path):
    save(vispe.convert(build("CLIPVisionModel"), "alibi2d"), tmp_path)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    words = [sys.executable, "-c", f"{ORDERS[order]}\n{CHECK}", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300, env=env)
    assert done.stdout == "warned\n", done.stderr


def test_models_without_an_encoding_are_saved_and_loaded_unchanged(tmp_path):
    model = build("CLIPModel")
    with warnings.catch_warnings(action="error"):
        model.save_pretrained(tmp_path)
        actual, info = transformers.AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    same(actual, model)
    assert "vispe" not in (tmp_path / "config.json").read_text()


def test_subclasses_and_custom_loading(tmp_path):
    model = vispe.convert(build("CLIPVisionModel"), "alibi2d(slopes=learned)")
    save(model, tmp_path)
    with pytest.warns(UserWarning, match="was loaded without"):
        assert type(Mine.from_pretrained(tmp_path)) is Mine
    with pytest.raises(Exception, match="Mine"):  # its tower has a custom class
        vispe.from_pretrained(Mine, tmp_path)
    # nothing is left of the failure
    same(vispe.from_pretrained(transformers.CLIPVisionModel, tmp_path), model)


def test_patches_are_installed_and_removed_once(tmp_path):
    base = transformers.PreTrainedModel
    wrapped = {name: vars(base)[name] for name in ("from_pretrained", "save_pretrained")}
    patch_save_load.install()
    assert {name: vars(base)[name] for name in wrapped} == wrapped
    patch_save_load.uninstall()
    try:
        assert not any(hasattr(vars(base)[name], "vispe_original") for name in wrapped)
        with warnings.catch_warnings(action="error"):
            vispe.convert(build("CLIPVisionModel"), "alibi2d").save_pretrained(tmp_path)
    finally:
        patch_save_load.install()
    assert "alibi2d" in (tmp_path / "config.json").read_text()
    assert vispe.from_pretrained(transformers.AutoModel, tmp_path).vispe.spec == [{"name": "alibi2d"}]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["CLIPModel", "TimmWrapperModel", "InternVLVisionModel"])
def test_copies_and_pickles_of_loaded_models(name, tmp_path):
    save(vispe.convert(build(name), "rope_mixed"), tmp_path)
    model = vispe.from_pretrained(getattr(transformers, name), tmp_path)
    for duplicate in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(duplicate) is type(model)
        same(duplicate, model)
        same(type(duplicate).from_pretrained(tmp_path), model)


def test_a_failed_load_does_not_affect_the_next(tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        vispe.from_pretrained(transformers.AutoModel, tmp_path / "nowhere")
    plain = build("CLIPVisionModel")
    plain.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="must name an encoding or position scheme"):
        vispe.from_pretrained(transformers.AutoModel, tmp_path)
    actual = transformers.AutoModel.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(outputs(actual), outputs(plain), strict=True))
