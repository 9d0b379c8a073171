"""Allocations against lists, angles against tables of language models and exact products, conversion of layouts."""

import math
from fractions import Fraction

import pytest
import torch

from tests.cases import cases
from vispe.errors import InputError, OptionError, ShapeError
from vispe.multimodal import (
    Image,
    Stream,
    Text,
    Video,
    allocation,
    angles,
    create_scheme,
    rotation,
    tables,
    to_half,
    to_interleaved,
)

ROWS = [[Text(5), Image(3, 4), Text(2), Video(3, 2, 2, 0.5), Text(300)], [Image(2, 5), Text(7)]]
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SCALING = {"default": {"rope_type": "default"}, "linear": LINEAR, "yarn": YARN, "llama3": LLAMA3}
SECTIONS = {"qwen2": None, "qwen2_vl": [4, 6, 6], "qwen3_vl": [8, 4, 4]}
SPEC = {"qwen2": "rope1d", "qwen2_vl": "mrope(sections=[4,6,6])", "qwen3_vl": "mrope_i(sections=[8,4,4])"}


def rotary_of(family, scaling):
    """Return the rotary module of a small model of transformers with heads of 32 channels."""
    pytest.importorskip("transformers")
    from transformers.models.qwen2 import modeling_qwen2 as text
    from transformers.models.qwen2_vl import modeling_qwen2_vl as chunks
    from transformers.models.qwen3_vl import modeling_qwen3_vl as turns

    kinds = {
        "qwen2": (text.Qwen2Config, text.Qwen2RotaryEmbedding),
        "qwen2_vl": (chunks.Qwen2VLTextConfig, chunks.Qwen2VLRotaryEmbedding),
        "qwen3_vl": (turns.Qwen3VLTextConfig, turns.Qwen3VLTextRotaryEmbedding),
    }
    config, module = kinds[family]
    parameters = {"rope_theta": 1e6, **SCALING[scaling]}
    if SECTIONS[family] is not None:
        parameters["mrope_section"] = SECTIONS[family]
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    return module(config(**sizes, max_position_embeddings=2**21, rope_parameters=parameters))


def same_tables(module, scheme, ids, dtype):
    """Check that tables equal those of the module bit for bit."""
    arguments = ids[0] if scheme.axes == 1 else ids
    theirs = module(torch.zeros(1, dtype=dtype), arguments)
    axis = scheme.allocation(16)
    ours = tables(ids, module.inv_freq, axis, module.attention_scaling, dtype)
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine.dtype == expected.dtype == dtype
        assert torch.equal(torch.cat([mine, mine], -1), expected)


@cases("dtype", [torch.float32, torch.bfloat16])
@cases("scaling", SCALING)
@cases("family", SPEC)
def test_bit_equal_to_the_tables_of_language_models(family, scaling, dtype):
    module, scheme = rotary_of(family, scaling), create_scheme(SPEC[family])
    assert (module.attention_scaling != 1) == (scaling == "yarn")
    coordinates = scheme.coordinates(Stream.of(ROWS, "left"))
    same_tables(module, scheme, coordinates.ids, dtype)
    same_tables(module, scheme, coordinates.decode(5), dtype)
    text = torch.cat([torch.arange(600), torch.randint(2**20, (200,))]).expand(scheme.axes, 1, -1)
    same_tables(module, scheme, text.double(), dtype)
    same_tables(module, scheme, text.double().reshape(scheme.axes, 2, -1), dtype)


@cases("dtype", [torch.float32, torch.bfloat16])
@cases("spec", ["mrope", "mrope_i", "mmrope", "videorope", "vrope", "ppe", "circlerope", "v2pe", "pype"])
def test_text_only_equals_a_text_model(spec, dtype):
    module, scheme = rotary_of("qwen2", "default"), create_scheme(spec)
    for side in ("left", "right"):
        stream = Stream.of([[Text(400)], [Text(300)]], side)
        plain = create_scheme("rope1d").coordinates(stream)
        ours = tables(scheme.coordinates(stream).ids, module.inv_freq, scheme.allocation(16), dtype=dtype)
        theirs = module(torch.zeros(1, dtype=dtype), plain.ids[0])
        assert all(torch.equal(torch.cat([a, a], -1), b) for a, b in zip(ours, theirs, strict=True))


