"""Circle-RoPE, and the schemes that count rows and columns of every image from 0."""

import math

import pytest
import torch

from tests.cases import cases
from vispe.errors import OptionError
from vispe.grid.frequencies import inverse_frequencies
from vispe.multimodal import Image, Stream, Text, Video, create_scheme, rotation, tables

ROW = [Text(3), Image(3, 5), Text(2), Video(3, 4, 3), Text(4)]
OTHER = [Video(2, 2, 7), Text(1), Image(1, 1), Text(2)]
SIZES = [(1, 1), (1, 6), (5, 1), (2, 2), (4, 7), (5, 3)]
RESET = {"omnirope": "mrope", "ilrope": "mrope_i"}


def points(spec, h, w, start=0.0):
    """Return the coordinates of one image (3, h w), less the counter at its start."""
    result = create_scheme(spec).coordinates(Stream.of([[Image(h, w)]]), start=torch.tensor([start]))
    return result.ids[:, 0] - start


def distance_to_text(p):
    """Return the distance of points from the line of all (c, c, c)."""
    return (p - p.mean(0)).norm(dim=0)


@cases("size", SIZES)
@cases("radius", [10, 0.5, 3.25])
@cases("alpha", [0, 0.3, 1])
def test_all_patches_are_equally_far_from_every_text_token(size, radius, alpha):
    result = points(f"circlerope(radius={radius},alpha={alpha})", *size, start=7.0)
    torch.testing.assert_close(
        distance_to_text(result), torch.full((size[0] * size[1],), float(radius)).double()
    )
    torch.testing.assert_close(result.sum(0), torch.zeros(size[0] * size[1]).double(), rtol=0, atol=1e-12)
    for text in (-50.0, 0.0, 50.0):
        far = (result - text).norm(dim=0)
        torch.testing.assert_close(far, far[:1].expand_as(far))


@cases("size", SIZES)
def test_patches_are_equally_spaced_in_raster_order_without_directions(size):
    """Patch k of n is k / n of a full rotation from the first, which has the largest coordinate of rows."""
    n = size[0] * size[1]
    result = points("circlerope(alpha=0,radius=2)", *size)
    torch.testing.assert_close(
        result[:, 0], torch.tensor([0, math.sqrt(2), -math.sqrt(2)], dtype=torch.float64)
    )
    cosines = result[:, 0] @ result / 4
    torch.testing.assert_close(cosines, (torch.arange(n).double() / n * 2 * math.pi).cos())
    if n > 2:
        assert result[0, 1] > 0  # time first goes up
        assert torch.unique(result.round(decimals=9), dim=1).shape[1] == n


def test_directions_only_map_equal_directions_to_one_point():
    """The smallest and the largest direction are the start and the end of the full rotation."""
    result = points("circlerope(alpha=1)", 4, 7)
    gaps = (result[:, :, None] - result[:, None]).norm(dim=0) + torch.eye(28)
    assert gaps.min() < 1e-9
    mixed = points("circlerope(alpha=0.5)", 4, 7)
    assert ((mixed[:, :, None] - mixed[:, None]).norm(dim=0) + torch.eye(28)).min() > 1e-3


def test_directions_of_two_by_two_patches():
    """Of 2 x 2 patches: -135, -45, 135 and 45 degrees, stretched to 0, 120, 360 and 240."""
    result = points("circlerope(alpha=1,radius=6)", 2, 2)
    cosines = result[:, :1].T @ result / 36
    torch.testing.assert_close(cosines[0], torch.tensor([1, -0.5, 1, -0.5], dtype=torch.float64))
    assert result[0, 1] > 0 > result[0, 3]


def test_directions_from_the_first_patch():
    """Of 2 x 2 patches: 0 (of the patch itself), 0, 90 and 45 degrees, stretched to 0, 0, 360 and 180."""
    result = points("circlerope(alpha=1,radius=6,move_to_origin=false)", 2, 2)
    torch.testing.assert_close(
        (result[:, :1].T @ result / 36)[0], torch.tensor([1, 1, 1, -1], dtype=torch.float64)
    )


