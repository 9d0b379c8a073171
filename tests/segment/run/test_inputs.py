"""Inputs other than plain images: sidecar files, truth, painted copies of images, files of other programs."""

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from tests.cases import cases
from tests.cli.test_segment import scene, vispe
from tests.products import slow_except
from vispe.cli.main import main
from vispe.errors import InputError
from vispe.images.file_search import find_images
from vispe.images.formats.decode import decode
from vispe.images.formats.decoded_image import reason_of
from vispe.images.formats.headers import stored_shape
from vispe.images.labels.label_files import read_labels
from vispe.images.read import read_image
from vispe.images.sidecars import companions

FAST = "--features filters"


def save(path, array):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(array)).save(path)


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A folder with two images, labels of both and the truth of one."""
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate("ab"):
        grey, mask, scribbles = scene(seed)
        save(f"data/{name}.png", grey)
        save(f"data/{name}_labels.png", scribbles)
    save("data/a_mask.png", mask)
    return tmp_path


def reported_images(folder="out"):
    return [
        Path(record["image"]).name for record in json.loads(Path(folder, "report.json").read_text())["images"]
    ]


# --- sidecar files ---


def test_sidecar_files_are_recognised_by_name():
    stems = [
        "a",
        "a_labels",
        "A_seg",
        "b-mask",
        "b",
        "c_mask",
        "a_labels_overlay",
        "a_2",
        "b.truth",
        "a_segment",
    ]
    assert companions(stems) == {"a_labels", "b-mask", "a_labels_overlay", "b.truth"}


IMAGES = ("data", "data/*.png", "data/a.png data/b.png", "data/a.png data")
LABELS = ("data/*_labels.png", "data/a_labels.png,data/b_labels.png", "data")


@pytest.mark.parametrize(
    ("images", "labels"),
    slow_except(list(product(IMAGES, LABELS)), [(image, LABELS[k % 3]) for k, image in enumerate(IMAGES)]),
)
def test_labels_next_to_images_are_not_segmented(data, capsys, images, labels):
    (data / "data" / "a_mask.png").unlink()
    assert vispe(f"segment {images} --labels {labels} {FAST} -o out") == 0
    assert reported_images() == ["a.png", "b.png"]
    stderr = capsys.readouterr().err
    assert ("Skipped 2 files" in stderr) == (images != "data/a.png data/b.png"), stderr


def test_skipped_sidecars_are_listed_and_can_be_named_explicitly(data, capsys):
    assert vispe("segment data --cluster 2 --features filters -o out") == 0
    stderr = capsys.readouterr().err
    assert "Skipped 3 files with the name of labels, masks or results" in stderr
    assert "a_labels.png, a_mask.png, b_labels.png. Pass such a file by its name" in stderr
    assert vispe("segment data/a.png data/a_mask.png --cluster 2 --features filters -o more") == 0
    assert reported_images("more") == ["a.png", "a_mask.png"]


def test_labels_listed_as_images_are_skipped(data):
    command = "segment data/a.png data/a_labels.png data/b.png --labels data/a_labels.png"
    assert vispe(f"{command} {FAST} -o out") == 0
    assert reported_images() == ["a.png", "b.png"]


def test_files_passed_as_images_and_labels_are_rejected(data, capsys):
    command = "segment data/a.png data/b.png --labels data/a.png data/b.png -o out".replace(
        "png data/b.png -o", "png -o"
    )
    assert vispe(command.replace("--labels data/a.png", "--labels data/a.png,data/b.png")) == 2
    assert "data/a.png and all other images are also labels or truth" in capsys.readouterr().err


@pytest.mark.slow
def test_results_in_the_image_folder_are_not_segmented(data, capsys):
    for path in (data / "data").glob("*_*.png"):
        path.rename(data / path.name)
    command = f"segment data --labels a_labels.png,b_labels.png {FAST} -o data"
    assert vispe(command) == 0
    assert reported_images("data") == ["a.png", "b.png"]
    report_before = Path("data/report.json").read_text()
    assert vispe(f"{command} --force") == 0
    assert reported_images("data") == ["a.png", "b.png"]
    assert json.loads(report_before)["notes"] == json.loads(Path("data/report.json").read_text())["notes"]
    assert vispe("apply data/model.vispe data -o elsewhere") == 0
    assert reported_images("elsewhere") == ["a.png", "b.png"]


# --- truth ---


@pytest.mark.parametrize(
    ("truth", "pattern"),
    [
        (np.zeros((9, 8), np.uint8), "the truth is 9 x 8 pixels (height x width), but the image is 40 x 51"),
        (
            np.arange(40 * 51).reshape(40, 51).astype(np.uint8) % 7,
            "got 0, 1, 2, 3, 4, 5, 6",
        ),
    ],
)
@pytest.mark.parametrize("way", ["--labels data/a_labels.png", "--cluster 2", "apply"])
def test_truth_is_validated_before_segmentation(data, capsys, truth, pattern, way):
    save("t.png", truth)
    if way == "apply":
        assert vispe(f"segment data/a.png --labels data/a_labels.png {FAST} -o first") == 0
        capsys.readouterr()
        command = "apply first/model.vispe data/a.png --truth t.png -o out"
    else:
        command = f"segment data/a.png {way} {FAST} --truth t.png -o out"
    if way == "--cluster 2" and truth.any():
        assert vispe(command) == 0  # clusters are matched to any classes
        return
    assert vispe(command) == 2
    assert pattern in capsys.readouterr().err
    assert not Path("out").exists()
    save("t.png", scene()[1])
    assert vispe(command) == 0


@cases("way", ["segment", "apply"])
def test_truth_masks_of_a_run_share_one_class_numbering(data, capsys, way):
    first = np.where(scene()[1], 2, 1).astype(np.uint8)
    save("a_truth.png", first)
    save("b_truth.png", np.full_like(first, 1))  # without class 2
    truth = f"--truth a_truth.png,b_truth.png -o {way}_out"
    command = f"segment data/a.png data/b.png --labels data/a_labels.png {FAST} {truth}"
    if way == "apply":
        assert vispe(f"segment data/a.png --labels data/a_labels.png {FAST} -o first") == 0
        command = f"apply first/model.vispe data/a.png data/b.png {truth}"
    assert vispe(command) == 0
    a, b = json.loads(Path(f"{way}_out/report.json").read_text())["images"]
    assert min(image["scores"]["pixel_accuracy"] for image in (a, b)) > 0.5
    assert "numbers from 0" not in capsys.readouterr().err
    # grey levels are ranked over all masks, too
    levels = np.uint8([0, 100, 200])[: int(first.max()) + 1]
    save("a_truth.png", levels[first])
    save("b_truth.png", np.full_like(first, 100))
    assert vispe(f"{command} --force --truth-zero ignore") == 0
    save("a_truth.png", first)
    save("b_truth.png", first - 1)
    assert vispe(f"{command} --force") == 1
    assert "b_truth.png has the value 0, but a_truth.png numbers" in capsys.readouterr().err


def test_a_single_truth_mask_without_0_is_noted(data, capsys):
    save("a_truth.png", np.ones((40, 51), np.uint8))
    command = f"segment data/a.png --labels data/a_labels.png {FAST} --truth a_truth.png"
    assert vispe(f"{command} -o out") == 0
    assert "no pixel is 0, and the values (1) are read as class numbers from 0." in (
        message := capsys.readouterr().err
    )
    assert "set --truth-zero ignore" in message
    accuracy = json.loads(Path("out/report.json").read_text())["images"][0]["scores"]["pixel_accuracy"]
    assert vispe(f"{command} -o other --truth-zero ignore") == 0
    second_accuracy = json.loads(Path("other/report.json").read_text())["images"][0]["scores"][
        "pixel_accuracy"
    ]
    assert accuracy + second_accuracy == pytest.approx(1)


def test_runs_without_usable_truth_write_nothing(data, capsys):
    save("a_truth.png", np.zeros((9, 8), np.uint8))
    save("b_truth.png", np.zeros((9, 8), np.uint8))
    command = f"segment data/a.png data/b.png --labels data/a_labels.png {FAST} --truth a_truth.png,b_truth.png -o out"
    assert vispe(command) == 2
    assert "all images failed" in capsys.readouterr().err
    assert not Path("out").exists()


@cases("orientation", [1, 3, 6])
def test_header_sizes_equal_decoded_sizes(tmp_path, orientation):
    rng = np.random.default_rng(0)
    exif = Image.Exif()
    exif[274] = orientation
    for name, shape in {"a.png": (7, 9), "b.jpg": (8, 5, 3), "c.bmp": (6, 4), "g.png": (3, 5, 4)}.items():
        Image.fromarray(rng.integers(0, 255, shape, dtype=np.uint8)).save(tmp_path / name, exif=exif)
    tags = [(274, "H", 1, orientation, True)]
    for name, shape, kind in (
        ("d.tif", (7, 9), "minisblack"),
        ("e.tif", (4, 7, 9), "minisblack"),
        ("f.tif", (7, 9, 3), "rgb"),
    ):
        pixels = rng.integers(0, 255, shape, dtype=np.uint16)
        tifffile.imwrite(tmp_path / name, pixels, photometric=kind, extratags=tags)
    for path in sorted(tmp_path.iterdir()):
        assert stored_shape(path) == read_image(path).pages.shape[:3], path.name
    stack = tmp_path / "e.tif"
    assert stored_shape(stack, "1:3") == read_image(stack, z="1:3").pages.shape[:3]
    assert stored_shape(stack, axes="YXC") == read_image(stack, axes="YXC").pages.shape[:3]
    (tmp_path / "e.tif").write_bytes(b"II*\0rubbish")
    assert stored_shape(stack) is None


# --- labels ---


@cases("colour", [False, True])
def test_labels_painted_on_a_copy_of_the_image_raise(tmp_path, colour):
    grey, _, scribbles = scene()
    image = np.stack([grey] * 3, -1) if colour else grey
    image[scribbles > 0] = (255, 0, 0) if colour else 255
    save(tmp_path / "a.png", image)
    with pytest.raises(
        InputError, match=r"probably a copy of the image .* on an empty layer \(black or transp"
    ):
        read_labels(tmp_path / "a.png", (1, *grey.shape))


def test_antialiased_labels_raise_with_a_hint(tmp_path):
    values = np.zeros((40, 51), np.uint16)
    values.ravel()[::51] = np.arange(1, 41)
    tifffile.imwrite(tmp_path / "a.tif", values)
    with pytest.raises(InputError, match=r"got 40 distinct values .* Draw without anti-aliasing"):
        read_labels(tmp_path / "a.tif", (1, 40, 51))


# --- damage, options without effect, other formats ---


@cases("head", [b"II*\0\x08\0\0\0\0\0\0\0\0\0", b"II*\0", b"MM\0*\0\0\0\x08\0\x01" + bytes(12)])
def test_damaged_headers_raise_readable_messages(tmp_path, head):
    (tmp_path / "a.tif").write_bytes(head)
    with pytest.raises(InputError) as caught:
        decode(tmp_path / "a.tif")
    text = str(caught.value)
    assert "(0)" not in text
    assert "has no pixels" in text or len(text.partition("(")[2].split()) > 4


def test_exceptions_are_converted_to_readable_reasons():
    assert reason_of(KeyError(0)) == "a header entry, 0, is missing or invalid"
    assert reason_of(IndexError()) == "a header entry is missing or invalid"
    assert reason_of(ValueError("cannot  reshape\narray")) == "cannot reshape array"


def test_min_area_above_all_components_is_noted(data, capsys):
    command = f"segment data/a.png --labels data/a_labels.png {FAST} -o"
    assert vispe(f"{command} out --min-area 5000") == 0
    assert (
        "no connected component has min_area=5000 pixels, so min_area has no effect"
        in capsys.readouterr().err
    )
    assert vispe(f"{command} more --min-area 3") == 0
    assert "min_area" not in capsys.readouterr().err
    assert vispe(f"{command} plain") == 0
    assert Path("plain/a_seg.png").read_bytes() == Path("out/a_seg.png").read_bytes()


FOREIGN = {
    "a.oib": (b"\xd0\xcf\x11\xe0", "OLE"),
    "a.ser": (b"II\x97\x01", "FEI SER"),
    "a.jp2": (b"\0\0\0\x0cjP  ", "JPEG 2000"),
    "a.heic": (b"\0\0\0\x18ftypheic", "HEIF"),
    "a.dcm": (bytes(128) + b"DICM", "DICOM"),
    "a.zip": (b"PK\x03\x04", "pass a RoiSet.zip of ImageJ as `labels`"),
    "a.roi": (b"Iout", "pass it as `labels`"),
    "a.gz": (b"\x1f\x8b", "gunzip"),
    "a.spm": (b"\\*File list", "Gwyddion"),
    "a.geojson": (b"{}", "QuPath GeoJSON: pass it as"),
}


@cases("name", FOREIGN)
def test_unsupported_formats_are_recognised(tmp_path, name):
    header, hint = FOREIGN[name]
    (tmp_path / name).write_bytes(header.ljust(400, b"\1"))
    with pytest.raises(
        InputError, match=r"is not a readable PNG, JPEG, TIFF, BMP, GIF or WebP image; it looks like "
    ) as caught:
        decode(tmp_path / name)
    assert hint in str(caught.value)
    with pytest.raises(InputError, match=rf"contains no image .* {name} is not supported: it looks like"):
        find_images([tmp_path])


def test_unknown_file_contents_raise(tmp_path):
    (tmp_path / "a.png").write_bytes(b"what is this")
    with pytest.raises(InputError, match=r"image; convert it to one of these\.$"):
        decode(tmp_path / "a.png")


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        (["", "--cluster", "2", "-o", "out"], "file names must not be empty"),
        (
            ["data/a.png", "--cluster", "2", "--seed", "-1", "-o", "out"],
            "--seed needs an integer from 0 to 4294967295, got --seed -1",
        ),
        (["data/a.png", "--cluster", "2", "-o", "data/a.png"], "data/a.png is not a folder"),
        (["data/a.png", "--cluster", "2", "-o", "data/a.png/x"], "data/a.png is not a folder"),
    ],
)
def test_invalid_arguments_are_rejected_before_any_work(data, capsys, words, pattern):
    assert main(["segment", *words]) == 2
    assert pattern in capsys.readouterr().err
    assert not Path("out").exists()