def test_heads_with_an_axis_each():
    """Each key head has the table of one coordinate; remaining heads are not rotated."""
    module = rotary_of("qwen2", "default")
    scheme = create_scheme("mhrope(sections=[1,2,1])")
    ids = scheme.coordinates(Stream.of(ROWS)).ids
    cos, sin = tables(ids, module.inv_freq, scheme.allocation(16, kv_heads=5))
    assert cos.shape == (2, 5, ids.shape[2], 16)
    for head, axis in enumerate((0, 1, 1, 2)):
        expected = module(torch.zeros(1), ids[axis])
        assert torch.equal(cos[:, head], expected[0][..., :16])
        assert torch.equal(sin[:, head], expected[1][..., :16])
    assert torch.equal(cos[:, 4], torch.ones_like(cos[:, 4]))
    assert torch.equal(sin[:, 4], torch.zeros_like(sin[:, 4]))


def exact(position, frequency):
    """Return the angle rounded once, from a product of fractions."""
    return torch.tensor(float(Fraction(position) * Fraction(frequency)), dtype=torch.float64)


def test_fractions_are_multiplied_without_rounding_before():
    frequencies = (10000 ** (-torch.arange(0, 16, 2) / 16)).float()
    at = torch.tensor([0.125, 3.3, 257.7, 4097.5, 99999.37, -12.6, 999_999.9], dtype=torch.float64)
    actual = angles(at[None, None], frequencies, allocation.single(8))
    expected = torch.stack([torch.stack([exact(p, f) for f in frequencies.tolist()]) for p in at.tolist()])
    assert actual.dtype == torch.float32
    near = 2.0**-23 * expected.abs()  # one ulp of float32
    assert bool(((actual[0].double() - expected).abs() <= near).all())
    rotated = tables(at[None, None], frequencies, allocation.single(8))
    for mine, function in zip(rotated, (torch.cos, torch.sin), strict=True):  # of an angle known to one unit
        assert bool(((mine[0].double() - function(expected)).abs() <= near + 2.0**-23).all())


def test_positions_to_a_million():
    """Integer positions have the float32 angles of language models, fractions have angles between those."""
    frequencies = (1e6 ** (-torch.arange(0, 32, 2) / 32)).float()
    at = torch.tensor([1e3, 65_537, 131_071, 999_999, 1e6, 2**24 - 1], dtype=torch.float64)
    actual = angles(at[None, None], frequencies, allocation.single(16))[0]
    assert torch.equal(actual, at.float()[:, None] * frequencies)
    beyond = angles((at + 0.25)[None, None], frequencies, allocation.single(16))[0].double()
    expected = (at[:, None] + 0.25) * frequencies.double()
    assert bool(((beyond - expected).abs() <= 2.0**-24 * expected).all())


@cases("dtype", [torch.bfloat16, torch.float16])
def test_positions_are_distinct_in_low_precision(dtype):
    """Neighbours above 256, and neighbours at a distance of 1/4 at 2000, are rotated differently by the fast pairs."""
    frequencies = (10000 ** (-torch.arange(0, 64, 2) / 64)).float()
    stream = Stream.of([[Text(2000), Image(16, 16), Text(50)]])
    ids = create_scheme("v2pe(stride=64)").coordinates(stream).ids
    assert len(ids.unique()) == ids.numel()
    assert len(ids[0, 0, 2000:2256].to(dtype).unique()) < 80  # what a cast of positions would leave of 256
    cos, sin = tables(ids, frequencies, allocation.single(32), dtype=dtype)
    assert cos.dtype == sin.dtype == dtype
    wide = tables(ids, frequencies, allocation.single(32))
    assert torch.equal(cos, wide[0].to(dtype))
    assert torch.equal(sin, wide[1].to(dtype))
    distinct = (torch.cat([cos, sin], -1)[0].diff(dim=0) != 0).any(-1)
    assert bool(distinct.all())


def test_a_shift_of_all_positions_does_not_change_attention():
    frequencies = (10000 ** (-torch.arange(0, 16, 2) / 16)).float()
    scheme = create_scheme("videorope(centre=exact)")
    ids = scheme.coordinates(Stream.of(ROWS[:1])).ids[..., :40]
    q, k = torch.randn(2, 1, 3, 40, 16, dtype=torch.float64)
    scores = []
    for shift in (0.0, 0.5, 1000.25):
        rotated = rotation(ids + shift, frequencies, scheme.allocation(8))
        scores.append(rotated.query(q) @ rotated.key(k).mT)
    torch.testing.assert_close(scores[1], scores[0], rtol=0, atol=1e-4)
    torch.testing.assert_close(scores[2], scores[0], rtol=0, atol=2e-3)  # angles in float32 at 1000


