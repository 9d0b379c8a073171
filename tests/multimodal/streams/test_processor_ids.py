"""Streams from types and grids: contents, and errors of types and grids that do not match."""

import pytest
import torch

from tests.cases import cases
from vispe.errors import InputError, OptionError, ShapeError
from vispe.multimodal import Image, Stream, Text, Video, create_scheme

FIELDS = ("sample", "document", "group", "kind", "tokens", "size", "picture", "tile", "shared")


def types(*rows):
    """Return token types from strings such as ``'ttiiit'``; t text, i image, v video."""
    return torch.tensor([["tiv".index(c) for c in row] for row in rows])


def grids(*rows):
    return torch.tensor(rows)


def same(ours, theirs):
    for field in FIELDS:
        assert torch.equal(getattr(ours.blocks, field), getattr(theirs.blocks, field)), field
    torch.testing.assert_close(ours.blocks.seconds, theirs.blocks.seconds, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(ours.mask, theirs.mask)


def test_text_only():
    same(Stream.from_ids(types("ttt")), Stream.of([[Text(3)]]))


def test_grids_in_patches_are_divided_by_merge():
    result = Stream.from_ids(types("t" + "i" * 6 + "tt"), grids([1, 6, 9]), merge=3)
    same(result, Stream.of([[Text(1), Image(2, 3), Text(2)]]))


def test_adjacent_images_are_separated_by_their_grids():
    result = Stream.from_ids(types("iiiiiiii"), grids([1, 2, 3], [1, 2, 1]))
    same(result, Stream.of([[Image(2, 3), Image(2, 1)]]))
    assert result.blocks.picture.tolist() == [0, 1]
    assert result.blocks.ends.tolist() == [True, True]


def test_adjacent_image_and_video():
    result = Stream.from_ids(
        types("vviiiv"), grids([1, 1, 3]), grids([2, 1, 1], [1, 1, 1]), seconds=[0.5, 2.0]
    )
    same(result, Stream.of([[Video(2, 1, 1, 0.5), Image(1, 3), Video(1, 1, 1, 2.0)]]))
    assert result.blocks.picture.tolist() == [0, 1, 2]  # in the order of the sequence


def test_grids_are_used_in_the_order_of_the_rows():
    result = Stream.from_ids(types("tiitt", "ttttt", "iiiit"), grids([1, 1, 2], [1, 2, 2]))
    rows = [[Text(1), Image(1, 2), Text(2)], [Text(5)], [Image(2, 2), Text(1)]]
    same(result, Stream.of(rows))


@cases("side", ["left", "right"])
def test_padding(side):
    rows = [[Text(2), Image(1, 2), Text(1)], [Image(1, 1), Text(1)]]
    short = "ittvi" if side == "right" else "tviit"  # what padding holds is not read
    expected = Stream.of(rows, side)
    actual = Stream.from_ids(types("ttiit", short), grids([1, 1, 2], [1, 1, 1]), mask=expected.mask.long())
    same(actual, expected)


def test_padding_inside_an_image_and_between_texts():
    mask = torch.tensor([[1, 0, 1, 1, 0, 1, 1, 0, 1]])
    result = Stream.from_ids(types("tttiiiitt"), grids([1, 3, 1]), mask=mask)
    assert result.blocks.tokens.tolist() == [2, 3, 1]
    assert torch.equal(result.mask, mask.bool())
    ids = create_scheme("mrope").coordinates(result, padding=-9).ids
    assert ids[1, 0].tolist() == [0, -9, 1, 2, -9, 3, 4, -9, 5]


def test_a_row_of_padding():
    mask = torch.tensor([[0, 0, 0], [1, 1, 1], [0, 0, 0]]).bool()
    result = Stream.from_ids(types("ttt", "tii", "ivt"), grids([1, 1, 2]), mask=mask)
    assert result.lengths.tolist() == [0, 3, 0]
    assert result.blocks.sample.tolist() == [1, 1]
    coordinates = create_scheme("mrope").coordinates(result, start=torch.tensor([7, 1, 5]))
    assert coordinates.next.tolist() == [7, 4, 5]


def test_packed_samples():
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 2]])
    result = Stream.from_ids(types("tiiiitt"), grids([1, 1, 2], [1, 2, 1]), documents=documents)
    same(result, Stream.of([[[Text(1), Image(1, 2)], [Image(2, 1), Text(1)], [Text(1)]]]))


