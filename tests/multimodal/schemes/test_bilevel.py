"""Bilevel positions: sentences and images as segments, decoding from two numbers, packing and padding."""

import pytest
import torch

from tests.cases import cases
from vispe import Positions, create_encoding
from vispe.attention import attention
from vispe.errors import InputError, OptionError, ShapeError, UnsupportedCombination
from vispe.grid.frequencies import inverse_frequencies
from vispe.multimodal import Image, Stream, Text, Video, create_scheme, rotation
from vispe.multimodal.sampling import sampled

END = 13  # the token of a full stop
SENTENCES = [5, 7, END, 8, END, END, 9, 4, 6]


def of_tokens(rows, mask=None, **options):
    """Return the coordinates of text whose segments end at a token."""
    tokens = torch.tensor(rows)
    stream = Stream.from_ids(torch.zeros_like(tokens), mask=mask, boundaries=tokens == END)
    return create_scheme("bilevel", **options).coordinates(stream)


def test_a_separator_belongs_to_the_segment_that_it_ends():
    result = of_tokens([SENTENCES], train_length=3)
    assert result.ids[0, 0].tolist() == [0, 0, 0, 1, 1, 2, 3, 3, 3]
    assert result.ids[1, 0].tolist() == [0, 1, 2, 0, 1, 0, 0, 1, 2]
    assert torch.equal(result.ids[1], result.ids[2])
    assert result.decode(2)[:, 0].tolist() == [[3, 3], [2, 2], [2, 2]]  # the position is clipped
    assert [x.item() for x in result.scheme.split(result.next)] == [3, 3]  # but counted


def test_images_and_frames_are_segments():
    stream = Stream.of([[Text(2), Image(1, 2), Text(2, boundary=True), Video(2, 2, 1), Text(1)]])
    result = create_scheme("bilevel").coordinates(stream)
    assert result.ids[0, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5]
    assert result.ids[1, 0].tolist() == [0, 1, 0, 0, 0, 1, 0, 1, 0, 1, 0]
    assert result.ids[2, 0].tolist() == [0, 1, 0, 1, 0, 1, 0, 0, 0, 0, 0]
    tiles = create_scheme("bilevel").coordinates(Stream.of([[Image(1, 2, (1, 2), "last"), Text(1)]]))
    assert tiles.ids[0, 0].tolist() == [0, 0, 1, 1, 2, 2, 3]


@cases("padding", ["left", "right"])
def test_decoding_equals_the_prefill(padding):
    """Decoded tokens, including separators, have the same coordinates as in the prompt."""
    written = [3, END, 4, 5, END, END, 6]
    prompts = [SENTENCES, SENTENCES[:5], [1]]
    longest = max(map(len, prompts))
    fill = [[0] * (longest - len(p)) for p in prompts]
    rows = [f + p if padding == "left" else p + f for f, p in zip(fill, prompts, strict=True)]
    on = [[0 * x for x in f] + [1] * len(p) if padding == "left" else [1] * len(p) + f
          for f, p in zip(fill, prompts, strict=True)]  # fmt: skip
    result = of_tokens(rows, torch.tensor(on), train_length=4)
    ends = torch.tensor([written] * 3) == END
    ids, counter = result.scheme.follow(result.next, ends)
    for row, prompt in enumerate(prompts):
        full = of_tokens([prompt + written], train_length=4)
        assert torch.equal(ids[:, row], full.ids[:, 0, len(prompt) :])
        assert counter[row] == full.next[0]
    # token by token, from nothing but the counter
    at = result.next
    for step in range(len(written)):
        one, at = result.scheme.follow(at, ends[:, step : step + 1])
        assert torch.equal(one[..., 0], ids[..., step])
    plain, _ = result.scheme.follow(result.next, torch.zeros(3, 5, dtype=torch.bool))
    assert torch.equal(plain, result.decode(5))


def test_attention_of_decoding_equals_the_prefill():
    scheme, x = create_scheme("bilevel"), torch.randn(3, 1, 2, 12, 16, dtype=torch.float64)
    segments = [Text(3, boundary=True), Image(2, 2), Text(1)]
    full = scheme.coordinates(Stream.of([[*segments, Text(4)]]))
    prompt = scheme.coordinates(Stream.of([segments]))
    ids = torch.cat([prompt.ids, prompt.decode(4)], 2)
    expected, actual = (
        attention(*x, transform=rotation(i, inverse_frequencies(16), scheme.allocation(8)), is_causal=True)
        for i in (full.ids, ids)
    )
    assert torch.equal(actual, expected)


def test_packed_samples_restart():
    packed = Stream.of([[[Text(2, boundary=True), Text(1)], [Text(1), Image(1, 1)]], [[Text(4)]]], "left")
    start = torch.tensor([2.0**26 + 5, 7.0], dtype=torch.float64)
    result = create_scheme("bilevel").coordinates(packed, start=start)
    assert result.ids[0].tolist() == [[1, 1, 2, 0, 1], [0, 0, 0, 0, 0]]
    assert result.ids[1].tolist() == [[5, 6, 0, 0, 0], [0, 7, 8, 9, 10]]
    assert [x.tolist() for x in result.scheme.split(result.next)] == [[2, 0], [0, 11]]


