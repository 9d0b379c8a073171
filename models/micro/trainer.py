"""Training step of vispe_micro: tasks, loss, exponential moving average of the weights, and checkpoints."""

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
from vispe.segment.features.filters.filters2d import Filters
from vispe.train.loop import TrainingStep, update_average

SIZES: dict[str, dict[str, Any]] = {
    "small": {},
    "large": {"widths": (32, 64, 128), "width": 192, "heads": 6},
}
"""Arguments of `Micro` for the network in the package (small) and its teacher (large)."""


@dataclass(frozen=True)
class Recipe:
    """Training settings of vispe_micro.

    Attributes:
        steps: optimizer steps.
        batch_size: images per step.
        img_size: image size in pixels.
        lr: learning rate of AdamW.
        weight_decay: weight decay of AdamW.
        num_queries: query pixels per image in the loss.
        ema_decay: decay of the exponential moving average of the weights.
        seed: random seed.
        series: fraction of tasks with scribbles on another image of the same field of view.
        near: loss weight of the distance to the features of a teacher; scaled with the learning rate.
        coarse: loss weight of the distance to the features of a coarse teacher; scaled with the learning rate.
        block: block of the coarse teacher.
        size: network size, a key of SIZES.
    """

    steps: int = 4000
    batch_size: int = 8
    img_size: int = 128
    lr: float = 1e-3
    weight_decay: float = 0.02
    num_queries: int = 1500
    ema_decay: float = 0.998
    seed: int = 0
    series: float = 0.0
    near: float = 1.0
    coarse: float = 1.0
    block: int = 7
    size: str = "small"


