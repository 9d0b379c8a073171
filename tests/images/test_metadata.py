"""Selection of the largest image of a file; pixel sizes and frame intervals of files and of written results."""

import io

import numpy as np
import pytest
import tifffile
from PIL import Image

from tests.cases import cases
from vispe.images.formats.headers import stored_shape
from vispe.images.formats.units import microns, seconds
from vispe.images.labels.label_files import read_labels
from vispe.images.read import Micrograph, read_image
from vispe.images.write import write_instances, write_labels, write_probabilities
from vispe.segment.features.tiles import Region
from vispe.segment.out_of_core.source.open_image import open_image

H, W = 24, 36
RNG = np.random.default_rng(0)
GREY = RNG.integers(0, 255, (H, W), dtype=np.uint8)


# --- the largest image of a file ---


def _thumbnail_first(path):
    with tifffile.TiffWriter(path) as out:
        out.write(GREY[::4, ::4], subfiletype=1)
        out.write(GREY)


def _preview_of_a_stack(path):
    with tifffile.TiffWriter(path) as out:
        out.write(GREY[::2, ::2], metadata=None)
        out.write(np.stack([GREY] * 5), photometric="minisblack")


def _ome_series(path):
    with tifffile.TiffWriter(path, ome=True) as out:
        small = {"axes": "YX", "PhysicalSizeX": 9.0, "PhysicalSizeY": 9.0}
        out.write(GREY[::2, ::2], metadata=small)
        out.write(GREY, metadata={"axes": "YX", "PhysicalSizeX": 0.5, "PhysicalSizeY": 0.5})


def _pyramid(path):
    with tifffile.TiffWriter(path) as out:
        out.write(GREY, subifds=1)
        out.write(GREY[::2, ::2], subfiletype=1)


def _mpo(path):
    small, large = Image.fromarray(GREY[::2, ::2]), Image.fromarray(np.full((H, W), 99, np.uint8))
    small.save(path, "MPO", save_all=True, append_images=[large])


@cases("write", [_thumbnail_first, _preview_of_a_stack, _ome_series, _pyramid, _mpo])
def test_the_largest_image_is_read(tmp_path, write):
    path = tmp_path / ("a.ome.tif" if write is _ome_series else "a.jpg" if write is _mpo else "a.tif")
    write(path)
    actual = read_image(path)
    assert actual.shape == (H, W)
    assert stored_shape(path) == actual.pages.shape[:3]
    if write is not _mpo:
        np.testing.assert_array_equal(actual.pages[0, ..., 0], GREY)
    assert any("only the largest" in note for note in actual.notes)
    if write is _ome_series:
        assert actual.pixel_size == (0.5, 0.5)


# --- units ---


@cases(
    ("unit", "factor"),
    [
        *(
            (name, 1.0)
            for name in ("um", "µm", "μm", "micron", "Microns", "micrometer", "micrometre", "micrometers")
        ),
        *((name, 1.0) for name in ("\\u00B5m", "\\u00b5m", "\u00c2\u00b5m", " µm ", "micrometres")),
        *((name, 1e-3) for name in ("nm", "nanometer", "nanometres")),
        *((name, 1e-4) for name in ("Å", "\u212b", "angstrom", "Angstroms", "A", "Ångström")),
        *((name, 1e-6) for name in ("pm", "picometer")),
        *((name, 1e3) for name in ("mm", "millimeter", "millimetres")),
        *((name, 1e4) for name in ("cm", "centimetre")),
        *((name, 1e6) for name in ("m", "meter", "metre")),
        *((name, 25_400.0) for name in ("inch", "in", "inches")),
        ("thou", 25.4),
        ("mil", 25.4),
        ("pt", 25_400 / 72),
        ("li", 25_400 / 12),
        ("ft", 304_800.0),
        ("yd", 914_400.0),
        ("fm", 1e-9),
        *((name, None) for name in ("pixel", "px", "1/nm", "", "reference frame", "s", "None")),
    ],
)
def test_units_of_length_convert_to_microns(unit, factor):
    assert microns(2, unit) == (None if factor is None else pytest.approx(2 * factor))


