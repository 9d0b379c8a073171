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
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from vispe.errors import InputError, OptionError
from vispe.hosts.convert import convert
from vispe.train.linear.data import Pairs, split
from vispe.train.linear.model import LinearSegmenter, score
from vispe.train.linear.task import LinearTask, read_task
from vispe.train.linear.train import train
from vispe.train.retrofit.student import Backbone, load_student, load_teacher
from vispe.version import __version__


def linear_segmentation(
    task: LinearTask, progress: Callable[[int, float], None] = lambda step, loss: None
) -> dict[str, Any]:
    """Train and score; writes `metrics.json`, `linear.safetensors` and `log.jsonl` into the folder.

    Memory: one batch, and up to 64 images that were read last.

    Args:
        task: what is done.
        progress: hears the number of updates done and the loss after each.

    Returns:
        The content of `metrics.json`: 'miou' over all pixels of the images that were scored, 'iou' by class, the
        mIoU of each image, the task, and notes.

    Raises:
        OptionError: the task contradicts itself, or another one was started in this folder.
        InputError: images or masks that do not fit, or a finished run is there.
    """
    from safetensors.torch import save_file

    from vispe.backbones.device import choose_device
    from vispe.files import atomic_path, write_json

    task.check()
    out = Path(task.out)
    final = out / "metrics.json"
    if final.exists() and not task.force:
        raise InputError(f"{final} exists: the run is finished; choose another folder, or give force.")
    backbone = _backbone(task)
    if task.size % backbone.patch or (backbone.exact and task.size != backbone.size):
        wanted = f"{backbone.size}" if backbone.exact else f"a multiple of {backbone.patch}"
        raise OptionError(f"size={task.size} does not suit the model, which needs {wanted}.")
    pairs, numbers, held, held_numbers = _data(task, backbone)
    device = choose_device(task.device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(task.seed)
        model = LinearSegmenter(
            backbone,
            pairs.n_classes,
            norm=task.norm,
            dropout=task.dropout,
            tune=task.backbone_rate > 0,
        )
    model.to(device).train()
    train(task, model, pairs, numbers, device, out, progress)
    found = score(model, held, held_numbers, backbone.patch, task.size)
    found |= {
        "n_classes": pairs.n_classes,
        "learnt_from": [pairs.names[n] for n in numbers],
        "task": asdict(task),
        "notes": list(dict.fromkeys((*pairs.notes, *held.notes))),
        "versions": {"vispe": __version__, "torch": torch.__version__},
    }
    with atomic_path(out / "linear.safetensors", force=True) as temporary:
        state = {k: v.detach().cpu().contiguous() for k, v in model.own_state().items()}
        save_file(state, temporary)
    write_json(final, found, force=task.force)
    (out / "state.pt").unlink(missing_ok=True)
    return found


def _backbone(task: LinearTask) -> Backbone:
    if task.retrofit is not None:
        return load_student(task.retrofit)[0]
    if task.model is None:
        raise OptionError("Linear segmentation needs a model or a retrofit, got neither.")
    found = load_teacher(task.model, seed=task.seed)
    if task.pos_embed is not None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(task.seed)
            convert(found.model, task.pos_embed)
    found.model.eval()
    return found


def _data(task: LinearTask, backbone: Backbone) -> tuple[Pairs, list[int], Pairs, list[int]]:
    """Return images to learn from and images to score, each with the numbers that are used."""
    from vispe.evaluate.subject import Subject

    subject = Subject("The model", mean=backbone.mean, std=backbone.std)
    pairs = Pairs(task.images, task.masks, subject.tensor, task.zero, task.n_classes)
    if task.val_images is not None and task.val_masks is not None:
        held = Pairs(task.val_images, task.val_masks, subject.tensor, task.zero, pairs.n_classes)
        return pairs, list(range(len(pairs))), held, list(range(len(held)))
    learnt, kept = split(len(pairs), task.val_every)
    return pairs, learnt, pairs, kept


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default that of the process, and return the exit code."""
    from vispe.errors import VispeError

    task = read_task(sys.argv[1:] if argv is None else argv)

    def told(step: int, loss: float) -> None:
        if step % task.log_every == 0 or step == task.steps:
            sys.stderr.write(f"\rupdate {step} of {task.steps}, loss {loss:.4f}")
            sys.stderr.flush()

    try:
        metrics = linear_segmentation(task, told)
    except VispeError as error:
        sys.stderr.write(f"linear: {error}\n")
        return 2
    ious = ", ".join("-" if v is None else f"{v:.3f}" for v in metrics["iou"])
    miou = "-" if metrics["miou"] is None else f"{metrics['miou']:.4f}"
    sys.stdout.write(f"mIoU {miou} on {len(metrics['images'])} images (by class: {ious})\n")
    sys.stderr.write(f"\nwritten: {Path(task.out) / 'metrics.json'}\n")
    return 0
