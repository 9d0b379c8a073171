"""Group positions: counters, masks of streaming translation, and valid cached keys when a source grows."""

import pytest
import torch

from tests.cases import cases
from vispe.attention import attention
from vispe.errors import InputError, OptionError, UnsupportedCombination
from vispe.grid.frequencies import inverse_frequencies
from vispe.multimodal import Image, Stream, Text, create_scheme, rotation
from vispe.multimodal.streams.simultaneous_translation import group_mask, streamed

SOURCE, TARGET = 0, 1
ARRIVAL = [Text(3), Text(2, group=1), Text(4), Text(1, group=1), Text(1), Text(3, group=1)]


def attend(x, stream, mask=None, **options):
    """Return attention of x (3, 1, h, n, 8) over a stream of one row."""
    scheme = create_scheme("group_pe", **options)
    rotary = rotation(scheme.coordinates(stream).ids, inverse_frequencies(8), scheme.allocation(4))
    return attention(*x, transform=rotary, attn_mask=group_mask(stream) if mask is None else mask)


@cases("phi", [0, 7, 2.5, 0.1])
def test_groups_have_separate_counters(phi):
    coordinates = create_scheme("group_pe", phi=phi).coordinates(Stream.of([ARRIVAL]))
    expected = [0, 1, 2, phi, phi + 1, 3, 4, 5, 6, phi + 2, 7, phi + 3, phi + 4, phi + 5]
    assert coordinates.ids[0, 0].tolist() == expected
    assert coordinates.decode(2)[0, 0].tolist() == [phi + 6, phi + 7]


def test_a_longer_source_does_not_move_the_target():
    short = Stream.of([[Text(3), Text(4, group=1)]])
    long = Stream.of([[Text(3), Text(2, group=1), Image(2, 3), Text(5), Text(2, group=1)]])
    ids = [create_scheme("group_pe", phi=4).coordinates(s) for s in (short, long)]
    group = torch.tensor([0] * 3 + [1] * 2 + [0] * 11 + [1] * 2)
    assert ids[1].ids[0, 0][group == 1].tolist() == ids[0].ids[0, 0, 3:].tolist() == [4, 5, 6, 7]
    assert ids[1].ids[0, 0][group == 0].tolist() == list(range(14))
    assert ids[0].next.tolist() == ids[1].next.tolist() == [8]


def test_one_start_for_each_group():
    rows = [[Text(2), Text(2, group=2), Text(1, group=1), Text(1, group=2)], [Text(1, group=1)]]
    stream = Stream.of(rows, padding="left")
    coordinates = create_scheme("group_pe(phi=[10,20])").coordinates(stream, padding=-1)
    assert coordinates.ids[0].tolist() == [[0, 1, 20, 21, 10, 22], [-1, -1, -1, -1, -1, 10]]
    with pytest.raises(
        UnsupportedCombination, match=r"phi=\[5\] has starts for 1 group .* but the stream has a group 2"
    ):
        create_scheme("group_pe(phi=[5])").coordinates(stream)
    for phi in (-1, True, (), (0, "a"), float("nan"), None):
        with pytest.raises(
            OptionError,
            match="group_pe: phi needs a number of 0 or more, or a list of 1 or more numbers of 0 or more, got phi=",
        ):
            create_scheme("group_pe", phi=phi)
    with pytest.raises(UnsupportedCombination, match=r"rope1d has one counter .* Use group_pe"):
        create_scheme("rope1d").coordinates(stream)


def test_cached_keys_stay_valid_when_the_source_grows():
    stream, x = Stream.of([ARRIVAL]), torch.randn(3, 1, 2, 14, 8, dtype=torch.float64)
    full = attend(x, stream, phi=3)
    for parts in range(1, len(ARRIVAL)):
        n = sum(t.tokens for t in ARRIVAL[:parts])
        before = Stream.of([ARRIVAL[:parts]])
        scheme = create_scheme("group_pe", phi=3)
        ids, longer = (scheme.coordinates(s).ids for s in (before, stream))
        assert torch.equal(ids, longer[..., :n])
        cached, keys = (
            rotation(i, inverse_frequencies(8), scheme.allocation(4)).key(x[1, ..., : i.shape[-1], :])
            for i in (ids, longer)
        )
        assert torch.equal(cached, keys[..., :n, :])
        torch.testing.assert_close(
            attend(x[..., :n, :], before, phi=3), full[..., :n, :], rtol=1e-12, atol=1e-12
        )


def test_the_source_does_not_depend_on_the_target():
    stream, x = Stream.of([ARRIVAL]), torch.randn(3, 1, 2, 14, 8, dtype=torch.float64)
    source = torch.tensor(
        [i for i, t in enumerate([t.group for t in ARRIVAL for _ in range(t.tokens)]) if t == 0]
    )
    single = attend(x[..., source, :], Stream.of([[Text(8)]]))
    torch.testing.assert_close(attend(x, stream)[..., source, :], single, rtol=1e-12, atol=1e-12)
    causal = attend(x, stream, stream.attention_mask())[..., source, :]
    assert not torch.allclose(causal, single)


