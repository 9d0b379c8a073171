"""`vispe retrofit`: remove positional bias from a pretrained vision transformer by distillation."""

import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal, Self

from vispe.train.retrofit.config import Augment, LossWeights, Probe, Stage, Student, Target, Teacher, Window

SHORT = {"out": "-o"}


def retrofit(
    teacher: Teacher,
    stages: list[Stage],
    data: list[dict[str, Any]],
    out: str,
    student: Student = Student(),  # noqa: B008 - frozen
    target: Target = Target(),  # noqa: B008
    loss: LossWeights = LossWeights(),  # noqa: B008
    probe: Probe = Probe(),  # noqa: B008
    window: Window = Window(),  # noqa: B008
    augment: Augment = Augment(),  # noqa: B008
    ema_decay: float = 0.0,
    amp: Literal["no", "bf16", "fp16"] = "no",
    grad_checkpointing: bool = False,
    clip_grad: float | None = None,
    weight_decay: float = 0.01,
    micro_batch_size: int | None = None,
    seed: int = 0,
    device: str = "auto",
    num_workers: int = 0,
    logging_steps: int = 50,
    save_steps: int = 500,
    tensorboard: bool = True,
    force: bool = False,
    json: bool = False,
) -> None:
    """Remove positional bias from a pretrained vision transformer by distillation.

    The student has the weights of the teacher and another positional encoding. It is trained on the teacher's patch
    features, whose most position-dependent channels can be set to 0 (target.blank), and optionally to be equivariant
    to rotations and reflections (loss.d4) and to translations (loss.place). Finally, decodable position is measured on
    noise and textures, before and after.

    Write the settings to a file, and override single ones after it. An interrupted run resumes from its last
    checkpoint; a finished run contains student.safetensors and card.json. For several GPUs or machines, prefix the
    command with `torchrun --nproc-per-node N -m`; batch is the total over all processes.

    Args:
        teacher: the pretrained model, which is not changed; name, weights, img_size, options, mean, std
        stages: consecutive training stages, each with img_size (pixels), steps or epochs, batch_size (over all
            processes), lr, schedule (constant or cosine) and warmup_steps.
        data: image sources, such as [{folder: images}, {synthetic: 1000}]; also tar and hub (Hugging Face datasets);
            weight sets the proportions of the sources.
        out: folder for the student, its model card, the log and the checkpoint.
        student: student configuration; pos_embed, init, symmetric patch kernel, trainable parameters, rank of LoRA
        target: channels to remove from the teacher's features; blank (none, auto or channels), with auto share or count
        loss: weights of the loss terms; distill, centred, class_token, d4 (rotated images) and place (images on a
            canvas); the last two each need one additional pass of the student
        probe: images on which decodable position is measured
        window: resizing and cropping of the images to the size of a stage; resize, crop, small
        augment: random augmentation; pose, roll, brightness, contrast, noise; for loss.place: place (canvas
            in patches), curriculum, place_teacher
        ema_decay: decay of the exponential moving average of the weights, such as 0.999; 0 disables it.
        amp: automatic mixed precision; fp16 needs a GPU.
        grad_checkpointing: recompute activations in the backward pass to save memory.
        clip_grad: maximum gradient norm; default no clipping.
        weight_decay: weight decay of AdamW.
        micro_batch_size: images per forward pass and process (gradient accumulation); the result is that of
            the complete batch.
        num_workers: data-loading processes per training process.
        logging_steps: training steps between two lines of the log.
        save_steps: training steps between two checkpoints.
        tensorboard: write TensorBoard events if tensorboard is installed.
        force: overwrite a finished run, or restart an interrupted one.
        json: print the model card as JSON instead of the verdict.

    Examples:
        vispe retrofit --config configs/dinov2_vits14_reg4_alibi2d.yaml --data '[{folder: images}]' -o out
        vispe retrofit --config recipe.yaml --student.pos_embed rope_mixed --loss.d4 0.5 -o out
        torchrun --nproc-per-node 4 -m vispe retrofit --config recipe.yaml -o out
    """
    settings = {name: value for name, value in locals().items() if name != "json"}
    from json import dumps

    import torch

    from vispe.train.retrofit.config import Retrofit
    from vispe.train.retrofit.distillation import retrofit as run

    with _Display() as display:
        result = run(Retrofit(**settings), on_step=display.step, say=display.say)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if result.card:
        print(dumps(result.card, indent=2, allow_nan=False) if json else result.verdict)
        print(f"written: {out}", file=sys.stderr)


class _Display:
    """Training progress on stderr: a progress bar on a terminal, otherwise one line per line of the log."""

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

    def say(self, text: str) -> None:
        """Print a status line outside of the training loop."""
        self.console.print(text, style="dim", soft_wrap=True)

    def step(self, step: int, total: int, line: Mapping[str, Any] | None) -> None:
        """Update the progress bar, and print a line of the log if there is one."""
        if self.task is None:
            self.task = self.bar.add_task("training", total=total)
            self.first = (step, time.perf_counter())
        if line is None:
            self.bar.update(self.task, completed=step)
            return
        text = f"loss {line['loss']:.4f}, cosine {line['cosine']:.3f}, {line['images_per_s']:.3g} images/s"
        if self.lines and self.first is not None:
            first_step, start_time = self.first
            seconds_per_step = (time.perf_counter() - start_time) / max(1, step - first_step)
            remaining = timedelta(seconds=round((total - step) * seconds_per_step))
            self.console.print(f"step {step} of {total}: {text}, {remaining} left", soft_wrap=True)
        self.bar.update(self.task, completed=step, description=text)
