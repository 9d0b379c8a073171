"""Text coupled to cells of images, and the ids of two tasks."""

import pytest
import torch

from tests.cases import cases
from vispe.attention import attention
from vispe.errors import InputError, OptionError
from vispe.grid.frequencies import inverse_frequencies
from vispe.multimodal import Image, Stream, Text, Video, create_scheme, list_schemes, rotation
from vispe.multimodal.streams.position_coupling import addition_positions, board_positions, draw_starts
from vispe.multimodal.streams.stream_text import parse_segments

SCHEMES = [n for n in list_schemes() if n != "mhrope"] + ["mhrope(sections=[1,1,0])", "bilevel(rotate=intra)"]


def ids_of(name, *rows, padding="right"):
    return create_scheme(name).coordinates(Stream.of(list(rows), padding)).ids


@cases("name", SCHEMES)
def test_text_has_the_coordinates_of_its_cells(name):
    cells = [(0, 0), (2, 3), (1, 2)]
    segments = [Text(2), Image(3, 4), Text(1), Text(3, cells=cells, of=0), Text(2)]
    plain = [*segments[:3], Text(3), Text(2)]
    for padding, shift in (("left", 5), ("right", 0)):
        result, rope1d = (
            ids_of(name, row, [Text(25)], padding=padding)[:, 0, shift:] for row in (segments, plain)
        )
        for k, (row, column) in enumerate(cells):
            assert torch.equal(result[:, 15 + k], result[:, 2 + 4 * row + column])
        others = torch.tensor([*range(15), 18, 19])  # what comes before and after is where it would be
        assert torch.equal(result[:, others], rope1d[:, others])
    coupled, uncoupled = (create_scheme(name).coordinates(Stream.of([row])) for row in (segments, plain))
    assert torch.equal(coupled.next, uncoupled.next)


