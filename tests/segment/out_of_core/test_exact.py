"""Results of stores, computed in blocks, are bit-identical to those of the page in memory."""

import json

import numpy as np
import pytest
import tifffile
from PIL import Image

from tests.products import slow_except
from tests.segment.out_of_core.stores import in_memory, same_bits, scene, scribbled, write_store, zarr
from vispe.cli.main import main
from vispe.segment import pipeline
from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.features.pixel_features import Features
from vispe.segment.model.model_file import load_model
from vispe.segment.pipeline import LabelOptions, PostProcessing, ReadOptions
from vispe.segment.run.out_of_distribution import ood_record
from vispe.segment.run.reports.image_record import fractions

FILTERS = FeatureConfig(sigmas=(1.0, 3.0), tile=48)
MICRO = FeatureConfig("both", sigmas=(1.0, 3.0), model="vispe_micro", tile=48)


def results(out, name, pages):
    """Return labels, probabilities (z, K, h, w) and uncertainty of a store, page by page."""
    root = zarr.open_group(str(out / f"{name}_seg.ome.zarr"), mode="r")
    labels, prob, uncertainty = root["labels/classes/0"][:], root["0"][:], root["uncertainty/0"][:]
    facts = root.attrs.get("ome", root.attrs)
    channel = [axis["name"] for axis in facts["multiscales"][0]["axes"]].index("c")
    prob, shape = np.moveaxis(prob, channel, -3), labels.shape[-2:]
    return labels.reshape(-1, *shape), prob.reshape(pages, -1, *shape), uncertainty.reshape(-1, *shape)


def assert_exact(out, name, pages, post=None):
    """Assert that the store of a run is bit-identical to `predict_page`; return the record of the report."""
    model = load_model(out / "model.vispe")
    features = Features(model.features, seed=model.seed, device="cpu", basis=model.basis)
    labels, prob, uncertainty = results(out, name, len(pages))
    expected = in_memory(pages, model, features, post)
    for z, page in enumerate(expected):
        assert same_bits(labels[z], page.labels)
        assert same_bits(np.ascontiguousarray(prob[z]), page.prob)
        assert same_bits(uncertainty[z], page.uncertainty)
    record = json.loads((out / "report.json").read_text())["images"][0]
    counts = np.bincount(labels.ravel(), minlength=len(model.names) + 1)[1:]
    assert list(record["map_fractions"].values()) == [n / counts.sum() for n in counts]
    areas = [page.areas for page in expected]
    expected_fractions = fractions(
        np.append(0, counts), sum(areas[1:], areas[0]), model.names, model.classifier.kind
    )
    assert {key: record[key] for key in expected_fractions} == expected_fractions
    overlap = sum(page.overlap for page in expected)
    assert record["overlap_pixels"] == overlap
    assert record["tile_disagreement"] == (
        sum(p.disagreeing for p in expected) / overlap if overlap else None
    )
    assert model.domain is not None
    assert record["domain"] == ood_record(model, [page.feature_grid.sums() for page in expected])
    assert record["mean_uncertainty"] == np.nanmean(uncertainty, dtype=np.float64)
    return record


@pytest.mark.parametrize(
    ("config", "smooth", "version"),
    [
        pytest.param(FILTERS, 0, "0.4", marks=pytest.mark.slow),
        (FILTERS, 5, "0.5"),
        pytest.param(MICRO, 0, "0.5", marks=pytest.mark.slow),
        pytest.param(MICRO, 3, "0.4", marks=pytest.mark.slow),
    ],
)
def test_pages_with_invalid_pixels_are_exact(tmp_path, small_blocks, config, smooth, version):
    values, phase = scene()
    values = values.astype(np.float32)
    values[30:70, 55:130] = np.nan
    values[0, 0], values[156, 210] = np.inf, -np.inf
    store = write_store(tmp_path / "a.ome.zarr", values, version=version, chunk=37)
    post = PostProcessing(smooth)
    report = pipeline.segment(
        [store],
        tmp_path / "out",
        labels=[scribbled(tmp_path / "a.png", phase)],
        features=config,
        post=post,
    )
    record = assert_exact(tmp_path / "out", "a", values[None, ..., None], post)
    assert record["block"] == 64
    assert record["no_data_share"] == pytest.approx((40 * 75 + 2) / values.size)
    assert report.images[0]["pixel_size_um"] == (0.5, 0.5)


