"""TIFF files and their labels, read in regions: orientation tags, thumbnails, pixel sizes, and void levels."""

import numpy as np
import pytest
import tifffile
from PIL import Image

from tests.cases import cases
from tests.segment.out_of_core.stores import zarr
from tests.segment.out_of_core.test_image_source import pages_of
from vispe.errors import InputError
from vispe.images.labels.label_files import read_labels
from vispe.images.orientation import oriented
from vispe.images.read import read_image
from vispe.segment.out_of_core.scribbles import read_scribbles
from vispe.segment.out_of_core.source.open_image import open_image
from vispe.segment.types import LabelOptions

H, W = 41, 57
GREY = np.random.default_rng(0).integers(0, 250, (H, W), dtype=np.uint8)


def label_image(*levels, fill=0):
    out = np.full((H, W), fill, np.int64)
    for row, level in enumerate(levels):
        out[2 * row + 1, :30] = level
    return out


@cases("tag", range(2, 9))
def test_orientation_tags_are_not_applied_and_labels_match(tmp_path, tag):
    tifffile.imwrite(tmp_path / "a.tif", GREY, extratags=[(274, "H", 1, tag, True)])
    image = open_image(tmp_path / "a.tif")
    np.testing.assert_array_equal(pages_of(image)[0, ..., 0], GREY)
    assert image.frame == read_image(tmp_path / "a.tif", orientation="stored").frame
    assert any(f"orientation tag {tag} " in note for note in image.notes)
    frames = [label_image(1, 2), *([oriented(label_image(1, 2)[None], tag)[0]] if tag >= 5 else [])]
    for array in frames:
        Image.fromarray(array.astype(np.uint8)).save(tmp_path / "l.png")
        ((actual,), *_) = read_scribbles([tmp_path / "l.png"], [image], LabelOptions())
        flat = np.zeros(H * W, int)
        flat[actual.indices] = actual.classes
        np.testing.assert_array_equal(flat.reshape(H, W), label_image(1, 2))


def test_largest_image_is_read_with_its_physical_sizes(tmp_path):
    metadata = {"axes": "TZYX", "unit": "um", "spacing": 1.5, "finterval": 2.5}
    stack = np.stack([GREY] * 6).reshape(3, 2, H, W)
    tifffile.imwrite(tmp_path / "s.tif", stack, imagej=True, metadata=metadata, resolution=(4, 2))
    with tifffile.TiffWriter(tmp_path / "t.tif") as out:
        out.write(GREY[::4, ::4], subfiletype=1)
        out.write(GREY)
    np.testing.assert_array_equal(pages_of(open_image(tmp_path / "t.tif"))[0, ..., 0], GREY)
    image = open_image(tmp_path / "s.tif")
    sizes = (*image.pixel_size, image.z_step, image.frame_interval)
    assert sizes == pytest.approx((0.5, 0.25, 1.5, 2.5), rel=1e-3)


@cases("kind", ["png", "zarr"])
def test_void_levels_equal_those_of_labels_in_memory(tmp_path, kind):
    tifffile.imwrite(tmp_path / "a.tif", GREY)
    image, path = open_image(tmp_path / "a.tif"), tmp_path / f"l.{kind}"

    def read(array):
        if kind == "png":
            Image.fromarray(array.astype(np.uint8)).save(path)
        else:
            stored = zarr.create_array(str(path), shape=array.shape, dtype=np.uint8, overwrite=True)
            stored[...] = array.astype(np.uint8)
        return read_scribbles([path], [image], LabelOptions())

    (actual,), names, _, notes = read(label_image(1, 2, fill=255))
    assert len(names) == 2
    np.testing.assert_array_equal(np.flatnonzero(label_image(1, 2)), actual.indices)
    assert any("is treated as unlabelled" in note for note in notes)
    (actual,), names, _, _ = read(label_image(85, 170, 255))
    assert len(names) == 3
    with pytest.raises(InputError, match="255 covers"):
        read(label_image(100, 200, fill=255))


@pytest.mark.filterwarnings("ignore:.*stored as RGB")
def test_label_planes_are_slices_if_the_image_has_equally_many(tmp_path):
    tifffile.imwrite(tmp_path / "a.tif", np.stack([GREY] * 3), photometric="minisblack")
    labels = np.stack([label_image(1, 2), label_image(0, 1), label_image()]).astype(np.uint8)
    tifffile.imwrite(tmp_path / "l.tif", labels)
    image = open_image(tmp_path / "a.tif")
    ((actual,), *_) = read_scribbles([tmp_path / "l.tif"], [image], LabelOptions())
    expected = read_labels(tmp_path / "l.tif", labels.shape).values
    np.testing.assert_array_equal(actual.indices, np.flatnonzero(expected))
    tifffile.imwrite(tmp_path / "p.tif", np.stack([GREY] * 3))
    assert any(
        "3 planes are read as one colour image" in note for note in open_image(tmp_path / "p.tif").notes
    )
