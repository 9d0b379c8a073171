"""Loading of models written by `vispe retrofit`."""

from __future__ import annotations

import copy
import json
import math
import re
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from vispe.errors import InputError, counted, is_integer, short

if TYPE_CHECKING:
    from vispe.backbones.vision_model import VisionModel

CARD, WEIGHTS = "card.json", "student.safetensors"
_LARGEST = 100_000  # upper bound of numeric options of a teacher
_WORD = re.compile(r"[\w.+-]{0,64}")


def is_retrofitted(folder: str | Path) -> bool:
    """Return whether a path is the folder of a finished retrofit, or its weights."""
    folder = _folder(folder)
    return (folder / CARD).is_file() and (folder / WEIGHTS).is_file()


def read_card(folder: str | Path) -> dict[str, Any]:
    """Return the card of a finished retrofit.

    Args:
        folder: output folder of the retrofit, or its `student.safetensors`.

    Raises:
        InputError: the folder contains no finished retrofit, or the card was not written by vispe.
    """
    folder = _folder(folder)
    if not is_retrofitted(folder):
        raise InputError(
            f"{folder} must contain a finished retrofit, {CARD} and {WEIGHTS}. Run vispe retrofit."
        )
    try:
        card = json.loads((folder / CARD).read_text(encoding="utf-8"))
        seed = card["config"]["seed"]
        texts = card["config"]["teacher"]["name"], card["config"]["student"]["pos_embed"]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{folder / CARD} is not a card of vispe retrofit ({error}).") from error
    if not is_integer(seed) or not all(isinstance(text, str) for text in texts):
        raise InputError(
            f"{folder / CARD} is not a card of vispe retrofit: seed, name or pos_embed has another type."
        )
    return card


def load_retrofitted(folder: str | Path, *, allow_download: bool = False) -> VisionModel:
    """Return the student of a finished retrofit; weights of its teacher are not needed.

    Args:
        folder: output folder of the retrofit, or its `student.safetensors`.
        allow_download: allow downloads of the teacher's configuration from the hub that the card names.

    Raises:
        InputError: the folder contains no finished retrofit, its card was not written by vispe, or its
            weights do not match.
        UnknownName, UnsupportedHost: the architecture of the teacher is unknown.
    """
    # commands that only recognise names of models do not import timm and the hub
    from vispe.backbones.hub import named_by_file
    from vispe.backbones.timm import load_backbone
    from vispe.backbones.vision_model import VisionModel

    config = read_card(folder)["config"]
    teacher = config["teacher"]
    name, size, seed = teacher["name"], teacher.get("img_size"), config["seed"]
    options = _checked_options(folder, teacher.get("options") or {})
    with named_by_file(allow_download):
        library, _, plain = name.partition(":")
        if library == "open_clip":
            from vispe.backbones.clip_weights import load_clip, tower_of

            clip = load_clip(plain, pos_embed=None, weights=None, img_size=size, seed=seed, load=False)
            net = tower_of(clip)
        else:
            # a card is a foreign file, so it may name a timm model only, never Python code
            build = {"img_size": size, "options": options, "seed": seed}
            net = load_backbone(name, weights="random", any_size=True, **build)
    colours = {key: torch.tensor(v)[:, None, None] for key in ("mean", "std") if (v := teacher.get(key))}
    return fitted(VisionModel(net.requires_grad_(False), **colours), folder)


def _checked_options(folder: str | Path, options: Any) -> dict[str, Any]:
    """Return a card's options for the constructor of a timm model: numbers, names and flags, but no files.

    Raises:
        InputError: an option belongs to `timm.create_model` itself, a value has another type, or the model
            would be larger than its weights.
    """
    from timm import create_model

    card = _folder(folder) / CARD
    if not isinstance(options, dict):
        raise InputError(f"{card}: the options of the teacher must be an object, got {str(options)[:60]!r}.")
    numbers: list[float] = []
    for key, value in options.items():
        values = value if isinstance(value, list) and len(value) <= 3 else [value]
        numbers += [v for v in values if isinstance(v, int | float)]
        plain = all(isinstance(v, int | float | None) or _WORD.fullmatch(str(v)) for v in values)
        # weights, files and caches are parameters of the factory, not of the model
        if not plain or key in signature(create_model).parameters or key.startswith("pretrained"):
            raise InputError(
                f"{card}: options of the teacher must be numbers, names and flags of the model, not files or URLs, got "
                f"{key}={str(value)[:60]!r}."
            )
    with safe_open(_folder(folder) / WEIGHTS, "pt") as weights:
        shapes = [weights.get_slice(name).get_shape() for name in weights.keys()]  # noqa: SIM118 - no mapping
    stored = sum(math.prod(shape) for shape in shapes)
    size = [options.get(key) or 1 for key in ("embed_dim", "embed_dim", "depth")]
    # a transformer block has at least three square matrices of its width
    large = all(map(is_integer, size)) and 3 * math.prod(size) > stored and max(size) > 1
    if large or not all(abs(number) <= _LARGEST for number in numbers):
        raise InputError(
            f"{card}: a teacher with {options} is larger than {WEIGHTS} ({counted(stored, 'value')})."
        )
    return options


def fitted(teacher: VisionModel, folder: str | Path) -> VisionModel:
    """Return the frozen student of a finished retrofit, from its teacher, whose weights are not used.

    Raises:
        InputError: the folder contains no finished retrofit, or its weights do not match.
    """
    from vispe.backbones.vision_model import VisionModel
    from vispe.hosts.convert import convert
    from vispe.images.symmetry.symmetrization import symmetrize

    config, file = read_card(folder)["config"], _folder(folder) / WEIGHTS
    model = copy.deepcopy(teacher.model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config["seed"])
        convert(model, config["student"]["pos_embed"])
        if config["student"].get("symmetric"):
            symmetrize(model)
    try:
        model.load_state_dict(load_file(file))
    except (RuntimeError, SafetensorError) as error:
        raise InputError(f"{file} does not fit its card: {short(error)}.") from error
    colours = {"mean": teacher.mean, "std": teacher.std}
    return VisionModel(model.eval().requires_grad_(False), exact=False, **colours)


def _folder(path: str | Path) -> Path:
    path = Path(path)
    return path.parent if path.suffix == ".safetensors" else path
