"""Recipes: they load, fit their models, have the documented cost, and the supervised ones run."""

import argparse
import importlib
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import timm.loss
import timm.optim
import timm.scheduler
import torch
import yaml
from PIL import Image
from timm.utils import ParseKwargs

import vispe
from tests.products import slow_except
from vispe.cli.main import main, parse
from vispe.train.linear.command import read_task
from vispe.train.retrofit.config import Retrofit
from vispe.train.retrofit.config_checks import check
from vispe.train.retrofit.recipe_files import recipe_file
from vispe.train.retrofit.student import check_models, load_teacher, make_student

CONFIGS = Path(__file__).parents[3] / "configs"
RETROFITS = ("dinov2", "dinov3", "open_clip", "tiny_smoke")
OTHERS = {
    "segment",
    "probe",
    "linear_segmentation",
    "timm_train_alibi2d",
    "vlm_order_invariance",
    "vlm_lora_scheme",
}
IMAGES = 118_287  # in COCO train2017
SUSTAINED = 1e14  # FLOP/s


def retrofits():
    return sorted(p for p in CONFIGS.glob("*.yaml") if p.stem.startswith(RETROFITS))


def read(path, option="--config {}"):
    function, values = parse("retrofit", option.format(path).split())
    assert function.__name__ == "retrofit"
    return Retrofit(**{name: value for name, value in values.items() if name != "json"})


def test_every_recipe_is_of_a_known_kind():
    assert {p.stem for p in CONFIGS.glob("*.yaml")} == {p.stem for p in retrofits()} | OTHERS
    assert len(retrofits()) == 9


