"""The evaluation distinguishes a good retrofit, one that still encodes position, and one that lost its features."""

import json
import re
from html import escape

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from vispe.cli.main import main
from vispe.errors import InputError, OptionError, ShapeError
from vispe.evaluate.probe.group_averages import effective_rank
from vispe.images.textures import voronoi
from vispe.segment.metrics import miou
from vispe.train.evaluate.before_after import evaluate
from vispe.train.evaluate.criteria import criteria, tone, verdict
from vispe.train.evaluate.html_report import evaluation_page, to_text
from vispe.train.evaluate.mask_scores import FilterFeatures, score_masks
from vispe.train.evaluate.probe_images import CentreWindows, Noise, Settings, Textures, probe_step
from vispe.train.retrofit.config import Retrofit, Stage, Student, Teacher
from vispe.train.retrofit.student import load_teacher, make_student

PATCH, WIDTH, SIDE = 4, 40, 48
HALF = torch.full((3, 1, 1), 0.5)
SETTINGS = Settings(PATCH, SIDE, HALF, HALF)
CHANNELS = (1, 7)


def content(images):
    """Features of the pixels of each patch alone, (b, 40, h, w); nothing in the channels of `CHANNELS`."""
    weight = torch.randn(WIDTH, 3 * PATCH**2, generator=torch.Generator().manual_seed(3)) / 7
    tokens = torch.nn.functional.pixel_unshuffle(images, PATCH)
    weight[list(CHANNELS)] = 0
    return torch.einsum("dk,bkhw->bdhw", weight, tokens)


def biased(images):
    """The same, with row and column written into two channels, and a little of both into a third."""
    maps = content(images)
    h, w = maps.shape[-2:]
    row, col = torch.linspace(-1, 1, h)[:, None].expand(h, w), torch.linspace(-1, 1, w).expand(h, w)
    maps[:, 1], maps[:, 7] = 6 * row, 6 * col
    maps[:, 20] += 1.2 * row + 0.6 * col
    return maps