@cases("spec", ["mrope", "mrope_i", "mhrope(sections=[1,1,1])", "vrope", "hope_vlm"])
def test_rotation_in_float64_and_in_both_layouts(spec):
    """Rotate channels pair by pair; interleaved channels equal permuted channels."""
    scheme, pairs, kv_heads, group = create_scheme(spec), 8, 3, 2
    ids = scheme.coordinates(Stream.of([ROWS[1], [Text(3), Image(2, 2)]])).ids
    frequencies = (10000 ** (-torch.arange(pairs) / pairs)).float()
    axis = scheme.allocation(pairs, kv_heads)
    b, s = ids.shape[1:]
    q = torch.randn(b, kv_heads * group, s, 2 * pairs, dtype=torch.float64)
    k = torch.randn(b, kv_heads, s, 2 * pairs, dtype=torch.float64)
    half = rotation(ids, frequencies, axis)
    actual, keys = half.query(q), half.key(k)
    per_head = axis if axis.ndim == 2 else axis.expand(kv_heads, pairs)
    angle_table = angles(ids, frequencies, axis).double()
    expected, wanted_keys = torch.empty_like(q), torch.empty_like(k)
    for head in range(kv_heads * group):
        for pair in range(pairs):
            key_head = head // group
            number = int(per_head[key_head, pair])
            at = torch.zeros(b, s) if number < 0 else ids[number] * frequencies[pair].double()
            mine = angle_table[..., pair] if axis.ndim == 1 else angle_table[:, key_head, :, pair]
            torch.testing.assert_close(mine, at.double(), rtol=2.0**-23, atol=0)
            cos, sin = mine.cos().float().double(), mine.sin().float().double()
            for arguments, out, h in ((q, expected, head), (k, wanted_keys, key_head)):
                x, y = arguments[:, h, :, pair], arguments[:, h, :, pair + pairs]
                out[:, h, :, pair], out[:, h, :, pair + pairs] = cos * x - sin * y, sin * x + cos * y
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)  # cosines of float32 angles
    torch.testing.assert_close(keys, wanted_keys, rtol=0, atol=1e-6)
    other = rotation(ids, frequencies, axis, layout="interleaved")
    torch.testing.assert_close(other.query(to_interleaved(q)), to_interleaved(actual), rtol=0, atol=1e-12)
    torch.testing.assert_close(to_half(other.key(to_interleaved(k))), keys, rtol=0, atol=1e-12)


def test_scaling_multiplies_cosines_and_sines():
    ids = torch.randint(99, (1, 2, 5)).double()
    frequencies = torch.rand(4)
    plain, scaled = (rotation(ids, frequencies, allocation.single(4), s) for s in (1.0, 1.5))
    q = torch.randn(2, 3, 5, 8)
    torch.testing.assert_close(scaled.query(q), 1.5 * plain.query(q))