def test_units_of_time_convert_to_seconds():
    expected = {
        "s": 1,
        "sec": 1,
        "seconds": 1,
        "ms": 1e-3,
        "msec": 1e-3,
        "µs": 1e-6,
        "min": 60,
        "h": 3600,
        "um": None,
    }
    for unit, factor in expected.items():
        assert seconds(3, unit) == (None if factor is None else pytest.approx(3 * factor)), unit


@cases(
    ("units", "expected"),
    [
        ("unit=nm", (0.5, 0.25, 0.1)),
        ("unit=nm\nyunit=um", (500.0, 0.25, 0.1)),
        ("unit=nm\nzunit=um", (0.5, 0.25, 100.0)),
        ("unit=nm\nyunit=pixel", None),
        ("unit=\\u00B5m", (500.0, 250.0, 100.0)),
    ],
)
def test_imagej_units_are_read_per_axis(tmp_path, units, expected):
    text = f"ImageJ=1.54f\nimages=2\nslices=2\nspacing=100\n{units}\n"
    with tifffile.TiffWriter(tmp_path / "a.tif") as out:
        for number in range(2):
            out.write(GREY, description=text if not number else None, metadata=None, resolution=(4e-3, 2e-3))
    actual = read_image(tmp_path / "a.tif")
    if expected is None:
        assert actual.pixel_size is None
    else:
        assert (*actual.pixel_size, actual.z_step) == pytest.approx(expected, rel=1e-3)


# --- metadata of the file in the written result ---


def _imagej(path):
    tifffile.imwrite(
        path, np.zeros((3, 2, H, W), np.uint8), imagej=True, resolution=(4, 2),
        metadata={"axes": "TZYX", "unit": "um", "spacing": 1.5, "finterval": 2.5},
    )  # fmt: skip


def _imagej_minutes(path):
    tifffile.imwrite(
        path, np.zeros((3, 2, H, W), np.uint8), imagej=True, resolution=(4e-3, 2e-3),
        metadata={"axes": "TZYX", "unit": "nm", "spacing": 1500, "finterval": 2.5 / 60, "tunit": "min"},
    )  # fmt: skip


def _ome(path):
    metadata = {"PhysicalSizeX": 250, "PhysicalSizeXUnit": "nm", "PhysicalSizeY": 0.5, "PhysicalSizeZ": 1.5}
    metadata |= {"TimeIncrement": 2500, "TimeIncrementUnit": "ms", "axes": "TZYX"}
    tifffile.imwrite(
        path, np.zeros((3, 2, H, W), np.uint8), metadata=metadata, ome=True, photometric="minisblack"
    )


def _ome_z_before_t(path):
    metadata = {"PhysicalSizeX": 0.25, "PhysicalSizeY": 0.5, "PhysicalSizeZ": 1.5, "TimeIncrement": 2.5}
    array = np.zeros((2, 3, H, W), np.uint8)
    tifffile.imwrite(path, array, metadata=metadata | {"axes": "ZTYX"}, ome=True, photometric="minisblack")


def _labels(path, image):
    return write_labels(path, np.zeros(image.pages.shape[:3], np.uint8), image)


def _instances(path, image):
    return write_instances(path, np.zeros(image.pages.shape[:3], np.uint16), image)


def _instances_uint32(path, image):
    return write_instances(path, np.zeros(image.pages.shape[:3], np.uint32), image)


def _probabilities(path, image):
    z, h, w = image.pages.shape[:3]
    return write_probabilities(path, np.zeros((z, 2, h, w), np.float32), image, ["a", "b"])


