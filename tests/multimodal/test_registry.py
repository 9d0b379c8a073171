"""Names, spec strings and options of position schemes, and their descriptions."""

from dataclasses import FrozenInstanceError, dataclass
from typing import ClassVar

import pytest
import torch

from tests.cases import cases
from vispe.encodings.creation import create_encoding
from vispe.errors import OptionError, ShapeError, UnknownEncoding, UnknownName, UnsupportedCombination
from vispe.multimodal import (
    Image,
    Scheme,
    Stream,
    Text,
    Video,
    create_scheme,
    list_schemes,
    register_scheme,
    scheme_class,
    scheme_info,
)
from vispe.multimodal.registry import _SCHEMES

NAMES = list_schemes()
STREAM = Stream.of([[Text(3), Image(2, 3, (1, 2), "last"), Text(1), Video(3, 1, 2, 0.5), Text(2)], [Text(4)]])


def test_all_schemes_are_registered():
    expected = "circlerope group_pe hope_vlm ilrope mhrope mmrope mousi mrope mrope_i omnirope ppe pype rope1d rope_dhr"
    assert sorted(NAMES) == NAMES
    assert set(NAMES) >= {
        *expected.split(),
        "bilevel",
        "ernie_vl",
        "tad_rope",
        "tmrope",
        "tmrope_i",
        "v2pe",
        "videorope",
        "vrope",
        "xdrope",
    }


@cases("name", NAMES)
def test_descriptions(name):
    scheme = create_scheme(name)
    assert type(scheme) is scheme_class(name)
    assert scheme.name == str(scheme) == name
    assert scheme.summary.endswith(".")
    assert "https://arxiv.org/abs/" in scheme.paper
    assert type(scheme).__doc__
    assert create_scheme(scheme) is scheme
    assert create_scheme({"name": name, **scheme.options()}) == scheme
    assert scheme.coordinates(STREAM).ids.shape == (scheme.axes, *STREAM.shape)
    assert scheme.allocation(12, 4).shape[-1] == 12
    assert int(scheme.allocation(12, 4).max()) < scheme.axes
    assert scheme.text(torch.tensor([1.5])).shape == (scheme.axes, 1)


@cases("name", NAMES)
def test_options_cannot_be_changed_later(name):
    scheme = create_scheme(name)
    for option in scheme.options():
        with pytest.raises(FrozenInstanceError):
            setattr(scheme, option, 3)


@cases(
    "spec",
    [
        "mrope(stride=2.0,sections=[4,6,6])",
        "mrope_i(spatial_reset=true)",
        "mrope(tokens_per_second=2.0,text_axes=time)",
        "mmrope(scale=[1.0,4.0,8.0])",
        "videorope(centre=exact,after=max)",
        "hope_vlm(train_scales=[0.5,1.0])",
        "v2pe(stride=64)",
        "group_pe(phi=[3.0,5.0])",
        "bilevel(rotate=intra,train_length=64)",
        "circlerope(radius=5.0,move_to_origin=false)",
        "ppe(k=2)",
        "vrope(stride=3.0)",
        "mousi(share=all)",
        "pype(rings=1)",
        "rope_dhr(sampling=corner)",
        "xdrope(sections=[1,2,3],layout=elementwise,image_index=batch)",
    ],
)
def test_spec_strings_round_trip(spec):
    scheme = create_scheme(spec)
    parsed = create_scheme(str(scheme))
    assert parsed == scheme
    assert hash(parsed) == hash(scheme)
    ours, theirs = scheme.coordinates(STREAM), parsed.coordinates(STREAM)
    assert torch.equal(ours.ids, theirs.ids)
    assert scheme != create_scheme(scheme.name)


def test_canonical_spec_strings():
    assert str(create_scheme("mrope", stride=2.0, sections=[4, 6, 6])) == "mrope(sections=[4,6,6],stride=2.0)"
    assert str(create_scheme("mrope_i(spatial_reset=true)")) == "mrope_i(spatial_reset=true)"
    assert create_scheme("mrope(stride=2)", stride=3).stride == 3
    assert create_scheme(create_scheme("mrope(stride=2)"), after="side").options()["stride"] == 2


def test_sections_that_do_not_fit_raise_or_are_clipped():
    with pytest.raises(
        OptionError, match="cannot be interleaved: 6 pairs at a distance of 3 do not fit into 16"
    ):
        create_scheme("mrope_i(sections=[4,6,6])").allocation(16)
    clipped = create_scheme("mrope_i(sections=[4,6,6],clip=true)").allocation(16)
    assert clipped.tolist() == [0, 1, 2] * 5 + [0]


