"""Atomic writing of files; label maps, probabilities, reports and overlay images."""

import contextlib
import csv
import importlib.machinery
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from tests.cases import cases
from tests.products import partly
from vispe.errors import InputError, ShapeError
from vispe.images.read import Micrograph, read_image
from vispe.images.write import label_suffix, write_labels, write_png, write_probabilities
from vispe.segment.overlays import PALETTE, boundaries, figure_layout, overlay, uncertainty_image
from vispe.segment.overlays.figure_layout import scale_bar
from vispe.utils.files import atomic_path, check_writable, write_csv, write_json

RNG = np.random.default_rng(2)
H, W = 31, 45


def micrograph(z=1, **options):
    return Micrograph(Path("x.tif"), np.zeros((z, H, W, 1), np.uint8), **options)


def file_names(folder):
    return sorted(p.name for p in folder.iterdir())


# --- atomic_path ---


def write_half(target, error, *, force=False, concurrent=None):
    """Write through `atomic_path`; before it is complete, write `concurrent` to `target` and raise `error`."""
    with atomic_path(target, force) as temporary:
        temporary.write_text("half")
        if concurrent:
            target.write_text(concurrent)
        if error:
            raise error


def test_atomic_path_renames_on_success_and_cleans_up_on_failure(tmp_path):
    target = tmp_path / "deep/er/a.txt"
    with atomic_path(target) as temporary:
        assert temporary.parent == target.parent
        assert temporary.suffix == ".txt"
        assert temporary.name.startswith(".")
        temporary.write_text("one")
        assert not target.exists()
    assert target.read_text() == "one"
    for error in (ValueError, KeyboardInterrupt, SystemExit):
        with pytest.raises(error):
            write_half(target, error, force=True)
        assert target.read_text() == "one"
    assert file_names(target.parent) == ["a.txt"]
    with pytest.raises(InputError, match=r"a.txt exists; add --force to overwrite it"), atomic_path(target):
        pytest.fail("must not get here")
    with atomic_path(target, force=True) as temporary:
        temporary.write_text("two")
    assert target.read_text() == "two"
    assert file_names(target.parent) == ["a.txt"]


def test_files_created_concurrently_are_not_overwritten(tmp_path):
    target = tmp_path / "a.txt"
    with pytest.raises(InputError, match=r"a.txt exists; add --force"):
        write_half(target, None, concurrent="theirs")
    assert target.read_text() == "theirs"
    assert file_names(tmp_path) == ["a.txt"]


def test_atomic_path_without_a_write_raises(tmp_path):
    with pytest.raises(FileNotFoundError), atomic_path(tmp_path / "a.txt"):
        pass
    assert file_names(tmp_path) == []


def test_new_files_have_default_permissions(tmp_path):
    write_json(tmp_path / "a.json", {})
    (tmp_path / "plain").write_text("")
    assert (tmp_path / "a.json").stat().st_mode == (tmp_path / "plain").stat().st_mode


