"""Old names of modules: all lead to modules that exist, with a warning, in imports and in pickles."""

import importlib
import pickle
import subprocess
import sys

import pytest

from vispe._moved import moved, now

OPTIONAL = ("vispe.segment.napari.panel", "vispe.segment.napari.widget")  # need napari and Qt


@pytest.mark.parametrize("old", sorted(moved()))
def test_every_old_name_leads_somewhere(old):
    for module in now(old):
        if module not in OPTIONAL:
            importlib.import_module(module)


@pytest.mark.parametrize(
    ("old", "name"),
    [
        ("vispe.base", "Encoding"),
        ("vispe.layers", "Attention"),
        ("vispe.hosts.hf_late", "reposition"),
        ("vispe.segment.images", "find_images"),
        ("vispe.segment.images", "normalize"),
        ("vispe.micro", "load_micro"),
        ("vispe.micro.model", "Micro"),
        ("vispe.evaluate.textures", "random_field"),
        ("vispe.evaluate.rotation.group", "D4"),
    ],
)
def test_old_modules_hand_on_their_names_with_a_warning(old, name):
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"{old} is now vispe"):
        module = importlib.import_module(old)
    assert getattr(module, name) in [getattr(importlib.import_module(new), name, None) for new in now(old)]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = module.nothing


@pytest.mark.parametrize(
    ("package", "names"),
    [
        ("vispe.segment.features", ("FeatureConfig", "Features", "choose_device")),
        ("vispe.segment.classify", ("PixelClassifier",)),
        ("vispe.evaluate.probe", ("positional_probe", "ProbeResult")),
        ("vispe.evaluate.plots", ("plot_bias",)),
        ("vispe.train.linear", ("linear_segmentation",)),
        ("vispe.attention.bias", ("DistanceBias", "SumBias")),
    ],
)
def test_packages_that_were_modules_keep_their_names(package, names):
    module = importlib.import_module(package)
    for name in names:
        assert callable(getattr(module, name))
        assert name in dir(module)


def test_pickles_find_their_classes():
    sys.modules.pop("vispe.attention.distance", None)
    with pytest.warns(DeprecationWarning, match=r"vispe\.attention\.distance is now"):
        function = pickle.loads(b"cvispe.attention.distance\ndistances\n.")
    assert function.__module__ == "vispe.attention.bias.distances"
    with pytest.raises(ModuleNotFoundError, match="no_such"):
        pickle.loads(b"cvispe.no_such\nthing\n.")


def test_the_warning_points_at_the_import():
    code = "import warnings, vispe\nwarnings.simplefilter('error')\ntry:\n    import vispe.base\n"
    code += "except DeprecationWarning as error:\n    print(error)\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    now = "vispe.encodings.base and vispe.encodings.compose"
    assert done.stdout == f"vispe.base is now {now}; the old name goes with vispe 0.3.\n"
