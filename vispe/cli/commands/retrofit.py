"""`vispe retrofit`: remove positional bias from a pretrained vision transformer by distillation."""

import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal, Self

from vispe.train.retrofit.config import Augment, Probe, Stage, Student, Target, Teacher, Weights, Window

SHORT = {"out": "-o"}


def retrofit(
    teacher: Teacher,
    stages: list[Stage],
    data: list[dict[str, Any]],
    out: str,
    student: Student = Student(),  # noqa: B008 - frozen
    target: Target = Target(),  # noqa: B008
    loss: Weights = Weights(),  # noqa: B008
    probe: Probe = Probe(),  # noqa: B008
    window: Window = Window(),  # noqa: B008
    augment: Augment = Augment(),  # noqa: B008
    ema: float = 0.0,
    amp: Literal["no", "bf16", "fp16"] = "no",
    grad_checkpointing: bool = False,
    clip: float | None = None,
    weight_decay: float = 0.01,
    chunk: int | None = None,
    seed: int = 0,
    device: str = "auto",
    workers: int = 0,
    log_every: int = 50,
    checkpoint_every: int = 500,
    tensorboard: bool = True,
    force: bool = False,
    json: bool = False,
) -> None:
    """Remove positional bias from a pretrained vision transformer by distillation.

    The student has the weights of the teacher and another positional encoding. It learns the teacher's patch features,
    of which the channels that tell position most can be set to 0 (target.blank), and, if asked, features that turn with
    the image (loss.d4) and stay the same wherever it stands (loss.place). Then the readable position is measured on
    noise and textures, before and after.

    Settings are best written in a file, and single ones changed behind it. A run that was stopped, or killed, goes on
    where its last state was written; the folder holds student.safetensors and card.json when it is finished. With
    several GPUs or machines, put `torchrun --nproc-per-node N -m` before it; batch is that of all processes together.

    Args:
        teacher: the pretrained model, kept as it is; name, weights, img_size, options, mean, std
        stages: parts of the training, one after another, each with size (pixels), steps or epochs, batch (of all
            processes together), rate, schedule (constant or cosine) and warmup.
        data: sources of pictures, such as [{folder: pictures}, {synthetic: 1000}]; tar and hub (data sets of Hugging
            Face) beside them; with weight, in these proportions.
        out: folder for the student, its card, the log and the state.
        student: what it becomes; pos_embed, init, symmetric patch kernel, what is trainable, rank of lora
        target: what is taken out of the teacher's features; blank (none, auto or channels), with auto share or count
        loss: weights of its parts; distill, centred, class_token, d4 (turned images) and place (images on a canvas), a
            pass of the student more for each of the last two
        probe: pictures on which the readable position is measured
        window: how pictures become images of the size of a stage; resize, crop, small
        augment: changes of the images at random; pose, roll, brightness, contrast, noise; for loss.place: place (canvas
            in patches), curriculum, place_teacher
        ema: decay of the moving average of the weights, such as 0.999; 0 for none.
        amp: precision of the models' arithmetic; fp16 needs a GPU.
        grad_checkpointing: compute activations twice, for less memory.
        clip: largest norm of the gradient; none by default.
        weight_decay: of AdamW.
        chunk: images at once in one process, for less memory; the result is that of the whole batch.
        seed: of everything drawn.
        device: auto, cpu, cuda, cuda:1 ...
        workers: processes that read pictures, for each process that trains.
        log_every: updates for each line of the log.
        checkpoint_every: updates between two states.
        tensorboard: write its events too, where it is installed.
        force: replace a finished run, or begin a stopped one anew.
        json: print the card as JSON in place of the verdict.

    Examples:
        vispe retrofit --config configs/dinov2_vits14_reg4_alibi2d.yaml --data '[{folder: pictures}]' -o out
        vispe retrofit --config recipe.yaml --student.pos_embed rope_mixed --loss.d4 0.5 -o out
        torchrun --nproc-per-node 4 -m vispe retrofit --config recipe.yaml -o out
    """
    given = {name: value for name, value in locals().items() if name != "json"}
    from json import dumps

    import torch

    from vispe.train.retrofit.config import Retrofit
    from vispe.train.retrofit.distillation import retrofit as run

    with _Shown() as shown:
        result = run(Retrofit(**given), on_step=shown.step, say=shown.say)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if result.card:
        print(dumps(result.card, indent=2, allow_nan=False) if json else result.verdict)
        print(f"written: {out}", file=sys.stderr)


class _Shown:
    """Shows on stderr how far a training is: a bar on a terminal, else a line for each line of the log."""

    def __init__(self) -> None:
        from rich.progress import MofNCompleteColumn

        from vispe.cli.common import progress

        self.bar = progress(MofNCompleteColumn())
        self.console = self.bar.console
        self.lines = not self.console.is_terminal
        self.task: Any = None
        self.first: tuple[int, float] | None = None

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def say(self, words: str) -> None:
        """Show what is done beside training."""
        self.console.print(words, style="dim", soft_wrap=True)

    def step(self, step: int, total: int, line: Mapping[str, Any] | None) -> None:
        """Show how far the training is, and a line of the log where there is one."""
        if self.task is None:
            self.task = self.bar.add_task("training", total=total)
            self.first = (step, time.perf_counter())
        if line is None:
            self.bar.update(self.task, completed=step)
            return
        words = f"loss {line['loss']:.4f}, cosine {line['cosine']:.3f}, {line['images_per_s']:.3g} images/s"
        if self.lines and self.first is not None:
            began, when = self.first
            left = (total - step) * (time.perf_counter() - when) / max(1, step - began)
            clock = timedelta(seconds=round(left))
            self.console.print(f"step {step} of {total}: {words}, {clock} left", soft_wrap=True)
        self.bar.update(self.task, completed=step, description=words)
