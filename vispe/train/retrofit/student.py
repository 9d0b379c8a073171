"""Teacher and student of a retrofit: built, converted, frozen where asked, checked, and read again."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vispe.backbones.tokens import Backbone, final_tokens
from vispe.errors import InputError, OptionError
from vispe.hosts.convert import convert
from vispe.symmetry import symmetrize
from vispe.train.retrofit.config import Retrofit, Student, Teacher
from vispe.train.retrofit.teacher import load_teacher

__all__ = [
    "Backbone",
    "blanked_count",
    "check_models",
    "final_tokens",
    "load_student",
    "load_teacher",
    "make_student",
]


def make_student(teacher: Backbone, config: Student, *, seed: int = 0) -> nn.Module:
    """Return a copy of the teacher's model with another encoding, of which what is to be trained requires gradients.

    The copy is in training mode. With lora, its linear layers hold a low-rank change beside their weights, see
    `vispe.train.retrofit.lora`.

    Args:
        teacher: stays as it is.
        config: what becomes of the copy.
        seed: of all new weights.

    Raises:
        OptionError: nothing would be trained.
        UnknownEncoding, UnsupportedCombination, UnsupportedHost: the encoding has no place in the model.
    """
    from vispe.backbones.maps import random_twin
    from vispe.train.retrofit.lora import add_lora

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        meta = any(p.is_meta for p in teacher.model.parameters())
        if config.init == "random" and not meta:
            model, _ = random_twin(teacher.model, seed)
        else:
            model = copy.deepcopy(teacher.model)
        with torch.device("meta" if meta else "cpu"):
            convert(model, config.pos_embed)
        if config.symmetric and not meta:
            symmetrize(model)
        model.requires_grad_(config.trainable == "all")
        if config.trainable != "all":
            own = [p for name, p in model.named_parameters() if "pos_enc" in name.split(".")]
            for parameter in own:
                parameter.requires_grad_(True)
            if config.trainable == "encoding" and not own:
                raise OptionError(
                    f"student.trainable=encoding was asked, and {config.pos_embed} has no parameters; choose an "
                    "encoding that learns, or trainable: lora or all."
                )
            if config.trainable == "lora":
                add_lora(model, config.rank)
    return model.train()


def check_models(config: Retrofit) -> int:
    """Check a retrofit against outlines of its models, before weights are fetched; return the number of features.

    Raises:
        OptionError: a size that the model refuses, channels that it does not have, a class token that it lacks.
        UnknownName, UnsupportedHost and other errors of vispe: see `load_teacher` and `make_student`.
    """
    teacher = load_teacher(config.teacher, outline=True)
    make_student(teacher, config.student)
    name, patch = config.teacher.name, teacher.patch
    sizes = {f"stages[{k}].size": stage.size for k, stage in enumerate(config.stages)}
    if config.probe.size is not None:
        sizes["probe.size"] = config.probe.size
    for key, size in sizes.items():
        if size % patch:
            raise OptionError(
                f"{key}={size} is no multiple of the patch of {name}, {patch} px; choose "
                f"{max(1, size // patch) * patch} or {(size // patch + 1) * patch}."
            )
        if teacher.exact and size != teacher.size:
            raise OptionError(
                f"{key}={size}, and {name} takes images of {teacher.size} px alone; set teacher.img_size to {size}."
            )
    blank = config.target.blank
    if isinstance(blank, list) and (bad := [c for c in blank if not 0 <= c < teacher.channels]):
        raise OptionError(
            f"target.blank names channel {bad[0]}, and the features of {name} have {teacher.channels}, numbered from 0."
        )
    count = blanked_count(config, teacher.channels)
    if count >= teacher.channels:
        raise OptionError(
            f"target.count={count} would blank all {teacher.channels} channels of {name}; lower it."
        )
    if config.loss.class_token and not teacher.class_token:
        raise OptionError(
            f"loss.class_token={config.loss.class_token}, and {name} has no class token; set it to 0."
        )
    return teacher.channels


def check_size(size: int, backbone: Backbone, name: str) -> None:
    """Check that a model takes images of a size.

    Args:
        size: side in pixels.
        backbone: the model.
        name: what the message calls it.

    Raises:
        OptionError: it does not.
    """
    if size % backbone.patch or (backbone.exact and size != backbone.size):
        needed = f"{backbone.size}" if backbone.exact else f"a multiple of {backbone.patch}"
        raise OptionError(f"size={size} does not suit {name}, which needs {needed}.")


def blanked_count(config: Retrofit, channels: int) -> int:
    """Return how many of the channels are blanked."""
    if isinstance(config.target.blank, list):
        return len(config.target.blank)
    if config.target.blank == "none":
        return 0
    return config.target.count or max(1, round(config.target.share * channels))


def load_student(folder: str | Path) -> tuple[Backbone, Backbone, dict[str, Any]]:
    """Return the student of a finished retrofit, its teacher, and its card.

    Args:
        folder: what the retrofit wrote, or its `student.safetensors`.

    Raises:
        InputError: no finished retrofit is there, or its weights do not fit.
    """
    import json

    from safetensors.torch import load_file

    folder = Path(folder)
    folder = folder.parent if folder.suffix == ".safetensors" else folder
    if not (folder / "card.json").is_file() or not (folder / "student.safetensors").is_file():
        raise InputError(
            f"{folder} holds no finished retrofit: card.json and student.safetensors are needed; run vispe retrofit."
        )
    card = json.loads((folder / "card.json").read_text(encoding="utf-8"))
    try:
        teacher = load_teacher(Teacher(**card["config"]["teacher"]), seed=card["config"]["seed"])
        made = Student(**card["config"]["student"])
    except (KeyError, TypeError) as error:
        raise InputError(f"{folder / 'card.json'} is no card of vispe retrofit ({error}).") from error
    student = make_student(teacher, replace(made, trainable="all"), seed=card["config"]["seed"]).eval()
    try:
        student.load_state_dict(load_file(folder / "student.safetensors"))
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"{folder / 'student.safetensors'} does not fit its card: {reason}") from error
    return replace(teacher, model=student.requires_grad_(False), exact=False), teacher, card
