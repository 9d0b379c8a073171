"""Schemes per layer: each layer equals its scheme, text is exact, prompts and single tokens agree, errors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import cases
from tests.multimodal import oracle
from tests.multimodal.schemes.test_oracle import check, quick
from tests.multimodal.strategies import EVERY, batches, shared
from vispe.attention import attention
from vispe.errors import OptionError, ShapeError, UnknownName
from vispe.multimodal import Image, Stream, Text, Video, angles, create_scheme, rotation
from vispe.multimodal.per_layer import PerLayerSchemes, alternating, pyramid

FREQUENCIES = 10_000.0 ** (-torch.arange(8) / 8)


def test_alternating_layers_of_circle_rope():
    """Even layers circle, odd layers plain."""
    layers = alternating(["circlerope(radius=5.0)", "mrope_i"], 5)
    assert layers.of_layer == (0, 1, 0, 1, 0)
    assert [str(layers.scheme(i)) for i in range(5)] == ["circlerope(radius=5.0)", "mrope_i"] * 2 + [
        "circlerope(radius=5.0)"
    ]
    assert layers.text_exact
    assert str(layers) == "circlerope(radius=5.0): layers 0, 2, 4; mrope_i: layers 1, 3"
    assert not alternating(["mrope", "tad_rope"], 2).text_exact


def test_the_centre_of_a_pyramid_grows():
    layers = pyramid(7, rings=3, every=2)
    assert layers.of_layer == (0, 0, 1, 1, 2, 2, 2)
    stream = Stream.of([[Text(2), Image(6, 7), Text(1)]])
    result = layers.coordinates(stream)
    grids = [c.ids[0, 0, 2:-1].view(6, 7) - 2 for c in result]
    sizes = [int((grid == grid.max()).sum()) for grid in grids]
    assert sizes == [6, 20, 42]  # 2 x 3, 4 x 5, all of it
    assert [int(grid.max()) for grid in grids] == [2, 1, 0]
    assert [c.ids[0, 0, -1].item() for c in result] == [5, 4, 3]
    for coarse, fine in zip(grids[1:], grids, strict=False):
        assert torch.equal(coarse, fine.clamp(max=int(coarse.max())))


@quick
@given(data=st.data())
def test_each_layer_equals_its_scheme(data):
    """On random streams, packed or padded, with any initial counters, including decoding."""
    rows = data.draw(batches((*EVERY, shared)))
    stream = Stream.of(rows, data.draw(st.sampled_from(["left", "right"])))
    layers = alternating(["circlerope", {"name": "mrope", "stride": 2.0}, "pype(rings=2)"], 4)
    begin = [[data.draw(st.integers(0, 40)) for _ in rows] for _ in layers.schemes]
    result = layers.coordinates(
        stream, start=[torch.tensor(b, dtype=torch.float64) for b in begin], padding=-1
    )
    for layer in range(4):
        scheme, mine = layers.scheme(layer), result[layers.of_layer[layer]]
        rule = oracle.rule_for(scheme)
        tokens, following = oracle.walk(rule, rows, begin[layers.of_layer[layer]])
        check(scheme.name, mine.ids, oracle.padded(tokens, stream.mask, rule.axes, -1))
        decoded = [[rule.text(f + i) for i in range(2)] for f in following]
        every = torch.ones(len(rows), 2, dtype=torch.bool)
        check(scheme.name, mine.decode(2), oracle.padded(decoded, every, rule.axes))


def test_text_is_exact_in_all_layers():
    layers = alternating(["circlerope", "mrope_i", "vrope", "pype(rings=3)"], 6)
    for length in (5, 700):  # a second size after the first
        plain = torch.arange(length).float()[:, None] * FREQUENCIES
        for scheme, result in zip(
            layers.schemes, layers.coordinates(Stream.of([[Text(length)]])), strict=True
        ):
            assert torch.equal(angles(result.ids, FREQUENCIES, scheme.allocation(8))[0], plain)


@cases("layers", [alternating(["circlerope", "mrope"], 4), pyramid(4, 3, 1)], ids=["alternating", "pyramid"])
def test_decoding_equals_a_longer_prompt(layers):
    """A stack of attention layers with a cache of rotated keys, against one pass without a cache."""
    prompt = [Text(3), Image(5, 6), Text(2), Video(3, 2, 5), Text(2)]
    tokens, decoded = sum(oracle.length_of(s) for s in prompt), 3
    full = layers.coordinates(Stream.of([[*prompt, Text(decoded)]]))
    first = layers.coordinates(Stream.of([prompt]))
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(4, 3, 16, 16, generator=generator, dtype=torch.float64) / 4
    x = torch.randn(1, tokens + decoded, 16, generator=generator, dtype=torch.float64)

    def project(h, w):
        return [(h @ m)[:, None] for m in w]

    expected = x
    for layer, w in enumerate(weights):
        scheme, at = layers.scheme(layer), full[layers.of_layer[layer]]
        rotary = rotation(at.ids, FREQUENCIES, scheme.allocation(8))
        expected = expected + attention(*project(expected, w), transform=rotary, is_causal=True)[:, 0]
    cache = [None] * 4
    pieces = []
    for begin, end in [(0, tokens), *((tokens + i, tokens + i + 1) for i in range(decoded))]:
        h = x[:, begin:end]
        for layer, w in enumerate(weights):
            scheme, at = layers.scheme(layer), first[layers.of_layer[layer]]
            ids = at.ids if begin == 0 else at.decode(decoded)[..., begin - tokens : end - tokens]
            rotary = rotation(ids, FREQUENCIES, scheme.allocation(8))
            q, k, v = project(h, w)
            q, k = rotary.query(q), rotary.key(k)
            if cache[layer] is not None:
                k, v = (torch.cat(pair, 2) for pair in zip(cache[layer], (k, v), strict=True))
            cache[layer] = (k, v)
            h = h + attention(q, k, v, is_causal=begin == 0)[:, 0]
        pieces.append(h)
    torch.testing.assert_close(torch.cat(pieces, 1), expected, rtol=0, atol=1e-9)


def test_continuing_from_counters():
    layers = alternating(["circlerope", "mrope"], 2)
    one, two = [Text(3), Image(4, 5)], [Text(2), Video(2, 3, 3), Text(1)]
    full = layers.coordinates(Stream.of([[*one, *two]]))
    parts = layers.coordinates(Stream.of([one]))
    second = layers.coordinates(Stream.of([two]), start=[c.next for c in parts])
    for a, b, c in zip(parts, second, full, strict=True):
        torch.testing.assert_close(torch.cat([a.ids, b.ids], 2), c.ids, rtol=0, atol=1e-12)
    assert parts[0].next.item() != parts[1].next.item()


def test_draws_are_those_of_the_generator():
    layers = alternating(["v2pe", "hope_vlm"], 2)
    stream = Stream.of([[Text(2), Image(3, 4), Video(3, 2, 2)] * 4])
    one, two = (
        layers.coordinates(stream, training=True, generator=torch.Generator().manual_seed(5)) for _ in "ab"
    )
    fixed = layers.coordinates(stream)
    for a, b, c in zip(one, two, fixed, strict=True):
        assert torch.equal(a.ids, b.ids)
        assert not torch.equal(a.ids, c.ids)


def test_errors():
    with pytest.raises(
        OptionError, match=r"of_layer needs the index of a scheme, 0 to 0.*\[0, 1\] for 1 sch"
    ):
        PerLayerSchemes((create_scheme("mrope"),), (0, 1))
    with pytest.raises(OptionError, match="each scheme a layer"):
        PerLayerSchemes((create_scheme("mrope"), create_scheme("vrope")), (0, 0))
    with pytest.raises(OptionError, match="at most one for each of 1 layer"):
        alternating(["mrope", "vrope"], 1)
    with pytest.raises(OptionError, match=r"a list of schemes.*got 'mrope'"):
        alternating("mrope", 9)
    with pytest.raises(UnknownName, match="no position scheme 'mrop'"):
        alternating(["mrop"], 3)
    with pytest.raises(OptionError, match="every needs an integer above 0, got every=0"):
        pyramid(4, 3, 0)
    layers = alternating(["mrope", "vrope"], 3)
    for wrong in (layers, 3, ["mrope"]):
        with pytest.raises(OptionError, match=r"A position scheme is a name.* got "):
            create_scheme(wrong)
    for layer in (3, -1, 1.5):
        with pytest.raises(OptionError, match="layers 0 to 2, got layer="):
            layers.scheme(layer)
    with pytest.raises(ShapeError, match="counters of each of 2 schemes, got 1"):
        layers.coordinates(Stream.of([[Text(1)]]), start=[torch.zeros(1)])
