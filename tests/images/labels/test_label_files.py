"""Label images, colours, scribbles, legends and ground-truth masks; every error message."""

import json
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from tests.cases import cases
from vispe.errors import InputError, OptionError
from vispe.images.labels.label_files import read_label_set, read_labels
from vispe.images.labels.truth_files import read_truth

SHARED = Path(__file__).resolve().parents[3] / "../shared/data/microscopy"
RNG = np.random.default_rng(11)
H, W = 33, 47
SHAPE = (1, H, W)


def sparse(*levels):
    """Return a label image (H, W) uint16 with 20 pixels of each level."""
    a = np.zeros(H * W, np.uint16)
    positions = RNG.permutation(H * W)
    for i, level in enumerate(levels):
        a[positions[20 * i : 20 * i + 20]] = level
    return a.reshape(H, W)


def save(path, a):
    if Path(path).suffix == ".tif":
        tifffile.imwrite(path, a, photometric="rgb" if a.ndim == 3 and a.shape[2] in (3, 4) else "minisblack")
    else:
        Image.fromarray(a).save(path)
    return path


def strokes(path, *entries):
    path.write_text(json.dumps(list(entries)))
    return path


@cases("name", ["a.png", "a.tif", "a.bmp"])
@cases("kind", [np.uint8, np.uint16, np.int32, np.float32])
def test_contiguous_grey_levels_are_class_numbers(tmp_path, name, kind):
    if (name == "a.bmp" and kind != np.uint8) or (name == "a.png" and kind in (np.int32, np.float32)):
        pytest.skip("the format has no such type")
    a = sparse(1, 2, 3)
    actual = read_labels(save(tmp_path / name, a.astype(kind)), SHAPE)
    assert actual.values.dtype == np.int32
    np.testing.assert_array_equal(actual.values, a[None])
    assert actual.names == ("class 1", "class 2", "class 3")
    assert actual.notes == ()
    assert actual.colors is None


