"""Names with hyphens or capitals, wherever names of encodings and schemes are looked up."""

import pytest

import vispe
from tests.cases import cases
from vispe.encodings.registry import encoding_class
from vispe.errors import UnknownName, did_you_mean
from vispe.multimodal import create_scheme, list_schemes
from vispe.segment.text.readouts import READOUTS

SPELLED = {name.replace("_", "-"): name for name in vispe.list_encodings() if "_" in name}
SCHEMES = {name.replace("_", "-"): name for name in list_schemes() if "_" in name}
assert SCHEMES["mrope-i"] == "mrope_i"
assert SPELLED["rope-axial"] == "rope_axial"


@cases("spelled", [*SPELLED, *SCHEMES])
def test_hyphens(spelled):
    right = rf"Did you mean '{(SPELLED | SCHEMES)[spelled]}'\?"
    for look_up in (vispe.create_encoding, vispe.encoding_info, encoding_class, create_scheme):
        with pytest.raises(UnknownName, match=right):
            look_up(spelled)
    for spec in (f"{spelled}(base=3)", {"name": spelled}):
        with pytest.raises(UnknownName, match=right):
            vispe.create_encoding(spec)
        with pytest.raises(UnknownName, match=right):
            create_scheme(spec)
    with pytest.raises(UnknownName, match=right):
        vispe.create_encoding(f"none+{spelled}")


@cases("spelled", ["MRoPE-I", "M-RoPE-I", "mrope_I", "VRoPE", "V2PE", "RoPE-axial", "ALiBi2D"])
def test_capitals_as_in_papers(spelled):
    right = spelled.lower().replace("-", "_").replace("m_rope", "mrope")
    for look_up in (vispe.create_encoding, create_scheme):
        with pytest.raises(UnknownName, match=rf"Did you mean '{right}'\?"):
            look_up(spelled)


def test_presets():
    with pytest.raises(UnknownName, match=r"Did you mean 'alibi2d\.dinosaw'\?"):
        vispe.create_encoding("alibi2d.dino-saw")


def test_a_name_of_the_other_registry():
    with pytest.raises(UnknownName, match=r"it is a position scheme.*vispe\.convert\(model, 'vrope'\)"):
        vispe.create_encoding("vrope")
    with pytest.raises(UnknownName, match=r"it is an encoding.*vispe\.create_encoding\('alibi2d'\)"):
        create_scheme("alibi2d")


def test_other_names_are_suggested_as_before():
    assert did_you_mean("clear-clip", READOUTS) == " Did you mean 'clearclip'?"
    assert did_you_mean("alibi2", ["alibi2d", "rope"]) == " Did you mean 'alibi2d'?"
    assert did_you_mean("xyz", ["alibi2d"]) == ""
