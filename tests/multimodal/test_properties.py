"""Measured properties of schemes, and their agreement with the guide."""

import importlib.util
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.cases import cases
from vispe.errors import OptionError, UnknownName, UnsupportedCombination
from vispe.multimodal import Scheme, create_scheme, list_schemes, scheme_class
from vispe.multimodal.properties import is_text_exact, properties
from vispe.multimodal.schemes.mrope import MRoPE, RoPE1D

ROOT = Path(__file__).parents[2]


cached_properties = cache(properties)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # hundreds of tiny tensors
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def generator():
    location = importlib.util.spec_from_file_location("eval_multimodal", ROOT / "eval" / "docs_multimodal.py")
    module = importlib.util.module_from_spec(location)
    location.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def actual(generator):
    return {spec: cached_properties(spec) for spec in generator.specs()}


def test_the_guide_agrees_with_measured_properties(generator, actual, monkeypatch):
    from tests.hosts.transformers.tiny import needs

    needs("5.24", "the tables of the pages have families of 5.24")
    monkeypatch.setattr(generator, "properties", actual.__getitem__)
    for name in generator.TABLES:
        page = (ROOT / "docs/how-to/models" / name).read_text()
        assert generator.updated(name, page) == page, "run python eval/docs_multimodal.py"
    for name in generator.COUNTING:
        text = (ROOT / name).read_text()
        assert f"{len(generator.FAMILIES)} model types" in text
        assert generator.counted(text) == text, "run python eval/docs_multimodal.py"
    assert [n for n in list_schemes() if f"| `{n}` |" not in page] == []
    with pytest.raises(ValueError, match="0 markers for the table cost"):
        generator.updated("schemes.md", "# no marks")


def test_every_scheme_continues_its_text_when_decoding(actual):
    assert [spec for spec, p in actual.items() if not p.decode_safe] == []


@cases("name", list_schemes())
def test_is_text_exact_equals_the_measured_property(actual, name):
    assert actual[name].text_exact == scheme_class(name).text_exact


@cases(
    ("spec", "image", "video", "tiles"),
    [
        ("rope1d", "h w", "t h w", 1792),
        ("mrope", "max(h, w)", "max(t, h, w)", 112),
        ("mrope(after=side)", "max(h, w)", "max(h, w)", 112),
        ("mrope(stride=2.0)", "max(h, w)", "max(2 t - 1, h, w)", 112),
        ("mrope(stride=0.5)", "max(h, w)", "max(0.5 t + 0.5, h, w)", 112),
        ("mrope(stride=100.0)", "max(h, w)", "max(100 t - 99, h, w)", 112),
        ("vrope", "h + w - 1", "t (h + w - 1)", 217),
        ("v2pe(stride=8)", "8", "8 t", 56),
        ("mousi", "h", "t h", 112),
        ("mousi(share=all)", "1", "t", 1),
        ("rope_dhr", "h w", "t h w", 256),
        ("pype", "ceil(min(h, w) / 2)", "t ceil(min(h, w) / 2)", 56),
        ("videorope", "1", "2 t - 1", 7),
        ("tad_rope", "h w + 1", "t h w + t", 1799),
    ],
)
def test_costs(spec, image, video, tiles):
    p = cached_properties(spec)
    assert (p.image, p.video, p.tiles_cost) == (image, video, tiles)
    at = {"t": 1, "h": 24, "w": 36, "max": max, "min": min, "ceil": math.ceil, "__builtins__": {}}
    spelled = image.replace("h w", "h * w")
    assert p.image_cost == eval(spelled, at)
    assert p.grows == (eval(spelled, at | {"h": 48, "w": 72}) > p.image_cost)


def test_positions_of_known_schemes():
    qwen, reset, old = (
        properties(s) for s in ("mrope_i", "mrope_i(spatial_reset=true)", "mrope(after=side)")
    )
    assert (qwen.image_gap, qwen.video_gap, qwen.follows_text) == ((1, 36), (1, 93), (True, True, True))
    assert reset.follows_text == (True, False, False)
    assert reset.image_gap == (5, 36)  # text at 40, columns up to 35
    assert old.video_gap == (-89, 3)  # text at 11, the last frame at 100
    vrope = cached_properties("vrope")
    assert (vrope.image_gap, vrope.mirrored, vrope.level, vrope.axes) == ((1, 1), True, True, 4)
    assert not qwen.mirrored
    assert not qwen.level
    shared = cached_properties("mousi(share=all)")
    assert (shared.distinct_image, shared.distinct_tiles, shared.distinct_video, shared.level) == (
        False,
        False,
        False,
        True,
    )
    dhr = cached_properties("rope_dhr")
    assert (dhr.distinct_image, dhr.distinct_tiles) == (True, False)


def test_effects_of_options():
    assert not cached_properties("mrope(text_axes=time)").text_exact
    # three of eight key heads are not rotated
    assert not cached_properties("mhrope(sections=[1,2,2])").text_exact
    assert is_text_exact(create_scheme("mhrope"), pairs=16, kv_heads=3)
    assert not is_text_exact(create_scheme("mhrope", sections=(1, 1, 1)), pairs=16, kv_heads=4)
    assert not is_text_exact(create_scheme("mrope", text_axes="time"), pairs=8, kv_heads=2)
    assert cached_properties("mrope(tokens_per_second=2.0)").timed
    assert not cached_properties("mrope").timed
    assert not cached_properties("v2pe").whole
    assert cached_properties("v2pe").random
    assert not cached_properties("v2pe(train_strides=null)").random
    assert properties({"name": "mrope", "stride": 0.5}).scheme == "mrope(stride=0.5)"


def test_properties_are_measured():
    @dataclass(frozen=True)
    class Odd(RoPE1D):
        """Scheme with a wrong claim: it halves the steps of text, rejects tiles, and skips a position when decoding."""

        name = "odd"
        step = 0.5

        def counter_step(self, blocks, draws):
            if bool((blocks.tile[:, 2:].prod(1) > 1).any()):
                raise UnsupportedCombination("no tiles")
            return blocks.size[:, 2].double() + 0.25

        def coordinates(self, stream, **options):
            coordinates = super().coordinates(stream, **options)
            return type(coordinates)(coordinates.ids, coordinates.mask, coordinates.next + 1, self)

    p = properties(Odd())
    assert Odd.text_exact
    assert (p.text_exact, p.whole, p.decode_safe, p.tiles_cost, p.distinct_tiles) == (
        False,
        False,
        False,
        None,
        None,
    )
    assert p.image_gap == (36.25 + 4 * 0.5 - (4 * 0.5 + 863),) * 2
    assert p.image == "1.25 to 61.2"


def test_reflections_are_tested_in_both_directions():
    @dataclass(frozen=True)
    class Columns(MRoPE):
        """Rows count down from both sides, so only columns are mirrored by a change of axes."""

        def local(self, tokens, draws):
            width = tokens.of(tokens.blocks.size[:, 2]) - 1
            return torch.stack([tokens.row, tokens.column, width - tokens.column])

    p = properties(Columns())
    assert not p.mirrored
    assert not p.level


def test_unknown_schemes_and_options():
    with pytest.raises(UnknownName, match="no position scheme 'mrop'"):
        properties("mrop")
    with pytest.raises(OptionError, match="no option 'strid'"):
        properties("mrope(strid=2)")
    assert isinstance(create_scheme("mrope"), Scheme)
