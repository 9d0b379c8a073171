"""Finding the weights of an open_clip model: on this disk first, over the network only when it answers."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vispe.backbones.create import unreachable
from vispe.backbones.downloads import check_allowed
from vispe.errors import InputError, OptionError, UnknownName, did_you_mean
from vispe.segment.text.readouts import Readout

MODEL, TAG = "ViT-B-16", "laion2b_s34b_b88k"
"""The model and the weights that are taken where none are named."""

_FOLDER, _HUB = "local-dir:", "hf-hub:"
_FILES = (
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.bin",
    "model.safetensors",
    "pytorch_model.bin",
)


@dataclass(frozen=True)
class Found:
    """Weights that have been found.

    Attributes:
        name: what open_clip builds the model from; a folder where the model comes from a hub.
        weights: tag, file, `'random'`, or None for those of a folder: what finds them again.
        path: the checkpoint; None for random weights.
        config: what open_clip knows about the tag: mean, std, quick_gelu.
    """

    name: str
    weights: str | None
    path: Path | None
    config: dict[str, Any]


def find_weights(model: str, weights: str | None) -> Found:
    """Find a model and its weights, on disk if they are there.

    Args:
        model: a name of open_clip, ``'local-dir:FOLDER'`` or ``'hf-hub:OWNER/NAME'``.
        weights: a pretrained tag of open_clip, a checkpoint file, `'random'`, or None: the tag of this model that is
            on this disk.

    Raises:
        UnknownName: open_clip has no such model, or the model no such tag.
        InputError: weights that are neither on this disk nor within reach.
        OptionError: several tags to choose from.
    """
    import open_clip

    if model.startswith(_HUB):
        model = _FOLDER + str(_from_hub(model.removeprefix(_HUB), weights))
    if model.startswith(_FOLDER):
        return _in_folder(model, weights)
    if model not in open_clip.list_models():
        known = open_clip.list_models()
        hint = did_you_mean(model, known) or f" open_clip has {len(known)}, such as {MODEL}."
        raise UnknownName(f"open_clip has no model {model!r}.{hint} On this disk: {_listed(on_disk())}.")
    tags = open_clip.list_pretrained_tags_by_model(model)
    if weights is None:
        weights = _choose(model, tags)
    if weights == "random":
        return Found(model, weights, None, {})
    if Path(weights).is_file():
        return Found(model, weights, Path(weights), {})
    if not open_clip.pretrained.is_pretrained_cfg(model, weights):
        hint = did_you_mean(weights, tags)
        raise UnknownName(
            f"weights={weights!r} is neither a file nor a tag of {model}.{hint} Its tags are {_listed(tags)}."
        )
    config = open_clip.pretrained.get_pretrained_cfg(model, weights)
    path = _cached(config)
    if path is None:
        _check_reach(f"the checkpoint {model}:{weights}")
        path = _download(config, f"{model}:{weights}")
    return Found(model, weights, path, config)


def on_disk() -> list[str]:
    """Return ``model:tag`` of all pretrained weights of open_clip that are on this disk."""
    import open_clip

    config = open_clip.pretrained.get_pretrained_cfg
    return [f"{m}:{t}" for m, t in open_clip.list_pretrained() if _cached(config(m, t)) is not None]


def build(found: Found, pos_embed: str | None, readout: Readout, seed: int) -> nn.Module:
    """Build a model on the CPU, convert its image tower for a readout and load its weights.

    Args:
        found: the weights.
        pos_embed: encoding that replaces that of the image tower.
        readout: what will be read out.
        seed: of random weights, and of what the checkpoint does not hold.

    Raises:
        InputError: a checkpoint that does not fit.
        UnsupportedHost, UnsupportedCombination: a tower that cannot be read out.
    """
    import open_clip

    from vispe.segment.text.towers import prepare

    colours = {key: found.config[key] for key in ("mean", "std") if key in found.config}
    with torch.random.fork_rng(devices=[]), _quiet():
        torch.manual_seed(seed)
        try:
            model = open_clip.create_model(
                found.name,
                load_weights=False,
                pretrained_text=False,
                force_quick_gelu=bool(found.config.get("quick_gelu", False)),
                force_preprocess_cfg=colours or None,
            )
        except (AssertionError, OSError, RuntimeError, ValueError, TypeError, KeyError) as error:
            raise InputError(f"open_clip cannot build {found.name} ({_short(error)}).") from error
        prepare(model, pos_embed, readout)
        if found.path is not None:
            _load(model, found.path)
    return model.eval().requires_grad_(False)


def tokenizer(name: str) -> Any:
    """Return the tokenizer of a model; `name` as in `Found`.

    Raises:
        InputError: a tokenizer that comes from the hub and is not on this disk, without network.
    """
    import open_clip

    config = (open_clip.get_model_config(name) or {}).get("text_cfg", {})
    source = config.get("hf_tokenizer_name")
    if (
        source
        and not name.startswith(_FOLDER)
        and not _has_file(source, ("tokenizer_config.json", "tokenizer.json"))
    ):
        _check_reach(f"the tokenizer {source} of {name}")
    with _quiet():
        try:
            return open_clip.get_tokenizer(name)
        except (OSError, RuntimeError, ValueError, ImportError) as error:
            raise InputError(f"the tokenizer of {name} cannot be loaded ({_short(error)}).") from error


def _choose(model: str, tags: list[str]) -> str:
    """Return the tag of a model that is on this disk, or the default one."""
    here = [name.rpartition(":")[2] for name in on_disk() if name.rpartition(":")[0] == model]
    if model == MODEL and (TAG in here or not here):
        return TAG
    if len(here) == 1:
        return here[0]
    where = "several are on this disk" if here else "none of them is on this disk"
    raise OptionError(
        f"{model} has the weights {_listed(here or tags)}, and {where}; choose with --weights TAG, or give a file."
    )


def _in_folder(name: str, weights: str | None) -> Found:
    folder = Path(name.removeprefix(_FOLDER))
    card = folder / "open_clip_config.json"
    try:
        config = json.loads(card.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{folder} is not a model folder of open_clip: {card.name} cannot be read ({_short(error)})."
        ) from error
    if not isinstance(config, dict) or "model_cfg" not in config:
        raise InputError(
            f"{card} has no model_cfg; save the model with open_clip's push_to_hf_hub functions."
        )
    if weights == "random":
        return Found(name, weights, None, {})
    if weights is not None:
        if not Path(weights).is_file():
            raise InputError(f"weights={weights} is not a file; give a checkpoint, or leave it out.")
        return Found(name, weights, Path(weights), {})
    known = [folder / file for file in _FILES if (folder / file).is_file()]
    others = sorted(p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin", ".pt", ".pth"))
    if not known and len(others) != 1:
        found = _listed([p.name for p in others])
        raise InputError(
            f"{folder} holds no {_FILES[0]} (checkpoints: {found}); give one with --weights FILE."
        )
    return Found(name, None, (known or others)[0], {})


def _from_hub(repo: str, weights: str | None) -> Path:
    """Return the local folder of a model of the Hugging Face hub."""
    from huggingface_hub import try_to_load_from_cache

    card = try_to_load_from_cache(repo, "open_clip_config.json")
    if isinstance(card, str) and (weights is not None or _has_file(repo, _FILES)):
        return Path(card).parent
    _check_reach(f"the model {_HUB}{repo}")
    card = _download({"hf_hub": f"{repo}/open_clip_config.json"}, repo)
    if weights is None:
        _download({"hf_hub": f"{repo}/"}, repo)
    return card.parent


def _cached(config: dict[str, Any]) -> Path | None:
    """Return the file of a pretrained tag on this disk."""
    from huggingface_hub import try_to_load_from_cache

    repo, _, file = config.get("hf_hub", "").rpartition("/")
    names = (f"{Path(file).stem}.safetensors", file) if file else _FILES[:2]
    for name in names if repo else ():
        found = try_to_load_from_cache(repo, name)
        if isinstance(found, str):
            return Path(found)
    if config.get("url"):
        found = Path(os.path.expanduser("~/.cache/clip"), Path(config["url"]).name)  # noqa: PTH111 - never raises
        return found if found.is_file() else None
    return None


def _has_file(repo: str, names: tuple[str, ...]) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return any(isinstance(try_to_load_from_cache(repo, name), str) for name in names)


def _check_reach(what: str) -> None:
    """Say at once when something can only come from a network that is not there."""
    from huggingface_hub import constants

    check_allowed(f"{what} is")
    reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else unreachable(constants.ENDPOINT)
    if reason is not None:
        raise InputError(
            f"{what} is not on this disk and {reason}; the weights on this disk are: {_listed(on_disk())}. Choose one "
            "of them with --model and --weights, or give a checkpoint file with --weights FILE."
        )


def _download(config: dict[str, Any], what: str) -> Path:
    import open_clip

    with _quiet():
        try:
            return Path(open_clip.pretrained.download_pretrained(config))
        except (OSError, RuntimeError, ValueError) as error:
            raise InputError(f"{what} cannot be downloaded ({_short(error)}).") from error


def _load(model: nn.Module, path: Path) -> None:
    """Load a checkpoint; every weight must have its place, and nothing in the file is executed."""
    import open_clip

    try:
        open_clip.load_checkpoint(model, str(path), strict=True, weights_only=True)
    except (
        Exception
    ) as error:  # a damaged or foreign file can fail anywhere in torch, zipfile, pickle or safetensors
        raise InputError(
            f"{path} does not fit the model ({_short(error)}); check --model and --weights."
        ) from error


def _listed(names: list[str]) -> str:
    if not names:
        return "none"
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what open_clip says on the root logger, which would set up logging for the whole process, to itself."""
    root, silent = logging.getLogger(), logging.NullHandler()
    root.addHandler(silent)
    try:
        yield
    finally:
        root.removeHandler(silent)
