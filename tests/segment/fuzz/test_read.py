"""Valid files are read as by other libraries; damaged files raise an error or add a note."""

import io
import struct
import warnings
import zlib

import numpy as np
import pytest
import skimage.io
import tifffile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.cases import cases
from tests.segment.fuzz import corpus
from vispe.errors import InputError, VispeError
from vispe.images.normalize import normalize
from vispe.images.read import read_image

GOOD = {f.name: f for f in corpus.good()}
PHOTOGRAPHS = {f.name: f for f in corpus.photographs()}
COUNT = 9
CHECKED = [n for n in GOOD if n.endswith(".png")]  # formats with a checksum over every byte of the image


def outcome(path, data, pixels):
    """Return 'refused', 'same' or 'changed', and the notes."""
    path.write_bytes(data)
    try:
        actual = read_image(path)
    except VispeError as error:
        text = str(error)
        assert path.name in text
        assert text.endswith((".", "imagecodecs"))
        return "refused", (text,)
    are_equal = actual.pages.shape == pixels.shape and np.array_equal(actual.pages, pixels)
    return "same" if are_equal else "changed", actual.notes


@cases("name", [*GOOD, *PHOTOGRAPHS])
def test_valid_files_are_read_as_by_other_libraries(tmp_path, name):
    file = (GOOD | PHOTOGRAPHS)[name]
    path = tmp_path / name
    path.write_bytes(file.data)
    actual = read_image(path)
    assert actual.pages.dtype == file.pixels.dtype
    np.testing.assert_array_equal(actual.pages, file.pixels)
    assert not [n for n in actual.notes if "damaged" in n or "truncated" in n]
    if "palette" in name or "alpha" in name or "bits" in name:
        return  # vispe returns colours, no alpha, and 0 and 255: see corpus.py
    reference = tifffile.imread(path) if name.endswith("tif") else skimage.io.imread(path)
    if name == "planar.tif":
        reference = np.moveaxis(reference, 0, -1)
    np.testing.assert_array_equal(actual.pages.squeeze(), reference.squeeze())


@cases("name", GOOD)
def test_detectable_damage_raises_or_is_noted(tmp_path, name):
    file = GOOD[name]
    for damage, data in corpus.damaged(file.data, COUNT, seed=len(name)):
        kind, notes = outcome(tmp_path / name, data, file.pixels)
        if damage.startswith("cut"):
            is_unused = name.endswith("bmp") or len(file.data) - len(data) <= 16  # bytes that no pixel uses
            assert kind == "refused" or (kind == "same" and (notes or is_unused)), (damage, notes)
        if name in CHECKED and data != file.data:
            assert kind != "changed", (damage, notes)


@cases("name", PHOTOGRAPHS)
def test_truncated_jpegs_raise_or_are_noted(tmp_path, name):
    file = PHOTOGRAPHS[name]
    for damage, data in corpus.damaged(file.data, COUNT, seed=3):
        kind, notes = outcome(tmp_path / name, data, file.pixels)
        if damage.startswith("cut"):
            assert kind == "refused" or notes, damage


def test_jpegs_with_a_zeroed_tail_raise_or_are_noted(tmp_path):
    file = PHOTOGRAPHS["rgb.jpg"]
    data = file.data[:-200] + bytes(200)
    kind, notes = outcome(tmp_path / "a.jpg", data, file.pixels)
    assert kind == "refused" or any("damaged (it has no end mark)" in n for n in notes)
    marked = file.data[:-100] + b"\xff\xd9"  # an end mark long before the end
    kind, notes = outcome(tmp_path / "a.jpg", marked, file.pixels)
    assert kind in ("refused", "changed")  # not detectable in JPEG, see docs/how-to/micrographs/robustness.md


@cases(
    ("broken", "reason"),
    [
        (lambda d: d.replace(b"\xff\xd0", b"\xff\xd5", 1), "restart markers are out of order"),
        (lambda d: d[:-2] + b"\xff\x05", "invalid marker at byte"),
        (lambda d: d[:-2] + b"\xff\xc0\0\x03\0\xff\xd9", "two frame headers"),
        (lambda d: d[:-2] + b"\xff\xfe\xff\xff", "is truncated"),
        (lambda d: d[:20] + b"\0\0\0" + d[20:], "unexpected byte"),
    ],
)
def test_invalid_jpeg_structure_raises_or_is_noted(tmp_path, broken, reason):
    data = broken(PHOTOGRAPHS["restarts.jpg"].data)
    kind, notes = outcome(tmp_path / "a.jpg", data, PHOTOGRAPHS["restarts.jpg"].pixels)
    assert kind == "refused" or any("damaged" in n and reason in n for n in notes), notes


