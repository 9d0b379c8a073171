"""Files that tests make: good ones with the pixels that are in them, and those that strangers may send."""

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
    """A file and its pixels as they must be read, (z, h, w, c)."""

    name: str
    data: bytes
    pixels: np.ndarray


def grey(kind=np.uint8, *shape):
    """A smooth image with noise, which compresses, in the whole range of its type."""
    shape = shape or (H, W)
    y, x = np.mgrid[: shape[-2], : shape[-1]]
    wave = 0.5 + 0.2 * np.sin(x / 3.0) + 0.2 * np.cos(y / 4.0) + RNG.uniform(-0.1, 0.1, shape)
    if np.issubdtype(kind, np.floating):
        return (200 * wave - 100).astype(kind)
    info = np.iinfo(kind)
    return (info.min / 2 + wave * (info.max / 2 - info.min / 2)).astype(kind)


def encoded(array, kind, **options):
    """What Pillow writes."""
    stream = io.BytesIO()
    image = array if isinstance(array, Image.Image) else Image.fromarray(array)
    image.save(stream, kind, **options)
    return stream.getvalue()


def tiff(array, **options):
    """What tifffile writes."""
    stream = io.BytesIO()
    tifffile.imwrite(stream, array, **{"metadata": None, **options})
    return stream.getvalue()


