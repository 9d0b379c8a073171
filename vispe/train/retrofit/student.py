"""Student of a retrofit: construction, checks against the teacher, and loading."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vispe.backbones.local.debiased import DebiasedModel
from vispe.backbones.local.retrofitted import fitted, read_card
from vispe.backbones.model_access import final_tokens as final_tokens
from vispe.backbones.model_access import reinitialized_copy
from vispe.backbones.vision_model import VisionModel
from vispe.errors import InputError, OptionError
from vispe.hosts.convert import convert
from vispe.images.symmetry import symmetrize
from vispe.train.evaluate.probe_images import probe_step
from vispe.train.retrofit.config import Retrofit, Student, Teacher
from vispe.train.retrofit.lora import add_lora
from vispe.train.retrofit.teacher import load_teacher


def make_student(teacher: VisionModel, config: Student, *, seed: int = 0) -> nn.Module:
    """Return a copy of the teacher's model with another encoding, in training mode.

    Only the trained weights require gradients. With lora, linear layers have low-rank updates of their frozen weights.

    Args:
        teacher: the teacher, which is not changed.
        config: encoding, initial weights and trainable parameters.
        seed: seed of all new weights.

    Raises:
        OptionError: there are no trainable parameters.
        UnknownEncoding: unknown encoding.
        UnsupportedCombination: the encoding is not supported by the model.
        UnsupportedHost: the model cannot be converted.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        source = teacher.model.tower if isinstance(teacher.model, DebiasedModel) else teacher.model
        meta = any(p.is_meta for p in source.parameters())
        if config.init == "random" and not meta:
            model, _ = reinitialized_copy(source, seed)
        else:
            model = copy.deepcopy(source)
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
                    f"student.trainable=encoding needs an encoding with parameters, got {config.pos_embed}. Use a "
                    "learned encoding, or trainable: lora or all."
                )
            if config.trainable == "lora":
                add_lora(model, config.rank)
    return model.train()


def check_models(config: Retrofit) -> int:
    """Check a retrofit against its models without weights, before any download; return the number of channels.

    >>> from vispe.train.retrofit.config import Stage
    >>> check_models(Retrofit(Teacher("vit_tiny_patch16_224"), [Stage(224, steps=1)], [{"synthetic": 1}], "out"))
    192

    Raises:
        OptionError: an unsupported size, channels that do not exist, or a missing class token.
        UnknownName: unknown model or encoding.
        UnsupportedHost: the model cannot be converted.
        UnsupportedCombination: the encoding is not supported by the model.
        InputError: the weights file does not exist.
    """
    teacher = load_teacher(config.teacher, outline=True)
    make_student(teacher, config.student)
    for problem in _problems(config, teacher):
        raise OptionError(problem)
    return teacher.channels


def _problems(config: Retrofit, teacher: VisionModel) -> Iterator[str]:
    """Yield a message for each setting that does not match the teacher."""
    name, patch_size = config.teacher.name, teacher.patch_size
    sizes = {f"stages[{k}].img_size": stage.img_size for k, stage in enumerate(config.stages)}
    if config.probe.img_size is not None:
        sizes["probe.img_size"] = config.probe.img_size
    for key, size in sizes.items():
        if size % patch_size:
            nearest = f"{max(1, size // patch_size) * patch_size} or {(size // patch_size + 1) * patch_size}"
            yield f"{key} must be a multiple of the patch size of {name}, {patch_size} px, got {size}. Use {nearest}."
        if teacher.exact and size != teacher.size:
            yield f"{key} must be {teacher.size} px for {name}, got {size}. Set teacher.img_size to {size}."
    side, probe = (config.probe.img_size or config.stages[0].img_size) // patch_size, config.probe
    step = probe.step or probe_step(side)
    if probe.noise + probe.textures and side**2 // step**2 < 2:
        yield (
            f"probe.step={step} leaves fewer than two patches for fitting on a {side}x{side} grid, got "
            f"probe.img_size={probe.img_size}. Use a smaller step, larger images, or no probe images."
        )
    for k, stage in enumerate(config.stages):
        grid, canvas = stage.img_size // patch_size, config.augment.place
        if canvas and (canvas == grid or 2 * canvas <= grid):
            reason = (
                "images cannot be moved" if canvas == grid else "two such windows may have no patch in common"
            )
            yield (
                f"augment.place={canvas} with stages[{k}].img_size={stage.img_size} ({grid} patches per side): "
                f"{reason}. Use a larger canvas, such as {grid + grid // 2}."
            )
    blank, channels = config.target.blank, teacher.channels
    if isinstance(blank, list) and (invalid := [c for c in blank if not 0 <= c < channels]):
        yield f"target.blank must be channels below {channels}, the number of features of {name}, got {invalid[0]}."
    count = n_ablated_channels(config, channels)
    if count >= channels:
        yield f"target.count must be below {channels}, the number of features of {name}, got {count}."
    if config.loss.class_token and not teacher.class_token:
        yield f"loss.class_token must be 0, since {name} has no class token, got {config.loss.class_token}."


def check_size(size: int, backbone: VisionModel, name: str) -> None:
    """Check that a model supports an image size.

    Args:
        size: side in pixels.
        backbone: the model.
        name: name of the model in the message.

    Raises:
        OptionError: the size is not supported.
    """
    if size % backbone.patch_size or (backbone.exact and size != backbone.size):
        required = f"{backbone.size}" if backbone.exact else f"a multiple of {backbone.patch_size}"
        raise OptionError(f"img_size must be {required} for {name}, got {size}.")


def n_ablated_channels(config: Retrofit, channels: int) -> int:
    """Return the number of ablated channels."""
    if isinstance(config.target.blank, list):
        return len(config.target.blank)
    if config.target.blank == "none":
        return 0
    return config.target.count or max(1, round(config.target.share * channels))


def load_student(folder: str | Path) -> tuple[VisionModel, VisionModel, dict[str, Any]]:
    """Return the student of a finished retrofit, its teacher, and its model card.

    Args:
        folder: output folder of the retrofit, or its `student.safetensors`.

    Raises:
        InputError: there is no finished retrofit, or its weights do not match.
        UnknownName: the teacher or the encoding does not exist in this version.
        MissingExtra: a package that the teacher needs is not installed.

    Example:
        >>> import tempfile
        >>> from vispe.train import retrofit
        >>> from vispe.train.retrofit.config import Probe, Stage
        >>> teacher = Teacher("test_vit", weights="random", img_size=64, options={"depth": 1})
        >>> stages, folder = [Stage(64, steps=1, batch_size=2)], tempfile.mkdtemp()
        >>> probe = Probe(noise=1, textures=1, masks=1, step=2)
        >>> config = Retrofit(teacher, stages, [{"synthetic": 2}], folder, probe=probe, tensorboard=False)
        >>> result = retrofit(config)
        >>> student, teacher, card = load_student(folder)
        >>> student.channels, card["config"]["stages"][0]["steps"]
        (64, 1)
    """
    card = read_card(folder)
    try:
        teacher = load_teacher(Teacher(**card["config"]["teacher"]), seed=card["config"]["seed"])
    except TypeError as error:
        raise InputError(f"{folder} has no model card of vispe retrofit ({error}).") from error
    return fitted(teacher, folder), teacher, card