def hold_half_a_file(folder, ready):
    """Write half of a file, send `ready` and wait for a signal."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in background jobs
    with contextlib.suppress(KeyboardInterrupt), atomic_path(folder / "a.tif", force=True) as temporary:
        temporary.write_bytes(b"half")
        os.write(ready, b"ready")
        time.sleep(60)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@cases("how", [signal.SIGINT, signal.SIGKILL])
def test_a_killed_process_leaves_no_partial_file(tmp_path, how):
    (tmp_path / "a.tif").write_bytes(b"old")
    reader, writer = os.pipe()
    process = os.fork()  # a new interpreter needs seconds for its imports
    if process == 0:
        try:
            hold_half_a_file(tmp_path, writer)
        finally:
            os._exit(0)
    assert os.read(reader, 5) == b"ready"
    os.kill(process, how)
    status = os.waitpid(process, 0)[1]
    os.close(reader), os.close(writer)
    assert os.waitstatus_to_exitcode(status) == (-signal.SIGKILL if how == signal.SIGKILL else 0)
    assert (tmp_path / "a.tif").read_bytes() == b"old"
    partial_files = [n for n in file_names(tmp_path) if n != "a.tif"]
    assert len(partial_files) == (1 if how == signal.SIGKILL else 0)
    assert all(n.startswith(".") and ".partial-" in n for n in partial_files)


def test_check_writable_raises_for_existing_and_unwritable_files(tmp_path):
    one, two = tmp_path / "a.png", tmp_path / "b.png"
    check_writable([one, two])
    check_writable([tmp_path / "new/folder/c.png"])
    one.write_text("")
    with pytest.raises(InputError, match=r"a.png exists; add --force to overwrite it\.$"):
        check_writable([one, two])
    two.write_text("")
    with pytest.raises(InputError, match=r"a.png, .*b.png exist; add --force to overwrite them"):
        check_writable([one, two])
    check_writable([one, two], force=True)
    many = [tmp_path / f"{i}.png" for i in range(9)]
    for path in many:
        path.write_text("")
    with pytest.raises(InputError, match=r"4.png and 4 more exist; add --force"):
        check_writable(many)
    with pytest.raises(InputError, match=r"two outputs have the same name .*a.png"):
        check_writable([one, tmp_path / "x/../a.png"], force=True)
    with pytest.raises(InputError, match=r"a.png is an input and would be overwritten"):
        check_writable([one], force=True, protect=[one])
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match=r"folder is a folder, so no file of this name can be written"):
        check_writable([tmp_path / "folder"])
    with pytest.raises(InputError, match=r"c.png cannot be written: .*a.png is not a folder"):
        check_writable([one / "c.png"])
    if os.geteuid() != 0:
        (tmp_path / "folder").chmod(0o500)
        with pytest.raises(InputError, match=r"no permission to write"):
            check_writable([tmp_path / "folder/c.png"])


# --- label maps and probabilities ---


def test_single_page_labels_are_written_as_png(tmp_path):
    values = RNG.integers(0, 4, (1, H, W), dtype=np.uint8)
    assert label_suffix(1) == ".png"
    path = write_labels(tmp_path / "a.png", values, micrograph(pixel_size=(0.5, 0.25)))
    restored = read_image(path)
    np.testing.assert_array_equal(restored.pages[..., 0], values)
    assert restored.pixel_size == pytest.approx((0.5, 0.25), rel=1e-3)
    with Image.open(path) as image:
        assert image.mode == "L"
    with Image.open(write_labels(tmp_path / "b.png", values)) as image:
        assert "dpi" not in image.info
    write_labels(tmp_path / "c.png", values, micrograph(pixel_size=(1e-6, 1e-6)))


@cases("z", [1, 3, 4, 7])
def test_stack_labels_are_written_as_tiff_with_resolution_tags(tmp_path, z):
    assert label_suffix(3) == ".tif"
    values = RNG.integers(0, 4, (z, H, W), dtype=np.uint8)
    tags = (30_000.0, 15_000.0, "cm")
    path = write_labels(tmp_path / "a.tif", values, micrograph(z, resolution=tags, pixel_size=(2 / 3, 1 / 3)))
    restored = read_image(path)
    np.testing.assert_array_equal(restored.pages[..., 0], values)
    assert restored.resolution == tags
    assert restored.pixel_size == pytest.approx((2 / 3, 1 / 3))
    path = write_labels(
        tmp_path / "b.tif", values, micrograph(z, resolution=(4.0, 4.0, "none"), pixel_size=(0.25, 0.25))
    )
    assert read_image(path).pixel_size == pytest.approx((0.25, 0.25))
    assert read_image(write_labels(tmp_path / "c.tif", values)).pixel_size is None
    with tifffile.TiffFile(path) as tif:
        assert len(tif.pages) == z


def test_invalid_label_maps_raise(tmp_path):
    values = np.zeros((2, H, W), np.uint8)
    with pytest.raises(InputError, match=r"PNG files have one page, got 2. Write a .tif"):
        write_labels(tmp_path / "a.png", values)
    with pytest.raises(InputError, match=r"a.jpg must end in .tif"):
        write_labels(tmp_path / "a.jpg", values)
    with pytest.raises(InputError, match=r"at most 255 classes\), got int32"):
        write_labels(tmp_path / "a.tif", values.astype(np.int32))
    with pytest.raises(ShapeError, match=r"have the shape \(z, h, w\), got \(31, 45\)"):
        write_labels(tmp_path / "a.tif", values[0])
    with pytest.raises(
        ShapeError, match=r"must have the shape of the image, \(1, 31, 45\), got \(2, 31, 45\)"
    ):
        write_labels(tmp_path / "a.tif", values, micrograph())
    write_labels(tmp_path / "a.tif", values)
    with pytest.raises(InputError, match=r"a.tif exists; add --force"):
        write_labels(tmp_path / "a.tif", values)
    write_labels(tmp_path / "a.tif", values + 1, force=True)
    assert read_image(tmp_path / "a.tif").pages.min() == 1
    assert file_names(tmp_path) == ["a.tif"]


def test_probabilities_are_written_as_one_float_page_per_class(tmp_path):
    prob = RNG.random((2, 3, H, W), dtype=np.float32)
    path = write_probabilities(
        tmp_path / "p.tif", prob, micrograph(2, pixel_size=(0.1, 0.1)), ["a", "b", "c"]
    )
    with tifffile.TiffFile(path) as tif:
        assert len(tif.pages) == 6
        assert tif.pages[0].dtype == np.float32
        assert json.loads(tif.imagej_metadata["classes"]) == ["a", "b", "c"]
        assert tif.imagej_metadata["Labels"][3:5] == ["page 1: a", "page 1: b"]
        np.testing.assert_array_equal(tif.pages[4].asarray(), prob[1, 1])
    restored = read_image(path)
    np.testing.assert_array_equal(restored.pages, prob.transpose(0, 2, 3, 1))
    assert restored.pixel_size == pytest.approx((0.1, 0.1))
    with pytest.raises(InputError, match=r"must be float32, got float64"):
        write_probabilities(tmp_path / "q.tif", prob.astype(float))
    with pytest.raises(ShapeError, match=r"have the shape \(z, k, h, w\), got \(3, 31, 45\)"):
        write_probabilities(tmp_path / "q.tif", prob[0])
    with pytest.raises(InputError, match=r"names must have one entry for each of 3 classes, got 1"):
        write_probabilities(tmp_path / "q.tif", prob, names=["a"])
    with pytest.raises(InputError, match=r"q.png must end in .tif"):
        write_probabilities(tmp_path / "q.png", prob)


@cases(("shape", "kind"), [((H, W), np.uint8), ((H, W), np.uint16), ((H, W, 3), np.uint8)])
def test_write_png_round_trip_is_exact(tmp_path, shape, kind):
    a = RNG.integers(0, np.iinfo(kind).max, shape, dtype=kind)
    restored = read_image(write_png(tmp_path / "a.png", a)).pages[0]
    assert restored.dtype == kind
    np.testing.assert_array_equal(restored, a.reshape(H, W, -1))
    with pytest.raises(ShapeError, match=r"PNG needs .* got \(31, 45\) float32"):
        write_png(tmp_path / "b.png", np.zeros((H, W), np.float32))


# --- reports ---


def test_write_json_converts_numpy_values_and_nan_raises(tmp_path):
    report = {
        "b": np.float32(0.5),
        "a": [np.int64(3), True, None, "µm"],
        "c": {"path": Path("x/y"), "d": np.arange(3)},
    }
    text = write_json(tmp_path / "r.json", report).read_text(encoding="utf-8")
    assert json.loads(text) == {"b": 0.5, "a": [3, True, None, "µm"], "c": {"path": "x/y", "d": [0, 1, 2]}}
    assert text.index('"b"') < text.index('"a"')
    assert text.endswith("}\n")
    for bad in (np.nan, np.inf, np.float32(-np.inf)):
        with pytest.raises(InputError, match=r"value.scores\[1\].miou must be finite, got (nan|inf|-inf)"):
            write_json(tmp_path / "s.json", {"scores": [{}, {"miou": bad}]})
    with pytest.raises(InputError, match=r"value.x cannot be written as JSON or CSV, got set"):
        write_json(tmp_path / "s.json", {"x": {1}})
    assert file_names(tmp_path) == ["r.json"]


def test_write_csv_flattens_nested_columns(tmp_path):
    rows = [{"image": "a, b.png", "iou": {"m": 0.1, "p": None}}, {"image": "c.png", "seconds": np.float64(2)}]
    path = write_csv(tmp_path / "r.csv", rows)
    with path.open(newline="", encoding="utf-8") as stream:
        assert list(csv.reader(stream)) == [
            ["image", "iou.m", "iou.p", "seconds"],
            ["a, b.png", "0.1", "", ""],
            ["c.png", "", "", "2.0"],
        ]
    with pytest.raises(InputError, match=r"row 0.x must be finite, got nan"):
        write_csv(tmp_path / "s.csv", [{"x": np.nan}])
    with pytest.raises(InputError, match=r"Column x.y needs one value per cell"):
        write_csv(tmp_path / "s.csv", [{"x": {"y": [1]}}])
    with pytest.raises(InputError, match=r"no records to write"):
        write_csv(tmp_path / "s.csv", [])


# --- images ---


def test_palette_has_20_unique_colours():
    assert len(PALETTE) == len(set(PALETTE)) == 20
    assert all(0 <= c <= 255 for color in PALETTE for c in color)


@cases("channels", [None, 1, 2, 3, 5])
def test_overlay_blends_at_native_resolution(channels):
    h, w = 500, 601
    image = RNG.random((h, w) if channels is None else (h, w, channels)).astype(np.float32)
    labels = np.ones((h, w), int)
    labels[100:200, 150:400] = 2
    labels[:50] = 0
    original = image.copy()
    out = overlay(image, labels, ["matrix", "particle"], alpha=0.25)
    assert out.dtype == np.uint8
    assert out.shape[2] == 3
    plane = image.reshape(h, w, -1)
    plane = {1: plane, 2: plane[..., :1], 3: plane}.get(plane.shape[2], plane.mean(2, keepdims=True))
    rgb = np.repeat(plane, 3, 2) if plane.shape[2] == 1 else plane
    color = np.array([(0, 0, 0), *PALETTE[:2]])[labels]
    weight = np.where(labels > 0, 0.25, 0)[..., None]
    weight[boundaries(labels)] = 1
    expected = 255 * rgb * (1 - weight) + color * weight
    top = np.argmax((out != 255).any((1, 2)))
    left = np.argmax((out != 255).any((0, 2)))
    np.testing.assert_allclose(out[top : top + h, left : left + w], expected, atol=1.6)
    np.testing.assert_array_equal(image, original)
    assert out.shape[0] > h
    assert out.shape[1] > w


def test_overlay_enlarges_small_images_by_integer_factors():
    image, labels = RNG.random((100, 61)), np.ones((100, 61), int)
    out = overlay(image, labels, ["m"], alpha=0)
    expected = np.rint(image * 255).astype(np.uint8).repeat(5, 0).repeat(5, 1)
    top = np.argmax((out != 255).any((1, 2)))
    left = np.argmax((out != 255).any((0, 2)))
    actual = out[top : top + 500, left : left + 305, 0]
    np.testing.assert_allclose(actual.astype(int), expected, atol=1)


@partly(2)
@cases("shape", [(1, 1), (1, 900), (900, 1), (300, 1500), (29, 37)])
@cases("k", [1, 2, 20])
def test_overlay_of_any_shape_and_number_of_classes(shape, k):
    labels = RNG.integers(0, k + 1, shape)
    names = [f"a class with quite a long name {i}" for i in range(k)]
    out = overlay(RNG.random(shape), labels, names, pixel_size=(1e-4, 1e-4), title="a title " * 30)
    assert out.ndim == 3
    assert max(out.shape) < 4000


def test_overlay_uses_the_colours_and_the_title():
    image, labels = np.zeros((500, 500)), np.ones((500, 500), np.uint8)
    plain = overlay(image, labels, ["m"])
    red = overlay(image, labels, ["m"], colors=[(255, 0, 0)], alpha=1)
    assert (red[250, 250] == (255, 0, 0)).all()
    assert overlay(image, labels, ["m"], title="x").shape[0] > plain.shape[0]


@cases(
    ("pixel_size", "length", "text"),
    [
        (None, 100, "100 px"),
        ((1, 0.01), 100, "1 µm"),
        ((0.003, 0.003), 67, "200 nm"),
        ((5, 5), 100, "500 µm"),
        ((100, 100), 100, "10 mm"),
        ((1e-6, 1e-6), 100, "0.1 nm"),
    ],
)
def test_scale_bars_have_round_lengths(pixel_size, length, text):
    assert scale_bar(500, 1, pixel_size) == (length, text)
    assert scale_bar(100, 5, pixel_size)[0] <= 125


EMPTY_PAGE = np.zeros((60, 80, 1), np.float32), np.ones((60, 80), np.uint8), ["pore"]


@cases("elsewhere", [False, True])
def test_the_font_does_not_depend_on_the_folder_of_matplotlib(monkeypatch, elsewhere):
    """A font in the package of matplotlib is found without importing matplotlib, which is slow."""
    expected = np.asarray(overlay(*EMPTY_PAGE))
    spec = importlib.machinery.ModuleSpec("matplotlib", None, origin="elsewhere/__init__.py")
    if elsewhere:
        monkeypatch.setattr(figure_layout, "find_spec", lambda name: spec)
    else:
        for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
            monkeypatch.delitem(sys.modules, name)
    figure_layout._font.cache_clear()
    assert np.array_equal(np.asarray(overlay(*EMPTY_PAGE)), expected)
    assert elsewhere or "matplotlib" not in sys.modules
    figure_layout._font.cache_clear()


@pytest.mark.slow
def test_overlays_do_not_import_matplotlib(tmp_path):
    code = """
        import sys
        import numpy as np
        from vispe.segment.overlays import overlay
        overlay(np.zeros((60, 80, 1), np.float32), np.ones((60, 80), np.uint8), ["pore"])
        assert "matplotlib" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_boundaries_are_in_the_higher_class_and_skip_unlabelled():
    labels = np.ones((9, 11), int)
    labels[3:8, 4:9] = 2
    labels[0] = 0
    expected = np.zeros(labels.shape, bool)
    expected[3:8, 4:9] = True
    expected[4:7, 5:8] = False
    np.testing.assert_array_equal(boundaries(labels), expected)
    thick = boundaries(labels, 2)
    expected[4:7, 5:8] = True
    expected[5, 6] = False
    np.testing.assert_array_equal(thick, expected)


