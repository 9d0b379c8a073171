"""Pixels that are not part of the sample: crop, mask, transparency."""

import numpy as np
import pytest
import tifffile
from PIL import Image

from tests.cases import cases
from vispe.errors import InputError, OptionError
from vispe.images.normalize import normalize
from vispe.images.read import read_image
from vispe.images.sample import parse_crop

H, W = 20, 30


@pytest.fixture
def grey(tmp_path):
    out = np.random.default_rng(0).integers(1, 200, (H, W), dtype=np.uint8)
    Image.fromarray(out).save(tmp_path / "a.png")
    return out


@pytest.mark.parametrize(
    ("crop", "rows", "columns"),
    [
        ("0:16,0:30", (0, 16), (0, 30)),
        (":-4,:", (0, 16), (0, 30)),
        ("2:,5:-5", (2, 20), (5, 25)),
        (" -10: , : ", (10, 20), (0, 30)),
    ],
)
def test_crops_are_slices(tmp_path, grey, crop, rows, columns):
    assert parse_crop(crop, (H, W)) == (slice(*rows), slice(*columns))
    actual = read_image(tmp_path / "a.png", crop=crop)
    expected = np.zeros((1, H, W), bool)
    expected[:, slice(*rows), slice(*columns)] = True
    np.testing.assert_array_equal(actual.valid, expected)
    percentage = 100 * (1 - expected.mean())
    assert f"{percentage:.3g} % of the pixels of a.png are outside of the crop" in actual.exclusions[0]
    np.testing.assert_array_equal(actual.pages[0, ..., 0], grey)  # the size of the image is unchanged


@cases("crop", ["1", "0:5", "0:5,0:5,0:5", "a:b,:", "0:5;0:5", "1.5:2,:", "5,5"])
def test_invalid_crops_raise(crop):
    with pytest.raises(OptionError, match="must be two ranges of pixels, rows and columns"):
        parse_crop(crop)


@pytest.mark.parametrize("crop", ["0:21,:", ":,0:31", "5:5,:", "9:3,:", "-21:,:"])
def test_crops_beyond_the_image_raise(tmp_path, grey, crop):
    with pytest.raises(OptionError, match="the size of the image, got"):
        read_image(tmp_path / "a.png", crop=crop)


def inside():
    out = np.zeros((H, W), bool)
    out[3:15, 4:28] = True
    return out


def _save_mask(tmp_path, kind):
    m, path = inside(), tmp_path / f"m.{'png' if kind in ('L', 'RGB', 'RGBA', 'P', '1') else kind}"
    if kind == "npy":
        np.save(path, m)
    elif kind == "tif":
        tifffile.imwrite(path, m)
    elif kind == "RGBA":
        Image.fromarray(np.dstack([np.full((H, W, 3), 9, np.uint8), m * np.uint8(255)])).save(path)
    elif kind == "P":
        image = Image.fromarray(m.astype(np.uint8), "P")
        image.putpalette([0, 0, 0, 9, 9, 9])
        image.save(path)
    else:
        Image.fromarray((m * 7).astype(np.uint8)).convert("L" if kind == "1" else kind).save(path)
    return path


@pytest.mark.parametrize("kind", ["L", "RGB", "RGBA", "P", "npy", "tif"])
def test_masks_of_every_image_mode(tmp_path, grey, kind):
    actual = read_image(tmp_path / "a.png", mask=_save_mask(tmp_path, kind))
    np.testing.assert_array_equal(actual.valid[0], inside())
    assert "are excluded by the mask m." in actual.exclusions[0]


def test_empty_masks_and_masks_of_another_size_raise(tmp_path, grey):
    Image.fromarray(np.zeros((H, W), np.uint8)).save(tmp_path / "zero.png")
    with pytest.raises(InputError, match=r"a.png: all pixels are excluded"):
        read_image(tmp_path / "a.png", mask=tmp_path / "zero.png")
    Image.fromarray(np.ones((H, W + 1), np.uint8)).save(tmp_path / "wide.png")
    with pytest.raises(InputError, match=r"the mask is 20 x 31 pixels .* the image is 20 x 30"):
        read_image(tmp_path / "a.png", mask=tmp_path / "wide.png")


@pytest.mark.filterwarnings("ignore:.*stored as RGB")
@cases("pages", [1, 3])
def test_masks_of_stacks_have_one_or_all_pages(tmp_path, pages):
    tifffile.imwrite(tmp_path / "s.tif", np.ones((3, H, W), np.uint8), photometric="minisblack")
    m = np.stack([np.roll(inside(), n, 1) for n in range(pages)])
    tifffile.imwrite(tmp_path / "m.tif", m.astype(np.uint8))  # 3 pages are stored as colours
    actual = read_image(tmp_path / "s.tif", mask=tmp_path / "m.tif")
    np.testing.assert_array_equal(actual.valid, np.broadcast_to(m, (3, H, W)))


def _transparent(tmp_path, kind):
    rgb = np.full((H, W, 3), 90, np.uint8)
    rgb[~inside()] = 0
    alpha = np.where(inside(), 255, 0).astype(np.uint8)
    path = tmp_path / f"t.{kind.split()[0]}"
    if kind.startswith("tif"):
        how = "unassalpha" if kind == "tif" else "assocalpha"
        tifffile.imwrite(path, np.dstack([rgb, alpha]), photometric="rgb", extrasamples=[how])
    elif kind == "png LA":
        Image.fromarray(np.dstack([rgb[..., 0], alpha])).save(path)
    elif kind == "png P":
        image = Image.fromarray(inside().astype(np.uint8), "P")
        image.putpalette([0, 0, 0, 90, 90, 90])
        image.save(path, transparency=0)
    else:
        Image.fromarray(np.dstack([rgb, alpha])).save(path, **({"lossless": True} if kind == "webp" else {}))
    return path


@cases("kind", ["png", "png LA", "png P", "webp", "tif", "tif assoc"])
def test_transparent_pixels_are_excluded(tmp_path, kind):
    actual = read_image(_transparent(tmp_path, kind))
    np.testing.assert_array_equal(actual.valid[0], inside())
    assert "are transparent (alpha 0) and are excluded from all numbers." in actual.exclusions[0]


def test_alpha_that_is_zero_everywhere_is_ignored(tmp_path):
    Image.fromarray(np.full((H, W, 4), (9, 9, 9, 0), np.uint8)).save(tmp_path / "a.png")
    actual = read_image(tmp_path / "a.png")
    assert actual.valid.all()
    assert "every pixel of a.png is transparent (alpha 0): the alpha channel is ignored." in actual.notes


def test_excluded_pixels_do_not_affect_normalization(tmp_path):
    page = np.linspace(10, 20, H * W).reshape(H, W).astype(np.uint8)
    page[-4:] = 255
    Image.fromarray(page).save(tmp_path / "a.png")
    out, _ = normalize(read_image(tmp_path / "a.png", crop=":-4,:"))
    assert out[0, :-4].max() == 1
    assert out[0, :-4].std() > 0.2
    assert not out[0, -4:].any()