def test_wrong_checksums_of_png_pixels_raise(tmp_path):
    g = corpus.grey()
    data = bytearray(corpus.encoded(g, "PNG", compress_level=0))
    data[data.index(b"IDAT") + 40] ^= 1  # a pixel
    path = tmp_path / "a.png"
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"part IDAT does not match its checksum|truncated or damaged"):
        read_image(path)
    rows = b"".join(b"\0" + row.tobytes() for row in g)
    packed = bytearray(zlib.compress(rows, 0))
    packed[30] ^= 1  # the checksum of the chunk is right, that of the zlib stream is wrong
    path.write_bytes(corpus.png(corpus.W, corpus.H, 8, 0, bytes(packed)))
    with pytest.raises(InputError, match=r"truncated or damaged"):
        read_image(path)


@cases("interlaced", [0, 1])
@cases(("h", "w"), [(1, 1), (3, 5), (8, 8), (9, 17), (2, 33)])
@cases(("bits", "colour"), [(1, 0), (4, 0), (8, 0), (8, 2), (16, 0), (8, 6)])
def test_expected_byte_count_of_png_pixels_is_exact(tmp_path, h, w, bits, colour, interlaced):
    from vispe.images.formats.integrity import _png_bytes, png_damage

    head = struct.pack(">IIBBBBB", w, h, bits, colour, 0, 0, interlaced)
    data = corpus.png(w, h, bits, colour, zlib.compress(bytes(_png_bytes(head))))
    data = data[:8] + corpus.chunk(b"IHDR", head) + data[33:]
    path = tmp_path / "a.png"
    path.write_bytes(data)
    assert png_damage(path) == []
    assert read_image(path).shape == (h, w)  # Pillow raises if bytes are missing


def test_damage_outside_the_pixel_data_is_noted(tmp_path):
    g = corpus.grey()
    rows = zlib.compress(b"".join(b"\0" + row.tobytes() for row in g))
    extra = bytearray(corpus.chunk(b"vpAg", b"12345678"))
    extra[-1] ^= 1
    path = tmp_path / "a.png"
    path.write_bytes(corpus.png(corpus.W, corpus.H, 8, 0, rows, bytes(extra)))
    kind, notes = outcome(path, path.read_bytes(), g[None, ..., None])
    assert kind == "refused" or any("vpAg does not match its checksum" in n for n in notes)
    path.write_bytes(corpus.png(corpus.W, corpus.H, 8, 0, rows)[:-12])
    actual = read_image(path)
    np.testing.assert_array_equal(actual.pages[0, ..., 0], g)
    assert any("truncated" in n for n in actual.notes)


def test_corrupted_deflate_data_in_tiff_raises(tmp_path):
    file = GOOD["deflate.tif"]
    with tifffile.TiffFile(io.BytesIO(file.data)) as tif:
        (start,), (size,) = tif.pages[0].dataoffsets, tif.pages[0].databytecounts
    for offset in range(start, start + size, 37):
        data = bytearray(file.data)
        data[offset] ^= 0x10
        assert outcome(tmp_path / "a.tif", bytes(data), file.pixels)[0] == "refused"


@cases(("name", "data"), [*corpus.foreign()], ids=lambda v: v if isinstance(v, str) else "")
def test_files_that_are_not_images_raise(tmp_path, name, data):
    assert outcome(tmp_path / name, data, np.zeros(0))[0] == "refused"


@cases("ending", [".png", ".jpg", ".tif", ".bmp", ".txt", ""])
@cases("name", ["grey.png", "grey.bmp", "big.tif"])
def test_format_is_detected_from_content_not_suffix(tmp_path, name, ending):
    file = GOOD[name]
    assert outcome(tmp_path / f"a{ending}", file.data, file.pixels)[0] == "same"


@cases("kind", ["complex64", "complex128"])
def test_complex_images_raise(tmp_path, kind):
    tifffile.imwrite(tmp_path / "a.tif", np.ones((5, 7), kind))
    with pytest.raises(InputError, match=rf"a\.tif: values must be real numbers, got {kind}"):
        read_image(tmp_path / "a.tif")