@pytest.mark.parametrize(
    ("axes", "lengths"),
    slow_except([("czyx", (2, 3)), ("tcyx", (2, 3)), ("tczyx", (2, 2, 2))], [("czyx", (2, 3))]),
)
def test_pages_and_channels_are_exact(tmp_path, small_blocks, axes, lengths):
    planes = [scene(71, 90, seed)[0] for seed in range(int(np.prod(lengths)))]
    phase = scene(71, 90)[1]
    array = np.stack(planes).reshape(*lengths, 71, 90).astype(np.uint16)
    pages = np.moveaxis(array, axes.index("c"), -1).reshape(-1, 71, 90, lengths[axes.index("c")])
    store = write_store(tmp_path / "a.zarr", array, axes)
    labels = scribbled(tmp_path / "a.png", phase, 0.03)
    pipeline.segment(
        [store], tmp_path / "out", labels=[labels], features=FILTERS, labelling=LabelOptions(label_page=1)
    )
    record = assert_exact(tmp_path / "out", "a", pages)
    assert (record["pages"], record["channels"]) == (len(pages), pages.shape[-1])
    root = zarr.open_group(str(tmp_path / "out" / "a_seg.ome.zarr"), mode="r")
    axis_names = [axis["name"] for axis in root.attrs["ome"]["multiscales"][0]["axes"]]
    assert axis_names == [name for name in "tczyx" if name in axes]


@pytest.mark.slow
def test_scribbles_on_stores_train_the_same_model_as_in_memory(tmp_path, small_blocks):
    values, phase = scene(130, 149)
    array = values.astype(np.uint8)
    Image.fromarray(array).save(tmp_path / "a.png")
    store = write_store(tmp_path / "a.zarr", array)
    labels = scribbled(tmp_path / "labels.png", phase)
    json_scribbles = [
        {"class": 1 if phase[y, x] else 2, "points": [[int(x), int(y)]]}
        for y, x in np.argwhere(np.asarray(Image.open(labels)) > 0)
    ]
    (tmp_path / "labels.json").write_text(json.dumps(json_scribbles))
    scribbles = write_store(tmp_path / "labels.zarr", np.asarray(Image.open(labels)), chunk=33)
    pipeline.segment([tmp_path / "a.png"], tmp_path / "memory", labels=[labels], features=MICRO)
    expected = load_model(tmp_path / "memory" / "model.vispe")
    for number, labels_path in enumerate((labels, tmp_path / "labels.json", scribbles)):
        out = tmp_path / f"out{number}"
        pipeline.segment([store], out, labels=[labels_path], features=MICRO)
        model = load_model(out / "model.vispe")
        for key, value in expected.classifier.tensors().items():
            np.testing.assert_array_equal(model.classifier.tensors()[key], value)
        assert model.notes["labelled_pixels"] == expected.notes["labelled_pixels"]


def test_models_of_image_files_are_exact_on_stores(tmp_path, small_blocks, capsys):
    values, phase = scene(100, 120)
    Image.fromarray(values.astype(np.uint8)).save(tmp_path / "a.png")
    labels = scribbled(tmp_path / "l.png", phase)
    pipeline.segment([tmp_path / "a.png"], tmp_path / "out", labels=[labels], features=FILTERS)
    array = scene(83, 64, seed=7)[0].astype(np.uint8)
    Image.fromarray(array).save(tmp_path / "b.png")
    store = write_store(tmp_path / "b.zarr", array, scale=1, unit=None)
    model = tmp_path / "out" / "model.vispe"
    pipeline.apply(model, [tmp_path / "b.png"], tmp_path / "memory", tile=40)
    arguments = [
        str(model),
        str(store),
        "-o",
        str(tmp_path / "big"),
        "--tile",
        "40",
        "--memory",
        "1 GB",
        "--json",
    ]
    assert main(["apply", *arguments]) == 0
    report = json.loads(capsys.readouterr().out)
    labels, prob, uncertainty = results(tmp_path / "big", "b", 1)
    np.testing.assert_array_equal(labels[0], np.asarray(Image.open(tmp_path / "memory" / "b_seg.png")))
    whole_prob = tifffile.imread(tmp_path / "memory" / "b_prob.tif").reshape(prob[0].shape)
    np.testing.assert_array_equal(prob[0], whole_prob)
    assert (tmp_path / "big" / "b_overlay.png").read_bytes() == (
        tmp_path / "memory" / "b_overlay.png"
    ).read_bytes()
    expected = json.loads((tmp_path / "memory" / "report.json").read_text())["images"][0]
    record = report["images"][0]
    assert set(expected) <= set(record)
    for key in (
        "pages",
        "height",
        "width",
        "channels",
        "no_data_share",
        "fractions",
        "tile",
        "mean_uncertainty",
    ):
        assert record[key] == expected[key]
    assert np.isfinite(uncertainty).all()
    assert list(record["files"]) == ["overlay", "labels"]


