"""Void values of label images: 255 and other maximum values alongside class numbers, and white."""

import json

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from tests.cases import cases
from vispe.errors import InputError
from vispe.images.labels.label_files import read_labels
from vispe.images.labels.truth_files import read_truth
from vispe.images.sequences import FileImages, FileMasks

H, W = 20, 30
SHAPE = (1, H, W)


def label_image(*levels, fill=0):
    """Return a label image with 15 pixels of each level and `fill` elsewhere."""
    out = np.full((H, W), fill, np.int64)
    for row, level in enumerate(levels):
        out[2 * row, :15] = level
    return out


def save(tmp_path, array, kind):
    path = tmp_path / ("a.png" if kind in ("uint8", "palette", "rgb", "rgba") else "a.tif")
    if kind == "palette":
        image = Image.fromarray(array.astype(np.uint8), "P")
        image.putpalette([0, 0, 0, *(v % 256 for v in range(3 * 255))])
        image.save(path)
    elif path.suffix == ".png":
        Image.fromarray(array.astype(np.uint8)).save(path)
    else:
        tifffile.imwrite(path, array.astype(kind))
    return path


@cases(
    ("kind", "void"),
    [
        ("uint8", 255),
        ("palette", 255),
        ("uint16", 255),
        ("uint16", 65_535),
        ("int32", 2**31 - 1),
        ("uint32", 2**32 - 1),
        ("float32", 255),
    ],
)
def test_the_maximum_value_alongside_class_numbers_is_unlabelled(tmp_path, kind, void):
    actual = read_labels(save(tmp_path, label_image(1, 2, fill=void), kind), SHAPE)
    np.testing.assert_array_equal(actual.values[0], label_image(1, 2))
    assert actual.names == ("class 1", "class 2")
    assert f"{void} (95 % of the pixels) is treated as unlabelled." in actual.notes[0]


@cases(
    ("array", "more", "expected"),
    [
        (label_image(1, 2, 255), {}, label_image(1, 2)),  # in addition to 0
        (label_image(0, 1, fill=255), {"dense": True}, label_image(1, 2)),  # as in Cityscapes
        (label_image(0, 255, fill=255), {"dense": True}, label_image(1, 2, fill=2)),  # a binary mask
        (label_image(255, fill=0), {"dense": True}, label_image(2, fill=1)),
        (label_image(1, 2, fill=255), {"classes": ["a", "b"]}, label_image(1, 2)),
        (label_image(1, 2, fill=255), {"classes": ["a", "b", "c"]}, label_image(1, 2, fill=3)),
        (label_image(85, 170, 255), {}, label_image(1, 2, 3)),  # ranked grey levels
        (label_image(85, 255), {}, label_image(1, 2)),
        (label_image(1, 255), {}, label_image(1, 2)),
        (label_image(100, 200, fill=255), {"dense": True}, label_image(1, 2, fill=3)),
        (label_image(100, 200, fill=255), {"classes": ["a", "b"]}, label_image(1, 2)),
        (label_image(253, 254, 255), {}, label_image(1, 2, 3)),
    ],
)
def test_255_is_a_class_or_void_depending_on_other_levels(tmp_path, array, more, expected):
    np.testing.assert_array_equal(
        read_labels(save(tmp_path, array, "uint8"), SHAPE, **more).values[0], expected
    )


@cases("array", [label_image(100, 200, fill=255), label_image(0, 1, 2, fill=255), label_image(1, fill=255)])
def test_ambiguous_dominant_levels_raise(tmp_path, array):
    with pytest.raises(
        InputError, match=r"255 covers \d+(\.\d)? % of the pixels and would be a class.*set `dense=True`"
    ):
        read_labels(save(tmp_path, array, "uint8"), SHAPE)


@cases("alpha", [False, True])
def test_dominant_white_raises_without_classes_or_dense(tmp_path, alpha):
    lut = np.array([[255, 255, 255], [255, 0, 0], [0, 128, 0]])[label_image(1, 2)]
    lut = np.dstack([lut, np.full((H, W), 255)]) if alpha else lut
    path = save(tmp_path, lut, "rgba" if alpha else "rgb")
    with pytest.raises(InputError, match=r"white covers 95 % of the pixels.*black or transparent"):
        read_labels(path, SHAPE)
    np.testing.assert_array_equal(read_labels(path, SHAPE, classes=["a", "b"]).values[0], label_image(2, 1))
    assert len(read_labels(path, SHAPE, dense=True).names) == 3
    if alpha:
        lut[..., 3] = np.where(label_image(1, 2) > 0, 255, 0)
        np.testing.assert_array_equal(
            read_labels(save(tmp_path, lut, "rgba"), SHAPE).values[0], label_image(2, 1)
        )


def test_white_and_255_absent_from_the_legend_are_unlabelled(tmp_path):
    def read(array, legend, kind):
        (tmp_path / "legend.json").write_text(json.dumps(legend))
        return read_labels(save(tmp_path, array, kind), SHAPE, legend=tmp_path / "legend.json").values[0]

    lut = np.array([[255, 255, 255], [255, 0, 0], [0, 128, 0]])[label_image(1, 2)]
    np.testing.assert_array_equal(read(lut, {"#ff0000": "a", "#008000": "b"}, "rgb"), label_image(2, 1))
    legend_with_white = {"#ff0000": "a", "#008000": "b", "#ffffff": "c"}
    np.testing.assert_array_equal(read(lut, legend_with_white, "rgb"), label_image(2, 1, fill=3))
    np.testing.assert_array_equal(
        read(label_image(1, 2, fill=255), {"1": "a", "2": "b"}, "uint8"), label_image(1, 2)
    )
    lut[5] = (0, 0, 255)
    with pytest.raises(
        InputError, match=r"levels must be in the legend \(#008000, #ff0000\), got #0000ff, #ffffff"
    ):
        read(lut, {"#ff0000": "a", "#008000": "b"}, "rgb")