@cases("name", SCHEMES)
def test_logits_between_coupled_tokens_and_their_cells_are_those_of_offset_0(name):
    """In every scheme, the rotation does not change the product of a coupled token with its cell."""
    segments = [Text(5), Image(3, 4), Text(3, cells=[(0, 1), (2, 3), (1, 0)]), Text(1)]
    scheme = create_scheme(name)
    rotary = rotation(ids_of(name, segments), inverse_frequencies(32), scheme.allocation(16, 2))
    q, k = torch.randn(2, 1, 2, 21, 32, dtype=torch.float64)
    rotated, plain = rotary.query(q) @ rotary.key(k).mT, q @ k.mT
    for token, cell in ((17, 5 + 1), (18, 5 + 11), (19, 5 + 4)):
        torch.testing.assert_close(rotated[..., token, cell], plain[..., token, cell], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(rotated[..., cell, token], plain[..., cell, token], rtol=1e-6, atol=1e-6)


def test_a_box_has_the_coordinates_of_its_centre():
    """Ends are inclusive; the centre may be between cells."""
    boxes = [(0, 0, 2, 2), (0, 1, 1, 1), (0, 0, 1, 1), (1, 2, 1, 3)]
    ids = ids_of("mrope(spatial_reset=true)", [Image(3, 4), Text(4, cells=boxes)])[:, 0, 12:]
    assert ids.T.tolist() == [[0, 1, 1], [0, 0.5, 1], [0, 0.5, 0.5], [0, 1, 2.5]]
    assert ids_of("rope1d", [Image(3, 4), Text(4, cells=boxes)])[0, 0, 12:].tolist() == [5, 3, 2.5, 6.5]


def test_one_cell_for_all_tokens_and_several_images():
    first, second = Image(2, 2), Image(2, 3)
    for of in (1, second):
        ids = ids_of("mrope", [first, second, Text(2, cells=[(1, 2)], of=of)])
        assert ids[:, 0, 10:].tolist() == [[2, 2], [3, 3], [4, 4]]
    # each packed sample has images of its own, and text may come before its image
    packed = [[Image(1, 1), Text(1)], [Text(1, cells=[(0, 1)]), Image(1, 2)]]
    assert ids_of("mrope", packed)[:, 0, 2].tolist() == [1, 1, 2]
    twice = Image(2, 2)
    same = [twice, Image(2, 2), Text(1, cells=[(0, 0)], of=twice)]
    assert ids_of("mrope", same)[:, 0, 8].tolist() == [0, 0, 0]  # that very segment, not one of its size


def test_tiles_and_videos():
    """Rows and columns run through all tiles; in videos the frame comes first."""
    for small, first in (("first", 4), ("last", 0)):
        stream = [Image(2, 2, (1, 2), small), Text(2, cells=[(1, 2), (0, 1)])]
        ids = ids_of("rope1d", stream)[0, 0]
        assert ids[12:].tolist() == [first + 4 + 2, first + 1]
    film = [Video(3, 2, 2), Text(2, cells=[(2, 1, 0), (1, 0, 0, 1, 1)])]
    assert ids_of("mrope", film)[:, 0, 12:].T.tolist() == [[2, 1, 0], [1, 0.5, 0.5]]


def test_coupled_text_attends_like_its_cell():
    """Attention of the other tokens, with the same keys, is unchanged."""
    plain, named = [Image(2, 2), Text(3)], [Image(2, 2), Text(1), Text(1, cells=[(1, 1)]), Text(1)]
    scheme, x = create_scheme("mrope"), torch.randn(3, 1, 2, 7, 32, dtype=torch.float64)
    one, other = (
        attention(*x, transform=rotation(ids_of("mrope", s), inverse_frequencies(32), scheme.allocation(16)),
                  is_causal=True)
        for s in (plain, named)
    )  # fmt: skip
    assert torch.equal(one[..., :5, :], other[..., :5, :])
    assert not torch.allclose(one[..., 5, :], other[..., 5, :])


WRONG = {
    (r"cell \(2, 0\) is outside of Image.* 2 x 3 tokens", InputError): (
        [Image(2, 3)],
        {"cells": [(2, 0)]},
    ),
    (r"cell \(0, 2, 1, 1\) is outside", InputError): ([Image(2, 3)], {"cells": [(0, 2, 1, 1)]}),
    ("one image or video of its sample, got 0. Select one", InputError): ([], {"cells": [(0, 0)]}),
    ("one image or video of its sample, got 2. Select one", InputError): (
        [Image(1, 1), Image(1, 1)],
        {"cells": [(0, 0)]},
    ),
    ("refers to image or video 2 of its sample, counted from 0, but there are 1", InputError): (
        [Image(1, 1)],
        {"cells": [(0, 0)], "of": 2},
    ),
    ("must occur exactly once", InputError): ([Image(1, 1)], {"cells": [(0, 0)], "of": Image(9, 9)}),
    (r"must be \(row, column\) or \(r0, c0, r1, c1\), got \(0, 0, 0\)", InputError): (
        [Image(1, 1)],
        {"cells": [(0, 0, 0)]},
    ),
    (r"must be \(frame, row, column\) or .*, got \(0, 0\)", InputError): (
        [Video(1, 1, 1)],
        {"cells": [(0, 0)]},
    ),
    ("has 2 frames of 1 x 1 tokens", InputError): ([Video(2, 1, 1)], {"cells": [(2, 0, 0)]}),
    ("Text of 3 tokens needs a cell for each of them, or one for all, got 2", OptionError): (
        [],
        {"cells": [(0, 0)] * 2},
    ),
    ("of must be an image or video of the sample, or its index from 0 on", OptionError): (
        [],
        {"cells": [(0, 0)], "of": -1},
    ),
    ("needs cells, got None", OptionError): ([], {"of": 0}),
    ("cells needs a list", OptionError): ([], {"cells": [(0, -1)]}),
}


@cases(("message", "kind"), WRONG)
def test_errors(message, kind):
    images, options = WRONG[message, kind]
    with pytest.raises(kind, match=message):
        Stream.of([[*images, Text(3, **options)]])


def test_on_the_command_line():
    text = "image:2x3 text:2#1. text:3@1,2 image:4x4 text:1@0,0,3,3of1"
    expected = [Image(2, 3), Text(2, group=1, boundary=True), Text(3, cells=((1, 2),)), Image(4, 4),
              Text(1, cells=((0, 0, 3, 3),), of=1)]  # fmt: skip
    assert parse_segments(text) == expected
    with pytest.raises(
        OptionError, match=r"'text:2@1' of the stream cannot be read\. .* text:2@1,3 names row 1"
    ):
        parse_segments("text:2@1")


@cases("reverse_input", [False, True])
@cases("reverse_output", [False, True])
def test_digits_of_equal_significance_share_an_id(reverse_input, reverse_output):
    a, b, total, start = 947, 68, 1015, 5
    question, answer = addition_positions(
        3, 2, 4, start, reverse_input=reverse_input, reverse_output=reverse_output
    )

    def written(number, reverse):
        return str(number)[::-1] if reverse else str(number)

    text = written(a, reverse_input) + "+" + written(b, reverse_input) + "=" + written(total, reverse_output)
    powers = {}
    for token, position in zip(text, [*question.tolist(), *answer.tolist()], strict=True):
        if token == "=":
            assert position == (start if reverse_output else start + 5)
        elif token == "+":
            assert position == start
        else:
            powers[position - start - 1] = (*powers.get(position - start - 1, ()), token)
    assert {p: sorted(d) for p, d in powers.items()} == {
        0: sorted("785"), 1: sorted("461"), 2: sorted("90"), 3: ["1"],
    }  # fmt: skip


def test_answers_share_the_ids_of_the_board():
    board, answer = board_positions(3, 2, [4, 7])
    assert board.tolist() == [[5, 6, 7, 5, 6, 7, 4], [8, 8, 8, 9, 9, 9, 7]]
    assert torch.equal(board[:, :-1], answer)
    generator = torch.Generator().manual_seed(0)
    starts = [draw_starts([3, 2], 6, generator) for _ in range(200)]
    assert {s[0] for s in starts} == {1, 2, 3}
    assert {s[1] for s in starts} == {1, 2, 3, 4}
    with pytest.raises(OptionError, match="longest=3 is too small for a side of 3"):
        draw_starts([3], 3)
    with pytest.raises(OptionError, match="width needs an integer above 0, got width=0"):
        board_positions(0, 2)
    with pytest.raises(OptionError, match=r"start needs two ids, of column and row, got \[1\]"):
        board_positions(2, 2, [1])
    with pytest.raises(OptionError, match="second needs an integer above 0, got second=True"):
        addition_positions(1, True, 1)
