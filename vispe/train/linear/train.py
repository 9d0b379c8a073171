"""The updates of a linear segmentation, and how a stopped run goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from vispe.errors import OptionError
from vispe.train.linear.data import IGNORE, Pairs, batch_at
from vispe.train.linear.model import LinearSegmenter
from vispe.train.linear.task import FREE, LinearTask


def train(
    task: LinearTask,
    model: LinearSegmenter,
    pairs: Pairs,
    numbers: list[int],
    device: str,
    out: Path,
    progress: Callable[[int, float], None],
) -> None:
    """Train from the last state in the folder, if there is one; state and log are written there.

    Args:
        task: how.
        model: what is trained, in training mode, on the device.
        pairs: images and masks.
        numbers: of those that are learnt from.
        device: where it computes.
        out: the folder.
        progress: hears the number of updates done and the loss after each.

    Raises:
        OptionError: the state is that of another task.
    """
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
    from vispe.files import atomic_path

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
