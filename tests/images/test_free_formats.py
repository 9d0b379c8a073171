"""GIF, WebP, NPY and PFM files, which need no optional dependency."""

import struct

import numpy as np
import pytest
from PIL import Image

from tests.cases import cases
from vispe.cli.main import main
from vispe.errors import InputError
from vispe.images.file_search import find_images
from vispe.images.labels.label_files import read_labels
from vispe.images.read import read_image

H, W = 13, 21
RNG = np.random.default_rng(5)
GREY = RNG.integers(0, 256, (H, W)).astype(np.uint8)
RGB = RNG.integers(0, 256, (H, W, 3)).astype(np.uint8)


def test_lossless_webp_is_exact_and_lossy_webp_labels_raise(tmp_path):
    path = tmp_path / "a.webp"
    Image.fromarray(RGB).save(path, lossless=True)
    np.testing.assert_array_equal(read_image(path).pages[0], RGB)
    labels = np.repeat((GREY // 100)[..., None], 3, -1)
    Image.fromarray(labels).save(path, lossless=True)
    np.testing.assert_array_equal(read_labels(path, (1, H, W)).values[0], labels[..., 0])
    with_alpha = np.dstack([labels, np.full((H, W), 9, np.uint8)])
    # extended file format: a chunk before the pixels
    Image.fromarray(with_alpha).save(path, lossless=True, exact=True)
    np.testing.assert_array_equal(read_labels(path, (1, H, W)).values[0], labels[..., 0])
    for image in (RGB, np.dstack([RGB, GREY])):
        Image.fromarray(image).save(path, quality=60)
        assert read_image(path).pages.shape == (1, H, W, 3)
        with pytest.raises(InputError, match="WebP compression changes label values"):
            read_labels(path, (1, H, W))


def test_gif_reads_the_grey_levels_of_the_first_frame(tmp_path):
    path = tmp_path / "a.gif"
    Image.fromarray(GREY).save(path)
    np.testing.assert_array_equal(read_image(path).pages[0, ..., 0], GREY)
    frames = [Image.fromarray(GREY), Image.fromarray(255 - GREY)]
    frames[0].save(path, save_all=True, append_images=frames[1:])
    actual = read_image(path)
    np.testing.assert_array_equal(actual.pages[0, ..., 0], GREY)
    assert "a.gif is animated: only the first of its 2 frames is used." in actual.notes
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 3])
    with pytest.raises(InputError, match=r"a\.gif is (truncated|not a readable)"):
        read_image(path)


@cases("kind", [np.uint8, np.uint16, np.int32, np.float32, np.float64, ">u2"])
def test_2d_npy_is_an_image(tmp_path, kind):
    path = tmp_path / "a.npy"
    np.save(path, GREY.astype(kind))
    actual = read_image(path)
    np.testing.assert_array_equal(actual.pages[0, ..., 0], GREY)
    assert actual.pages.dtype == np.dtype(kind).newbyteorder("=")
    assert (actual.pixel_size, actual.notes) == (None, ())