def test_colour_labels_equal_those_of_read_labels(tmp_path, small_blocks):
    from vispe.images.labels.label_files import read_labels
    from vispe.segment.out_of_core.scribbles import read_scribbles
    from vispe.segment.out_of_core.source.open_image import open_image

    image = open_image(write_store(tmp_path / "a.zarr", np.zeros((300, 40), np.uint8)))
    rng = np.random.default_rng(0)
    colours = np.array([(0, 0, 0), (255, 0, 0), (9, 9, 9), (0, 255, 40)], np.uint8)
    scribbles = colours[rng.integers(0, 4, (300, 40))]
    scribbles[:260][rng.random((260, 40)) < 0.95] = 0
    scribbles[:256][(scribbles[:256] != scribbles[:256, :, :1]).any(-1)] = (
        0  # the first strip contains greys only
    )
    Image.fromarray(scribbles).save(tmp_path / "rgb.png")
    Image.fromarray(scribbles).convert("P", palette=Image.Palette.ADAPTIVE).save(tmp_path / "p.png")
    Image.fromarray((scribbles[..., 0] // 9).astype(np.uint8)).save(tmp_path / "grey.png")
    for name in ("rgb.png", "p.png", "grey.png"):
        expected = read_labels(tmp_path / name, (1, 300, 40))
        actual, names, colors, notes = read_scribbles([tmp_path / name], [image], LabelOptions())
        full = np.zeros(300 * 40, np.int32)
        full[actual[0].indices] = actual[0].classes
        np.testing.assert_array_equal(full.reshape(1, 300, 40), expected.values)
        assert (names, colors, tuple(notes)) == (expected.names, expected.colors, expected.notes)


def test_normalisation_by_page_and_selected_channels_are_exact(tmp_path, small_blocks):
    planes = (
        np.stack([scene(71, 90, s)[0] * (s + 1) for s in range(4)]).reshape(2, 2, 71, 90).astype(np.uint16)
    )
    store = write_store(tmp_path / "a.zarr", planes, "czyx", names=("x", "y"))
    labels = scribbled(tmp_path / "a.png", scene(71, 90)[1], 0.03)
    reading = ReadOptions(channel="y", normalize="image", clip=(1.0, 98.0))
    options = {"features": FILTERS, "reading": reading, "labelling": LabelOptions(label_page=0)}
    pipeline.segment([store], tmp_path / "out", labels=[labels], **options)
    assert_exact(tmp_path / "out", "a", planes[1][..., None])


@pytest.mark.parametrize("trust", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_reports_of_complete_pages_equal_those_of_the_file(tmp_path, trust):
    """Materials, the guided filter, small components and poses are limited by memory, not by the file type."""
    values, phase = scene(70, 90)
    values = values.astype(np.float32)
    values[20:30, 40:60] = np.nan
    stack = np.stack([values, values[::-1]])
    store = write_store(tmp_path / "a.ome.zarr", stack, axes="zyx", unit="")
    tifffile.imwrite(tmp_path / "a.tif", stack, metadata={"axes": "ZYX"})
    tifffile.imwrite(tmp_path / "a_labels.tif", np.stack([np.where(phase, 1, 2)] * 2).astype(np.uint8))
    post = PostProcessing(1, 40, None, True)
    options = {"labels": [tmp_path / "a_labels.tif"], "features": FILTERS, "post": post}
    options |= {"materials": True, "trust": trust}
    records = [
        pipeline.segment([image], tmp_path / out, **options).images[0]
        for image, out in ((store, "blocks"), (tmp_path / "a.tif", "whole"))
    ]
    first, second = (
        {key: record.get(key) for key in ("materials", "map_fractions", "fractions", "trust")}
        for record in records
    )
    if trust:
        first["trust"].pop("seconds")
        second["trust"].pop("seconds")
    assert first == second
    labels, prob, _ = results(tmp_path / "blocks", "a", 2)
    assert same_bits(labels, tifffile.imread(tmp_path / "whole" / "a_seg.tif"))
    assert same_bits(np.ascontiguousarray(prob), tifffile.imread(tmp_path / "whole" / "a_prob.tif"))
    tables = [(tmp_path / out / "a_materials.csv").read_bytes() for out in ("blocks", "whole")]
    assert tables[0] == tables[1]


def test_min_area_above_all_components_is_noted(tmp_path):
    values, phase = scene(40, 50)
    store = write_store(tmp_path / "a.zarr", values.astype(np.uint8))
    labels = [scribbled(tmp_path / "a.png", phase, 0.05)]
    post = PostProcessing(min_area=3000)
    report = pipeline.segment([store], tmp_path / "out", labels=labels, features=FILTERS, post=post)
    note = "no connected component has min_area=3000 pixels, so min_area has no effect."
    assert report.images[0]["notes"] == [note]
