"""A retrofit from beginning to end: checks, models, channels to blank, training, and what became of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from vispe.errors import InputError, OptionError
from vispe.hosts.convert import describe
from vispe.train.data import Batches, Source, from_config
from vispe.train.retrofit.checkpoint import Folder
from vispe.train.retrofit.config import Retrofit
from vispe.train.retrofit.log import read_log
from vispe.train.retrofit.loop import OnStep, Part, Training
from vispe.train.retrofit.losses import Objective
from vispe.train.retrofit.measure import compare, feature_maps, likeness, pictures, telling_channels, verdict
from vispe.train.retrofit.processes import Processes
from vispe.train.retrofit.student import blanked_count, check_models, load_teacher, make_student
from vispe.version import __version__

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
    config: Retrofit,
    *,
    source: Source | None = None,
    on_step: OnStep | None = None,
    say: Callable[[str], None] | None = None,
) -> Result:
    """Train a student without the teacher's positional bias, and write it.

    Writes `student.safetensors`, `card.json`, `log.jsonl`, events of tensorboard and the state of the training to the
    folder of the config; a run that was stopped goes on. With several processes all of them call this.

    Args:
        config: everything.
        source: pictures; in place of those that the config names, which then only describes them.
        on_step: is told about every update, in the main process.
        say: is told in words what is done beside training.

    Raises:
        OptionError, InputError, UnknownName, UnsupportedHost, UnsupportedCombination, MissingExtra: the config cannot
            be carried out; said before weights are loaded wherever that can be known.
    """
    start = time.perf_counter()
    config.check()
    processes = Processes(config.device, config.amp)
    say = say if say is not None and processes.main else lambda words: None
    for k, stage in enumerate(config.stages):
        if stage.batch % processes.world:
            raise OptionError(
                f"stages[{k}].batch={stage.batch} cannot be shared by {processes.world} processes; choose a multiple."
            )
    folder = Folder(Path(config.out))
    folder.check(config.identity(), config.force, partly=True)
    channels = check_models(config)
    source = from_config(config.data) if source is None else source
    identity = {**config.identity(), "data.fingerprint": source.fingerprint()}
    folder.check(identity, config.force)

    say(f"loading {config.teacher.name}")
    teacher = load_teacher(config.teacher, seed=config.seed)
    plan = _plan(config, source, processes, teacher.mean.flatten().tolist(), teacher.std.flatten().tolist())
    processes.wait()  # all have looked before one writes
    if processes.main:
        folder.begin(identity, config.force)
    processes.wait()

    student = make_student(teacher, config.student, seed=config.seed).to(processes.device)
    teacher.model.to(processes.device)
    kept, size = _kept(folder, processes), config.stages[0].size
    before = feature_maps(teacher.model, processes.device)
    if kept is not None:
        blank = kept[2]["channels"]
    elif config.target.blank == "auto":
        say("choosing channels to blank")
        others = pictures(teacher, config.probe, size, config.probe.seed + 1)
        blank = telling_channels(before, others, config.probe, blanked_count(config, channels))
        numbers = torch.tensor(blank, device=processes.device) * processes.main
        processes.sum_([numbers])  # those of the main process
        blank = numbers.tolist()
    else:
        blank = config.target.blank if isinstance(config.target.blank, list) else []
    training = Training(
        Objective(teacher.model, student, config.loss, blank), config, processes, folder, plan
    )
    training.resume(kept)
    training.run(on_step)
    student = training.finished()
    if not processes.main:
        return Result(student, {}, "")

    say("probing teacher and student")
    after = feature_maps(student, processes.device)
    report = compare(
        before, after, blank, pictures(teacher, config.probe, size, config.probe.seed), config.probe
    )
    images = Batches(
        source, size, _LIKENESS, seed=config.seed, mean=plan[0].batches.mean, std=plan[0].batches.std
    )
    data = likeness(before, after, blank, images.load(0))
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
        "processes": processes.world,
        "device": str(processes.device),
        "seconds_since_start": round(time.perf_counter() - start, 1),
        "versions": {"vispe": __version__, "torch": torch.__version__, "timm": timm.__version__},
    }
    folder.finish(student.state_dict(), card)
    return Result(student, card, verdict(report, data, len(blank), channels))


def _kept(folder: Folder, processes: Processes) -> tuple[int, dict[str, Any], dict[str, Any]] | None:
    """Return the state that all processes find.

    Raises:
        InputError: they find different ones.
    """
    kept = folder.load()
    step = 0 if kept is None else kept[0]
    if processes.total(step) != step * processes.world:
        raise InputError(
            f"Process {processes.rank} found the state of step {step} in {folder.path}, and others another one; "
            "put out on a file system that all machines share."
        )
    return kept


def _plan(
    config: Retrofit, source: Source, processes: Processes, mean: Sequence[float], std: Sequence[float]
) -> list[Part]:
    """Return the stages with their images and numbers of updates."""
    plan, first, window = [], 0, config.window
    for k, stage in enumerate(config.stages):
        batches = Batches(
            source,
            stage.size,
            stage.batch,
            seed=config.seed + k * _APART,
            rank=processes.rank,
            world=processes.world,
            workers=config.workers,
            mean=mean,
            std=std,
            resize=window.resize,
            crop=window.crop,
            small=window.small,
            augment=config.augment,
        )
        steps = stage.updates(len(batches))
        if stage.warmup >= steps:
            raise OptionError(
                f"stages[{k}].warmup={stage.warmup} leaves none of the {steps} updates that its epochs make of "
                f"{len(batches)} pictures; lower it."
            )
        plan.append(Part(replace(stage, steps=steps, epochs=None), first, steps, batches))
        first += steps
    return plan