@cases("size", SIZES)
@cases("origin", ["true", "false"])
def test_the_projected_grid_has_the_distances_of_the_grid(size, origin):
    h, w = size
    result = points(f"circlerope(blend=1,move_to_origin={origin})", h, w)
    torch.testing.assert_close(result.sum(0), torch.zeros(h * w).double(), rtol=0, atol=1e-12)
    y, x = torch.meshgrid(torch.arange(h).double(), torch.arange(w).double(), indexing="ij")
    flat = torch.stack([y.flatten(), x.flatten()])
    gaps = [(p[:, :, None] - p[:, None]).norm(dim=0) for p in (result, flat)]
    torch.testing.assert_close(*gaps)
    if origin == "true":
        torch.testing.assert_close(result.mean(1), torch.zeros(3).double(), rtol=0, atol=1e-12)
    else:
        torch.testing.assert_close(result[:, 0], torch.zeros(3).double(), rtol=0, atol=1e-12)


@cases("blend", [0.25, 0.6])
def test_blends_are_between_the_circle_and_the_grid(blend):
    circle, grid, mixed = (points(f"circlerope(blend={b})", 4, 7) for b in (0, 1, blend))
    torch.testing.assert_close(mixed, (1 - blend) * circle + blend * grid)


def test_a_radius_that_grows_with_the_grid():
    """Half the longer side, less half a patch; the full side where directions start at the first patch."""
    for h, w in SIZES[1:]:
        result = points("circlerope(radius=2,relative=true)", h, w)
        assert distance_to_text(result).max().item() == pytest.approx(max(h, w) - 1)
        result = points("circlerope(radius=2,relative=true,move_to_origin=false)", h, w)
        assert distance_to_text(result).max().item() == pytest.approx(2 * (max(h, w) - 1))
    assert points("circlerope(relative=true)", 1, 1).tolist() == [[0], [0], [0]]


@cases("offset", [0, 2.5])
def test_images_with_an_offset(offset):
    low, offset_points = points("circlerope", 4, 7), points(f"circlerope(offset={offset})", 4, 7)
    torch.testing.assert_close(offset_points - low, (-low.min() + offset).expand(3, 28))
    assert offset_points.min().item() == pytest.approx(offset)
    assert -10 * math.sqrt(2 / 3) <= low.min() < -7


@cases("options", ["", "(offset=0,stride=1.5)", "(alpha=-1,radius=-1,move_to_origin=false)"])
def test_text_continues_one_step_after_the_largest_coordinate(options):
    scheme = create_scheme(f"circlerope{options}")
    stream = Stream.of([[Text(4), Image(4, 7), Text(2), Video(2, 3, 3), Text(2)]])
    result = scheme.coordinates(stream).ids[:, 0]
    for first, last in ((4, 32), (34, 52)):
        after = result[:, first:last].max() + 1
        torch.testing.assert_close(
            result[:, last : last + 2], (after + torch.arange(2).double()).expand(3, 2)
        )
    assert result[0, 32].item() % 1 != 0


@cases("options", ["radius=10", "radius=3,blend=0.3,offset=0", "alpha=1,relative=true"])
def test_points_in_the_precision_of_the_authors_code(options):
    """About a millionth of their size from those in float64; text before the first image is equal."""
    near, exact = (
        create_scheme(f"circlerope({options},precision={p})").coordinates(
            Stream.of([ROW]), start=torch.tensor([0.1])
        )
        for p in ("float32", "float64")
    )
    assert near.ids.dtype == near.next.dtype == torch.float64
    assert not torch.equal(near.ids, exact.ids)
    torch.testing.assert_close(near.ids, exact.ids, rtol=0, atol=2e-5)
    assert torch.equal(near.ids[..., :3], exact.ids[..., :3])


