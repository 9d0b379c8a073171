"""Parallel segments: coordinates, attention masks, and continuation of the sequence."""

import pytest
import torch

from tests.cases import cases
from vispe import create_encoding
from vispe.errors import InputError, OptionError, UnsupportedCombination
from vispe.multimodal import Image, Parallel, Stream, Text, Video, create_scheme, list_schemes
from vispe.multimodal.sampling import sampled

SCHEMES = [name for name in list_schemes() if name not in ("group_pe", "bilevel")]
PICTURES = (Image(3, 5), Image(4, 2), Text(3))


def coordinates(name, *segments, **options):
    return create_scheme(name).coordinates(Stream.of([list(segments)]), **options)


@cases("name", SCHEMES)
def test_members_have_the_coordinates_of_separate_segments(name):
    result = coordinates(name, Text(3), Parallel(PICTURES), Text(2))
    single = [coordinates(name, Text(3), image) for image in PICTURES]
    parts = result.ids[0:, 0].split([3, 15, 8, 3, 2], 1)
    for part, one in zip(parts[1:4], single, strict=True):
        torch.testing.assert_close(part, one.ids[:, 0, 3:], rtol=0, atol=1e-9)
    assert coordinates(name, Text(3), Parallel(PICTURES)).next == max(one.next for one in single)
    torch.testing.assert_close(
        result.ids[:, :, -1:], coordinates(name, Text(3), Parallel(PICTURES), Text(1)).decode(1)
    )


@cases("name", ["rope1d", "mrope_i", "v2pe"])
def test_members_that_end_together_use_the_maximum_length(name):
    result = coordinates(name, Text(3), Parallel(PICTURES, see="all", align="end"), Text(2))
    costs = [float(coordinates(name, image).next) for image in PICTURES]
    assert coordinates(name, Text(3), Parallel(PICTURES, align="end")).next == 3 + sum(costs)
    for part, image, cost in zip(
        result.ids[:, 0].split([3, 15, 8, 3, 2], 1)[1:4], PICTURES, costs, strict=True
    ):
        start = 3 + sum(costs) - cost
        torch.testing.assert_close(part, coordinates(name, image, start=torch.tensor([start])).ids[:, 0])
    assert result.extent is not None
    assert result.extent[0].tolist() == [0] * 3 + [costs[0]] * 15 + [costs[1]] * 8 + [costs[2]] * 3 + [0] * 2


def visible(*segments, padding="right", length=None):
    return Stream.of([list(segments)], padding, length).attention_mask()[0, 0]


def test_attention_mask_of_sources_target_and_query():
    mask = visible(Text(2), Parallel([Text(2), [Text(1), Image(1, 2)]], target=Text(2)), Text(1))
    causal = torch.ones(10, 10, dtype=torch.bool).tril()
    expected = torch.zeros(10, 10, dtype=torch.bool)
    for rows, columns in ((slice(0, 2), slice(0, 2)), (slice(2, 4), slice(2, 4)), (slice(4, 7), slice(4, 7)),
                          (slice(7, 9), slice(2, 9)), (slice(9, 10), slice(0, 10))):  # fmt: skip
        expected[rows, columns] = True
    assert torch.equal(mask, expected & causal)


def test_members_that_see_all_attend_to_each_other_bidirectionally():
    mask = visible(Text(2), Parallel([Text(2), Text(3)], see="all"), Text(1))
    expected = torch.ones(8, 8, dtype=torch.bool).tril()
    expected[2:4, 4:7] = True
    assert torch.equal(mask, expected)


def test_without_sets_the_mask_is_causal():
    assert torch.equal(visible(Text(2), Image(2, 2)), torch.ones(6, 6, dtype=torch.bool).tril())
    assert Stream.of([[Text(3)]]).blocks.parallel is None


