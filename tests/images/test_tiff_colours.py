"""Colour spaces of TIFF files: conversion to RGB or an error, in memory and in blocks."""

import struct

import numpy as np
import pytest
import tifffile
from PIL import Image

from tests.cases import cases
from vispe.errors import InputError
from vispe.images.read import read_image
from vispe.segment.out_of_core.source.open_image import open_image

RGB = np.random.default_rng(2).integers(0, 256, (12, 18, 3)).astype(np.uint8)


def write(path, space, **options):
    """Write the RGB image in a colour space; `space` is the photometric interpretation."""
    pixels = np.asarray(
        Image.fromarray(RGB).convert({"ycbcr": "YCbCr", "separated": "CMYK"}.get(space, "RGB"))
    )
    subsampling = {"subsampling": (1, 1)} if space == "ycbcr" else {}
    tifffile.imwrite(path, pixels, photometric=space, metadata=None, **subsampling, **options)
    return path


@cases("space", ["ycbcr", "separated"])
@cases("compression", [None, "zlib", "lzw"])
def test_ycbcr_and_cmyk_are_converted_to_rgb(tmp_path, space, compression):
    image = read_image(write(tmp_path / "a.tif", space, compression=compression))
    # the conversion rounds
    assert np.abs(image.pages[0].astype(int) - RGB).max() <= 3
    name = "YCbCr" if space == "ycbcr" else "CMYK"
    assert f"{name} colours were converted to RGB." in image.notes


@cases("space", ["cielab", "icclab"])
def test_lab_colours_raise(tmp_path, space):
    with pytest.raises(InputError, match=r"a\.tif has Lab colours, which are not supported\. Save it as RGB"):
        read_image(write(tmp_path / "a.tif", space))


@cases("space", ["ycbcr", "separated"])
def test_16_bit_ycbcr_and_cmyk_raise(tmp_path, space):
    path, channels = tmp_path / "a.tif", 3 if space == "ycbcr" else 4
    subsampling = {"subsampling": (1, 1)} if space == "ycbcr" else {}
    tifffile.imwrite(path, np.ones((8, 9, channels), np.uint16), photometric=space, **subsampling)
    with pytest.raises(
        InputError, match=r"has (YCbCr|CMYK) colours of 16 bits, which are not supported\. Save it as RGB"
    ):
        read_image(path)


def test_subsampled_ycbcr_without_jpeg_raises(tmp_path):
    path, pixels = tmp_path / "a.tif", bytes(4 * 6 * 3 // 2)
    tags = [
        (256, 6),
        (257, 4),
        (258, 8),
        (259, 1),
        (262, 6),
        (273, 200),
        (277, 3),
        (278, 4),
        (279, len(pixels)),
    ]
    tags.append((530, 2 | 2 << 16))
    entries = b"".join(struct.pack("<HHII", tag, 3, 2 if tag == 530 else 1, value) for tag, value in tags)
    header = b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4)
    path.write_bytes(header.ljust(200, b"\0") + pixels)
    with pytest.raises(
        InputError, match=r"has subsampled YCbCr colours, which are not supported\. Save it as RGB"
    ):
        read_image(path)


@cases("space", ["ycbcr", "separated", "cielab", "icclab"])
def test_reading_blocks_of_other_colour_spaces_raises(tmp_path, space):
    with pytest.raises(InputError, match=r"which is not supported when reading in blocks"):
        open_image(write(tmp_path / "a.tif", space))
