"""A retrofit from beginning to end: checks, models, channels to blank, training, and what became of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from vispe.backbones.batching import FeatureFunction
from vispe.backbones.device import flushed
from vispe.backbones.distributed import Processes
from vispe.backbones.vision_model import VisionModel
from vispe.errors import InputError, OptionError
from vispe.hosts.convert import describe
from vispe.train.data import Batches, Source, from_config
from vispe.train.evaluate.model_pair import Pair
from vispe.train.retrofit.checkpoint import Folder, State
from vispe.train.retrofit.config import Retrofit
from vispe.train.retrofit.config_checks import check
from vispe.train.retrofit.distillation_losses import Objective
from vispe.train.retrofit.monitoring import (
    compare,
    feature_maps,
    kept_on_data,
    pictures,
    telling_channels,
    verdict,
)
from vispe.train.retrofit.student import blanked_count, check_models, load_teacher, make_student
from vispe.train.retrofit.teacher_cache import CropBatches, Crops
from vispe.train.retrofit.trainer import OnStep, Part, Training, autocast
from vispe.train.retrofit.training_log import read_log
from vispe.version import __version__

Say = Callable[[str], None]
"""Called with a sentence about what is done beside training."""

_LIKENESS = 8  # images of the data on which cosine and rank are measured
_APART = 1_000_003  # between the seeds of two stages


@dataclass(frozen=True, eq=False)
class Result:
    """What a retrofit left.

    Attributes:
        student: in evaluation mode, on the device where it was trained.
        card: what was done and measured, as JSON values; empty in processes other than the main one.
        verdict: in a few lines; '' there.
    """

    student: nn.Module
    card: dict[str, Any]
    verdict: str


def retrofit(
    config: Retrofit, *, source: Source | None = None, on_step: OnStep | None = None, say: Say | None = None
) -> Result:
    """Train a student without the teacher's positional bias, and write it.

    Writes `student.safetensors`, `card.json`, `log.jsonl`, events of tensorboard and the state of the training to the
    folder of the config; a run that was stopped goes on. With several processes all of them call this.

    Args:
        config: everything.
        source: pictures, in place of those that the config names.
        on_step: called after every update, in the main process.
        say: called with a sentence about what is done beside training, in the main process.

    Raises:
        OptionError, InputError, UnknownName, UnsupportedHost, UnsupportedCombination, MissingExtra: the config cannot
            be carried out; raised before weights are loaded wherever that can be known.
    """
    with flushed():
        return _carried_out(config, source, on_step, say)


def _carried_out(config: Retrofit, source: Source | None, on_step: OnStep | None, say: Say | None) -> Result:
    start = time.perf_counter()
    check(config)
    processes = Processes.training(config.device, config.amp)
    say = say if say is not None and processes.main else lambda words: None
    for k, stage in enumerate(config.stages):
        if stage.batch % processes.count:
            raise OptionError(
                f"stages[{k}].batch={stage.batch} cannot be shared by {processes.count} processes; choose a multiple."
            )
    folder = Folder(Path(config.out))
    folder.check(config.identity(), config.force, partly=True)
    channels = check_models(config)
    source = from_config(config.data) if source is None else source
    identity = {**config.identity(), "data.fingerprint": source.fingerprint()}
    folder.check(identity, config.force)

    say(f"loading {config.teacher.name}")
    teacher = load_teacher(config.teacher, seed=config.seed)
    plan = make_plan(config, source, processes, teacher)
    # no process writes before all have checked the folder, and none reads before it is ready
    processes.wait()
    if processes.main:
        folder.begin(identity, config.force)
    processes.wait()

    student = make_student(teacher, config.student, seed=config.seed).to(processes.place)
    teacher.model.to(processes.place)
    state, size = _state(folder, processes), config.stages[0].size
    before = feature_maps(teacher.model, processes.place)
    if state is not None:
        blank = state[2]["channels"]
    elif config.target.blank == "auto":
        say("choosing channels to blank")
        blank = _telling(config, processes, before, teacher)
    else:
        blank = config.target.blank if isinstance(config.target.blank, list) else []
    _make_crops(config, source, processes, teacher, plan, say)
    follow = config.augment.place_teacher == "best"
    objective = Objective(teacher.model, student, config.loss, blank, follow)
    training = Training(objective, config, processes, folder, plan)
    training.resume(state)
    training.run(on_step)
    student = training.finished()
    if not processes.main:
        return Result(student, {}, "")

    say("probing teacher and student")
    pair = Pair(before, feature_maps(student, processes.place), blank)
    report = compare(pair, pictures(teacher, config.probe, size, config.probe.seed), config.probe)
    images = Batches(source, size, _LIKENESS, seed=config.seed, **_settings(teacher))
    data = kept_on_data(pair, images.load(0))
    card = {
        "kind": "vispe retrofit",
        "config": config.to_dict(),
        "encoding": describe(student),
        "patch": teacher.patch,
        "channels": channels,
        "blanked": blank,
        "probe": report,
        "likeness": data,
        "data": {"fingerprint": source.fingerprint(), **source.describe()},
        "updates": training.step,
        "parameters": sum(p.numel() for p in student.parameters()),
        "trained_parameters": sum(p.numel() for p in training.trained),
        "last_line": read_log(folder.log)[-1],
        "processes": processes.count,
        "device": str(processes.place),
        "seconds_since_start": round(time.perf_counter() - start, 1),
        "versions": {"vispe": __version__, "torch": torch.__version__, "timm": timm.__version__},
    }
    folder.finish(student.state_dict(), card)
    return Result(student, card, verdict(report, data, len(blank), channels))


def make_plan(config: Retrofit, source: Source, processes: Processes, teacher: VisionModel) -> list[Part]:
    """Return the stages with their images and numbers of updates."""
    plan, first = [], 0
    shared = {"rank": processes.rank, "world": processes.count, "workers": config.workers}
    shared |= {"augment": config.augment, **asdict(config.window), **_settings(teacher)}
    for k, stage in enumerate(config.stages):
        batches: Batches | CropBatches = Batches(
            source, stage.size, stage.batch, seed=config.seed + k * _APART, **shared
        )
        if stage.crops:
            place = Path(config.target.folder or Path(config.out) / "crops")
            batches = CropBatches(Crops(place / f"{stage.size}-{stage.crops}", stage.crops), batches)
        steps = stage.updates(len(batches))
        if stage.warmup >= steps:
            raise OptionError(
                f"stages[{k}].warmup={stage.warmup} leaves none of the {steps} updates that its epochs make of "
                f"{len(batches)} pictures; lower it."
            )
        plan.append(Part(replace(stage, steps=steps, epochs=None), first, steps, batches))
        first += steps
    return plan


def _make_crops(
    config: Retrofit, source: Source, processes: Processes, teacher: VisionModel, plan: list[Part], say: Say
) -> None:
    """Make the windows of the stages that keep them, with the teacher's features."""
    for k, part in enumerate(plan):
        if not isinstance(part.batches, CropBatches):
            continue
        # upright, and in batches that fit where those of the training do
        seed, size = config.seed + k * _APART, config.chunk or min(part.stage.batch, 16)
        drawn = {"augment": config.augment, **asdict(config.window), **_settings(teacher)}
        windows = Batches(source, part.stage.size, size, seed=seed, **drawn)
        identity = {"teacher": asdict(config.teacher), "windows": windows.fingerprint(), "amp": config.amp}
        crops, since = part.batches.crops, time.perf_counter()

        def shown(ready: int, count: int, since: float = since, every: int = 16 * size) -> None:
            if ready % every == 0 or ready == count:
                say(f"features of {ready} of {count} windows, {time.perf_counter() - since:.0f} s")

        grid = (teacher.channels, teacher.patch)
        crops.make(
            teacher.model, windows, *grid, identity, processes, lambda: autocast(config, processes), shown
        )


