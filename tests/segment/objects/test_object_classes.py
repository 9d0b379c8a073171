"""Object classes from examples: tables, label files, the model file, and errors."""

import csv
import json
import zipfile

import numpy as np
import pytest
import tifffile
from PIL import Image
from skimage.draw import ellipse

from tests.segment.out_of_core.stores import write_store
from vispe.cli.main import main
from vispe.errors import InputError, OptionError
from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.model.model_file import load_model
from vispe.segment.objects.object_classes import ObjectClassifier
from vispe.segment.pipeline import ObjectOptions, ReadOptions, apply, segment

OBJECTS = ObjectOptions(["grain"], "keep")
GRID = 6


def page(seed):
    """Make an image of discs and ellipses of equal area on a grid, its scribbles, and the kinds (GRID, GRID)."""
    rng = np.random.default_rng(seed)
    grey, kinds = (
        rng.normal(90, 4, (GRID * 40, GRID * 40)),
        rng.permutation(GRID**2).reshape(GRID, GRID) % 2,
    )
    labels = np.zeros(grey.shape, np.uint8)
    labels[::40, :] = 1
    for (i, j), kind in np.ndenumerate(kinds):
        radii = (16, 5) if kind else (9, 9)
        y, x = 20 + 40 * i, 20 + 40 * j
        rows, columns = ellipse(y, x, *radii, rotation=rng.uniform(0, np.pi) if kind else 0)
        grey[rows, columns] += 60
        labels[y, x - 2 : x + 3] = 2
    return np.clip(grey, 0, 255).astype(np.uint8), labels, kinds


