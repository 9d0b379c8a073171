"""One process or several: which one this is, its share of the work, its device, and results of all of them.

Several processes are started by `torchrun` or `accelerate launch`, on one machine or several. Measurements are shared
by consecutive numbers and joined; a training sums gradients, and its processes find one another through accelerate.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from vispe.backbones.device import choose_device
from vispe.errors import OptionError, require

T = TypeVar("T")
MODEL, POSITIONS = 11, 12  # what is drawn in a step: by torch's global generator, by samplers of positions


@dataclass(frozen=True)
class Processes:
    """Which process this is, and of how many.

    >>> [list(Processes(rank, count=2).share(5)) for rank in range(2)]
    [[0, 1, 2], [3, 4]]

    Attributes:
        rank: number of this process, from 0.
        count: number of processes.
        place: device on which this process trains.
    """

    rank: int = 0
    count: int = 1
    place: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @classmethod
    def started(cls) -> Processes:
        """Return the process that `torchrun` started, joined with the others; a single one without `torchrun`."""
        if (count := _world()) == 1:
            return cls()
        if not dist.is_initialized():
            # nothing is sent until the shares are done, and these may differ by hours
            dist.init_process_group("gloo", timeout=timedelta(days=30))
        return cls(dist.get_rank(), count)

    @classmethod
    def training(cls, device: str = "auto", amp: str = "no") -> Processes:
        """Return this process of a training, joined with the others.

        Args:
            device: 'auto', 'cpu', 'cuda' ...; with several processes 'auto' or 'cpu'.
            amp: precision of the training, which a launcher must not contradict.

        Raises:
            OptionError: a device that is not there, or a launcher that asks for what this training does by itself.
            MissingExtra: several processes without accelerate.
        """
        asked = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        if asked not in ("no", amp):
            raise OptionError(
                f"accelerate launch asks for the precision {asked}, and the config for amp={amp}; set amp in the "
                "config and leave it out of the launcher."
            )
        for key, word in (("ACCELERATE_USE_FSDP", "FSDP"), ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed")):
            if os.environ.get(key, "false").lower() == "true":
                raise OptionError(
                    f"accelerate launch asks for {word}; a retrofit is data-parallel only, launch it with --multi_gpu."
                )
        one = cls._accelerated(device) if _world() > 1 else cls(place=torch.device(choose_device(device)))
        if amp == "fp16" and one.place.type == "cpu":
            raise OptionError("amp=fp16 needs a GPU, and this is a CPU; use bf16 or no.")
        return one

    @classmethod
    def _accelerated(cls, device: str) -> Processes:
        require("accelerate", "train", "training in several processes")
        if device not in ("auto", "cpu"):
            raise OptionError(
                f"device={device!r} with {_world()} processes would put all of them on it; use auto, which gives "
                "every process its own, or cpu."
            )
        from accelerate import PartialState

        state = PartialState(cpu=device == "cpu" or not torch.cuda.is_available())
        return cls(state.process_index, state.num_processes, state.device)

    @property
    def main(self) -> bool:
        """Whether this process writes the files."""
        return self.rank == 0

    def share(self, n: int) -> range:
        """Return which of n things, in order, belong to this process; the first processes get the larger shares."""
        return range(-(-self.rank * n // self.count), -(-(self.rank + 1) * n // self.count))

    def joined(self, part: T, error: Exception | None = None) -> list[T]:
        """Return what every process gave, in the order of their numbers; each of them gets it.

        Raises:
            Exception: the first `error` that a process gave; all of them raise it, so that none waits for ever.
        """
        parts: list[Any] = [(None if error else part, error)] * self.count
        if self.count > 1:
            dist.all_gather_object(parts, parts[0])
        failed = next((e for _, e in parts if e is not None), None)
        if failed is not None:
            raise failed
        return [p for p, _ in parts]

    def seed(self, run: int, step: int, purpose: int = MODEL) -> int:
        """Return the seed of what this process draws in one step of a training, whenever it is begun or goes on.

        Args:
            run: seed of the training.
            step: number of updates before.
            purpose: `MODEL` or `POSITIONS`, which draw apart.
        """
        entropy = np.random.SeedSequence([run, purpose, step, self.rank])
        return int(entropy.generate_state(1, np.uint64)[0] >> 1)

    def device(self, name: str) -> str:
        """Return the device of this process: 'auto' spreads processes over the GPUs of a machine."""
        if name == "auto" and self.count > 1 and torch.cuda.is_available():
            return f"cuda:{int(os.environ.get('LOCAL_RANK', self.rank)) % torch.cuda.device_count()}"
        return name

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors of one dtype by their sums over all processes, in one message."""
        if self.count == 1 or not tensors:
            return
        whole = torch.cat([t.detach().flatten() for t in tensors])
        dist.all_reduce(whole)
        for t, values in zip(tensors, whole.split([t.numel() for t in tensors]), strict=True):
            t.detach().copy_(values.view_as(t))

    def total(self, value: float) -> float:
        """Return the sum of a number over all processes."""
        tensor = torch.tensor([value], dtype=torch.float64, device=self.place)
        self.sum_([tensor])
        return float(tensor)

    def wait(self) -> None:
        """Return when all processes are here."""
        self.total(0.0)


def _world() -> int:
    """Return the number of processes that a launcher started."""
    return int(os.environ.get("WORLD_SIZE", "1"))
