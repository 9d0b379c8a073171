"""Complete run of a retrofit: checks, models, channels to ablate, training and final measurements."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from vispe.backbones.batching import FeatureFunction
from vispe.backbones.device import flush_denormals
from vispe.backbones.distributed import Processes
from vispe.backbones.vision_model import VisionModel
from vispe.errors import InputError, OptionError, counted
from vispe.hosts.convert import describe
from vispe.train.data import Batches, Source, from_config
from vispe.train.evaluate.model_pair import ModelPair
from vispe.train.retrofit.checkpoint import RunFolder, State
from vispe.train.retrofit.config import Retrofit
from vispe.train.retrofit.config_checks import check
from vispe.train.retrofit.config_paths import with_absolute_paths
from vispe.train.retrofit.distillation_losses import Objective
from vispe.train.retrofit.monitoring import (
    compare,
    feature_maps,
    position_channels,
    probe_images,
    similarity_on_data,
    verdict,
)
from vispe.train.retrofit.stage_plan import OnStep, Say, make_crops, make_plan, normalization, teacher_digest
from vispe.train.retrofit.student import check_models, load_teacher, make_student, n_ablated_channels
from vispe.train.retrofit.teacher import base_teacher
from vispe.train.retrofit.trainer import Training
from vispe.train.retrofit.training_log import read_log
from vispe.utils.version import __version__

_LIKENESS = 8  # training images on which cosine and rank are measured


@dataclass(frozen=True, eq=False)
class DistillationResult:
    """Result of a retrofit.

    Attributes:
        student: student in evaluation mode, on the training device.
        card: model card as JSON values; empty in processes other than the main one.
        verdict: summary in a few lines; '' in processes other than the main one.
    """

    student: nn.Module
    card: dict[str, Any]
    verdict: str


def retrofit(
    config: Retrofit, *, source: Source | None = None, on_step: OnStep | None = None, say: Say | None = None
) -> DistillationResult:
    """Train a student without the teacher's positional bias, and write it.

    Writes `student.safetensors`, `card.json`, `log.jsonl`, TensorBoard events and checkpoints to the output folder; an
    interrupted run resumes. With several processes, all of them must call this function.

    Args:
        config: settings of the retrofit.
        source: image source that replaces the sources of the config.
        on_step: called after every training step, in the main process.
        say: called with status messages outside of the training loop, in the main process.

    Raises:
        OptionError: invalid or contradictory settings; checked before weights are loaded, if possible.
        InputError: unreadable data, or a folder with a finished run or an interrupted run of other settings.
        UnknownName: unknown model or encoding.
        UnsupportedHost: the teacher cannot be converted.
        UnsupportedCombination: the encoding is not supported by the teacher.
        MissingExtra: a library is not installed.
    """
    with flush_denormals():
        return _run(config, source, on_step, say)


def _run(
    config: Retrofit, source: Source | None, on_step: OnStep | None, status: Say | None
) -> DistillationResult:
    start = time.perf_counter()
    check(config)
    config = with_absolute_paths(config)
    processes = Processes.training(config.device, config.amp)
    status = status if status is not None and processes.main else lambda words: None
    for k, stage in enumerate(config.stages):
        if stage.batch_size % processes.count:
            raise OptionError(
                f"stages[{k}].batch_size must be a multiple of the {counted(processes.count, 'process')}, got "
                f"{stage.batch_size}."
            )
    folder = RunFolder(Path(config.out))
    folder.check(config.identity(), config.force, partly=True)
    channels = check_models(config)
    source = from_config(config.data) if source is None else source
    identity = {**config.identity(), "data.fingerprint": source.fingerprint()}
    base, debiasing = base_teacher(config.teacher)
    if debiasing is not None:
        identity["teacher.debiased"] = debiasing.fingerprint()
    folder.check(identity, config.force, partly=True)

    status(f"loading {config.teacher.name}")
    teacher = load_teacher(config.teacher, seed=config.seed)
    identity["teacher.digest"] = teacher_digest(teacher)
    folder.check(identity, config.force)
    plan = make_plan(config, source, processes, teacher)
    # barriers: no process writes before all have checked the folder, and none reads before it is prepared
    processes.wait()
    if processes.main:
        folder.begin(identity, config.force)
    processes.wait()

    student = make_student(teacher, config.student, seed=config.seed).to(processes.torch_device)
    teacher.model.to(processes.torch_device)
    state, size = _state(folder, processes), config.stages[0].img_size
    before = feature_maps(teacher.model, processes.torch_device)
    if state is not None:
        blank = state[2]["channels"]
    elif config.target.blank == "auto":
        status("selecting channels to ablate")
        blank = _position_channels(config, processes, before, teacher)
    else:
        blank = config.target.blank if isinstance(config.target.blank, list) else []
    make_crops(config, source, processes, teacher, plan, status)
    follow = config.augment.place_teacher == "best"
    objective = Objective(teacher.model, student, config.loss, blank, follow)
    training = Training(objective, config, processes, folder, plan)
    training.resume(state)
    training.run(on_step)
    student = training.finished()
    if not processes.main:
        return DistillationResult(student, {}, "")

    status("probing teacher and student")
    pair = ModelPair(before, feature_maps(student, processes.torch_device), blank)
    report = compare(pair, probe_images(teacher, config.probe, size, config.probe.seed), config.probe)
    images = Batches(source, size, _LIKENESS, seed=config.seed, **normalization(teacher))
    data = similarity_on_data(pair, images.load(0))
    card = {
        "kind": "vispe retrofit",
        "config": {**config.to_dict(), "teacher": asdict(base)},  # a student is loaded without that folder
        "debiased": None if debiasing is None else debiasing.method,
        "encoding": describe(student),
        "patch": teacher.patch_size,
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
        "device": str(processes.torch_device),
        "seconds_since_start": round(time.perf_counter() - start, 1),
        "versions": {"vispe": __version__, "torch": torch.__version__, "timm": timm.__version__},
    }
    folder.finish(student.state_dict(), card)
    return DistillationResult(student, card, verdict(report, data, len(blank), channels))


def _state(folder: RunFolder, processes: Processes) -> State | None:
    """Return the last checkpoint, which must be the same in all processes.

    Raises:
        InputError: the processes read different checkpoints.
    """
    state = folder.load()
    step = 0 if state is None else state[0]
    if processes.total(step) != step * processes.count:
        raise InputError(
            f"process {processes.rank} read the checkpoint of step {step} from {folder.path}, others another one. Set "
            "`out` to a file system shared by all machines."
        )
    return state


def _position_channels(
    config: Retrofit, processes: Processes, maps: FeatureFunction, teacher: VisionModel
) -> list[int]:
    """Return the position-dependent channels, as selected by the main process."""
    # other images than those of the final measurement
    kinds = probe_images(teacher, config.probe, config.stages[0].img_size, config.probe.seed + 1)
    blank = position_channels(maps, kinds, config.probe, n_ablated_channels(config, teacher.channels))
    # broadcast from the main process: the sum with zeros from the other processes
    numbers = torch.tensor(blank, device=processes.torch_device) * processes.main
    processes.sum_([numbers])
    return numbers.tolist()