# without trigonometric functions, whose last bit depends on the number of points
@cases("options", ["", ",offset=0", ",move_to_origin=false"])
def test_sums_in_the_precision_of_the_authors_code(options):
    """Each sum of the counter is rounded to float32: points plus the text before them, plus where that text starts."""
    options = f"blend=1{options}"
    spec = f"circlerope({options},precision=float32)"
    row = [
        Text(3),
        Image(3, 5),
        Text(2),
        Text(3),
        Video(1, 4, 3),
        Image(2, 2),
        Text(11),
        Image(6, 7),
        Text(4),
    ]
    expected, start, text = [], torch.tensor(0.0), 0
    for segment in row:
        if isinstance(segment, Text):
            expected.append((torch.arange(text, text + segment.tokens) + start).expand(3, -1))
            text += segment.tokens
        else:
            expected.append(points(spec, segment.h, segment.w).float() + text + start)
            start, text = expected[-1].max() + 1, 0
    short = [Text(2), Image(3, 3), Text(1)]
    result = create_scheme(spec).coordinates(Stream.of([short, row], "left"))
    assert torch.equal(result.ids[:, 1].float(), torch.cat(expected, 1))
    assert torch.equal(result.next[1].float(), (start + text).float())


def test_float32_points_of_an_image_do_not_depend_on_the_other_images_of_the_batch():
    scheme = create_scheme("circlerope(precision=float32)")
    sizes = [(3, 3), (4, 2), (1, 3), (4, 1), (3, 4), (5, 7), (2, 6), (7, 3)]
    together = scheme.coordinates(Stream.of([[Image(*size)] for size in sizes])).ids
    for row, size in enumerate(sizes):
        single = scheme.coordinates(Stream.of([[Image(*size)]])).ids[:, 0]
        assert torch.equal(together[:, row, : single.shape[1]], single)


def test_a_counter_in_float32_continues_and_restarts():
    """Packed samples and a continued row have the coordinates of separate samples."""
    scheme = create_scheme("circlerope(blend=1,precision=float32)")
    single = [scheme.coordinates(Stream.of([row])) for row in (ROW, OTHER)]
    packed = scheme.coordinates(Stream.of([[ROW, OTHER]]))
    assert torch.equal(packed.ids.float(), torch.cat([a.ids for a in single], -1).float())
    head = scheme.coordinates(Stream.of([ROW[:2]]))
    tail = scheme.coordinates(Stream.of([ROW[2:]]), start=head.next)
    assert torch.equal(torch.cat([head.ids, tail.ids], -1).float(), single[0].ids.float())


def test_frames_are_parallel_circles():
    spec = "circlerope(stride=1.5)"
    result = create_scheme(spec).coordinates(Stream.of([[Text(2), Video(3, 3, 4), Text(1)]]))
    frames = result.ids[:, 0, 2:38].reshape(3, 3, 12)
    for f in range(3):
        torch.testing.assert_close(frames[:, f], points(spec, 3, 4) + 2 + 1.5 * f)
    assert result.next.item() == pytest.approx(frames.max().item() + 2)


@cases("spec", ["circlerope", "circlerope(blend=0.3,relative=true)", "ilrope", "omnirope(text_axes=time)"])
def test_padding_and_other_samples_have_no_effect(spec):
    """Equal with padding on either side, separately, in a batch with other sizes, packed, and in a second call."""
    scheme = create_scheme(spec)
    single = [scheme.coordinates(Stream.of([r])).ids[:, 0] for r in (ROW, OTHER)]
    for padding in ("left", "right"):
        stream = Stream.of([ROW, OTHER], padding, 70)
        for _ in range(2):
            result = scheme.coordinates(stream, padding=1)
            for row in range(2):
                torch.testing.assert_close(
                    result.ids[:, row, stream.mask[row]], single[row], rtol=0, atol=1e-12
                )
            assert (result.ids.movedim(0, -1)[~stream.mask] == 1).all()
    packed = scheme.coordinates(Stream.of([[ROW, OTHER]])).ids[:, 0]
    torch.testing.assert_close(packed, torch.cat(single, 1), rtol=0, atol=1e-12)


