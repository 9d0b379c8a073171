"""Paint window with several images: one shared model, scribbles and results per image."""

import base64
import io
import json
import shutil
import threading

import numpy as np
import pytest
import tifffile
from PIL import Image

from tests.segment.live.browser import CHROMIUM, Browser
from tests.segment.live.test_paint import send_request
from tests.segment.test_pipeline import scene
from vispe.cli.main import main
from vispe.errors import InputError, OptionError
from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.live.array_image import micrograph
from vispe.segment.live.live_segmentation import Live
from vispe.segment.live.paint.open_page import open_paint
from vispe.segment.live.paint.server import Server
from vispe.segment.model.model_file import load_model

NAMES = ["ground", "disc"]
BACKGROUND = {"class": 1, "width": 3, "points": [[2, 2], [44.2, 2.7]]}


@pytest.fixture
def files(tmp_path):
    """Three images of different sizes, and a scribble on a disc of each."""
    scribbles = []
    for number, name in enumerate("abc"):
        grey, _, labels = scene(seed=number)
        Image.fromarray(grey[: grey.shape[0] - 4 * number]).save(tmp_path / f"{name}.png")
        y, x = np.argwhere(labels == 2)[0]
        scribbles.append({"class": 2, "width": 5, "points": [[int(x), int(y)]]})
    return [tmp_path / f"{name}.png" for name in "abc"], scribbles


@pytest.fixture
def paint(files):
    return open_paint(files[0], features="filters")


@pytest.fixture
def server(paint):
    with Server(paint) as actual:
        threading.Thread(target=actual.serve_forever, args=(0.02,), daemon=True).start()
        yield actual
        actual.shutdown()


def content(image, strokes, **more):
    return {"names": NAMES, "image": image, "strokes": strokes, **more}


def pixels(path):
    return np.asarray(Image.open(path))


def test_unlabelled_images_of_other_pixel_size_have_a_note(files, tmp_path):
    paths, scribbles = files
    for number, (path, microns) in enumerate(zip(paths, (0.2, 1.0, 0.2), strict=True)):
        size = {"resolution": (1e4 / microns, 1e4 / microns), "resolutionunit": "CENTIMETER"}
        paths[number] = tmp_path / f"{path.stem}.tif"
        tifffile.imwrite(paths[number], pixels(path), **size)
    paint = open_paint(paths, features="filters")
    assert paint.update(content(0, [BACKGROUND, scribbles[0]]))["notes"] == []
    (note,) = paint.update(content(1, []))["notes"]
    assert "b.tif has pixels of 1 microns, the training images of 0.2 microns" in note
    assert paint.update(content(1, [scribbles[1]]))["notes"] == []


def test_results_equal_those_of_segment_on_all_images(files, paint, tmp_path):
    """Background on one image and discs on another: each image is segmented by the model of both."""
    paths, scribbles = files
    assert not paint.update(content(0, [BACKGROUND]))["ready"]
    actual = paint.update(content(1, [scribbles[1]]))
    assert actual["ready"]
    assert paint.image.path == paths[1]
    with Image.open(io.BytesIO(base64.b64decode(actual["labels"]))) as displayed:
        labels = np.asarray(displayed)
    assert labels.shape == paint.image.shape
    # the third image has no scribbles and is segmented when it is shown
    assert paint.show(content(1, [scribbles[1]], show=2))["strokes"] == []
    assert paint.update(content(2, []))["ready"]
    assert paint.save() == [
        "a_strokes.json",
        "b_strokes.json",
        "model.vispe",
        "a_seg.png",
        "b_seg.png",
        "c_seg.png",
    ]
    out = tmp_path / "a_paint"
    assert np.array_equal(pixels(out / "b_seg.png"), labels)
    label_files = ",".join(map(str, sorted(out.glob("*.json"))))
    assert main(["segment", *map(str, paths[:2]), "--labels", label_files, "--classes", "ground,disc", "--features",
                 "filters", "-o", str(tmp_path / "o")]) == 0  # fmt: skip
    assert main(["apply", str(out / "model.vispe"), *map(str, paths), "-o", str(tmp_path / "again")]) == 0
    for name in ("a", "b"):
        assert np.array_equal(pixels(out / f"{name}_seg.png"), pixels(tmp_path / f"o/{name}_seg.png"))
    for name in ("a", "b", "c"):
        assert np.array_equal(pixels(out / f"{name}_seg.png"), pixels(tmp_path / f"again/{name}_seg.png"))
    saved, expected = (load_model(folder / "model.vispe") for folder in (out, tmp_path / "o"))
    assert [len(saved.notes[key]) for key in ("images", "pages")] == [2, 2]
    assert saved.notes["labelled_pixels"] == expected.notes["labelled_pixels"]
    for name, values in expected.domain.tensors().items():
        assert np.array_equal(saved.domain.tensors()[name], values)


