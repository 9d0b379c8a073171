"""`read_image` on every file type, dtype and kind of damage; `find_images`; `normalize`."""

import struct
import warnings
import zlib
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image, ImageOps

from tests.cases import cases
from vispe.errors import InputError, OptionError
from vispe.images.file_search import find_images
from vispe.images.formats import decoded_image
from vispe.images.formats.metadata import check_page_list
from vispe.images.normalize import normalize
from vispe.images.read import Micrograph, read_image

SHARED = Path(__file__).resolve().parents[2] / "../shared/data/microscopy"
RNG = np.random.default_rng(7)
H, W = 35, 41


def random_values(dtype, *shape):
    """Return random values over the range of the dtype; integers include its minimum and maximum."""
    if np.issubdtype(dtype, np.floating):
        return RNG.normal(0, 100, shape).astype(dtype)
    info = np.iinfo(dtype)
    out = RNG.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)
    out.flat[:2] = info.min, info.max
    return out


def png16(path, array, interlaced=0):
    """Write a 16-bit PNG of c channels, which Pillow cannot write, with all five row filters in turn."""
    h, w, c = array.shape
    size = 2 * c
    lines = array.astype(">u2").view(np.uint8).reshape(h, w * size).astype(int)
    rows = b""
    for r in range(h):
        above = lines[r - 1] if r else np.zeros(w * size, int)
        left, upper_left = (np.concatenate([np.zeros(size, int), v[:-size]]) for v in (lines[r], above))
        paeth = [
            min((abs(b - d), 0, a), (abs(a - d), 1, b), (abs(a + b - 2 * d), 2, d))[2]
            for a, b, d in zip(left, above, upper_left, strict=True)
        ]
        prediction = [0 * left, left, above, (left + above) // 2, np.array(paeth)][r % 5]
        rows += bytes([r % 5]) + ((lines[r] - prediction) % 256).astype(np.uint8).tobytes()

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", w, h, 16, {1: 0, 2: 4, 3: 2, 4: 6}[c], 0, 0, interlaced)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)


def micrograph(pages, **options):
    return Micrograph(Path("x.tif"), pages, **options)


# --- TIFF ---

KINDS = ["uint8", "uint16", "uint32", "int8", "int16", "int32", "float16", "float32", "float64"]


@cases("order", ["<", ">"])
@cases("kind", KINDS)
@cases("shape", [(H, W), (H, W, 3)])
def test_tiff_dtypes_and_byte_orders(tmp_path, kind, order, shape):
    a = random_values(np.dtype(kind).type, *shape)
    tifffile.imwrite(
        tmp_path / "a.tif", a, byteorder=order, photometric="rgb" if len(shape) == 3 else "minisblack"
    )
    m = read_image(tmp_path / "a.tif")
    assert m.pages.dtype == np.dtype(kind)
    assert m.pages.dtype.isnative
    np.testing.assert_array_equal(m.pages, a.reshape(1, H, W, -1))
    assert (m.shape, m.n_pages, m.channels) == ((H, W), 1, a.reshape(H, W, -1).shape[2])
    assert m.notes == ()


@cases("options", [{"bigtiff": True}, {"tile": (16, 32)}, {"rowsperstrip": 3}])
@cases("compression", [None, "deflate"])
@cases("predictor", [None, 2])
def test_bigtiff_tiles_strips_and_predictors(tmp_path, options, compression, predictor):
    if predictor and not compression:
        pytest.skip("a predictor belongs to a compression")
    a = random_values(np.uint16, H, W, 3)
    tifffile.imwrite(
        tmp_path / "a.tif", a, photometric="rgb", compression=compression, predictor=predictor, **options
    )
    np.testing.assert_array_equal(read_image(tmp_path / "a.tif").pages, a[None])


@cases("kind", [np.uint8, np.uint16, np.float32])
def test_planar_tiff(tmp_path, kind):
    a = random_values(kind, 3, H, W)
    tifffile.imwrite(tmp_path / "a.tif", a, photometric="rgb", planarconfig="separate")
    np.testing.assert_array_equal(read_image(tmp_path / "a.tif").pages, a.transpose(1, 2, 0)[None])


@cases("compression", ["tiff_lzw", "packbits", "tiff_adobe_deflate"])
@cases("kind", ["L", "RGB", "I;16", "I", "F", "1"])
def test_libtiff_compressions(tmp_path, compression, kind):
    a = {
        "L": random_values(np.uint8, H, W),
        "RGB": random_values(np.uint8, H, W, 3),
        "I;16": random_values(np.uint16, H, W),
        "I": random_values(np.int32, H, W),
        "F": random_values(np.float32, H, W),
        "1": RNG.random((H, W)) < 0.4,
    }[kind]
    Image.fromarray(a).save(tmp_path / "a.tif", compression=compression)
    if kind in ("I", "F") and compression == "tiff_lzw" and not find_spec("imagecodecs"):
        with pytest.raises(
            InputError, match=r"1 x 32-bit (int|float)32 samples with .*pip install imagecodecs"
        ):
            read_image(tmp_path / "a.tif")
        return
    m = read_image(tmp_path / "a.tif")
    expected = a * np.uint8(255) if a.dtype == bool else a
    assert m.pages.dtype == expected.dtype
    np.testing.assert_array_equal(m.pages, expected.reshape(1, H, W, -1))


def test_tiff_lzw_stack_keeps_all_pages(tmp_path):
    a = random_values(np.uint16, 4, H, W)
    pages = [Image.fromarray(p) for p in a]
    pages[0].save(tmp_path / "a.tif", save_all=True, append_images=pages[1:], compression="tiff_lzw")
    np.testing.assert_array_equal(read_image(tmp_path / "a.tif").pages, a[..., None])


def test_16_bit_lzw_colour_tiff_needs_imagecodecs(tmp_path):
    tifffile.imwrite(tmp_path / "a.tif", random_values(np.uint16, H, W, 3), photometric="rgb", rowsperstrip=H)
    data = bytearray((tmp_path / "a.tif").read_bytes())
    with tifffile.TiffFile(tmp_path / "a.tif") as tif:
        offset = tif.pages[0].tags["Compression"].valueoffset
    data[offset : offset + 2] = struct.pack("<H", 5)  # declares LZW, which selects the reader
    (tmp_path / "a.tif").write_bytes(data)
    with pytest.raises(
        InputError, match=r"3 x 16-bit uint16 samples with LZW.*pip install imagecodecs|damaged"
    ):
        read_image(tmp_path / "a.tif")


@cases("kind", [np.uint8, np.uint16])
def test_miniswhite_tiff_is_inverted(tmp_path, kind):
    a = random_values(kind, H, W)
    tifffile.imwrite(tmp_path / "a.tif", a, photometric="miniswhite")
    m = read_image(tmp_path / "a.tif")
    np.testing.assert_array_equal(m.pages[0, :, :, 0], np.iinfo(kind).max - a)
    assert m.notes == ("stored from white to black (MinIsWhite): values were inverted.",)


def test_bilevel_tiff_agrees_with_pillow(tmp_path):
    a = RNG.random((H, W)) < 0.4
    Image.fromarray(a).save(tmp_path / "a.tif", compression="group4")
    Image.fromarray(a).save(tmp_path / "b.tif")
    with Image.open(tmp_path / "a.tif") as image:
        expected = np.asarray(image)
    np.testing.assert_array_equal(read_image(tmp_path / "a.tif").pages[0, :, :, 0], expected * np.uint8(255))
    np.testing.assert_array_equal(read_image(tmp_path / "b.tif").pages[0, :, :, 0], a * np.uint8(255))


def test_tiff_palettes_give_rgb_and_grey_palettes_one_channel(tmp_path):
    index = random_values(np.uint8, H, W)
    lut = RNG.integers(0, 256, (256, 3), dtype=np.uint8)
    tifffile.imwrite(tmp_path / "a.tif", index, photometric="palette", colormap=lut.T.astype(np.uint16) * 257)
    m = read_image(tmp_path / "a.tif")
    assert m.pages.dtype == np.uint8
    np.testing.assert_array_equal(m.pages[0], lut[index])
    grey = np.repeat(lut[:, :1], 3, 1)
    tifffile.imwrite(
        tmp_path / "b.tif", index, photometric="palette", colormap=grey.T.astype(np.uint16) * 257
    )
    m = read_image(tmp_path / "b.tif")
    np.testing.assert_array_equal(m.pages[0], lut[index][..., :1])
    assert m.notes == ("a palette of grey levels was read as one channel.",)


@cases("kind", [np.uint8, np.uint16, np.float32])
def test_tiff_alpha_is_dropped_and_a_fourth_channel_is_not(tmp_path, kind):
    a = random_values(kind, H, W, 4)
    tifffile.imwrite(tmp_path / "a.tif", a, photometric="rgb", extrasamples=["unassalpha"])
    m = read_image(tmp_path / "a.tif")
    np.testing.assert_array_equal(m.pages[0], a[..., :3])
    assert m.notes == ("alpha channel dropped.",)
    tifffile.imwrite(tmp_path / "b.tif", a, photometric="minisblack", planarconfig="contig")
    m = read_image(tmp_path / "b.tif")
    np.testing.assert_array_equal(m.pages[0], a)
    assert m.notes == ()


def test_tiff_pages_without_metadata_are_slices(tmp_path):
    a = random_values(np.uint8, 3, H, W)
    tifffile.imwrite(tmp_path / "a.tif", a, metadata=None, photometric="minisblack")
    np.testing.assert_array_equal(read_image(tmp_path / "a.tif").pages, a[..., None])


def test_ome_tiff_channels_names_and_pixel_size(tmp_path):
    a = random_values(np.uint16, 4, 2, H, W)
    meta = {
        "axes": "ZCYX",
        "PhysicalSizeX": 65.0,
        "PhysicalSizeXUnit": "nm",
        "PhysicalSizeY": 0.13,
        "Channel": {"Name": ["DAPI", "GFP"]},
    }
    tifffile.imwrite(tmp_path / "a.ome.tif", a, metadata=meta)
    m = read_image(tmp_path / "a.ome.tif")
    np.testing.assert_array_equal(m.pages, a.transpose(0, 2, 3, 1))
    assert m.channel_names == ("DAPI", "GFP")
    assert m.pixel_size == pytest.approx((0.13, 0.065))
    assert m.notes == ("the pixels of a.ome.tif are not square: 0.13 x 0.065 microns (y, x).",)
    gfp = read_image(tmp_path / "a.ome.tif", channel="GFP", z="1:3")
    np.testing.assert_array_equal(gfp.pages, a[1:3, 1, :, :, None])
    assert gfp.channel_names == ("GFP",)
    with pytest.raises(
        InputError, match=r"channel must be one of 2 \(0 to 1, named DAPI, GFP\), got GPF.*'GFP'"
    ):
        read_image(tmp_path / "a.ome.tif", channel="GPF")


def test_t_and_z_axes_are_pages_with_a_note(tmp_path):
    a = random_values(np.uint8, 3, 2, H, W)
    tifffile.imwrite(tmp_path / "a.ome.tif", a, metadata={"axes": "TZYX"})
    m = read_image(tmp_path / "a.ome.tif")
    np.testing.assert_array_equal(m.pages, a.reshape(6, H, W, 1))
    assert m.notes == ("a.ome.tif: the axes T=3 x Z=2 are read as 6 pages.",)


def test_imagej_hyperstack(tmp_path):
    a = random_values(np.uint16, 5, 2, H, W)
    tifffile.imwrite(
        tmp_path / "a.tif", a, imagej=True, metadata={"axes": "ZCYX", "unit": "micron"}, resolution=(4, 4)
    )
    m = read_image(tmp_path / "a.tif")
    np.testing.assert_array_equal(m.pages, a.transpose(0, 2, 3, 1))
    assert m.pixel_size == pytest.approx((0.25, 0.25))


def test_ome_tiff_with_missing_planes_raises(tmp_path):
    a = random_values(np.uint8, 4, H, W)
    tifffile.imwrite(tmp_path / "a.ome.tif", a, metadata={"axes": "ZYX"})
    data = (tmp_path / "a.ome.tif").read_bytes()
    (tmp_path / "a.ome.tif").write_bytes(data.replace(b'SizeZ="4"', b'SizeZ="7"'))
    with pytest.raises(InputError, match=r"3 of 7 planes of the OME metadata are missing"):
        read_image(tmp_path / "a.ome.tif")


def test_axes_argument_overrides_the_metadata(tmp_path):
    a = random_values(np.uint8, 4, H, W)
    tifffile.imwrite(tmp_path / "a.tif", a, photometric="minisblack")
    np.testing.assert_array_equal(
        read_image(tmp_path / "a.tif", axes="CYX").pages, a.transpose(1, 2, 0)[None]
    )
    np.testing.assert_array_equal(
        read_image(tmp_path / "a.tif", axes="zxy").pages, a.swapaxes(1, 2)[..., None]
    )
    with pytest.raises(
        InputError, match=r"a.tif: axes must have 3 letters for the shape 4 x 35 x 41, got 'YX'"
    ):
        read_image(tmp_path / "a.tif", axes="YX")
    with pytest.raises(InputError, match=r"axes must contain Y and X once .*, got 'ZZX'"):
        read_image(tmp_path / "a.tif", axes="ZZX")
    Image.fromarray(random_values(np.uint8, 5, 7, 4), "RGBA").save(tmp_path / "a.png")
    assert read_image(tmp_path / "a.png", axes="YXC").channels == 4


def test_separate_images_in_one_tiff_give_a_note(tmp_path):
    a = random_values(np.uint8, H, W)
    with tifffile.TiffWriter(tmp_path / "a.tif") as tif:
        tif.write(a, metadata=None)
        tif.write(a[:9, :31], metadata=None)
    m = read_image(tmp_path / "a.tif")
    np.testing.assert_array_equal(m.pages[0, :, :, 0], a)
    assert m.notes == ("a.tif contains 2 separate images (35 x 41, 9 x 31); only the first is used.",)


def test_pyramid_levels_give_a_note(tmp_path):
    a = random_values(np.uint8, 64, 96)
    with tifffile.TiffWriter(tmp_path / "a.tif") as tif:
        tif.write(a, subifds=1)
        tif.write(a[::2, ::2], subfiletype=1)
    m = read_image(tmp_path / "a.tif")
    np.testing.assert_array_equal(m.pages[0, :, :, 0], a)
    assert m.notes == ("a.tif contains 2 pyramid levels; only the largest is used.",)


# --- PNG, JPEG, BMP ---


@cases("channels", [1, 2, 3, 4])
def test_16_bit_png_keeps_its_dtype(tmp_path, channels):
    a = random_values(np.uint16, H, W, channels)
    png16(tmp_path / "a.png", a)
    m = read_image(tmp_path / "a.png")
    n_channels = channels - (channels in (2, 4))
    assert m.pages.dtype == np.uint16
    np.testing.assert_array_equal(m.pages[0], a[..., :n_channels])
    assert m.notes == (("alpha channel dropped.",) if n_channels < channels else ())


def test_interlaced_16_bit_png_raises(tmp_path):
    png16(tmp_path / "a.png", random_values(np.uint16, H, W, 3), interlaced=1)
    with pytest.raises(InputError, match=r"a.png is (an interlaced 16-bit colour PNG|truncated or damaged)"):
        read_image(tmp_path / "a.png")


@cases("suffix", [".png", ".bmp"])
@cases("shape", [(H, W), (H, W, 3), (1, 1), (1, 77)])
def test_8_bit_png_and_bmp(tmp_path, suffix, shape):
    a = random_values(np.uint8, *shape) if np.prod(shape) > 1 else np.full(shape, 7, np.uint8)
    Image.fromarray(a).save(tmp_path / f"a{suffix}")
    m = read_image(tmp_path / f"a{suffix}")
    np.testing.assert_array_equal(m.pages, a.reshape(1, *shape[:2], -1))
    assert m.notes == ()


def test_png_with_alpha_palette_or_1_bit(tmp_path):
    rgba = random_values(np.uint8, H, W, 4)
    Image.fromarray(rgba).save(tmp_path / "a.png")
    m = read_image(tmp_path / "a.png")
    np.testing.assert_array_equal(m.pages[0], rgba[..., :3])
    assert m.notes == ("alpha channel dropped.",)
    Image.fromarray(rgba[..., :2].copy(), "LA").save(tmp_path / "la.png")
    np.testing.assert_array_equal(read_image(tmp_path / "la.png").pages[0], rgba[..., :1])
    palette = Image.fromarray(rgba[..., 0] % 5, "P")
    lut = RNG.integers(0, 256, (5, 3), dtype=np.uint8)
    palette.putpalette(lut.tobytes())
    palette.save(tmp_path / "p.png")
    np.testing.assert_array_equal(read_image(tmp_path / "p.png").pages[0], lut[rgba[..., 0] % 5])
    bits = rgba[..., 0] > 99
    Image.fromarray(bits).save(tmp_path / "b.png")
    np.testing.assert_array_equal(read_image(tmp_path / "b.png").pages[0, ..., 0], bits * np.uint8(255))


@cases("mode", ["L", "RGB", "CMYK"])
def test_jpeg_modes(tmp_path, mode):
    smooth = np.add.outer(np.arange(H), np.arange(W)).astype(np.uint8) * 3
    Image.fromarray(smooth).convert(mode).save(tmp_path / "a.jpg", quality=95)
    m = read_image(tmp_path / "a.jpg")
    assert m.channels == (1 if mode == "L" else 3)
    assert np.abs(m.pages[0, ..., 0].astype(int) - smooth).max() < 12
    assert m.notes == (("CMYK colours were converted to RGB.",) if mode == "CMYK" else ())


@cases("orientation", range(1, 9))
@cases("suffix", [".png", ".tif", ".jpg"])
def test_orientation_is_applied_once(tmp_path, orientation, suffix):
    a = np.zeros((H, W), np.uint8)
    a[:8, :16] = 200
    a[8:16, :8] = 100
    exif = Image.Exif()
    exif[274] = orientation
    path = tmp_path / f"a{suffix}"
    image = Image.fromarray(a)
    dpi = (25_400, 50_800)
    if suffix == ".tif":
        image.save(path, tiffinfo={274: orientation}, dpi=dpi)
    else:
        image.save(path, exif=exif, dpi=dpi, **({"quality": 100} if suffix == ".jpg" else {}))
    image.getexif()[274] = orientation
    expected = np.asarray(ImageOps.exif_transpose(image))
    m = read_image(path)
    np.testing.assert_allclose(m.pages[0, ..., 0], expected, atol=3 if suffix == ".jpg" else 0)
    assert m.pixel_size == pytest.approx((1.0, 0.5) if orientation >= 5 else (0.5, 1.0), rel=1e-3)


@cases(("dpi", "size"), [(72, None), (300, None), (2400, None), (25_400, 1.0), (254_000, 0.1)])
def test_print_resolutions_are_not_pixel_sizes(tmp_path, dpi, size):
    Image.fromarray(random_values(np.uint8, H, W)).save(tmp_path / "a.png", dpi=(dpi, dpi))
    actual = read_image(tmp_path / "a.png").pixel_size
    assert actual == (size and pytest.approx((size, size), rel=1e-3))


def test_fei_metadata_gives_the_pixel_size(tmp_path):
    a = random_values(np.uint8, H, W)
    fei = b"[User]\r\nUser=x\r\n\r\n[Scan]\r\nPixelWidth=2.5e-009\r\nPixelHeight=2.5e-009\r\n\r\n"
    tifffile.imwrite(tmp_path / "a.tif", a, metadata=None, extratags=[(34682, 2, len(fei), fei, True)])
    assert read_image(tmp_path / "a.tif").pixel_size == pytest.approx((0.0025, 0.0025))


# --- selection, invalid pixels, damage ---


def test_z_and_channel_select_pages_and_channels(tmp_path):
    a = random_values(np.uint8, 6, H, W, 3)
    tifffile.imwrite(tmp_path / "a.tif", a, photometric="rgb")
    read = lambda **k: read_image(tmp_path / "a.tif", **k).pages  # noqa: E731 - one line, many calls
    np.testing.assert_array_equal(read(z=4), a[4:5])
    np.testing.assert_array_equal(read(z="4"), a[4:5])
    np.testing.assert_array_equal(read(z="2:5"), a[2:5])
    np.testing.assert_array_equal(read(z=":2"), a[:2])
    np.testing.assert_array_equal(read(z="3:"), a[3:])
    np.testing.assert_array_equal(read(channel=1), a[..., 1:2])
    np.testing.assert_array_equal(read(channel=np.int64(0)), a[..., :1])
    np.testing.assert_array_equal(read(channel="2,0"), a[..., [2, 0]])
    np.testing.assert_array_equal(read(channel=[0, 2]), a[..., [0, 2]])
    for z in ("6", "4:4", "5:3", "0:7"):
        with pytest.raises(InputError, match=rf"a.tif: z must select pages of the image \(0 to 5\), got {z}"):
            read(z=z)
    for z in ("a", "-1", "1:2:3", 1.5):
        with pytest.raises(InputError, match=r"must be a page number such as 3, or a range"):
            read(z=z)
    with pytest.raises(InputError, match=r"a.tif: channel must be one of 3 \(0 to 2\), got 3"):
        read(channel=3)
    with pytest.raises(InputError, match=r"channel must name at least one channel"):
        read(channel=[])


@cases("kind", ["float16", "float32", "float64"])
def test_nan_and_infinite_pixels_are_invalid(tmp_path, kind):
    a = random_values(np.dtype(kind).type, H, W, 3)
    a[0, 0, 0], a[3, 4, 2], a[5] = np.nan, -np.inf, np.inf
    tifffile.imwrite(tmp_path / "a.tif", a, photometric="rgb")
    m = read_image(tmp_path / "a.tif")
    expected = np.isfinite(a).all(-1)
    np.testing.assert_array_equal(m.valid[0], expected)
    bad = int((~expected).sum())
    assert m.notes == (
        f"{bad} pixels ({100 * bad / a[..., 0].size:.2g} %) of a.tif are NaN or infinite: treated as no "
        "data.",
    )
    for mode in ("stack", "image"):
        out, _ = normalize(m, mode)
        assert np.isfinite(out).all()
        assert (out[0][~expected] == 0).all()
        assert out.max() == 1
    tifffile.imwrite(tmp_path / "b.tif", np.full((H, W), np.nan, kind))
    with pytest.raises(InputError, match=r"b.tif holds no data: all 1435 pixels are NaN or infinite"):
        read_image(tmp_path / "b.tif")


def test_missing_and_unreadable_files_raise(tmp_path):
    with pytest.raises(InputError, match=r"nowhere.png does not exist"):
        read_image(tmp_path / "nowhere.png")
    with pytest.raises(InputError, match=r"is not a file"):
        read_image(tmp_path)
    (tmp_path / "e.png").write_bytes(b"")
    with pytest.raises(InputError, match=r"e.png is empty \(0 bytes\)"):
        read_image(tmp_path / "e.png")
    (tmp_path / "t.png").write_text("not an image")
    with pytest.raises(InputError, match=r"t.png is not a readable PNG, JPEG, TIFF, BMP, GIF or WebP image"):
        read_image(tmp_path / "t.png")
    tifffile.imwrite(tmp_path / "c.tif", np.ones((5, 7), np.complex64))
    with pytest.raises(InputError, match=r"c.tif: values must be real numbers, got complex64"):
        read_image(tmp_path / "c.tif")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tifffile.imwrite(tmp_path / "z.tif", np.zeros((0, 5), np.uint8))
    with pytest.raises(InputError, match=r"z.tif has no pixels, got the shape 0 x 5"):
        read_image(tmp_path / "z.tif")


def test_a_wrong_file_extension_is_ignored(tmp_path):
    a = random_values(np.uint16, H, W)
    tifffile.imwrite(tmp_path / "a.tif", a)
    (tmp_path / "a.tif").rename(tmp_path / "a.png")
    np.testing.assert_array_equal(read_image(tmp_path / "a.png").pages[0, ..., 0], a)


def test_truncated_ifds_are_left_to_the_reader(tmp_path):
    entry = struct.pack("<HHII", 256, 4, 1, 9)
    (tmp_path / "a.tif").write_bytes(b"II*\0" + struct.pack("<IH", 8, 2) + entry + entry[:7])
    assert check_page_list(tmp_path / "a.tif") == []


@cases("keep", [0.02, 0.3, 0.5, 0.9, 0.99])
@cases("name", ["a.png", "a.jpg", "a.bmp", "a.tif", "stack.tif", "deflate.tif", "rgb16.png", "lzw.tif"])
def test_truncated_files_raise(tmp_path, name, keep):
    path = tmp_path / name
    a = random_values(np.uint8, 97, 113)
    if name == "stack.tif":
        tifffile.imwrite(path, np.stack([a] * 6), compression="deflate", metadata=None)
    elif name == "deflate.tif":
        tifffile.imwrite(path, a, compression="deflate")
    elif name == "a.tif":
        tifffile.imwrite(path, np.stack([a] * 6))
    elif name == "rgb16.png":
        png16(path, random_values(np.uint16, 97, 113, 3))
    elif name == "lzw.tif":
        Image.fromarray(a).save(path, compression="tiff_lzw")
    else:
        Image.fromarray(a).save(path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(InputError, match=rf"{name} is (truncated|not a readable)"):
        read_image(path)


def test_corrupted_bytes_raise_only_input_error(tmp_path):
    rng = np.random.default_rng(3)
    tifffile.imwrite(tmp_path / "a.tif", random_values(np.uint16, 2, H, W), compression="deflate")
    Image.fromarray(random_values(np.uint8, H, W, 3)).save(tmp_path / "a.png")
    for name in ("a.tif", "a.png"):
        data = (tmp_path / name).read_bytes()
        for trial in range(40):
            corrupted = bytearray(data)
            for position in rng.integers(4, min(len(corrupted), 400), 4):
                corrupted[position] = rng.integers(256)
            path = tmp_path / f"{trial}{name}"
            path.write_bytes(corrupted)
            with suppress(InputError):
                assert read_image(path).pages.ndim == 4


def test_large_images_are_read_with_a_note(tmp_path, monkeypatch):
    monkeypatch.setattr("vispe.images.read.image_file.GIGAPIXEL", 1000)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    Image.fromarray(random_values(np.uint8, H, W)).save(tmp_path / "a.png")
    assert read_image(tmp_path / "a.png").notes == (
        "a.png has 0.0 Gpixel; expect long run times and much memory.",
    )
    assert Image.MAX_IMAGE_PIXELS == 10
    assert decoded_image.GIGAPIXEL == 10**9


# --- find_images ---


def test_find_images_in_folders_and_globs(tmp_path, monkeypatch):
    for name in ("b10.png", "b2.TIF", "b1.jpeg", "a.txt", ".hidden.png", "odd[1].png"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/c.bmp").write_bytes(b"x")
    names = lambda actual: [p.name for p in actual]  # noqa: E731 - one line, many calls
    assert names(find_images([tmp_path])) == ["b1.jpeg", "b2.TIF", "b10.png", "odd[1].png"]
    assert names(find_images([str(tmp_path / "b*")])) == ["b1.jpeg", "b2.TIF", "b10.png"]
    assert names(find_images([str(tmp_path / "**/*.bmp")])) == ["c.bmp"]
    assert names(find_images([tmp_path / "odd[1].png"])) == ["odd[1].png"]
    paths = [tmp_path / "b10.png", tmp_path / "a.txt", tmp_path]
    assert names(find_images(paths)) == ["b10.png", "a.txt", "b1.jpeg", "b2.TIF", "odd[1].png"]
    monkeypatch.chdir(tmp_path)
    assert find_images("b*.png") == [Path("b10.png")]
    assert find_images(["../*/b1.jpeg"])[0].name == "b1.jpeg"
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"the folder .*empty contains no image with .png .jpg"):
        find_images([tmp_path / "empty"])
    with pytest.raises(InputError, match=r"\*.gif matches no image"):
        find_images(["*.gif"])
    with pytest.raises(InputError, match=r"lost.png does not exist"):
        find_images(["lost.png"])
    with pytest.raises(InputError, match=r"no image files, got an empty list"):
        find_images([])


# --- normalize ---


@cases("kind", KINDS)
def test_normalize_equals_the_percentile_formula(kind):
    pages = random_values(np.dtype(kind).type, 3, 19, 23, 3)
    m = micrograph(pages)
    exact = pages.astype(np.float64)
    for mode, groups in (("stack", [slice(0, 3)]), ("image", [slice(i, i + 1) for i in range(3)])):
        out, notes = normalize(m, mode, (2, 97))
        assert out.dtype == np.float32
        assert notes == []
        for group in groups:
            low, high = np.percentile(exact[group], (2, 97))
            expected = np.clip((exact[group] - low) / (high - low), 0, 1)
            np.testing.assert_allclose(out[group], expected, atol=2e-3 if kind == "float16" else 2e-6)


def test_normalize_none_scales_by_the_dtype_maximum():
    out, notes = normalize(micrograph(np.array([0, 51, 255], np.uint8).reshape(1, 1, 3, 1)), "none")
    np.testing.assert_allclose(out.ravel(), [0, 0.2, 1], rtol=1e-7)
    assert notes == []
    out, _ = normalize(micrograph(np.array([0, 65535], np.uint16).reshape(1, 1, 2, 1)), "none")
    np.testing.assert_array_equal(out.ravel(), [0, 1])
    out, _ = normalize(micrograph(np.array([0, 0.25, np.nan], np.float64).reshape(1, 1, 3, 1)), "none")
    np.testing.assert_array_equal(out.ravel(), [0, 0.25, 0])
    with pytest.raises(InputError, match=r"normalize=none needs values from 0 to 1, got 0 to 1.5. Use"):
        normalize(micrograph(np.array([0, 1.5]).reshape(1, 1, 2, 1)), "none")
    with pytest.raises(InputError, match=r"normalize=none needs values from 0 to 32767, got -3 to 2"):
        normalize(micrograph(np.array([-3, 2], np.int16).reshape(1, 1, 2, 1)), "none")


def test_constant_images_become_zero_with_a_note():
    pages = np.stack([np.full((5, 7, 1), 9.0), np.arange(35.0).reshape(5, 7, 1)])
    out, notes = normalize(micrograph(pages), "image", (0, 100))
    assert (out[0] == 0).all()
    assert out[1].max() == 1
    assert notes == ["page 0 of x.tif is constant (every value is 9): there are no classes to separate."]
    out, notes = normalize(micrograph(np.full((1, 1, 1, 1), 3, np.uint8)))
    assert out.tolist() == [[[[0.0]]]]
    assert notes == ["x.tif is constant (every value is 3): there are no classes to separate."]


def test_images_with_equal_percentiles_use_the_full_range():
    pages = np.zeros((1, 40, 40, 1), np.uint8)
    pages[0, 0, :2, 0] = 100, 200
    out, notes = normalize(micrograph(pages))
    assert out[0, 0, :2, 0].tolist() == [0.5, 1.0]
    assert notes == ["the 0.5 and 99.5 percentiles of x.tif are equal: the full range 0 to 200 is used."]


def test_pages_without_valid_pixels_give_a_note():
    pages = np.stack([np.full((5, 7, 1), np.nan), np.arange(35.0).reshape(5, 7, 1)])
    out, notes = normalize(micrograph(pages), "image")
    assert (out[0] == 0).all()
    assert notes == ["page 0 of x.tif holds no data."]


def test_invalid_normalize_options_raise():
    m = micrograph(np.zeros((1, 2, 2, 1), np.uint8))
    with pytest.raises(
        OptionError, match=r"mode must be one of stack, image, none, got 'stak'. Did you mean 'stack'"
    ):
        normalize(m, "stak")
    with pytest.raises(OptionError, match=r"clip must be two percentiles .*, got 99,1"):
        normalize(m, "stack", (99, 1))


@pytest.mark.skipif(not SHARED.exists(), reason="the shared micrographs are not on this machine")
def test_every_shared_micrograph_is_read():
    files = find_images(sorted(SHARED.glob("*/images")))
    assert len(files) == 42
    for path in files:
        m = read_image(path)
        with Image.open(path) as image:
            np.testing.assert_array_equal(m.pages.squeeze(), np.asarray(image))
        assert m.notes == ()
        assert m.pixel_size is None


def test_skimage_sample_images_are_selected_by_name():
    (path,) = find_images(["skimage:ihc"])
    assert path.name == "ihc.png"
    assert read_image(path).pages.shape == (1, 512, 512, 3)
    with pytest.raises(InputError, match=r"has no sample image 'ihx'. Did you mean 'ihc'.*Available: .*cell"):
        find_images(["skimage:ihx"])
