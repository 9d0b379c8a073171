"""VRoPE: symmetry of its diagonals, continuity, and several answers to one question."""

import pytest
import torch

from tests.cases import cases
from vispe.attention import attention
from vispe.errors import OptionError
from vispe.grid.frequencies import inverse_frequencies
from vispe.multimodal import Image, Stream, Text, Video, angles, create_scheme, rotation


def ids_of(segment, before=3, **options):
    stream = Stream.of([[Text(before), segment, Text(2)]])
    coordinates = create_scheme("vrope", **options).coordinates(stream)
    return coordinates.ids[:, 0, before:-2], coordinates


def test_worked_example():
    coordinates = create_scheme("vrope").coordinates(Stream.of([[Text(2), Image(2, 3), Text(1)]]))
    expected = [
        [0, 1, 2, 3, 4, 3, 4, 5, 6],
        [0, 1, 4, 3, 2, 5, 4, 3, 6],
        [0, 1, 3, 4, 5, 2, 3, 4, 6],
        [0, 1, 5, 4, 3, 4, 3, 2, 6],
    ]
    assert coordinates.ids[:, 0].tolist() == expected
    assert coordinates.decode(2)[:, 0].tolist() == [[7, 8]] * 4


@cases(("t", "h", "w"), [(1, 3, 5), (3, 4, 2), (2, 1, 6), (1, 1, 1), (2, 5, 5)])
def test_mirrored_images_exchange_axes(t, h, w):
    ids = ids_of(Video(t, h, w))[0].unflatten(-1, (t, h, w))
    assert torch.equal(ids.flip(-1), ids[[1, 0, 3, 2]])
    assert torch.equal(ids.flip(-2), ids[[2, 3, 0, 1]])
    if h == w:
        assert torch.equal(ids.transpose(-1, -2), ids[[0, 2, 1, 3]])


@cases(("t", "h", "w"), [(1, 3, 5), (4, 4, 2), (2, 1, 6)])
def test_axes_have_the_same_mean_everywhere_and_frames_touch(t, h, w):
    ids, coordinates = ids_of(Video(t, h, w), before=7)
    frames = 7 + torch.arange(t) * (h + w - 1.0)
    assert torch.equal(ids.mean(0), (frames + (h + w - 2) / 2).repeat_interleave(h * w).double())
    first, last = ids.unflatten(-1, (t, h * w)).amin(-1), ids.unflatten(-1, (t, h * w)).amax(-1)
    assert torch.equal(last[:, :-1] + 1, first[:, 1:])
    assert coordinates.ids[:, 0, -2].tolist() == [ids.max() + 1] * 4
    assert coordinates.ids[:, 0, -1].tolist() == [ids.max() + 2] * 4


def test_a_long_video_uses_376_positions():
    assert create_scheme("vrope").coordinates(Stream.of([[Video(8, 24, 24)]])).next.tolist() == [376.0]


def test_frames_may_be_closer():
    ids, coordinates = ids_of(Video(3, 4, 5), stride=2)
    near = ids.unflatten(-1, (3, 20))
    assert torch.equal(near[:, 1:] - near[:, :-1], torch.full((4, 2, 20), 2.0).double())
    assert coordinates.next.item() == ids.max() + 1 + 2
    with pytest.raises(OptionError, match="vrope: stride needs a number above 0, got stride=0"):
        create_scheme("vrope", stride=0)


@cases("pairs", [4, 7, 16, 33])
def test_text_is_rotated_as_by_one_position(pairs):
    stream, freqs = Stream.of([[Text(50)], [Text(9)]], padding="left"), inverse_frequencies(2 * pairs, 1e6)
    result, expected = (
        angles(s.coordinates(stream).ids, freqs, s.allocation(pairs))
        for s in (create_scheme("vrope"), create_scheme("rope1d"))
    )
    assert torch.equal(result, expected)


def test_axes_of_pairs_alternate():
    scheme = create_scheme("vrope")
    assert scheme.allocation(7).tolist() == [0, 1, 2, 3, 0, 1, 2]
    with pytest.raises(
        OptionError, match="vrope needs at least 4 pairs of channels for its 4 axes, got 3 per head"
    ):
        scheme.allocation(3)


def test_answers_to_one_question_do_not_attend_to_each_other():
    a, b = Text(3, shared=True), Text(5, shared=True)
    question = [Text(2), Image(3, 4), Text(1)]  # 15 tokens
    x = torch.randn(3, 1, 2, 23, 16, dtype=torch.float64)
    order = [*range(15), *range(18, 23), *range(15, 18)]
    outs = []
    for rows, tokens in ((([*question, a, b],), x), (([*question, b, a],), x[..., order, :])):
        stream, scheme = Stream.of(rows), create_scheme("vrope")
        coordinates = scheme.coordinates(stream)
        assert coordinates.next.item() == 2 + 6 + 1
        rotary = rotation(coordinates.ids, inverse_frequencies(16), scheme.allocation(8))
        outs.append(attention(*tokens, transform=rotary, attn_mask=stream.attention_mask()))
    torch.testing.assert_close(outs[0][..., order, :], outs[1], rtol=1e-12, atol=1e-12)
    single, scheme = Stream.of([question]), create_scheme("vrope")
    rotary = rotation(scheme.coordinates(single).ids, inverse_frequencies(16), scheme.allocation(8))
    expected = attention(*x[..., :15, :], transform=rotary, attn_mask=single.attention_mask())
    torch.testing.assert_close(outs[0][..., :15, :], expected, rtol=1e-12, atol=1e-12)
