"""Plan of a retrofit: stages with their batches and numbers of training steps, and stored features of the teacher."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vispe.backbones.distributed import Processes
from vispe.backbones.vision_model import VisionModel
from vispe.errors import OptionError, counted
from vispe.images.symmetry.view_averages import View
from vispe.train.data import Batches, Source
from vispe.train.loop import autocast
from vispe.train.retrofit.config import Retrofit, Stage
from vispe.train.retrofit.distillation_losses import sample_views
from vispe.train.retrofit.teacher import base_teacher
from vispe.train.retrofit.teacher_cache import CropBatches, Crops
from vispe.utils.digest import tensor_digest

OnStep = Callable[[int, int, Mapping[str, Any] | None], None]
"""Called with the number of training steps done, the total, and the new line of the log, if there is one."""

Say = Callable[[str], None]
"""Called with status messages outside of the training loop."""

SEED_STEP = 1_000_003  # difference between the seeds of consecutive stages


@dataclass(frozen=True, eq=False)
class StagePlan:
    """Stage of a training plan.

    Attributes:
        stage: stage of the config, with its length in steps.
        first: number of training steps before the stage.
        steps: number of its training steps.
        batches: its images, or windows with teacher features.
    """

    stage: Stage
    first: int
    steps: int
    batches: Batches | CropBatches

    @property
    def end(self) -> int:
        """Total number of training steps at the end of the stage."""
        return self.first + self.steps


def make_plan(
    config: Retrofit, source: Source, processes: Processes, teacher: VisionModel
) -> list[StagePlan]:
    """Return the stages with their batches and numbers of training steps.

    Raises:
        OptionError: the warm-up is not shorter than its stage.
    """
    plan, first = [], 0
    options = {"rank": processes.rank, "world_size": processes.count, "num_workers": config.num_workers}
    options |= {"augment": config.augment, **asdict(config.window), **normalization(teacher)}
    for k, stage in enumerate(config.stages):
        batches: Batches | CropBatches = Batches(
            source, stage.img_size, stage.batch_size, seed=config.seed + k * SEED_STEP, **options
        )
        if stage.crops:
            folder = Path(config.target.folder or Path(config.out) / "crops")
            batches = CropBatches(Crops(folder / f"{stage.img_size}-{stage.crops}", stage.crops), batches)
        steps = stage.updates(len(batches))
        if stage.warmup_steps >= steps:
            raise OptionError(
                f"stages[{k}].warmup_steps must be below the {counted(steps, 'step')} of its epochs over "
                f"{counted(len(batches), 'image')}, got {stage.warmup_steps}."
            )
        plan.append(StagePlan(replace(stage, steps=steps, epochs=None), first, steps, batches))
        first += steps
    return plan


def make_crops(
    config: Retrofit,
    source: Source,
    processes: Processes,
    teacher: VisionModel,
    plan: list[StagePlan],
    say: Say,
) -> None:
    """Compute the windows and teacher features of the stages with `crops`."""
    for k, part in enumerate(plan):
        if not isinstance(part.batches, CropBatches):
            continue
        # the windows and views of a batch depend on its size, so it must not depend on micro_batch_size
        seed, size = config.seed + k * SEED_STEP, min(part.stage.batch_size, 16)
        options = {"augment": config.augment, **asdict(config.window), **normalization(teacher)}
        windows = Batches(source, part.stage.img_size, size, seed=seed, **options)
        identity: dict[str, Any] = {
            "teacher": asdict(config.teacher),
            "windows": windows.fingerprint(),
            "amp": config.amp,
        }
        base, debiasing = base_teacher(config.teacher)
        if debiasing is not None:
            identity["debiased"] = debiasing.fingerprint()
        # the file may be overwritten; folders of other teachers remain valid
        if base.weights not in (None, "random"):
            identity["digest"] = teacher_digest(teacher)
        average = config.target.average
        if not average.is_identity:  # folders of other targets remain valid
            identity |= {"poses": average.poses, "positions": average.positions}
        crops, start = part.batches.crops, time.perf_counter()
        side = part.stage.img_size // teacher.patch_size

        def report(ready: int, count: int, start: float = start, every: int = 16 * size) -> None:
            if ready % every == 0 or ready == count:
                say(f"features of {ready} of {counted(count, 'window')}, {time.perf_counter() - start:.0f} s")

        def views_of(batch: int, seed: int = seed, grid: tuple[int, int] = (side, side)) -> list[View]:
            return sample_views(seed, batch, grid, config.target)

        shape = (teacher.channels, teacher.patch_size)
        crops.make(
            teacher.model,
            windows,
            *shape,
            identity,
            processes,
            lambda: autocast(config.amp, processes.torch_device),
            report,
            views_of,
            config.micro_batch_size,
        )


def teacher_digest(teacher: VisionModel) -> str:
    """Return a digest of the weights of a teacher."""
    return tensor_digest([*teacher.model.parameters(), *teacher.model.buffers()])


def normalization(teacher: VisionModel) -> dict[str, list[float]]:
    """Return mean and standard deviation of the channels for the normalisation."""
    return {"mean": teacher.mean.flatten().tolist(), "std": teacher.std.flatten().tolist()}
