"""One process or many: who am I, where do I compute, and sums over all of us.

Several processes are started by `torchrun` or `accelerate launch`, on one machine or several, and find one another
through accelerate. One process needs neither.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from vispe.errors import OptionError, require


class Processes:
    """The processes that train together.

    Args:
        device: 'auto', 'cpu', 'cuda' ...; with several processes 'auto' or 'cpu'.
        amp: precision of the training, which a launcher must not contradict.

    Attributes:
        rank: number of this process.
        world: number of all.
        device: where it computes.

    Raises:
        OptionError: a device that is not there, or a launcher that asks for what this training does by itself.
        MissingExtra: several processes without accelerate.
    """

    def __init__(self, device: str = "auto", amp: str = "no") -> None:
        self.world, self.rank = int(os.environ.get("WORLD_SIZE", "1")), 0
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
        if self.world > 1:
            self._join(device)
        else:
            from vispe.backbones.device import choose_device

            self.device = torch.device(choose_device(device))
        if amp == "fp16" and self.device.type == "cpu":
            raise OptionError("amp=fp16 needs a GPU, and this is a CPU; use bf16 or no.")

    @property
    def main(self) -> bool:
        """Whether this process writes the files."""
        return self.rank == 0

    def _join(self, device: str) -> None:
        require("accelerate", "train", "training in several processes")
        if device not in ("auto", "cpu"):
            raise OptionError(
                f"device={device!r} with {self.world} processes would put all of them on it; use auto, which gives "
                "every process its own, or cpu."
            )
        from accelerate import PartialState

        state = PartialState(cpu=device == "cpu" or not torch.cuda.is_available())
        self.rank, self.world, self.device = state.process_index, state.num_processes, state.device

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors of one dtype by their sums over all processes, in one message."""
        if self.world == 1 or not tensors:
            return
        whole = torch.cat([t.detach().flatten() for t in tensors])
        torch.distributed.all_reduce(whole)
        start = 0
        for t in tensors:
            t.detach().copy_(whole[start : start + t.numel()].view_as(t))
            start += t.numel()

    def total(self, value: float) -> float:
        """Return the sum of a number over all processes."""
        tensor = torch.tensor([value], dtype=torch.float64, device=self.device)
        self.sum_([tensor])
        return float(tensor)

    def wait(self) -> None:
        """Return when all processes are here."""
        self.total(0.0)
