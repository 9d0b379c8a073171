"""Places for the next strokes: chosen as written out step by step, and the command around it."""

import json

import numpy as np
import pytest
import tifffile
from PIL import Image
from scipy.ndimage import distance_transform_edt

from tests.cases import cases
from vispe.cli.main import main
from vispe.errors import InputError, OptionError
from vispe.segment.features.pixel_features import FeatureConfig
from vispe.segment.live import Live, micrograph
from vispe.segment.live.suggest_file import draw_suggestions, suggest_file
from vispe.segment.live.suggestions import MOST, Suggestion, candidates, radius_for, select_greedily, suggest
from vispe.segment.pipeline import MODEL_NAME, segment

FILTERS = FeatureConfig(sigmas=(1.0, 2.0))


def picture(h=120, w=170, seed=0):
    """Dark, grey and bright bands with noise; strokes in dark and grey alone."""
    x = np.arange(w)
    level = np.where(x < w // 3, 60, np.where(x < 2 * w // 3, 120, 200))
    grey = np.rint(level + np.random.default_rng(seed).normal(0, 9, (h, w))).clip(0, 255).astype(np.uint8)
    labels = np.zeros((h, w), np.uint8)
    labels[20:24, 5:40], labels[20:24, w // 3 + 6 : w // 2] = 1, 2
    return grey, labels


def learnt(**options):
    grey, labels = picture()
    live = Live(micrograph(grey), features=FILTERS, names=("dark", "grey"), **options)
    live.update(labels)
    return live, labels


def test_places_keep_their_distance_and_say_why():
    live, labels = learnt()
    places = suggest(live, 5)
    assert len(places) == 5
    radius = radius_for(*labels.shape)
    away = distance_transform_edt(labels == 0)
    found = live.predict()
    for place in places:
        assert place.radius == radius
        assert radius <= place.y < 120 - radius
        assert radius <= place.x < 170 - radius
        assert away[place.y, place.x] > 2 * radius
        square = np.s_[place.y - radius : place.y + radius + 1, place.x - radius : place.x + radius + 1]
        assert place.uncertainty == pytest.approx(found.uncertainty[square].mean(), abs=1e-4)
        means = found.prob[(slice(None), *square)].mean((1, 2))
        assert place.classes == tuple(live.model.names[k] for k in np.argsort(-means)[:2])
        if place.uncertainty < 0.2:
            assert place.reason == f"predicted as {place.classes[0]}, but differs from the labelled pixels"
        else:
            assert place.reason == f"between {place.classes[0]} and {place.classes[1]}"
    for i, one in enumerate(places):
        for other in places[:i]:
            assert np.hypot(one.x - other.x, one.y - other.y) >= 4 * radius


def test_what_was_never_labelled_is_among_the_places():
    live, _ = learnt()
    assert any(place.x >= 2 * 170 // 3 - 4 for place in suggest(live, 3))


def test_the_choice_is_uncertainty_times_distance_one_after_the_other():
    rng = np.random.default_rng(1)
    y, x = rng.integers(0, 90, (2, 60))
    unsure, features, labelled = rng.random(60), rng.normal(size=(60, 4)), rng.normal(size=(7, 4))
    known, free, expected = list(labelled), set(range(60)), []
    while len(expected) < 8 and free:
        near = {i: min(np.linalg.norm(features[i] - one) for one in known) for i in free}
        best = max(sorted(free), key=lambda i: (unsure[i] + 0.3) * near[i])
        expected.append(best)
        known.append(features[best])
        free = {i for i in free if np.hypot(y[i] - y[best], x[i] - x[best]) >= 20}
    assert select_greedily((y, x), unsure, features, labelled, 8, 20) == expected


def test_without_labels_the_first_place_is_the_least_sure():
    rng = np.random.default_rng(2)
    y, x = rng.integers(0, 90, (2, 40))
    unsure, features = rng.random(40), rng.normal(size=(40, 3))
    order = select_greedily((y, x), unsure, features, np.zeros((0, 3)), 2, 5)
    assert order[0] == unsure.argmax()
    far = np.linalg.norm(features - features[order[0]], axis=1)
    away = np.hypot(y - y[order[0]], x - x[order[0]]) >= 5
    assert order[1] == np.where(away, (unsure + 0.3) * far, -1).argmax()


@cases("shape", [(37, 61), (64, 40)])
def test_candidates_have_data_around_and_no_label_near(shape):
    valid = np.ones(shape, bool)
    valid[5:12, 20:30] = False
    label = np.array([20 * shape[1] + 8, 21 * shape[1] + 9])
    found = candidates(valid, label, 3)
    expected = []
    for y in range(2, shape[0], 4):
        for x in range(2, shape[1], 4):
            inside = [
                (a, b)
                for a in range(y - 3, y + 4)
                for b in range(x - 3, x + 4)
                if np.hypot(a - y, b - x) <= 3
            ]
            full = all(0 <= a < shape[0] and 0 <= b < shape[1] and valid[a, b] for a, b in inside)
            clear = all(np.hypot(y - place // shape[1], x - place % shape[1]) > 6 for place in label)
            if full and clear:
                expected.append(y * shape[1] + x)
    assert found.tolist() == expected


def test_no_room_gives_no_places():
    grey = np.random.default_rng(0).integers(0, 90, (20, 24)).astype(np.uint8)
    grey[:, 12:] += 120
    labels = np.where(np.arange(24) < 12, 1, 2) * np.ones((20, 1), int)
    live = Live(micrograph(grey), features=FILTERS)
    live.update(labels)
    assert suggest(live) == []


@cases("count", [0, -1, MOST + 1, 2.5])
def test_a_count_out_of_range_is_refused(count):
    live, _ = learnt()
    with pytest.raises(OptionError, match="integer from 1 to 100"):
        suggest(live, count)


def test_a_live_segmentation_without_model_is_refused():
    live = Live(micrograph(picture()[0]), features=FILTERS)
    with pytest.raises(InputError, match="no model yet"):
        suggest(live)


def test_rings_are_drawn_where_the_places_are():
    grey = np.full((100, 160, 1), 0.5, np.float32)
    places = [Suggestion(40, 30, 6, 0, 0.5, ("a", "b"), ""), Suggestion(150, 90, 6, 0, 0.5, ("a", "b"), "")]
    found = draw_suggestions(grey, places)
    factor = 3
    assert found.shape == (300, 480, 3)
    yellow = (found == (255, 230, 0)).all(-1)
    for place in places:
        middle = factor * (place.y + 0.5), factor * (place.x + 0.5)
        y, x = np.mgrid[: found.shape[0], : found.shape[1]]
        near = np.hypot(y - middle[0], x - middle[1])
        assert yellow[(near > factor * place.radius) & (near < factor * place.radius + 6)].mean() > 0.2
        # what is inside stays as it is
        assert (found[near < factor * place.radius - 4] == 128).all()
    changed = (found != 128).any(-1)
    assert changed.any(0)[470:].any()


def files(folder):
    grey, labels = picture()
    Image.fromarray(grey).save(folder / "a.png")
    Image.fromarray(labels).save(folder / "l.png")
    return folder / "a.png", folder / "l.png"


def test_the_command_with_strokes(tmp_path, capsys):
    image, labels = files(tmp_path)
    words = [
        "--labels",
        str(labels),
        "--classes",
        "dark,grey",
        "--features",
        "filters",
        "-o",
        str(tmp_path / "out"),
    ]
    assert main(["suggest", str(image), *words, "--count", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = json.loads((tmp_path / "out" / "a_suggest.json").read_text())
    live = Live(micrograph(picture()[0]), features=FeatureConfig(), names=("dark", "grey"))
    live.update(picture()[1])
    expected = [{"number": n + 1, **place.to_dict()} for n, place in enumerate(suggest(live, 3))]
    assert found["places"] == expected
    assert found["classes"] == ["dark", "grey"]
    assert lines[0].startswith(f"1: x={expected[0]['x']} y={expected[0]['y']} radius=3 px, ")
    assert lines[-1] == f"-> {tmp_path / 'out' / 'a_suggest.png'}"
    shown = np.asarray(Image.open(tmp_path / "out" / "a_suggest.png"))
    assert shown.shape == (360, 510, 3)
    assert main(["suggest", str(image), *words]) == 2
    assert "exist; add --force" in capsys.readouterr().err
    assert main(["suggest", str(image), *words, "--force", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["places"][:3] == expected


def test_the_command_with_a_model_of_another_image(tmp_path, capsys):
    image, labels = files(tmp_path)
    segment([image], tmp_path / "model", labels=[labels], features=FILTERS)
    other = picture(90, 140, seed=5)[0]
    tifffile.imwrite(tmp_path / "s.tif", np.stack([other] * 3), imagej=True, metadata={"axes": "ZYX"})
    model = tmp_path / "model" / MODEL_NAME
    assert main(["suggest", str(tmp_path / "s.tif"), "--model", str(model), "-o", str(tmp_path / "out")]) == 0
    assert "on page 1 of 3" in capsys.readouterr().err
    found = json.loads((tmp_path / "out" / "s_suggest.json").read_text())
    assert {place["page"] for place in found["places"]} == {1}
    live = Live(micrograph(np.stack([other] * 3), "ZYX"), page=1, model=model)
    assert [place["x"] for place in found["places"]] == [place.x for place in suggest(live)]


def test_bad_input_is_one_sentence(tmp_path):
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
