"""Checks of a retrofit's config that need neither model nor data."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from vispe.errors import OptionError
from vispe.train.data.augmentation import Augment
from vispe.train.retrofit.config import Retrofit, Stage, Student, Target

_LEAST = {
    "student.rank": 1, "target.count": 1, "probe.noise": 0, "probe.textures": 0, "probe.size": 1, "probe.step": 1,
    "probe.masks": 1, "workers": 0, "log_every": 1, "checkpoint_every": 1, "chunk": 1, "weight_decay": 0, "seed": 0,
    "loss.distill": 0, "loss.centred": 0, "loss.d4": 0, "loss.place": 0, "loss.class_token": 0, "ema": 0,
    "probe.seed": 0,
}  # fmt: skip


def check(config: Retrofit) -> None:
    """Check all that can be checked without the model and the data.

    >>> from vispe.train.retrofit.config import Retrofit, Stage, Teacher
    >>> check(Retrofit(Teacher("vit_tiny_patch16_224"), [Stage(224)], [{"synthetic": 9}], "out"))
    Traceback (most recent call last):
    vispe.errors.OptionError: stages[0] needs steps or epochs, one of them, got neither.

    Raises:
        OptionError: a number out of its range, or keys that contradict each other.
    """
    for problem in _problems(config):
        raise OptionError(problem)


def _problems(config: Retrofit) -> Iterator[str]:
    """Yield a sentence for each thing that is wrong."""
    yield from _numbers(config)
    if not config.stages:
        yield "A retrofit needs stages, got none; give at least one, with size and steps."
    for k, stage in enumerate(config.stages):
        yield from _stage(f"stages[{k}]", stage)
    if not config.data:
        yield "A retrofit needs data, got no source; name at least one, such as a folder."
    yield from _crops(config)
    yield from _target(config)
    yield from _student(config.student)
    yield from _placements(config)
    if not any(vars(config.loss).values()):
        yield "All parts of the loss have weight 0, so nothing would be learnt; give one a weight."
    teacher = config.teacher
    if teacher.name.startswith("open_clip:") and teacher.options:
        yield f"teacher.options are for timm models, got {teacher.options} for {teacher.name}; remove them."
    for key in ("mean", "std"):
        value = getattr(teacher, key)
        if value is not None and (len(value) != 3 or (key == "std" and min(value) <= 0)):
            yield f"teacher.{key} must be three numbers, std above 0, got {value}."


def _numbers(config: Retrofit) -> Iterator[str]:
    for key, least in _LEAST.items():
        value = attrgetter(key)(config)
        if value is not None and not value >= least:
            yield f"{key} must be at least {least}, got {value}."
    if config.ema >= 1:
        yield f"ema is a decay from 0 (none) to below 1, such as 0.999, got {config.ema}."
    if config.clip is not None and not config.clip > 0:
        yield f"clip, if given, is a largest norm above 0, got {config.clip}."
    if not 0 < config.target.share < 1:
        yield f"target.share must lie between 0 and 1, got {config.target.share}."


def _stage(name: str, stage: Stage) -> Iterator[str]:
    if (stage.steps is None) == (stage.epochs is None):
        given = "neither" if stage.steps is None else "both"
        yield f"{name} needs steps or epochs, one of them, got {given}."
    for key in ("size", "steps", "batch", "crops"):
        if (value := getattr(stage, key)) is not None and value < 1:
            yield f"{name}.{key} must be at least 1, got {value}."
    if (stage.epochs is not None and stage.epochs <= 0) or stage.rate <= 0 or stage.warmup < 0:
        got = f"epochs={stage.epochs}, rate={stage.rate}, warmup={stage.warmup}"
        yield f"{name} needs epochs and rate above 0 and warmup of 0 or more, got {got}."
    if stage.steps is not None and stage.warmup >= stage.steps:
        yield f"{name}.warmup={stage.warmup} leaves no update of its {stage.steps} steps; lower it."


def _crops(config: Retrofit) -> Iterator[str]:
    first = next((f"stages[{k}].crops={s.crops}" for k, s in enumerate(config.stages) if s.crops), None)
    if first is None:
        if config.target.folder is not None:
            yield f"target.folder={config.target.folder} is for stages with crops, and none has any; remove it."
        return
    if config.loss.class_token:
        yield f"{first} keeps features of patches alone, and loss.class_token needs class tokens; remove one of them."


def _placements(config: Retrofit) -> Iterator[str]:
    augment, plain = config.augment, Augment()
    for key in ("curriculum", "place_teacher"):
        if not augment.place and (value := getattr(augment, key)) != getattr(plain, key):
            yield f"augment.{key}={value} is for placements, and augment.place is 0; set the side of their canvas."
    if bool(augment.place) != bool(config.loss.place):
        yield (
            f"augment.place={augment.place} and loss.place={config.loss.place}: placements need a canvas and a "
            "weight; give both, or neither."
        )


def _target(config: Retrofit) -> Iterator[str]:
    target, blank = config.target, config.target.blank
    if isinstance(blank, str) and blank not in ("none", "auto"):
        yield f"target.blank={blank!r} is not none, auto or a list of channels."
    if isinstance(blank, list) and len(set(blank)) < len(blank):
        yield f"target.blank names a channel twice: {blank}; name each once."
    shared = target.share != Target.share
    if blank != "auto" and (target.count is not None or shared):
        yield f"target.count and target.share are for blank=auto, but target.blank is {blank!r}; remove them."
    if target.count is not None and shared:
        yield "target.count and target.share both say how many channels; give one."
    if blank == "auto" and not config.probe.noise + config.probe.textures:
        yield "target.blank=auto needs pictures to probe; give probe.noise or probe.textures."


def _student(student: Student) -> Iterator[str]:
    got = f"got student.trainable={student.trainable}"
    if student.rank != Student.rank and student.trainable != "lora":
        yield f"student.rank={student.rank} is for trainable=lora, {got}; set trainable: lora or remove rank."
    if student.init == "random" and student.trainable != "all":
        yield f"A student with random weights must train all of them, {got}; set init: teacher or trainable: all."