def test_minus_one_raises_with_a_suggestion(tmp_path):
    with pytest.raises(
        InputError, match=r"got -1. Save unlabelled pixels as 0 and number the classes from 1"
    ):
        read_labels(save(tmp_path, label_image(0, 1, fill=-1), "int16"), SHAPE)


def test_ground_truth_ignores_the_void_value(tmp_path):
    notes = []
    path = save(tmp_path, label_image(0, 1, fill=255), "uint8")
    for count in (2, 3, None):
        actual = read_truth(path, SHAPE, n_classes=count, note=notes.append)
        np.testing.assert_array_equal(actual[0], label_image(1, 2))
    assert "255 (95 % of the pixels) is not a class and is ignored in the score." in notes[0]
    binary = save(tmp_path, label_image(255), "uint8")
    np.testing.assert_array_equal(read_truth(binary, SHAPE, n_classes=2)[0], label_image(2, fill=1))


def test_ground_truth_ignores_the_void_value_if_a_class_is_absent(tmp_path):
    notes = []
    path = save(tmp_path, label_image(0, 2, fill=255), "uint8")
    for count in (3, 4):
        np.testing.assert_array_equal(
            read_truth(path, SHAPE, n_classes=count, note=notes.append)[0], label_image(1, 3)
        )
    assert "255 (95 % of the pixels) is not a class" in notes[0]
    labels = save(tmp_path, label_image(1, 3, fill=255), "uint8")
    np.testing.assert_array_equal(
        read_truth(labels, SHAPE, zero_is="ignore", n_classes=3)[0], label_image(1, 3)
    )
    grey = save(tmp_path, label_image(0, 128, fill=255), "uint8")
    np.testing.assert_array_equal(read_truth(grey, SHAPE, n_classes=3)[0], label_image(1, 2, fill=3))


def test_masks_with_contradictory_values_raise(tmp_path):
    files = []
    for name, values in (
        ("a", label_image(0, 1, fill=255)),
        ("b", label_image(0, fill=255)),
        ("c", label_image(0, 1, fill=1)),
    ):
        Image.fromarray(values.astype(np.uint8)).save(tmp_path / f"{name}.png")
        files.append(tmp_path / f"{name}.png")
    images = FileImages(files, torch.from_numpy)
    masks = FileMasks(images, files, n_classes=2)
    assert [np.unique(masks[k]).tolist() for k in (0, 2)] == [[0, 1, 2], [1, 2]]
    text = r"b.png: the value 255 is class 2, but it is ignored in .*a.png. Use one value for each class"
    with pytest.raises(InputError, match=text):
        masks[1]


@cases("zero", ["class", "ignore"])
def test_the_void_value_does_not_count_as_a_class(tmp_path, zero):
    first = int(zero == "ignore")
    files = [tmp_path / "a.png", tmp_path / "b.png"]
    for file, levels in zip(files, [(0, 1, 2), (0, 2)], strict=True):
        values = label_image(*(level + first for level in levels), fill=255)
        Image.fromarray(values.astype(np.uint8)).save(file)
    masks = FileMasks(FileImages(files, torch.from_numpy), files, zero)
    assert masks.n_classes == 3
    np.testing.assert_array_equal(masks[1][::2, 0], label_image(1, 3)[::2, 0])
    assert not any("grey levels" in note for note in masks.notes)


@cases("n_classes", [3, None])
@cases("zero", ["class", "ignore"])
def test_grey_levels_are_ranked_over_all_masks(tmp_path, zero, n_classes):
    levels = (0, 128, 255) if zero == "class" else (64, 128, 300)
    files = [tmp_path / f"{name}.png" for name in "abc"]
    for file, file_levels in zip(files, [levels, levels[::2], levels[1:2]], strict=True):
        Image.fromarray(label_image(*file_levels, fill=file_levels[0]).astype(np.uint16)).save(file)
    masks = FileMasks(FileImages(files, torch.from_numpy), files, zero, n_classes)
    assert masks.n_classes == 3
    assert [np.unique(masks[k]).tolist() for k in range(3)] == [[1, 2, 3], [1, 3], [2]]
    # the levels of other masks of the run are included
    masks = FileMasks(FileImages(files[1:], torch.from_numpy), files[1:], zero, n_classes, files[:1])
    assert [np.unique(masks[k]).tolist() for k in range(2)] == [[1, 3], [2]]


def test_masks_that_cannot_be_ranked_raise_with_a_suggestion(tmp_path):
    path = save(tmp_path, label_image(0, fill=255), "uint8")
    text = r"got 0, 255. Store class numbers from 0 instead of grey levels, or pass masks that have 3 grey levels toge"
    with pytest.raises(InputError, match=text):
        read_truth(path, SHAPE, n_classes=3)
    path = save(tmp_path, label_image(0, 1, 2, fill=3), "uint8")
    with pytest.raises(InputError, match=r"Increase the number of classes, or correct the mask\."):
        read_truth(path, SHAPE, n_classes=3)
    with pytest.raises(InputError, match="the value 3 is not one of the grey levels of the classes, 0, 1, 2"):
        read_truth(path, SHAPE, n_classes=3, levels=(0, 1, 2))