def expected_snr(n_images):
    """Signal over noise of the mean map of `biased` over images of uniform noise: it grows with their number alone."""
    noise = torch.rand(3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    pattern = (biased(noise[None]) - content(noise[None]))[0].double()  # what depends on the position alone
    signal = pattern.var((1, 2), unbiased=False).sum()
    pixel = 1 / 12 / HALF[0].item() ** 2  # variance of a pixel, normalised
    weight = torch.randn(WIDTH, 3 * PATCH**2, generator=torch.Generator().manual_seed(3)) / 7
    weight[list(CHANNELS)] = 0
    free = 1 - 1 / (SIDE // PATCH) ** 2  # the mean of each map is taken off
    return float(1 + n_images * signal / (pixel * free * weight.double().square().sum()))


def collapsed(images):
    """Return features that are nearly collapsed to one direction."""
    maps = content(images)
    return 0.02 * maps + maps.mean((1, 2, 3), keepdim=True) + 3 * torch.ones(WIDTH)[:, None, None]


@pytest.fixture(scope="module")
def samples():
    """Five images of 56 x 61 px with their labels."""
    textures = [voronoi(k, grain=18.0).render(61) for k in range(5)]
    images = [(one.expand(3, -1, -1)[:, :56] - 0.5) / 0.5 for one, _ in textures]
    return images, [labels.numpy()[:56] + 1 for _, labels in textures]


@pytest.fixture(scope="module")
def report(samples):
    images, truths = samples
    return evaluate(
        biased,
        content,
        images,
        channels=CHANNELS,
        truths=truths,
        n_classes=2,
        classes=["grey <phase>", "white"],
        settings=SETTINGS,
        noise=6,
        textures=2,
        subject="toy",
    )


def test_a_good_retrofit_has_a_good_verdict(report):
    assert report.before.readable > 0.9
    assert report.after.readable < 0.05
    assert report.before.fingerprint.snr == pytest.approx(expected_snr(n_images=6), rel=0.05)
    assert report.after.fingerprint.snr < 1.5
    by = {c.key: c for c in report.criteria}
    assert by["blanked"].value == 2 / WIDTH
    assert {k for k, c in by.items() if not c.met} <= {"corner"}  # pixels alone are worse than filters
    assert tone(report.criteria[:-1]) == "good"
    assert report.verdict.startswith(f"Position was removed (held-out R² {report.before.readable:.2f} before")


def test_numbers_of_every_image_are_what_they_are_called(report, samples):
    images, _ = samples
    assert report.cosine.shape == report.cosine_blanked.shape == (5,)
    for k, image in enumerate(images):
        window = image[None, :, 4:52, 6:54]  # the middle 48 x 48 px of 56 x 61, the odd pixel right
        teacher_map, student_map = biased(window)[0].double(), content(window)[0].double()
        target = teacher_map.clone()
        target[list(CHANNELS)] = 0
        for actual, other in ((report.cosine, teacher_map), (report.cosine_blanked, target)):
            expected = torch.cosine_similarity(student_map, other, dim=0).mean()
            assert actual[k] == pytest.approx(float(expected), abs=1e-9)
        assert report.before.rank[k] == pytest.approx(effective_rank(teacher_map))
        assert report.blanked.rank[k] == pytest.approx(effective_rank(target))
        assert report.after.rank[k] == pytest.approx(effective_rank(student_map))


def test_blanking_alone_leaves_what_is_in_other_channels(report):
    assert report.blanked.readable > report.after.readable + 0.2


def test_rotation_is_measured_before_and_after(report):
    for side in (report.before, report.after):
        assert len(side.rotation.result.find("D4", "error").values) == 5
    first, second = (s.rotation.result.find("D4", "error").values for s in (report.before, report.after))
    assert (first > 0).all()
    assert (second > 0).all()  # the patch kernel


def test_json_has_every_number_and_no_nan(report, tmp_path):
    path = report.write_json(tmp_path / "r.json")
    actual = json.loads(path.read_text())
    assert actual["verdict"] == report.verdict
    assert actual["blanked_share"] == 0.05
    assert actual["cosine_blanked"] == report.cosine_blanked.tolist()
    for side in ("before", "blanked", "after"):
        assert set(actual[side]["probe"]) == {"noise", "textures", "images"}
        assert len(actual[side]["probe"]["images"]["rows"][0]["r2_heldout"]["per_image"]) == 5
    for key in ("own", "corner", "others"):
        assert set(actual["segmentation"][key]) == {"before", "after", "filters"}
        assert len(actual["segmentation"][key]["after"]["per_image"]) == 5
    with pytest.raises(InputError, match="exists"):
        report.write_json(path)


def test_the_html_report_is_complete_and_self_contained(report):
    html = evaluation_page(report).html()
    assert f"{escape(report.verdict)}." in html
    for title in (
        "Decodable position",
        "Fixed pattern of the image frame",
        "Rotations and reflections",
        "Similarity to the teacher",
        "Linear segmentation",
    ):
        assert f"<h2>{title}</h2>" in html
    assert html.count("<img") == html.count("data:image/png;base64,") == 4
    assert not re.search(r"(src|href)=\"http", html)
    assert "grey &lt;phase&gt;" in html
    assert to_text(report).splitlines()[0] == f"{report.verdict}."
    assert html.count(">not met<") == sum(not c.met for c in report.criteria)
    assert html.count(">met<") == sum(c.met for c in report.criteria)


@pytest.mark.parametrize(
    ("after", "words", "colour"),
    [
        (biased, "Position can still be decoded", "bad"),
        (collapsed, "but the features degraded: cosine to the target", "mild"),
    ],
)
def test_a_bad_retrofit_has_no_good_verdict(after, words, colour):
    actual = evaluate(
        biased,
        after,
        channels=CHANNELS,
        settings=SETTINGS,
        noise=2,
        textures=2,
        rotation=False,
        seed=2,
    )
    assert words in actual.verdict
    assert tone(actual.criteria) == colour
    assert actual.image_names == ("texture 0", "texture 1")
    assert any("synthetic textures" in note for note in actual.notes)
    html = evaluation_page(actual).html()
    assert "Linear segmentation" not in html
    assert "Rotations and reflections" not in html


def test_the_verdict_of_a_model_without_bias():
    def actual(**changed):
        numbers = {"before": 0.9, "after": 0.0, "blanked": 0.01, "cosine": 0.95, "rank": 0.9, "corner": None}
        return criteria(**numbers | changed)

    assert verdict(actual(before=0.2)).startswith(
        "The teacher has little positional bias (held-out R² 0.20 before"
    )
    assert tone(actual(before=0.2)) == "mild"
    assert verdict(actual(before=float("nan"))).startswith("No verdict")
    assert tone(actual(after=float("nan"))) == "plain"
    assert "12.0 % of the channels ablated" in verdict(actual(blanked=0.12))
    corner = {"after": np.array([0.1, np.nan, 0.2]), "filters": np.array([0.05, 0.3, 0.05])}
    (last,) = [c for c in actual(corner=corner) if c.key == "corner"]
    assert last.value == pytest.approx(0.1)
    assert not last.met
    assert "corner scribbles cost 0.10 mIoU more than with filters" in verdict(actual(corner=corner))


def test_segmentation_blames_position_for_what_corners_cost_beyond_content(samples):
    images, truths = samples

    def known(images):
        """The class itself, as a feature of every pixel."""
        return images[:, 3:]

    def positional(images):
        """The class, hidden by the position: it holds in the corner of the scribbles alone."""
        h, w = images.shape[-2:]
        position = torch.linspace(-1, 1, h)[:, None] + torch.linspace(-1, 1, w)
        return torch.stack([position.expand(len(images), h, w), images[:, 3] + 4 * position], 1)

    stacked = [
        torch.cat([x, torch.from_numpy(t)[None].float() - 1]) for x, t in zip(images, truths, strict=True)
    ]
    actual = score_masks({"known": known, "positional": positional}, stacked, truths, 2, budget=30, seed=1)
    assert actual.own["known"].tolist() == [1.0] * 5
    assert actual.corner["known"].tolist() == [0.0] * 5
    assert actual.others["known"].tolist() == [1.0] * 5
    assert actual.pooled == pytest.approx({"known": 1.0, "positional": actual.pooled["positional"]})
    assert (actual.own["positional"] <= 1).all()
    repeated = score_masks({"positional": positional}, stacked, truths, 2, budget=30, seed=1)
    for key in ("own", "corner", "others"):  # the same scribbles whatever else is scored
        assert getattr(repeated, key)["positional"].tolist() == getattr(actual, key)["positional"].tolist()
    single = score_masks({"known": known}, stacked[:1], truths[:1], 2)
    assert single.others == {}
    assert single.pooled == {}


def test_filters_get_the_original_images():
    from vispe.segment.features.filters.filters2d import Filters

    grey = torch.rand(1, 30, 41)
    maps = FilterFeatures(HALF, HALF)(((grey.expand(3, -1, -1) - 0.5) / 0.5)[None])
    expected = Filters()(grey[0].numpy()[..., None])
    assert maps.shape == (1, 26, 30, 41)
    np.testing.assert_allclose(maps[0].permute(1, 2, 0).numpy(), expected, atol=2e-6)


def test_pooled_miou():
    assert miou(np.array([[3, 1], [0, 4]])) == pytest.approx((3 / 4 + 4 / 5) / 2)
    assert miou(np.array([[3, 0, 0], [1, 0, 0], [0, 0, 0]])) == pytest.approx((3 / 4 + 0) / 2)
    assert np.isnan(miou(np.zeros((2, 2))))


def test_images_are_the_same_whenever_they_are_made():
    for kind in (Noise, Textures):
        images = kind(4, 24, SETTINGS, 5)
        assert len(images) == 4
        assert images[2].shape == (3, 24, 24)
        assert torch.equal(kind(4, 24, SETTINGS, 5)[2], images[2])
        assert torch.equal(images[1:][1], images[2])
        assert not torch.equal(images[1], images[2])
        assert not torch.equal(kind(4, 24, SETTINGS, 6)[1], images[1])
        assert float(images[3].min()) >= -1
        assert float(images[3].max()) <= 1
        assert len(list(images)) == 4
    windows = CentreWindows([np.arange(35).reshape(5, 7)], 2, 5)
    assert windows[0].tolist() == [[1, 2, 3, 4], [8, 9, 10, 11], [15, 16, 17, 18], [22, 23, 24, 25]]
    assert windows.notes
    assert [probe_step(n) for n in (4, 12, 16, 37, 74)] == [2, 2, 2, 6, 6]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"noise": 1}, OptionError, "noise needs an integer of 2 or more"),
        ({"channels": [40]}, OptionError, r"channels must be 0 to 39, got \[40\]"),
        ({"after": lambda x: content(x)[:, :8]}, ShapeError, "must return maps of equal shape"),
        ({"settings": None}, OptionError, "Set `settings`"),
        (
            {"images": [torch.zeros(3, 48, 48)], "image_names": ["a", "b"]},
            InputError,
            r"names must have one entry per image \(1\), got 2",
        ),
        ({"images": [torch.zeros(3, 48, 48)], "truths": [np.ones((48, 48), int)]}, OptionError, "n_classes"),
    ],
)
def test_errors(change, error, words):
    numbers = {"before": biased, "after": content, "settings": SETTINGS, "noise": 3, "textures": 1} | change
    with pytest.raises(error, match=words):
        evaluate(**numbers)


