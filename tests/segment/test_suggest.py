"""Suggested positions for scribbles: selection against explicit loops, and the command."""

import json

import numpy as np
import pytest
import tifffile
from PIL import Image
from scipy.ndimage import distance_transform_edt

from tests.cases import cases
from vispe.cli.main import main
from vispe.errors import InputError, OptionError
from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.live import Live, micrograph
from vispe.segment.live.suggest_file import draw_suggestions, suggest_file
from vispe.segment.live.suggestions import MOST, Suggestion, candidates, radius_for, select_greedily, suggest
from vispe.segment.pipeline import MODEL_NAME, segment
from vispe.segment.types import ReadOptions

FILTERS = FeatureConfig(sigmas=(1.0, 2.0))


def labelled_image(h=120, w=170, seed=0):
    """Make noisy dark, grey and bright bands; only dark and grey have scribbles."""
    x = np.arange(w)
    level = np.where(x < w // 3, 60, np.where(x < 2 * w // 3, 120, 200))
    grey = np.rint(level + np.random.default_rng(seed).normal(0, 9, (h, w))).clip(0, 255).astype(np.uint8)
    labels = np.zeros((h, w), np.uint8)
    labels[20:24, 5:40], labels[20:24, w // 3 + 6 : w // 2] = 1, 2
    return grey, labels


def make_live(**options):
    grey, labels = labelled_image()
    live = Live(micrograph(grey), features=FILTERS, names=("dark", "grey"), **options)
    live.update(labels)
    return live, labels


def test_suggestions_are_distant_and_have_a_reason():
    live, labels = make_live()
    positions = suggest(live, 5)
    assert len(positions) == 5
    radius = radius_for(*labels.shape)
    distance = distance_transform_edt(labels == 0)
    actual = live.predict()
    for position in positions:
        assert position.radius == radius
        assert radius <= position.y < 120 - radius
        assert radius <= position.x < 170 - radius
        assert distance[position.y, position.x] > 2 * radius
        square = np.s_[
            position.y - radius : position.y + radius + 1, position.x - radius : position.x + radius + 1
        ]
        assert position.uncertainty == pytest.approx(actual.uncertainty[square].mean(), abs=1e-4)
        means = actual.prob[(slice(None), *square)].mean((1, 2))
        assert position.classes == tuple(live.model.names[k] for k in np.argsort(-means)[:2])
        if position.uncertainty < 0.2:
            assert (
                position.reason == f"predicted as {position.classes[0]}, but differs from the labelled pixels"
            )
        else:
            assert position.reason == f"between {position.classes[0]} and {position.classes[1]}"
    for i, first in enumerate(positions):
        for second in positions[:i]:
            assert np.hypot(first.x - second.x, first.y - second.y) >= 4 * radius


def test_suggestions_include_unlabelled_regions():
    live, _ = make_live()
    assert any(position.x >= 2 * 170 // 3 - 4 for position in suggest(live, 3))


def test_greedy_selection_maximises_uncertainty_times_distance():
    rng = np.random.default_rng(1)
    y, x = rng.integers(0, 90, (2, 60))
    uncertainty, features, labelled = rng.random(60), rng.normal(size=(60, 4)), rng.normal(size=(7, 4))
    selected, remaining, expected = list(labelled), set(range(60)), []
    while len(expected) < 8 and remaining:
        distances = {i: min(np.linalg.norm(features[i] - feature) for feature in selected) for i in remaining}
        best = max(sorted(remaining), key=lambda i: (uncertainty[i] + 0.3) * distances[i])
        expected.append(best)
        selected.append(features[best])
        remaining = {i for i in remaining if np.hypot(y[i] - y[best], x[i] - x[best]) >= 20}
    assert select_greedily((y, x), uncertainty, features, labelled, 8, 20) == expected


def test_first_suggestion_without_labels_is_the_most_uncertain():
    rng = np.random.default_rng(2)
    y, x = rng.integers(0, 90, (2, 40))
    uncertainty, features = rng.random(40), rng.normal(size=(40, 3))
    order = select_greedily((y, x), uncertainty, features, np.zeros((0, 3)), 2, 5)
    assert order[0] == uncertainty.argmax()
    feature_distance = np.linalg.norm(features - features[order[0]], axis=1)
    is_distant = np.hypot(y - y[order[0]], x - x[order[0]]) >= 5
    assert order[1] == np.where(is_distant, (uncertainty + 0.3) * feature_distance, -1).argmax()


@cases("shape", [(37, 61), (64, 40)])
def test_candidates_are_valid_and_distant_from_labels(shape):
    valid = np.ones(shape, bool)
    valid[5:12, 20:30] = False
    label = np.array([20 * shape[1] + 8, 21 * shape[1] + 9])
    actual = candidates(valid, label, 3)
    expected = []
    for y in range(2, shape[0], 4):
        for x in range(2, shape[1], 4):
            inside = [
                (a, b)
                for a in range(y - 3, y + 4)
                for b in range(x - 3, x + 4)
                if np.hypot(a - y, b - x) <= 3
            ]
            is_valid = all(0 <= a < shape[0] and 0 <= b < shape[1] and valid[a, b] for a, b in inside)
            is_distant = all(
                np.hypot(y - position // shape[1], x - position % shape[1]) > 6 for position in label
            )
            if is_valid and is_distant:
                expected.append(y * shape[1] + x)
    assert actual.tolist() == expected


def test_small_images_have_no_suggestions():
    grey = np.random.default_rng(0).integers(0, 90, (20, 24)).astype(np.uint8)
    grey[:, 12:] += 120
    labels = np.where(np.arange(24) < 12, 1, 2) * np.ones((20, 1), int)
    live = Live(micrograph(grey), features=FILTERS)
    live.update(labels)
    assert suggest(live) == []


@cases("count", [0, -1, MOST + 1, 2.5])
def test_counts_out_of_range_raise(count):
    live, _ = make_live()
    with pytest.raises(OptionError, match="integer from 1 to 100"):
        suggest(live, count)


def test_suggestions_without_a_model_raise():
    live = Live(micrograph(labelled_image()[0]), features=FILTERS)
    with pytest.raises(InputError, match="no model yet"):
        suggest(live)


def test_rings_are_drawn_at_the_suggested_positions():
    grey = np.full((100, 160, 1), 0.5, np.float32)
    positions = [
        Suggestion(40, 30, 6, 0, 0.5, ("a", "b"), ""),
        Suggestion(150, 90, 6, 0, 0.5, ("a", "b"), ""),
    ]
    actual = draw_suggestions(grey, positions)
    factor = 3
    assert actual.shape == (300, 480, 3)
    yellow = (actual == (255, 230, 0)).all(-1)
    for position in positions:
        centre = factor * (position.y + 0.5), factor * (position.x + 0.5)
        y, x = np.mgrid[: actual.shape[0], : actual.shape[1]]
        distances = np.hypot(y - centre[0], x - centre[1])
        assert (
            yellow[(distances > factor * position.radius) & (distances < factor * position.radius + 6)].mean()
            > 0.2
        )
        # the inside of a ring is unchanged
        assert (actual[distances < factor * position.radius - 4] == 128).all()
    changed = (actual != 128).any(-1)
    assert changed.any(0)[470:].any()


def files(folder):
    grey, labels = labelled_image()
    Image.fromarray(grey).save(folder / "a.png")
    Image.fromarray(labels).save(folder / "l.png")
    return folder / "a.png", folder / "l.png"


def test_reading_options_without_effect_raise(tmp_path):
    image, labels = files(tmp_path)
    with pytest.raises(InputError, match="`scene` has no effect for this format"):
        suggest_file(image, tmp_path / "out", labels=labels, reading=ReadOptions(scene="1"))


def test_suggest_command_with_labels(tmp_path, capsys):
    image, labels = files(tmp_path)
    options = [
        "--labels",
        str(labels),
        "--classes",
        "dark,grey",
        "--features",
        "filters",
        "-o",
        str(tmp_path / "out"),
    ]
    assert main(["suggest", str(image), *options, "--count", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    actual = json.loads((tmp_path / "out" / "a_suggest.json").read_text())
    live = Live(micrograph(labelled_image()[0]), features=FeatureConfig(), names=("dark", "grey"))
    live.update(labelled_image()[1])
    expected = [{"number": n + 1, **position.to_dict()} for n, position in enumerate(suggest(live, 3))]
    assert actual["places"] == expected
    assert actual["classes"] == ["dark", "grey"]
    assert lines[0].startswith(f"1: x={expected[0]['x']} y={expected[0]['y']} radius=3 px, ")
    assert lines[-1] == f"-> {tmp_path / 'out' / 'a_suggest.png'}"
    figure = np.asarray(Image.open(tmp_path / "out" / "a_suggest.png"))
    assert figure.shape == (360, 510, 3)
    assert main(["suggest", str(image), *options]) == 2
    assert "exist; add --force" in capsys.readouterr().err
    assert main(["suggest", str(image), *options, "--force", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["places"][:3] == expected


def test_suggest_command_with_a_model_of_another_image(tmp_path, capsys):
    image, labels = files(tmp_path)
    segment([image], tmp_path / "model", labels=[labels], features=FILTERS)
    grey = labelled_image(90, 140, seed=5)[0]
    tifffile.imwrite(tmp_path / "s.tif", np.stack([grey] * 3), imagej=True, metadata={"axes": "ZYX"})
    model = tmp_path / "model" / MODEL_NAME
    assert main(["suggest", str(tmp_path / "s.tif"), "--model", str(model), "-o", str(tmp_path / "out")]) == 0
    assert "on page 1 of 3" in capsys.readouterr().err
    actual = json.loads((tmp_path / "out" / "s_suggest.json").read_text())
    assert {position["page"] for position in actual["places"]} == {1}
    live = Live(micrograph(np.stack([grey] * 3), "ZYX"), page=1, model=model)
    assert [position["x"] for position in actual["places"]] == [position.x for position in suggest(live)]


def test_pixel_sizes_unlike_the_training_images_are_noted(tmp_path):
    grey, labels = labelled_image()
    for name, microns in (("a", 0.2), ("b", 1.0)):
        size = {"resolution": (1e4 / microns, 1e4 / microns), "resolutionunit": "CENTIMETER"}
        tifffile.imwrite(tmp_path / f"{name}.tif", grey, **size)
    Image.fromarray(labels.astype(np.uint8)).save(tmp_path / "a_labels.png")
    segment(tmp_path / "a.tif", tmp_path / "out", labels=tmp_path / "a_labels.png", features=FeatureConfig())
    model = tmp_path / "out" / MODEL_NAME
    notes = suggest_file(tmp_path / "b.tif", tmp_path / "next", model=model)["notes"]
    assert [n for n in notes if "b.tif has pixels of 1 microns, the training images of 0.2 microns" in n]


def test_invalid_inputs_raise(tmp_path):
    image, labels = files(tmp_path)
    out = tmp_path / "out"
    with pytest.raises(OptionError, match="one of model and labels is required, got neither"):
        suggest_file(image, out)
    segment([image], tmp_path / "model", labels=[labels], features=FILTERS)
    model = tmp_path / "model" / MODEL_NAME
    with pytest.raises(OptionError, match="one of model and labels is required, got both"):
        suggest_file(image, out, model=model, labels=labels)
    with pytest.raises(OptionError, match="classifier has no effect with a model"):
        suggest_file(image, out, model=model, classifier="forest")
    with pytest.raises(InputError, match="page 7 does not exist in"):
        suggest_file(image, out, labels=labels, page=7)
    with pytest.raises(InputError, match=r"none\.png does not exist"):
        suggest_file(image, out, labels=tmp_path / "none.png")
    with pytest.raises(InputError, match=r"none\.png"):
        suggest_file(tmp_path / "none.png", out, labels=labels)
    Image.fromarray(np.zeros((9, 9), np.uint8)).save(tmp_path / "small.png")
    with pytest.raises(InputError, match="9 x 9"):
        suggest_file(image, out, labels=tmp_path / "small.png")
    assert not out.exists()