def test_samples_may_start_at_any_number():
    kinds = types("tiiiitt")
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 2]])
    start = torch.tensor([10.0])
    ids = [
        create_scheme("mrope_i")
        .coordinates(Stream.from_ids(kinds, grids([1, 1, 2], [1, 2, 1]), documents=d), start=start)
        .ids
        for d in (documents, documents + 1, 3 * documents + 4)
    ]
    assert torch.equal(ids[0], ids[1])
    assert torch.equal(ids[0], ids[2])
    assert ids[0][0, 0].tolist() == [10, 11, 11, 0, 0, 2, 0]


def test_groups_separate_texts():
    groups = torch.tensor([[0, 0, 1, 1, 1, 0]])
    result = Stream.from_ids(types("tttttt"), groups=groups)
    same(result, Stream.of([[Text(2), Text(3, group=1), Text(1)]]))


def test_segments_instead_of_grids():
    images = [Image(1, 2, (2, 1), "last"), Image(2, 1)]
    result = Stream.from_ids(types("t" + "i" * 6 + "t", "iivvvvtt"), images, [Video(2, 2, 1, 0.25)], merge=2)
    same(result, Stream.of([[Text(1), images[0], Text(1)], [images[1], Video(2, 2, 1, 0.25), Text(2)]]))


def test_tiles_with_text_between_them_are_one_image():
    result = Stream.from_ids(types("iitiit"), [Image(1, 2, (1, 2))])
    assert result.blocks.picture.tolist() == [0, -1, 0, -1]
    assert result.blocks.tile[result.blocks.visual].tolist() == [[0, 0, 1, 2], [0, 1, 1, 2]]


def test_separate_frames():
    result = Stream.from_ids(
        types("tvvtvvt"), videos=grids([2, 2, 4]), merge=2, seconds=torch.tensor([0.5]), separate_frames=True
    )
    frame = Video(1, 1, 2, 0.5)
    same(result, Stream.of([[Text(1), frame, Text(1), frame, Text(1)]]))
    with pytest.raises(InputError, match=r"Sample 0, segment 1: 2 video .* or pass separate_frames=True"):
        Stream.from_ids(types("tvvtvvt"), videos=grids([2, 2, 4]), merge=2)


