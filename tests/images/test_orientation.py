"""EXIF orientation tags: how images are read, and which labels match them."""

import json

import numpy as np
import pytest
import tifffile
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngImageFile

from tests.cases import cases
from vispe.errors import InputError, OptionError
from vispe.images.formats.headers import stored_frame, stored_shape
from vispe.images.labels.label_files import read_labels
from vispe.images.labels.truth_files import read_truth
from vispe.images.orientation import Frame, as_stored, inverse_tag, oriented
from vispe.images.read import read_image

H, W = 24, 36
TAGS = range(2, 9)
CONTAINERS = ("a.png", "a.jpg", "a.webp", "a.tif", "lzw.tif")


def image():
    out = np.full((H, W), 40, np.uint8)
    out[:8, :18] = 200
    return out


def stored_labels():
    """Return labels in the stored orientation, without any D4 symmetry."""
    out = np.zeros((H, W), np.uint8)
    out[2:7, 3:17] = 2
    out[12:20, 20:33] = 1
    return out


def save(path, array, tag):
    exif = Image.Exif()
    exif[274] = tag
    if path.suffix == ".tif":
        options = {"compression": "lzw"} if path.stem == "lzw" else {}
        tifffile.imwrite(path, array, extratags=[(274, "H", 1, tag, True)], **options)
    else:
        how = {".jpg": {"quality": 100}, ".webp": {"lossless": True}}.get(path.suffix, {})
        Image.fromarray(array).save(path, exif=exif, **how)
    return path


@cases("tag", TAGS)
def test_orientation_tags_agree_with_pillow(tag):
    tagged = Image.fromarray(stored_labels())
    tagged.getexif()[274] = tag
    expected = np.asarray(ImageOps.exif_transpose(tagged))
    np.testing.assert_array_equal(oriented(stored_labels()[None], tag)[0], expected)
    np.testing.assert_array_equal(as_stored(expected[None], tag)[0], stored_labels())
    np.testing.assert_array_equal(oriented(expected[None], inverse_tag(tag))[0], stored_labels())


@cases("name", CONTAINERS)
@cases("tag", TAGS)
def test_images_are_read_as_stored_or_by_tag_with_a_note(tmp_path, name, tag):
    path = save(tmp_path / name, image(), tag)
    for how, expected in (("stored", image()), ("tag", oriented(image()[None], tag)[0])):
        actual = read_image(path, orientation=how)
        error = np.abs(actual.pages[0, ..., 0].astype(int) - expected)
        assert error.max() <= 3, how
        assert actual.frame == Frame(tag, how == "tag")
        assert f"has the orientation tag {tag} " in " ".join(actual.notes)
        assert stored_shape(path, orientation=how) == actual.pages.shape[:3]
    assert stored_frame(path).tag == tag


def test_undefined_tags_are_ignored(tmp_path):
    for tag in (0, 1, 9, 77):
        path = save(tmp_path / f"{tag}.tif", image(), tag)
        actual = read_image(path)
        np.testing.assert_array_equal(actual.pages[0, ..., 0], image())
        assert actual.frame == Frame(1, True)
        assert "orientation tag" not in " ".join(actual.notes)
    with pytest.raises(OptionError, match=r"orientation must be one of stored, tag, got 'stord'.*'stored'"):
        read_image(path, orientation="stord")


def shape_in(frame):
    return (1, *(oriented(stored_labels()[None], frame.tag).shape[1:3] if frame.applied else (H, W)))


def expected_in(frame):
    return oriented(stored_labels()[None], frame.tag) if frame.applied else stored_labels()[None]


