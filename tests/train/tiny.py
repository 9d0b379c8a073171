"""A tiny retrofit: a ViT of width 24 and depth 2, and images of random numbers."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from vispe.backbones.distributed import Processes
from vispe.train.data import Source
from vispe.train.retrofit.checkpoint import RunFolder
from vispe.train.retrofit.config import Probe, Retrofit, Stage, Student, Target, Teacher
from vispe.train.retrofit.distillation_losses import Objective
from vispe.train.retrofit.stage_plan import make_plan
from vispe.train.retrofit.student import load_teacher, make_student
from vispe.train.retrofit.trainer import Training

OPTIONS = {"embed_dim": 24, "depth": 2, "num_heads": 2, "patch_size": 8}
TEACHER = Teacher("vit_tiny_patch16_224", weights="random", img_size=32, options=OPTIONS)


class RandomImages(Source):
    """Smooth random images, higher than wide, that need no other package."""

    def __init__(self, count: int = 10, seed: int = 0) -> None:
        self.count, self.seed = count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.seed + i)
        coarse = torch.rand(1, 3, 9, 7, generator=generator)
        return torch.nn.functional.interpolate(coarse, (72, 56), mode="bilinear")[0]

    def describe(self) -> dict[str, Any]:
        return {"kind": "random", "count": self.count}

    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.count} {self.seed}".encode()).hexdigest()


def config(out: str | Path, **changes: Any) -> Retrofit:
    """A config of 7 updates in two stages, without a bar or tensorboard."""
    plain: dict[str, Any] = {
        "teacher": TEACHER,
        "student": Student(),
        "target": Target([3, 11]),
        "stages": [Stage(32, steps=4, batch_size=4, lr=1e-3), Stage(48, steps=3, batch_size=2, lr=1e-4)],
        "data": [{"synthetic": 10}],
        "out": str(out),
        "probe": Probe(noise=1, textures=0, masks=1),
        "tensorboard": False,
        "device": "cpu",
        "logging_steps": 2,
        "save_steps": 2,
    }
    return Retrofit(**{**plain, **changes})


def training(config: Retrofit, source: Source | None = None) -> Training:
    """What `retrofit` builds before it trains."""
    processes = Processes.training("cpu")
    teacher = load_teacher(config.teacher, seed=config.seed)
    student = make_student(teacher, config.student, seed=config.seed)
    blank = config.target.blank if isinstance(config.target.blank, list) else []
    folder = RunFolder(Path(config.out))
    folder.begin(config.identity())
    half = torch.full((3, 1, 1), 0.5)
    plan = make_plan(config, source or RandomImages(), processes, SimpleNamespace(mean=half, std=half))
    objective = Objective(teacher.model, student, config.loss, blank, config.augment.place_teacher == "best")
    return Training(objective, config, processes, folder, plan)
