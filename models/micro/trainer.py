"""What training vispe_micro does in a step: tasks, the loss, the average of the weights, and the state on disk."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.micro.coarse import Coarse
from models.micro.episode import Episode, intersection_over_union, sample
from models.micro.tasks import HELD, Task, task
from vispe.backbones.micro.load import sizes
from vispe.backbones.micro.model import STRIDE, Micro
from vispe.errors import OptionError
from vispe.segment.features.filters import Filters

SIZES: dict[str, dict[str, Any]] = {
    "small": {},
    "large": {"widths": (32, 64, 128), "width": 192, "heads": 6},
}
"""Arguments of `Micro`: what the package ships, and its teacher."""


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
        near: weight of the distance to a teacher's features, where there is one; it falls with the learning rate.
        coarse: weight of the distance to a coarse teacher's features, where there is one; it falls likewise.
        block: block of the coarse teacher.
        size: of the network, a key of SIZES.
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
    near: float = 1.0
    coarse: float = 1.0
    block: int = 7
    size: str = "small"


class Trainer:
    """Model, optimiser and average, and how they are kept on disk."""

    def __init__(
        self,
        recipe: Recipe,
        pictures: Sequence[np.ndarray],
        out: Path,
        teacher: Micro | None = None,
        coarse: Path | None = None,
    ) -> None:
        self.teacher = teacher
        without = {"near": teacher, "coarse": coarse, "block": coarse}
        for name, needed in without.items():
            if needed is None and getattr(recipe, name) != getattr(Recipe, name):
                raise OptionError(
                    f"{name}={getattr(recipe, name):g} has no effect without a{' coarse' * (name != 'near')} teacher; "
                    "give one, or leave it out."
                )
        self.recipe, self.pictures, self.out, self.step = recipe, pictures, out, 0
        self.seen = [p for i, p in enumerate(pictures) if i % HELD]
        torch.manual_seed(recipe.seed)
        self.model, self.episode, self.filters = Micro(**SIZES[recipe.size]), Episode(), Filters()
        if teacher is not None and teacher.dim != self.model.dim:
            raise OptionError(
                f"the teacher gives {teacher.dim} features, but the network to train {self.model.dim}; "
                "give another one."
            )
        matrices = [p for p in self.model.parameters() if p.ndim >= 2]
        plain = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [
            {"params": matrices, "share": 1.0},
            {"params": plain, "share": 1.0, "weight_decay": 0.0},
            {"params": self.episode.parameters(), "share": 10.0, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, recipe.lr, (0.9, 0.98), weight_decay=recipe.weight_decay)
        self.average = deepcopy(self.model).eval().requires_grad_(False)
        self.coarse = None if coarse is None else Coarse(coarse, recipe.block, self.model)
        if self.coarse is not None:
            self.optimizer.add_param_group({"params": list(self.coarse.parameters()), "share": 1.0})

    def load(self) -> None:
        """Go on from `state.pt`, or from `stable.pt` where the former has gone beyond the wanted constant rate."""
        for name in ("state.pt", "stable.pt"):
            if (self.out / name).is_file():
                state = torch.load(self.out / name, weights_only=True)
                if name == "state.pt" and state["steps"] != self.recipe.steps and state["fallen"]:
                    continue
                if sizes(state["model"]) != sizes(self.model.state_dict()):
                    raise OptionError(
                        f"{self.out / name} holds a network of another size than {self.recipe.size!r}; "
                        "give its size, or another folder."
                    )
                self.model.load_state_dict(state["model"])
                self.episode.load_state_dict(state["episode"])
                self.average.load_state_dict(state["average"])
                if self.coarse is not None and "coarse" not in state:
                    raise OptionError(
                        f"{self.out / name} was trained without a coarse teacher; give another folder."
                    )
                if self.coarse is not None:
                    self.coarse.load_state_dict(state["coarse"])
                self.optimizer.load_state_dict(state["optimizer"])
                self.step = state["step"]
                return

    def save(self, name: str = "state.pt") -> None:
        """Write the state, all or nothing."""
        names = ("model", "episode", "average", "optimizer", *(("coarse",) if self.coarse else ()))
        parts = {k: getattr(self, k).state_dict() for k in names}
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
        images = torch.from_numpy(np.stack(shown))
        maps = self.model.train()(images)
        second = dict(zip(others, maps[len(tasks) :], strict=True))
        found = [
            self.ask(one, maps[i], [self.recipe.seed, self.step, i], other=second.get(i))
            for i, one in enumerate(tasks)
        ]
        loss = torch.stack([f[0] for f in found]).mean()
        if self.teacher is not None:
            loss = loss + self.recipe.near * self.rate() * distance(maps, self.teacher(images))
        if self.coarse is not None:
            loss = loss + self.recipe.coarse * self.rate() * self.coarse(images)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        learned = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(learned, 1.0)
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
        scribbled = random.permutation(np.flatnonzero(one.scribbles))[:400]
        asked = random.integers(0, one.labels.size, self.recipe.asked)
        rare = [random.choice(np.flatnonzero(one.labels == k), 100) for k in range(int(one.labels.max()) + 1)]
        asked = np.concatenate([asked, *rare])
        drawn_on = one.image if one.other is None else one.other
        features = [
            self.read(image, own, where, filters)
            for image, own, where in (
                (drawn_on, maps if other is None else other, scribbled),
                (one.image, maps, asked),
            )
        ]
        truth = [
            torch.from_numpy(one.labels.reshape(-1)[where].astype(np.int64)) for where in (scribbled, asked)
        ]
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


def distance(features: Tensor, target: Tensor) -> Tensor:
    """Return the mean square of the difference over the variance of each channel, (b, c, h, w) twice -> ()."""
    spread = target.var((0, 2, 3), keepdim=True)
    return ((features - target) ** 2 / spread).mean()
