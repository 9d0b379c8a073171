import math

import numpy as np
import pytest
import tifffile

from tests.cases import cases
from tests.segment.out_of_core.stores import write_store, zarr
from vispe.errors import InputError, OptionError
from vispe.images.read import read_image
from vispe.segment.features.tiles import Region
from vispe.segment.objects.object_files import pages_per_volume
from vispe.segment.out_of_core import find_stores, is_store, out_of_core_images, output_stem
from vispe.segment.out_of_core.source.open_image import open_image


def pages_of(image):
    return np.stack(
        [image.read(page, Region(0, image.shape[0], 0, image.shape[1])) for page in range(image.n_pages)]
    )


@cases(
    ("axes", "version"), [("yx", "0.4"), ("cyx", "0.5"), ("tcyx", "0.4"), ("czyx", "0.5"), ("tczyx", "0.5")]
)
def test_axes_other_than_y_x_and_c_are_pages(tmp_path, axes, version):
    lengths = {"t": 2, "c": 3, "z": 2, "y": 41, "x": 57}
    array = np.random.default_rng(0).integers(0, 999, [lengths[a] for a in axes]).astype(np.uint16)
    image = open_image(write_store(tmp_path / "a.ome.zarr", array, axes, version, chunk=20))
    full = array
    for position, name in enumerate("tczyx"):
        if name not in axes:
            full = np.expand_dims(full, position)
    expected = np.moveaxis(full, 1, -1).reshape(-1, 41, 57, full.shape[1])
    np.testing.assert_array_equal(pages_of(image), expected)
    assert (image.version, image.shape, image.dtype) == (version, (41, 57), np.uint16)
    assert (image.n_pages, image.channels) == expected.shape[::3]
    assert [axis.name for axis in image.page_axes] == [a for a in axes if a in "tz"]
    np.testing.assert_array_equal(image.read(0, Region(3, 30, 11, 57)), expected[0, 3:30, 11:57])


def test_channel_names_pixel_size_and_largest_level_are_read(tmp_path):
    array = np.arange(2 * 41 * 57, dtype=np.uint16).reshape(2, 41, 57)
    path = write_store(
        tmp_path / "a.ome.zarr", array, "cyx", names=("DAPI", "GFP"), scale=250, unit="nanometer", levels=2
    )
    image = open_image(path, channel="GFP")
    assert image.shape == (41, 57)
    assert image.pixel_size == (0.25, 0.25)
    assert image.channel_names == ("GFP",)
    np.testing.assert_array_equal(pages_of(image), array[1][None, ..., None])
    with pytest.raises(InputError, match=r"channel must be one of .*, got GFQ.*Did you mean 'GFP'"):
        open_image(path, channel="GFQ")


def test_pages_can_be_selected(tmp_path):
    array = np.random.default_rng(0).random((2, 3, 41, 57), np.float32)
    path = write_store(tmp_path / "a.zarr", array, "tzyx")
    image = open_image(path, z="2:5")
    np.testing.assert_array_equal(pages_of(image)[..., 0], array.reshape(6, 41, 57)[2:5])
    assert [(axis.name, axis.length) for axis in image.page_axes] == [("page", 3)]
    with pytest.raises(InputError, match=r"z must select pages of the image \(0 to 5\), got 6"):
        open_image(path, z="6")


@cases(
    ("lengths", "z", "expected"),
    [
        ((1, 6), "1:4", {"Z": 3}),
        ((6, 1), "1:4", {"T": 3}),  # frames are not slices of a volume
        ((2, 6), "7:10", {"Z": 3}),
        ((2, 6), "4:8", {"PAGE": 4}),
        ((2, 6), "6:", {"Z": 6}),
    ],
)
def test_selected_pages_keep_the_axis_of_their_file(tmp_path, lengths, z, expected):
    array = np.zeros((*lengths, 9, 9), np.uint8)
    image = open_image(write_store(tmp_path / "a.zarr", array, "tzyx"), z=z)
    assert image.axis_lengths == expected
    # the same selection in memory
    tifffile.imwrite(tmp_path / "a.ome.tif", array, metadata={"axes": "TZYX"})
    in_memory = read_image(tmp_path / "a.ome.tif", z=z).axis_lengths
    assert pages_per_volume(image.axis_lengths) == pages_per_volume(in_memory)


def test_a_plain_array_needs_its_axes(tmp_path):
    array = np.random.default_rng(0).random((3, 41, 57)) < 0.5
    zarr.create_array(store=str(tmp_path / "a.zarr"), shape=array.shape, dtype=bool)[...] = array
    with pytest.raises(InputError, match=r"the axes of .* \(3 x 41 x 57\) are unknown. Specify axes"):
        open_image(tmp_path / "a.zarr")
    image = open_image(tmp_path / "a.zarr", axes="CYX")
    np.testing.assert_array_equal(pages_of(image)[0], np.moveaxis(array, 0, -1) * np.uint8(255))
    with pytest.raises(InputError, match="axes must have 3 letters for the shape 3 x 41 x 57, got 'YX'"):
        open_image(tmp_path / "a.zarr", axes="YX")