def test_scribbles_are_stored_per_image(files, paint):
    _, scribbles = files
    both_classes = [BACKGROUND, scribbles[0]]
    first = paint.update(content(0, both_classes))
    state = paint.show(content(0, both_classes, show=1))
    assert (state["title"], state["image"], state["images"]) == ("b.png", 1, ["a.png", "b.png", "c.png"])
    assert state["strokes"] == []
    paint.update(content(1, [scribbles[1]]))
    assert len(paint.show(content(1, [scribbles[1]], show=0))["strokes"]) == 2
    # without the scribble of the second image, the result of the first one is as before
    changed = paint.update(content(0, both_classes))
    paint.update(content(1, []))
    assert paint.update(content(0, both_classes)) == first
    assert changed["uncertainty"] != first["uncertainty"]


def test_images_without_scribbles_use_the_shared_model(files, paint):
    paint.update(content(0, [BACKGROUND, files[1][0]]))
    expected = paint.live.model.classifier
    assert paint.update(content(2, []))["ready"]
    assert paint.prediction.labels.shape == paint.images[2].image.shape
    assert np.array_equal(paint.live.model.classifier.linear.weight, expected.linear.weight)


def test_unsent_scribbles_are_stored_before_another_image_is_shown(files, paint):
    paint.show(content(0, [BACKGROUND], show=2))
    assert len(paint.images[0].strokes) == 1
    assert not paint.saved
    assert paint.shown == 2
    assert paint.update(content(2, [files[1][2]]))["ready"]


def test_features_of_each_image_are_computed_once(files, paint, monkeypatch):
    computed = []
    planes = "vispe.segment.features.feature_cache.CachedFilters.__init__"
    from vispe.segment.features.feature_cache import CachedFilters

    original = CachedFilters.__init__
    monkeypatch.setattr(planes, lambda self, *words: computed.append(1) or original(self, *words))
    paint.update(content(0, [BACKGROUND, files[1][0]]))
    paint.update(content(1, [files[1][1]]))
    paint.update(content(0, [BACKGROUND]))
    paint.update(content(1, [files[1][1], BACKGROUND]))
    assert len(computed) == 2
    # a limit that fits one image: features are computed again, with equal results
    expected = paint.update(content(0, [BACKGROUND]))
    paint.live._features.memory = paint.live._features._cached_page.nbytes + 1000
    paint.update(content(2, []))
    assert paint.live._features.nbytes <= paint.live._features.memory
    assert paint.update(content(0, [BACKGROUND])) == expected
    assert len(computed) == 4


def test_all_images_have_equal_tiles_after_out_of_memory(files, paint):
    paint.update(content(0, [BACKGROUND, files[1][0]]))
    features = paint.live._features
    features.tile = 32
    features._cached_page, features._earlier = None, ()
    actual = paint.update(content(1, [files[1][1]]))
    expected = open_paint(files[0], features="filters")
    expected.live._features.tile = 32
    expected.update(content(0, [BACKGROUND, files[1][0]]))
    assert expected.update(content(1, [files[1][1]])) == actual


