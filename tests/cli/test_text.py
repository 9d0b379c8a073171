"""`vispe segment --text` end to end, on a model with weights set by hand."""

import json

import numpy as np
import pytest
from PIL import Image

from tests.segment.text.common import planted
from vispe.cli.main import main
from vispe.segment.model.model_file import load_model
from vispe.segment.text.config import TextConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return planted(tmp_path_factory.mktemp("planted"))


@pytest.fixture
def image_files(tmp_path):
    """Return an image file with a bright band on a dark background, its mask file and its mask."""
    truth = np.zeros((50, 69), np.uint8)
    truth[:, 23:55] = 1  # one column is added in front, so patches end at 23 and 55
    Image.fromarray(np.where(truth, 190, 40).astype(np.uint8)).save(tmp_path / "cells.png")
    Image.fromarray(truth).save(tmp_path / "truth.png")
    return tmp_path / "cells.png", tmp_path / "truth.png", truth


def run(*words):
    return main([str(word) for word in words])


@pytest.mark.parametrize("readout", ["naclip", "clearclip", "maskclip", "sclip", "vanilla"])
def test_texts_segment_the_matching_regions(folder, image_files, tmp_path, capsys, readout):
    path, masks, truth = image_files
    if readout in ("clearclip", "vanilla"):
        readout += "(residual=true)"  # queries were planted as zero: attention is the mean of the page
    code = run(
        "segment", path, "--text", "dark", "bright", "--model", f"local-dir:{folder}", "--readout", readout,
        "--truth", masks, "--json", "-o", tmp_path / "out",
    )  # fmt: skip
    messages = capsys.readouterr()
    assert code == 0, messages.err
    assert "text prompts are unreliable on micrographs" in messages.err
    report = json.loads(messages.out)
    labels = np.asarray(Image.open(tmp_path / "out" / "cells_seg.png"))
    np.testing.assert_array_equal(labels, truth + 1)
    assert report["images"][0]["scores"]["miou"] == 1.0
    assert report["classifier"] == "text"
    assert report["classes"] == ["dark", "bright"]
    assert report["features"]["readout"] == readout
    assert report["training"]["prompts"] == {"dark": ["dark"], "bright": ["bright"]}
    assert report["training"]["readout"]["name"] == readout.partition("(")[0]
    assert report["features"]["fingerprint"]


def test_a_single_text_has_a_background(folder, image_files, tmp_path, capsys):
    path, _, truth = image_files
    word = ("--model", f"local-dir:{folder}", "-o", tmp_path / "out")
    assert run("segment", path, "--text", "bright", *word) == 0  # the background has the word 'dark' in it
    actual = np.asarray(Image.open(tmp_path / "out" / "cells_seg.png"))
    np.testing.assert_array_equal(actual, 2 - truth)
    assert "bright 46.4 %, background 53.6 %" in capsys.readouterr().out
    assert run("segment", path, "--text", "bright", "--background", "none", *word, "--force") == 2
    assert "text needs 2 to 255 classes, got 1 (bright)" in capsys.readouterr().err
    assert run("segment", path, "--text", "bright", "--background", "dark ground", *word, "--force") == 0
    np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / "out" / "cells_seg.png")), actual)


