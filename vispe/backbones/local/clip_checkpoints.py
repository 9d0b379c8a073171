"""Checkpoints of open_clip models: on disk, or downloaded if a hub is reachable."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import open_clip

from vispe.backbones.hub import cached, check_reach, downloaded, listed, with_safe
from vispe.errors import InputError, OptionError, UnknownName, did_you_mean, short

MODEL, TAG = "ViT-B-16", "laion2b_s34b_b88k"
"""The default model and weights."""

FOLDER = "local-dir:"
HUB = "hf-hub:"
_CARD = "open_clip_config.json"
_FILES = (*with_safe("open_clip_pytorch_model.bin"), *with_safe("pytorch_model.bin"))


@dataclass(frozen=True)
class Checkpoint:
    """Location of the weights of an open_clip model.

    Attributes:
        name: model name for open_clip; a folder for models of a hub.
        weights: tag, file, `'random'`, or None for the weights of a folder.
        path: the file; None for random weights.
        config: open_clip's configuration of the tag: mean, std, quick_gelu.
    """

    name: str
    weights: str | None
    path: Path | None
    config: dict[str, Any] = field(default_factory=dict)


def split_name(name: str) -> tuple[str, str]:
    """Return the model and the pretrained tag, which may be empty, of a name without the prefix `open_clip:`.

    >>> split_name("ViT-B-32/openai"), split_name("hf-hub:owner/name")
    (('ViT-B-32', 'openai'), ('hf-hub:owner/name', ''))
    """
    if name.startswith((FOLDER, HUB)):
        return name, ""
    plain, _, tag = name.partition("/")
    return plain, tag


def find_weights(model: str, weights: str | None) -> Checkpoint:
    """Locate a model and its weights, on disk or else by download.

    Args:
        model: a model name of open_clip, ``'local-dir:FOLDER'`` or ``'hf-hub:OWNER/NAME'``.
        weights: a pretrained tag of open_clip, a checkpoint file, `'random'`, or None for the tag of this
            model on disk.

    Raises:
        UnknownName: open_clip has no such model, or the model no such tag.
        InputError: the weights are not on disk and cannot be downloaded.
        OptionError: `weights` is None, and the choice of tag is ambiguous.

    >>> find_weights("ViT-B-32", "random").path is None
    True
    """
    if model.startswith(HUB):
        model = FOLDER + str(_from_hub(model.removeprefix(HUB), weights))
    folder = Path(model.removeprefix(FOLDER)) if model.startswith(FOLDER) else None
    if folder is not None:
        _check_card(folder / _CARD)
    elif model not in (known := open_clip.list_models()):
        hint = did_you_mean(model, known) or f" open_clip has {len(known)}, such as {MODEL}."
        raise UnknownName(f"open_clip has no model {model!r}.{hint} Weights on disk: {listed(on_disk())}.")
    elif weights is None:
        weights = _choose(model)
    if weights == "random":
        return Checkpoint(model, weights, None)
    if weights is not None and Path(weights).is_file():
        return Checkpoint(model, weights, Path(weights))
    if folder is not None:
        return Checkpoint(model, None, _in_folder(folder, weights))
    tags = open_clip.list_pretrained_tags_by_model(model)
    if not open_clip.pretrained.is_pretrained_cfg(model, weights):
        hint = did_you_mean(weights, tags)
        raise UnknownName(
            f"weights must be a file or a tag of {model}, got {weights!r}.{hint} Its tags: {listed(tags)}."
        )
    config = open_clip.pretrained.get_pretrained_cfg(model, weights)
    path = _tag_on_disk(config)
    if path is None:
        check_reach(f"the checkpoint {model}:{weights} is", on_disk)
        path = _download(config, f"{model}:{weights}")
    return Checkpoint(model, weights, path, config)


def without_weights(model: str, tag: str) -> Checkpoint:
    """Return a `Checkpoint` without a file, for the preprocessing of a pretrained tag.

    Raises:
        UnknownName: the model has no such tag.
    """
    if tag and not open_clip.pretrained.is_pretrained_cfg(model, tag):
        tags = listed(open_clip.list_pretrained_tags_by_model(model))
        raise UnknownName(f"open_clip has no weights {tag!r} for {model}. Its tags: {tags}.")
    config = open_clip.pretrained.get_pretrained_cfg(model, tag) if tag else {}
    return Checkpoint(model, tag or None, None, config)


def on_disk() -> list[str]:
    """Return ``model:tag`` of all pretrained weights of open_clip on disk."""
    config = open_clip.pretrained.get_pretrained_cfg
    return [f"{m}:{t}" for m, t in open_clip.list_pretrained() if _tag_on_disk(config(m, t)) is not None]


def _tag_on_disk(config: dict[str, Any]) -> Path | None:
    """Return the file of a pretrained tag on disk; None if there is none."""
    repo, _, file = config.get("hf_hub", "").rpartition("/")
    path = cached(repo, *(with_safe(file) if file else _FILES[:2])) if repo else None
    folder = Path(os.path.expanduser("~/.cache/clip"))  # noqa: PTH111 - never raises
    return path or downloaded(config.get("url"), folder)


def _choose(model: str) -> str:
    """Return the only tag of a model on disk, or the default one."""
    local = [name.rpartition(":")[2] for name in on_disk() if name.rpartition(":")[0] == model]
    if model == MODEL and (TAG in local or not local):
        return TAG
    if len(local) == 1:
        return local[0]
    count = "several are on disk" if local else "none of them is on disk"
    names = local or open_clip.list_pretrained_tags_by_model(model)
    raise OptionError(
        f"The weights of {model} are ambiguous, got weights=None: it has {listed(names)}, and {count}. Pass a tag or a "
        "file with `weights`."
    )


def _check_card(card: Path) -> None:
    try:
        config = json.loads(card.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{card.parent} must be a model folder of open_clip, but {card.name} cannot be read ({short(error)})."
        ) from error
    if not isinstance(config, dict) or "model_cfg" not in config:
        raise InputError(
            f"{card} has no model_cfg. Save the model with open_clip's push_to_hf_hub functions."
        )


def _in_folder(folder: Path, weights: str | None) -> Path:
    """Return the only checkpoint in a folder."""
    if weights is not None:
        raise InputError(f"weights must be a checkpoint file, got {weights}.")
    known = [folder / file for file in _FILES if (folder / file).is_file()]
    others = sorted(p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin", ".pt", ".pth"))
    if not known and len(others) != 1:
        names = listed([p.name for p in others])
        raise InputError(
            f"{folder} contains no {_FILES[0]}, got the checkpoints {names}. Pass a file with `weights`."
        )
    return (known or others)[0]


def _from_hub(repo: str, weights: str | None) -> Path:
    """Return the local folder of a model of the Hugging Face hub."""
    card = cached(repo, _CARD)
    if card is None or (weights is None and not cached(repo, *_FILES)):
        check_reach(f"the model {HUB}{repo} is", on_disk)
        card = _download({"hf_hub": f"{repo}/{_CARD}"}, repo)
        if weights is None:
            _download({"hf_hub": f"{repo}/"}, repo)
    return card.parent


def _download(config: dict[str, Any], what: str) -> Path:
    try:
        return Path(open_clip.pretrained.download_pretrained(config))
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(f"{what} cannot be downloaded ({short(error)}).") from error