@pytest.fixture(scope="module")
def retrofitted_folder(tmp_path_factory):
    """Return a folder of a finished retrofit, and two micrographs of 40 x 48 px with masks."""
    root = tmp_path_factory.mktemp("retrofit")
    options = {"embed_dim": 24, "depth": 1, "num_heads": 2, "patch_size": 8, "img_size": 32}
    config = Retrofit(
        teacher=Teacher("vit_tiny_patch16_224", weights="random", options=options),
        student=Student(pos_embed="alibi2d"),
        stages=[Stage(img_size=32, steps=1), Stage(img_size=40, steps=1)],
        data=[{"synthetic": 1}],
        out=str(root),
    )
    teacher = load_teacher(config.teacher, seed=config.seed)
    student = make_student(teacher, config.student, seed=config.seed)
    save_file({k: v.contiguous() for k, v in student.state_dict().items()}, root / "student.safetensors")
    (root / "card.json").write_text(json.dumps({"config": config.to_dict(), "blanked": [3]}))
    for name in ("images", "masks"):
        (root / name).mkdir()
    for k in range(2):
        image, labels = voronoi(k, grain=12.0).render(48)
        grey = (image[0].clamp(0, 1).numpy() * 255).astype(np.uint8)[:40]
        Image.fromarray(grey).save(root / "images" / f"s{k}.png")
        Image.fromarray(labels.numpy().astype(np.uint8)[:40]).save(root / "masks" / f"s{k}.png")
    return root


