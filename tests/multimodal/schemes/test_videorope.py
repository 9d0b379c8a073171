"""VideoRoPE, HoPE and TAD-RoPE: layouts, worked examples, draws, decoding, gradients."""

import math

import pytest
import torch

from tests.cases import cases
from vispe.errors import OptionError, ShapeError
from vispe.grid.frequencies import inverse_frequencies
from vispe.multimodal import Image, Stream, Text, Video, create_scheme, rotation, tables
from vispe.multimodal.allocation import ZERO

ROW = [Text(3), Image(3, 5), Text(2), Video(3, 4, 3), Text(4)]
OTHER = [Video(2, 2, 7, seconds=0.5), Text(1), Image(1, 1), Text(2)]
DIAGONAL = ("videorope", "hope_vlm")


def ids(scheme, *rows, **kwargs):
    return create_scheme(scheme).coordinates(Stream.of(rows), **kwargs).ids


def rows_of(result, axis, row=0):
    return result[axis, row].tolist()


def test_worked_example_of_videorope():
    """Three text tokens and a marker, then three frames of 3 x 4 at intervals of two steps, then a marker."""
    result = ids("videorope", [Text(4), Video(3, 3, 4), Text(1)])
    assert rows_of(result, 0) == [0, 1, 2, 3] + [4] * 12 + [6] * 12 + [8] * 12 + [9]
    first = [3] * 4 + [4] * 4 + [5] * 4
    assert rows_of(result, 1)[4:40] == first + [h + 2 for h in first] + [h + 4 for h in first]
    assert rows_of(result, 2)[4:40] == [3, 4, 5, 6] * 3 + [5, 6, 7, 8] * 3 + [7, 8, 9, 10] * 3
    assert result[:, 0, -1].tolist() == [9, 9, 9]


def test_worked_example_of_hope():
    """A marker, five frames of 2 x 3 at three quarters of a step, a marker."""
    result = ids("hope_vlm(scale=0.75)", [Text(1), Video(5, 2, 3), Text(1)])
    assert rows_of(result, 0) == [0] + [1 + 0.75 * f for f in range(5) for _ in range(6)] + [5]
    assert rows_of(result, 1)[1:13] == [1, 1, 1, 2, 2, 2, 1.75, 1.75, 1.75, 2.75, 2.75, 2.75]
    assert rows_of(result, 2)[1:13] == [0, 1, 2, 0, 1, 2, 0.75, 1.75, 2.75, 0.75, 1.75, 2.75]


def test_worked_example_of_tad_rope():
    result = create_scheme("tad_rope").coordinates(
        Stream.of([[Text(2), Video(2, 1, 3), Text(2), Image(1, 2), Text(1)]])
    )
    assert result.ids.tolist() == [[[0, 2, 4, 5, 6, 8, 9, 10, 12, 14, 16, 17, 19]]]
    assert result.decode(2).tolist() == [[[21, 23]]]
    assert 2 * 13 + result.delta().item() == 21


@cases(
    ("sections", "axes"),
    [
        ((16, 24, 24), "hw" * 24 + "t" * 16),
        ((4, 6, 6), "hwhwhwhwhwhwtttt"),
        ((1, 4, 3), "hwhwhwht"),
        ((0, 2, 2), "hwhw"),
        ((2, 0, 0), "tt"),
        ((1, 1, 0), "ht"),
    ],
)
def test_time_has_the_lowest_frequencies(sections, axes):
    pairs = sum(sections)
    assert "".join("thw"[a] for a in create_scheme("videorope", sections=sections).allocation(pairs)) == axes
    allocation = create_scheme("hope_vlm", sections=sections).allocation(pairs)
    assert "".join({ZERO: "t", 1: "h", 2: "w"}[int(a)] for a in allocation) == axes


@cases(
    ("sections", "axes"),
    [
        ((16, 24, 24), "t" + "hw" * 23 + "h" + "t" * 16),
        ((4, 6, 6), "thwhwhwhwhwhtttt"),
        ((2, 3, 5), "thwhwhwtwt"),
        ((2, 0, 0), "tt"),
    ],
)
def test_the_layout_of_the_package_is_one_pair_alongside(sections, axes):
    options = {"sections": sections, "layout": "package"}
    assert "".join("thw"[a] for a in create_scheme("videorope", **options).allocation(len(axes))) == axes
    allocation = create_scheme("hope_vlm", **options).allocation(len(axes))
    assert (allocation == ZERO).tolist() == [a == "t" for a in axes]


