"""Corpus of image files: valid files with their expected pixels, and malicious, foreign and damaged files."""

import io
import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tifffile
from PIL import Image

H, W = 19, 23
RNG = np.random.default_rng(8)


@dataclass(frozen=True)
class Good:
    """A valid file and its expected pixels, (z, h, w, c)."""

    name: str
    data: bytes
    pixels: np.ndarray


def grey(kind=np.uint8, *shape):
    """Return a smooth, compressible image with noise that covers most of the range of its dtype."""
    shape = shape or (H, W)
    y, x = np.mgrid[: shape[-2], : shape[-1]]
    wave = 0.5 + 0.2 * np.sin(x / 3.0) + 0.2 * np.cos(y / 4.0) + RNG.uniform(-0.1, 0.1, shape)
    if np.issubdtype(kind, np.floating):
        return (200 * wave - 100).astype(kind)
    info = np.iinfo(kind)
    return (info.min / 2 + wave * (info.max / 2 - info.min / 2)).astype(kind)


def encoded(array, kind, **options):
    """Encode an image with Pillow."""
    stream = io.BytesIO()
    image = array if isinstance(array, Image.Image) else Image.fromarray(array)
    image.save(stream, kind, **options)
    return stream.getvalue()


def tiff(array, **options):
    """Encode an array with tifffile."""
    stream = io.BytesIO()
    tifffile.imwrite(stream, array, **{"metadata": None, **options})
    return stream.getvalue()