def rows_of(path):
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def kind_of(row, kinds):
    return ("disc", "fibre")[
        kinds[int(float(row["centroid_y_px"])) // 40, int(float(row["centroid_x_px"])) // 40]
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kinds")
    for seed in (0, 1):
        grey, labels, _ = page(seed)
        Image.fromarray(grey).save(folder / f"i{seed}.png")
        Image.fromarray(labels).save(folder / f"i{seed}_labels.png")
    run(folder, folder / "first")
    # the table of a first run, completed by hand for eight objects
    rows = rows_of(folder / "first" / "objects.csv")
    for number, row in enumerate(rows):
        row["object_class"] = kind_of(row, page(0)[2]) if number < 8 else ""
    write(folder / "examples.csv", rows)
    return folder


def write(path, rows):
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def run(folder, out, classes=()):
    return segment(
        folder / "i0.png", out, labels=folder / "i0_labels.png", features=FeatureConfig("filters"),
        objects=ObjectOptions(["class 2"], "keep"), object_classes=classes,
    )  # fmt: skip


def test_discs_and_fibres_are_classified_by_segment_and_apply(folder, capsys):
    out, kinds = folder / "out", page(0)[2]
    scribbles = [
        "--labels",
        str(folder / "i0_labels.png"),
        "--features",
        "filters",
        "--classes",
        "ground,grain",
    ]
    objects = ["--objects", "grain", "--touching", "keep", "--object-classes", str(folder / "examples.csv")]
    objects, geojson = [*objects, "--objects-as", "geojson"], out / "i0_objects.geojson"
    assert main(["segment", str(folder / "i0.png"), *scribbles, *objects, "-o", str(out)]) == 0
    assert "objects: 36 grain (18 disc, 18 fibre)" in capsys.readouterr().out
    rows = rows_of(out / "objects.csv")
    assert [row["object_class"] for row in rows] == [kind_of(row, kinds) for row in rows]
    assert all(0.5 < float(row["object_probability"]) <= 1 for row in rows)
    assert (out / "i0_object_classes.png").is_file()
    record = json.loads((out / "report.json").read_text())["images"][0]["objects"]["object_classes"]
    assert record["counts"] == {"disc": 18, "fibre": 18}
    assert sum(record["examples"].values()) == 8
    assert record["accuracy"] == 1
    assert "Object classes, learnt from 8 examples" in (out / "report.html").read_text()
    names = [f["properties"]["classification"]["name"] for f in json.loads(geojson.read_text())["features"]]
    assert sorted(names) == ["disc"] * 18 + ["fibre"] * 18
    # objects are not requested: the model defines them
    assert main(["apply", str(out / "model.vispe"), str(folder / "i1.png"), "-o", str(folder / "more")]) == 0
    rows, kinds = rows_of(folder / "more" / "objects.csv"), page(1)[2]
    assert len(rows) == GRID**2
    assert [row["object_class"] for row in rows] == [kind_of(row, kinds) for row in rows]


@pytest.mark.slow
def test_points_and_label_files_are_equivalent_to_object_numbers(folder, tmp_path):
    by_number = run(folder, tmp_path / "numbers", folder / "examples.csv")
    rows = [row for row in rows_of(folder / "examples.csv") if row["object_class"]]
    points = [
        {"x": row["centroid_x_px"], "y": row["centroid_y_px"], "object_class": row["object_class"]}
        for row in rows
    ]
    by_point = run(folder, tmp_path / "points", write(tmp_path / "points.csv", points))
    labels = np.zeros(page(0)[0].shape, np.uint8)
    for point in points:
        y, x = (round(float(point[axis])) for axis in "yx")
        labels[y, x - 1 : x + 2] = 1 + (point["object_class"] == "fibre")
    Image.fromarray(labels).save(tmp_path / "drawn.png")
    by_label = run(folder, tmp_path / "drawn", tmp_path / "drawn.png")
    counts = [
        list(r.images[0]["objects"]["object_classes"]["counts"].values())
        for r in (by_number, by_point, by_label)
    ]
    assert counts == [[18, 18]] * 3
    tables = [rows_of(tmp_path / name / "objects.csv") for name in ("numbers", "points")]
    assert tables[0] == tables[1]


@pytest.mark.slow
def test_model_file_stores_the_object_classifier_and_options(folder, tmp_path):
    run(folder, tmp_path / "out", folder / "examples.csv")
    loaded = load_model(tmp_path / "out" / "model.vispe").objects
    assert loaded.names == ("disc", "fibre")
    assert loaded.unit == "px"
    assert loaded.options == ObjectOptions(["class 2"], "keep")
    first = load_model(folder / "first" / "model.vispe")
    assert first.objects is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda row: row | {"object_class": "disc"}, "at least 2 classes, got disc"),
        (lambda row: row | {"object": "900"}, "object 900 does not exist; i0.png has 36 objects"),
        (lambda row: row | {"object": "1.5"}, "line 2: object must be an integer of 1 or more"),
        (lambda row: row | {"centroid_x_px": "200"}, "its numbers are of another run"),
        (lambda row: row | {"image": "other.png"}, "other.png is not an image of this run, such as i0.png"),
        (lambda row: row | {"object_class": ""}, "has no row with an object_class"),
        (lambda row: {"object_class": "disc", "number": 1}, "must have the columns object_class and object"),
        (lambda row: {"object_class": "disc", "x": 0, "y": 0}, "there is no object at x=0, y=0, page=0"),
        (lambda row: {"object_class": "disc", "x": 5000, "y": 0}, "the image ends at x=5000"),
        (lambda row: row | {"object_probability": "0.9"}, "line 2: the object_class was predicted"),
    ],
)
def test_invalid_examples_raise_and_write_nothing(folder, tmp_path, change, words):
    rows = [change(row) for row in rows_of(folder / "examples.csv")[:8]]
    path = write(tmp_path / "bad.csv", rows)
    with pytest.raises(InputError, match=words):
        run(folder, tmp_path / "out", path)
    assert not (tmp_path / "out" / "model.vispe").exists()


def test_duplicate_columns_raise(folder, tmp_path):
    (tmp_path / "e.csv").write_text("object,object_class,object_class\n1,disc,fibre\n2,fibre,disc\n")
    with pytest.raises(InputError, match="several columns object_class"):
        run(folder, tmp_path / "out", tmp_path / "e.csv")