def test_shares_of_axes_by_default():
    axis = create_scheme("videorope").allocation(64)
    assert [(axis == a).sum().item() for a in range(3)] == [16, 24, 24]
    assert axis[0] == 1
    assert axis[-1] == 0


@cases("pairs", [8, 16, 64])
@cases("layout", ["paper", "package"])
def test_text_only_equals_plain_rotary_embedding(pairs, layout):
    """Bit for bit, also far from the start and with padding on either side; HoPE reports that it differs."""
    freqs = inverse_frequencies(2 * pairs, 1e6)
    plain = torch.arange(700, 900).float()[:, None] * freqs
    for padding in ("left", "right"):
        stream = Stream.of([[Text(200)], [Text(7)]], padding=padding)
        for name in DIAGONAL:
            scheme = create_scheme(name, layout=layout)
            result = scheme.coordinates(stream, start=torch.tensor([700, 700]))
            cos, sin = tables(result.ids, freqs, scheme.allocation(pairs))
            assert cos.dtype == torch.float32
            moving = scheme.allocation(pairs) != ZERO
            for row, n in ((0, 200), (1, 7)):
                valid = stream.mask[row]
                assert torch.equal(cos[row, valid][:, moving], plain[:n].cos()[:, moving])
                assert torch.equal(sin[row, valid][:, moving], plain[:n].sin()[:, moving])
            assert scheme.text_exact is bool(moving.all()) is (name == "videorope")
    assert not create_scheme("tad_rope").text_exact