class Trainer:
    """Model, optimizer and weight average, with checkpoints.

    Args:
        recipe: training settings.
        images: real images (3, h, w) uint8; every `HELD`-th is used for validation only.
        out: folder for checkpoints.
        teacher: network for feature distillation.
        coarse: folder of a retrofitted model for distillation into the trunk.

    Raises:
        OptionError: an option needs a teacher, or the teacher has another number of features.
    """

    def __init__(
        self,
        recipe: Recipe,
        images: Sequence[np.ndarray],
        out: Path,
        teacher: Micro | None = None,
        coarse: Path | None = None,
    ) -> None:
        self.teacher = teacher
        without = {"near": teacher, "coarse": coarse, "block": coarse}
        for name, needed in without.items():
            if needed is None and getattr(recipe, name) != getattr(Recipe, name):
                raise OptionError(
                    f"{name}={getattr(recipe, name):g} has no effect without a{' coarse' * (name != 'near')} teacher. "
                    "Omit it or set a teacher."
                )
        self.recipe, self.images, self.out, self.step = recipe, images, out, 0
        self.training_images = [p for i, p in enumerate(images) if i % HELD]
        torch.manual_seed(recipe.seed)
        self.model, self.episode, self.filters = Micro(**SIZES[recipe.size]), Episode(), Filters()
        if teacher is not None and teacher.dim != self.model.dim:
            raise OptionError(
                f"the teacher has {teacher.dim} features, but the network to train has {self.model.dim}. "
                "Use another teacher."
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
        """Resume from `state.pt`, or from `stable.pt` if the learning rate of the former has already decayed.

        Raises:
            OptionError: the checkpoint has another size, or was trained without a coarse teacher.
        """
        for name in ("state.pt", "stable.pt"):
            if (self.out / name).is_file():
                state = torch.load(self.out / name, weights_only=True)
                if name == "state.pt" and state["steps"] != self.recipe.steps and state["fallen"]:
                    continue
                if sizes(state["model"]) != sizes(self.model.state_dict()):
                    raise OptionError(
                        f"{self.out / name} contains a network of another size than {self.recipe.size!r}. "
                        "Change `size` or choose another folder."
                    )
                self.model.load_state_dict(state["model"])
                self.episode.load_state_dict(state["episode"])
                self.average.load_state_dict(state["average"])
                if self.coarse is not None and "coarse" not in state:
                    raise OptionError(
                        f"{self.out / name} was trained without a coarse teacher. Choose another folder."
                    )
                if self.coarse is not None:
                    self.coarse.load_state_dict(state["coarse"])
                self.optimizer.load_state_dict(state["optimizer"])
                self.step = state["step"]
                return

    def save(self, name: str = "state.pt") -> None:
        """Write the state atomically."""
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
        """Return the factor of the learning rate at this step: warm-up over 100 steps, decay over the last fifth."""
        return min(1.0, (self.step + 1) / 100, 5 * (1 - self.step / self.recipe.steps))

    def train_step(self) -> dict[str, float]:
        """Run one training step -> mean loss, mean IoU and gradient norm."""
        tasks = [self.sample_task(self.step, i) for i in range(self.recipe.batch_size)]
        others = [i for i, t in enumerate(tasks) if t.other is not None]
        stack = [t.image for t in tasks] + [tasks[i].other for i in others]
        images = torch.from_numpy(np.stack(stack))
        maps = self.model.train()(images)
        other_maps = dict(zip(others, maps[len(tasks) :], strict=True))
        results = [
            self.evaluate_task(one, maps[i], [self.recipe.seed, self.step, i], other=other_maps.get(i))
            for i, one in enumerate(tasks)
        ]
        loss = torch.stack([r[0] for r in results]).mean()
        if self.teacher is not None:
            loss = loss + self.recipe.near * self.rate() * distance(maps, self.teacher(images))
        if self.coarse is not None:
            loss = loss + self.recipe.coarse * self.rate() * self.coarse(images)
        rates = [self.recipe.lr * self.rate() * group["share"] for group in self.optimizer.param_groups]
        training_step = TrainingStep(self.optimizer, clip_grad=1.0)
        training_step(loss.backward, rates)
        average, weights = list(self.average.parameters()), list(self.model.parameters())
        update_average(average, weights, self.recipe.ema_decay, self.step)
        self.step += 1
        return {
            "loss": float(loss.detach()),
            "iou": float(np.mean([r[1] for r in results])),
            "norm": float(training_step.norm),
        }

    def sample_task(self, step: int, i: int) -> Task:
        """Return task i of a step."""
        random = np.random.default_rng([self.recipe.seed, step, i])
        return task(random, self.recipe.img_size, self.training_images, self.recipe.series)

    def evaluate_task(
        self,
        one: Task,
        maps: Tensor | None,
        seed: list[int],
        filters: bool | None = None,
        other: Tensor | None = None,
    ) -> tuple[Tensor, float]:
        """Fit a classifier to the scribbles of a task and evaluate it at query pixels -> loss, IoU.

        Args:
            one: task.
            maps: (c, h, w) features of the model; None excludes them.
            seed: seed of the query pixels.
            filters: whether the filters of `vispe segment` are included; None: at random.
            other: features of the image with the scribbles, if it is not the query image.
        """
        random = np.random.default_rng(seed)
        filters = bool(random.random() < 0.6) if filters is None else filters
        scribbled = random.permutation(np.flatnonzero(one.scribbles))[:400]
        queries = random.integers(0, one.labels.size, self.recipe.num_queries)
        rare = [random.choice(np.flatnonzero(one.labels == k), 100) for k in range(int(one.labels.max()) + 1)]
        queries = np.concatenate([queries, *rare])
        scribbled_image = one.image if one.other is None else one.other
        features = [
            self.pixel_features(image, image_maps, pixels, filters)
            for image, image_maps, pixels in (
                (scribbled_image, maps if other is None else other, scribbled),
                (one.image, maps, queries),
            )
        ]
        truth = [
            torch.from_numpy(one.labels.reshape(-1)[pixels].astype(np.int64))
            for pixels in (scribbled, queries)
        ]
        scores = self.episode(features[0], truth[0], features[1])
        loss = torch.nn.functional.cross_entropy(scores, truth[1])
        uniform = slice(0, self.recipe.num_queries)
        return loss, intersection_over_union(scores[uniform].argmax(1), truth[1][uniform])

    def pixel_features(
        self, image: np.ndarray, maps: Tensor | None, pixels: np.ndarray, filters: bool
    ) -> Tensor:
        """Return the features (n, f) at flat pixel indices."""
        parts = [] if maps is None else [sample(maps, torch.from_numpy(pixels), STRIDE)]
        if filters:
            page = self.filters(np.ascontiguousarray(image.mean(0)[..., None]))
            parts.append(torch.from_numpy(page.reshape(-1, page.shape[-1])[pixels]))
        return torch.cat(parts, 1)

    @torch.no_grad()
    def validate(self, count: int = 96) -> dict[str, Any]:
        """Evaluate validation tasks with filters, with the model, and with both -> mean IoU of each."""
        rows: dict[str, list[tuple[float, float, float]]] = {}
        for i in range(count):
            one = task(
                np.random.default_rng([2**31, i]),
                self.recipe.img_size,
                self.images[::HELD],
                self.recipe.series,
            )
            maps = self.average(torch.from_numpy(one.image)[None])[0]
            other = None if one.other is None else self.average(torch.from_numpy(one.other)[None])[0]
            seed = [2**31, i]
            scores = (
                self.evaluate_task(one, None, seed, filters=True)[1],
                self.evaluate_task(one, maps, seed, filters=False, other=other)[1],
                self.evaluate_task(one, maps, seed, filters=True, other=other)[1],
            )
            rows.setdefault(one.kind, []).append(scores)
            rows.setdefault("all", []).append(scores)
        names = ("filters", "micro", "both")
        return {
            k: dict(zip(names, np.mean(v, 0).round(4).tolist(), strict=True)) for k, v in sorted(rows.items())
        }


def distance(features: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error normalised by the variance of each channel, (b, c, h, w) twice -> ()."""
    variance = target.var((0, 2, 3), keepdim=True)
    return ((features - target) ** 2 / variance).mean()
