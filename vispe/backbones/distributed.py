"""Data-parallel processes: rank, share of the work, device, and gathering of results.

Processes are started by `torchrun` or `accelerate launch`, on one machine or several. Measurements are split into
consecutive parts and gathered. In training, gradients are summed, and processes are connected through accelerate.
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
MODEL, POSITIONS = 11, 12  # purposes of random numbers: torch's global generator, position samplers


@dataclass(frozen=True)
class Processes:
    """Rank, number of processes, and device.

    Raises:
        OptionError: `training` is called with a device or precision that contradicts the launcher.
        MissingExtra: `training` is called in several processes without accelerate.

    Example:
        >>> [list(Processes(rank, count=2).share(5)) for rank in range(2)]
        [[0, 1, 2], [3, 4]]

    Attributes:
        rank: index of this process, from 0.
        count: number of processes.
        torch_device: device of this process in a training.
    """

    rank: int = 0
    count: int = 1
    torch_device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @classmethod
    def started(cls) -> Processes:
        """Return this process, connected to the others of `torchrun`; a single process without `torchrun`."""
        if (count := _world()) == 1:
            return cls()
        if not dist.is_initialized():
            # processes exchange nothing until all parts are done, and may finish hours apart from each other
            dist.init_process_group("gloo", timeout=timedelta(days=30))
        return cls(dist.get_rank(), count)

    @classmethod
    def training(cls, device: str = "auto", amp: str = "no") -> Processes:
        """Return this training process, connected to the others.

        Args:
            device: 'auto', 'cpu', 'cuda' ...; with several processes only 'auto' or 'cpu'.
            amp: precision of the training; the launcher must not set another one.

        Raises:
            OptionError: the device is not available, or the launcher sets options that the training sets itself.
            MissingExtra: there are several processes, and accelerate is not installed.
        """
        precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        if precision not in ("no", amp):
            raise OptionError(
                f"The precision of accelerate launch must be that of the config, amp={amp}, got {precision}. Set amp "
                "in the config, and omit the precision in the launcher."
            )
        for key, feature in (("ACCELERATE_USE_FSDP", "FSDP"), ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed")):
            if os.environ.get(key, "false").lower() == "true":
                raise OptionError(
                    f"A retrofit supports data-parallel processes only, got {feature} from accelerate launch. Launch "
                    "it with --multi_gpu."
                )
        process = (
            cls._accelerated(device)
            if _world() > 1
            else cls(torch_device=torch.device(choose_device(device)))
        )
        if amp == "fp16" and process.torch_device.type == "cpu":
            raise OptionError("amp=fp16 needs a GPU, got a CPU. Use bf16 or no.")
        return process

    @classmethod
    def _accelerated(cls, device: str) -> Processes:
        require("accelerate", "train", "training in several processes")
        if device not in ("auto", "cpu"):
            raise OptionError(
                f"device must be auto or cpu with {_world()} processes, got {device!r}, on which all of them would "
                "run. Use auto for one device per process."
            )
        from accelerate import PartialState

        state = PartialState(cpu=device == "cpu" or not torch.cuda.is_available())
        return cls(state.process_index, state.num_processes, state.device)

    @property
    def main(self) -> bool:
        """Whether this process writes the files."""
        return self.rank == 0

    def share(self, n: int) -> range:
        """Return the range of n items that this process handles; the first processes get the larger parts."""
        return range(-(-self.rank * n // self.count), -(-(self.rank + 1) * n // self.count))

    def joined(self, part: T, error: Exception | None = None) -> list[T]:
        """Gather the parts of all processes, in the order of their ranks.

        Raises:
            Exception: the first `error` of a process; all processes raise it, so that none waits forever.
        """
        parts: list[Any] = [(None if error else part, error)] * self.count
        if self.count > 1:
            dist.all_gather_object(parts, parts[0])
        failed = next((e for _, e in parts if e is not None), None)
        if failed is not None:
            raise failed
        return [p for p, _ in parts]

    def seed(self, run: int, step: int, purpose: int = MODEL) -> int:
        """Return the random seed of this process in one training step, the same for a new and a resumed training.

        Args:
            run: seed of the training.
            step: number of previous updates.
            purpose: `MODEL` or `POSITIONS`, which have separate streams of random numbers.
        """
        entropy = np.random.SeedSequence([run, purpose, step, self.rank])
        return int(entropy.generate_state(1, np.uint64)[0] >> 1)

    def device(self, name: str) -> str:
        """Return the device of this process; 'auto' distributes processes over the GPUs of a machine."""
        if name == "auto" and self.count > 1 and torch.cuda.is_available():
            return f"cuda:{int(os.environ.get('LOCAL_RANK', self.rank)) % torch.cuda.device_count()}"
        return name

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors of one dtype by their sums over all processes, in one all-reduce."""
        if self.count == 1 or not tensors:
            return
        flat = torch.cat([t.detach().flatten() for t in tensors])
        dist.all_reduce(flat)
        for t, values in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            t.detach().copy_(values.view_as(t))

    def total(self, value: float) -> float:
        """Return the sum of a number over all processes."""
        tensor = torch.tensor([value], dtype=torch.float64, device=self.torch_device)
        self.sum_([tensor])
        return float(tensor)

    def wait(self) -> None:
        """Wait until all processes reach this call."""
        self.total(0.0)


def _world() -> int:
    """Return the number of processes that a launcher started."""
    return int(os.environ.get("WORLD_SIZE", "1"))