@cases("centre", ["floor", "exact"])
@cases("name", DIAGONAL)
@cases("size", [(1, 1), (3, 5), (5, 3), (7, 1)])
def test_the_middle_of_odd_frames_is_on_the_diagonal(size, name, centre):
    h, w = size
    result = create_scheme(name, centre=centre, scale=1.25).coordinates(
        Stream.of([[Text(9), Video(3, h, w)]])
    )
    frames = result.ids[:, 0, 9:].reshape(3, 3, h, w)
    middle = frames[:, :, h // 2, w // 2]
    assert torch.equal(middle, (9 + 1.25 * torch.arange(3).double()).expand(3, 3))
    mirrored = frames[1:].flip(2, 3)
    assert torch.equal(frames[1:] - middle[1:, :, None, None], middle[1:, :, None, None] - mirrored)


def test_the_middle_of_even_frames():
    row = [Text(4), Image(2, 4)]
    floor, exact = (ids(f"videorope(centre={c})", row)[:, 0, 4:] for c in ("floor", "exact"))
    assert floor[1:].tolist() == [[4] * 4 + [5] * 4, [3, 4, 5, 6] * 2]
    assert exact[1:].tolist() == [[3.5] * 4 + [4.5] * 4, [2.5, 3.5, 4.5, 5.5] * 2]
    assert exact.mean(1).tolist() == [4, 4, 4]


@cases("name", DIAGONAL)
@cases("centre", ["floor", "exact"])
def test_an_image_is_the_centred_grid_whatever_the_scale(name, centre):
    row = [Text(2), Image(4, 3), Text(2)]
    result = [ids(f"{name}(scale={scale},centre={centre})", row) for scale in (0.5, 3)]
    assert torch.equal(*result)
    assert torch.equal(result[0], ids(f"{name}(centre={centre})", [Text(2), Video(1, 4, 3), Text(2)]))
    y, x = torch.meshgrid(torch.arange(4.0), torch.arange(3.0), indexing="ij")
    middle = (1, 1) if centre == "floor" else (1.5, 1)
    grid = torch.stack([torch.zeros(4, 3), y - middle[0], x - middle[1]]).double().flatten(1) + 2
    assert torch.equal(result[0][:, 0, 2:14], grid)


def test_negative_coordinates_are_preserved():
    result = ids("videorope", [Image(5, 7), Text(1)])
    assert result[:, 0].amin(1).tolist() == [0, -2, -3]
    assert result[:, 0, -1].tolist() == [1, 1, 1]


@cases("centre", ["floor", "exact"])
@cases("name", DIAGONAL)
@cases("size", [(1, 1, 1), (3, 2, 5), (1, 6, 3), (4, 1, 2)])
def test_text_continues_after_time_or_after_all_coordinates(size, name, centre):
    for after in ("time", "max"):
        scheme = create_scheme(name, after=after, centre=centre, scale=1.5)
        result = scheme.coordinates(Stream.of([[Text(3), Video(*size), Text(2)]]))
        block = result.ids[:, 0, 3:-2]
        end = block[0].max() if after == "time" else block.max()
        assert torch.equal(result.ids[:, 0, -2:], (end + torch.tensor([1.0, 2.0])).expand(3, 2))
    assert (result.ids[:, 0, -2] > block.amax(1)).all()


def test_seconds_between_frames():
    rows = [[Video(3, 1, 1, seconds=0.25), Text(1), Video(2, 1, 1), Text(1), Image(1, 1)]]
    result = ids("videorope(tokens_per_second=2,scale=4)", *rows)
    assert rows_of(result, 0) == [0, 0.5, 1, 2, 3, 7, 8, 9]
    assert torch.equal(result, ids("hope_vlm(tokens_per_second=2,scale=4)", *rows))


@cases("name", [*DIAGONAL, "tad_rope"])
def test_padding_and_other_samples_have_no_effect(name):
    """Equal with padding on either side, separately, in a batch, packed, in a longer batch, and in a second call."""
    scheme = create_scheme(name)
    single = [scheme.coordinates(Stream.of([r])).ids[:, 0] for r in (ROW, OTHER)]
    for padding in ("left", "right"):
        for length in (None, 200):
            stream = Stream.of([ROW, OTHER], padding, length)
            for _ in range(2):
                result = scheme.coordinates(stream, padding=-3)
                for row in range(2):
                    assert torch.equal(result.ids[:, row, stream.mask[row]], single[row])
                assert (result.ids.movedim(0, -1)[~stream.mask] == -3).all()
    packed = scheme.coordinates(Stream.of([[ROW, OTHER]])).ids[:, 0]
    assert torch.equal(packed, torch.cat(single, 1))


@cases("spec", ["videorope(scale=0.75)", "hope_vlm(scale=1.25,after=max)", "tad_rope"])
def test_decoding_continues_the_text(spec):
    """Decoded coordinates, at once and in parts, equal those of a longer prompt."""
    scheme = create_scheme(spec)
    full = scheme.coordinates(Stream.of([[*ROW, Text(6)]]))
    first = scheme.coordinates(Stream.of([ROW]))
    n = first.ids.shape[-1]
    assert torch.equal(first.ids, full.ids[..., :n])
    assert torch.equal(first.decode(6), full.ids[..., n:])
    assert torch.equal(first.next, full.ids[0, :, n - 1] + scheme.step)
    head = scheme.coordinates(Stream.of([ROW[:3]]))
    tail = scheme.coordinates(Stream.of([ROW[3:]]), start=head.next)
    assert torch.equal(torch.cat([head.ids, tail.ids], -1), first.ids)
    assert torch.equal(tail.next, first.next)
    for coordinates in (full, first):
        number = coordinates.mask.sum() * scheme.step
        assert torch.equal(number + coordinates.delta()[0], coordinates.next)


def test_hope_does_not_rotate_its_last_channels():
    """Cosine 1 and sine 0 for text and images; these channels of queries and keys are unchanged bit for bit."""
    scheme = create_scheme("hope_vlm(sections=[4,6,6],scale=0.75)")
    result = scheme.coordinates(Stream.of([ROW, OTHER], "left"))
    axis, freqs = scheme.allocation(16), inverse_frequencies(32, 1e4)
    cos, sin = tables(result.ids, freqs, axis)
    assert (cos[..., 12:] == 1).all()
    assert (sin[..., 12:] == 0).all()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, result.ids.shape[-1], 32, generator=generator)
    rotated = rotation(result.ids, freqs, axis).query(x)
    for part in (slice(12, 16), slice(28, 32)):
        assert torch.equal(rotated[..., part], x[..., part])
    assert ((rotated - x).abs().amax((0, 1, 2))[:12] > 0).all()
    video = create_scheme("videorope(sections=[4,6,6],scale=0.75)")
    other = tables(video.coordinates(Stream.of([ROW, OTHER], "left")).ids, freqs, video.allocation(16))
    assert torch.equal(cos[..., :12], other[0][..., :12])
    assert torch.equal(sin[..., :12], other[1][..., :12])