def test_other_bit_depths_and_object_options_are_noted(folder, tmp_path):
    report = run(folder, tmp_path / "out", folder / "examples.csv")
    assert report.images[0]["notes"] == []
    model, image = tmp_path / "out" / "model.vispe", tmp_path / "i16.png"
    Image.fromarray(page(1)[0].astype(np.uint16) * 200).save(image)
    (note,) = apply(model, image, tmp_path / "bits").images[0]["notes"]
    assert "the median grey level of the objects of i16.png is 2." in note
    objects = ObjectOptions(["1", "2"], "split", 0)
    notes = apply(model, folder / "i1.png", tmp_path / "split", objects=objects).images[0]["notes"]
    assert [n for n in notes if "touching=split, but the object classes were learnt with touching=keep" in n]
    assert [n for n in notes if n == "no object class was learnt for the objects of class 1."]
    path = write_store(tmp_path / "i.zarr", page(1)[0].astype(np.float32) * 200)
    assert apply(model, path, tmp_path / "store").images[0]["notes"][-1] == note.replace("i16.png", "i.zarr")


def test_one_pixel_labels_an_object_and_empty_classes_are_noted(folder, tmp_path):
    labels = np.zeros(page(0)[0].shape, np.uint8)
    for i, j in [(0, 0), (0, 1), (0, 2), (0, 3)]:
        labels[20 + 40 * i, 20 + 40 * j] = 1 + page(0)[2][i, j]
    labels[0, :3] = 3
    Image.fromarray(labels).save(tmp_path / "drawn.png")
    notes = run(folder, tmp_path / "out", tmp_path / "drawn.png").notes
    assert "object class 'class 3' has no labelled object and is omitted." in notes
    assert not [note for note in notes if "label more of it" in note and "drawn.png" in note]


def test_number_of_classes_is_limited_to_255():
    rows = [example(n, n + 9) for n in range(30)]
    assert len(ObjectClassifier.fit(rows, [f"c{n // 2:02}" for n in range(30)], OBJECTS).names) == 15
    with pytest.raises(InputError, match="has 256 classes, more than 255"):
        ObjectClassifier.fit([example(n, 9) for n in range(256)], list(map(str, range(256))), OBJECTS)


def test_classes_without_objects_or_with_mixed_files_raise(folder, tmp_path, capsys):
    with pytest.raises(OptionError, match="object_classes has no effect without objects"):
        segment(
            folder / "i0.png", tmp_path / "out", labels=folder / "i0_labels.png",
            object_classes=folder / "examples.csv",
        )  # fmt: skip
    with pytest.raises(OptionError, match="Pass one kind of files"):
        run(folder, tmp_path / "out", [folder / "examples.csv", folder / "i0_labels.png"])
    with pytest.raises(InputError, match=r"missing\.csv does not exist"):
        run(folder, tmp_path / "out", tmp_path / "missing.csv")


def test_conflicting_labels_on_one_object_raise(folder, tmp_path):
    labels = np.zeros(page(0)[0].shape, np.uint8)
    labels[20, 19], labels[20, 21] = 1, 2
    Image.fromarray(labels).save(tmp_path / "drawn.png")
    with pytest.raises(InputError, match=r"object 1 of i0\.png has labels of 'class 1' and 'class 2'"):
        run(folder, tmp_path / "out", tmp_path / "drawn.png")


def example(number, area, **more):
    row = {
        "object": number,
        "class": "grain",
        "area_px": area,
        "volume_px": None,
        "perimeter_px": 2 * area**0.5,
    }
    row |= {"equivalent_diameter_um": None, "eccentricity": 0.1, "solidity": 1.0, "mean_grey": 5.0}
    return row | more


def test_units_and_dimensions_must_match_the_examples():
    um = {"equivalent_diameter_um": 1.0, "area_um2": 1.0, "perimeter_um": 4.0}
    rows = [
        example(n, area, **um) | {"area_um2": area * 0.25} for n, area in enumerate([9, 10, 90, 99], start=1)
    ]
    classifier = ObjectClassifier.fit(rows, ["small", "small", "large", "large"], OBJECTS)
    assert classifier.unit == "um"
    assert classifier.notes()
    # half the pixel size: different areas in pixels, equal areas in microns
    finer = [row | {"area_px": 4 * row["area_px"]} for row in rows]
    classifier.classify("a", finer, OBJECTS)
    assert classifier.counts(finer) == {"large": 2, "small": 2}
    with pytest.raises(InputError, match="the pixel size of the image is unknown"):
        classifier.classify("a", [example(1, 9)], OBJECTS)
    with pytest.raises(InputError, match="the image has volumes"):
        classifier.classify("a", [example(1, 9, volume_px=9)], OBJECTS)
    other_rows = [example(1, 9, **um) | {"class": "ground"}]
    classifier.classify("a", other_rows, OBJECTS)
    assert other_rows[0]["object_class"] is None


