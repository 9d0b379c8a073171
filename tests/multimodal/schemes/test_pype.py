"""PyPE: rings of images of any shape, their number, and their symmetry."""

import torch

from tests.cases import cases
from vispe.multimodal import Image, Stream, Text, Video, create_scheme


def rings(h, w, **options):
    """Return the ring of every token of an image (h, w), and the advance of the counter."""
    result = create_scheme("pype", **options).coordinates(Stream.of([[Text(7), Image(h, w), Text(1)]]))
    return (result.ids[0, 0, 7:-1] - 7).view(h, w).long(), int(result.ids[0, 0, -1]) - 7


def test_worked_examples_of_rings():
    first, cost = rings(5, 6)
    assert first.tolist() == [
        [0, 0, 0, 0, 0, 0],
        [0, 1, 1, 1, 1, 0],
        [0, 1, 2, 2, 1, 0],
        [0, 1, 1, 1, 1, 0],
        [0, 0, 0, 0, 0, 0],
    ]
    assert cost == 3
    second, cost = rings(5, 6, rings=2)  # a second size of the middle
    assert torch.equal(second, first.clamp(max=1))
    assert cost == 2
    one, cost = rings(5, 6, rings=1)
    assert (one.unique().tolist(), cost) == ([0], 1)


@cases("limit", [None, 1, 3, 99])
@cases(("h", "w"), [(1, 1), (1, 9), (2, 7), (24, 24), (24, 36), (13, 5)])
def test_a_square_of_symmetries(h, w, limit):
    result, cost = rings(h, w, rings=limit)
    for other in (result.flip(0), result.flip(1), rings(w, h, rings=limit)[0].T):
        assert torch.equal(result, other)
    assert result.unique().tolist() == list(range(cost))
    assert cost == min((min(h, w) + 1) // 2, limit or 99)
    neighbours = torch.cat([result.diff(dim=0).flatten(), result.diff(dim=1).flatten()])
    assert set(neighbours.abs().tolist()) <= {0, 1}


def test_frames_tiles_and_the_next_text():
    stream = Stream.of([[Video(2, 3, 3), Image(1, 2, (1, 2), "last"), Text(1)], [Text(3)]], padding="left")
    result = create_scheme("pype").coordinates(stream)
    first = [0] * 4 + [1] + [0] * 4
    assert result.ids[0, 0].tolist() == [*first, *(2 + r for r in first), 4, 4, 5, 5, 6, 6, 7]
    assert result.decode(2)[0].tolist() == [[8, 9], [3, 4]]