@cases("spec", ["circlerope", "circlerope(offset=1)", "ilrope(stride=1.5)", "omnirope(text_axes=time)"])
def test_decoding_continues_the_text(spec):
    scheme = create_scheme(spec)
    full = scheme.coordinates(Stream.of([[*ROW, Text(6)]]))
    first = scheme.coordinates(Stream.of([ROW]))
    n = first.ids.shape[-1]
    assert torch.equal(first.ids, full.ids[..., :n])
    torch.testing.assert_close(first.decode(6), full.ids[..., n:], rtol=0, atol=1e-12)
    assert first.next.item() == pytest.approx(full.ids[0, 0, n - 1].item() + 1)
    head = scheme.coordinates(Stream.of([ROW[:3]]))
    tail = scheme.coordinates(Stream.of([ROW[3:]]), start=head.next)
    torch.testing.assert_close(torch.cat([head.ids, tail.ids], -1), first.ids, rtol=0, atol=1e-12)


@cases("name", ["circlerope", "ilrope", "omnirope"])
def test_text_only_equals_plain_rotary_embedding(name):
    scheme, freqs = create_scheme(name), inverse_frequencies(32, 5e5)
    assert scheme.text_exact
    stream = Stream.of([[Text(300)], [Text(9)]], "left")
    cos, sin = tables(scheme.coordinates(stream).ids, freqs, scheme.allocation(16))
    plain = torch.arange(300).float()[:, None] * freqs
    for row, n in ((0, 300), (1, 9)):
        assert torch.equal(cos[row, stream.mask[row]], plain[:n].cos())
        assert torch.equal(sin[row, stream.mask[row]], plain[:n].sin())


@cases("spec", ["circlerope", "circlerope(blend=0.5,offset=0)", "ilrope", "omnirope(text_axes=time)"])
@cases("heads", [(2, 1), (6, 3)])
def test_gradients_of_rotated_queries_and_keys(spec, heads):
    """Full tensors against complex numbers in float64; gradients are rotated by the negative angle."""
    scheme, generator = create_scheme(spec), torch.Generator().manual_seed(5)
    actual = scheme.coordinates(Stream.of([ROW, OTHER], "left"))
    freqs, axis = inverse_frequencies(32, 1e4), scheme.allocation(16)
    rotary = rotation(actual.ids, freqs, axis)
    angle = torch.stack([actual.ids[a] * freqs[pair].double() for pair, a in enumerate(axis.tolist())], -1)
    for method, h in zip((rotary.query, rotary.key), heads, strict=True):
        x, cotangent = (torch.randn(2, h, actual.mask.shape[1], 32, generator=generator) for _ in range(2))
        x.requires_grad_()
        y = method(x)
        (grad,) = torch.autograd.grad(y, x, cotangent)
        for tensor, value, sign in ((y, x.detach(), 1), (grad, cotangent, -1)):
            a, b = value.double().chunk(2, -1)
            unit = torch.polar(torch.ones_like(angle), sign * angle)[:, None]
            expected = torch.complex(a, b) * unit
            torch.testing.assert_close(
                tensor.double(), torch.cat([expected.real, expected.imag], -1), rtol=0, atol=2e-5
            )