def test_shared_runs_start_where_the_prompt_ends():
    stream = Stream.of([[Text(2), Text(2, shared=True), Text(3, shared=True, boundary=True), Text(1)]])
    result = create_scheme("bilevel").coordinates(stream)
    assert result.ids[0, 0].tolist() == [0] * 8
    assert result.ids[1, 0].tolist() == [0, 1, 2, 3, 2, 3, 4, 2]


def test_boundaries_have_an_effect_in_this_scheme_only():
    plain, marked = (Stream.of([[Text(3, boundary=b), Image(1, 2), Text(2)]]) for b in (False, True))
    for name in ("mrope", "rope1d", "v2pe"):
        assert torch.equal(*(create_scheme(name).coordinates(s).ids for s in (plain, marked)))
    separate = Stream.of([[Text(1), Text(2), Text(3)]])
    assert create_scheme("bilevel").coordinates(separate).ids[1, 0].tolist() == [0, 1, 2, 3, 4, 5]


@cases("rotate", ["inter", "intra", "both"])
def test_rotated_channels(rotate):
    """With 'inter' the order inside a segment has no effect; with 'intra' all segments are rotated equally."""
    scheme = create_scheme("bilevel", rotate=rotate)
    ids = of_tokens([SENTENCES]).ids
    rotary = rotation(ids, inverse_frequencies(16), scheme.allocation(8))
    one = torch.ones(1, 1, 9, 16, dtype=torch.float64)
    q = rotary.query(one)[0, 0]
    same = torch.isclose(q[:, None], q).all(-1)
    inter, intra = ids[0, 0], ids[1, 0]
    of_inter, of_intra = inter[:, None] == inter, intra[:, None] == intra
    expected = {"inter": of_inter, "intra": of_intra, "both": of_inter & of_intra}[rotate]
    assert torch.equal(same, expected)
    assert scheme.added == ((1, 2) if rotate == "inter" else ())


def test_text_of_one_segment_is_rope_with_intra():
    scheme, stream = create_scheme("bilevel", rotate="intra"), Stream.of([[Text(40)]])
    plain = create_scheme("rope1d")
    one, other = (
        rotation(s.coordinates(stream).ids, inverse_frequencies(16), s.allocation(8)) for s in (scheme, plain)
    )
    x = torch.randn(1, 2, 40, 16)
    assert torch.equal(one.query(x), other.query(x))


def test_alibi_over_segments_equals_a_bias_of_keys():
    """Slopes times 96 over numbers of segments: equal, row by row, to a bias of the keys alone."""
    inter = of_tokens([SENTENCES]).ids[0]
    alibi = create_encoding("alibi", num_heads=6, factor=96)
    plain = create_encoding("alibi", num_heads=6).head_slopes()
    assert alibi.head_slopes() == pytest.approx([96 * m for m in plain])
    bias = alibi.bias(Positions(inter[..., None].float()), 0).dense()
    keys = torch.tensor(alibi.head_slopes())[:, None, None] * inter[0].float()
    rows = torch.where(torch.ones(9, 9).tril().bool(), bias[0] - keys, 0.0)
    torch.testing.assert_close(rows, rows[..., :1].expand_as(rows).tril(), rtol=0, atol=1e-4)


def test_errors():
    with pytest.raises(UnsupportedCombination, match=r"bilevel has one counter .* Use group_pe"):
        create_scheme("bilevel").coordinates(Stream.of([[Text(2), Text(1, group=1)]]))
    types = torch.tensor([[0, 1, 1, 0]])
    image = torch.tensor([[1, 1, 2]])
    with pytest.raises(InputError, match="boundaries must be 0 at tokens of images"):
        Stream.from_ids(types, image, boundaries=torch.tensor([[0, 1, 0, 0]]))
    for wrong in (torch.tensor([[0, 2, 0, 0]]), torch.zeros(1, 4)):
        with pytest.raises(
            InputError, match="boundaries must be 1 where a token ends its segment and 0 elsewhere"
        ):
            Stream.from_ids(types, image, boundaries=wrong)
    with pytest.raises(ShapeError, match=r"boundaries needs the shape \(1, 4\) of types, got \(4,\)"):
        Stream.from_ids(types, image, boundaries=torch.zeros(4))
    result = of_tokens([SENTENCES])
    with pytest.raises(ShapeError, match=r"boundaries needs the shape \(1, n\) for 1 counter, got \(2, 1\)"):
        result.scheme.follow(result.next, torch.zeros(2, 1, dtype=torch.bool))
    with pytest.raises(OptionError, match="factor=96 has no effect with slopes='learned'"):
        create_encoding("alibi(factor=96,slopes=learned)", num_heads=2)
    with pytest.raises(
        OptionError, match=r"factor=2 has no effect with slopes='harmonic'. Use steepest instead"
    ):
        create_encoding("alibi2d(factor=2,slopes=harmonic)", num_heads=2)
    with pytest.raises(OptionError, match=r"counter of bilevel has 2 numbers, .* got end='max'. Omit end"):
        result.delta("max")
    with pytest.raises(UnsupportedCombination, match="needs a scheme with one counter, got bilevel with 2"):
        sampled(result, create_encoding("randomized(reach=100)").eval())
