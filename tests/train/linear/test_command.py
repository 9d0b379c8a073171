"""Linear segmentation: the score is that of all pixels, a stopped run equals one that was not, a frozen model stays."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.products import slow_except
from vispe.errors import InputError, OptionError
from vispe.images.textures import disc_packing
from vispe.train.linear.command import LinearTask, linear_segmentation, main
from vispe.train.linear.dataset import IGNORE, Pairs, Part, batch_at, split
from vispe.train.linear.model import LinearSegmenter, labels_of_image, score
from vispe.train.retrofit.config import Teacher
from vispe.train.retrofit.student import load_teacher

TINY = Teacher(
    "vit_tiny_patch16_224",
    weights="random",
    options={"embed_dim": 32, "depth": 2, "num_heads": 2, "patch_size": 8, "img_size": 32},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Five micrographs of 76 x 60 px with their masks."""
    root = tmp_path_factory.mktemp("linear")
    for name in ("images", "masks"):
        (root / name).mkdir()
    for k in range(5):
        image, labels = disc_packing(k, radius=9.0).render(76)
        grey = (image[0].clamp(0, 1).numpy() * 255).astype(np.uint8)[:, :60]
        Image.fromarray(grey).save(root / "images" / f"s{k}.png")
        Image.fromarray(labels.numpy().astype(np.uint8)[:, :60]).save(root / "masks" / f"s{k}.png")
    return root


@pytest.fixture
def task(folder, tmp_path):
    return LinearTask(
        images=[str(folder / "images")],
        masks=[str(folder / "masks")],
        out=str(tmp_path / "out"),
        model=TINY,
        img_size=32,
        steps=40,
        batch_size=8,
        lr=1e-2,
        logging_steps=5,
        save_steps=10,
    )


def test_it_learns_and_reports_the_miou_of_all_pixels(task, tmp_path):
    actual = linear_segmentation(task)
    assert actual["miou"] > 0.75
    assert list(actual["images"]) == ["s4.png"]
    assert actual["learnt_from"] == [f"s{k}.png" for k in range(4)]
    counts = np.array(actual["confusion"])
    assert counts.sum() == 76 * 60
    iou = np.diag(counts) / (counts.sum(0) + counts.sum(1) - np.diag(counts))
    assert actual["iou"] == pytest.approx(iou.tolist())
    assert actual["miou"] == pytest.approx(iou.mean())
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["miou"] == actual["miou"]
    state = load_file(tmp_path / "out" / "linear.safetensors")
    assert set(state) == {
        *("norm.weight", "norm.bias", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"),
        *("classifier.weight", "classifier.bias"),
    }
    lines = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(5, 41, 5)]
    assert lines[-1]["loss"] < lines[0]["loss"]
    with pytest.raises(
        InputError,
        match=r"contains a finished linear segmentation. Set `force` to overwrite it",
    ):
        linear_segmentation(task)


@pytest.mark.parametrize("rate", slow_except([0.0, 1e-4], [1e-4]))
def test_a_stopped_run_resumes_with_equal_results(task, tmp_path, rate, monkeypatch):
    task = replace(task, steps=12, save_steps=4, logging_steps=3, backbone_lr=rate)
    uninterrupted = linear_segmentation(task)

    class Killed(Exception):
        pass

    def kill(step, loss):
        if step == 7:  # past the state of update 4, within a line of the log
            raise Killed

    resumed_task = replace(task, out=str(tmp_path / "again"))
    with pytest.raises(Killed):
        linear_segmentation(resumed_task, kill)
    with pytest.raises(
        InputError, match=r"interrupted linear segmentation with other settings: lr was 0\.01 and is 0\.003"
    ):
        linear_segmentation(replace(resumed_task, lr=3e-3))
    other = tmp_path / "other"
    shutil.copytree(Path(task.images[0]).parent, other)
    Image.fromarray(np.zeros((76, 60), np.uint8)).save(other / "images" / "s1.png")
    monkeypatch.chdir(other)
    with pytest.raises(InputError, match=r"other settings: images was .*linear.* and is .*other/images"):
        linear_segmentation(replace(resumed_task, images=["images"], masks=["masks"]))
    monkeypatch.chdir(Path(task.images[0]).parent)
    steps = []
    resumed_task = replace(resumed_task, images=["images"], masks=["masks"])
    resumed = linear_segmentation(resumed_task, lambda step, loss: steps.append(step))
    assert steps == [*range(5, 13)]
    assert resumed["confusion"] == uninterrupted["confusion"]
    assert (tmp_path / "again" / "log.jsonl").read_text() == (tmp_path / "out" / "log.jsonl").read_text()
    first, second = (load_file(tmp_path / name / "linear.safetensors") for name in ("out", "again"))
    assert first.keys() == second.keys()
    for key, value in first.items():
        assert torch.equal(value, second[key]), key
    assert any(k.startswith("backbone.") for k in first) == (rate > 0)
    files = sorted(path.name for path in (tmp_path / "again").iterdir())
    assert files == ["linear.safetensors", "log.jsonl", "metrics.json"]


