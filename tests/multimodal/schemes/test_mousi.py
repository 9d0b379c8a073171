"""MouSi: positions per image, and the loss of order when all tokens of an image share a position."""

import pytest
import torch

from tests.cases import cases
from vispe.attention import attention
from vispe.errors import OptionError
from vispe.grid.frequencies import inverse_frequencies
from vispe.multimodal import Image, Stream, Text, Video, create_scheme, rotation


@cases(
    ("share", "ids", "end"),
    [("all", [4] * 6, 5), ("row", [4, 4, 4, 5, 5, 5], 6), (None, [4, 5, 6, 7, 8, 9], 10)],
)
def test_an_image_of_two_rows(share, ids, end):
    scheme = create_scheme("rope1d") if share is None else create_scheme("mousi", share=share)
    coordinates = scheme.coordinates(Stream.of([[Text(4), Image(2, 3), Text(2)]]))
    assert coordinates.ids[0, 0].tolist() == [0, 1, 2, 3, *ids, end, end + 1]
    assert coordinates.decode(2)[0, 0].tolist() == [end + 2, end + 3]


def test_occupancy_of_a_large_grid():
    stream = Stream.of([[Image(64, 64)]])
    used = [
        create_scheme(n).coordinates(stream).next.item()
        for n in ("rope1d", "mousi(share=all)", "mousi(share=row)")
    ]
    assert used == [4096, 1, 64]


def test_frames_and_tiles():
    stream = Stream.of([[Text(1), Video(2, 2, 1), Image(1, 2, (1, 2), "last"), Text(1)]])
    every = create_scheme("mousi(share=all)").coordinates(stream).ids[0, 0].tolist()
    assert every == [0, 1, 1, 2, 2, 3, 3, 3, 3, 3, 3, 4]
    row = create_scheme("mousi").coordinates(stream).ids[0, 0].tolist()
    assert row == [0, 1, 2, 3, 4, 5, 5, 6, 6, 7, 7, 8]


def test_text_only_has_consecutive_positions():
    stream = Stream.of([[Text(5)], [Text(9)]], padding="left")
    for share in ("all", "row"):
        result, expected = (create_scheme(n).coordinates(stream) for n in (f"mousi(share={share})", "rope1d"))
        assert torch.equal(result.ids, expected.ids)


@cases(("share", "same"), [("all", True), ("row", False)])
def test_the_order_inside_a_shared_image_is_lost_without_a_causal_mask(share, same):
    stream, scheme = Stream.of([[Text(3), Image(3, 4), Text(2)]]), create_scheme("mousi", share=share)
    rotary = rotation(scheme.coordinates(stream).ids, inverse_frequencies(8), scheme.allocation(4))
    x = torch.randn(3, 1, 2, 17, 8, dtype=torch.float64)
    order = torch.cat([torch.arange(3), 3 + torch.randperm(12), torch.arange(15, 17)])
    y = x[..., order, :]
    first = [attention(*z, transform=rotary)[..., 15, :] for z in (x, y)]
    assert torch.allclose(*first, rtol=1e-12, atol=1e-12) == same
    causal = [attention(*z, transform=rotary, is_causal=True)[..., 3:15, :] for z in (x, y)]
    assert not torch.allclose(causal[0][..., order[3:15] - 3, :], causal[1])


def test_other_shares_raise():
    with pytest.raises(OptionError, match="share must be one of all, row"):
        create_scheme("mousi", share="column")
