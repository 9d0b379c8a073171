"""Linear segmentation: how much of a segmentation do features hold, read by one linear map?

    python -m vispe.train.linear --config configs/linear_segmentation.yaml --images a --masks b --out c

A backbone, frozen or fine-tuned, gives patch features; batch norm, dropout and a 1x1 convolution make scores of them,
bilinear interpolation brings these to pixels. The score is the dataset mIoU: intersections and unions of all pixels of
all images are summed before they are divided, so no image and no batch counts more than its pixels.

A run that was stopped goes on where it was when it is started again in the same folder, with the same numbers as a run
that was not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn.functional import cross_entropy

import vispe
from vispe.errors import InputError, OptionError
from vispe.train.config import Teacher
from vispe.train.linear_data import IGNORE, Pairs, batch_at, split
from vispe.train.linear_model import LinearSegmenter, score
from vispe.train.models import Backbone, load_student, load_teacher

FREE = ("out", "force", "device", "checkpoint_every", "log_every")
"""Keys that may differ when a stopped run goes on."""


@dataclass(frozen=True)
class LinearTask:
    """What a linear segmentation is told.

    Attributes:
        images: files, folders or wildcards; every page of a stack is an image.
        masks: their masks, matched by name (a.png with a.png or a_mask.png), or else by order.
        out: folder for the results.
        model: backbone; leave it out with retrofit.
        retrofit: folder of a finished retrofit, whose student is the backbone.
        pos_embed: positional encoding that replaces the model's own.
        val_images: images to score; by default some of the images are held out.
        val_masks: their masks.
        val_every: without val_images, every n-th image is held out and scored.
        zero: whether the value 0 in a mask is the first class, or does not count.
        n_classes: number of classes, where the masks do not show all.
        size: side of the windows in pixels, a multiple of the patch.
        steps: updates.
        batch: windows for each update.
        rate: learning rate of the linear map; it falls to 0 along a cosine.
        backbone_rate: learning rate of the backbone; 0 keeps it frozen.
        weight_decay: of AdamW.
        norm: batch norm before the linear map.
        dropout: share of features that are dropped in training.
        poses: put windows into the eight poses of a square at random.
        seed: of everything drawn.
        device: auto, cpu, cuda, ...
        log_every: updates between two lines of log.jsonl.
        checkpoint_every: updates between two states that a stopped run can go on from.
        force: overwrite a finished run.
    """

    images: list[str]
    masks: list[str]
    out: str
    model: Teacher | None = None
    retrofit: str | None = None
    pos_embed: str | None = None
    val_images: list[str] | None = None
    val_masks: list[str] | None = None
    val_every: int = 5
    zero: Literal["class", "ignore"] = "class"
    n_classes: int | None = None
    size: int = 224
    steps: int = 2000
    batch: int = 16
    rate: float = 1e-3
    backbone_rate: float = 0.0
    weight_decay: float = 0.01
    norm: bool = True
    dropout: float = 0.1
    poses: bool = True
    seed: int = 0
    device: str = "auto"
    log_every: int = 20
    checkpoint_every: int = 200
    force: bool = False

    def check(self) -> None:
        """Check all that can be checked without the model and the data.

        Raises:
            OptionError: a number out of its range, or keys that contradict each other.
        """
        if (self.model is None) == (self.retrofit is None):
            found = "neither" if self.model is None else "both"
            raise OptionError(f"Linear segmentation needs a model or a retrofit, one of them, got {found}.")
        if self.retrofit is not None and self.pos_embed is not None:
            raise OptionError(
                f"pos_embed={self.pos_embed} has no effect on the student of a retrofit, which has its own; "
                "leave it out."
            )
        if (self.val_images is None) != (self.val_masks is None):
            raise OptionError("val_images and val_masks belong together; give both or neither.")
        for key in ("size", "steps", "batch", "log_every", "checkpoint_every"):
            if getattr(self, key) < 1:
                raise OptionError(f"{key} must be at least 1, got {getattr(self, key)}.")
        if self.rate <= 0 or self.backbone_rate < 0 or self.weight_decay < 0 or not 0 <= self.dropout < 1:
            raise OptionError(
                "rate must be above 0, backbone_rate and weight_decay 0 or more, and dropout from 0 to below 1; got "
                f"{self.rate}, {self.backbone_rate}, {self.weight_decay} and {self.dropout}."
            )


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

    from vispe.segment.features import choose_device
    from vispe.segment.outputs import atomic_path, write_json

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
    _train(task, model, pairs, numbers, device, out, progress)
    found = score(model, held, held_numbers, backbone.patch, task.size)
    found |= {
        "n_classes": pairs.n_classes,
        "learnt_from": [pairs.names[n] for n in numbers],
        "task": asdict(task),
        "notes": list(dict.fromkeys((*pairs.notes, *held.notes))),
        "versions": {"vispe": vispe.__version__, "torch": torch.__version__},
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
            vispe.convert(found.model, task.pos_embed)
    found.model.eval()
    return found


def _data(task: LinearTask, backbone: Backbone) -> tuple[Pairs, list[int], Pairs, list[int]]:
    """Return images to learn from and images to score, each with the numbers that are used."""
    from vispe.evaluate.rotation.subject import Subject

    subject = Subject("The model", mean=backbone.mean, std=backbone.std)
    pairs = Pairs(task.images, task.masks, subject.tensor, task.zero, task.n_classes)
    if task.val_images is not None and task.val_masks is not None:
        held = Pairs(task.val_images, task.val_masks, subject.tensor, task.zero, pairs.n_classes)
        return pairs, list(range(len(pairs))), held, list(range(len(held)))
    learnt, kept = split(len(pairs), task.val_every)
    return pairs, learnt, pairs, kept


def _train(
    task: LinearTask,
    model: LinearSegmenter,
    pairs: Pairs,
    numbers: list[int],
    device: str,
    out: Path,
    progress: Callable[[int, float], None],
) -> None:
    """Train from the last state in the folder, if there is one."""
    head = [p for name, p in model.named_parameters() if not name.startswith("backbone.")]
    groups: list[dict[str, Any]] = [{"params": head, "rate": task.rate}]
    if model.tune:
        groups.append({"params": list(model.backbone.parameters()), "rate": task.backbone_rate})
    optimizer = torch.optim.AdamW(groups, lr=task.rate, weight_decay=task.weight_decay)
    identity = json.dumps({k: v for k, v in asdict(task).items() if k not in FREE}, sort_keys=True)
    first = _resumed(out, identity, model, optimizer, task.force)
    out.mkdir(parents=True, exist_ok=True)
    log = out / "log.jsonl"
    lines = log.read_text().splitlines() if first and log.exists() else []
    log.write_text("".join(f"{line}\n" for line in lines if json.loads(line)["step"] <= first))
    schedule = torch.arange(task.steps + 1) / task.steps
    factors = (0.5 + 0.5 * torch.cos(torch.pi * schedule)).tolist()
    for step in range(first, task.steps):
        for group in optimizer.param_groups:
            group["lr"] = group["rate"] * factors[step]
        images, masks = batch_at(
            pairs, numbers, step, batch=task.batch, size=task.size, poses=task.poses, seed=task.seed
        )
        with torch.random.fork_rng():
            torch.manual_seed(task.seed * 1_000_003 + step)  # of the dropout, whatever came before
            scores = model(images.to(device))
            loss = cross_entropy(scores, masks.to(device), ignore_index=IGNORE, reduction="sum")
            loss = loss / (masks != IGNORE).sum().clamp_min(1).item()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
        optimizer.step()
        done, value = step + 1, float(loss.detach())
        if done % task.log_every == 0 or done == task.steps:
            with log.open("a") as file:
                file.write(
                    json.dumps({"step": done, "loss": value, "rate": task.rate * factors[step]}) + "\n"
                )
        if done % task.checkpoint_every == 0 or done == task.steps:
            _save(out, identity, done, model, optimizer)
        progress(done, value)


def _save(
    out: Path, identity: str, step: int, model: LinearSegmenter, optimizer: torch.optim.Optimizer
) -> None:
    from vispe.segment.outputs import atomic_path

    state = {
        "identity": identity,
        "step": step,
        "model": model.own_state(),
        "optimizer": optimizer.state_dict(),
    }
    with atomic_path(out / "state.pt", force=True) as temporary:
        torch.save(state, temporary)


def _resumed(
    out: Path, identity: str, model: LinearSegmenter, optimizer: torch.optim.Optimizer, force: bool
) -> int:
    """Load the last state; return the number of updates that were done."""
    path = out / "state.pt"
    if not path.exists():
        return 0
    state = torch.load(path, map_location="cpu", weights_only=True)
    if state["identity"] != identity:
        if force:
            return 0
        before, now = json.loads(state["identity"]), json.loads(identity)
        changed = [k for k in now if now[k] != before.get(k)]
        raise OptionError(
            f"{out} holds a stopped run with other values of {', '.join(changed)}; choose another folder, or give "
            "force to start anew."
        )
    model.load_state_dict(state["model"], strict=model.tune)
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def read_task(argv: Sequence[str]) -> LinearTask:
    """Return what a command line asks for; `--config FILE` reads YAML, options after it win."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(
        prog="python -m vispe.train.linear", description="Linear segmentation on features.", default_env=False
    )
    parser.add_argument("--config", action="config", help="YAML file; options after it win")
    parser.add_class_arguments(LinearTask, as_group=False)
    found = parser.parse_args(list(argv))
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # the older name
    values = {k: v for k, v in vars(instantiate(found)).items() if k != "config"}
    return LinearTask(**values)


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


if __name__ == "__main__":
    sys.exit(main())