def test_a_stopped_run_needs_the_same_images(task, folder, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(folder, data)

    def kill(step, loss):
        raise KeyboardInterrupt

    task = replace(task, images=[str(data / "images")], masks=[str(data / "masks")], steps=2, save_steps=1)
    with pytest.raises(KeyboardInterrupt):
        linear_segmentation(task, kill)
    Image.fromarray(np.zeros((76, 60), np.uint8)).save(data / "images" / "s1.png")
    with pytest.raises(InputError, match=r"other settings: data\.fingerprint was"):
        linear_segmentation(task)


def test_a_frozen_backbone_stays_and_a_tuned_one_changes():
    for tune in (False, True):
        backbone = load_teacher(TINY)
        before = {k: v.clone() for k, v in backbone.model.state_dict().items()}
        model = LinearSegmenter(backbone, 3, tune=tune).train()
        assert model.backbone.training == tune
        params = [p for p in model.parameters() if p.requires_grad]
        out = model(torch.randn(2, 3, 40, 24))
        assert out.shape == (2, 3, 40, 24)
        (out * torch.randn_like(out)).sum().backward()
        torch.optim.SGD(params, lr=0.1).step()
        same = [torch.equal(v, before[k]) for k, v in model.backbone.state_dict().items()]
        assert all(same) != tune


def test_scores_are_linear_in_the_features_of_a_patch():
    backbone = load_teacher(TINY)
    model = LinearSegmenter(backbone, 2, norm=False, dropout=0.5).eval()
    image = torch.randn(1, 3, 24, 48)
    from vispe.train.retrofit.student import final_tokens

    maps, _ = final_tokens(model.backbone, image)
    rows = torch.einsum("kd,bdhw->bkhw", model.classifier.weight[..., 0, 0], maps)
    rows = rows + model.classifier.bias[None, :, None, None]
    middles = model(image).reshape(1, 2, 3, 8, 6, 8)[:, :, :, 3:5, :, 3:5].mean((3, 5))
    torch.testing.assert_close(middles[..., 1:-1, 1:-1], _mixed(rows)[..., 1:-1, 1:-1])


def _mixed(rows):
    """What bilinear enlargement leaves at the middle of a patch: the mean of its four central pixels."""
    full = torch.nn.functional.interpolate(rows, scale_factor=8, mode="bilinear")
    b, k, h, w = rows.shape
    return full.reshape(b, k, h, 8, w, 8)[:, :, :, 3:5, :, 3:5].mean((3, 5))


def test_labels_of_images_of_any_size():
    backbone = load_teacher(TINY)
    model = LinearSegmenter(backbone, 2).eval()
    for shape in ((32, 32), (40, 71), (19, 33)):
        labels = labels_of_image(model, torch.rand(3, *shape), 8, 32)
        assert labels.shape == shape
        assert set(np.unique(labels)) <= {1, 2}
    image = torch.rand(3, 32, 32)
    direct = model(image[None])[0].argmax(0).numpy() + 1
    assert (labels_of_image(model, image, 8, 32) == direct).all()


def test_ignored_pixels_are_neither_learnt_nor_scored(folder, tmp_path):
    masks = tmp_path / "masks"
    masks.mkdir()
    for k in range(5):
        mask = np.array(Image.open(folder / "masks" / f"s{k}.png")) + 1
        mask[:30] = 0
        Image.fromarray(mask).save(masks / f"s{k}.png")
    pairs = Pairs(
        [str(folder / "images")], [str(masks)], lambda page: torch.zeros(3, *page.shape[:2]), "ignore"
    )
    assert pairs.n_classes == 2
    _, mask = pairs.read(0)
    assert (mask[:30] == IGNORE).all()
    assert set(mask[30:].unique().tolist()) == {0, 1}
    actual = score(LinearSegmenter(load_teacher(TINY), 2), Part(pairs, [0, 3]), 8, 32)
    assert np.sum(actual["confusion"]) == 2 * 46 * 60


def test_batches_depend_on_seed_and_step_and_see_every_image_in_turn(folder):
    pairs = Pairs(
        [str(folder / "images")],
        [str(folder / "masks")],
        lambda page: torch.from_numpy(page).permute(2, 0, 1).expand(3, -1, -1).float(),
    )
    part = Part(pairs, range(5))
    options = {"batch": 3, "size": 24, "poses": True}
    first = [batch_at(part, step, seed=4, **options) for step in range(5)]
    for step in (3, 0):
        images, masks = batch_at(part, step, seed=4, **options)
        assert torch.equal(images, first[step][0])
        assert torch.equal(masks, first[step][1])
    assert not torch.equal(first[0][0], batch_at(part, 0, seed=5, **options)[0])
    plain = batch_at(part, 0, seed=4, batch=15, size=60, poses=False)[0]
    numbers = [next(k for k in range(5) if _within(one, pairs.read(k)[0])) for one in plain]
    assert [sorted(numbers[i : i + 5]) for i in (0, 5, 10)] == [[0, 1, 2, 3, 4]] * 3
    with pytest.raises(
        InputError, match=r"images must be at least 64 px, the size of the windows, got 76 x 60"
    ):
        batch_at(part, 0, seed=0, batch=1, size=64, poses=False)


def _within(window, image):
    side = window.shape[-1]
    return any(
        torch.equal(window, image[:, t : t + side, s : s + side])
        for t in range(image.shape[1] - side + 1)
        for s in range(image.shape[2] - side + 1)
    )


def test_images_are_held_out():
    assert split(10, 5) == ([0, 1, 2, 3, 5, 6, 7, 8], [4, 9])
    with pytest.raises(
        OptionError, match=r"splits 3 images into 3 for training and 0 for validation, .*. Set `val_images`"
    ):
        split(3, 5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda mask: mask[:-1], r"\(1, 75, 60\)|75 x 60"),
        (lambda mask: mask + 1, "has the value 0, but .* numbers the 2 classes from 1"),
        (lambda mask: mask * 2, "class 2 is 2, but it is 1 in "),
    ],
)
def test_masks_of_validation_images_are_compared_before_training(task, folder, tmp_path, change, words):
    val_masks = tmp_path / "val"
    val_masks.mkdir()
    for path in (folder / "masks").iterdir():
        Image.fromarray(change(np.array(Image.open(path)))).save(val_masks / path.name)
    steps = []
    with pytest.raises(InputError, match=words):
        linear_segmentation(
            replace(task, val_images=task.images, val_masks=[str(val_masks)]),
            lambda step, loss: steps.append(step),
        )
    assert not steps
    assert not (tmp_path / "out").exists()


