"""GIF, WebP and NPY: what needs no library more."""

import numpy as np
import pytest
from PIL import Image

from tests.cases import cases
from vispe.errors import InputError
from vispe.images.file_search import find_images
from vispe.images.labels.label_files import read_labels
from vispe.images.read import read_image

H, W = 13, 21
RNG = np.random.default_rng(5)
GREY = RNG.integers(0, 256, (H, W)).astype(np.uint8)
RGB = RNG.integers(0, 256, (H, W, 3)).astype(np.uint8)


def test_webp_without_loss_gives_its_colours_and_with_loss_is_no_label_image(tmp_path):
    path = tmp_path / "a.webp"
    Image.fromarray(RGB).save(path, lossless=True)
    np.testing.assert_array_equal(read_image(path).pages[0], RGB)
    drawn = np.repeat((GREY // 100)[..., None], 3, -1)
    Image.fromarray(drawn).save(path, lossless=True)
    np.testing.assert_array_equal(read_labels(path, (1, H, W)).values[0], drawn[..., 0])
    with_alpha = np.dstack([drawn, np.full((H, W), 9, np.uint8)])
    Image.fromarray(with_alpha).save(path, lossless=True, exact=True)  # an extended file, with a chunk before
    np.testing.assert_array_equal(read_labels(path, (1, H, W)).values[0], drawn[..., 0])
    for image in (RGB, np.dstack([RGB, GREY])):
        Image.fromarray(image).save(path, quality=60)
        assert read_image(path).pages.shape == (1, H, W, 3)
        with pytest.raises(InputError, match="WebP compression changes label values"):
            read_labels(path, (1, H, W))


def test_gif_gives_its_greys_and_only_its_first_frame(tmp_path):
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
def test_npy_of_two_dimensions_is_an_image(tmp_path, kind):
    path = tmp_path / "a.npy"
    np.save(path, GREY.astype(kind))
    actual = read_image(path)
    np.testing.assert_array_equal(actual.pages[0, ..., 0], GREY)
    assert actual.pages.dtype == np.dtype(kind).newbyteorder("=")
    assert (actual.pixel_size, actual.notes) == (None, ())


def test_npy_of_three_dimensions_says_nothing_by_itself(tmp_path):
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
    # labels are known by the size of their image
    drawn = np.stack([GREY // 100] * 2)
    np.save(path, drawn)
    np.testing.assert_array_equal(read_labels(path, (2, H, W)).values, drawn)


def test_npy_that_is_damaged_or_could_run_code_is_refused(tmp_path):
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


def test_arrays_and_gif_match_a_glob_for_them_alone(tmp_path):
    for name in ("a.npy", "b.gif", "c.webp", "d.png"):
        (tmp_path / name).write_bytes(b"x")
    assert [p.name for p in find_images([tmp_path])] == ["c.webp", "d.png"]
    assert [p.name for p in find_images([tmp_path / "*.npy"])] == ["a.npy"]
    assert [p.name for p in find_images([tmp_path / "*"])] == ["c.webp", "d.png"]


def test_a_scene_of_a_file_without_scenes_is_refused(tmp_path):
    Image.fromarray(GREY).save(tmp_path / "a.png")
    with pytest.raises(InputError, match=r"a\.png: `scene` has no effect for this format, got '1'"):
        read_image(tmp_path / "a.png", scene="1")