def test_recipes_are_resolved_by_name_and_files_here_come_first(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    by_path = read(CONFIGS / "tiny_smoke.yaml")
    assert read("tiny_smoke.yaml") == by_path
    assert read("tiny_smoke.yaml", "--config={}") == by_path
    assert read_task(["--config", "linear_segmentation.yaml"]).img_size == 518
    assert main(["retrofit", "--config", "tiny_smok.yaml"]) == 2
    assert "tiny_smok.yaml' does not exist" in capsys.readouterr().err
    Path("tiny_smoke.yaml").write_text((CONFIGS / "tiny_smoke.yaml").read_text() + "seed: 7\n")
    assert read("tiny_smoke.yaml") == replace(by_path, seed=7)
    assert recipe_file("folder/tiny_smoke.yaml") == "folder/tiny_smoke.yaml"


@pytest.mark.parametrize("path", slow_except(retrofits(), retrofits()[::2]), ids=lambda p: p.stem)
def test_recipes_fit_their_models(path):
    config = read(path)
    check(config)
    channels = check_models(config)  # outlines of both models, without memory or weights
    assert channels in (64, 384, 768, 1024)
    assert path.stem in config.out
    if isinstance(config.target.blank, list):
        assert len(config.target.blank) / channels <= 0.05
    patch = 8 if "tiny" in path.stem else 14 if "dinov2" in path.stem else 16
    assert all(stage.img_size % patch == 0 for stage in config.stages)
    if "dinov" in path.stem and "cpu" not in path.stem:  # the published settings
        assert [s.lr for s in config.stages] == [1e-4, 1e-5]
        assert [s.batch_size for s in config.stages] == [256, 32]
        assert [s.epochs for s in config.stages] == [8 if "dinov3" in path.stem else 15, 1]
        assert [s.img_size for s in config.stages] == [224, 512 if "dinov3" in path.stem else 518]


@pytest.mark.parametrize(
    "path",
    slow_except(retrofits(), retrofits()[1::3]),
    ids=lambda p: p.stem,
)
def test_recipes_document_cost_and_expected_results(path):
    head = "".join(line for line in path.read_text().splitlines(True) if line.startswith("#"))
    for words in (f"vispe retrofit --config {path.name}", "Costs", "memory", "disk", "What to expect"):
        assert words in head.replace("torchrun --nproc-per-node 4 -m ", "")
    if "tiny" in path.stem:
        return
    assert "literature" in head.lower()
    table = (CONFIGS.parent / "docs/how-to/models/retrofit.md").read_text()
    (row,) = re.findall(rf"^\| `{path.name}` \|.*$", table, re.MULTILINE)
    if "cpu" in path.stem:
        assert "CPU" in row
        return
    flop, hours = re.findall(r"([\d.]+e\d+) FLOP: ([\d.]+) GPU hours", head)[0]
    needed = cost(read(path))
    assert float(flop) == pytest.approx(needed, rel=0.05)
    assert float(hours) == pytest.approx(needed / SUSTAINED / 3600, abs=0.06)
    assert f"{flop} FLOP, {hours} h" in row
    assert re.search(r"about (\d+ GB) of GPU memory", head)[1] in row


def cost(config):
    """Return the FLOP of a recipe: a pass of the teacher, and one of the student forward and, twice the work, back."""
    teacher = load_teacher(config.teacher, outline=True)
    actual = 0.0
    for stage in config.stages:
        n = (stage.img_size // teacher.patch_size) ** 2 + 1
        weights = sum(m.weight.numel() for m in teacher.model.modules() if isinstance(m, torch.nn.Linear))
        weights += sum(
            p.numel() for k, p in teacher.model.named_parameters() if k.endswith("attn.in_proj_weight")
        )
        blocks = getattr(teacher.model, "blocks", None)
        depth = len(blocks if blocks is not None else teacher.model.transformer.resblocks)
        actual += 8 * stage.epochs * IMAGES * (n * weights + 2 * depth * n**2 * teacher.channels)
    return actual


def test_the_smoke_recipe_needs_nothing(tmp_path):
    config = read(CONFIGS / "tiny_smoke.yaml")
    assert config.teacher.weights == "random"
    assert all(set(entry) <= {"synthetic", "side"} for entry in config.data)
    updates = sum(stage.updates(16) for stage in config.stages)
    assert updates <= 100
    teacher = load_teacher(config.teacher, seed=config.seed)
    student = make_student(teacher, config.student, seed=config.seed)
    assert sum(p.numel() for p in student.parameters()) < 300_000


def test_the_linear_recipe_is_one():
    config = ["--config", str(CONFIGS / "linear_segmentation.yaml")]
    task = read_task([*config, "--images", "[a, b]", "--backbone_lr", "1e-5"])
    task.check()
    assert task.images == ["a", "b"]
    assert task.backbone_lr == 1e-5
    student = read_task([*config, "--retrofit", "out", "--model", "null"])  # as the guide says
    student.check()
    assert student.model is None
    teacher = load_teacher(task.model, outline=True)
    assert task.img_size % teacher.patch_size == 0
    assert not teacher.exact


def folders(root):
    """Images of two classes, dark and bright, as train.py wants them."""
    for part, count in (("train", 6), ("validation", 4)):
        for name, level in (("dark", 40), ("bright", 200)):
            position = root / part / name
            position.mkdir(parents=True)
            for k in range(count):
                Image.new("RGB", (40, 36), (level + 5 * k,) * 3).save(position / f"{k}.png")


def train(arguments):
    """Follow timm's train.py: config file first, options over it, then its factories, an epoch, a checkpoint."""
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("-c", "--config")
    known, remaining = first.parse_known_args(arguments)
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir")
    parser.add_argument("--output")
    parser.add_argument("--model")
    parser.add_argument("--device-modules", nargs="+")
    parser.add_argument("--model-kwargs", nargs="*", default={}, action=ParseKwargs)
    for name, kind in (("img-size", int), ("epochs", int), ("batch-size", int), ("lr", float)):
        parser.add_argument(f"--{name}", type=kind)
    parser.add_argument("--pretrained", action=argparse.BooleanOptionalAction)
    if known.config:
        parser.set_defaults(**yaml.safe_load(Path(known.config).read_text()))
    args = parser.parse_args(remaining)
    for name in args.device_modules or ():
        importlib.import_module(name)
    model = timm.create_model(
        args.model,
        pretrained=args.pretrained,
        num_classes=2,
        img_size=args.img_size,
        drop_rate=0.0,
        **args.model_kwargs,
    )
    size = {"input_size": (3, args.img_size, args.img_size), "batch_size": args.batch_size}
    loaders = [
        timm.data.create_loader(
            timm.data.create_dataset("", root=args.data_dir, split=split, is_training=split == "train"),
            is_training=split == "train",
            use_prefetcher=False,
            num_workers=0,
            persistent_workers=False,
            device=torch.device("cpu"),
            no_aug=True,
            **size,
        )
        for split in ("train", "validation")
    ]
    optimizer = timm.optim.create_optimizer_v2(
        model, opt=args.opt, lr=args.lr, weight_decay=args.weight_decay, layer_decay=args.layer_decay
    )
    scheduler, epochs = timm.scheduler.create_scheduler_v2(
        optimizer, sched=args.sched, num_epochs=args.epochs, warmup_epochs=1, warmup_lr=args.warmup_lr
    )
    saver = timm.utils.CheckpointSaver(model, optimizer, checkpoint_dir=args.output, max_history=1)
    loss_of, hits = timm.loss.LabelSmoothingCrossEntropy(args.smoothing), 0
    for epoch in range(epochs):
        model.train()
        for images, classes in loaders[0]:
            loss = loss_of(model(images), classes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            hits = sum(int((model(x).argmax(1) == y).sum()) for x, y in loaders[1])
        saver.save_checkpoint(epoch, hits)
        scheduler.step(epoch + 1)
    return model, optimizer, hits


# timm's data set leaves its images open
@pytest.mark.filterwarnings("ignore:.*unclosed file:ResourceWarning")
@pytest.mark.filterwarnings("ignore:.*FileIO:pytest.PytestUnraisableExceptionWarning")
def test_supervised_training_follows_stock_train_py(tmp_path):
    folders(tmp_path / "data")
    (tmp_path / "out").mkdir()
    tiny = ["depth=1", "embed_dim=32", "num_heads=2"]
    model, optimizer, hits = train(
        [
            *("--config", str(CONFIGS / "timm_train_alibi2d.yaml"), "--data-dir", str(tmp_path / "data")),
            *("--output", str(tmp_path / "out"), "--no-pretrained", "--img-size", "32", "--epochs", "4"),
            *("--batch-size", "4", "--lr", "1e-2"),
            *("--model-kwargs", "pos_embed=alibi2d(slopes=learned)", *tiny),
        ]
    )
    assert "alibi2d" in vispe.describe(model)
    assert model.pos_embed is None
    encoding_params = [p for name, p in model.named_parameters() if "pos_enc" in name]
    assert encoding_params
    assert {id(p) for p in encoding_params} <= {id(p) for g in optimizer.param_groups for p in g["params"]}
    assert hits >= 6  # of 8
    second = timm.create_model(
        "vit_small_patch16_224",
        num_classes=2,
        img_size=32,
        depth=1,
        embed_dim=32,
        num_heads=2,
        pos_embed="alibi2d(slopes=learned)",
        checkpoint_path=str(next((tmp_path / "out").glob("last*"))),
    ).eval()
    image = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(second(image), model(image))


def stock_script():
    """Return timm's own train.py: where TIMM_TRAIN says, or in the checkout that timm is imported from; or None."""
    positions = [os.environ.get("TIMM_TRAIN"), Path(timm.__file__).parents[2] / "train.py"]
    return next((Path(position) for position in positions if position and Path(position).is_file()), None)


@pytest.mark.skipif(
    stock_script() is None, reason="timm is installed without its train.py; TIMM_TRAIN may name one"
)
def test_stock_train_py_runs_from_the_recipe(tmp_path):
    folders(tmp_path / "data")
    command = [sys.executable, str(stock_script()), "--config", str(CONFIGS / "timm_train_alibi2d.yaml")]
    command += [
        "--data-dir",
        str(tmp_path / "data"),
        "--output",
        str(tmp_path / "out"),
        "--experiment",
        "tiny",
    ]
    command += ["--img-size", "32", "--epochs", "1", "--warmup-epochs", "0", "--batch-size", "4", "-j", "0"]
    command += ["--num-classes", "2", "--device", "cpu", "--no-prefetcher"]
    command += [
        "--model-kwargs",
        "pos_embed=alibi2d(slopes=learned)",
        "img_size=32",
        "depth=1",
        "embed_dim=32",
        "num_heads=2",
    ]
    recipe = yaml.safe_load((CONFIGS / "timm_train_alibi2d.yaml").read_text()) | {"pretrained": False}
    # a switch cannot be taken back behind a file
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    command[3] = str(tmp_path / "recipe.yaml")
    process = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path)
    assert process.returncode == 0, process.stderr[-3000:]
    state = torch.load(next((tmp_path / "out" / "tiny").glob("last*")), weights_only=False)["state_dict"]
    assert any("pos_enc" in name for name in state)
    assert "pos_embed" not in state


def test_the_supervised_recipe_hands_the_encoding_over():
    values = yaml.safe_load((CONFIGS / "timm_train_alibi2d.yaml").read_text())
    assert values["device_modules"] == ["vispe"]
    with torch.device("meta"):
        model = timm.create_model(values["model"], img_size=values["img_size"], **values["model_kwargs"])
    assert "alibi2d" in vispe.describe(model)
    assert "vispe" in sys.modules