@cases(
    "scales, units, size",
    [
        ([2.0, 0.5, 250.0], ("micrometer", "micrometer", "nanometer"), (0.5, 0.25)),
        ([2.0, 0.5, 0.25], ("micrometer", "micrometer", "parsec"), None),
        ([2.0, 0.0, 0.0], ("micrometer",) * 3, None),
        ([2.0, -1.0, 1.0], ("micrometer",) * 3, None),
        ([2.0, math.nan, 1.0], ("micrometer",) * 3, None),
        ([], ("micrometer",) * 3, None),
    ],
    ids=["two units", "unknown unit", "zero", "negative", "nan", "no scale"],
)
def test_pixel_sizes_of_stores_are_positive_lengths(tmp_path, scales, units, size):
    path = write_store(tmp_path / "a.zarr", np.zeros((3, 20, 24), np.uint8), "zyx", "0.4")
    attributes = dict(zarr.open_group(path).attrs)
    scale = [{"type": "scale", "scale": scales}] if scales else []
    attributes["multiscales"][0]["datasets"][0]["coordinateTransformations"] = scale
    attributes["multiscales"][0]["axes"] = [
        {"name": name, "type": "space", "unit": unit} for name, unit in zip("zyx", units, strict=True)
    ]
    zarr.open_group(path).attrs.update(attributes)
    image = open_image(path)
    assert image.pixel_size == size
    assert image.z_step == (2.0 if scales else None)


def test_explicit_axes_have_the_sizes_of_the_stored_dimensions(tmp_path):
    path = write_store(tmp_path / "a.ome.zarr", np.zeros((3, 2, 20, 24), np.uint8), "tzyx")
    stored_axes, swapped_axes = open_image(path), open_image(path, axes="ZTYX")
    assert swapped_axes.pixel_size == stored_axes.pixel_size == (0.5, 0.5)
    assert [(axis.name, axis.length) for axis in swapped_axes.page_axes] == [("z", 3), ("t", 2)]
    without_unit = open_image(path, axes="TYZX")  # Z of the file has no unit
    assert without_unit.pixel_size is None
    assert without_unit.notes == (
        "the pixel size is unknown: Y or X of `axes=TYZX` is a dimension without one.",
    )
    assert open_image(path, axes="TYZX").z_step == 0.5


def test_pages_of_excessive_size_raise(tmp_path):
    zarr.create_array(store=str(tmp_path / "a.zarr"), shape=(10**7, 10**6), chunks=(99, 99), dtype="u1")
    with pytest.raises(InputError, match=r"has 10000000 x 1000000 pixels per page, more than 137 Gpixel"):
        open_image(tmp_path / "a.zarr")


def test_series_of_one_image_are_read_as_that_image(tmp_path):
    zarr.create_group(store=str(tmp_path / "a.zarr"), zarr_format=2, attributes={"bioformats2raw.layout": 3})
    array = np.arange(41 * 57, dtype=np.uint16).reshape(41, 57)
    write_store(tmp_path / "a.zarr" / "0", array, version="0.4")
    np.testing.assert_array_equal(pages_of(open_image(tmp_path / "a.zarr"))[0, ..., 0], array)
    write_store(tmp_path / "a.zarr" / "1", array, version="0.4")
    with pytest.raises(InputError, match=r"contains 2 images \(0, 1\)\. Pass one of them"):
        open_image(tmp_path / "a.zarr")


@cases(
    ("attributes", "message"),
    [
        ({}, "contains no image"),
        ({"plate": {}}, "is a plate of many images"),
        ({"multiscales": [{"datasets": [{"path": "9"}]}]}, "is not a readable OME-Zarr image"),
        ({"multiscales": 7}, "is not a readable OME-Zarr image"),
    ],
)
def test_groups_that_are_not_images_raise(tmp_path, attributes, message):
    zarr.create_group(store=str(tmp_path / "a.zarr"), zarr_format=2, attributes=attributes)
    with pytest.raises(InputError, match=message):
        open_image(tmp_path / "a.zarr")


def test_empty_zarr_folders_raise(tmp_path):
    (tmp_path / "a.zarr").mkdir()
    with pytest.raises(InputError, match="is not a readable OME-Zarr image"):
        open_image(tmp_path / "a.zarr")


