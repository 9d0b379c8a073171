"""What `vispe retrofit` wrote, read again as a model."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from vispe.backbones.maps import VisionModel
from vispe.backbones.open_clip import PREFIX, load_model
from vispe.errors import InputError
from vispe.hosts.convert import convert
from vispe.symmetry.remedies import symmetrize

CARD, WEIGHTS = "card.json", "student.safetensors"


def is_retrofitted(folder: str | Path) -> bool:
    """Return whether a path is the folder of a finished retrofit, or its weights."""
    folder = _folder(folder)
    return (folder / CARD).is_file() and (folder / WEIGHTS).is_file()


def read_card(folder: str | Path) -> dict[str, Any]:
    """Return the card of a finished retrofit.

    Args:
        folder: what the retrofit wrote, or its `student.safetensors`.

    Raises:
        InputError: no finished retrofit is there, or the card is of something else.
    """
    folder = _folder(folder)
    if not is_retrofitted(folder):
        raise InputError(
            f"{folder} holds no finished retrofit: {CARD} and {WEIGHTS} are needed; run vispe retrofit."
        )
    try:
        card = json.loads((folder / CARD).read_text(encoding="utf-8"))
        card["config"]["seed"], card["config"]["teacher"]["name"], card["config"]["student"]["pos_embed"]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{folder / CARD} is no card of vispe retrofit ({error}).") from error
    return card


def load_retrofitted(folder: str | Path) -> VisionModel:
    """Return the student of a finished retrofit; weights of its teacher are not needed.

    Args:
        folder: what the retrofit wrote, or its `student.safetensors`.

    Raises:
        InputError: no finished retrofit is there, or its weights do not fit.
        UnknownName, UnsupportedHost: its teacher's architecture is not known here.
    """
    config = read_card(folder)["config"]
    teacher = config["teacher"]
    # the tag of an open_clip model says how images are prepared
    weights = teacher.get("weights") if teacher["name"].startswith(PREFIX) else "random"
    options = {"img_size": teacher.get("img_size"), "options": teacher.get("options") or {}}
    net = load_model(teacher["name"], weights=weights, any_size=True, seed=config["seed"], **options)
    colours = {key: torch.tensor(v)[:, None, None] for key in ("mean", "std") if (v := teacher.get(key))}
    return fitted(VisionModel(net.requires_grad_(False), **colours), folder)


def fitted(teacher: VisionModel, folder: str | Path) -> VisionModel:
    """Return the student of a finished retrofit, frozen, given its teacher; weights of the teacher do not count.

    Raises:
        InputError: no finished retrofit is there, or its weights do not fit.
    """
    config, file = read_card(folder)["config"], _folder(folder) / WEIGHTS
    model = copy.deepcopy(teacher.model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config["seed"])
        convert(model, config["student"]["pos_embed"])
        if config["student"].get("symmetric"):
            symmetrize(model)
    try:
        model.load_state_dict(load_file(file))
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"{file} does not fit its card: {reason}") from error
    colours = {"mean": teacher.mean, "std": teacher.std}
    return VisionModel(model.eval().requires_grad_(False), exact=False, **colours)


def _folder(path: str | Path) -> Path:
    path = Path(path)
    return path.parent if path.suffix == ".safetensors" else path