def _state(folder: Folder, processes: Processes) -> State | None:
    """Return the last state, which all processes must find.

    Raises:
        InputError: they find different ones.
    """
    state = folder.load()
    step = 0 if state is None else state[0]
    if processes.total(step) != step * processes.count:
        raise InputError(
            f"Process {processes.rank} found the state of step {step} in {folder.path}, and others another one; "
            "put out on a file system that all machines share."
        )
    return state


def _telling(
    config: Retrofit, processes: Processes, maps: FeatureFunction, teacher: VisionModel
) -> list[int]:
    """Return the channels from which position is read best, as the main process finds them."""
    # other pictures than those on which the result is measured
    kinds = pictures(teacher, config.probe, config.stages[0].size, config.probe.seed + 1)
    blank = telling_channels(maps, kinds, config.probe, blanked_count(config, teacher.channels))
    # the sum over processes of zeros and of the main process's choice is that choice
    numbers = torch.tensor(blank, device=processes.place) * processes.main
    processes.sum_([numbers])
    return numbers.tolist()


def _settings(teacher: VisionModel) -> dict[str, list[float]]:
    """Return mean and standard deviation of the channels, by which images are normalised."""
    return {"mean": teacher.mean.flatten().tolist(), "std": teacher.std.flatten().tolist()}