def test_images_and_classes_that_cannot_be_used_end_before_training(task, tmp_path, monkeypatch):
    monkeypatch.setattr("vispe.train.linear.command.train", None)
    task = replace(task, model=replace(TINY, options=TINY.options | {"img_size": 64}), img_size=64)
    with pytest.raises(InputError, match=r"s0\.png: images must be at least 64 px.* or reduce `img_size`"):
        linear_segmentation(task)
    with pytest.raises(InputError, match="masks must have at least 2 classes, got 1 class with zero=ignore"):
        linear_segmentation(replace(task, zero="ignore"))
    assert not (tmp_path / "out").exists()


def test_images_of_one_name_in_several_folders_have_their_own_scores(task, folder, tmp_path):
    images, masks = [], []
    for k, name in enumerate(("one", "other")):
        (tmp_path / name).mkdir()
        images.append(str(shutil.copy(folder / "images" / f"s{k}.png", tmp_path / name / "a.png")))
        masks.append(str(shutil.copy(folder / "masks" / f"s{k}.png", tmp_path / f"m{k}.png")))
    actual = linear_segmentation(replace(task, val_images=images, val_masks=masks, steps=1))
    assert list(actual["images"]) == ["one/a.png", "other/a.png"]


def test_grey_levels_of_validation_masks_are_those_of_training(task, folder, tmp_path):
    for name, levels in (("train", [0, 255]), ("val", [100, 255])):
        (tmp_path / name).mkdir()
        for path in (folder / "masks").iterdir():
            Image.fromarray(np.uint8(levels)[np.array(Image.open(path))]).save(tmp_path / name / path.name)
    actual = linear_segmentation(
        replace(
            task, masks=[str(tmp_path / "train")], val_images=task.images, val_masks=[str(tmp_path / "val")],
            n_classes=3, steps=1,
        )
    )  # fmt: skip
    assert np.sum(actual["confusion"], 1)[[0, 1]].tolist() == [0, np.sum(actual["confusion"][1])]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"retrofit": "folder"}, "needs either `model` or `retrofit`, got both"),
        ({"model": None}, "got neither"),
        ({"val_images": ["a"]}, "must be set together"),
        ({"steps": 0}, "steps needs an integer above 0, got steps=0"),
        ({"dropout": 1.0}, "dropout needs a number of 0 or more and below 1, got dropout=1.0"),
        ({"img_size": 36}, "img_size must be a multiple of 8 for the model, got 36"),
    ],
)
def test_errors(task, change, words):
    with pytest.raises(OptionError, match=words):
        linear_segmentation(replace(task, **change))


def test_the_command_reads_yaml_and_options_win(task, folder, tmp_path, capsys):
    (tmp_path / "task.yaml").write_text(
        "model:\n  name: vit_tiny_patch16_224\n  weights: random\n"
        "  options: {embed_dim: 32, depth: 1, num_heads: 2, patch_size: 8, img_size: 32}\n"
        f"images: [{folder / 'images'}]\nmasks: [{folder / 'masks'}]\nout: {tmp_path / 'a'}\n"
        "pos_embed: alibi2d\nimg_size: 32\nsteps: 5\nbatch_size: 2\n"
    )
    assert main(["--config", str(tmp_path / "task.yaml"), "--steps", "3"]) == 0
    output = capsys.readouterr()
    assert output.out.startswith("mIoU 0.")
    assert "step 3 of 3" in output.err
    actual = json.loads((tmp_path / "a" / "metrics.json").read_text())
    assert actual["task"]["steps"] == 3
    assert actual["task"]["pos_embed"] == "alibi2d"
    assert main(["--config", str(tmp_path / "task.yaml")]) == 2
    assert "contains a finished linear segmentation" in capsys.readouterr().err