def test_files_of_erased_scribbles_are_removed(files, paint, tmp_path):
    paint.update(content(0, [BACKGROUND, files[1][0]]))
    paint.update(content(1, [files[1][1]]))
    paint.save()
    assert (tmp_path / "a_paint/b_strokes.json").is_file()
    paint.update(content(1, []))
    assert "b_strokes.json" not in paint.save()
    assert not (tmp_path / "a_paint/b_strokes.json").exists()
    assert (tmp_path / "a_paint/b_seg.png").is_file()


@pytest.mark.slow
def test_existing_files_are_not_overwritten(files, paint, tmp_path):
    (tmp_path / "a_paint").mkdir()
    (tmp_path / "a_paint/b_strokes.json").write_text("mine")
    paint.update(content(0, [BACKGROUND, files[1][0]]))
    paint.update(content(1, [files[1][1]]))
    with pytest.raises(InputError, match=r"b_strokes\.json"):
        paint.save()
    assert [path.name for path in (tmp_path / "a_paint").iterdir()] == ["b_strokes.json"]


def test_classes_with_scribbles_on_other_images_cannot_be_removed(files, paint):
    third = {**BACKGROUND, "class": 3}
    paint.update({**content(0, [third]), "names": ["a", "b", "c"]})
    with pytest.raises(InputError, match=r"fewer than the classes of the scribbles on a\.png"):
        paint.update(content(1, []))
    assert paint.names == ["a", "b", "c"]


@pytest.mark.parametrize("number", [3, -1, "1", True, None, 1.0])
def test_unknown_image_numbers_raise(paint, number):
    with pytest.raises(InputError, match="there are images 0 to 2"):
        paint.show(content(0, [], show=number))
    with pytest.raises(InputError, match="there are images 0 to 2"):
        paint.update(content(number, []))


def test_images_that_cannot_share_a_model_raise(files, tmp_path):
    paths, _ = files
    Image.fromarray(np.zeros((20, 20, 3), np.uint8)).save(tmp_path / "colour.png")
    with pytest.raises(InputError, match=r"number of channels \(a.png: 1, colour.png: 3\)"):
        open_paint([paths[0], tmp_path / "colour.png"], features="filters")
    shutil.copy(paths[1], tmp_path / "A.bmp.png")
    (tmp_path / "more").mkdir()
    shutil.copy(paths[1], tmp_path / "more/a.png")
    with pytest.raises(InputError, match="would be saved to the same files"):
        open_paint([paths[0], tmp_path / "more/a.png"], features="filters")
    with pytest.raises(InputError, match=r"page 1 does not exist in .*a\.png"):
        open_paint(paths, page=1, features="filters")
    with pytest.raises(InputError, match="no image"):
        open_paint([paths[0], tmp_path / "*.tif"], features="filters")
    (tmp_path / "store.zarr").mkdir()
    with pytest.raises(InputError, match="Export a part of an OME-Zarr store"):
        open_paint([tmp_path / "store.zarr"])
    with pytest.raises(OptionError, match="package folder of scikit-image"):
        open_paint(["skimage:coins"])


def test_folders_wildcards_and_masks_are_supported(files, tmp_path):
    paths, scribbles = files
    (tmp_path / "masks").mkdir()
    for path in paths[:2]:
        mask = np.ones(pixels(path).shape, np.uint8)
        mask[:, -9:] = 0
        Image.fromarray(mask).save(tmp_path / f"masks/{path.stem}.png")
    Image.fromarray(np.zeros((9, 9), np.uint8)).save(tmp_path / "a_labels.png")
    notes = []
    paint = open_paint([tmp_path], features="filters", mask=str(tmp_path / "masks"), watch=notes.append)
    assert [item.image.path.name for item in paint.images] == ["a.png", "b.png", "c.png"]
    assert any("a_labels.png" in note for note in notes)
    assert any("No mask for 1 image" in note for note in notes)
    paint.update(content(0, [BACKGROUND]))
    paint.update(content(1, [scribbles[1]]))
    assert not paint.prediction.labels[:, -9:].any()
    assert len(open_paint([str(tmp_path / "[bc].png")], features="filters").images) == 2


