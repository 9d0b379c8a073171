"""Checks of the config of a retrofit that need neither model nor data."""

from __future__ import annotations

from collections.abc import Iterator

from vispe.errors import OptionError
from vispe.train.data.augmentation import Augment
from vispe.train.retrofit.config import Retrofit, Stage, Student, Target
from vispe.utils.options import check_options


def check(config: Retrofit) -> None:
    """Check all settings that do not depend on the model and the data.

    >>> from vispe.train.retrofit.config import Retrofit, Stage, Teacher
    >>> check(Retrofit(Teacher("vit_tiny_patch16_224"), [Stage(224)], [{"synthetic": 9}], "out"))
    Traceback (most recent call last):
    vispe.errors.OptionError: stages[0] needs either steps or epochs, got neither.

    Raises:
        OptionError: a number is out of range, or settings contradict each other.
    """
    check_options(config)
    for problem in _problems(config):
        raise OptionError(problem)


def _problems(config: Retrofit) -> Iterator[str]:
    """Yield a message for each invalid setting."""
    if not config.stages:
        yield "retrofit: needs stages, got none. Add at least one, with size and steps."
    for k, stage in enumerate(config.stages):
        yield from _stage(f"stages[{k}]", stage)
    if not config.data:
        yield "retrofit: needs data, got no source. Add at least one, such as a folder."
    yield from _crops(config)
    yield from _target(config)
    yield from _student(config.student)
    yield from _placements(config)
    if not any(vars(config.loss).values()):
        yield "loss: at least one term must have a weight above 0, got 0 for all."
    teacher = config.teacher
    if teacher.name.startswith("open_clip:") and teacher.options:
        yield f"teacher.options apply to timm models only, got {teacher.options} for {teacher.name}. Remove them."
    for key in ("mean", "std"):
        value = getattr(teacher, key)
        if value is not None and (len(value) != 3 or (key == "std" and min(value) <= 0)):
            yield f"teacher.{key} must be three numbers, std above 0, got {value}."


def _stage(name: str, stage: Stage) -> Iterator[str]:
    if (stage.steps is None) == (stage.epochs is None):
        which = "neither" if stage.steps is None else "both"
        yield f"{name} needs either steps or epochs, got {which}."
    if stage.steps is not None and stage.warmup_steps >= stage.steps:
        yield f"{name}.warmup_steps must be below steps={stage.steps}, got {stage.warmup_steps}."


def _crops(config: Retrofit) -> Iterator[str]:
    first = next((f"stages[{k}].crops={s.crops}" for k, s in enumerate(config.stages) if s.crops), None)
    if first is None:
        if config.target.folder is not None:
            yield f"target.folder needs a stage with crops, got {config.target.folder} without one. Remove it."
        return
    if config.loss.class_token:
        yield f"{first} stores patch features only, but loss.class_token needs class tokens. Remove one of them."


def _placements(config: Retrofit) -> Iterator[str]:
    augment, plain = config.augment, Augment()
    for key in ("curriculum", "place_teacher"):
        if not augment.place and (value := getattr(augment, key)) != getattr(plain, key):
            yield f"augment.{key} has no effect with augment.place=0, got {value}. Set augment.place."
    if bool(augment.place) != bool(config.loss.place):
        yield (
            f"augment.place and loss.place must be set together, got augment.place={augment.place} and "
            f"loss.place={config.loss.place}."
        )


def _target(config: Retrofit) -> Iterator[str]:
    target, blank = config.target, config.target.blank
    if isinstance(blank, list) and len(set(blank)) < len(blank):
        yield f"target.blank must have unique channels, got {blank}."
    custom_share = target.share != Target.share
    if blank != "auto" and (target.count is not None or custom_share):
        yield f"target.count and target.share need target.blank=auto, got {blank!r}. Remove them."
    if target.count is not None and custom_share:
        yield f"target.count and target.share are mutually exclusive, got {target.count} and {target.share}."
    if blank == "auto" and not config.probe.noise + config.probe.textures:
        yield "target.blank=auto needs probe images, got none. Set probe.noise or probe.textures."


def _student(student: Student) -> Iterator[str]:
    current = f"got student.trainable={student.trainable}"
    if student.rank != Student.rank and student.trainable != "lora":
        yield f"student.rank={student.rank} needs trainable=lora, {current}. Set trainable: lora or remove rank."
    if student.init == "random" and student.trainable != "all":
        yield f"student.init=random needs trainable=all, {current}. Set init: teacher or trainable: all."