def test_noncontiguous_grey_levels_are_ranked_with_a_note(tmp_path):
    a = sparse(85, 170, 255)
    path = save(tmp_path / "a.png", a.astype(np.uint8))
    actual = read_labels(path, SHAPE)
    np.testing.assert_array_equal(actual.values, a[None] // 85)
    assert actual.notes == (f"{path}: grey levels were mapped to classes: 85 -> 1, 170 -> 2, 255 -> 3.",)
    b = sparse(1, 3)
    actual = read_labels(save(tmp_path / "b.tif", b), SHAPE)
    np.testing.assert_array_equal(actual.values[0], np.array([0, 1, 0, 2])[b])
    assert "1 -> 1, 3 -> 2" in actual.notes[0]


def test_class_names_fix_the_class_numbers(tmp_path):
    a = sparse(1, 3)
    path = save(tmp_path / "a.tif", a)
    actual = read_labels(path, SHAPE, classes=["m", "p", "void"])
    np.testing.assert_array_equal(actual.values, a[None])
    assert actual.names == ("m", "p", "void")
    assert actual.notes == ("class 'p' has no labelled pixels in a.tif; it remains a class.",)
    assert read_labels(save(tmp_path / "b.tif", sparse(9, 90)), SHAPE, classes=["m", "p"]).names == ("m", "p")
    with pytest.raises(InputError, match=r"got 9, 90, fewer than the 3 class names. Use the values 1 to 3"):
        read_labels(tmp_path / "b.tif", SHAPE, classes=["m", "p", "v"])
    with pytest.raises(InputError, match=r"got 1, 2, 3, more than the 2 class names. Use the values 1 to 2"):
        read_labels(save(tmp_path / "c.tif", sparse(1, 2, 3)), SHAPE, classes=["m", "p"])


@cases("classes", [[], ["a", ""], ["a", 3], "ab"])
def test_invalid_class_names_raise(tmp_path, classes):
    with pytest.raises(InputError, match=r"classes: class names must be non-empty texts"):
        read_labels(save(tmp_path / "a.tif", sparse(1, 2)), SHAPE, classes=classes)


def test_duplicate_class_names_raise(tmp_path):
    with pytest.raises(InputError, match=r"classes: class names must be unique, got 'a' twice"):
        read_labels(save(tmp_path / "a.tif", sparse(1, 2)), SHAPE, classes=["a", "a"])


def test_legends_map_levels_to_names_and_invalid_ones_raise(tmp_path):
    path = save(tmp_path / "a.png", sparse(85, 255).astype(np.uint8))

    def read(content, **options):
        legend = tmp_path / "legend.json"
        legend.write_text(content if isinstance(content, str) else json.dumps(content))
        return read_labels(path, SHAPE, legend=legend, **options)

    actual = read({"170": "b", "85": "a", "255": "c", "0": "nothing"})
    assert actual.names == ("a", "b", "c")
    assert set(np.unique(actual.values)) == {0, 1, 3}
    assert "the name 'nothing' of the legend denotes unlabelled pixels, not a class." in actual.notes
    assert "class 'b' has no labelled pixels in a.png; it remains a class." in actual.notes
    assert read(["x", "y"]).names == ("x", "y")
    assert read({"1": "x", "2": "y"}).names == ("x", "y")
    with pytest.raises(InputError, match=r"levels must be in the legend \(85, 100\), got 255"):
        read({"85": "a", "100": "b"})
    with pytest.raises(InputError, match=r"keys must be numbers or colours such as '#ff0000', got 'one'"):
        read({"one": "a"})
    with pytest.raises(InputError, match=r"mixes numbers and colours"):
        read({"1": "a", "#ff0000": "b"})
    with pytest.raises(InputError, match=r"contains a level twice"):
        read({"1": "a", "01": "b"})
    with pytest.raises(InputError, match=r"legend.json is not valid JSON: .* in line 2"):
        read('{"1":\n x}')
    with pytest.raises(InputError, match=r"must contain a list of names or an object"):
        read("3")
    with pytest.raises(InputError, match=r"no.json does not exist"):
        read_labels(path, SHAPE, legend=tmp_path / "no.json")
    with pytest.raises(OptionError, match=r"`classes` and `legend` are mutually exclusive"):
        read(["x", "y"], classes=["x", "y"])


@cases("name", ["a.png", "a.tif"])
def test_colours_are_mapped_to_classes(tmp_path, name):
    a = sparse(1, 2, 3)
    lut = np.array([[0, 0, 0], [255, 0, 0], [0, 255, 0], [0, 0, 255]], np.uint8)
    path = save(tmp_path / name, lut[a])
    actual = read_labels(path, SHAPE)
    np.testing.assert_array_equal(actual.values[0], np.array([0, 3, 2, 1])[a])
    assert actual.colors == ((0, 0, 255), (0, 255, 0), (255, 0, 0))
    assert actual.notes == (
        f"{path}: colours were mapped to classes: #0000ff -> 1, #00ff00 -> 2, #ff0000 -> 3.",
    )
    legend = tmp_path / "l.json"
    legend.write_text('{"#FF0000": "red", "#0000ff": "blue", "#00ff00": "green", "#123456": "other"}')
    actual = read_labels(path, SHAPE, legend=legend)
    assert actual.names == ("blue", "green", "other", "red")
    np.testing.assert_array_equal(actual.values[0], np.array([0, 4, 2, 1])[a])
    assert actual.colors[3] == (255, 0, 0)


def test_transparent_pixels_are_unlabelled_and_grey_rgb_is_grey(tmp_path):
    a = sparse(1, 2)
    rgba = np.array([[9, 200, 9, 0], [255, 0, 0, 255], [0, 0, 255, 255]], np.uint8)[a]
    actual = read_labels(save(tmp_path / "a.png", rgba), SHAPE)
    np.testing.assert_array_equal(actual.values[0], np.array([0, 2, 1])[a])
    grey = np.repeat(a.astype(np.uint8)[..., None], 3, 2)
    actual = read_labels(save(tmp_path / "g.png", grey), SHAPE)
    np.testing.assert_array_equal(actual.values[0], a)
    assert actual.colors is None


def test_palette_images_are_read_by_index_or_colour(tmp_path):
    a = sparse(1, 2).astype(np.uint8)
    image = Image.fromarray(a, "P")
    image.putpalette([0, 0, 0, 10, 20, 30, 5, 5, 5])
    image.save(tmp_path / "i.png")
    np.testing.assert_array_equal(read_labels(tmp_path / "i.png", SHAPE).values[0], a)
    image.putpalette([255, 0, 0, 0, 0, 0, 0, 0, 255])
    image.save(tmp_path / "c.png")
    actual = read_labels(tmp_path / "c.png", SHAPE)
    np.testing.assert_array_equal(actual.values[0], np.array([2, 0, 1])[a])
    np.testing.assert_array_equal(read_truth(tmp_path / "c.png", SHAPE)[0], a + 1)


@cases("compression", [None, "group4"])
def test_miniswhite_files_keep_the_stored_class_numbers(tmp_path, compression):
    mask = sparse(1).astype(bool)
    Image.fromarray(mask).save(tmp_path / "a.tif", compression=compression)
    with tifffile.TiffFile(tmp_path / "a.tif") as tif:
        inverted = tif.pages[0].photometric == tifffile.PHOTOMETRIC.MINISWHITE
    np.testing.assert_array_equal(read_truth(tmp_path / "a.tif", SHAPE)[0], (mask ^ inverted) + 1)
    tifffile.imwrite(tmp_path / "b.tif", sparse(1, 2), photometric="miniswhite")
    assert set(np.unique(read_labels(tmp_path / "b.tif", SHAPE).values)) == {0, 1, 2}


@cases("bits", [1, 2, 4])
def test_png_of_1_2_and_4_bits_keeps_the_class_numbers(tmp_path, bits):
    import struct
    import zlib

    a = RNG.integers(0, 2**bits, (H, W)).astype(np.uint8)
    rows = b""
    for row in a:
        bit_values = np.unpackbits(row[:, None], axis=1)[:, 8 - bits :].ravel()
        rows += b"\0" + np.packbits(bit_values).tobytes()

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", W, H, bits, 0, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + body)
    np.testing.assert_array_equal(read_truth(tmp_path / "a.png", SHAPE)[0], a + 1)


def test_dense_labels_start_at_zero(tmp_path):
    a = RNG.integers(0, 3, (H, W)).astype(np.uint8)
    actual = read_labels(save(tmp_path / "a.png", a), SHAPE, dense=True, classes=["m", "p", "q"])
    np.testing.assert_array_equal(actual.values[0], a + 1)
    assert actual.notes == ()
    actual = read_labels(save(tmp_path / "b.png", (a > 0) * np.uint8(255)), SHAPE, dense=True)
    np.testing.assert_array_equal(actual.values[0], (a > 0) + 1)
    assert "0 -> 1, 255 -> 2" in actual.notes[0]
    (tmp_path / "l.json").write_text('{"0": "background", "1": "p", "2": "q"}')
    actual = read_labels(tmp_path / "a.png", SHAPE, dense=True, legend=tmp_path / "l.json")
    assert actual.names == ("background", "p", "q")
    path = strokes(tmp_path / "s.json", {"class": 1, "points": [[1, 1]]})
    with pytest.raises(OptionError, match=r"needs a label for every pixel, got scribbles"):
        read_labels(path, SHAPE, dense=True)


def test_labels_of_another_size_or_page_count_raise(tmp_path):
    path = save(tmp_path / "a.png", sparse(1, 2).astype(np.uint8))
    message = r"labels are 33 x 47 pixels \(height x width\), but the image is 34 x 47. Sizes must be equal"
    with pytest.raises(InputError, match=message):
        read_labels(path, (1, 34, 47))
    with pytest.raises(InputError, match=r"but the image is 47 x 33 \(height and width are exchanged\)"):
        read_labels(path, (1, W, H))
    with pytest.raises(InputError, match=r"the labels have 1 page, but the image has 5. Set `label_page`"):
        read_labels(path, (5, H, W))
    actual = read_labels(path, (5, H, W), label_page=3)
    assert actual.values.shape == (5, H, W)
    np.testing.assert_array_equal(actual.values[3], read_labels(path, SHAPE).values[0])
    assert actual.values[[0, 1, 2, 4]].sum() == 0
    with pytest.raises(InputError, match=r"label_page must be a page of the image \(0 to 4\), got 5"):
        read_labels(path, (5, H, W), label_page=5)
    stack = np.stack([sparse(1, 2) for _ in range(4)])
    tifffile.imwrite(tmp_path / "s.tif", stack, photometric="minisblack")
    np.testing.assert_array_equal(read_labels(tmp_path / "s.tif", (4, H, W)).values, stack)
    with pytest.raises(InputError, match=r"the labels have 4 pages, but the image has 5"):
        read_labels(tmp_path / "s.tif", (5, H, W))
    with pytest.raises(OptionError, match=r"label_page needs a single page, got label_page=0 and 4 pages"):
        read_labels(tmp_path / "s.tif", (4, H, W), label_page=0)


def test_fewer_than_two_classes_raise(tmp_path):
    with pytest.raises(InputError, match=r"needs at least 2 labelled classes, got 1 \(class 1\)"):
        read_labels(save(tmp_path / "a.tif", sparse(7)), SHAPE)
    with pytest.raises(InputError, match=r"needs at least 2 labelled classes, got 0 \(none\)"):
        read_labels(save(tmp_path / "b.tif", sparse()), SHAPE)
    with pytest.raises(InputError, match=r"needs at least 2 labelled classes, got 1 \(p\)"):
        read_labels(save(tmp_path / "c.tif", sparse(2)), SHAPE, classes=["m", "p"])
    with pytest.raises(InputError, match=r"needs at least 2 labelled classes, got 0 \(none\)"):
        read_labels(strokes(tmp_path / "s.json"), SHAPE)


def test_more_than_max_classes_raise(tmp_path):
    path = save(tmp_path / "a.tif", sparse(*range(1, 23)))
    with pytest.raises(InputError, match=r"max_classes=20, got 22 distinct values \(1, 2, .*, \.\.\.\)"):
        read_labels(path, SHAPE)
    assert len(read_labels(path, SHAPE, max_classes=22).names) == 22
    photo = RNG.integers(0, 256, (H, W, 3), dtype=np.uint8)
    with pytest.raises(
        InputError,
        match=r"max_classes=20, got .* on 100 % of the pixels, probably a copy of the image",
    ):
        read_labels(save(tmp_path / "p.png", photo), SHAPE)


def test_lossy_fractional_negative_and_multichannel_labels_raise(tmp_path):
    a = sparse(1, 2)
    Image.fromarray(a.astype(np.uint8)).save(tmp_path / "a.jpg")
    with pytest.raises(
        InputError, match=r"a.jpg: JPEG compression changes label values. Save .* PNG or TIFF"
    ):
        read_labels(tmp_path / "a.jpg", SHAPE)
    Image.fromarray(a.astype(np.uint8)).save(tmp_path / "j.tif", compression="jpeg")
    with pytest.raises(InputError, match=r"j.tif: JPEG compression"):
        read_labels(tmp_path / "j.tif", SHAPE)
    for bad in (0.5, np.nan, np.inf):
        b = a.astype(np.float32)
        b[0, 0] = bad
        with pytest.raises(InputError, match=r"label values must be integers, got fractions or NaN"):
            read_labels(save(tmp_path / "f.tif", b), SHAPE)
    b = a.astype(np.int16)
    b[0, 0] = -1
    with pytest.raises(InputError, match=r"label values must be 0 or more, got -1"):
        read_labels(save(tmp_path / "n.tif", b), SHAPE)
    tifffile.imwrite(
        tmp_path / "c.tif", np.ones((H, W, 5), np.uint8), photometric="minisblack", planarconfig="contig"
    )
    with pytest.raises(
        InputError, match=r"labels must have 1 channel \(class numbers\) or 3 \(colours\), got 5"
    ):
        read_labels(tmp_path / "c.tif", SHAPE)


def test_classes_with_few_pixels_give_a_note(tmp_path):
    a = sparse(1, 2)
    a[a == 2] = 0
    a[0, :3] = 2
    a[1, :5] = 1
    assert read_labels(save(tmp_path / "a.tif", a), SHAPE).notes == (
        "class 'class 2' has only 3 labelled pixels in a.tif; label more of it.",
    )


def test_label_sets_share_class_numbers(tmp_path):
    a, b = sparse(85, 170, 255), sparse(170)
    paths = [save(tmp_path / "a.tif", a), save(tmp_path / "b.tif", b)]
    first, second = read_label_set(paths, [SHAPE, SHAPE])
    np.testing.assert_array_equal(first.values[0], a // 85)
    np.testing.assert_array_equal(second.values[0], b // 85)
    assert first.names == second.names == ("class 1", "class 2", "class 3")
    assert "class 'class 1' has no labelled pixels in b.tif; it remains a class." in second.notes
    save(tmp_path / "c.png", np.array([[0, 0, 0], [255, 0, 0]], np.uint8)[(b > 0) * 1])
    with pytest.raises(InputError, match=r"the 2 label files: mixes grey and colour labels"):
        read_label_set([paths[0], tmp_path / "c.png"], [SHAPE, SHAPE])


# --- scribbles ---


def test_strokes_are_drawn_with_their_width(tmp_path):
    path = strokes(
        tmp_path / "s.json",
        {"class": 1, "width": 3, "points": [[5, 2], [20, 2]]},
        {"class": 2, "points": [[30, 10]]},
        {"class": 2, "width": 1, "points": [[0, 32], [0, 20], [12, 20]]},
        {"class": 3, "width": 4, "points": [[40.4, 30.4]]},
    )
    expected = np.zeros((H, W), int)
    expected[1:4, 4:22] = 1
    expected[10, 30] = 2
    expected[20:33, 0] = expected[20, :13] = 2
    expected[29:33, 39:43] = 3
    expected[[29, 29, 32, 32], [39, 42, 39, 42]] = 0  # a round pen
    np.testing.assert_array_equal(read_labels(path, SHAPE).values[0], expected)


def test_later_strokes_win_with_a_note(tmp_path):
    path = strokes(
        tmp_path / "s.json",
        {"class": 1, "points": [[0, 5], [20, 5]]},
        {"class": 2, "points": [[10, 0], [10, 12]]},
        {"class": 2, "points": [[10, 3], [10, 20]]},
    )
    actual = read_labels(path, SHAPE)
    assert actual.values[0, 5, 10] == 2
    assert actual.notes == (
        "1 pixel of s.json is covered by strokes of different classes; the later stroke wins.",
    )


def test_strokes_select_the_class_by_name_and_the_page(tmp_path):
    path = strokes(
        tmp_path / "s.json",
        {"class": "p", "points": [[1, 1], [12, 1]]},
        {"class": 1, "points": [[1, 9], [12, 9]], "page": 2},
    )
    actual = read_labels(path, (3, H, W), classes=["m", "p"], label_page=1)
    assert (actual.values[1, 1, 1:13] == 2).all()
    assert (actual.values[2, 9, 1:13] == 1).all()
    assert (actual.values > 0).sum() == 24
    with pytest.raises(InputError, match=r"stroke 0 has no page, but the image has several"):
        read_labels(path, (3, H, W), classes=["m", "p"])
    with pytest.raises(InputError, match=r"stroke 1: the page must be 0 to 1, got 2"):
        read_labels(path, (2, H, W), classes=["m", "p"], label_page=0)
    with pytest.raises(InputError, match=r"stroke 0: class names need `classes` or `legend`, got 'p'"):
        read_labels(path, (3, H, W), label_page=1)
    with pytest.raises(InputError, match=r"stroke 0: the class must be one of matrix, pore, got 'p'"):
        read_labels(path, (3, H, W), label_page=1, classes=["matrix", "pore"])


def test_strokes_at_the_border_are_clipped(tmp_path):
    path = strokes(
        tmp_path / "s.json",
        {"class": 1, "width": 9, "points": [[-0.5, -0.5]]},
        {"class": 2, "width": 9, "points": [[W - 0.51, H - 0.51]]},
    )
    actual = read_labels(path, SHAPE).values[0]
    assert actual[0, 0] == 1
    assert actual[-1, -1] == 2
    assert (actual == 1).sum() == (actual == 2).sum()


@cases(
    ("entry", "message"),
    [
        (3, r"stroke 0: strokes must be objects .*, got 3"),
        ({"class": 1}, r"stroke 0 has no 'points'"),
        ({"points": [[1, 1]]}, r"stroke 0 has no 'class'"),
        ({"class": 1, "points": [[1, 1]], "widht": 3}, r"unknown key 'widht'.*Did you mean 'width'"),
        ({"class": 0, "points": [[1, 1]]}, r"class must be an integer from 1 or a name, got class=0"),
        ({"class": 1.5, "points": [[1, 1]]}, r"got class=1.5"),
        ({"class": True, "points": [[1, 1]]}, r"got class=True"),
        (
            {"class": 1, "width": 0, "points": [[1, 1]]},
            r"width must be an integer from 1 to 1024 px, got width=0",
        ),
        ({"class": 1, "page": -1, "points": [[1, 1]]}, r"got page=-1"),
        (
            {"class": 1, "points": []},
            r"points must be a non-empty list of \[x, y\] pairs of numbers, got points=\[\]",
        ),
        ({"class": 1, "points": [[1, 1, 1]]}, r"got points="),
        ({"class": 1, "points": [[1], [1, 2]]}, r"got points="),
        ({"class": 1, "points": [["a", "b"]]}, r"got points="),
        (
            {"class": 1, "points": [[1, 33]]},
            r"must be inside the image of 47 x 33 pixels \(x, y\), got \(1, 33\)",
        ),
        ({"class": 1, "points": [[-1, 3], [5, 5]]}, r"must be inside the image of .*, got \(-1, 3\)"),
    ],
)
def test_invalid_strokes_raise(tmp_path, entry, message):
    with pytest.raises(InputError, match=message):
        read_labels(strokes(tmp_path / "s.json", entry), SHAPE)


def test_invalid_stroke_files_raise(tmp_path):
    (tmp_path / "s.json").write_text('{"class": 1}')
    with pytest.raises(InputError, match=r"s.json must contain a list of strokes"):
        read_labels(tmp_path / "s.json", SHAPE)
    (tmp_path / "s.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"s.json cannot be read as text"):
        read_labels(tmp_path / "s.json", SHAPE)


def test_label_maps_have_at_most_255_classes(tmp_path):
    values = np.arange(256, dtype=np.uint16).reshape(16, 16) + 1
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, values)
    with pytest.raises(InputError, match=r"a\.tif: labels must have at most 255 classes, got 256\. Merge"):
        read_labels(path, (1, 16, 16), max_classes=300)
    tifffile.imwrite(path, np.minimum(values, 255))
    assert len(read_labels(path, (1, 16, 16), max_classes=300).names) == 255


# --- truth ---


def test_ground_truth_numbering_and_errors(tmp_path):
    a = RNG.integers(0, 3, (H, W)).astype(np.uint8)
    path = save(tmp_path / "a.png", a)
    np.testing.assert_array_equal(read_truth(path, SHAPE)[0], a + 1)
    np.testing.assert_array_equal(read_truth(path, SHAPE, zero_is="ignore")[0], a)
    assert read_truth(path, SHAPE).dtype == np.int32
    with pytest.raises(
        InputError, match=r"values must be 0 to 1 with n_classes=2 and zero_is=class, got 0, 1, 2"
    ):
        read_truth(path, SHAPE, n_classes=2)
    with pytest.raises(OptionError, match=r"zero_is must be one of class, ignore, got 'zero'"):
        read_truth(path, SHAPE, zero_is="zero")
    binary = save(tmp_path / "b.png", (a > 0) * np.uint8(255))
    np.testing.assert_array_equal(read_truth(binary, SHAPE, n_classes=2)[0], (a > 0) + 1)
    ranked = save(tmp_path / "c.png", a * np.uint8(100))
    np.testing.assert_array_equal(read_truth(ranked, SHAPE, zero_is="ignore", n_classes=2)[0], a)
    with pytest.raises(InputError, match=r"with at most 255 classes .*, got 0, 255"):
        read_truth(binary, SHAPE)
    with pytest.raises(InputError, match=r"the truth is \d+ x \d+ pixels"):
        read_truth(path, (1, 3, 4))
    out = read_truth(path, (2, H, W), page=1)
    assert (out[0] == 0).all()
    np.testing.assert_array_equal(out[1], a + 1)
    with pytest.raises(InputError, match=r"Set `page` to their page in the image"):
        read_truth(path, (2, H, W))
    with pytest.raises(InputError, match=r"ground-truth masks must have one channel of class numbers"):
        read_truth(save(tmp_path / "d.png", np.stack([a, a, a * 0], -1)), SHAPE)


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.exists(), reason="the shared micrographs are not on this machine")
def test_shared_scribbles_agree_with_the_ground_truth():
    count = 0
    for path in sorted(SHARED.glob("*/scribbles*/*.png")):
        with Image.open(path) as image:
            shape = (1, image.height, image.width)
        names = ["a", "b", "c"] if path.parts[-3] in ("superalloy_nasa", "ebc_nasa") else ["a", "b"]
        actual = read_labels(path, shape, classes=names)
        truth = read_truth(path.parents[1] / "masks" / path.name, shape, n_classes=len(names))
        labelled = actual.values > 0
        agreement = (actual.values == truth)[labelled].mean()
        assert agreement == 1 or path.parts[-2] == "scribbles_human"
        count += 1
    assert count >= 40