def test_suffixes_do_not_attend_to_each_other():
    a, b = Text(2, shared=True), Text(3, shared=True)
    x = torch.randn(3, 1, 2, 9, 8, dtype=torch.float64)
    order = [0, 1, 2, 3, 6, 7, 8, 4, 5]
    one, two = Stream.of([[Text(4), a, b]]), Stream.of([[Text(4), b, a]])
    assert create_scheme("group_pe").coordinates(one).ids[0, 0].tolist() == [0, 1, 2, 3, 4, 5, 4, 5, 6]
    first, second = attend(x, one), attend(x[..., order, :], two)
    torch.testing.assert_close(first[..., order, :], second, rtol=1e-12, atol=1e-12)
    single = attend(x[..., :4, :], Stream.of([[Text(4)]]))
    torch.testing.assert_close(first[..., :4, :], single, rtol=1e-12, atol=1e-12)


PAIRS = {"source_prompt": 3, "target_prompt": 2, "end": 1}


@cases("padding", ["left", "right"])
@cases("wait", [1, 2, 3, 9])
def test_wait_k_against_a_walk_over_tokens(wait, padding):
    source, target = [[2, 3, 1], [4], [1, 1]], [[1, 2], [3, 3, 1], [2]]
    pairs = streamed(source, target, **PAIRS, length=22, padding=padding)
    mask = pairs.attention_mask(wait)
    expected = torch.zeros_like(mask)
    for n, (s, t) in enumerate(zip(source, target, strict=True)):
        read, written = (
            [0] * prompt + [i + 1 for i, c in enumerate(words) for _ in range(c)] + [len(words) + 1]
            for prompt, words in ((3, s), (2, t))
        )
        tokens = [*((SOURCE, w) for w in read), *((TARGET, w) for w in written)]
        shift = 22 - len(tokens) if padding == "left" else 0
        for q, (kind, word) in enumerate(tokens):
            # the word it predicts
            comes = tokens[q + 1][1] if kind == TARGET and q + 1 < len(tokens) else word
            for k, (other, key_word) in enumerate(tokens[: q + 1]):
                known = key_word <= comes + wait - 1 if kind == TARGET else True
                expected[n, 0, shift + q, shift + k] = known if other == SOURCE else kind == TARGET
    assert torch.equal(mask, expected)


@cases("padding", ["left", "right"])
def test_kinds_of_tokens(padding):
    pairs = streamed(torch.tensor([[2, 3], [1, 0]]), [[2], [1]], **PAIRS, padding=padding)
    assert pairs.source_lengths.tolist() == [9, 5]
    assert pairs.target_lengths.tolist() == [5, 4]
    rows = [[0, 0, 0, -1, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2], [0, 0, 0, -1, 0, 2, 2, 2, 2]]
    rows[1] = [0] * 5 + rows[1] if padding == "left" else rows[1] + [0] * 5
    assert pairs.mask_index().tolist() == rows
    ids = create_scheme("group_pe", phi=2).coordinates(pairs.stream).ids[0]
    assert ids[pairs.source_word >= 0].tolist() == [*range(9), *range(5)]
    assert ids[pairs.target_word >= 0].tolist() == [*range(2, 7), *range(2, 6)]


def test_consecutive_groups():
    pairs = streamed([[2, 3]], [[2]], **PAIRS, mode="batch")
    assert pairs.mask_index().tolist() == [[0] * 9 + [1] * 5]
    assert create_scheme("rope1d").coordinates(pairs.stream).ids[0, 0].tolist() == list(range(14))
    with pytest.raises(OptionError, match="With mode='batch', the full source is read first"):
        pairs.attention_mask(1)


def test_wrong_pairs_raise():
    with pytest.raises(InputError, match="Every source needs a target, got 2 sources and 1 target"):
        streamed([[1], [1]], [[1]], **PAIRS)
    with pytest.raises(OptionError, match=r"must be integers of 0 or more, got \[3, -1, 1\]"):
        streamed([[-1]], [[1]], **PAIRS)
    with pytest.raises(InputError, match="Sample 0 has a source or target without tokens"):
        streamed([[0]], [[1]], source_prompt=0, target_prompt=1, end=0)
    with pytest.raises(InputError, match="Row 0 has 9 tokens, more than length=8"):
        streamed([[1]], [[1]], **PAIRS, length=8)
    with pytest.raises(OptionError, match="mode must be 'streaming' or 'batch', got 'fast'"):
        streamed([[1]], [[1]], **PAIRS, mode="fast")
    for wait in (0, 1.5, True):
        with pytest.raises(OptionError, match="wait needs an integer of 1 or more"):
            streamed([[1]], [[1]], **PAIRS).attention_mask(wait)