def scales_of(result):
    """Return the scale of each image."""
    return result.draws[Stream.of([ROW, OTHER, ROW]).blocks.visual].tolist()


def test_hope_draws_one_scale_for_each_image_in_order():
    scheme, stream = create_scheme("hope_vlm"), Stream.of([ROW, OTHER, ROW])
    actual = scheme.coordinates(stream, training=True, generator=torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(3)
    expected = torch.tensor(scheme.train_scales)[torch.randint(5, (6,), generator=generator)]
    assert scales_of(actual) == expected.tolist()
    assert len(set(expected.tolist())) > 1
    with_text = Stream.of([[Text(1), *ROW, Text(9)], OTHER, ROW], "left")  # text and padding draw nothing
    replayed = scheme.coordinates(with_text, training=True, generator=torch.Generator().manual_seed(3))
    assert replayed.draws[with_text.blocks.visual].tolist() == expected.tolist()
    for row, scale in ((0, expected[1]), (2, expected[5])):
        times = actual.ids[0, row, 20:56].reshape(3, 12)
        assert torch.equal(times, (6 + scale.double() * torch.arange(3))[:, None].expand(3, 12))


def test_hope_uses_the_passed_generator_only():
    scheme, stream = create_scheme("hope_vlm"), Stream.of([ROW, OTHER, ROW])
    generator, before = torch.Generator().manual_seed(0), torch.get_rng_state()
    scales = [scales_of(scheme.coordinates(stream, training=True, generator=generator)) for _ in range(30)]
    assert torch.equal(torch.get_rng_state(), before)
    assert {s for d in scales for s in d} == set(scheme.train_scales)
    assert len({tuple(d) for d in scales}) > 20
    scheme.coordinates(stream, training=True)
    assert not torch.equal(torch.get_rng_state(), before)


def test_hope_replays_draws():
    scheme, stream = create_scheme("hope_vlm(train_scales=[0.5,1.5])"), Stream.of([ROW, OTHER, ROW])
    result = scheme.coordinates(stream, training=True, generator=torch.Generator().manual_seed(1))
    replayed = scheme.coordinates(stream, training=True, draws=result.draws)
    assert torch.equal(result.ids, replayed.ids)
    assert torch.equal(result.next, replayed.next)
    with pytest.raises(ShapeError, match="one value for each of 14 blocks, got \\(6,\\)"):
        scheme.coordinates(stream, draws=torch.ones(6))


@cases("name", [*DIAGONAL, "tad_rope"])
def test_no_draws_without_randomness(name):
    scheme, stream, before = create_scheme(name), Stream.of([ROW, OTHER]), torch.get_rng_state()
    result = scheme.coordinates(stream, training=name != "hope_vlm")
    assert result.draws is None
    assert torch.equal(torch.get_rng_state(), before)


def test_the_scale_changes_videos_only():
    scheme, stream = create_scheme("hope_vlm"), Stream.of([[Text(2), Image(3, 2), Text(3)], ROW])
    ones, halves = (scheme.coordinates(stream, draws=torch.full((8,), s)) for s in (1.0, 0.5))
    assert torch.equal(ones.ids[:, 0], halves.ids[:, 0])
    assert torch.equal(ones.ids[:, 1, :32], halves.ids[:, 1, :32])  # up to the second frame
    assert (ones.ids[0, 1, 32:] > halves.ids[0, 1, 32:]).all()
    assert (ones.next - halves.next).tolist() == [0, 1]


@cases("spec", ["videorope", "hope_vlm(scale=0.75)", "videorope(layout=package)", "tad_rope"])
@cases("heads", [(2, 1), (6, 3)])
@cases("layout", ["half", "interleaved"])
def test_gradients_of_rotated_queries_and_keys(spec, heads, layout):
    """Full tensors against complex numbers in float64; gradients are rotated by the negative angle."""
    scheme, generator = create_scheme(spec), torch.Generator().manual_seed(5)
    actual = scheme.coordinates(Stream.of([ROW, OTHER], "left"))
    freqs, axis = inverse_frequencies(16, 1e4), scheme.allocation(8)
    rotary = rotation(actual.ids, freqs, axis, layout=layout)
    angle = torch.zeros(*actual.mask.shape, 8, dtype=torch.float64)
    for pair, a in enumerate(axis.tolist()):
        if a != ZERO:
            angle[..., pair] = actual.ids[a] * freqs[pair].double()
    for method, h in zip((rotary.query, rotary.key), heads, strict=True):
        x, cotangent = (torch.randn(2, h, actual.mask.shape[1], 16, generator=generator) for _ in range(2))
        x.requires_grad_()
        y = method(x)
        (grad,) = torch.autograd.grad(y, x, cotangent)
        for tensor, value, sign in ((y, x.detach(), 1), (grad, cotangent, -1)):
            expected = rotated(value.double(), sign * angle[:, None], layout)
            torch.testing.assert_close(tensor.double(), expected, rtol=0, atol=2e-5)


def rotated(x, angle, layout):
    """Rotate by complex multiplication."""
    shape = (2, 8) if layout == "half" else (8, 2)
    parts = x.unflatten(-1, shape)
    parts = parts.movedim(-2, -1) if layout == "half" else parts
    out = torch.view_as_real(
        torch.view_as_complex(parts.contiguous()) * torch.polar(torch.ones_like(angle), angle)
    )
    return (out.movedim(-1, -2) if layout == "half" else out).flatten(-2)


def test_scores_depend_on_distances_only():
    """Shifting a sequence does not change the scores between its tokens."""
    scheme, generator = create_scheme("videorope"), torch.Generator().manual_seed(2)
    freqs, axis = inverse_frequencies(32, 1e4).double(), scheme.allocation(16)
    q, k = (torch.randn(1, 1, 60, 32, dtype=torch.float64, generator=generator) for _ in range(2))
    scores = []
    for start in (0, 1000):
        result = scheme.coordinates(Stream.of([ROW]), start=torch.tensor([start]))
        rotary = rotation(result.ids, freqs, axis)
        scores.append(rotary.query(q) @ rotary.key(k).mT)
    torch.testing.assert_close(*scores, rtol=0, atol=math.sqrt(32) * 2e-3)  # tables are in float32


@cases(
    ("spec", "message"),
    [
        ("videorope(scale=0)", "videorope: scale needs a number above 0, got scale=0"),
        (
            "videorope(sections=[1,2])",
            r"videorope: sections needs a list of 3 integers of 0 or more, got sections=\(1, 2\)",
        ),
        ("videorope(centre=middle)", "centre must be one of floor, exact, got 'middle'"),
        ("videorope(after=side)", "after must be one of time, max, got 'side'"),
        ("videorope(layout=half)", "layout must be one of paper, package, got 'half'"),
        (
            "videorope(tokens_per_second=-1)",
            "videorope: tokens_per_second needs a number above 0, got tokens_per_second=-1",
        ),
        ("videorope(train_scales=[1])", "'videorope' has no option 'train_scales'"),
        (
            "hope_vlm(train_scales=[])",
            "train_scales needs a list of 1 or more numbers above 0, got train_scales=",
        ),
        (
            "hope_vlm(train_scales=[1,-1])",
            "train_scales needs a list of 1 or more numbers above 0, got train_scales=",
        ),
        (
            "hope_vlm(train_scales=2)",
            "hope_vlm: train_scales needs a list of 1 or more numbers above 0, got train_scales=2",
        ),
        ("tad_rope(scale=2)", "'tad_rope' has no option 'scale'"),
    ],
)
def test_options_are_checked(spec, message):
    with pytest.raises(OptionError, match=message):
        create_scheme(spec)


def test_sections_must_fill_a_head():
    with pytest.raises(OptionError, match="add up to 64, but a head has 32 pairs"):
        create_scheme("videorope(sections=[16,24,24])").allocation(32)


@cases("spec", ["videorope(sections=[4,6,6],scale=1.5,layout=package)", "hope_vlm(train_scales=[1,2])"])
def test_specs_round_trip(spec):
    assert create_scheme(str(create_scheme(spec))) == create_scheme(spec)
