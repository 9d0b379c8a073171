"""Error messages of the command line: every row of the table of errors."""

import json
import urllib.error
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

import vispe.backbones.hub as hub_module
from vispe.cli.main import main
from vispe.segment.model import prediction

SIZE = (32, 45)


def save(name, array):
    Image.fromarray(np.asarray(array, np.uint8)).save(name)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    mask = np.zeros(SIZE, int)
    mask[:, 20:] = 1
    save("a.png", np.where(mask, 60, 180) + rng.integers(0, 20, SIZE))
    save("b.png", np.where(mask, 70, 190) + rng.integers(0, 20, SIZE))
    scribbles = np.where(rng.random(SIZE) < 0.2, mask + 1, 0)
    save("a_labels.png", scribbles)
    np.save("drawn.npy", scribbles)
    return tmp_path


def vispe(capsys, command):
    """Run the command -> exit code, stdout, stderr."""
    code = main(command.split() if isinstance(command, str) else command)
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out, captured.err


def assert_rejected(capsys, command, *parts):
    """Assert that a command ends with code 2 and one line that contains `parts`, and writes nothing."""
    code, out, err = vispe(capsys, command)
    assert code == 2
    assert out == ""
    lines = [line for line in err.splitlines() if not line.startswith("vispe: note:")]
    assert len(lines) == 1, err
    for part in parts:
        assert part in lines[0]
    assert not list(Path().glob("out/*"))
    return err


LEARN = "--labels a_labels.png --classifier logistic -o out"


def test_missing_images_are_rejected(capsys):
    assert_rejected(capsys, f"segment gone.png {LEARN}", "gone.png", "does not exist")


def test_unreadable_images_are_rejected(capsys):
    Path("text.png").write_text("this is not an image")
    assert_rejected(capsys, f"segment text.png {LEARN}", "text.png")