def good() -> list[Good]:
    """At least one small file of each format, layout and depth."""
    g, deep, rgb = grey(), grey(np.uint16), np.stack([grey(), grey(), grey()], -1)
    stack = grey(np.uint8, 3, H, W)
    palette = Image.fromarray(g // 64)
    palette.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120])
    colours = np.array([[10, 20, 30], [40, 50, 60], [70, 80, 90], [100, 110, 120]], np.uint8)
    alpha = np.dstack([rgb, grey()])

    def one(a):
        return a.reshape(1, *a.shape[:2], -1)

    files = [
        ("grey.png", encoded(g, "PNG"), one(g)),
        ("stored.png", encoded(g, "PNG", compress_level=0), one(g)),
        ("deep.png", encoded(deep, "PNG"), one(deep)),
        ("rgb.png", encoded(rgb, "PNG"), one(rgb)),
        ("alpha.png", encoded(alpha, "PNG"), one(rgb)),
        ("palette.png", encoded(palette, "PNG"), one(colours[g // 64])),
        ("bits.png", encoded(g > 127, "PNG"), one(np.where(g > 127, np.uint8(255), np.uint8(0)))),
        ("grey.bmp", encoded(g, "BMP"), one(g)),
        ("rgb.bmp", encoded(rgb, "BMP"), one(rgb)),
        ("grey.tif", tiff(g), one(g)),
        ("big.tif", tiff(deep, bigtiff=True), one(deep)),
        ("swapped.tif", tiff(deep, byteorder=">"), one(deep)),
        ("swappedbig.tif", tiff(deep, byteorder=">", bigtiff=True), one(deep)),
        ("tiled.tif", tiff(deep, tile=(16, 16), compression="zlib"), one(deep)),
        (
            "planar.tif",
            tiff(np.moveaxis(rgb, -1, 0), photometric="rgb", planarconfig="separate"),
            one(rgb),
        ),
        ("deflate.tif", tiff(deep, compression="zlib", predictor=2), one(deep)),
        ("float.tif", tiff(grey(np.float32)), None),
        ("deeprgb.tif", tiff(np.stack([deep, deep[::-1], deep], -1), photometric="rgb"), None),
        ("ome.ome.tif", tiff(stack, ome=True, metadata={"axes": "ZYX"}), stack[..., None]),
        ("imagej.tif", tiff(stack, imagej=True, metadata={"axes": "ZYX"}), stack[..., None]),
        ("pages.tif", tiff(stack, photometric="minisblack"), stack[..., None]),
    ]
    for shape in ((1, 1), (1, 40), (40, 1)):
        small = grey(np.uint8, *shape)
        files += [("x".join(map(str, shape)) + ".png", encoded(small, "PNG"), one(small))]
        files += [("x".join(map(str, shape)) + ".tif", tiff(small), one(small))]
    return [Good(n, d, one(tifffile.imread(io.BytesIO(d))) if p is None else p) for n, d, p in files]


def photographs() -> list[Good]:
    """JPEG files; the pixels are those of Pillow, since the format is lossy."""
    rgb = np.stack([grey(), grey(), grey()], -1)
    files = {
        "grey.jpg": encoded(grey(), "JPEG"),
        "rgb.jpg": encoded(rgb, "JPEG"),
        "progressive.jpg": encoded(rgb, "JPEG", progressive=True),
        "restarts.jpg": encoded(rgb, "JPEG", restart_marker_rows=1),
    }
    return [Good(n, d, np.asarray(Image.open(io.BytesIO(d))).reshape(1, H, W, -1)) for n, d in files.items()]


# --- files that claim more than they hold ---


def chunk(kind: bytes, data: bytes) -> bytes:
    """One part of a PNG file, with its checksum."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(w: int, h: int, bits: int, colour: int, packed: bytes, extra: bytes = b"") -> bytes:
    """A PNG file of any header and compressed pixels."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", w, h, bits, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + extra + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


def zeros(megabytes: int) -> bytes:
    """So many zeros, a thousandth of their size: one packed block again and again."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    check = ((megabytes << 20) % 65521) << 16 | 1
    return b"\x78\xda" + block * megabytes + b"\x03\x00" + struct.pack(">I", check)


def pages(count: int, back: int | None = None, **tags: int) -> bytes:
    """A TIFF file of so many pages of 4 x 4 pixels; its list goes on at page `back`, in a circle."""
    actual = {256: 4, 257: 4, 258: 8, 259: 1, 262: 1, 273: 0, 278: 4, 279: 16}
    actual |= {int(key[1:]): value for key, value in tags.items()}
    body = b"".join(struct.pack("<HHII", key, 4, 1, value) for key, value in sorted(actual.items()))
    size = 2 + len(body) + 4
    follow = [8 + size * (k + 1) for k in range(count - 1)] + [0 if back is None else 8 + size * back]
    parts = [struct.pack("<H", len(actual)) + body + struct.pack("<I", n) for n in follow]
    return b"II*\0" + struct.pack("<I", 8) + b"".join(parts) + bytes(64)


def ome(inside: str, planes: object = 1, prolog: str = "") -> bytes:
    """A TIFF file of one plane whose OME metadata speaks of more."""
    pixels = f'<Pixels ID="P" DimensionOrder="XYZCT" Type="uint8" SizeX="4" SizeY="3" SizeZ="{planes}" '
    text = f'<?xml version="1.0"?>{prolog}<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06">'
    text += f'<Image ID="I">{pixels}SizeC="1" SizeT="1">{inside}</Pixels></Image></OME>'
    return tiff(np.arange(12, dtype=np.uint8).reshape(3, 4), description=text)


def bmp(w: int, h: int, data: bytes, runs: int = 1) -> bytes:
    """A BMP file of 8-bit greys; `runs` = 1 for compressed rows."""
    greys = b"".join(bytes([i, i, i, 0]) for i in range(256))
    start = 54 + len(greys)
    head = struct.pack("<IiiHHIIiiII", 40, w, h, 1, 8, runs, len(data), 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", start + len(data), 0, 0, start) + head + greys + data


def _frame(data: bytes, marks: tuple[bytes, ...], size: bytes) -> bytes:
    at = next(data.index(m) for m in marks if m in data)
    return data[: at + 5] + size + data[at + 9 :]


def hostile() -> Iterator[tuple[str, bytes, str]]:
    """Names, contents, and a pattern of the sentence with which each is refused."""
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
    yield "planes8.tif", ome("<TiffData/>", 10**8), r"got 1e\+08"  # a list of them fits the memory
    yield "planes18.tif", ome("<TiffData/>", 10**18), r"got 1e\+18"
    yield "count.tif", ome('<TiffData IFD="0" PlaneCount="1000000000"/>'), r"got 1e\+09"
    for name, other in (("device", "/dev/zero"), ("above", "../../secret.tif"), ("folder", ".")):
        uuid = f'<TiffData PlaneCount="1"><UUID FileName="{other}">urn:uuid:1</UUID></TiffData>'
        yield f"{name}.tif", ome(uuid, 2), r"must be in the folder of the image"
    laughs = "".join(f'<!ENTITY l{k} "{f"&l{k - 1};" * 10}">' for k in range(1, 10))
    entities = f'<!DOCTYPE z [<!ENTITY l0 "ha">{laughs}]>'
    yield "laughs.tif", ome("<TiffData/><A>&l9;</A>", prolog=entities), r"XML entities in the metadata"
    along = '<ModuloAlongZ Type="angle" Start="0" End="3e9"/>'
    yield "modulo.tif", ome(f"<TiffData/>{along}"), r"got 3e\+09"
    shape = json.dumps({"shape": [10**9, 4, 4]})
    yield "shape.tif", tiff(grey(np.uint8, 4, 4), description=shape), r"truncated: expected"
    images = "ImageJ=1.53\nimages=1000000000\nslices=1000000000\nhyperstack=true\n"
    yield "imagej.tif", tiff(grey(np.uint8, 4, 4), description=images), r"truncated|decompression bomb"


def _shared(count: int) -> bytes:
    """A TIFF file whose pages all have the same compressed pixels."""
    packed = zlib.compress(bytes(2000 * 2000), 9)
    plain = pages(count, t256=2000, t257=2000, t278=2000, t259=8, t273=0, t279=len(packed))
    at = struct.pack("<HHII", 273, 4, 1, len(plain))
    return plain.replace(struct.pack("<HHII", 273, 4, 1, 0), at) + packed


def foreign() -> Iterator[tuple[str, bytes]]:
    """Files that are not images, under the names of images."""
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
    """Cut, flip single bits, and overwrite blocks, at positions drawn with `seed`."""
    rng = np.random.default_rng(seed)
    ends = np.unique(
        np.append(np.linspace(0, len(data) - 1, count).astype(int), len(data) - 1 - np.arange(4))
    )
    yield from ((f"cut at {n}", data[:n]) for n in ends if n >= 0)
    for _ in range(count):
        at, broken = int(rng.integers(len(data))), bytearray(data)
        broken[at] ^= 1 << int(rng.integers(8))
        yield f"bit at {at}", bytes(broken)
    for _ in range(count // 2):
        at, broken = int(rng.integers(len(data))), bytearray(data)
        size = min(int(rng.integers(1, 60)), len(data) - at)
        broken[at : at + size] = rng.bytes(size)
        yield f"block at {at}", bytes(broken)


def strange_tags(data: bytes, seed: int) -> bytes:
    """Change one to three entries of the first page of a little-endian classic TIFF file to numbers that hurt."""
    rng, out = np.random.default_rng(seed), bytearray(data)
    at = struct.unpack_from("<I", data, 4)[0]
    count = struct.unpack_from("<H", data, at)[0]
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
        at,
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
        entry = at + 2 + 12 * int(rng.integers(count))
        part = int(rng.integers(4))
        if part == 0:
            struct.pack_into("<H", out, entry, int(rng.choice(tags)))
        elif part == 1:
            struct.pack_into("<H", out, entry + 2, int(rng.integers(0, 19)))
        else:
            struct.pack_into("<I", out, entry + (4 if part == 2 else 8), int(rng.choice(numbers)))
    return bytes(out)


def write(folder: Path, files: dict[str, bytes]) -> list[Path]:
    """Write files and return their paths."""
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return [folder / name for name in files]
