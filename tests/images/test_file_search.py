"""Matching of labels, masks and ground truth to images by file name: in memory, in sequences and in stores."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.cases import cases
from vispe.errors import InputError
from vispe.images.file_search import match_files
from vispe.images.sequences import FileImages, FileMasks
from vispe.segment.out_of_core.scribbles import match_store_labels
from vispe.segment.run.inputs import BatchImage, match


def paths(names):
    return [Path(name) for name in names.split()]


CASES = [
    # images, files, matched image=file pairs, unmatched files
    ("a.png", "other.png", "a.png=other.png", ""),
    ("a.png b.png", "b_labels.png a.tif", "a.png=a.tif b.png=b_labels.png", ""),
    ("a.png ab.png", "ab-mask.png a.1.png", "a.png=a.1.png ab.png=ab-mask.png", ""),
    ("a.png a_b.png", "a_b_labels.png", "a_b.png=a_b_labels.png", ""),
    ("a.png b.png", "ab.png b_x.png", "b.png=b_x.png", "ab.png"),
    ("a.png b.png", "c.png d.png", "", "c.png d.png"),
]


@cases(("images", "files", "pairs", "unmatched"), CASES)
def test_files_are_matched_by_name(images, files, pairs, unmatched):
    expected = dict(tuple(map(Path, pair.split("="))) for pair in pairs.split())
    assert match_files(paths(images), paths(files), "labels") == (expected, paths(unmatched))


def test_two_matches_of_one_image_raise():
    with pytest.raises(
        InputError, match=r"^a.png: two masks match, a_x.png and a.png. Pass one for each image.$"
    ):
        match_files(paths("a.png b.png"), paths("a_x.png a.png"), "masks")


def test_unmatched_files_of_a_batch_give_a_note_or_raise():
    images, notes = [BatchImage(path) for path in paths("a.png b.png")], []
    match(images, "labels", paths("a_x.png c.png d.png"), notes.append)
    assert images[0].labels == Path("a_x.png")
    assert images[1].labels is None
    assert notes == ["Ignored 2 labels files without an image: c.png, d.png."]
    with pytest.raises(
        InputError, match=r"^no truth file matches an image by name: got c.png for images such "
    ):
        match(images, "truth", paths("c.png"), notes.append)
    match(images, "truth", [], notes.append)
    assert len(notes) == 1


def test_unmatched_labels_of_stores_give_a_note_or_raise():
    notes = []
    images = paths("a.zarr b.ome.zarr")
    actual = match_store_labels(paths("b_labels.png a_x.zarr c.tif"), images, notes.append)
    assert actual == {images[0]: Path("a_x.zarr"), images[1]: Path("b_labels.png")}
    assert notes == ["c.tif matches no image and is ignored."]
    with pytest.raises(
        InputError,
        match=r"^no labels file matches an image by name: got c.tif for images such as a.zarr. Use matching names, "
        r"for example a.zarr and a_labels.png.$",
    ):
        match_store_labels(paths("c.tif"), images, notes.append)


def test_unmatched_masks_of_a_sequence_give_a_note_or_raise(tmp_path):
    for name in ("a", "b", "a_mask", "c", "d"):
        Image.fromarray(np.arange(12, dtype=np.uint8).reshape(3, 4) % 2).save(tmp_path / f"{name}.png")
    images = FileImages([tmp_path / "a.png", tmp_path / "b.png"], lambda page: page)
    files = {name: tmp_path / f"{name}.png" for name in ("a_mask", "b", "c", "d")}
    assert FileMasks(images, [files["b"], files["a_mask"], files["c"]]).notes == [
        "Skipped 1 mask without an image: c.png."
    ]
    assert FileMasks(images, [files["c"], files["d"]]).notes == [
        "No mask has the name of an image; masks were matched to images by order."
    ]
    with pytest.raises(
        InputError, match=r"b.png has no mask, got 2 mask files. Name it b_mask.png, or pass as many"
    ):
        FileMasks(images, [files["a_mask"], files["c"]])


def test_masks_with_different_first_class_numbers_raise(tmp_path):
    images, masks = [tmp_path / f"{name}.png" for name in "ab"], [tmp_path / f"{n}_mask.png" for n in "ab"]
    values = np.array([[1, 2], [3, 3]], np.uint8), np.array([[1, 2], [2, 2]], np.uint8)
    for path, value in zip([*images, *masks], [*values, *values], strict=True):
        Image.fromarray(value).save(path)
    files = FileImages(images, torch.from_numpy)
    for actual, expected in zip(FileMasks(files, masks, n_classes=3), values, strict=True):
        np.testing.assert_array_equal(actual, expected)
    Image.fromarray(values[1] - 1).save(masks[1])
    with pytest.raises(
        InputError, match=r"b_mask\.png has the value 0, but a_mask\.png numbers the 3 classes from 1"
    ):
        FileMasks(files, masks, n_classes=3)