def test_tiff_is_read_region_by_region(tmp_path):
    array = np.random.default_rng(0).integers(0, 999, (3, 41, 57)).astype(">u2")
    tifffile.imwrite(
        tmp_path / "a.ome.tif", array, metadata={"axes": "ZYX", "PhysicalSizeX": 0.2, "PhysicalSizeY": 0.2}
    )
    image = open_image(tmp_path / "a.ome.tif", z="1:")
    np.testing.assert_array_equal(pages_of(image)[..., 0], array[1:])
    assert image.pixel_size == (0.2, 0.2)
    assert image.dtype == np.dtype("=u2")
    tifffile.imwrite(tmp_path / "white.tif", array[0].astype("u2"), photometric="miniswhite")
    with pytest.raises(InputError, match="has white as 0, which is not supported when reading in blocks"):
        open_image(tmp_path / "white.tif")


def test_additional_images_of_a_file_are_noted_as_in_memory(tmp_path):
    path = tmp_path / "a.tif"
    with tifffile.TiffWriter(path) as out:
        out.write(np.zeros((40, 50), np.uint8), metadata=None)
        out.write(np.zeros((80, 90), np.uint8), metadata=None)
    note = "a.tif contains 2 separate images (40 x 50, 80 x 90); only the largest (80 x 90) is used."
    assert note in read_image(path).notes
    assert note in open_image(path).notes


def test_stores_are_distinguished_from_files(tmp_path):
    a = write_store(tmp_path / "a.ome.zarr", np.zeros((20, 30), np.uint8))
    b = write_store(tmp_path / "b.zarr", np.zeros((20, 30), np.uint8))
    (tmp_path / "c.png").write_bytes(b"")
    tifffile.imwrite(tmp_path / "d.tif", np.zeros((20, 30), np.uint8))
    assert is_store(a)
    assert not is_store(tmp_path)
    assert find_stores([a, str(tmp_path / "*.zarr")]) == ([a, b], [])
    assert find_stores([tmp_path / "c.png"]) == ([], [tmp_path / "c.png"])
    assert out_of_core_images(tmp_path / "c.png", None, None) == []
    assert out_of_core_images([tmp_path / "d.tif"], "1 GB", None) == [tmp_path / "d.tif"]
    with pytest.raises(
        InputError, match=r"is a store and .* is not. Segment stores and image files in separate runs"
    ):
        out_of_core_images([a, tmp_path / "c.png"], None, None)
    with pytest.raises(
        OptionError, match=r"scheduler has no effect on .*c\.png, which cannot be read in blocks"
    ):
        out_of_core_images([tmp_path / "c.png"], None, "tcp://x:1")
    assert [output_stem(p) for p in (a, b, "x/y.ome.tif", "z.tiff", "q.r")] == ["a", "b", "y", "z", "q.r"]


def test_results_next_to_stores_are_skipped(tmp_path):
    values = np.zeros((60, 70), np.uint8)
    for name in ("a.zarr", "a_seg.ome.zarr", "b.zarr", "c_seg.zarr"):
        write_store(tmp_path / name, values)
    with pytest.warns(
        UserWarning,
        match=r"Skipped 1 store with the name of labels or results .*: a_seg\.ome\.zarr. Pass such a store",
    ):
        actual = out_of_core_images([tmp_path], None, None)
    assert [path.name for path in actual] == ["a.zarr", "b.zarr", "c_seg.zarr"]
    explicit = out_of_core_images([tmp_path / "a.zarr", tmp_path / "a_seg.ome.zarr"], None, None)
    assert [path.name for path in explicit] == ["a.zarr", "a_seg.ome.zarr"]


CLAIMS = {
    "pages": ({"shape": (10**9, 64, 64), "chunks": (1, 64, 64)}, "zyx", "1000000000 pages of 1 channel"),
    "more pages": (
        {"shape": (10**6, 10**6, 64, 64), "chunks": (1, 1, 64, 64)},
        "tzyx",
        "1000000000000 pages",
    ),
    "channels": ({"shape": (10**8, 64, 64), "chunks": (1, 64, 64)}, "cyx", "1 page of 100000000 channels"),
    "a chunk": (
        {"shape": (32768, 32768), "chunks": (32768, 32768)},
        "yx",
        "chunks of 1.074 GB, each of which is",
    ),
}


@cases("name", CLAIMS)
@cases("version", [2, 3])
def test_metadata_of_excessive_size_raise(tmp_path, name, version):
    options, axes, reason = CLAIMS[name]
    zarr.create_array(store=str(tmp_path / "a.zarr"), dtype="uint8", zarr_format=version, **options)
    with pytest.raises(InputError, match=reason):
        open_image(tmp_path / "a.zarr", axes=axes.upper())


def test_chunks_larger_than_the_image_are_supported(tmp_path):
    options = {"shape": (64, 64), "chunks": (1 << 16, 1 << 16)}
    zarr.create_array(store=str(tmp_path / "a.zarr"), dtype="uint8", zarr_format=2, **options)
    assert open_image(tmp_path / "a.zarr").shape == (64, 64)