def test_features_fitted_to_labels_raise_for_several_images():
    live = Live(
        micrograph(np.zeros((32, 32))),
        features=FeatureConfig("tokens", model="vit_tiny_patch16_224", weights="random"),
    )
    with pytest.raises(OptionError, match="cannot share features=vit_tiny_patch16_224"):
        live.for_image(micrograph(np.zeros((32, 32))))


def test_server_returns_each_image(files, server):
    state = json.loads(send_request(server, "/state")[2])
    assert state["images"] == ["a.png", "b.png", "c.png"]
    request = content(0, [BACKGROUND], window="1", revision=0)
    assert send_request(server, "/update", request)[0] == 200
    status, _, body = send_request(server, "/show", {**request, "show": 1})
    assert status == 200
    state = json.loads(body)
    assert (state["image"], state["revision"], state["strokes"]) == (1, 1, [])
    for number, path in enumerate(files[0]):
        token = f"{server.token}&image={number}"
        with Image.open(io.BytesIO(send_request(server, "/image.png", token=token)[2])) as displayed:
            assert displayed.size == pixels(path).shape[::-1]
    for number, expected in (("9", 422), ("x", 400), ("-1", 400), ("1.0", 400)):
        assert send_request(server, "/image.png", token=f"{server.token}&image={number}")[0] == expected
    # another window with an old revision does not change the scribbles of any image
    assert send_request(server, "/show", {**content(1, [], show=0), "window": "2", "revision": 0})[0] == 409
    assert send_request(server, "/show", {**content(1, [], show=7), "window": "1", "revision": 1})[0] == 422


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.slow
def test_painting_several_images_in_a_browser(files, server, tmp_path):
    paint, (_, scribbles) = server.paint, files
    with Browser(server.address) as browser:
        browser.wait("document.body && document.body.dataset.ready === 'yes'")

        def to_window(px, py):
            box = "canvas.getBoundingClientRect()"
            left, top, vx, vy, scale = browser.run(f"[{box}.left, {box}.top, view.x, view.y, view.scale]")
            return left + vx + (px + 0.5) * scale, top + vy + (py + 0.5) * scale

        def wait_until_idle():
            browser.wait("!busy && !again && !opening")

        assert browser.run("find('image').options.length") == 3
        browser.key("ArrowRight")
        browser.wait("document.body.dataset.image === '1'")
        browser.key("ArrowLeft")
        browser.wait("document.body.dataset.image === '0'")
        wait_until_idle()
        browser.drag(to_window(3, 3), to_window(20, 3), to_window(40, 3))
        wait_until_idle()
        browser.run("find('next').click()")
        browser.wait("document.body.dataset.image === '1'")
        assert browser.run("strokes.length") == 0
        browser.key("2")
        x, y = scribbles[1]["points"][0]
        browser.drag(to_window(x, y), to_window(x + 1, y))
        # the image changes while the result is computed; the result that is shown is that of the new image
        browser.run("openImage(0)")
        browser.wait("document.body.dataset.image === '0'")
        wait_until_idle()
        assert browser.run("result !== null && strokes.length === 1")
        assert browser.run("[result.width, result.height]") == list(paint.image.shape[::-1])
        # undo is per image
        browser.key("z")
        wait_until_idle()
        assert [len(item.strokes) for item in paint.images] == [0, 1, 0]
        browser.key("y")
        wait_until_idle()
        browser.run("find('image').value = '2'; find('image').dispatchEvent(new Event('change'))")
        browser.wait("document.body.dataset.image === '2'")
        wait_until_idle()
        assert browser.run("find('undo').disabled && result !== null")
        browser.key("s")
        browser.wait("find('status').textContent === 'saved.'")
    assert [len(item.strokes) for item in paint.images] == [1, 1, 0]
    assert sorted(path.name for path in (tmp_path / "a_paint").iterdir()) == [
        "a_seg.png", "a_strokes.json", "b_seg.png", "b_strokes.json", "c_seg.png", "model.vispe",
    ]  # fmt: skip