@cases("name", RESET)
def test_every_image_has_the_same_rows_and_columns(name):
    """Independent of its position; only time advances."""
    stream = Stream.of([[Text(3), Image(3, 5), Text(40), Image(3, 5), Text(1)]])
    result = create_scheme(name).coordinates(stream).ids[:, 0]
    y, x = torch.meshgrid(torch.arange(3).double(), torch.arange(5).double(), indexing="ij")
    for first, time in ((3, 3), (58, 48)):
        assert torch.equal(result[1:, first : first + 15], torch.stack([y.flatten(), x.flatten()]))
        assert (result[0, first : first + 15] == time).all()
    assert result[:, 18].tolist() == [8, 8, 8]  # the longest side after the start


@cases(("name", "plain"), RESET.items())
def test_only_rows_and_columns_differ_from_the_plain_scheme(name, plain):
    rows = [ROW, OTHER]
    for options in ("", "(stride=2.5,after=side)"):
        ours, theirs = (create_scheme(n + options).coordinates(Stream.of(rows)) for n in (name, plain))
        assert torch.equal(ours.ids[0], theirs.ids[0])
        assert torch.equal(ours.next, theirs.next)
        assert not torch.equal(ours.ids, theirs.ids)
        reset = create_scheme(plain + options, spatial_reset=True)
        assert torch.equal(ours.ids, reset.coordinates(Stream.of(rows)).ids)
    assert torch.equal(create_scheme(name).allocation(64), create_scheme(plain).allocation(64))


def test_axes_alternate_in_one_and_are_chunks_in_the_other():
    assert create_scheme("omnirope").allocation(8).tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
    assert create_scheme("ilrope(sections=[4,2,2])").allocation(8).tolist() == [0, 1, 2, 0, 1, 2, 0, 0]


@cases("name", RESET)
def test_text_on_the_time_axis_only(name):
    result = create_scheme(name, text_axes="time").coordinates(Stream.of([[Text(2), Image(2, 3), Text(2)]]))
    assert result.ids[:, 0].tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 0, 0, 0, 0, 1, 1, 1, 0, 0],
        [0, 0, 0, 1, 2, 0, 1, 2, 0, 0],
    ]
    assert result.decode(2).tolist() == [[[7, 8]], [[0, 0]], [[0, 0]]]


@cases(
    ("spec", "message"),
    [
        ("circlerope(radius=0)", "radius=0 maps all patches of an image to one point"),
        ("circlerope(radius=auto)", "circlerope: radius needs a finite number, got radius='auto'"),
        ("circlerope(alpha=null)", "circlerope: alpha needs a finite number, got alpha=None"),
        ("circlerope(blend=true)", "circlerope: blend needs a number from 0 to 1, got blend=True"),
        ("circlerope(blend=1.5)", "circlerope: blend needs a number from 0 to 1, got blend=1.5"),
        ("circlerope(offset=up)", "circlerope: offset needs a finite number, got offset='up'"),
        ("circlerope(stride=0)", "circlerope: stride needs a number above 0, got stride=0"),
        ("circlerope(precision=half)", "precision must be one of float64, float32, got 'half'"),
        ("circlerope(relative=2)", "relative is true or false"),
        ("circlerope(move_to_origin=1)", "move_to_origin is true or false"),
        (
            "circlerope(sections=[1,2])",
            r"circlerope: sections needs a list of 3 integers of 0 or more, got sections=\(1, 2\)",
        ),
        ("ilrope(spatial_reset=false)", "ilrope always counts rows and columns from 0.*Use mrope_i"),
        ("omnirope(spatial_reset=false)", "omnirope always counts rows and columns from 0.*Use mrope"),
        ("omnirope(text_axes=none)", "text_axes must be one of all, time, got 'none'"),
    ],
)
def test_options_are_checked(spec, message):
    with pytest.raises(OptionError, match=message):
        create_scheme(spec)


@cases("spec", ["circlerope(radius=5,offset=0,relative=true)", "ilrope(stride=2)", "omnirope"])
def test_specs_round_trip(spec):
    scheme = create_scheme(spec)
    assert create_scheme(str(scheme)) == scheme
    assert create_scheme({"name": scheme.name, **scheme.options()}) == scheme
