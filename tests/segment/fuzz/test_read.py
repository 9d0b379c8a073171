"""What is read equals what other readers say; what is damaged is refused or said, never passed over."""

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
    """'refused', 'same' or 'changed', and the notes."""
    path.write_bytes(data)
    try:
        actual = read_image(path)
    except VispeError as error:
        text = str(error)
        assert path.name in text
        assert text.endswith((".", "imagecodecs"))
        return "refused", (text,)
    same = actual.pages.shape == pixels.shape and np.array_equal(actual.pages, pixels)
    return "same" if same else "changed", actual.notes


@cases("name", [*GOOD, *PHOTOGRAPHS])
def test_good_files_are_read_as_other_readers_read_them(tmp_path, name):
    file = (GOOD | PHOTOGRAPHS)[name]
    path = tmp_path / name
    path.write_bytes(file.data)
    actual = read_image(path)
    assert actual.pages.dtype == file.pixels.dtype
    np.testing.assert_array_equal(actual.pages, file.pixels)
    assert not [n for n in actual.notes if "damaged" in n or "truncated" in n]
    if "palette" in name or "alpha" in name or "bits" in name:
        return  # read as colours, without alpha, and as 0 and 255: corpus.py says so
    other = tifffile.imread(path) if name.endswith("tif") else skimage.io.imread(path)
    if name == "planar.tif":
        other = np.moveaxis(other, 0, -1)
    np.testing.assert_array_equal(actual.pages.squeeze(), other.squeeze())


@cases("name", GOOD)
def test_visible_damage_is_refused_or_reported(tmp_path, name):
    file = GOOD[name]
    for what, data in corpus.damaged(file.data, COUNT, seed=len(name)):
        kind, notes = outcome(tmp_path / name, data, file.pixels)
        if what.startswith("cut"):
            unused = name.endswith("bmp") or len(file.data) - len(data) <= 16  # bytes that nothing refers to
            assert kind == "refused" or (kind == "same" and (notes or unused)), (what, notes)
        if name in CHECKED and data != file.data:
            assert kind != "changed", (what, notes)


@cases("name", PHOTOGRAPHS)
def test_photographs_that_break_off_are_refused_or_said(tmp_path, name):
    file = PHOTOGRAPHS[name]
    for what, data in corpus.damaged(file.data, COUNT, seed=3):
        kind, notes = outcome(tmp_path / name, data, file.pixels)
        if what.startswith("cut"):
            assert kind == "refused" or notes, what


def test_a_photograph_that_is_zeros_from_some_byte_on_is_said_to_be_damaged(tmp_path):
    file = PHOTOGRAPHS["rgb.jpg"]
    data = file.data[:-200] + bytes(200)
    kind, notes = outcome(tmp_path / "a.jpg", data, file.pixels)
    assert kind == "refused" or any("damaged (it has no end mark)" in n for n in notes)
    marked = file.data[:-100] + b"\xff\xd9"  # an end mark long before the end
    kind, notes = outcome(tmp_path / "a.jpg", marked, file.pixels)
    assert kind in ("refused", "changed")  # JPEG cannot tell: docs/how-to/micrographs/robustness.md says so


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
def test_breaks_in_the_structure_of_a_photograph_are_said(tmp_path, broken, reason):
    data = broken(PHOTOGRAPHS["restarts.jpg"].data)
    kind, notes = outcome(tmp_path / "a.jpg", data, PHOTOGRAPHS["restarts.jpg"].pixels)
    assert kind == "refused" or any("damaged" in n and reason in n for n in notes), notes


def test_a_wrong_checksum_of_the_pixels_of_a_png_is_refused_though_pillow_reads_it(tmp_path):
    g = corpus.grey()
    data = bytearray(corpus.encoded(g, "PNG", compress_level=0))
    data[data.index(b"IDAT") + 40] ^= 1  # a pixel
    path = tmp_path / "a.png"
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"part IDAT does not match its checksum|truncated or damaged"):
        read_image(path)
    rows = b"".join(b"\0" + row.tobytes() for row in g)
    packed = bytearray(zlib.compress(rows, 0))
    packed[30] ^= 1  # the checksum of the part is right, that of the compressed stream is not
    path.write_bytes(corpus.png(corpus.W, corpus.H, 8, 0, bytes(packed)))
    with pytest.raises(InputError, match=r"truncated or damaged"):
        read_image(path)


