"""Teacher and student of a retrofit: built, converted, frozen where asked, and asked for their final tokens."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import vispe
from vispe.errors import InputError, OptionError, ShapeError, UnsupportedHost
from vispe.train.config import Retrofit, Student, Teacher


@dataclass(frozen=True, eq=False)
class Backbone:
    """A vision transformer and the images that it takes.

    Attributes:
        model: in evaluation mode; of open_clip the image tower alone.
        mean: of the channels of images in [0, 1], (3, 1, 1).
        std: of the channels, (3, 1, 1).
        patch: side of a patch in pixels.
        size: side in pixels of the images that it was built for.
        exact: whether it takes images of that size alone.
        channels: width of its features.
        class_token: whether it has one.
    """

    model: nn.Module
    mean: Tensor
    std: Tensor
    patch: int
    size: int
    exact: bool
    channels: int
    class_token: bool


def final_tokens(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the final, normed patch features (b, d, h, w) and class tokens (b, d), with gradients.

    The mode of the model, training or evaluation, stays as it is. Class tokens are None where there are none.

    Args:
        model: of timm, or an image tower of open_clip, converted or not.
        images: normalised, (b, 3, H, W), sides multiples of the patch.

    Raises:
        UnsupportedHost: the model returns no feature maps.
    """
    last = [len(_blocks(model)) - 1]
    if hasattr(model, "conv1"):
        found = model.forward_intermediates(
            images,
            indices=last,
            intermediates_only=True,
            normalize_intermediates=True,
            output_extra_tokens=True,
        )
        return found["image_intermediates"][0], found["image_intermediates_prefix"][0][:, 0]
    found = model.forward_intermediates(
        images, indices=last, norm=True, output_fmt="NCHW", intermediates_only=True, return_prefix_tokens=True
    )[0]
    if isinstance(found, Tensor):
        return found, None
    return found[0], found[1][:, 0] if _has_class_token(model) else None


def load_teacher(config: Teacher, *, outline: bool = False, seed: int = 0) -> Backbone:
    """Build the teacher in evaluation mode, frozen.

    Args:
        config: what it is.
        outline: build it without memory and weights (on torch's meta device), for checks.
        seed: of random weights.

    Raises:
        UnknownName, InputError, OptionError, UnsupportedHost: it cannot be found, loaded or used.
    """
    place, colon, _ = config.name.partition(":")
    build = _open_clip if colon and place == "open_clip" else _timm
    found = build(config, outline, seed)
    if found.size % found.patch and config.img_size:
        raise OptionError(
            f"teacher.img_size={config.img_size} is no multiple of the patch of {config.name}, {found.patch} px; "
            f"choose {max(1, round(config.img_size / found.patch)) * found.patch}."
        )
    for key in ("mean", "std"):
        if (given := getattr(config, key)) is not None:
            found = replace(found, **{key: torch.tensor(given)[:, None, None]})
    found.model.requires_grad_(False)
    return found


def make_student(teacher: Backbone, config: Student, *, seed: int = 0) -> nn.Module:
    """Return a copy of the teacher's model with another encoding, of which what is to be trained requires gradients.

    The copy is in training mode. With lora, its linear layers hold a low-rank change beside their weights, see
    `vispe.train.lora`.

    Args:
        teacher: stays as it is.
        config: what becomes of the copy.
        seed: of all new weights.

    Raises:
        OptionError: nothing would be trained.
        UnknownEncoding, UnsupportedCombination, UnsupportedHost: the encoding has no place in the model.
    """
    from vispe.evaluate.rotation.model import random_twin
    from vispe.train.lora import add_lora

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        meta = any(p.is_meta for p in teacher.model.parameters())
        if config.init == "random" and not meta:
            model, _ = random_twin(teacher.model, seed)
        else:
            model = copy.deepcopy(teacher.model)
        with torch.device("meta" if meta else "cpu"):
            vispe.convert(model, config.pos_embed)
        if config.symmetric and not meta:
            vispe.symmetrize(model)
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


def _timm(config: Teacher, outline: bool, seed: int) -> Backbone:
    from vispe.evaluate.backbone import input_settings, load_backbone

    weights = "random" if outline else config.weights
    if outline and config.weights not in (None, "random") and not Path(config.weights).is_file():
        raise InputError(f"teacher.weights={config.weights} is not a file; give a checkpoint, or 'random'.")
    with torch.device("meta" if outline else "cpu"):
        net = load_backbone(
            config.name,
            weights=weights,
            img_size=config.img_size,
            any_size=True,
            options=config.options,
            seed=seed,
        )
    _blocks(net)
    with torch.device("cpu"):
        side, mean, std = input_settings(net)
    return _backbone(config.name, net, mean, std, side, not getattr(net, "dynamic_img_size", False))


def _open_clip(config: Teacher, outline: bool, seed: int) -> Backbone:
    from vispe.evaluate.rotation.subject import load_subject

    if outline:
        import open_clip

        plain = config.name.partition(":")[2].partition("/")[0]
        if plain in open_clip.list_models():
            vision = open_clip.get_model_config(plain)["vision_cfg"]
            if "patch_size" not in vision or "timm_model_name" in vision:
                raise UnsupportedHost(
                    f"{config.name} has no vision transformer of open_clip as image tower; give a timm model."
                )
        random = replace(config, name=f"open_clip:{plain}", weights="random")
        if "/" not in config.name and config.weights is None:
            random = config  # the error of a model without weights
        logging.disable(logging.WARNING)  # open_clip warns that the weights are random, as they shall be
        try:
            return _open_clip(random, False, seed)
        finally:
            logging.disable(logging.NOTSET)
    subject = load_subject(
        config.name, weights=config.weights, img_size=config.img_size, seed=seed, device="cpu"
    )
    net, mean, std = subject.features.model, subject.mean, subject.std
    return _backbone(config.name, net, mean, std, subject.size, True)


def _backbone(name: str, net: nn.Module, mean: Tensor, std: Tensor, side: int, exact: bool) -> Backbone:
    from vispe.evaluate.rotation.model import patch_projection

    _blocks(net)
    conv = patch_projection(net)
    if conv is None or conv.stride[0] != conv.stride[1]:
        raise UnsupportedHost(f"{name} has no projection of square patches, which a retrofit needs.")
    if conv.in_channels != 3:
        raise ShapeError(f"{name} takes images of {conv.in_channels} channels; a retrofit needs 3.")
    return Backbone(net, mean, std, conv.stride[0], side, exact, conv.out_channels, _has_class_token(net))


def _has_class_token(model: nn.Module) -> bool:
    return any(getattr(model, name, None) is not None for name in ("cls_token", "class_embedding"))


def _blocks(model: nn.Module) -> nn.ModuleList:
    """Return the blocks of a vision transformer."""
    blocks = getattr(model, "blocks", None)
    if blocks is None:
        blocks = getattr(getattr(model, "transformer", None), "resblocks", None)
    if blocks is None or not hasattr(model, "forward_intermediates"):
        raise UnsupportedHost(
            f"{type(model).__name__} has no blocks and forward_intermediates, from which features are learnt; use a "
            "vision transformer of timm or open_clip."
        )
    return blocks