KINDS = [
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
]
SIZES = st.one_of(st.integers(1, 9), st.sampled_from([1, 16, 17, 31]))


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    kind=st.sampled_from(KINDS),
    shape=st.tuples(SIZES, SIZES),
    layers=st.sampled_from([(), (2,), (3,)]),
    colour=st.booleans(),
    order=st.sampled_from("<>"),
    compression=st.sampled_from([None, "zlib"]),
    layout=st.sampled_from([{}, {"tile": (16, 16)}, {"rowsperstrip": 2}, {"bigtiff": True}]),
    seed=st.integers(0, 99),
)
def test_tiff_round_trip_is_exact(tmp_path, kind, shape, layers, colour, order, compression, layout, seed):
    shape = (*layers, *shape, *((3,) if colour else ()))
    a = np.frombuffer(np.random.default_rng(seed).bytes(int(np.prod(shape)) * 8), kind)[: int(np.prod(shape))]
    a = a.reshape(shape)
    path = tmp_path / "a.tif"
    photometric = "rgb" if colour else "minisblack"
    if a.dtype.kind == "f":
        a = np.nan_to_num(a, posinf=1, neginf=-1)
    if colour and a.dtype.kind == "i":
        return  # tifffile does not write RGB images of signed integers
    with warnings.catch_warnings(action="ignore"):
        tifffile.imwrite(
            path,
            a,
            byteorder=order,
            photometric=photometric,
            compression=compression,
            metadata=None,
            **layout,
        )
    actual = read_image(path)
    assert actual.pages.dtype == a.dtype
    np.testing.assert_array_equal(actual.pages.reshape(shape), a)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    shape=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    mode=st.sampled_from(["L", "RGB", "RGBA", "LA", "P", "1", "I;16", "CMYK"]),
    orientation=st.integers(1, 8),
    seed=st.integers(0, 99),
)
def test_pillow_images_of_all_modes_are_read_exactly(tmp_path, shape, mode, orientation, seed):
    rng = np.random.default_rng(seed)
    bands = {"RGB": 3, "RGBA": 4, "LA": 2, "CMYK": 4}.get(mode, 1)
    kind = np.uint16 if mode == "I;16" else np.uint8
    a = rng.integers(0, np.iinfo(kind).max, (*shape, bands), dtype=kind, endpoint=True)
    image = Image.fromarray(a.squeeze(-1) if bands == 1 else a, None if bands == 1 else mode)
    image = image.convert("1") if mode == "1" else image.quantize(5) if mode == "P" else image
    if mode == "CMYK":
        image.save(tmp_path / "a.jpg")
        actual = read_image(tmp_path / "a.jpg")
        np.testing.assert_array_equal(
            actual.pages[0], np.asarray(Image.open(tmp_path / "a.jpg").convert("RGB"))
        )
        assert "CMYK colours were converted to RGB." in actual.notes
        return
    exif = Image.Exif()
    exif[274] = orientation
    image.save(tmp_path / "a.png", exif=exif)
    actual = read_image(tmp_path / "a.png").pages[0]
    with Image.open(tmp_path / "a.png") as reference:
        from PIL import ImageOps

        reference = ImageOps.exif_transpose(reference)
        reference = reference.convert("RGB") if mode == "P" else reference
        expected = np.atleast_3d(np.asarray(reference))
    if mode in ("RGBA", "LA"):
        expected = expected[..., :-1]
    if mode == "1":
        expected = expected * np.uint8(255)
    if mode == "P" and actual.shape[-1] == 1:
        expected = expected[..., :1]
    np.testing.assert_array_equal(actual, expected)


@cases("values", [(-1e308, 1.7e308), (-3e38, 3e38)])
def test_value_ranges_raise_only_if_they_overflow_float64(tmp_path, values):
    kind = np.float64 if values[0] == -1e308 else np.float32
    a = np.repeat(np.array(values, kind), 20).reshape(5, 8)
    tifffile.imwrite(tmp_path / "a.tif", a)
    m = read_image(tmp_path / "a.tif")
    if kind == np.float64:
        with pytest.raises(
            InputError, match=r"a\.tif: the range of values overflows float64, got -1e\+308 to 1\.7e\+308"
        ):
            normalize(m)
        return
    np.testing.assert_array_equal(normalize(m)[0][0, ..., 0], (a > 0).astype(np.float32))


@cases("value", [np.nan, np.inf, -np.inf])
def test_images_without_finite_pixels_raise(tmp_path, value):
    tifffile.imwrite(tmp_path / "a.tif", np.full((5, 7), value, np.float32))
    with pytest.raises(InputError, match=r"holds no data: all 35 pixels"):
        read_image(tmp_path / "a.tif")


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(name=st.sampled_from([*GOOD, *PHOTOGRAPHS]), seed=st.integers(0, 10**6))
def test_random_damage_raises_only_vispe_errors(tmp_path, name, seed):
    file = (GOOD | PHOTOGRAPHS)[name]
    for damage, data in corpus.damaged(file.data, 6, seed):
        kind, notes = outcome(tmp_path / name, data, file.pixels)
        assert not (name in CHECKED and kind == "changed"), (damage, notes)