def test_invalid_overlay_arguments_raise():
    image, labels = np.zeros((4, 5)), np.ones((4, 5), int)
    with pytest.raises(ShapeError, match=r"image has shape \(4, 5\), but the labels have \(5, 4\)"):
        overlay(image, labels.T, ["a"])
    with pytest.raises(ShapeError, match=r"the label map is empty"):
        overlay(image[:0], labels[:0], ["a"])
    with pytest.raises(InputError, match=r"the labels contain 2, but there are 1 class names"):
        overlay(image, labels + 1, ["a"])
    with pytest.raises(InputError, match=r"got 1 colour for 2 classes"):
        overlay(image, labels, ["a", "b"], colors=[(1, 2, 3)])
    with pytest.raises(InputError, match=r"alpha=1.5 must be between 0 and 1"):
        overlay(image, labels, ["a"], alpha=1.5)


def test_uncertainty_image_maps_unit_range_to_grey_levels():
    unc = np.array([[0, 0.5, 1], [np.nan, 0.2, 1 + 1e-7]])
    np.testing.assert_array_equal(uncertainty_image(unc), [[0, 128, 255], [0, 51, 255]])
    with pytest.raises(InputError, match=r"uncertainty must be in \[0, 1\], got 0 to 1.5"):
        uncertainty_image(unc * 1.5)
    with pytest.raises(ShapeError, match=r"must have shape \(h, w\), got \(1, 2, 3\)"):
        uncertainty_image(unc[None])
