"""Linear segmentation: how much of a segmentation do features hold, read by one linear map?

    python -m vispe.train.linear --config configs/linear_segmentation.yaml --images a --masks b --out c

A backbone, frozen or fine-tuned, gives patch features; batch norm, dropout and a 1x1 convolution make scores of them,
bilinear interpolation brings these to pixels. The score is the dataset mIoU: intersections and unions of all pixels of
all images are summed before they are divided, so no image and no batch counts more than its pixels.

A run that was stopped goes on where it was when it is started again in the same folder, with the same numbers as a run
that was not.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from vispe.backbones.device import choose_device
from vispe.backbones.vision_model import VisionModel
from vispe.errors import OptionError, VispeError
from vispe.evaluate.evaluated import Subject
from vispe.files import atomic_path, write_json
from vispe.hosts.convert import convert
from vispe.train.linear.dataset import Pairs, Part, split
from vispe.train.linear.model import LinearSegmenter, score
from vispe.train.linear.task import LinearTask, read_task
from vispe.train.linear.trainer import Progress, train
from vispe.train.retrofit.checkpoint import Folder
from vispe.train.retrofit.recipe_files import as_permitted
from vispe.train.retrofit.student import check_size, load_student, load_teacher
from vispe.version import __version__


def linear_segmentation(task: LinearTask, progress: Progress = lambda step, loss: None) -> dict[str, Any]:
    """Train and score; writes `metrics.json`, `linear.safetensors` and `log.jsonl` into the folder.

    Memory: one batch, and up to 64 images that were read last.

    Args:
        task: images, model and training.
        progress: called after every update with the number of updates done and the loss.

    Returns:
        The content of `metrics.json`: 'miou' over all pixels of the images that were scored, 'iou' by class, the
        mIoU of each image, the task, and notes.

    Raises:
        OptionError: the task contradicts itself, or has a size that the model does not take.
        InputError: images or masks that do not fit, or a folder with a finished run or a stopped one of another task.
    """
    task.check()
    folder = Folder(Path(task.out), "linear.safetensors", "metrics.json", "linear segmentation")
    folder.check(task.identity(), task.force)
    backbone = _backbone(task)
    check_size(task.size, backbone, "the model")
    learnt, held = _data(task, backbone)
    device = choose_device(task.device)
    folder.begin(task.identity(), task.force)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(task.seed)
        options = {"norm": task.norm, "dropout": task.dropout, "tune": task.backbone_rate > 0}
        model = LinearSegmenter(backbone, learnt.pairs.n_classes, **options)
    model.to(device).train()
    train(task, model, learnt, device, folder, progress)
    metrics = score(model, held, backbone.patch, task.size)
    metrics |= {
        "n_classes": learnt.pairs.n_classes,
        "learnt_from": learnt.names,
        "task": asdict(task),
        "notes": list(dict.fromkeys((*learnt.pairs.notes, *held.pairs.notes))),
        "versions": {"vispe": __version__, "torch": torch.__version__},
    }
    with atomic_path(folder.weights, force=True) as temporary:
        save_file({k: v.detach().cpu().contiguous() for k, v in model.own_state().items()}, temporary)
    write_json(folder.card, metrics, force=task.force)
    folder.forget()
    return metrics


def _backbone(task: LinearTask) -> VisionModel:
    if task.retrofit is not None:
        return load_student(task.retrofit)[0]
    if task.model is None:
        raise OptionError("Linear segmentation needs a model or a retrofit, got neither.")
    backbone = load_teacher(task.model, seed=task.seed)
    if task.pos_embed is not None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(task.seed)
            convert(backbone.model, task.pos_embed)
        backbone.model.eval()
    return backbone


def _data(task: LinearTask, backbone: VisionModel) -> tuple[Part, Part]:
    """Return the images to learn from and the images to score."""
    subject = Subject("The model", mean=backbone.mean, std=backbone.std)
    pairs = Pairs(task.images, task.masks, subject.tensor, task.zero, task.n_classes)
    if task.val_images is not None and task.val_masks is not None:
        held = Pairs(task.val_images, task.val_masks, subject.tensor, task.zero, pairs.n_classes)
        return Part(pairs, range(len(pairs))), Part(held, range(len(held)))
    numbers, held_numbers = split(len(pairs), task.val_every)
    return Part(pairs, numbers), Part(pairs, held_numbers)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default that of the process, and return the exit code."""
    try:
        with as_permitted(sys.argv[1:] if argv is None else argv) as rest:
            task = read_task(rest)

            def show(step: int, loss: float) -> None:
                if step % task.log_every == 0 or step == task.steps:
                    sys.stderr.write(f"\rupdate {step} of {task.steps}, loss {loss:.4f}")
                    sys.stderr.flush()

            metrics = linear_segmentation(task, show)
    except VispeError as error:
        sys.stderr.write(f"linear: {error}\n")
        return 2
    ious = ", ".join("-" if v is None else f"{v:.3f}" for v in metrics["iou"])
    miou = "-" if metrics["miou"] is None else f"{metrics['miou']:.4f}"
    sys.stdout.write(f"mIoU {miou} on {len(metrics['images'])} images (by class: {ious})\n")
    sys.stderr.write(f"\nwritten: {Path(task.out) / 'metrics.json'}\n")
    return 0