@cases("padding", ["left", "right"])
@cases("name", ["rope1d", "mrope"])
def test_padded_and_packed_rows_equal_separate_ones(name, padding):
    one = [Text(1), Parallel([Text(2), Image(2, 3)], see="all", align="end"), Text(2)]
    two = [Parallel([Image(3, 2), Text(1), Image(1, 4)]), Text(3)]
    three = [Text(4)]
    stream = Stream.of([[one, two], two, three], padding)
    actual, mask = create_scheme(name).coordinates(stream), stream.attention_mask()
    singles = [Stream.of([row]) for row in (one, two, three)]
    for row, parts in ((0, (0, 1)), (1, (1,)), (2, (2,))):
        valid = stream.mask[row]
        expected = [create_scheme(name).coordinates(singles[p]) for p in parts]
        assert torch.equal(actual.ids[:, row, valid], torch.cat([w.ids[:, 0] for w in expected], 1))
        assert actual.next[row] == expected[-1].next
        blocks = torch.block_diag(*(singles[p].attention_mask()[0, 0].float() for p in parts)).bool()
        assert torch.equal(mask[row, 0][valid][:, valid], blocks)
        assert not mask[row, 0][~valid].any()
        assert not mask[row, 0][:, ~valid].any()


def test_permuted_members_permute_coordinates_and_masks():
    members = [[Text(1), Image(2, 3)], Image(4, 2), Text(3)]
    sizes, order = [7, 8, 3], [2, 0, 1]
    a = Stream.of([[Text(2), Parallel(members, see="all", align="end"), Text(2)]])
    b = Stream.of([[Text(2), Parallel([members[m] for m in order], see="all", align="end"), Text(2)]])
    parts = (2 + torch.arange(18)).split(sizes)
    permuted = torch.cat([torch.arange(2), *(parts[m] for m in order), torch.arange(20, 22)])
    mrope = create_scheme("mrope")
    assert torch.equal(mrope.coordinates(a).ids[..., permuted], mrope.coordinates(b).ids)
    assert torch.equal(a.attention_mask()[0, 0][permuted][:, permuted], b.attention_mask()[0, 0])


def test_streams_of_segments_and_from_ids_agree():
    hand = Stream.of([[Text(2), Parallel([[Text(1), Image(2, 2)], Text(2)], "all", "end"), Text(1)],
                      [Parallel([Image(1, 2)], "all", "end"), Parallel([Text(2), Text(1)], "all", "end")]])  # fmt: skip
    types = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0, 0, 0]])
    members = torch.tensor([[-1, -1, 0, 0, 0, 0, 0, 1, 1, -1], [0, 0, 0, 0, 1, -1, -1, -1, -1, -1]])
    mask = torch.ones_like(types)
    mask[1, 5:] = 0
    members[1] = torch.tensor([1, 1, 0, 0, 1, -1, -1, -1, -1, -1])  # a number 0 after another begins a set
    ids = Stream.from_ids(
        types, [Image(2, 2), Image(1, 2)], mask=mask, members=members, see="all", align="end"
    )
    assert torch.equal(hand.attention_mask(), ids.attention_mask())
    # rows of tokens outside of sets; numbers of members need not be equal
    rows = [s.blocks.parallel[s.block] for s in (hand, ids)]
    assert torch.equal(*(r[r[:, 0] < 0] for r in rows))
    result = [create_scheme("mrope").coordinates(s) for s in (hand, ids)]
    assert torch.equal(result[0].ids, result[1].ids)
    assert torch.equal(result[0].next, result[1].next)


def test_decoding_equals_a_longer_prompt():
    prompt = (Text(2), Parallel([Image(2, 5), Video(2, 2, 2)]), Text(1))
    full = coordinates("mrope_i", *prompt[:-1], Text(5))
    assert torch.equal(coordinates("mrope_i", *prompt).decode(4), full.ids[..., -4:])


def test_wrong_members_raise():
    with pytest.raises(InputError, match="a list of at least one member"):
        Parallel([])
    with pytest.raises(InputError, match="must be Text, Image or Video"):
        Parallel([Parallel([Text(1)])])
    with pytest.raises(InputError, match=r"cannot be shared or have a group, got Text\(.*shared=True"):
        Parallel([Text(1, shared=True)])
    with pytest.raises(OptionError, match="see"):
        Parallel([Text(1)], see="none")
    with pytest.raises(InputError, match="members must increase inside a set"):
        Stream.from_ids(torch.zeros(1, 3, dtype=torch.long), members=torch.tensor([[0, 2, 1]]))


def test_schemes_with_an_order_reject_parallel_members():
    stream = Stream.of([[Text(2), Parallel([Text(3), Image(2, 3)]), Text(2)]])
    with pytest.raises(UnsupportedCombination, match="bilevel numbers segments in order"):
        create_scheme("bilevel").coordinates(stream)
    with pytest.raises(UnsupportedCombination, match="which rfs would change"):
        sampled(create_scheme("mrope").coordinates(stream), create_encoding("rfs"))
