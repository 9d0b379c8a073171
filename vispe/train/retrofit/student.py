"""Teacher and student of a retrofit: built, converted, frozen where asked, checked, and read again."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vispe.backbones.local.retrofitted import fitted, read_card
from vispe.backbones.model_access import final_tokens as final_tokens
from vispe.backbones.vision_model import Backbone as Backbone
from vispe.backbones.vision_model import VisionModel, random_twin
from vispe.errors import InputError, OptionError
from vispe.hosts.convert import convert
from vispe.symmetry import symmetrize
from vispe.train.retrofit.config import Retrofit, Student, Teacher
from vispe.train.retrofit.lora import add_lora
from vispe.train.retrofit.teacher import load_teacher


def make_student(teacher: VisionModel, config: Student, *, seed: int = 0) -> nn.Module:
    """Return a copy of the teacher's model with another encoding, in training mode.

    Only the weights to be trained require gradients. With lora, the linear layers hold low-rank changes beside their
    frozen weights.

    Args:
        teacher: stays as it is.
        config: encoding, initial weights and what is trained.
        seed: of all new weights.

    Raises:
        OptionError: nothing would be trained.
        UnknownEncoding, UnsupportedCombination, UnsupportedHost: the encoding has no place in the model.
    """
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
            encoding = [p for name, p in model.named_parameters() if "pos_enc" in name.split(".")]
            for parameter in encoding:
                parameter.requires_grad_(True)
            if config.trainable == "encoding" and not encoding:
                raise OptionError(
                    f"student.trainable=encoding was asked, and {config.pos_embed} has no parameters; choose an "
                    "encoding that learns, or trainable: lora or all."
                )
            if config.trainable == "lora":
                add_lora(model, config.rank)
    return model.train()


def check_models(config: Retrofit) -> int:
    """Check a retrofit against outlines of its models, before weights are fetched; return the number of features.

    >>> from vispe.train.retrofit.config import Stage
    >>> check_models(Retrofit(Teacher("vit_tiny_patch16_224"), [Stage(224, steps=1)], [{"synthetic": 1}], "out"))
    192

    Raises:
        OptionError: a size that the model refuses, channels that it does not have, a class token that it lacks.
        UnknownName, UnsupportedHost, UnsupportedCombination, InputError: models that cannot be built.
    """
    teacher = load_teacher(config.teacher, outline=True)
    make_student(teacher, config.student)
    for problem in _problems(config, teacher):
        raise OptionError(problem)
    return teacher.channels


def _problems(config: Retrofit, teacher: VisionModel) -> Iterator[str]:
    """Yield a sentence for each thing that does not fit the teacher."""
    name, patch = config.teacher.name, teacher.patch
    sizes = {f"stages[{k}].size": stage.size for k, stage in enumerate(config.stages)}
    if config.probe.size is not None:
        sizes["probe.size"] = config.probe.size
    for key, size in sizes.items():
        if size % patch:
            near = f"{max(1, size // patch) * patch} or {(size // patch + 1) * patch}"
            yield f"{key}={size} is no multiple of the patch of {name}, {patch} px; choose {near}."
        if teacher.exact and size != teacher.size:
            yield f"{key}={size}, and {name} takes images of {teacher.size} px alone; set teacher.img_size to {size}."
    for k, stage in enumerate(config.stages):
        grid, place = stage.size // patch, config.augment.place
        if place and (place == grid or 2 * place <= grid):
            why = "nothing could move" if place == grid else "two such windows may have no patch in common"
            yield (
                f"augment.place={place}, and stages[{k}].size={stage.size} has {grid} patches a side, so that {why}; "
                f"choose a larger canvas, such as {grid + grid // 2}."
            )
    blank, channels = config.target.blank, teacher.channels
    if isinstance(blank, list) and (bad := [c for c in blank if not 0 <= c < channels]):
        yield f"target.blank names channel {bad[0]}, and the features of {name} have {channels}, numbered from 0."
    count = blanked_count(config, channels)
    if count >= channels:
        yield f"target.count={count} would blank all {channels} channels of {name}; lower it."
    if config.loss.class_token and not teacher.class_token:
        yield f"loss.class_token={config.loss.class_token}, and {name} has no class token; set it to 0."


def check_size(size: int, backbone: VisionModel, name: str) -> None:
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


def load_student(folder: str | Path) -> tuple[VisionModel, VisionModel, dict[str, Any]]:
    """Return the student of a finished retrofit, its teacher, and its card.

    Args:
        folder: what the retrofit wrote, or its `student.safetensors`.

    Raises:
        InputError: no finished retrofit is there, or its weights do not fit.
    """
    card = read_card(folder)
    try:
        teacher = load_teacher(Teacher(**card["config"]["teacher"]), seed=card["config"]["seed"])
    except TypeError as error:
        raise InputError(f"{folder} has no card of vispe retrofit ({error}).") from error
    return fitted(teacher, folder), teacher, card
