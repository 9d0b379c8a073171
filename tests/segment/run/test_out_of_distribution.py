"""Out-of-distribution scores and warnings in runs on image files."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from tests.products import slow_except
from vispe.cli.main import main
from vispe.errors import InputError
from vispe.images.textures import random_field
from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.model.model_file import load_model, save_model
from vispe.segment.pipeline import MODEL_NAME, ReadOptions, apply, segment
from vispe.segment.run.out_of_distribution import ood_record, pixel_size_warning

FILTERS = FeatureConfig(sigmas=(1.0, 2.0, 4.0))


@pytest.fixture(scope="module")
def fields():
    """Six fields of view of one sample, uint8, and their classes, (6, 256, 256) each."""
    image, classes = random_field(0, wavelength=14, detail=0.05).render((512, 768))
    grey = image[0].numpy()
    noisy = 40 + 175 * (grey - grey.min()) / np.ptp(grey) + np.random.default_rng(0).normal(0, 8, grey.shape)
    scaled = np.rint(noisy).astype(np.uint8)
    return [
        a.reshape(2, 256, 3, 256).swapaxes(1, 2).reshape(6, 256, 256) for a in (scaled, np.asarray(classes))
    ]


def label(path, classes):
    values = (classes + 1) * (np.random.default_rng(0).random(classes.shape) < 0.02)
    Image.fromarray(values.astype(np.uint8)).save(path)
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory, fields):
    folder = tmp_path_factory.mktemp("trained")
    grey, classes = fields[0][0], fields[1][0]
    Image.fromarray(grey).save(folder / "a.png")
    labels = [label(folder / "a_labels.png", classes)]
    # grey limits per page of a stack
    reading = ReadOptions(normalize="image")
    segment([folder / "a.png"], folder / "out", labels=labels, features=FILTERS, reading=reading)
    return folder / "out" / MODEL_NAME


def test_only_images_unlike_the_training_images_are_flagged(tmp_path, trained, capsys, fields):
    similar, noise = fields[0][3], np.random.default_rng(1).integers(0, 255, (150, 170)).astype(np.uint8)
    Image.fromarray(similar).save(tmp_path / "same.png")
    Image.fromarray(noise).save(tmp_path / "strange.png")
    out = tmp_path / "out"
    images = [str(tmp_path / "same.png"), str(tmp_path / "strange.png")]
    assert main(["apply", str(trained), *images, "-o", str(out)]) == 0
    report = json.loads((out / "report.json").read_text())
    first, second = report["images"]
    assert first["domain"] == {
        "score": first["domain"]["pages"][0],
        "differs": False,
        "pages": first["domain"]["pages"],
    }
    assert first["domain"]["score"] < 1
    assert not any("differs" in note for note in first["notes"])
    assert "domain" not in first["files"]
    assert second["domain"]["differs"]
    assert second["domain"]["score"] > 1
    (note,) = [note for note in second["notes"] if "differs" in note]
    assert note.startswith("strange.png differs from the training images: score ")
    assert "(see strange_domain.png)" in note
    assert "add a few scribbles" in note
    assert note in capsys.readouterr().err.replace("\n", " ")
    figure = np.asarray(Image.open(out / "strange_domain.png"))
    assert figure.shape == noise.shape
    assert figure.dtype == np.uint8
    assert (figure[:128, :128] > 128).all()
    for top in (0, 64, 128):
        for left in (0, 64, 128):
            assert len(np.unique(figure[top : top + 64, left : left + 64])) == 1
    rows = list(csv.DictReader((out / "report.csv").read_text().splitlines()))
    assert [float(row["domain"]) for row in rows] == [first["domain"]["score"], second["domain"]["score"]]


def test_unlabelled_images_of_the_training_run_are_scored(tmp_path, fields):
    grey, classes = fields[0][0], fields[1][0]
    Image.fromarray(grey).save(tmp_path / "a.png")
    Image.fromarray(255 - np.clip(grey, 0, 90)).save(tmp_path / "b.png")
    labels = label(tmp_path / "a_labels.png", classes)
    images = [tmp_path / "a.png", tmp_path / "b.png"]
    report = segment(images, tmp_path / "out", labels=[labels], features=FILTERS)
    training_score, test_score = (record["domain"]["score"] for record in report.images)
    assert training_score < 0.5 < test_score


def test_out_of_distribution_pages_of_a_stack_are_listed(tmp_path, trained, fields):
    pages = fields[0][1:].copy()
    pages[[1, 4]] = np.random.default_rng(0).integers(0, 255, (2, 256, 256))
    tifffile.imwrite(tmp_path / "s.tif", pages, imagej=True, metadata={"axes": "ZYX"})
    (record,) = apply(trained, [tmp_path / "s.tif"], tmp_path / "out").images
    scores = record["domain"]["pages"]
    assert [score > 1 for score in scores] == [False, True, False, False, True]
    assert record["domain"]["score"] == max(scores)
    (note,) = [note for note in record["notes"] if "differ" in note]
    assert note.startswith("2 of the 5 pages of s.tif (from 0: 1, 4) differ from the training images")
    assert np.asarray(Image.open(tmp_path / "out" / "s_domain.png")).shape == (256, 256)


@pytest.mark.parametrize("kind", slow_except(["forest", "kmeans"], ["kmeans"]))
def test_every_classifier_gives_out_of_distribution_scores(tmp_path, kind, fields):
    grey, classes = fields[0][0], fields[1][0]
    Image.fromarray(grey).save(tmp_path / "a.png")
    Image.fromarray(np.random.default_rng(1).integers(0, 255, (160, 150)).astype(np.uint8)).save(
        tmp_path / "n.png"
    )
    options = (
        {"labels": [label(tmp_path / "l.png", classes)], "classifier": kind}
        if kind == "forest"
        else {"cluster": 2}
    )
    segment([tmp_path / "a.png"], tmp_path / "out", features=FILTERS, **options)
    report = apply(tmp_path / "out" / MODEL_NAME, [tmp_path / "a.png", tmp_path / "n.png"], tmp_path / "more")
    assert [record["domain"]["differs"] for record in report.images] == [False, True]


def test_models_without_a_training_summary_add_a_note(tmp_path, trained, fields):
    model = load_model(trained)
    assert model.domain is not None
    old = save_model(tmp_path / "old.vispe", replace(model, domain=None))
    assert trained.stat().st_size - Path(old).stat().st_size < 20_000  # bytes of the training summary
    Image.fromarray(fields[0][5]).save(tmp_path / "a.png")
    report = apply(old, [tmp_path / "a.png"], tmp_path / "out")
    assert report.images[0]["domain"] is None
    assert sum("contains no summary of its training images" in note for note in report.notes) == 1
    rows = list(csv.DictReader((tmp_path / "out" / "report.csv").read_text().splitlines()))
    assert rows[0]["domain"] == ""
    apply(trained, [tmp_path / "a.png"], tmp_path / "new")
    labels = [np.asarray(Image.open(tmp_path / name / "a_seg.png")) for name in ("out", "new")]
    assert np.array_equal(*labels)


def test_images_too_small_for_a_score_have_none(tmp_path, trained):
    Image.fromarray(np.arange(12, dtype=np.uint8).reshape(3, 4)).save(tmp_path / "a.png")
    (record,) = apply(trained, [tmp_path / "a.png"], tmp_path / "out").images
    assert record["domain"] is None


@pytest.mark.slow
def test_pixel_sizes_unlike_the_training_images_are_noted(tmp_path, fields):
    grey, classes = fields[0][0], fields[1][0]

    def write(name, microns):
        tifffile.imwrite(
            tmp_path / name, grey, imagej=True, resolution=(1 / microns,) * 2, metadata={"unit": "um"}
        )
        return tmp_path / name

    labels = [label(tmp_path / "a_labels.png", classes)]
    segment([write("a.tif", 0.5)], tmp_path / "out", labels=labels, features=FILTERS)
    model = tmp_path / "out" / MODEL_NAME
    assert load_model(model).notes["pixel_size_um"] == pytest.approx([0.5, 0.5])
    images = [write("same.tif", 0.6), write("finer.tif", 0.1), write("coarser.tif", 2)]
    notes = [text for record in apply(model, images, tmp_path / "new").images for text in record["notes"]]
    pixel_size_notes = [text for text in notes if "the training images of 0.5 microns" in text]
    assert [text.split()[0] for text in pixel_size_notes] == ["finer.tif", "coarser.tif"]
    assert "finer.tif has pixels of 0.1 microns" in pixel_size_notes[0]


@pytest.mark.parametrize("entry", [None, [], [1], [2, 1], ["a", "b"], [0, 1], {"a": 1}])
def test_pixel_sizes_of_a_model_file_are_optional(trained, entry):
    model = load_model(trained)
    assert pixel_size_warning("a", model, (1, 1)) == []
    assert pixel_size_warning("a", replace(model, notes={"pixel_size_um": entry}), (1, 1)) == []


def test_inconsistent_training_summaries_raise(tmp_path, trained):
    model = load_model(trained)
    invalid = replace(model, domain=replace(model.domain, limits=np.array([0.0, 1.0])))
    path = save_model(tmp_path / "broken.vispe", invalid)
    with pytest.raises(InputError, match="are inconsistent"):
        load_model(path)


def test_pages_without_data_have_no_score(trained):
    model = load_model(trained)
    count = 1 + 2 * len(model.domain.components)
    assert ood_record(model, [np.zeros(count, np.int64)]) is None
    sums = np.zeros(count, np.int64)
    sums[0] = 5
    actual = ood_record(model, [np.zeros(count, np.int64), sums])
    assert actual["pages"][0] is None
    assert actual["score"] == actual["pages"][1]
    assert ood_record(model, [None]) is None
