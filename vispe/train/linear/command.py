"""Linear segmentation: training and evaluation of a linear head on patch features.

    python -m vispe.train.linear --config configs/linear_segmentation.yaml --images '[a]' --masks '[b]' --out c

A backbone, frozen or fine-tuned, computes patch features; batch norm, dropout and a 1x1 convolution map them to
logits, which are interpolated to pixels. The score is the dataset mIoU: intersections and unions are summed over the
pixels of all images before the division.

An interrupted run resumes if it is started again with the same folder, with the same results as an uninterrupted run.
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
from vispe.errors import InputError, OptionError, VispeError, counted
from vispe.evaluate.evaluated import EvaluatedModel
from vispe.hosts.convert import convert
from vispe.train.linear.dataset import Pairs, Part, split
from vispe.train.linear.model import LinearSegmenter, score
from vispe.train.linear.task import LinearTask, read_task
from vispe.train.linear.trainer import Progress, train
from vispe.train.retrofit.checkpoint import RunFolder
from vispe.train.retrofit.recipe_files import recipe_permissions
from vispe.train.retrofit.student import check_size, load_student, load_teacher
from vispe.utils.digest import tensor_digest
from vispe.utils.files import atomic_path, write_json
from vispe.utils.version import __version__


def linear_segmentation(task: LinearTask, progress: Progress = lambda step, loss: None) -> dict[str, Any]:
    """Train and evaluate; writes `metrics.json`, `linear.safetensors` and `log.jsonl` into the output folder.

    Memory: one batch, and a cache of up to 64 images.

    Args:
        task: images, model and training settings.
        progress: called after every training step with the number of steps done and the loss.

    Returns:
        The contents of `metrics.json`: 'miou' over all pixels of the validation images, 'iou' by class, the mIoU of
        each image, the task, and notes.

    Raises:
        OptionError: contradictory settings, or a size that the model does not support.
        InputError: images or masks that do not match, or a folder with a finished run or an interrupted run of other
            settings.
    """
    task.check()
    task = task.with_absolute_paths()
    folder = RunFolder(Path(task.out), "linear.safetensors", "metrics.json", "linear segmentation")
    folder.check(task.identity(), task.force, partly=True)
    backbone = _backbone(task)
    check_size(task.img_size, backbone, "the model")
    train_part, val_part = _data(task, backbone)
    # the same names may be other images or weights
    identity = task.identity() | {"data.fingerprint": train_part.pairs.fingerprint()}
    identity["model.digest"] = tensor_digest([*backbone.model.parameters(), *backbone.model.buffers()])
    folder.check(identity, task.force)
    device = choose_device(task.device)
    folder.begin(identity, task.force)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(task.seed)
        options = {"norm": task.norm, "dropout": task.dropout, "tune": task.backbone_lr > 0}
        model = LinearSegmenter(backbone, train_part.pairs.n_classes, **options)
    model.to(device).train()
    train(task, model, train_part, device, folder, progress)
    metrics = score(model, val_part, backbone.patch_size, task.img_size)
    metrics |= {
        "n_classes": train_part.pairs.n_classes,
        "learnt_from": train_part.names,
        "task": asdict(task),
        "notes": list(dict.fromkeys((*train_part.pairs.notes, *val_part.pairs.notes))),
        "versions": {"vispe": __version__, "torch": torch.__version__},
    }
    with atomic_path(folder.weights, force=True) as temporary:
        save_file(
            {k: v.detach().cpu().contiguous() for k, v in model.trained_state_dict().items()}, temporary
        )
    write_json(folder.card, metrics, force=task.force)
    folder.forget()
    return metrics


def _backbone(task: LinearTask) -> VisionModel:
    if task.retrofit is not None:
        return load_student(task.retrofit)[0]
    if task.model is None:
        raise OptionError("linear: needs `model` or `retrofit`, got neither.")
    backbone = load_teacher(task.model, seed=task.seed)
    if task.pos_embed is not None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(task.seed)
            convert(backbone.model, task.pos_embed)
        backbone.model.eval()
    return backbone


def _data(task: LinearTask, backbone: VisionModel) -> tuple[Part, Part]:
    subject = EvaluatedModel("The model", mean=backbone.mean, std=backbone.std)
    options = {"tensor": subject.tensor, "zero": task.zero}
    val_images, val_masks = task.val_images, task.val_masks
    pairs = Pairs(task.images, task.masks, n_classes=task.n_classes, others=val_masks or (), **options)
    if pairs.n_classes < 2:
        raise InputError(
            f"linear: masks must have at least 2 classes, got {counted(pairs.n_classes, 'class')} with "
            f"zero={task.zero}. Set `n_classes` if other classes do not occur, or another `zero`."
        )
    # images and masks that cannot be used end the run here, instead of after hours of training
    if val_images is not None and val_masks is not None:
        numbers = range(len(pairs))
        val_pairs = Pairs(val_images, val_masks, n_classes=pairs.n_classes, others=task.masks, **options)
        pairs.check(task.img_size, numbers)
        val_pairs.check(other=pairs)
        return Part(pairs, numbers), Part(val_pairs, range(len(val_pairs)))
    numbers, val_numbers = split(len(pairs), task.val_every)
    pairs.check(task.img_size, numbers)
    return Part(pairs, numbers), Part(pairs, val_numbers)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default `sys.argv`) and return the exit code."""
    try:
        with recipe_permissions(sys.argv[1:] if argv is None else argv) as rest:
            task = read_task(rest)

            def show(step: int, loss: float) -> None:
                if step % task.logging_steps == 0 or step == task.steps:
                    sys.stderr.write(f"\rstep {step} of {task.steps}, loss {loss:.4f}")
                    sys.stderr.flush()

            metrics = linear_segmentation(task, show)
    except VispeError as error:
        sys.stderr.write(f"linear: {str(error).removeprefix('linear: ')}\n")
        return 2
    ious = ", ".join("-" if v is None else f"{v:.3f}" for v in metrics["iou"])
    miou = "-" if metrics["miou"] is None else f"{metrics['miou']:.4f}"
    sys.stdout.write(f"mIoU {miou} on {counted(len(metrics['images']), 'image')} (by class: {ious})\n")
    sys.stderr.write(f"\nwritten: {Path(task.out) / 'metrics.json'}\n")
    return 0