@cases("applied", [False, True])
@cases("tag", TAGS)
@cases("read", ["labels", "truth"])
def test_labels_are_aligned_with_the_image(tmp_path, read, tag, applied):
    """Labels as stored, with the tag of the image, and in the orientation of the tag."""
    frame = Frame(tag, applied)

    def values(array, label_tag=1):
        path = save(tmp_path / "l.png", np.ascontiguousarray(array), label_tag)
        if read == "labels":
            return read_labels(path, shape_in(frame), frame=frame).values
        return read_truth(path, shape_in(frame), frame=frame, zero_is="ignore")

    oriented_labels = oriented(stored_labels()[None], tag)[0]
    expected = expected_in(frame)
    np.testing.assert_array_equal(values(stored_labels(), tag), expected)
    assert oriented_labels.shape != stored_labels().shape or tag < 5
    if applied:  # labels without a tag: in the frame of the image, or in the other one if the size decides
        np.testing.assert_array_equal(values(oriented_labels), expected)
        if tag >= 5:
            np.testing.assert_array_equal(values(stored_labels()), expected)
    else:
        np.testing.assert_array_equal(values(stored_labels()), expected)
        if tag >= 5:
            np.testing.assert_array_equal(values(oriented_labels), expected)


def test_labels_that_match_no_orientation_raise_with_the_tag(tmp_path):
    path = save(tmp_path / "l.png", stored_labels()[:-1], 1)
    with pytest.raises(
        InputError, match=r"23 x 36 pixels .* 24 x 36 \(it has the orientation tag 6, rotated by 90"
    ):
        read_labels(path, (1, H, W), frame=Frame(6))
    content = [{"class": k, "points": [[3, 30 * k]]} for k in (1, 2)]
    (tmp_path / "s.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"inside the image of 36 x 24 pixels .*orientation tag 6"):
        read_labels(tmp_path / "s.json", (1, H, W), frame=Frame(6))


@cases("tag", range(5, 9))
@cases("runs", [False, True])
def test_coco_annotations_are_rotated_into_the_image_frame(tmp_path, tag, runs):
    oriented_labels = np.ascontiguousarray(oriented(stored_labels()[None], tag)[0])
    h, w = oriented_labels.shape

    def segmentation(k):
        y, x = np.nonzero(oriented_labels == k)
        left, top, right, bottom = x.min(), y.min(), x.max() + 1, y.max() + 1
        if not runs:
            return [[int(v) for v in (left, top, right, top, right, bottom, left, bottom)]]
        flat = np.concatenate([[0], (oriented_labels == k).T.ravel().astype(int), [0]])
        ends = np.flatnonzero(np.diff(flat))
        return {"size": [h, w], "counts": [int(n) for n in np.diff([0, *ends, h * w])]}

    content = {
        "images": [{"id": 1, "file_name": "a.jpg", "height": h, "width": w}],
        "categories": [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}],
        "annotations": [
            {"id": k, "image_id": 1, "category_id": k, "segmentation": segmentation(k)} for k in (1, 2)
        ],
    }
    (tmp_path / "c.json").write_text(json.dumps(content))
    for frame in (Frame(tag, False), Frame(tag, True)):
        actual = read_labels(tmp_path / "c.json", shape_in(frame), frame=frame)
        np.testing.assert_array_equal(actual.values, expected_in(frame))


@cases("after", [False, True])
def test_headers_of_png_files_are_read_without_decoding(tmp_path, monkeypatch, after):
    """The exception is metadata after the pixels, which Pillow finds by decoding."""
    path = tmp_path / "a.png"
    save(path, image(), 6)
    if after:
        data = path.read_bytes()
        start = data.index(b"eXIf") - 4
        end = start + 12 + int.from_bytes(data[start : start + 4], "big")
        without_exif = data[:start] + data[end:]
        iend = without_exif.index(b"IEND") - 4
        path.write_bytes(without_exif[:iend] + data[start:end] + without_exif[iend:])
    else:
        monkeypatch.setattr(PngImageFile, "load", None)
    assert stored_frame(path).tag == 6
    assert stored_shape(path) == (1, W, H)
    assert stored_shape(path, orientation="stored") == (1, H, W)
    Image.fromarray(image()).save(path)
    assert stored_frame(path).tag == 1