@cases("interlaced", [0, 1])
@cases(("h", "w"), [(1, 1), (3, 5), (8, 8), (9, 17), (2, 33)])
@cases(("bits", "colour"), [(1, 0), (4, 0), (8, 0), (8, 2), (16, 0), (8, 6)])
def test_the_length_of_the_pixels_of_a_png_is_known(tmp_path, h, w, bits, colour, interlaced):
    from vispe.images.formats.integrity import _png_bytes, png_damage

    head = struct.pack(">IIBBBBB", w, h, bits, colour, 0, 0, interlaced)
    data = corpus.png(w, h, bits, colour, zlib.compress(bytes(_png_bytes(head))))
    data = data[:8] + corpus.chunk(b"IHDR", head) + data[33:]
    path = tmp_path / "a.png"
    path.write_bytes(data)
    assert png_damage(path) == []
    assert read_image(path).shape == (h, w)  # Pillow wants as many bytes, or says that it is cut short


def test_damage_outside_the_pixels_is_a_note(tmp_path):
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


def test_compressed_pixels_of_a_tiff_file_have_a_checksum(tmp_path):
    file = GOOD["deflate.tif"]
    with tifffile.TiffFile(io.BytesIO(file.data)) as tif:
        (start,), (size,) = tif.pages[0].dataoffsets, tif.pages[0].databytecounts
    for at in range(start, start + size, 37):
        data = bytearray(file.data)
        data[at] ^= 0x10
        assert outcome(tmp_path / "a.tif", bytes(data), file.pixels)[0] == "refused"


@cases(("name", "data"), [*corpus.foreign()], ids=lambda v: v if isinstance(v, str) else "")
def test_files_that_are_not_images_are_refused(tmp_path, name, data):
    assert outcome(tmp_path / name, data, np.zeros(0))[0] == "refused"


@cases("ending", [".png", ".jpg", ".tif", ".bmp", ".txt", ""])
@cases("name", ["grey.png", "grey.bmp", "big.tif"])
def test_the_content_decides_and_not_the_name(tmp_path, name, ending):
    file = GOOD[name]
    assert outcome(tmp_path / f"a{ending}", file.data, file.pixels)[0] == "same"


@cases("kind", ["complex64", "complex128"])
def test_numbers_that_are_no_grey_levels_are_refused(tmp_path, kind):
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
SOME = st.one_of(st.integers(1, 9), st.sampled_from([1, 16, 17, 31]))


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    kind=st.sampled_from(KINDS),
    shape=st.tuples(SOME, SOME),
    layers=st.sampled_from([(), (2,), (3,)]),
    colour=st.booleans(),
    order=st.sampled_from("<>"),
    compression=st.sampled_from([None, "zlib"]),
    layout=st.sampled_from([{}, {"tile": (16, 16)}, {"rowsperstrip": 2}, {"bigtiff": True}]),
    seed=st.integers(0, 99),
)
def test_any_tiff_comes_back_bit_for_bit(
    tmp_path, kind, shape, layers, colour, order, compression, layout, seed
):
    shape = (*layers, *shape, *((3,) if colour else ()))
    a = np.frombuffer(np.random.default_rng(seed).bytes(int(np.prod(shape)) * 8), kind)[: int(np.prod(shape))]
    a = a.reshape(shape)
    path = tmp_path / "a.tif"
    photometric = "rgb" if colour else "minisblack"
    if a.dtype.kind == "f":
        a = np.nan_to_num(a, posinf=1, neginf=-1)
    if colour and a.dtype.kind == "i":
        return  # tifffile writes no colours of these types
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
def test_any_png_or_bmp_of_pillow_comes_back(tmp_path, shape, mode, orientation, seed):
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
    with Image.open(tmp_path / "a.png") as stored:
        from PIL import ImageOps

        stored = ImageOps.exif_transpose(stored)
        stored = stored.convert("RGB") if mode == "P" else stored
        expected = np.atleast_3d(np.asarray(stored))
    if mode in ("RGBA", "LA"):
        expected = expected[..., :-1]
    if mode == "1":
        expected = expected * np.uint8(255)
    if mode == "P" and actual.shape[-1] == 1:
        expected = expected[..., :1]
    np.testing.assert_array_equal(actual, expected)


@cases("values", [(-1e308, 1.7e308), (-3e38, 3e38)])
def test_spans_that_no_float_holds_are_refused_and_others_scaled(tmp_path, values):
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
def test_images_without_data_are_refused(tmp_path, value):
    tifffile.imwrite(tmp_path / "a.tif", np.full((5, 7), value, np.float32))
    with pytest.raises(InputError, match=r"holds no data: all 35 pixels"):
        read_image(tmp_path / "a.tif")


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(name=st.sampled_from([*GOOD, *PHOTOGRAPHS]), seed=st.integers(0, 10**6))
def test_any_damage_is_survived(tmp_path, name, seed):
    file = (GOOD | PHOTOGRAPHS)[name]
    for what, data in corpus.damaged(file.data, 6, seed):
        kind, notes = outcome(tmp_path / name, data, file.pixels)
        assert not (name in CHECKED and kind == "changed"), (what, notes)