def test_volumes_are_classified(folder, tmp_path):
    image = np.random.default_rng(0).normal(50, 3, (8, 60, 120))
    labels, kinds = np.zeros(image.shape, np.uint8), {}
    for index in range(6):
        size = 6 if index % 2 else 3
        box = np.s_[2 : 2 + size // 3 + 2, 20 : 20 + 2 * size, 20 * index + 3 : 20 * index + 3 + 2 * size]
        image[box] += 80
        labels[3, 23, 20 * index + 4 : 20 * index + 8], kinds[index] = 2, ("small", "large")[index % 2]
    labels[3, 2] = 1
    tifffile.imwrite(tmp_path / "z.tif", image.clip(0, 255).astype(np.uint8), metadata={"axes": "ZYX"})
    tifffile.imwrite(tmp_path / "z_labels.tif", labels)
    table = [
        {"page": 3, "x": 20 * i + 5, "y": 23, "object_class": kind} for i, kind in kinds.items() if i < 4
    ]
    report = segment(
        tmp_path / "z.tif", tmp_path / "out", labels=tmp_path / "z_labels.tif", features=FeatureConfig("filters"),
        objects=ObjectOptions(["class 2"], "keep"), object_classes=write(tmp_path / "e.csv", table),
        reading=ReadOptions(axes="ZYX"),
    )  # fmt: skip
    assert report.images[0]["objects"]["object_classes"]["counts"] == {"large": 3, "small": 3}
    with pytest.raises(InputError, match="the object classes were learnt from volumes"):
        apply(tmp_path / "out" / "model.vispe", folder / "i0.png", tmp_path / "more")


def test_stores_are_classified_but_cannot_be_examples(folder, tmp_path):
    run(folder, tmp_path / "out", folder / "examples.csv")
    path = write_store(tmp_path / "i0.zarr", page(0)[0].astype(np.float32))
    with pytest.raises(OptionError, match="object_classes is not supported for images processed in blocks"):
        segment(
            path, tmp_path / "no", labels=folder / "i0_labels.png", objects=OBJECTS,
            object_classes=folder / "examples.csv",
        )  # fmt: skip
    report = apply(tmp_path / "out" / "model.vispe", path, tmp_path / "store")
    assert report.images[0]["objects"]["object_classes"]["counts"] == {"disc": 18, "fibre": 18}
    assert [r["object_class"] for r in rows_of(tmp_path / "store" / "objects.csv")] == [
        r["object_class"] for r in rows_of(tmp_path / "out" / "objects.csv")
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"names": ["disc"]},
        {"names": ["disc", "disc"]},
        {"names": ["disc", "fibre", "third"]},
        {"names": ["disc", "a\x1b[31m"]},
        {"unit": "inch"},
        {"volumes": True},
        {"options": {"classes": ["class 2"], "touching": "never"}},
        {"options": {"classes": ["class 2"], "unknown": 1}},
        {"options": {"classes": []}},
        {"options": None},
        {"facts": None},
        {"facts": {}},
        {"facts": {"examples": {}, "mean_grey": [1, "2"]}},
    ],
)
def test_invalid_cards_raise(folder, tmp_path, change):
    if not (folder / "model" / "model.vispe").exists():
        run(folder, folder / "model", folder / "examples.csv")
    path = tmp_path / "changed.vispe"
    with zipfile.ZipFile(folder / "model" / "model.vispe") as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            data = source.read(name)
            if name == "card.json":
                card = json.loads(data)
                card["object_classes"] |= change
                data = json.dumps(card).encode()
            target.writestr(name, data)
    with pytest.raises(InputError, match=r"changed\.vispe is damaged"):
        load_model(path)
