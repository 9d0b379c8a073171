"""V2PE: exact steps for any number of tokens, random strides, and strides that fit."""

import json
from fractions import Fraction

import pytest
import torch

from tests.cases import cases
from vispe.errors import InputError, OptionError
from vispe.grid.frequencies import inverse_frequencies
from vispe.multimodal import Image, Stream, Text, Video, create_scheme, rotation
from vispe.multimodal.schemes.v2pe import STRIDES, v2pe_stride_for


def line(stream, **options):
    """Return the positions of the first row, and all coordinates."""
    coordinates = create_scheme("v2pe", **options).coordinates(stream)
    return coordinates.ids[0, 0], coordinates


@cases("n", [1, 12, 49, 144, 729])
def test_a_stride_of_all_tokens_counts_them(n):
    stream = Stream.of([[Text(3), Image(1, n, (1, 4), "last"), Text(2), Image(1, n), Text(1)]])
    ids, coordinates = line(stream, stride=n)
    assert torch.equal(ids, torch.arange(len(ids)).double())
    assert coordinates.next.item() == len(ids)
    single = Stream.of([[Image(1, n)]])
    assert torch.equal(line(single, stride=n)[0], torch.arange(n).double())


@cases("stride", [0.25, 1, 5, 16, 64, "1/3", 0.1, Fraction(7, 9)])
@cases("n", [12, 49, 144, 729])
def test_steps_are_equal_and_add_up(n, stride):
    tiles = 3
    ids, coordinates = line(Stream.of([[Text(4), Image(1, n, (1, tiles)), Text(2)]]), stride=stride)
    exact = Fraction(str(stride))
    expected = [3 + exact * j / n for j in range(tiles * n + 1)]
    torch.testing.assert_close(
        ids[3:-2], torch.tensor([float(p) for p in expected], dtype=torch.float64), rtol=1e-15, atol=0
    )
    assert bool((ids.diff() > 0).all())
    end = -((-exact * tiles) // 1)  # rounded up
    assert ids[-2:].tolist() == [4 + end, 5 + end]
    assert coordinates.decode(3)[0, 0].tolist() == [6 + end, 7 + end, 8 + end]


def test_worked_example():
    stream = Stream.of([[Text(5), Image(4, 4), Text(5), Image(4, 4, (1, 2), "last"), Text(3)]])
    ids, _ = line(stream, stride=4)
    assert ids[4:8].tolist() == [4, 4.25, 4.5, 4.75]
    assert ids[20:26].tolist() == [8, 9, 10, 11, 12, 13]
    assert ids[-4:].tolist() == [25, 26, 27, 28]


def test_stride_per_image():
    stream = Stream.of([[Text(1), Image(2, 3, (2, 2), "first"), Text(1), Video(3, 2, 2), Text(1)]])
    tile, image = (line(stream, stride=2, per=per)[0] for per in ("tile", "picture"))
    torch.testing.assert_close(tile[1:31], torch.arange(1, 31).double() / 3, rtol=1e-15, atol=0)
    torch.testing.assert_close(image[1:31], torch.arange(1, 31).double() / 15, rtol=1e-15, atol=0)
    assert (tile[31], image[31]) == (11, 3)
    torch.testing.assert_close(image[32:44], 3 + torch.arange(1, 13).double() / 2, rtol=1e-15, atol=0)
    assert image[44] == 10  # each frame spans 2


def test_frames_are_equal_with_and_without_text_between_them():
    together, separate = Stream.of([[Video(3, 2, 2)]]), Stream.of([[Video(1, 2, 2)] * 3])
    for per in ("tile", "picture"):
        assert torch.equal(line(together, stride=2, per=per)[0], line(separate, stride=2, per=per)[0])


def test_rounding_of_products_does_not_move_the_end():
    for stride, tiles, end in (
        (0.1, 10, 1),
        ("1/3", 3, 1),
        (0.7, 10, 7),
        ("2/3", 33, 22),
        (0.3, 4, 2),
        ("1/49", 49, 1),
    ):
        coordinates = create_scheme("v2pe", stride=stride).coordinates(Stream.of([[Image(1, 7, (1, tiles))]]))
        assert coordinates.next.item() == end, (stride, tiles)


def test_angles_of_fractions_are_exact_in_bfloat16_models():
    stream = Stream.of([[Text(2000), Image(16, 16), Text(1)]])
    coordinates = create_scheme("v2pe", stride=64).coordinates(stream)
    fine = coordinates.ids[0, 0, 2000:2256]
    assert (len(fine.float().unique()), len(fine.bfloat16().unique())) == (256, 8)
    rotary = rotation(coordinates.ids, inverse_frequencies(16, 1e6), torch.zeros(8, dtype=torch.long))
    assert rotary.cos.dtype == torch.float32
    q = torch.randn(1, 1, 2257, 16).bfloat16()
    wide = rotation(coordinates.ids.float(), inverse_frequencies(16, 1e6), torch.zeros(8, dtype=torch.long))
    assert torch.equal(rotary.query(q), wide.query(q.float()).bfloat16())


def test_strides_are_drawn_in_training_only():
    stream = Stream.of(
        [[Text(2), Image(2, 2, (2, 2), "last"), Text(1), Image(3, 3), Text(2)], [Image(1, 4)] * 9]
    )
    scheme, state = create_scheme("v2pe"), torch.get_rng_state()
    one, two, other = (
        scheme.coordinates(stream, training=True, generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one.ids, two.ids)
    assert not torch.equal(one.ids, other.ids)
    assert one.draws is not None
    draws = one.draws.tolist()
    assert len(set(draws[1:6])) == 1
    assert set(draws) - {0.0} <= set(STRIDES)
    assert len(set(draws[8:])) > 2
    assert draws[0] == draws[6] == 0
    replayed = scheme.coordinates(stream, draws=one.draws)
    assert torch.equal(replayed.ids, one.ids)
    assert torch.equal(replayed.next, one.next)
    evaluated = scheme.coordinates(stream, training=False, generator=torch.Generator().manual_seed(1))
    assert evaluated.draws is None
    assert torch.equal(
        evaluated.ids, create_scheme("v2pe", train_strides=None).coordinates(stream, training=True).ids
    )


def test_random_strides_are_used():
    stream = Stream.of([[Text(1), Image(1, 4, (1, 2)), Text(1), Image(1, 5), Text(1)]])
    scheme = create_scheme("v2pe", train_strides=(2,))
    assert torch.equal(scheme.coordinates(stream, training=True).ids[0, 0], line(stream, stride=2)[0])
    mixed = scheme.coordinates(stream, draws=torch.tensor([0, 1, 1, 0, 10, 0])).ids[0, 0]
    assert mixed.tolist() == [0, *(j / 4 for j in range(1, 9)), 3, 5, 7, 9, 11, 13, 14]


def test_the_largest_stride_that_fits():
    stream = Stream.of([[Text(100), Image(16, 16, (2, 2), "last"), Text(3)], [Text(50)]], padding="left")
    used = [103 + 5 * s for s in STRIDES]
    for context, stride in zip(used, STRIDES, strict=True):
        assert v2pe_stride_for(stream, context) == stride
        assert create_scheme("v2pe", stride=stride).coordinates(stream).next.max() == context
    assert v2pe_stride_for(stream, used[3] - 1) == STRIDES[2]
    assert v2pe_stride_for(stream, 110, per="picture") == 4
    assert v2pe_stride_for(stream, 105, ["1/3", Fraction(1, 5), 0.5]) == "1/3"
    with pytest.raises(
        InputError, match="needs 108 positions with the smallest stride, 1, but the context has 107"
    ):
        v2pe_stride_for(stream, 107)
    packed = Stream.of([[[Text(2), Image(4, 4), Text(1)], [Text(3)]]])
    assert v2pe_stride_for(packed, 7) == 4
    ending = Stream.of([[Text(2), Image(4, 4)]])
    assert v2pe_stride_for(ending, 4, [1.5, 2]) == 2


def test_scheme_and_text_are_one():
    scheme = create_scheme("v2pe(stride=1/3,per=picture,train_strides=[1,1/2])")
    assert create_scheme(str(scheme)) == scheme
    arguments = create_scheme("v2pe", stride=Fraction(1, 3), train_strides=(Fraction(1, 2), 4))
    assert json.loads(json.dumps(arguments.options())) == {
        "stride": "1/3",
        "per": "tile",
        "train_strides": ["1/2", 4],
    }
    assert create_scheme(str(arguments)) == arguments
    bad = "A stride of v2pe must be a number above 0"
    for stride in (0, -1, True, float("nan"), float("inf"), "1/0", "wide", None):
        with pytest.raises(OptionError, match=bad):
            create_scheme("v2pe", stride=stride)
    with pytest.raises(OptionError, match=bad):
        create_scheme("v2pe", train_strides=(1, 0))
    with pytest.raises(OptionError, match="train_strides needs at least one stride"):
        create_scheme("v2pe", train_strides=())
    with pytest.raises(OptionError, match="per must be one of tile, picture, got 'image'"):
        create_scheme("v2pe", per="image")