def test_truncated_images_are_rejected(capsys):
    data = Path("a.png").read_bytes()
    Path("cut.png").write_bytes(data[: len(data) // 2])
    assert_rejected(capsys, f"segment cut.png {LEARN}", "cut.png")


def test_batches_skip_and_list_unreadable_images(capsys):
    data = Path("a.png").read_bytes()
    Path("cut.png").write_bytes(data[: len(data) // 2])
    Path("text.png").write_text("this is not an image")
    code, out, err = vispe(capsys, f"segment a.png cut.png gone.png text.png b.png {LEARN}")
    assert code == 1
    assert [line.partition(":")[0] for line in out.splitlines()] == ["a.png", "b.png"]
    summary = err[err.index("2 images done in out, 3 skipped") :]
    assert all(name in summary for name in ("cut.png", "gone.png", "text.png"))
    report = json.loads(Path("out/report.json").read_text())
    assert {Path(f["image"]).name for f in report["failures"]} == {"cut.png", "gone.png", "text.png"}
    assert Path("out/b_seg.png").exists()


def test_batches_skip_unreadable_labelled_images(capsys):
    Path("c.png").write_text("this is not an image")
    save("c_labels.png", np.load("drawn.npy"))
    code, out, err = vispe(
        capsys, "segment a.png b.png c.png --labels a_labels.png,c_labels.png --classifier logistic -o out"
    )
    assert code == 1
    assert len(out.splitlines()) == 2
    assert "c.png" in err


@pytest.mark.slow
def test_truth_of_wrong_size_skips_only_its_image(capsys):
    save("b_truth.png", np.zeros((9, 9)))
    code, out, err = vispe(capsys, f"segment a.png b.png --truth b_truth.png {LEARN}")
    assert code == 1
    assert "9 x 9" in err
    assert out.startswith("a.png")
    assert not Path("out/b_seg.png").exists()


def test_labels_of_wrong_size_are_rejected(capsys):
    save("a_labels.png", np.ones((32, 40)))
    assert_rejected(capsys, f"segment a.png {LEARN}", "32 x 40", "32 x 45", "never resized")


@pytest.mark.parametrize(("value", "actual"), [(0, "got 0"), (1, "got 1")])
def test_fewer_than_two_labelled_classes_are_rejected(capsys, value, actual):
    save("a_labels.png", np.full(SIZE, value))
    assert_rejected(capsys, f"segment a.png {LEARN}", "needs at least 2 labelled classes", actual)


def test_empty_label_files_are_rejected(capsys):
    Path("a_labels.png").write_bytes(b"")
    assert_rejected(capsys, f"segment a.png {LEARN}", "a_labels.png")


def test_unlabelled_classes_remain_with_a_warning(capsys):
    code, out, err = vispe(capsys, f"segment a.png --classes ground,grain,pore {LEARN}")
    assert code == 0
    assert "class 'pore' has no labelled pixels" in err
    assert "pore 0.0 %" in out
    assert tifffile.imread("out/a_prob.tif").squeeze().shape == (3, *SIZE)


def test_classes_of_few_pixels_remain_with_a_warning(capsys):
    scribbles = np.load("drawn.npy")
    scribbles[0, :3] = 3
    save("a_labels.png", scribbles)
    code, _, err = vispe(capsys, f"segment a.png {LEARN}")
    assert code == 0
    assert "only 3 labelled pixels" in err


def test_nan_and_infinite_pixels_are_invalid(capsys):
    grey = np.asarray(Image.open("a.png"), np.float32)
    grey[4:8, 5:10], grey[20, 30] = np.nan, np.inf
    tifffile.imwrite("a.tif", grey)
    code, _, err = vispe(capsys, f"segment a.tif {LEARN}")
    assert code == 0
    assert "21 pixels (1.5 %) of a.tif are NaN or infinite" in err
    np.testing.assert_array_equal(np.asarray(Image.open("out/a_seg.png")) == 0, ~np.isfinite(grey))
    assert json.loads(Path("out/report.json").read_text())["images"][0]["no_data_share"] > 0


def test_images_of_nan_only_are_rejected(capsys):
    tifffile.imwrite("a.tif", np.full(SIZE, np.nan, np.float32))
    assert_rejected(capsys, f"segment a.tif {LEARN}", "a.tif", "no data")


def test_images_smaller_than_a_patch_are_padded_with_a_warning(capsys):
    save("s.png", np.random.default_rng(0).integers(0, 255, (9, 30)))
    scribbles = np.zeros((9, 30))
    scribbles[2, :15], scribbles[6, 15:] = 1, 2
    save("d.png", scribbles)
    code, _, err = vispe(
        capsys,
        "segment s.png --labels d.png --model test_vit --weights random --classifier logistic -o out",
    )
    assert code == 0
    assert "smaller than one patch of 16 px (9 x 30)" in err
    assert np.asarray(Image.open("out/s_seg.png")).shape == (9, 30)


def test_empty_images_are_rejected(capsys):
    with pytest.warns(UserWarning, match="zero-size"):
        tifffile.imwrite("a.tif", np.zeros((0, 5), np.uint8))
    assert_rejected(capsys, f"segment a.tif {LEARN}", "a.tif")


def test_unknown_models_are_rejected_with_a_suggestion(capsys):
    assert_rejected(
        capsys,
        f"segment a.png --model vit_smal_patch16_224 {LEARN}",
        "'vit_smal_patch16_224'",
        "Did you mean",
    )


def test_unavailable_weights_are_rejected_immediately(capsys, monkeypatch):
    monkeypatch.setattr("vispe.backbones.timm.weights_on_disk", lambda name: None)
    monkeypatch.setattr("vispe.backbones.timm.models_on_disk", lambda: ["vit_small_patch14_dinov2.lvd142m"])

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # independent of the environment

    def unreachable(*_, timeout):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(hub_module.urllib.request, "urlopen", unreachable)
    assert_rejected(
        capsys,
        f"segment a.png --model vit_tiny_patch16_224 {LEARN}",
        "vit_tiny_patch16_224",
        "no route to host",
        "vit_small_patch14_dinov2.lvd142m",
        "a checkpoint file with --weights",
    )


def test_page_counts_must_agree_without_label_page(capsys):
    pages = np.stack([np.asarray(Image.open("a.png"))] * 3)
    tifffile.imwrite("a.tif", pages, photometric="minisblack", metadata={"axes": "ZYX"})
    two = np.stack([np.load("drawn.npy")] * 2).astype(np.uint8)
    tifffile.imwrite("two.tif", two, photometric="minisblack", metadata={"axes": "ZYX"})
    assert_rejected(capsys, f"segment a.tif {LEARN}", "1 page", "image has 3")
    assert_rejected(
        capsys, "segment a.tif --labels two.tif --classifier logistic -o out", "2 pages", "the image has 3"
    )
    assert vispe(capsys, f"segment a.tif --label-page 1 {LEARN}")[0] == 0


def test_out_of_memory_is_noted_and_reported(capsys, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(prediction, "predict_page", fail)
    code, _, err = vispe(capsys, f"segment a.png --device cpu {LEARN}")
    assert code == 2
    assert "halved to 256 px" in err
    assert "out of memory even with tiles of 64 px" in err.splitlines()[-1]


def test_ctrl_c_leaves_finished_images_complete(capsys, monkeypatch):
    original = prediction.predict_page

    def predict_once(page, *args):
        if predict_once.calls:
            raise KeyboardInterrupt
        predict_once.calls += 1
        return original(page, *args)

    predict_once.calls = 0
    monkeypatch.setattr(prediction, "predict_page", predict_once)
    code, out, err = vispe(capsys, f"segment a.png b.png {LEARN}")
    assert code == 130
    assert "finished are complete" in err
    assert out.startswith("a.png")
    names = {p.name for p in Path("out").iterdir()}
    assert {
        "a_seg.png",
        "a_prob.tif",
        "a_overlay.png",
        "a_uncertainty.png",
        "model.vispe",
        "report.json",
    } <= names
    assert not any(name.startswith(("b_", ".")) for name in names)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("-o out", "exactly one of labels, cluster and text is required, got none of them"),
        ("--labels a_labels.png --cluster 2 -o out", "got labels and cluster"),
        ("--cluster 1 -o out", "segment: --cluster needs an integer from 2 to 255, or auto, got --cluster 1"),
        (
            f"{LEARN} --features filters --weights w.pth",
            "--weights w.pth has no effect on --features filters",
        ),
        (f"{LEARN} --weights w.pth", "must be a file with weights of vispe_micro, got w.pth"),
        (f"{LEARN} --pos-embed rope_axial", "pos_embed='rope_axial' is not supported by vispe_micro"),
        (f"{LEARN} --device warp", "device='warp' is not available"),
        (f"{LEARN} --tile 3", "--tile needs an integer of 16 or more, got --tile 3"),
        (f"{LEARN} --normalize never", "normalize"),
        (f"{LEARN} --truth b.txt", "b.txt"),
    ],
)
def test_invalid_options_are_rejected_before_any_work(capsys, words, part):
    assert_rejected(capsys, f"segment a.png {words}", part)


def test_labels_without_an_image_are_rejected(capsys):
    assert_rejected(capsys, "segment b.png a.png --labels drawing.png -o out", "drawing.png")
    save("drawing.png", np.load("drawn.npy"))
    assert_rejected(
        capsys,
        "segment b.png a.png --labels drawing.png -o out",
        "no labels file matches an image",
        "drawing.png",
    )


def test_two_label_files_for_one_image_are_rejected(capsys):
    save("a-2.png", np.load("drawn.npy"))
    assert_rejected(
        capsys, "segment a.png b.png --labels a_labels.png,a-2.png -o out", "a.png: two labels match"
    )


def test_images_of_equal_name_are_rejected(capsys):
    Path("other").mkdir()
    save("other/a.png", np.ones(SIZE))
    assert_rejected(capsys, "segment a.png other/a.png --cluster 2 -o out", "same name")


def test_mismatched_channel_counts_are_rejected(capsys):
    assert vispe(capsys, f"segment a.png {LEARN}")[0] == 0
    Image.fromarray(np.zeros((*SIZE, 3), np.uint8) + np.arange(3, dtype=np.uint8)).save("rgb.png")
    code, _, err = vispe(capsys, "apply out/model.vispe rgb.png -o more")
    assert code == 2
    assert "3 channels, but the model was trained with 1" in err


def test_files_that_are_not_models_are_rejected(capsys):
    code, _, err = vispe(capsys, "apply a.png b.png -o more")
    assert code == 2
    assert "a.png is not a complete vispe model file" in err