@cases("layout", ["half", "interleaved"])
def test_gradients(layout):
    """The gradient of a rotation is the inverse rotation of the cotangent."""
    scheme = create_scheme("mrope_i")
    ids = scheme.coordinates(Stream.of(ROWS[1:])).ids
    frequencies = (10000 ** (-torch.arange(8) / 8)).float()
    rotated = rotation(ids, frequencies, scheme.allocation(8), layout=layout)
    inverse = rotation(-ids, frequencies, scheme.allocation(8), layout=layout)
    for apply, undo, heads in ((rotated.query, inverse.query, 4), (rotated.key, inverse.key, 2)):
        x = torch.randn(1, heads, ids.shape[2], 16, dtype=torch.float64, requires_grad=True)
        cotangent = torch.randn_like(x)
        (result,) = torch.autograd.grad(apply(x), x, cotangent)
        torch.testing.assert_close(result, undo(cotangent), rtol=0, atol=1e-12)
    subset = rotation(ids[..., 5:9], frequencies, scheme.allocation(8), layout=layout)
    small = torch.randn(1, 1, 4, 16, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(subset.key, (small,), atol=1e-6)


def test_gradients_reach_coordinates():
    """Learned positions: the derivative of the angle is the frequency."""
    ids = (torch.rand(3, 1, 5, dtype=torch.float64) * 9).requires_grad_()
    frequencies = torch.rand(6)
    axis = allocation.interleaved((2, 2, 2))
    cotangent = torch.randn(1, 5, 6)
    (actual,) = torch.autograd.grad(angles(ids, frequencies, axis), ids, cotangent)
    expected = torch.zeros(3, 1, 5, dtype=torch.float64)
    for pair, number in enumerate(axis.tolist()):
        expected[number] += (cotangent[..., pair] * frequencies[pair]).double()
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@cases("dim", [0, 1, 2, -1, -2, -3])
def test_layouts_convert_both_ways(dim):
    x = torch.randn(6, 10, 4)
    channels, pairs = x.movedim(dim, 0), x.shape[dim] // 2
    order = [i + half * pairs for i in range(pairs) for half in (0, 1)]
    result = to_interleaved(x, dim)
    assert torch.equal(result.movedim(dim, 0), channels[order])
    assert torch.equal(to_half(result, dim), x)
    assert torch.equal(to_interleaved(to_half(x, dim), dim), x)


def test_rows_of_projections():
    """Weights with permuted rows per head give the same result in the other layout."""
    heads, pairs, width = 3, 4, 10
    weight, bias = torch.randn(heads * 2 * pairs, width), torch.randn(heads * 2 * pairs)
    x = torch.randn(2, 5, width)
    ids, frequencies = torch.randint(50, (1, 2, 5)).double(), torch.rand(pairs)

    def scores(weight, bias, layout):
        q = torch.nn.functional.linear(x, weight, bias).unflatten(-1, (heads, -1)).transpose(1, 2)
        rotated = rotation(ids, frequencies, allocation.single(pairs), layout=layout)
        return rotated.query(q) @ rotated.key(q).mT

    permuted = to_interleaved(weight.unflatten(0, (heads, -1)), 1).flatten(0, 1)
    permuted_bias = to_interleaved(bias.unflatten(0, (heads, -1)), 1).flatten()
    assert not torch.equal(permuted, weight)
    torch.testing.assert_close(scores(permuted, permuted_bias, "interleaved"), scores(weight, bias, "half"))


@cases("convert", [to_half, to_interleaved])
def test_channels_come_in_pairs(convert):
    with pytest.raises(ShapeError, match="need an even number of channels, got 5 in dimension 1"):
        convert(torch.zeros(2, 5, 4), 1)


def letters(axis):
    return "".join("thwxyz"[n] if n >= 0 else "0" for n in axis.tolist())


ALLOCATIONS = {
    "rope1d": "t" * 16,
    "mrope": "tttthhhhhhwwwwww",
    "mrope(sections=[2,3,11])": "tthhhwwwwwwwwwww",
    "mrope(sections=[0,16,0])": "h" * 16,
    "mrope_i": "thwthwthwthwthwt",
    "mrope_i(sections=[10,4,2])": "thwthwthtthttttt",
    "omnirope": "tttthhhhhhwwwwww",
    "ernie_vl": "hwhwhwhwhwhwtttt",
    "ilrope": "thwthwthwthwthwt",
    "tmrope": "tttthhhhhhwwwwww",
    "tmrope_i": "thwthwthwthwthwt",
    "mmrope": "tthwhwhwtthwhwhw",
    "videorope": "hwhwhwhwhwhwtttt",
    "videorope(sections=[6,7,3])": "hwhwhwhwhwtttttt",
    "hope_vlm": "hwhwhwhwhwhw0000",
    "circlerope": "tttthhhhhhwwwwww",
    "tad_rope": "t" * 16,
    "v2pe": "t" * 16,
    "rope_dhr": "t" * 16,
    "mousi": "t" * 16,
    "group_pe": "t" * 16,
    "pype": "t" * 16,
    "vrope": "thwx" * 4,
    "ppe(k=1)": "tttthhhhhhwwwwww",
    "ppe(k=2)": "tthhwwwxxxyyyzzz",  # t_1 t_2 h_1 h_2 w_1 w_2 are coordinates 0 to 5
}


@cases("spec", ALLOCATIONS)
def test_axis_of_each_pair(spec):
    axis = create_scheme(spec).allocation(16)
    assert letters(axis) == ALLOCATIONS[spec]
    assert axis.dtype == torch.int64


def test_published_sections():
    """Heads of 128 channels have 64 pairs: 16, 24, 24 in chunks, 24, 20, 20 interleaved, only time at the end."""
    assert letters(create_scheme("mrope").allocation(64)) == "t" * 16 + "h" * 24 + "w" * 24
    assert letters(create_scheme("mrope_i").allocation(64)) == "thw" * 20 + "tttt"
    assert letters(create_scheme("videorope").allocation(64)) == "hw" * 24 + "t" * 16
    assert letters(create_scheme("hope_vlm").allocation(64)) == "hw" * 24 + "0" * 16
    package = letters(create_scheme("videorope(layout=package)").allocation(64))
    assert package == "t" + "hw" * 23 + "h" + "t" * 16
    for few in (1, 2):
        with pytest.raises(OptionError, match=f"a key head for each of time, rows and columns, got {few}"):
            create_scheme("mhrope").allocation(64, few)
    assert [letters(h)[0] for h in create_scheme("mhrope").allocation(64, 4)] == ["t", "t", "h", "w"]
    heads = create_scheme("mhrope").allocation(64, 8)
    assert [set(letters(h)) for h in heads] == [{c} for c in "tthhhwww"]
    assert [letters(h) for h in create_scheme("mhrope(sections=[1,1,1])").allocation(2, 4)] == [
        "tt",
        "hh",
        "ww",
        "00",
    ]


@cases("pairs", [6, 7, 9, 20, 33, 40, 48, 96])
def test_every_axis_has_pairs_at_any_width(pairs):
    for spec in ("mrope", "mrope_i", "mmrope", "videorope", "circlerope", "vrope", "ppe(k=2)", "ppe(k=3)"):
        scheme = create_scheme(spec)
        axis = scheme.allocation(pairs)
        assert axis.shape == (pairs,)
        assert set(axis.tolist()) <= set(range(scheme.axes))
        coarse = {n * 3 // scheme.axes for n in axis.tolist()} if scheme.axes % 3 == 0 else set(axis.tolist())
        assert coarse == set(range(3 if scheme.axes % 3 == 0 else scheme.axes)), spec


WRONG = {
    "mrope(sections=[4,4,4])": r"sections=\[4, 4, 4\] add up to 12, but a head has 16 .* use for example \[4, 6, 6\]",
    "mrope_i(sections=[6,6,6])": r"add up to 18, but a head has 16",
    "videorope(sections=[1,2,3])": r"add up to 6, but a head has 16",
    "hope_vlm(sections=[16,1,1])": r"add up to 18, but a head has 16",
    "circlerope(sections=[5,5,5])": r"add up to 15, but a head has 16",
    "ppe(sections=[5,5,5])": r"add up to 15, but a head has 16",
    "mrope_i(sections=[2,2,12])": r"\[2, 2, 12\] cannot be interleaved: 12 pairs at a distance of 3 .* 16",
}


@cases("spec", WRONG)
def test_sections_that_do_not_fit(spec):
    with pytest.raises(OptionError, match=WRONG[spec]):
        create_scheme(spec).allocation(16)


def test_heads_that_do_not_fit():
    with pytest.raises(OptionError, match=r"\[2, 3, 3\] name 8 key heads, but the model has 4"):
        create_scheme("mhrope(sections=[2,3,3])").allocation(16, 4)
    with pytest.raises(OptionError, match=r"vrope needs at least 4 pairs .* got 3 per head"):
        create_scheme("vrope").allocation(3)


def test_angles_errors():
    ids = torch.zeros(3, 1, 4, dtype=torch.float64)
    with pytest.raises(ShapeError, match="has 8 pairs of channels, but there are 6 frequencies"):
        angles(ids, torch.ones(6), create_scheme("mrope").allocation(8))
    with pytest.raises(ShapeError, match="refers to axis 3, but the coordinates have 3 axes"):
        angles(ids, torch.ones(8), create_scheme("vrope").allocation(8))


def test_zero_is_no_rotation_and_does_not_read_coordinates():
    ids = torch.full((1, 1, 3), math.pi, dtype=torch.float64)
    cos, sin = tables(ids, torch.ones(2), torch.tensor([allocation.ZERO, 0]))
    assert cos[0, :, 0].tolist() == [1, 1, 1]
    assert sin[0, :, 0].tolist() == [0, 0, 0]
    assert cos[0, :, 1].tolist() == pytest.approx([-1, -1, -1])


@cases("dtype", [torch.float16, torch.bfloat16, torch.bool, torch.complex64])
def test_rounded_positions_raise(dtype):
    ids, scheme = torch.ones(3, 1, 2, dtype=dtype), create_scheme("mrope")
    for function in (angles, tables, rotation):
        with pytest.raises(InputError, match=f"ids needs integers, float32 or float64, got {dtype}"):
            function(ids, torch.ones(16), scheme.allocation(16))
    with pytest.raises(InputError, match="start needs integers, float32 or float64"):
        scheme.coordinates(Stream.of([[Text(2)]]), start=torch.ones(1, dtype=dtype))


def test_a_start_that_is_not_a_tensor_raises():
    with pytest.raises(InputError, match="start needs a tensor, got int"):
        create_scheme("mrope").coordinates(Stream.of([[Text(2)]]), start=3)