def test_every_option_has_an_effect():
    """On coordinates, draws or the allocation."""
    others = {
        "sections": (6, 3, 3),
        "stride": 0.75,
        "spatial_reset": True,
        "after": None,
        "tokens_per_second": 8.0,
        "text_axes": "time",
        "scale": None,
        "centre": "exact",
        "layout": "package",
        "train_scales": (0.3,),
        "train_strides": (3,),
        "per": "picture",
        "radius": 4.0,
        "precision": "float32",
        "alpha": 0.1,
        "blend": 0.5,
        "move_to_origin": False,
        "relative": True,
        "offset": 2.0,
        "share": "all",
        "tile_order": "column_major",
        "sampling": "corner",
        "phi": 5.0,
        "k": 2,
        "bands": "interleaved",
        "rings": 1,
        "axes_in_turn": True,
        "clip": True,
        "rotate": "intra",
        "train_length": 2,
        "image_index": "batch",
    }
    rows = [[Text(3), Image(3, 4, (3, 2), "last"), Text(1), Video(9, 2, 2, 0.5), Text(2, group=0), Text(3)]]
    rows[0] += [Video(4, 1, 1), Text(1)]  # of which nobody knows the seconds
    rows.append([Text(1), Image(1, 2)])
    grouped = Stream.of([[Text(3), Text(2, group=1)]])

    def record(scheme, stream):
        result = scheme.coordinates(stream, training=True, generator=torch.Generator().manual_seed(1))
        fixed = scheme.coordinates(stream)
        return [result.ids, result.next, fixed.ids, fixed.next, scheme.allocation(12, 4)]

    always = {
        ("omnirope", "spatial_reset"),
        ("ilrope", "spatial_reset"),
        ("mmrope", "sections"),
        ("mrope_i", "clip"),  # with sections that do not fit only: the next test
        ("ilrope", "clip"),
        ("tmrope_i", "clip"),
    }  # one value only
    for name in NAMES:
        plain = create_scheme(name)
        stream = grouped if name == "group_pe" else Stream.of(rows)
        before = record(plain, stream)
        for option in plain.options():
            value = others[option]
            if option == "after":
                value = "max" if plain.after == "time" else "side"
            if option == "scale":
                value = (1.0, 2.0, 3.0) if name == "mmrope" else 0.4
            if (name, option) == ("mhrope", "sections"):
                value = (1, 1, 2)
            if name == "xdrope":
                value = {"sections": (4, 4, 4), "layout": "elementwise"}.get(option, value)
            if (name, option) in always:
                continue
            pairs = zip(before, record(create_scheme(name, **{option: value}), stream), strict=True)
            assert any(a.shape != b.shape or not torch.equal(a, b) for a, b in pairs), (name, option)


WRONG = {
    "mrop": (UnknownName, r"no position scheme 'mrop'\. Did you mean 'mrope'"),
    "mrope(strides=2)": (
        OptionError,
        r"'mrope' has no option 'strides'\. Did you mean 'stride'.*It has: sections",
    ),
    "rope1d(stride=2)": (OptionError, "'rope1d' has no option 'stride'.*It has: none"),
    "mrope+vrope": (OptionError, "cannot be summed, got 2 in 'mrope.vrope'"),
    "mrope(stride=0)": (OptionError, "mrope: stride needs a number above 0, got stride=0"),
    "mrope(stride=-1)": (OptionError, "mrope: stride needs a number above 0, got stride=-1"),
    "mrope(stride=x)": (OptionError, "mrope: stride needs a number above 0, got stride='x'"),
    "mrope(spatial_reset=1)": (OptionError, "spatial_reset is true or false, got spatial_reset=1"),
    "mrope(after=end)": (OptionError, "after must be one of max, side, got 'end'"),
    "mrope(text_axes=none)": (OptionError, "text_axes must be one of all, time, got"),
    "mrope(tokens_per_second=0)": (
        OptionError,
        "mrope: tokens_per_second needs a number above 0, got tokens_per_second=0",
    ),
    "mrope(sections=[1,2])": (
        OptionError,
        r"mrope: sections needs a list of 3 integers of 0 or more, got sections=\(1, 2\)",
    ),
    "mrope(sections=[1,2,-3])": (
        OptionError,
        r"mrope: sections needs a list of 3 integers of 0 or more, got sections=\(1, 2, -3\)",
    ),
    "mrope(sections=16)": (
        OptionError,
        "mrope: sections needs a list of 3 integers of 0 or more, got sections=16",
    ),
    "bilevel(rotate=inter,sections=[4,4,4])": (OptionError, r"have no effect with rotate='inter'"),
    "bilevel(train_length=0)": (OptionError, "train_length needs an integer above 0, got train_length=0"),
    "pype(rings=0)": (OptionError, "pype: rings needs an integer above 0, got rings=0"),
    "mmrope(sections=[4,4,4])": (OptionError, "fixed pattern of axes, got sections"),
    "mmrope(scale=[1,2])": (
        OptionError,
        r"mmrope: scale needs a list of 3 numbers above 0, got scale=\(1, 2\)",
    ),
    "mmrope(scale=[1,2,0])": (
        OptionError,
        r"mmrope: scale needs a list of 3 numbers above 0, got scale=\(1, 2, 0\)",
    ),
}


