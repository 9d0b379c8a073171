"""Training loop of a linear segmentation, with resumption."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from vispe.backbones.distributed import POSITIONS, Processes
from vispe.encodings.positions import set_progress
from vispe.train.linear.dataset import IGNORE, Part, batch_at
from vispe.train.linear.model import LinearSegmenter
from vispe.train.linear.optimizer import create_optimizer
from vispe.train.linear.task import LinearTask
from vispe.train.loop import TrainingStep
from vispe.train.lr_schedule import cosine_factors
from vispe.train.retrofit.checkpoint import RunFolder
from vispe.train.retrofit.training_log import Log

Progress = Callable[[int, float], None]
"""Called after every training step with the number of steps done and the loss."""


def train(
    task: LinearTask, model: LinearSegmenter, part: Part, device: str, folder: RunFolder, progress: Progress
) -> None:
    """Train from the last checkpoint of the folder, if there is one; checkpoint and log are written to it.

    Args:
        task: learning rates, steps and intervals.
        model: the model, in training mode, on the device.
        part: training images and masks.
        device: device of the model.
        folder: output folder of this task.
        progress: called after every training step.
    """
    optimizer = create_optimizer(task, model)
    first = 0
    if (state := folder.load()) is not None:
        first, weights, moment = state
        model.load_state_dict(weights["model"], strict=model.tune)
        optimizer.load_state_dict(moment["optimizer"])
    log, training_step = Log(folder.log, first), TrainingStep(optimizer)
    factors = cosine_factors(task.steps)
    for step in range(first, task.steps):
        set_progress(model, step / task.steps, seed=Processes().seed(task.seed, step, POSITIONS))
        images, masks = batch_at(
            part, step, batch=task.batch_size, size=task.img_size, poses=task.poses, seed=task.seed
        )
        with torch.random.fork_rng():
            # dropout depends on the seed and the step only, so a resumed run is identical
            torch.manual_seed(task.seed * 1_000_003 + step)
            rates = [group["rate"] * factors[step] for group in optimizer.param_groups]
            loss = training_step(partial(_backward, model, images.to(device), masks.to(device)), rates)
        done, value = step + 1, float(loss)
        if done % task.logging_steps == 0 or done == task.steps:
            log.write({"step": done, "loss": value, "rate": task.lr * factors[step]})
        if done % task.save_steps == 0 or done == task.steps:
            folder.save(done, {"model": model.trained_state_dict()}, {"optimizer": optimizer.state_dict()})
        progress(done, value)
    set_progress(model, 1.0)


def _backward(model: LinearSegmenter, images: Tensor, masks: Tensor) -> Tensor:
    """Add the gradients of a batch; return its loss."""
    # mean over the pixels that are not ignored; 0 for a batch without any
    loss = cross_entropy(model(images), masks, ignore_index=IGNORE, reduction="sum")
    loss = loss / (masks != IGNORE).sum().clamp_min(1).item()
    loss.backward()
    return loss.detach()
