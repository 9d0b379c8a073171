"""Programs that the tests start: runs that are killed, and processes that train together."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

from tests.train.tiny import RandomImages, config
from vispe.train.data.augmentation import Augment
from vispe.train.retrofit.checkpoint import RunFolder
from vispe.train.retrofit.config import LossWeights, Stage, Student, Target
from vispe.train.retrofit.distillation import retrofit

TOGETHER = {
    "loss": LossWeights(1.0, 0.5, 0.25, place=0.5),
    "augment": Augment(place=9, curriculum=0.5),
    "student": Student("rope_mixed"),
    "stages": [Stage(32, steps=3, batch_size=4, lr=1e-4), Stage(48, steps=2, batch_size=2, lr=1e-5)],
    "target": Target("auto", count=3),
    "logging_steps": 1,
    "seed": 2,
}


def killed_config(out):
    """A run with everything that has a state: averages, random layers, two stages, an interval cut by a kill."""
    spec = "rope_axial+learned"
    return config(
        out, ema_decay=0.8, loss=LossWeights(1.0, 0.5), student=Student(spec), seed=5, logging_steps=3
    )


def killed(out: str, *positions: str) -> None:
    """Train in forks of this process; each is killed 'after:STEP' or while 'saving:STEP', the last completes."""
    for position in (*positions, ""):
        if child := os.fork():
            _, status = os.waitpid(child, 0)
            expected = signal.SIGKILL if position else 0
            if os.waitstatus_to_exitcode(status) != -expected:
                raise SystemExit(f"{position or 'the last run'} ended with status {status}")
            continue
        kind, _, step = position.partition(":")
        plain = RunFolder.save

        def save(self, number, *args, kind=kind, step=step, plain=plain):
            if kind == "saving" and number == int(step):
                torch.save = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            plain(self, number, *args)

        def follow(number, total, line, kind=kind, step=step):
            if kind == "after" and number == int(step):
                os.kill(os.getpid(), signal.SIGKILL)

        RunFolder.save = save
        try:
            retrofit(killed_config(out), source=RandomImages(), on_step=follow)
        except BaseException:  # a fork must not go on as its parent would
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)


def together(out: str) -> None:
    """Train as one of several processes, and save the gradient of the first update."""
    from vispe.train.retrofit.trainer import Training

    plain = Training._update

    def update(self, images, batch, rate):
        actual = plain(self, images, batch, rate)
        if self.step == 0:
            names = [n for n, p in self.student.named_parameters() if p.grad is not None]
            grads = dict(zip(names, (p.grad for p in self.trained if p.grad is not None), strict=True))
            torch.save(grads, Path(out).with_suffix(f".{self.processes.rank}.pt"))
        return actual

    Training._update = update
    retrofit(config(out, **TOGETHER), source=RandomImages())


def slots(out: str) -> None:
    """Save loss, weights and gradient of this process's share of a batch; the first has more samples."""
    from tests.experimental.vlm.test_slot_distillation import batch
    from vispe.backbones.distributed import Processes
    from vispe.experimental.vlm.slot_distillation import slot_distillation

    processes = Processes.started()
    mine = slice(0, 4) if processes.main else slice(4, None)
    student, teacher, slots_of_part = (part[mine] for part in batch(7))
    actual = slot_distillation(student.requires_grad_(), teacher, slots_of_part, processes=processes)
    actual.loss.backward()
    stored = {"loss": actual.loss.detach(), "weights": actual.weights, "gradient": student.grad}
    torch.save(stored, Path(out).with_suffix(f".{processes.rank}.pt"))


def orders(out: str) -> None:
    """Learn orders of prompts as one of several processes; the first saves the weights."""
    from tests.train.vlm.test_order_invariance import learnt
    from vispe.backbones.distributed import Processes

    processes = Processes.started()
    weights = learnt(processes=processes)
    if processes.main:
        torch.save(weights, out)


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"killed": killed, "together": together, "slots": slots, "orders": orders}[sys.argv[1]](*sys.argv[2:])