def test_3d_npy_needs_the_axes_argument(tmp_path):
    path = tmp_path / "a.npy"
    np.save(path, RGB)
    with pytest.raises(
        InputError,
        match=r"the axes of the array are unknown, got the shape 13 x 21 x 3. Set `axes`, such as ZYX",
    ):
        read_image(path)
    np.testing.assert_array_equal(read_image(path, axes="YXC").pages[0], RGB)
    actual = read_image(path, axes="zyx")
    np.testing.assert_array_equal(actual.pages[..., 0], RGB)
    assert actual.page_axes == (("Z", H),)
    with pytest.raises(InputError, match=r"axes must have 3 letters .*, got 'YX'"):
        read_image(path, axes="YX")
    # the axes of labels follow from the size of the image
    labels = np.stack([GREY // 100] * 2)
    np.save(path, labels)
    np.testing.assert_array_equal(read_labels(path, (2, H, W)).values, labels)


def test_damaged_and_pickled_npy_raise(tmp_path):
    path = tmp_path / "a.npy"
    np.save(path, np.array([{"a": 1}, None]))
    with pytest.raises(InputError, match=r"a\.npy is truncated or damaged \(.*allow_pickle"):
        read_image(path)
    np.save(path, GREY)
    data = path.read_bytes()
    for keep in (9, 40, len(data) - 5):
        path.write_bytes(data[:keep])
        with pytest.raises(InputError, match=r"a\.npy is truncated or damaged"):
            read_image(path)
    np.save(path, np.float32(3))
    with pytest.raises(InputError, match=r"got the shape \(\)"):
        read_image(path)


def test_npy_gif_and_pfm_need_an_explicit_glob(tmp_path):
    for name in ("a.npy", "b.gif", "c.webp", "d.png", "e.pfm"):
        (tmp_path / name).write_bytes(b"x")
    assert [p.name for p in find_images([tmp_path])] == ["c.webp", "d.png"]
    assert [p.name for p in find_images([tmp_path / "*.npy"])] == ["a.npy"]
    assert [p.name for p in find_images([tmp_path / "*.pfm"])] == ["e.pfm"]
    assert [p.name for p in find_images([tmp_path / "*"])] == ["c.webp", "d.png"]


def test_scene_raises_for_formats_without_scenes(tmp_path):
    Image.fromarray(GREY).save(tmp_path / "a.png")
    with pytest.raises(InputError, match=r"a\.png: `scene` has no effect for this format, got '1'"):
        read_image(tmp_path / "a.png", scene="1")


def write_pfm(path, values, scale="-1.0"):
    """Write (h, w) or (h, w, 3) value by value, from the bottom row up."""
    order = "<" if scale.startswith("-") else ">"
    mark = "PF" if values.ndim == 3 else "Pf"
    rows = [struct.pack(f"{order}f", v) for row in values[::-1] for v in row.ravel()]
    path.write_bytes(f"{mark}\n{values.shape[1]} {values.shape[0]}\n{scale}\n".encode() + b"".join(rows))
    return path


@cases("scale", ["-1.0", "1", "+1e0", "-.25", "3."])
@cases("shape", [(H, W), (H, W, 3), (1, 1), (1, 5, 3), (7, 1)])
def test_pfm_is_read_in_both_byte_orders(tmp_path, scale, shape):
    values = RNG.normal(size=shape).astype(np.float32)
    actual = read_image(write_pfm(tmp_path / "a.bin", values, scale))
    np.testing.assert_array_equal(actual.pages, values.reshape(1, *shape[:2], -1))
    assert actual.pages.dtype == np.float32
    assert (actual.pixel_size, actual.page_axes) == (None, ())
    notes = {"-.25": ("a.bin: the scale 0.25 of the header is not applied.",),
             "3.": ("a.bin: the scale 3 of the header is not applied.",)}  # fmt: skip
    assert actual.notes == notes.get(scale, ())


def test_pfm_with_nan_pixels_axes_and_labels(tmp_path):
    values = RNG.normal(size=(H, W, 3)).astype(np.float32)
    values[0, 1], values[-1, 2, 0] = np.nan, np.inf
    path = write_pfm(tmp_path / "a.pfm", values)
    actual = read_image(path)
    np.testing.assert_array_equal(actual.pages[0], values)
    assert "2 pixels" in actual.notes[0]
    np.testing.assert_array_equal(read_image(path, axes="yxz").pages[..., 0], values.transpose(2, 0, 1))
    with pytest.raises(InputError, match=r"axes must have 3 letters .*, got 'YX'"):
        read_image(path, axes="YX")
    labels = write_pfm(tmp_path / "b.pfm", GREY // 100)
    np.testing.assert_array_equal(read_labels(labels, (1, H, W)).values[0], GREY // 100)
    write_pfm(path, np.full((2, 3), np.nan))
    with pytest.raises(InputError, match="holds no data: all 6 pixels are NaN"):
        read_image(path)


@cases(
    ("head", "message"),
    [
        (b"Pf\n3 2\n0\n", "the header must have a width, a height and a scale other than 0"),
        (b"Pf\n3 2\n-0.0\n", "a scale other than 0"),
        (b"Pf\n3 2\nnan\n", "a scale other than 0"),
        (b"Pf\n3 2\n1e999\n", "a scale other than 0"),
        (b"Pf\n-3 2\n1\n", "the header must have a width"),
        (b"Pf\n3\n-1.0\n", "the header must have a width"),
        (b"Pf\n" + b"9" * 400, "the header must have a width"),
        (b"Pf \xff\xff\xff", "the header must have a width"),
        (b"Pf\n0 2\n1\n", "has no pixels, got the shape 2 x 0"),
        (b"Pf\n99999 99999\n1\n", "suspected decompression bomb"),
        (b"PF\n3 2\n1\n", "72 bytes of pixels expected, got 24"),
        (b"Pf\r\n3 2\r\n-1\r\n", "24 bytes of pixels expected, got 25"),
    ],
)
def test_pfm_with_an_invalid_header_raises(tmp_path, head, message):
    path = tmp_path / "a.pfm"
    path.write_bytes(head + bytes(24))
    with pytest.raises(InputError, match=rf"a\.pfm.*{message}") as caught:
        read_image(path)
    assert "\n" not in str(caught.value)


def test_truncated_or_oversized_pfm_raises(tmp_path):
    path = write_pfm(tmp_path / "a.pfm", GREY)
    data = path.read_bytes()
    for damaged in (*(data[:keep] for keep in (3, 9, 14, 40, len(data) - 1)), data + b"\n"):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"a\.pfm is truncated or damaged"):
            read_image(path)


def test_pfm_is_segmented(tmp_path, monkeypatch):
    values = np.where(np.arange(40) < 20, 0.25, 0.75) + RNG.normal(0, 0.02, (33, 40))
    labels = np.zeros(values.shape, np.uint8)
    labels[4:8, 3:9], labels[20:24, 30:36] = 1, 2
    np.save(tmp_path / "drawn.npy", labels)
    write_pfm(tmp_path / "a.pfm", values)
    monkeypatch.chdir(tmp_path)
    assert main(["segment", "a.pfm", "--labels", "drawn.npy", "--features", "filters", "-o", "out"]) == 0
