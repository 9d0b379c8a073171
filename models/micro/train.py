"""Train vispe_micro: features that make scribbles go far, on pictures by formula, collages and real pictures.

    python -m models.micro.train --out runs/micro --steps 4000 [--folders pictures/]

Goes on where it was when it is started again; the learning rate is constant and falls to 0 over the last fifth, and
`stable.pt` keeps the state before the fall, so that a longer run can go on from there. Writes `weights.safetensors`
(average of the weights, float16), `log.jsonl` and `card.json`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

import vispe
from models import pictures as data
from models.micro.episode import Episode, intersection_over_union, sample
from models.micro.tasks import HELD, Task, task
from vispe.micro.model import STRIDE, Micro
from vispe.segment.filters import Filters


@dataclass(frozen=True)
class Recipe:
    """How vispe_micro is trained.

    Attributes:
        steps: optimiser steps.
        batch: pictures in a step.
        side: of a picture in pixels.
        lr: learning rate of AdamW.
        weight_decay: of AdamW.
        asked: pixels of each picture that the loss reads.
        average: decay of the average of the weights.
        seed: of everything.
        series: share of the tasks whose scribbles are on another picture of the same place.
    """

    steps: int = 4000
    batch: int = 8
    side: int = 128
    lr: float = 1e-3
    weight_decay: float = 0.02
    asked: int = 1500
    average: float = 0.998
    seed: int = 0
    series: float = 0.0


class Trainer:
    """Model, optimiser and average, and how they are kept on disk."""

    def __init__(self, recipe: Recipe, pictures: Sequence[np.ndarray], out: Path) -> None:
        self.recipe, self.pictures, self.out, self.step = recipe, pictures, out, 0
        self.seen = [p for i, p in enumerate(pictures) if i % HELD]
        torch.manual_seed(recipe.seed)
        self.model, self.episode, self.filters = Micro(), Episode(), Filters()
        matrices = [p for p in self.model.parameters() if p.ndim >= 2]
        plain = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [
            {"params": matrices, "share": 1.0},
            {"params": plain, "share": 1.0, "weight_decay": 0.0},
            {"params": self.episode.parameters(), "share": 10.0, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, recipe.lr, (0.9, 0.98), weight_decay=recipe.weight_decay)
        self.average = deepcopy(self.model).eval().requires_grad_(False)

    def load(self) -> None:
        """Go on from `state.pt`, or from `stable.pt` where the former has gone beyond the wanted constant rate."""
        for name in ("state.pt", "stable.pt"):
            if (self.out / name).is_file():
                state = torch.load(self.out / name, weights_only=True)
                if name == "state.pt" and state["steps"] != self.recipe.steps and state["fallen"]:
                    continue
                self.model.load_state_dict(state["model"])
                self.episode.load_state_dict(state["episode"])
                self.average.load_state_dict(state["average"])
                self.optimizer.load_state_dict(state["optimizer"])
                self.step = state["step"]
                return

    def save(self, name: str = "state.pt") -> None:
        """Write the state, all or nothing."""
        parts = {k: getattr(self, k).state_dict() for k in ("model", "episode", "average", "optimizer")}
        state = {
            **parts,
            "step": self.step,
            "steps": self.recipe.steps,
            "fallen": self.rate() < 1 and self.step > 200,
        }
        torch.save(state, self.out / "part.pt")
        (self.out / "part.pt").rename(self.out / name)

    def rate(self) -> float:
        """Return the share of the learning rate at this step."""
        return min(1.0, (self.step + 1) / 100, 5 * (1 - self.step / self.recipe.steps))

    def train_step(self) -> dict[str, float]:
        """Take one step -> mean loss and IoU."""
        tasks = [self.task(self.step, i) for i in range(self.recipe.batch)]
        others = [i for i, t in enumerate(tasks) if t.other is not None]
        shown = [t.image for t in tasks] + [tasks[i].other for i in others]
        maps = self.model.train()(torch.from_numpy(np.stack(shown)))
        second = dict(zip(others, maps[len(tasks) :], strict=True))
        found = [
            self.ask(one, maps[i], [self.recipe.seed, self.step, i], other=second.get(i))
            for i, one in enumerate(tasks)
        ]
        loss = torch.stack([f[0] for f in found]).mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([*self.model.parameters(), *self.episode.parameters()], 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.lr * self.rate() * group["share"]
        self.optimizer.step()
        decay = min(self.recipe.average, (self.step + 1) / (self.step + 10))
        with torch.no_grad():
            for mean, now in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(now, 1 - decay)
        self.step += 1
        return {
            "loss": float(loss.detach()),
            "iou": float(np.mean([f[1] for f in found])),
            "norm": float(norm),
        }

    def task(self, step: int, i: int) -> Task:
        """Draw picture i of a step."""
        random = np.random.default_rng([self.recipe.seed, step, i])
        return task(random, self.recipe.side, self.seen, self.recipe.series)

    def ask(
        self,
        one: Task,
        maps: Tensor | None,
        seed: list[int],
        filters: bool | None = None,
        other: Tensor | None = None,
    ) -> tuple[Tensor, float]:
        """Teach a classifier by the scribbles of a task and ask it other pixels -> loss, IoU.

        Args:
            one: the task.
            maps: (c, h, w) features of the model; None to leave them out.
            seed: of the pixels that are asked.
            filters: whether the classifier sees the filters of `vispe segment` too; at random if None.
            other: features of the picture that is drawn on, where it is not the one that is asked.
        """
        random = np.random.default_rng(seed)
        filters = bool(random.random() < 0.6) if filters is None else filters
        told = random.permutation(np.flatnonzero(one.scribbles))[:400]
        asked = random.integers(0, one.labels.size, self.recipe.asked)
        rare = [random.choice(np.flatnonzero(one.labels == k), 100) for k in range(int(one.labels.max()) + 1)]
        asked = np.concatenate([asked, *rare])
        drawn_on = one.image if one.other is None else one.other
        features = [
            self.read(image, own, where, filters)
            for image, own, where in (
                (drawn_on, maps if other is None else other, told),
                (one.image, maps, asked),
            )
        ]
        truth = [torch.from_numpy(one.labels.reshape(-1)[where].astype(np.int64)) for where in (told, asked)]
        scores = self.episode(features[0], truth[0], features[1])
        loss = torch.nn.functional.cross_entropy(scores, truth[1])
        uniform = slice(0, self.recipe.asked)
        return loss, intersection_over_union(scores[uniform].argmax(1), truth[1][uniform])

    def read(self, image: np.ndarray, maps: Tensor | None, where: np.ndarray, filters: bool) -> Tensor:
        """Return the features (n, f) of pixels."""
        parts = [] if maps is None else [sample(maps, torch.from_numpy(where), STRIDE)]
        if filters:
            page = self.filters(np.ascontiguousarray(image.mean(0)[..., None]))
            parts.append(torch.from_numpy(page.reshape(-1, page.shape[-1])[where]))
        return torch.cat(parts, 1)

    @torch.no_grad()
    def validate(self, count: int = 96) -> dict[str, Any]:
        """Score tasks that training never sees, with filters, with the model, and with both -> mean IoU of each."""
        rows: dict[str, list[tuple[float, float, float]]] = {}
        for i in range(count):
            one = task(
                np.random.default_rng([2**31, i]), self.recipe.side, self.pictures[::HELD], self.recipe.series
            )
            maps = self.average(torch.from_numpy(one.image)[None])[0]
            other = None if one.other is None else self.average(torch.from_numpy(one.other)[None])[0]
            seed = [2**31, i]
            scores = (
                self.ask(one, None, seed, filters=True)[1],
                self.ask(one, maps, seed, filters=False, other=other)[1],
                self.ask(one, maps, seed, filters=True, other=other)[1],
            )
            rows.setdefault(one.kind, []).append(scores)
            rows.setdefault("all", []).append(scores)
        names = ("filters", "micro", "both")
        return {
            k: dict(zip(names, np.mean(v, 0).round(4).tolist(), strict=True)) for k, v in sorted(rows.items())
        }


def main(words: Sequence[str] | None = None) -> None:
    """Train, validate and write the weights."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of states, weights, log and card")
    parser.add_argument("--folders", type=Path, nargs="*", default=[], help="folders of real pictures")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so long; go on later")
    parser.add_argument("--every", type=int, default=200, help="steps between validations")
    for field in fields(Recipe):
        parser.add_argument(
            f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default
        )
    given = vars(parser.parse_args(words))
    out, folders, minutes, every = (given.pop(k) for k in ("out", "folders", "minutes", "every"))
    recipe = Recipe(**given)
    out.mkdir(parents=True, exist_ok=True)
    pictures = [p.numpy() for source in (data.installed(), data.folders(folders)) for p in source]
    trainer = Trainer(recipe, pictures, out)
    trainer.load()
    start, cpu = time.monotonic(), time.process_time()
    recent: list[dict[str, float]] = []
    while trainer.step < recipe.steps and time.monotonic() - start < 60 * minutes:
        if trainer.step == int(0.8 * recipe.steps):
            trainer.save("stable.pt")
        recent.append(trainer.train_step())
        if trainer.step % 20 == 0:
            mean = {k: round(float(np.mean([r[k] for r in recent])), 4) for k in recent[0]}
            _log(out, {"step": trainer.step, **mean, "cpu_s": round(time.process_time() - cpu, 1)})
            recent = []
        if trainer.step % 100 == 0:
            trainer.save()
        if trainer.step % every == 0 or trainer.step == recipe.steps:
            _log(out, {"step": trainer.step, "validation": trainer.validate()})
    trainer.save()
    weights = {k: v.half().contiguous() for k, v in trainer.average.state_dict().items()}
    save_file(weights, out / "weights.safetensors")
    card = {
        "recipe": asdict(recipe), "steps_done": trainer.step, "pictures": len(pictures),
        "folders": [f.name for f in folders], "validation": trainer.validate(400),
        "versions": {"vispe": vispe.__version__, "torch": torch.__version__, "numpy": np.__version__},
    }  # fmt: skip
    (out / "card.json").write_text(json.dumps(card, indent=1) + "\n")


def _log(out: Path, row: dict[str, Any]) -> None:
    with (out / "log.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # gradients of far pixels are denormal, and three times slower
    main()