def good() -> list[Good]:
    """Return at least one small file of each format, layout and bit depth."""
    g, grey16, rgb = grey(), grey(np.uint16), np.stack([grey(), grey(), grey()], -1)
    stack = grey(np.uint8, 3, H, W)
    palette = Image.fromarray(g // 64)
    palette.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120])
    colours = np.array([[10, 20, 30], [40, 50, 60], [70, 80, 90], [100, 110, 120]], np.uint8)
    alpha = np.dstack([rgb, grey()])

    def as_page(a):
        return a.reshape(1, *a.shape[:2], -1)

    files = [
        ("grey.png", encoded(g, "PNG"), as_page(g)),
        ("stored.png", encoded(g, "PNG", compress_level=0), as_page(g)),
        ("deep.png", encoded(grey16, "PNG"), as_page(grey16)),
        ("rgb.png", encoded(rgb, "PNG"), as_page(rgb)),
        ("alpha.png", encoded(alpha, "PNG"), as_page(rgb)),
        ("palette.png", encoded(palette, "PNG"), as_page(colours[g // 64])),
        ("bits.png", encoded(g > 127, "PNG"), as_page(np.where(g > 127, np.uint8(255), np.uint8(0)))),
        ("grey.bmp", encoded(g, "BMP"), as_page(g)),
        ("rgb.bmp", encoded(rgb, "BMP"), as_page(rgb)),
        ("grey.tif", tiff(g), as_page(g)),
        ("big.tif", tiff(grey16, bigtiff=True), as_page(grey16)),
        ("swapped.tif", tiff(grey16, byteorder=">"), as_page(grey16)),
        ("swappedbig.tif", tiff(grey16, byteorder=">", bigtiff=True), as_page(grey16)),
        ("tiled.tif", tiff(grey16, tile=(16, 16), compression="zlib"), as_page(grey16)),
        (
            "planar.tif",
            tiff(np.moveaxis(rgb, -1, 0), photometric="rgb", planarconfig="separate"),
            as_page(rgb),
        ),
        ("deflate.tif", tiff(grey16, compression="zlib", predictor=2), as_page(grey16)),
        ("float.tif", tiff(grey(np.float32)), None),
        ("deeprgb.tif", tiff(np.stack([grey16, grey16[::-1], grey16], -1), photometric="rgb"), None),
        ("ome.ome.tif", tiff(stack, ome=True, metadata={"axes": "ZYX"}), stack[..., None]),
        ("imagej.tif", tiff(stack, imagej=True, metadata={"axes": "ZYX"}), stack[..., None]),
        ("pages.tif", tiff(stack, photometric="minisblack"), stack[..., None]),
    ]
    for shape in ((1, 1), (1, 40), (40, 1)):
        small = grey(np.uint8, *shape)
        files += [("x".join(map(str, shape)) + ".png", encoded(small, "PNG"), as_page(small))]
        files += [("x".join(map(str, shape)) + ".tif", tiff(small), as_page(small))]
    return [Good(n, d, as_page(tifffile.imread(io.BytesIO(d))) if p is None else p) for n, d, p in files]


def photographs() -> list[Good]:
    """Return JPEG files; the expected pixels are those of Pillow, since the format is lossy."""
    rgb = np.stack([grey(), grey(), grey()], -1)
    files = {
        "grey.jpg": encoded(grey(), "JPEG"),
        "rgb.jpg": encoded(rgb, "JPEG"),
        "progressive.jpg": encoded(rgb, "JPEG", progressive=True),
        "restarts.jpg": encoded(rgb, "JPEG", restart_marker_rows=1),
    }
    return [Good(n, d, np.asarray(Image.open(io.BytesIO(d))).reshape(1, H, W, -1)) for n, d in files.items()]


# --- files that declare more than they contain ---


def chunk(kind: bytes, data: bytes) -> bytes:
    """Return a PNG chunk with its checksum."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(w: int, h: int, bits: int, colour: int, packed: bytes, extra: bytes = b"") -> bytes:
    """Return a PNG file with any header and any compressed pixels."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", w, h, bits, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + extra + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


def zeros(megabytes: int) -> bytes:
    """Return zlib data of `megabytes` MiB of zeros at a ratio of about 1000: one compressed block, repeated."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    check = ((megabytes << 20) % 65521) << 16 | 1
    return b"\x78\xda" + block * megabytes + b"\x03\x00" + struct.pack(">I", check)


def pages(count: int, back: int | None = None, **tags: int) -> bytes:
    """Return a TIFF file with `count` pages of 4 x 4 pixels; the last page links to page `back`, a cycle."""
    entries = {256: 4, 257: 4, 258: 8, 259: 1, 262: 1, 273: 0, 278: 4, 279: 16}
    entries |= {int(key[1:]): value for key, value in tags.items()}
    body = b"".join(struct.pack("<HHII", key, 4, 1, value) for key, value in sorted(entries.items()))
    size = 2 + len(body) + 4
    next_offsets = [8 + size * (k + 1) for k in range(count - 1)] + [0 if back is None else 8 + size * back]
    parts = [struct.pack("<H", len(entries)) + body + struct.pack("<I", n) for n in next_offsets]
    return b"II*\0" + struct.pack("<I", 8) + b"".join(parts) + bytes(64)


def ome(inside: str, planes: object = 1, prolog: str = "") -> bytes:
    """Return a TIFF file with one plane whose OME metadata declare more."""
    pixels = f'<Pixels ID="P" DimensionOrder="XYZCT" Type="uint8" SizeX="4" SizeY="3" SizeZ="{planes}" '
    text = f'<?xml version="1.0"?>{prolog}<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06">'
    text += f'<Image ID="I">{pixels}SizeC="1" SizeT="1">{inside}</Pixels></Image></OME>'
    return tiff(np.arange(12, dtype=np.uint8).reshape(3, 4), description=text)


def bmp(w: int, h: int, data: bytes, runs: int = 1) -> bytes:
    """Return a BMP file with 8-bit grey levels; `runs` = 1 for run-length encoded rows."""
    greys = b"".join(bytes([i, i, i, 0]) for i in range(256))
    start = 54 + len(greys)
    head = struct.pack("<IiiHHIIiiII", 40, w, h, 1, 8, runs, len(data), 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", start + len(data), 0, 0, start) + head + greys + data


def _frame(data: bytes, marks: tuple[bytes, ...], size: bytes) -> bytes:
    at = next(data.index(m) for m in marks if m in data)
    return data[: at + 5] + size + data[at + 9 :]


def hostile() -> Iterator[tuple[str, bytes, str]]:
    """Yield the name, the content and a pattern of the error message of each malicious file."""
    bomb, compressed = zeros(1300), zlib.compress(bytes(72))
    yield "header.png", png(10**9, 10**9, 8, 0, compressed), r"decompression bomb, got 1000000000 x"
    yield "bomb.png", png(40000, 33000, 8, 0, bomb), r"decompression bomb, got 33000 x 40000"
    yield "bomb16.png", png(100, 100, 16, 2, bomb), r"more pixels than its header declares"
    yield "more.png", png(8, 8, 8, 0, bomb), r"more pixels than its header declares"
    yield "fewer.png", png(8, 80, 8, 0, compressed), r"fewer pixels than its header declares"
    text = chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes([65]) * 10**7))
    yield "text.png", png(8, 8, 8, 0, compressed, text), r"Decompressed data too large"
    yield "profile.png", png(8, 8, 8, 0, compressed, text.replace(b"zTXt", b"iCCP")), r"damaged"
    yield "nothing.png", png(0, 5, 8, 0, compressed), r"nothing\.png"
    size = struct.pack(">HH", 65535, 65535)
    yield (
        "header.jpg",
        _frame(encoded(grey(), "JPEG"), (b"\xff\xc0",), size),
        r"decompression bomb, got 65535 x 65535",
    )
    yield "header.bmp", bmp(60000, 60000, b"", 0), r"decompression bomb, got 60000 x 60000"
    yield "huge.bmp", bmp(2**31 - 1, 2**31 - 1, b"", 0), r"decompression bomb, got 2147483647 x"
    yield (
        "runs.bmp",
        bmp(2**29, 1, b"\0\2\xff\xff" * 200 + b"\0\0\0\1"),
        r"decompression bomb, got 1 x 536870912",
    )
    yield (
        "wide.tif",
        pages(1, t256=10**9, t257=10**9, t278=10**9),
        r"truncated: expected|decompression bomb|lists fewer",
    )
    yield (
        "deflate.tif",
        pages(1, t256=40000, t257=40000, t278=40000, t259=8),
        r"decompression bomb, got 40000 x 40000",
    )
    for count, back in ((1, 0), (50, 0), (150, 0), (150, 75)):
        yield f"circle{count}-{back}.tif", pages(count, back), rf"page list is cyclic after {count}"
    yield "tile.tif", pages(1, t259=8, t322=2**31 - 16, t323=2**31 - 16, t324=8, t325=9), r"tile\.tif"
    yield (
        "tiles.tif",
        pages(1, t256=30000, t257=30000, t322=16, t323=16, t324=8, t325=9),
        r"too few strips or tiles",
    )
    yield "shared.tif", _shared(300), r"decompression bomb, got 300 x 2000 x 2000"
    yield "planes.tif", ome("<TiffData/>", 10**9), r"got 1e\+09"
    yield "planes8.tif", ome("<TiffData/>", 10**8), r"got 1e\+08"  # a list of this length fits into memory
    yield "planes18.tif", ome("<TiffData/>", 10**18), r"got 1e\+18"
    yield "count.tif", ome('<TiffData IFD="0" PlaneCount="1000000000"/>'), r"got 1e\+09"
    for name, file_name in (("device", "/dev/zero"), ("above", "../../secret.tif"), ("folder", ".")):
        uuid = f'<TiffData PlaneCount="1"><UUID FileName="{file_name}">urn:uuid:1</UUID></TiffData>'
        yield f"{name}.tif", ome(uuid, 2), r"must be in the folder of the image"
    laughs = "".join(f'<!ENTITY l{k} "{f"&l{k - 1};" * 10}">' for k in range(1, 10))
    entities = f'<!DOCTYPE z [<!ENTITY l0 "ha">{laughs}]>'
    yield "laughs.tif", ome("<TiffData/><A>&l9;</A>", prolog=entities), r"XML entities in the metadata"
    modulo = '<ModuloAlongZ Type="angle" Start="0" End="3e9"/>'
    yield "modulo.tif", ome(f"<TiffData/>{modulo}"), r"got 3e\+09"
    shape = json.dumps({"shape": [10**9, 4, 4]})
    yield "shape.tif", tiff(grey(np.uint8, 4, 4), description=shape), r"truncated: expected"
    images = "ImageJ=1.53\nimages=1000000000\nslices=1000000000\nhyperstack=true\n"
    yield "imagej.tif", tiff(grey(np.uint8, 4, 4), description=images), r"truncated|decompression bomb"


def _shared(count: int) -> bytes:
    """Return a TIFF file whose pages all refer to the same compressed pixels."""
    packed = zlib.compress(bytes(2000 * 2000), 9)
    plain = pages(count, t256=2000, t257=2000, t278=2000, t259=8, t273=0, t279=len(packed))
    tag = struct.pack("<HHII", 273, 4, 1, len(plain))
    return plain.replace(struct.pack("<HHII", 273, 4, 1, 0), tag) + packed


def foreign() -> Iterator[tuple[str, bytes]]:
    """Yield files that are not images but have file names of images."""
    yield "text.png", b"this is not an image\n"
    yield "page.jpg", b"<!DOCTYPE html><html><body>404 not found</body></html>"
    yield "archive.tif", b"PK\x03\x04" + bytes(60)
    yield "empty.tif", b""
    yield "zeros.bmp", bytes(4096)
    yield "magic.tif", b"II*\0"
    yield "magic.png", b"\x89PNG\r\n\x1a\n"
    yield "magic.jpg", b"\xff\xd8\xff"
    yield "script.png", b"#!/bin/sh\ntouch /tmp/never\n"
    yield "tga.png", encoded(grey(), "TGA")


def damaged(data: bytes, count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Yield truncated copies, copies with a flipped bit and copies with an overwritten block, at random positions."""
    rng = np.random.default_rng(seed)
    lengths = np.unique(
        np.append(np.linspace(0, len(data) - 1, count).astype(int), len(data) - 1 - np.arange(4))
    )
    yield from ((f"cut at {n}", data[:n]) for n in lengths if n >= 0)
    for _ in range(count):
        offset, corrupted = int(rng.integers(len(data))), bytearray(data)
        corrupted[offset] ^= 1 << int(rng.integers(8))
        yield f"bit at {offset}", bytes(corrupted)
    for _ in range(count // 2):
        offset, corrupted = int(rng.integers(len(data))), bytearray(data)
        size = min(int(rng.integers(1, 60)), len(data) - offset)
        corrupted[offset : offset + size] = rng.bytes(size)
        yield f"block at {offset}", bytes(corrupted)


def strange_tags(data: bytes, seed: int) -> bytes:
    """Set one to three tags in the first IFD of a little-endian classic TIFF file to extreme values."""
    rng, modified = np.random.default_rng(seed), bytearray(data)
    offset = struct.unpack_from("<I", data, 4)[0]
    count = struct.unpack_from("<H", data, offset)[0]
    numbers = [
        0,
        1,
        2,
        3,
        7,
        8,
        16,
        17,
        255,
        256,
        65535,
        65536,
        10**6,
        2**31 - 1,
        2**31,
        2**32 - 1,
        len(data),
        offset,
    ]
    tags = [
        254,
        256,
        257,
        258,
        259,
        262,
        266,
        270,
        273,
        274,
        277,
        278,
        279,
        282,
        284,
        296,
        317,
        320,
        322,
        323,
        324,
    ]
    tags += [325, 330, 338, 339, 34675, 37724, 50838, 51123, 65000]
    for _ in range(int(rng.integers(1, 4))):
        entry = offset + 2 + 12 * int(rng.integers(count))
        part = int(rng.integers(4))
        if part == 0:
            struct.pack_into("<H", modified, entry, int(rng.choice(tags)))
        elif part == 1:
            struct.pack_into("<H", modified, entry + 2, int(rng.integers(0, 19)))
        else:
            struct.pack_into("<I", modified, entry + (4 if part == 2 else 8), int(rng.choice(numbers)))
    return bytes(modified)


def write(folder: Path, files: dict[str, bytes]) -> list[Path]:
    """Write files and return their paths."""
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return [folder / name for name in files]
