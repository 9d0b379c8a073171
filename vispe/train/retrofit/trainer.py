"""Training loop of a retrofit, with logging, checkpoints and resumption.

A training step depends only on the weights, the optimizer and (seed, step, rank), from which all random numbers are
derived. A resumed run therefore ends with the same weights as an uninterrupted one, bit for bit on one machine with
the same number of processes and threads (on a GPU, if its kernels are deterministic).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vispe.backbones.distributed import POSITIONS, Processes
from vispe.backbones.model_access import patch_projection
from vispe.encodings.positions import set_progress
from vispe.errors import InputError, OptionError
from vispe.evaluate.probe.group_averages import effective_rank
from vispe.images.symmetry import symmetrize
from vispe.train.loop import TrainingStep, autocast, update_average
from vispe.train.retrofit.checkpoint import RunFolder, State
from vispe.train.retrofit.config import Retrofit
from vispe.train.retrofit.distillation_losses import (
    Objective,
    Pair,
    sample_placements,
    sample_pose,
    sample_views,
)
from vispe.train.retrofit.lora import merge_lora
from vispe.train.retrofit.stage_plan import OnStep, StagePlan
from vispe.train.retrofit.training_log import IntervalSums, Log, memory_mib


class Training:
    """State of the training of a student.

    Args:
        objective: loss of teacher and student, on the device of the processes.
        config: config of the retrofit.
        processes: processes of the training.
        folder: folder of checkpoints and log, which the main process writes and all processes read.
        plan: the stages.

    Attributes:
        step: number of training steps done.
        average: moving averages of the trained weights by name; empty if disabled.

    Raises:
        OptionError: gradient checkpointing is not supported by the model.
    """

    def __init__(
        self,
        objective: Objective,
        config: Retrofit,
        processes: Processes,
        folder: RunFolder,
        plan: Sequence[StagePlan],
    ) -> None:
        self.objective, self.config, self.processes, self.folder = objective, config, processes, folder
        self.plan, self.step, self.student, self._device = plan, 0, objective.student, processes.torch_device
        named = [(name, p) for name, p in self.student.named_parameters() if p.requires_grad]
        self.trained: list[nn.Parameter] = [p for _, p in named]
        self.average = {name: p.detach().clone() for name, p in named} if config.ema_decay else {}
        self.scaler = torch.amp.GradScaler(processes.torch_device.type, enabled=config.amp == "fp16")
        self.optimizer: torch.optim.Optimizer | None = None
        self.sums = IntervalSums()
        self._moment: dict[str, Any] = {}
        if config.grad_checkpointing:
            if not hasattr(self.student, "set_grad_checkpointing"):
                raise OptionError(
                    f"{type(self.student).__name__} does not support grad_checkpointing. Omit it."
                )
            self.student.set_grad_checkpointing(True)

    def resume(self, state: State | None) -> None:
        """Resume from a checkpoint of `RunFolder.load`; None starts from the beginning."""
        if state is not None:
            self.step, weights, self._moment = state
            self.student.load_state_dict(weights["student"])
            for name, value in weights.get("average", {}).items():
                self.average[name].copy_(value)
            self.scaler.load_state_dict(self._moment["scaler"])
            self.sums = IntervalSums({k: v.to(self._device) for k, v in self._moment["sums"].items()})

    def run(self, on_step: OnStep | None = None) -> None:
        """Train to the end.

        Raises:
            InputError: the loss became non-finite.
        """
        total = self.plan[-1].end
        self.student.train()
        board = self.folder.path / "tensorboard" if self.config.tensorboard else None
        log = Log(self.folder.log, self.step, board) if self.processes.main else None
        gpus = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=gpus):
            for part in self.plan:
                if self.step >= part.end:
                    continue
                options = {"lr": part.stage.lr, "weight_decay": self.config.weight_decay}
                self.optimizer = torch.optim.AdamW(self.trained, **options)
                if self.step > part.first:
                    self.optimizer.load_state_dict(self._moment["optimizer"])
                self._moment = {}
                self._run_stage(part, total, log, on_step)
        if log is not None:
            log.close()

    def finished(self) -> nn.Module:
        """Return the student in evaluation mode, with averaged (if enabled), merged and frozen weights."""
        with torch.no_grad():
            for name, parameter in self.student.named_parameters():
                if name in self.average:
                    parameter.copy_(self.average[name])
        merge_lora(self.student)
        if self.config.student.symmetric:
            symmetrize(self.student)
        if self.config.grad_checkpointing:
            self.student.set_grad_checkpointing(False)
        set_progress(self.student, 1.0)
        return self.student.eval().requires_grad_(False)

    def _run_stage(self, part: StagePlan, total: int, log: Log | None, on_step: OnStep | None) -> None:
        config, start, first_step = self.config, time.perf_counter(), self.step
        remaining = range(self.step, part.end)
        for _, batch in zip(remaining, part.batches.from_step(self.step - part.first), strict=False):
            rate = part.stage.rate_at(self.step - part.first, part.steps)
            example = self._update(batch, part.stage.batch_size, rate)
            self.step += 1
            line, last = None, self.step == part.end
            if self.step % config.logging_steps == 0 or last:
                line, time_now = self._line(part, rate, example), time.perf_counter()
                line["images_per_s"] = (self.step - first_step) * part.stage.batch_size / (time_now - start)
                start, first_step = time_now, self.step
                if log is not None:
                    log.write({k: round(v, 8) if isinstance(v, float) else v for k, v in line.items()})
            if self.step % config.save_steps == 0 or last:
                self._check_finite()
                if self.processes.main:
                    self._save()
            if on_step is not None and self.processes.main:
                on_step(self.step, total, line)

    def _update(self, data: Tensor | tuple[Tensor, Tensor], batch: int, rate: float) -> tuple[Tensor, Tensor]:
        """Run one training step on the local batch; return the maps of one image, of student and target."""
        training_step = TrainingStep(
            self.optimizer,
            processes=self.processes,
            clip_grad=self.config.clip_grad or math.inf,
            scaler=self.scaler,
        )
        example = training_step(lambda: self._backward(data, batch), rate)
        # weighted by the number of images; all sums are divided by the total number
        count = len(data[0] if isinstance(data, tuple) else data)
        self.sums.add("grad_norm", training_step.norm.detach().double() * count)
        if self.config.student.symmetric:
            symmetrize(self.student)
        if self.average:
            weights = [p.detach() for p in self.trained]
            update_average(list(self.average.values()), weights, self.config.ema_decay, self.step)
        return example

    def _backward(self, data: Tensor | tuple[Tensor, Tensor], batch: int) -> tuple[Tensor, Tensor]:
        """Add the gradients of the local batch; return the maps of one image, of student and target."""
        config = self.config
        seed = self.processes.seed(config.seed, self.step)
        set_progress(self.student, self.progress, seed=self.processes.seed(config.seed, self.step, POSITIONS))
        pose, pair = sample_pose(config.seed, self.step), self._pair(data)
        example, views = None, sample_views(config.seed, self.step, self._grid(data), config.target)
        images, target_maps = data if isinstance(data, tuple) else (data, None)
        size = config.micro_batch_size or len(images)
        target_chunks = [None] * len(images) if target_maps is None else target_maps.split(size)
        for chunk, maps_of in zip(images.split(size), target_chunks, strict=False):
            # an encoding draws once per forward pass: the same numbers for all chunks, as for the complete batch
            torch.manual_seed(seed)
            chunk = chunk.to(self._device, non_blocking=True)
            maps_of = None if maps_of is None else maps_of.to(self._device, non_blocking=True)
            with autocast(config.amp, self._device):
                parts, maps, target = self.objective.parts(chunk, pose, maps_of, pair, views)
                # divided by the global batch, so that the sum over chunks and processes is the mean
                loss = self.objective.total(parts).sum() / batch
            self.scaler.scale(loss).backward()
            for name, value in parts.items():
                self.sums.add(name, value.detach().double().sum())
            self.sums.add("images", torch.tensor(len(chunk), dtype=torch.float64, device=self._device))
            example = example or (maps[0], target[0])
        return example

    @property
    def progress(self) -> float:
        """Completed fraction of the run, a function of the step only, so that resumed runs are identical."""
        return self.step / self.plan[-1].end

    def _pair(self, data: Tensor | tuple[Tensor, Tensor]) -> Pair | None:
        """Return the placements of this step, equal in all processes; None if their weight is 0."""
        if not self.config.loss.place:
            return None
        config, grid = self.config, self._grid(data)
        return sample_placements(config.seed, self.step, self.progress, grid, config.augment)

    def _grid(self, data: Tensor | tuple[Tensor, Tensor]) -> tuple[int, int]:
        """Return height and width of the images in patches."""
        height, width = (data[0] if isinstance(data, tuple) else data).shape[-2:]
        rows, columns = patch_projection(self.student).stride
        return height // rows, width // columns

    def _line(self, part: StagePlan, rate: float, example: tuple[Tensor, Tensor]) -> dict[str, Any]:
        """Return the log line of the interval, and reset the sums."""
        self._check_finite()
        means = self.sums.means(self.processes)
        self.sums = IntervalSums()
        loss = sum(getattr(self.config.loss, k) * mean for k, mean in means.items() if k != "grad_norm")
        ranks = [effective_rank(m.float().cpu()) if self.processes.main else 0.0 for m in example]
        return {
            "step": self.step,
            "stage": self.plan.index(part),
            "size": part.stage.img_size,
            "loss": loss,
            **means,
            "cosine": 1 - means["distill"],
            "rank_student": ranks[0],
            "rank_target": ranks[1],
            "rate": rate,
            "memory_mib": memory_mib(self._device),
        }

    def _check_finite(self) -> None:
        if (name := self.sums.nonfinite()) is not None:
            raise InputError(
                f"loss ({name}) became non-finite at step {self.step}. Lower the learning rate, set `clip_grad`, "
                f"or use amp=no. The last checkpoint in {self.folder.path} is intact."
            )

    def _save(self) -> None:
        weights = {"student": self.student.state_dict()}
        if self.average:
            weights["average"] = self.average
        moment = {
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "sums": {name: value.cpu() for name, value in self.sums.values.items()},
            "channels": list(self.objective.channels),
        }
        self.folder.save(self.step, weights, moment)