@cases("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64])
def test_dtypes_do_not_matter_and_results_are_int64(dtype):
    mask = torch.tensor([[1, 1, 1, 1, 1, 0]])
    arguments = (types("tiivvt").to(dtype), grids([1, 2, 4]).to(dtype), grids([2, 2, 2]).to(dtype))
    extra = {"documents": torch.zeros(1, 6, dtype=dtype), "groups": torch.zeros(1, 6, dtype=dtype)}
    result = Stream.from_ids(*arguments, mask=mask.to(dtype), merge=2, **extra)
    same(result, Stream.of([[Text(1), Image(1, 2), Video(2, 1, 1)]], length=6))
    assert {getattr(result.blocks, f).dtype for f in FIELDS[:-1]} == {torch.int64}
    assert result.blocks.seconds.dtype == torch.float64
    assert {result.mask.dtype, result.blocks.shared.dtype} == {torch.bool}
    assert not result.blocks.shared.any()
    assert create_scheme("mrope").coordinates(result).ids.dtype == torch.float64


@pytest.mark.gpu
def test_device_is_preserved():
    rows = [[Text(3), Image(2, 3), Video(2, 1, 2, 0.5)], [Text(4)]]
    expected = Stream.of(rows)
    clock = torch.tensor([0.5])
    kinds = types("ttt" + "i" * 6 + "vvvv", "t" * 13).cuda()
    actual = Stream.from_ids(
        kinds, grids([1, 2, 3]), grids([2, 1, 2]), mask=expected.mask.cuda(), seconds=clock
    )
    assert {getattr(actual.blocks, f).device.type for f in (*FIELDS, "seconds")} == {"cuda"}
    assert actual.mask.device.type == "cuda"
    for name in ("mrope", "vrope", "v2pe", "hope_vlm", "circlerope", "ppe"):
        scheme = create_scheme(name)
        ours, theirs = scheme.coordinates(actual), scheme.coordinates(expected)
        assert ours.ids.device.type == ours.next.device.type == "cuda"
        torch.testing.assert_close(ours.ids.cpu(), theirs.ids, rtol=0, atol=1e-9)
        torch.testing.assert_close(ours.decode(2).cpu(), theirs.decode(2), rtol=0, atol=1e-9)


def test_calls_are_independent():
    first = {"types": types("tiit", "tttt"), "images": grids([1, 1, 2])}
    second = {"types": types("ivvvvt"), "images": grids([1, 1, 1]), "videos": grids([2, 2, 1])}
    before = create_scheme("mrope").coordinates(Stream.from_ids(**first)).ids
    with pytest.raises(InputError):
        Stream.from_ids(types("tiii"), grids([1, 1, 2]))
    same(Stream.from_ids(**second), Stream.of([[Image(1, 1), Video(2, 2, 1), Text(1)]]))
    assert torch.equal(create_scheme("mrope").coordinates(Stream.from_ids(**first)).ids, before)


def test_arguments_are_not_changed():
    arguments = {"types": types("tiit"), "images": grids([1, 2, 4]), "mask": torch.tensor([[1, 1, 1, 0]])}
    copies = {k: v.clone() for k, v in arguments.items()}
    Stream.from_ids(**arguments, merge=2)
    assert all(torch.equal(arguments[k], copies[k]) for k in arguments)


WRONG = {
    "too many in a row": ("tiiit", [[1, 1, 2]], r"Sample 0, segment 1: 3 image .* 1 x 2 = 2 tokens"),
    "too many after text": ("tiitit", [[1, 1, 2]], r"Sample 0, segment 3: 1 image .* exceed"),
    "too few": ("tit", [[1, 1, 2]], r"Sample 0, segment 1: 1 image .* 1 x 2 = 2 tokens"),
    "grids left over": ("tiit", [[1, 1, 2], [1, 3, 2]], r"grids for 2 .* placeholders for only 1"),
    "no placeholders": ("tt", [[1, 1, 2]], r"grids for 1 .* placeholders for only 0"),
    "another order": (
        "tiiitiit",
        [[1, 1, 2], [1, 1, 3]],
        r"segment 1: 3 image .* 1 x 2 = 2, 1 x 3 = 3 tokens",
    ),
    "cut by text": ("itit", [[1, 1, 2]], r"Sample 0, segment 0: 1 image .* 1 x 2 = 2 tokens"),
    "several frames": ("tiiit", [[2, 1, 2]], r"Sample 0, segment 1: 3 image .* 2 x 1 x 2 = 4 tokens"),
}


@cases("case", WRONG)
@cases("kind", ["image", "video"])
def test_placeholders_that_do_not_match_their_grids(case, kind):
    row, sizes, message = WRONG[case]
    if kind == "video":
        row = row.replace("i", "v")
        message = message.replace("image", "video").replace("1 x 2 = 2", "1 x 1 x 2 = 2")
        message = message.replace("1 x 3 = 3", "1 x 1 x 3 = 3")
    with pytest.raises(InputError, match=message):
        Stream.from_ids(types(row), **{f"{kind}s": grids(*sizes)})


@cases("kind", ["i", "v"])
@cases("others", [False, True])
def test_placeholders_without_any_grids(kind, others):
    """Also with grids of the other kind."""
    arguments = {"videos" if kind == "i" else "images": grids([1, 1, 1])} if others else {}
    row = f"t{kind}{kind}t" + (("v" if kind == "i" else "i") if others else "t")
    name = "image" if kind == "i" else "video"
    with pytest.raises(InputError, match=f"Sample 0, segment 1: 2 {name} placeholders exceed"):
        Stream.from_ids(types(row), **arguments)


def test_errors_name_the_sample():
    with pytest.raises(InputError, match="Sample 2, segment 4: 1 image placeholders"):
        Stream.from_ids(
            types("tiitttt", "ttttttt", "iitvtit"), grids([1, 1, 2], [1, 2, 1], [1, 1, 2]), grids([1, 1, 1])
        )
    with pytest.raises(InputError, match="Sample 1, segment 0: 2 image placeholders"):
        Stream.from_ids(types("tiit", "iitt"), grids([1, 1, 2], [1, 1, 3]))


def test_an_image_across_samples_is_an_error():
    with pytest.raises(InputError, match="Sample 0, segment 0: 1 image"):
        Stream.from_ids(types("ii"), grids([1, 1, 2]), documents=torch.tensor([[0, 1]]))
    with pytest.raises(InputError, match="Sample 0, segment 1: 1 image"):
        Stream.from_ids(types("ti", "it"), grids([1, 1, 2]))


SHAPES = {
    "types": ({"types": torch.zeros(4, dtype=torch.long)}, r"types needs the shape \(b, s\), got \(4,\)"),
    "mask": ({"mask": torch.ones(1, 5, dtype=torch.long)}, r"mask needs the shape \(1, 4\) .* got \(1, 5\)"),
    "4D mask": ({"mask": torch.ones(1, 1, 4, 4).bool()}, r"mask needs the shape \(1, 4\)"),
    "documents": ({"documents": torch.zeros(2, 4).long()}, r"documents needs the shape \(1, 4\)"),
    "groups": ({"groups": torch.zeros(4).long()}, r"groups needs the shape \(1, 4\) .* got \(4,\)"),
    "image grids": (
        {"images": torch.tensor([1, 1, 2])},
        r"image grids need the shape \(n, 3\) .* got \(3,\)",
    ),
    "video grids": (
        {"videos": torch.tensor([[1, 2]])},
        r"video grids need the shape \(n, 3\) .* got \(1, 2\)",
    ),
    "seconds": (
        {"videos": grids([1, 1, 2]), "seconds": [1.0, 2.0]},
        r"one value for each of 1 video, got \(2,\)",
    ),
}


@cases("case", SHAPES)
def test_wrong_shapes(case):
    arguments, message = SHAPES[case]
    with pytest.raises(ShapeError, match=message):
        Stream.from_ids(**{"types": types("tvvt"), **arguments})


VALUES = {
    "unknown type": ({"types": torch.tensor([[0, 3, 2, 2]])}, InputError, r"2 for video, got \[0, 2, 3\]"),
    "negative type": ({"types": torch.tensor([[0, -1, 2, 2]])}, InputError, r"got \[-1, 0, 2\]"),
    "types of floats": ({"types": torch.zeros(1, 4)}, InputError, "types needs integers, got torch.float32"),
    "mask of floats": ({"mask": torch.zeros(1, 4)}, InputError, "mask needs bool, or integers .* torch.float32"),
    "mask of samples": ({"mask": torch.tensor([[1, 1, 2, 2]])}, InputError, r"got \[1, 2\] .* as documents"),
    "negative mask": ({"mask": torch.tensor([[-1, 0, 1, 1]])}, InputError, r"mask must be 1 .* got \[-1, 0, 1\]"),
    "nothing": ({"mask": torch.zeros(1, 4).bool()}, InputError, "at least one token, got a mask that is 0 everywhere"),
    "documents of floats": ({"documents": torch.zeros(1, 4)}, InputError, "documents needs integers"),
    "groups of bools": ({"groups": torch.zeros(1, 4).bool()}, InputError, "groups needs integers"),
    "negative document": ({"documents": torch.full((1, 4), -1)}, InputError, "must be 0 or more, got -1"),
    "negative group": ({"groups": torch.full((1, 4), -2)}, InputError, "must be 0 or more, got -2"),
    "grid of floats": ({"videos": torch.tensor([[1.0, 1, 2]])}, InputError, "video grids need integers"),
    "grid of nothing": ({"videos": grids([0, 1, 2])}, InputError, r"at least one frame.* got \[\[0, 1, 2\]\]"),
    "merge does not divide": ({"merge": 2, "videos": grids([1, 2, 3])}, InputError, "columns that 2 divides"),
    "merge of 0": ({"merge": 0}, OptionError, "merge needs an integer above 0, got 0"),
    "merge of 1.5": ({"merge": 1.5}, OptionError, "merge needs an integer above 0, got 1.5"),
    "seconds of 0": ({"seconds": [0.0]}, InputError, r"above 0, got \[0.0\]"),
    "endless seconds": ({"seconds": [float("inf")]}, InputError, r"above 0, got \[inf\]"),
    "seconds twice": ({"videos": [Video(1, 1, 2, 1.0)], "seconds": [1.0]}, OptionError, "Video.*seconds=...* instead"),
    "seconds of no video": (
        {"videos": None, "seconds": [1.0]}, OptionError, "seconds has no effect with a list of videos"
    ),
    "separate frames of a Video": (
        {"videos": [Video(2, 1, 1)], "separate_frames": True}, OptionError, "Pass a Video with t=1 for each frame",
    ),
    "a video among images": ({"images": [Video(1, 1, 2)]}, InputError, r"or a Image for each, got Video\("),
    "a list of numbers": ({"videos": [[1, 1, 2]]}, InputError, r"or a Video for each, got \[1, 1, 2\]"),
}  # fmt: skip


@cases("case", VALUES)
def test_wrong_values(case):
    arguments, error, message = VALUES[case]
    with pytest.raises(error, match=message):
        Stream.from_ids(**{"types": types("tvvt"), "videos": grids([1, 1, 2]), **arguments})


def test_samples_of_padding_may_have_any_number():
    mask = torch.tensor([[0, 1, 1]])
    result = Stream.from_ids(types("ttt"), mask=mask, documents=torch.tensor([[-1, 0, 1]]))
    assert result.blocks.document.tolist() == [0, 1]


HAND = {
    "nothing": ([], {}, InputError, "at least one segment, got none"),
    "empty rows": ([[], []], {}, InputError, "at least one segment, got none"),
    "no list of rows": (
        [Text(5)],
        {},
        InputError,
        r"A row must be a list of segments, got Text\(.*Stream.of\(\[\[",
    ),
    "numbers": (
        [[5]],
        {},
        InputError,
        "A row must contain Text, Image, Video and Parallel, or lists of them, got 5",
    ),
    "too deep": (
        [[[[Text(1)]]]],
        {},
        InputError,
        "A row must contain Text, Image, Video and Parallel, or lists of them",
    ),
    "mixed": ([[Text(1), [Text(1)]]], {}, InputError, "got both"),
    "too long": (
        [[Text(1)], [Image(2, 2)]],
        {"length": 3},
        InputError,
        "Row 1 has 4 tokens, more than length=3",
    ),
    "padding": (
        [[Text(1)]],
        {"padding": "both"},
        OptionError,
        "padding must be 'left' or 'right', got 'both'",
    ),
}


@cases("case", HAND)
def test_wrong_streams_of_segments(case):
    rows, options, error, message = HAND[case]
    with pytest.raises(error, match=message):
        Stream.of(rows, **options)


SEGMENTS = {
    "no tokens": (lambda: Text(0), "Text: tokens needs an integer above 0, got tokens=0"),
    "true": (lambda: Text(True), "Text: tokens needs an integer above 0, got tokens=True"),
    "group": (lambda: Text(1, group=-1), "Text: group needs an integer of 0 or more, got group=-1"),
    "rows": (lambda: Image(0, 2), "Image: h needs an integer above 0, got h=0"),
    "columns": (lambda: Image(2, 1.5), "Image: w needs an integer above 0, got w=1.5"),
    "tiles": (
        lambda: Image(2, 2, (1, 2, 3)),
        r"Image: tiles needs a list of 2 integers above 0, got tiles=\(1, 2, 3\)",
    ),
    "tile rows": (
        lambda: Image(2, 2, (0, 2)),
        r"Image: tiles needs a list of 2 integers above 0, got tiles=\(0, 2\)",
    ),
    "thumbnail": (
        lambda: Image(2, 2, thumbnail="both"),
        "Image: thumbnail must be one of first, last, got 'both'",
    ),
    "frames": (lambda: Video(-1, 2, 2), "Video: t needs an integer above 0, got t=-1"),
    "seconds": (lambda: Video(1, 2, 2, 0.0), "Video: seconds needs a number above 0, got seconds=0.0"),
}


@cases("case", SEGMENTS)
def test_wrong_segments(case):
    make, message = SEGMENTS[case]
    with pytest.raises(OptionError, match=message):
        make()


def test_types_without_values_raise():
    with pytest.raises(InputError, match="types needs values, got a tensor on the meta device"):
        Stream.from_ids(torch.zeros(1, 3, dtype=torch.long, device="meta"))