@cases("spec", WRONG)
def test_spec_errors(spec):
    error, message = WRONG[spec]
    with pytest.raises(error, match=message):
        create_scheme(spec)


def test_registering_a_scheme():
    @register_scheme
    @dataclass(frozen=True)
    class Halves(Scheme):
        """Two tokens of an image share a position."""

        name: ClassVar[str] = "halves"
        step_size: float = 0.5

        @property
        def axes(self):
            return 1

        def counter_step(self, blocks, draws):
            return (blocks.tokens * self.step_size).ceil()

        def local(self, tokens, draws):
            return (tokens.index * self.step_size).floor()[None].double()

        def allocation(self, pairs, kv_heads=1):
            return torch.zeros(pairs, dtype=torch.long)

    try:
        ids = create_scheme("halves").coordinates(Stream.of([[Text(2), Image(1, 3), Text(1)]])).ids
        assert ids[0, 0].tolist() == [0, 1, 2, 2, 3, 4]
        assert register_scheme(Halves) is Halves
        with pytest.raises(
            OptionError, match=r"scheme name 'halves' is already used by .*Halves\. Choose another"
        ):
            register_scheme(type("Others", (Halves,), {}))
    finally:
        del _SCHEMES["halves"]


def test_coordinates_errors():
    scheme, stream = create_scheme("mrope"), Stream.of([[Text(2), Image(1, 2)], [Text(1)]])
    with pytest.raises(ShapeError, match=r"start needs one value for each of 2 rows, got \(3,\)"):
        scheme.coordinates(stream, start=torch.zeros(3))
    with pytest.raises(ShapeError, match=r"draws needs one value for each of 3 blocks, got \(2,\)"):
        create_scheme("hope_vlm").coordinates(stream, draws=torch.ones(2))
    with pytest.raises(OptionError, match="end must be 'next', 'max', 'time' or 'ceil', got 'last'"):
        scheme.coordinates(stream).delta("last")
    groups = Stream.of([[Text(2), Text(2, group=1)]])
    with pytest.raises(
        UnsupportedCombination, match=r"mrope has one counter .* several groups\. Use group_pe"
    ):
        scheme.coordinates(groups)


def test_deltas():
    """From the counter, or from the largest coordinate as in released models; with and without padding."""
    stream = Stream.of([[Text(2), Video(9, 1, 2), Text(1)], [Text(4)]], "left")
    result = create_scheme("mrope(after=side)").coordinates(stream, padding=99)
    assert result.next.tolist() == [5, 4]  # inside the time range of the video, 2 to 10
    assert result.delta().tolist() == [[5 - 21], [0]]
    assert result.delta("max").tolist() == [[11 - 21], [0]]
    assert result.delta("time", padded=True).tolist() == [[11 - 21], [4 - 21]]
    slow = create_scheme("videorope(scale=0.25)").coordinates(stream)
    assert slow.ids[:, 0, 19].tolist() == [4.0, 4.0, 5.0]
    assert slow.delta("time").tolist() == [[5 + 1 - 21], [0]]
    odd = create_scheme("mrope(stride=0.3)").coordinates(Stream.of([[Text(1), Video(2, 1, 1)]]))
    torch.testing.assert_close(odd.delta("max"), torch.tensor([[2.3 - 3]], dtype=torch.float64))
    assert odd.delta("ceil").tolist() == [[0.0]]


def test_bapa_is_an_alias():
    for spec in ("bapa", {"name": "bapa"}):
        assert create_scheme(spec) == create_scheme("mousi(share=all)")
    assert scheme_class("bapa") is scheme_class("mousi")
    assert scheme_info("bapa").options == {"share": "all"}
    assert "bapa" not in list_schemes()
    with pytest.raises(
        OptionError, match=r"'bapa' is mousi\(share=all\) and has no options, got share. Use mousi"
    ):
        create_scheme("bapa", share="row")
    with pytest.raises(UnknownName, match="Did you mean 'bapa'"):
        scheme_class("bapas")
    with pytest.raises(UnknownEncoding, match="it is a position scheme"):
        create_encoding("bapa", dim=8, num_heads=1)


@cases(
    "spec",
    ["mrope", "mrope_i", "mmrope", "ernie_vl", "videorope", "hope_vlm", "circlerope", "bilevel", "tmrope"],
)
def test_heads_without_a_pair_for_each_axis_raise(spec):
    with pytest.raises(OptionError, match=r"at least [34] pairs of channels"):
        create_scheme(spec).allocation(2)