@cases("source", [_imagej, _imagej_minutes, _ome, _ome_z_before_t])
@cases("target", [_labels, _instances, _instances_uint32, _probabilities])
def test_pixel_sizes_and_frame_intervals_are_preserved(tmp_path, source, target):
    source(tmp_path / "a.tif")
    image = read_image(tmp_path / "a.tif")
    expected = (*image.pixel_size, image.z_step, image.frame_interval)
    assert expected == pytest.approx((0.5, 0.25, 1.5, 2.5), rel=1e-3)
    written = read_image(target(tmp_path / "b.tif", image))
    assert (*written.pixel_size, written.z_step, written.frame_interval) == pytest.approx(expected, rel=1e-3)
    assert written.page_axes == image.page_axes


@cases("size", [2e-5, 1e-4, 0.5, 6.5, 120.0])
def test_single_page_label_maps_preserve_any_pixel_size(tmp_path, size):
    image = Micrograph(tmp_path / "a.tif", np.zeros((1, H, W, 1), np.uint8), (size, 2 * size))
    assert read_image(_labels(tmp_path / "b.png", image)).pixel_size == pytest.approx((size, 2 * size))
    tifffile.imwrite(
        tmp_path / "a.tif", GREY, imagej=True, metadata={"unit": "nm"}, resolution=(5e-4 / size, 1e-3 / size)
    )
    image = read_image(tmp_path / "a.tif")
    for name in ("b.png", "b.tif"):
        written = read_image(write_labels(tmp_path / name, np.zeros((1, H, W), np.uint8), image, force=True))
        assert written.pixel_size == pytest.approx((size, 2 * size), rel=1e-2)


def test_a_frame_interval_without_a_pixel_size_is_written(tmp_path):
    array = np.zeros((3, H, W), np.uint8)
    tifffile.imwrite(tmp_path / "a.tif", array, imagej=True, metadata={"axes": "TYX", "finterval": 0.1})
    image = read_image(tmp_path / "a.tif")
    assert image.pixel_size is None
    assert read_image(_labels(tmp_path / "b.tif", image)).frame_interval == pytest.approx(0.1)


# --- 3 or 4 slices that are stored as colours ---


@pytest.mark.filterwarnings("ignore:.*stored as RGB")
@cases("count", [3, 4])
@cases("kind", [np.uint8, np.uint16, np.float32])
def test_slices_stored_as_colours_get_a_note(tmp_path, count, kind):
    array = RNG.integers(0, 200, (count, H, W)).astype(kind)
    tifffile.imwrite(tmp_path / "a.tif", array)
    actual = read_image(tmp_path / "a.tif")
    assert actual.pages.shape == (1, H, W, 3)
    note = f"a.tif: its {count} planes are read as one colour image"
    assert actual.notes[0].startswith(note)
    assert "`axes=ZYX`" in actual.notes[0]
    assert actual.valid.all()  # the fourth plane may be a slice, not alpha
    np.testing.assert_array_equal(read_image(tmp_path / "a.tif", axes="ZYX").pages[..., 0], array)
    tifffile.imwrite(tmp_path / "b.tif", np.moveaxis(array, 0, -1))
    assert not any("planes" in note for note in read_image(tmp_path / "b.tif").notes)


def test_jpeg_with_a_thumbnail_reads_the_full_image(tmp_path):
    exif = Image.Exif()
    thumbnail = io.BytesIO()
    Image.fromarray(GREY[::4, ::4]).save(thumbnail, "JPEG")
    exif[0x010E] = "a"
    Image.fromarray(GREY).save(tmp_path / "a.jpg", exif=exif.tobytes() + thumbnail.getvalue())
    assert read_image(tmp_path / "a.jpg").shape == (H, W)


# --- axes set by the user ---