def test_the_command_evaluates_a_finished_retrofit(retrofitted_folder, tmp_path, capsys):
    words = ["retrofit", "evaluate", str(retrofitted_folder), "--images", str(retrofitted_folder / "images")]
    words += [
        "--masks",
        str(retrofitted_folder / "masks"),
        "--classes",
        "matrix,pore",
        "-o",
        str(tmp_path / "r"),
    ]
    words += ["--noise", "2", "--textures", "1", "--budget", "20", "--no-rotation"]
    assert main(words) == 0
    output = capsys.readouterr().out
    assert "decodable position after (held-out R²)" in output
    actual = json.loads((tmp_path / "r" / "report.json").read_text())
    assert actual["settings"]["size"] == 40
    assert actual["channels"] == [3]
    assert actual["classes"] == ["matrix", "pore"]
    assert actual["images"] == ["s0.png", "s1.png"]
    assert actual["before"]["rotation"] is None
    assert (tmp_path / "r" / "report.html").read_text().startswith("<!doctype html>")
    assert main(words) == 2
    refusal = capsys.readouterr().err
    assert "exist; add --force to overwrite them" in refusal
    assert "report.html" in refusal
    assert "report.json" in refusal
    assert main(["retrofit", "evaluate", str(tmp_path / "r")]) == 2
    assert "must contain a finished retrofit" in capsys.readouterr().err
    assert main(["retrofit", "evaluate", str(retrofitted_folder), "--masks", "a.png"]) == 2
    assert "--masks needs --images, got none" in capsys.readouterr().err
    for option, value in (("--zero", "ignore"), ("--classes", "a,b"), ("--budget", "7")):
        assert main(["retrofit", "evaluate", str(retrofitted_folder), option, value]) == 2
        assert f"{option} has no effect without --masks" in capsys.readouterr().err
    assert main(["retrofit", "evaluate", str(retrofitted_folder), "--img-size", "0"]) == 2
    assert "--img-size needs an integer above 0, got --img-size 0" in capsys.readouterr().err
    assert main(["retrofit", "evaluate", str(retrofitted_folder), "--img-size", "37"]) == 2
    assert "size must be a multiple of 8 for the teacher, got 37" in capsys.readouterr().err
