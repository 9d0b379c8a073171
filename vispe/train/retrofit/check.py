"""Checks of what a retrofit is told that need neither model nor data."""

from __future__ import annotations

from typing import Any

from vispe.errors import OptionError
from vispe.train.retrofit.config import Retrofit, Stage, Student, Target


def check_config(config: Retrofit) -> None:
    """Check all that can be checked without the model and the data.

    Raises:
        OptionError: a number out of its range, or keys that contradict each other.
    """
    _check_numbers(config)
    student, target, loss = config.student, config.target, config.loss
    if not config.stages:
        raise OptionError("A retrofit needs stages, got none; give at least one, with size and steps.")
    for k, stage in enumerate(config.stages):
        _check_stage(f"stages[{k}]", stage)
    if not config.data:
        raise OptionError("A retrofit needs data, got no source; name at least one, such as a folder.")
    if isinstance(target.blank, str) and target.blank not in ("none", "auto"):
        raise OptionError(f"target.blank={target.blank!r} is not none, auto or a list of channels.")
    if isinstance(target.blank, list) and len(set(target.blank)) < len(target.blank):
        raise OptionError(f"target.blank names a channel twice: {target.blank}; name each once.")
    if target.blank != "auto" and (target.count is not None or target.share != Target.share):
        raise OptionError(
            f"target.count and target.share say how many channels blank=auto takes, but target.blank is "
            f"{target.blank!r}; leave them out."
        )
    if target.count is not None and target.share != Target.share:
        raise OptionError("target.count and target.share both say how many channels; give one.")
    if target.blank == "auto" and not config.probe.noise + config.probe.textures:
        raise OptionError("target.blank=auto needs pictures to probe; give probe.noise or probe.textures.")
    if student.rank != Student.rank and student.trainable != "lora":
        raise OptionError(
            f"student.rank={student.rank} is about lora, but student.trainable is {student.trainable}; "
            "set trainable: lora or leave rank out."
        )
    if student.init == "random" and student.trainable != "all":
        raise OptionError(
            f"A student with random weights must train all of them, got student.trainable={student.trainable}; "
            "use init: teacher or trainable: all."
        )
    if not loss.distill + loss.d4 + loss.class_token:
        raise OptionError(
            "All parts of the loss have weight 0, so nothing would be learnt; give one a weight."
        )
    if config.teacher.name.startswith("open_clip:") and config.teacher.options:
        raise OptionError(
            f"teacher.options are for timm models, got {config.teacher.options} for {config.teacher.name}; "
            "leave them out."
        )
    for key in ("mean", "std"):
        value = getattr(config.teacher, key)
        if value is not None and (len(value) != 3 or (key == "std" and min(value) <= 0)):
            raise OptionError(f"teacher.{key} must be three numbers, std above 0, got {value}.")


def _check_stage(name: str, stage: Stage) -> None:
    if (stage.steps is None) == (stage.epochs is None):
        found = "neither" if stage.steps is None else "both"
        raise OptionError(f"{name} needs steps or epochs, one of them, got {found}.")
    for key in ("size", "steps", "batch"):
        if (value := getattr(stage, key)) is not None and value < 1:
            raise OptionError(f"{name}.{key} must be at least 1, got {value}.")
    if (stage.epochs is not None and stage.epochs <= 0) or stage.rate <= 0 or stage.warmup < 0:
        raise OptionError(
            f"{name} needs epochs and rate above 0 and warmup of 0 or more, got epochs={stage.epochs}, "
            f"rate={stage.rate}, warmup={stage.warmup}."
        )
    if stage.steps is not None and stage.warmup >= stage.steps:
        raise OptionError(
            f"{name}.warmup={stage.warmup} leaves no update of its {stage.steps} steps; lower it."
        )


def _check_numbers(config: Retrofit) -> None:
    least = {
        "student.rank": 1, "target.count": 1, "probe.noise": 0, "probe.textures": 0, "probe.size": 1, "probe.step": 1,
        "probe.masks": 1, "workers": 0, "log_every": 1, "checkpoint_every": 1, "chunk": 1, "weight_decay": 0, "seed": 0,
        "loss.distill": 0, "loss.d4": 0, "loss.class_token": 0, "ema": 0, "probe.seed": 0,
    }  # fmt: skip
    for key, low in least.items():
        value: Any = config
        for part in key.split("."):
            value = getattr(value, part)
        if value is not None and not value >= low:
            raise OptionError(f"{key} must be at least {low}, got {value}.")
    if config.ema >= 1:
        raise OptionError(f"ema is a decay from 0 (none) to below 1, such as 0.999, got {config.ema}.")
    if config.clip is not None and not config.clip > 0:
        raise OptionError(f"clip is a largest norm above 0, got {config.clip}; leave it out for none.")
    if not 0 < config.target.share < 1:
        raise OptionError(f"target.share must lie between 0 and 1, got {config.target.share}.")