@cases(
    "axes, size, step",
    [
        ("ZYX", (0.25, 0.5), 2.0),
        ("TYX", (0.25, 0.5), 2.0),
        ("YZX", (2.0, 0.5), 0.25),
        ("XYZ", (0.25, 2.0), 0.5),
        ("ZXY", (0.5, 0.25), 2.0),
    ],
)
def test_pixel_sizes_follow_the_stored_dimensions_with_axes(tmp_path, axes, size, step):
    pytest.importorskip("zarr", reason="needs the extra vispe[big]")
    calibration = {"axes": "ZYX", "spacing": 2.0, "unit": "um", "finterval": 3.0}
    stack = np.stack([GREY] * 5)
    tifffile.imwrite(tmp_path / "a.tif", stack, imagej=True, metadata=calibration, resolution=(2, 4))
    image = read_image(tmp_path / "a.tif", axes=axes)
    blocks = open_image(tmp_path / "a.tif", axes=axes)
    assert (image.pixel_size, image.z_step) == (blocks.pixel_size, step) == (size, step)
    assert blocks.z_step == (step if "Z" in axes else None)
    assert blocks.frame_interval == (3.0 if "T" in axes else None)
    write_labels(tmp_path / "b.tif", image.pages[..., 0], image)
    assert read_image(tmp_path / "b.tif").pixel_size == pytest.approx(size)


def test_imagej_files_without_a_unit_use_the_resolution_unit_tag(tmp_path):
    tags = {"resolution": (20_000, 40_000), "resolutionunit": "CENTIMETER"}
    tifffile.imwrite(tmp_path / "a.tif", GREY, imagej=True, **tags)
    tifffile.imwrite(tmp_path / "b.tif", GREY, imagej=True, metadata={"unit": "pixel"}, **tags)
    assert read_image(tmp_path / "a.tif").pixel_size == (0.25, 0.5)
    assert read_image(tmp_path / "b.tif").pixel_size is None


def test_resolution_tags_follow_the_stored_dimensions(tmp_path):
    tifffile.imwrite(tmp_path / "a.tif", GREY, resolution=(20_000, 40_000), resolutionunit="CENTIMETER")
    image = read_image(tmp_path / "a.tif", axes="XY")
    assert (image.pixel_size, image.resolution) == ((0.5, 0.25), (40_000, 20_000, "cm"))
    pages = np.stack([GREY] * 5, -1)
    resolution = {"resolution": (20_000, 40_000), "resolutionunit": "CENTIMETER", "photometric": "minisblack"}
    tifffile.imwrite(tmp_path / "b.tif", pages, **resolution)
    image = read_image(tmp_path / "b.tif", axes="YXC")
    assert (image.pixel_size, image.resolution) == (None, None)
    note = "the pixel size is unknown: Y or X of `axes=YXC` is a dimension without one."
    assert image.notes.count(note) == 1
    pytest.importorskip("zarr", reason="needs the extra vispe[big]")
    blocks = open_image(tmp_path / "b.tif", axes="YXC")
    assert blocks.pixel_size is None
    assert blocks.notes.count(note) == 1
    assert not any("pixel size" in text for text in open_image(tmp_path / "a.tif", axes="XY").notes)


def test_imagej_lookup_tables_do_not_change_grey_levels(tmp_path):
    pytest.importorskip("zarr", reason="needs the extra vispe[big]")
    fire = np.stack([np.arange(256), np.arange(256)[::-1], np.full(256, 9)]).astype(np.uint16) * 257
    tifffile.imwrite(tmp_path / "a.tif", GREY, imagej=True, colormap=fire)
    image, blocks = read_image(tmp_path / "a.tif"), open_image(tmp_path / "a.tif")
    np.testing.assert_array_equal(image.pages[0, ..., 0], GREY)
    np.testing.assert_array_equal(blocks.read(0, Region(0, H, 0, W))[..., 0], GREY)
    note = "a.tif has a lookup table of ImageJ, which is not applied: grey levels are read as stored."
    assert image.notes == blocks.notes == (note,)
    labels = (GREY > 200).astype(np.uint8) + (GREY > 230)
    white = np.where(np.arange(256) == 0, 65535, fire).astype(np.uint16)  # 0 is white in the display
    tifffile.imwrite(tmp_path / "b.tif", labels, imagej=True, colormap=white)
    np.testing.assert_array_equal(read_labels(tmp_path / "b.tif", (1, H, W)).values[0], labels)
