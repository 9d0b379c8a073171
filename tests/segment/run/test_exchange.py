"""Annotations of other programs on the command line: results equal those of the equivalent label image."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from vispe.cli.main import main

H, W = 40, 51
AREAS = {"matrix": [(2, 2, 12, 38), (30, 25, 49, 38)], "pore": [(18, 11, 24, 19)]}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    for name in "ab":
        grey = rng.normal(180, 8, (H, W))
        grey[10:20, 17:25] -= 120
        Image.fromarray(np.clip(grey, 0, 255).astype(np.uint8)).save(tmp_path / f"{name}.png")
    scribbles = np.zeros((H, W), np.uint8)
    for k, boxes in enumerate(AREAS.values(), 1):
        for x0, y0, x1, y1 in boxes:
            scribbles[y0:y1, x0:x1] = k
    Image.fromarray(scribbles).save(tmp_path / "drawn.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def corners(x0, y0, x1, y1):
    return [[x0, y0], [x1, y0], [x1, y1], [x0, y1]]


def geojson(path):
    features = [
        {
            "type": "Feature",
            "geometry": {"type": "Polygon", "coordinates": [corners(*box)]},
            "properties": {"classification": {"name": name, "color": [10 * len(name), 0, 0]}},
        }
        for name, boxes in AREAS.items()
        for box in boxes
    ]
    Path(path).write_text(json.dumps({"type": "FeatureCollection", "features": features}))


def rois(path):
    roifile = pytest.importorskip("roifile", reason="roifile writes regions: pip install 'vispe[cli]'")
    named_boxes = [(f"{name}-{i}", box) for name, boxes in AREAS.items() for i, box in enumerate(boxes)]
    regions = [roifile.ImagejRoi.frompoints(np.array(corners(*box)), name=name) for name, box in named_boxes]
    roifile.roiwrite(path, regions)


def coco(path, *names):
    names = names or ("a.png",)
    images = [{"id": i, "file_name": n, "height": H, "width": W} for i, n in enumerate(names)]
    categories = [{"id": i, "name": n} for i, n in enumerate(AREAS)]
    annotations = [
        {"id": 9 * i + j, "image_id": i, "category_id": k, "segmentation": [np.ravel(corners(*box)).tolist()]}
        for i in range(len(names))
        for k, boxes in enumerate(AREAS.values())
        for j, box in enumerate(boxes)
    ]
    Path(path).write_text(
        json.dumps({"images": images, "categories": categories, "annotations": annotations})
    )


def run(command):
    assert main(command.split()) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("write", "name"),
    [(geojson, "a.geojson"), (geojson, "a.json"), (rois, "a_RoiSet.zip"), (coco, "all.json")],
)
def test_shapes_equal_the_equivalent_label_image(folder, write, name):
    write(name)
    options = "--features filters --classifier logistic"
    run(f"segment a.png --labels drawn.png --classes matrix,pore {options} -o one")
    run(f"segment a.png --labels {name} {options} -o two")
    np.testing.assert_array_equal(*(tifffile.imread(f"{out}/a_prob.tif") for out in ("one", "two")))
    assert Path("one/a_seg.png").read_bytes() == Path("two/a_seg.png").read_bytes()


def test_shape_files_are_matched_to_images_by_name(folder, capsys):
    Path("labels").mkdir()
    geojson("labels/a.geojson")
    rois("labels/b_RoiSet.zip")
    Path("labels/notes.zip").write_bytes(b"no regions")
    coco("truth.json", "a.png", "b.png")
    command = "segment a.png b.png --features filters -o out"
    run(f"{command} --labels labels --truth truth.json --score-labelled --classes pore,matrix")
    report = json.loads(Path("out/report.json").read_text())
    assert [Path(i["labels"]).name for i in report["images"]] == ["a.geojson", "b_RoiSet.zip"]
    assert [i["truth"] for i in report["images"]] == ["truth.json"] * 2
    assert "are outside of all shapes of truth.json" in " ".join(report["notes"])
    shutil.rmtree("out")
    run("segment a.png b.png --labels truth.json --features filters -o out")
    report = json.loads(Path("out/report.json").read_text())
    assert [i["labels"] for i in report["images"]] == ["truth.json"] * 2


def test_truth_is_matched_to_classes_by_name(folder):
    geojson("a.geojson")
    run("segment a.png --labels drawn.png --classes matrix,pore --features filters -o out")
    run("apply out/model.vispe a.png --truth a.geojson -o more")
    scores = json.loads(Path("more/report.json").read_text())["images"][0]["scores"]
    assert scores["pixel_accuracy"] > 0.99
    # swapped class names
    run("segment a.png --labels drawn.png --classes pore,matrix --features filters -o out2")
    run("apply out2/model.vispe a.png --truth a.geojson -o more2")
    scores = json.loads(Path("more2/report.json").read_text())["images"][0]["scores"]
    assert scores["pixel_accuracy"] < 0.01


def test_annotations_passed_as_images_are_rejected_with_a_hint(folder, capsys):
    geojson("a.geojson")
    assert main(["segment", "a.geojson", "--labels", "drawn.png", "-o", "out"]) == 2
    assert "pass it as --labels" in capsys.readouterr().err


def test_two_label_files_for_one_image_are_rejected(folder, capsys):
    geojson("a.geojson")
    coco("all.json", "a.png", "b.png")
    assert main(["segment", "a.png", "b.png", "--labels", "a.geojson,all.json", "-o", "out"]) == 2
    assert "a.png: two labels match, a.geojson and all.json" in capsys.readouterr().err