def test_apply_writes_identical_files(folder, image_files, tmp_path, capsys):
    path, _, _ = image_files
    grey = np.asarray(Image.open(path)).astype(np.float32)
    noise = np.random.default_rng(0).normal(0, 60, grey.shape)
    Image.fromarray(np.clip(grey + noise, 0, 255).astype(np.uint8)).save(path)
    code = run(
        "segment", path, "--text", "dark,bright", "--model", f"local-dir:{folder}", "--templates",
        "a micrograph of {},{}", "--pos-embed", "alibi2d", "--tile", "24", "-o", tmp_path / "one",
    )  # fmt: skip
    assert code == 0
    model = load_model(tmp_path / "one" / "model.vispe")
    assert isinstance(model.features, TextConfig)
    assert model.channels is None
    assert model.notes["templates"] == ["a micrograph of {}", "{}"]
    assert (model.features.pos_embed, model.features.tile) == ("alibi2d", 24)
    assert run("apply", tmp_path / "one" / "model.vispe", path, "-o", tmp_path / "two") == 0
    for name in ("cells_seg.png", "cells_prob.tif", "cells_uncertainty.png", "cells_overlay.png"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
    colour = np.repeat(np.asarray(Image.open(path))[..., None], 3, axis=2)
    Image.fromarray(colour).save(tmp_path / "colour.png")
    assert (
        run("apply", tmp_path / "one" / "model.vispe", tmp_path / "colour.png", "-o", tmp_path / "three") == 0
    )
    np.testing.assert_array_equal(
        np.asarray(Image.open(tmp_path / "three" / "colour_seg.png")),
        np.asarray(Image.open(tmp_path / "one" / "cells_seg.png")),
    )
    capsys.readouterr()
    words = ("--weights", tmp_path / "nothing.pt", "-o", tmp_path / "x")
    assert run("apply", tmp_path / "one" / "model.vispe", path, *words) == 2
    assert f"weights must be a checkpoint file, got {tmp_path / 'nothing.pt'}" in capsys.readouterr().err


def test_a_saved_text_model_can_be_evaluated_under_rotation(folder, image_files, tmp_path):
    import torch

    from vispe.evaluate.rotation import SavedSegmenter

    path, _, truth = image_files
    words = ("--text", "dark", "bright", "--model", f"local-dir:{folder}", "-o", tmp_path / "out")
    assert run("segment", path, *words) == 0
    segmenter = SavedSegmenter(tmp_path / "out" / "model.vispe", device="cpu")
    assert segmenter.channels == 3
    image = torch.from_numpy(truth.T.astype(np.float32)).expand(3, -1, -1)
    np.testing.assert_array_equal(segmenter(image), truth.T + 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--text"], "text needs 2 to 255 classes, got 0 (none)"),
        (
            ["--text", "a", "b", "--labels", "x.png"],
            "exactly one of labels, cluster and text is required, got labels and text",
        ),
        (
            ["--text", "a", "b", "--cluster", "3"],
            "exactly one of labels, cluster and text is required, got cluster and text",
        ),
        (["--text", "a", "b", "--classes", "c,d"], "--classes ['c', 'd'] has no effect on text"),
        (["--text", "a", "b", "--features", "filters"], "--features filters has no effect on text"),
        (["--text", "a", "b", "--classifier", "forest"], "--classifier forest has no effect on text"),
        (["--cluster", "3", "--readout", "naclip"], "--readout naclip has no effect without --text"),
        (["--text", "a", "b", "--readout", "nacl"], "readout='nacl' is not one of naclip, clearclip, sclip"),
        (["--text", "a", "b", "--model", "resnet"], "open_clip has no model 'resnet'"),
        (["--text", "a", "b", "--model", "vispe_micro"], "open_clip has no model 'vispe_micro'"),
        ([], "exactly one of labels, cluster and text is required, got none of them"),
    ],
)
def test_conflicting_options_raise(image_files, tmp_path, capsys, words, message):
    path, _, _ = image_files
    assert run("segment", path, *words, "-o", tmp_path / "out") == 2
    messages = capsys.readouterr().err
    assert message in messages
    assert messages.startswith("vispe: ")
    assert messages.count("\n") == 1
    assert not (tmp_path / "out" / "model.vispe").exists()


def test_images_after_the_texts_raise(capsys, tmp_path):
    assert run("segment", "--text", "a", "b", "cells.png", "-o", tmp_path) == 2
    assert "segment: missing required argument IMAGES" in capsys.readouterr().err


def test_help_warns_that_texts_are_unreliable(capsys):
    assert run("segment", "--help") == 0
    messages = " ".join(capsys.readouterr().out.split())
    assert "unreliable on micrographs" in messages
    assert "--text matrix precipitate" in messages


def test_random_weights_give_a_warning(folder, image_files, tmp_path, capsys):
    path, _, _ = image_files
    words = ["--text", "a", "b", "--model", f"local-dir:{folder}", "--weights", "random", "--seed", "3"]
    assert run("segment", path, *words, "-o", tmp_path / "one") == 0
    assert "has random weights: the classes are meaningless" in capsys.readouterr().err
    assert run("apply", tmp_path / "one" / "model.vispe", path, "-o", tmp_path / "two") == 0
    assert (tmp_path / "one" / "cells_prob.tif").read_bytes() == (
        tmp_path / "two" / "cells_prob.tif"
    ).read_bytes()


def test_text_takes_values_up_to_the_next_option():
    from vispe.cli.argv import normalize_argv

    words = ["a.png", "--text", "dark phase", "b,c", "-o", "out", "--text", "--seed", "3", "d.png"]
    expected = [
        "a.png",
        "--text",
        '["dark phase", "b", "c"]',
        "-o",
        "out",
        "--text",
        "[]",
        "--seed",
        "3",
        "d.png",
    ]
    assert normalize_argv(words, {}, ("--text",)) == expected
    assert normalize_argv(words, {}) == words
    assert normalize_argv([], {}, ("--text",)) == []
