"""Weights of timm models from files, in timm's layout or their authors': the one way in for every command.

What is in the file is unwrapped (`state_dict`, `teacher`, prefixes of wrappers), goes through the filter that timm has
for the architecture, which renames and resamples, and is loaded strictly, except for the classifier, which features do
not need. Nothing in a file is executed.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path
from typing import Any

import timm
from torch import Tensor, nn

from vispe.backbones.hub import short
from vispe.encodings.saved_spec import named, saved_terms
from vispe.errors import EncodingMismatch, InputError
from vispe.hosts.checkpoints.weight_files import read_file
from vispe.hosts.common.state_dict_loading import LoadsWeights
from vispe.hosts.timm.patch_constructors import Recipe, noted_recipes

_logger = logging.getLogger(__name__)
# what holds the weights in files of training programs, the one to be used first
_CONTAINERS = (
    *("state_dict_ema", "model_ema", "ema", "teacher", "target_encoder", "state_dict", "model"),
    *("encoder", "backbone", "module"),
)
_HEADS = ("head", "fc.", "fc_norm")


def built_with(file: str | Path, name: str, make: Callable[[], nn.Module]) -> nn.Module:
    """Return a timm model with the weights of a file.

    Args:
        file: safetensors, or a file of torch or numpy, of the model in timm's layout or its authors'; tables of
            another size are resampled as timm does it.
        name: of the model, for messages.
        make: builds the model without weights, by `timm.create_model`.

    Raises:
        InputError: the file is damaged, or lacks weights of the model, or has others.
    """
    path = Path(file)
    if not path.is_file():
        raise InputError(f"weights={file} is not a file; give a checkpoint, or 'random' for a trial run.")
    with noted_recipes() as recipes:
        model = make()
    try:
        if path.suffix in (".npz", ".npy"):  # of the authors, in JAX: read by the model itself
            timm.models.load_checkpoint(model, str(path))
        else:
            _load(model, path, next((r for built, r in recipes if built is model), Recipe(None, True)))
    except EncodingMismatch as error:
        raise InputError(f"{path} does not fit the model {name}: {error}") from error
    except InputError as error:
        raise InputError(
            f"{path} does not fit the model{error}; check the name of the model, {name}."
        ) from error
    # a damaged or foreign file can fail anywhere in torch, timm or numpy
    except Exception as error:
        raise InputError(
            f"{path} does not fit the model ({short(error)}); check the name of the model, {name}."
        ) from error
    return model


def _load(model: nn.Module, path: Path, recipe: Recipe) -> None:
    """Load the weights of a file strictly; errors are ends of sentences."""
    try:
        content = read_file(path)
    except InputError as error:
        raise InputError(f" ({str(error).rstrip('.')})") from error
    state = _unwrapped(content, set(model.state_dict()))
    metadata = getattr(state, "_metadata", None)
    own = saved_terms((metadata or {}).get("", {}))
    if own is not None and not isinstance(model, LoadsWeights):
        raise InputError(f": it was saved with the encoding {named(own)}, which pos_embed must name")
    if recipe.adapt is not None:
        one = len(signature(recipe.adapt).parameters) == 1
        state = recipe.adapt(state) if one else recipe.adapt(state, model)
    state = OrderedDict(state)
    # the filter makes a new dict
    if metadata is not None:
        state._metadata = metadata
    classifiers = getattr(model, "pretrained_cfg", {}).get("classifier") or ()
    classifiers = (classifiers,) if isinstance(classifiers, str) else classifiers
    heads = (*_HEADS, *(f"{name}." for name in classifiers))
    missing, unexpected = model.load_state_dict(state, strict=False)
    unknown = [key for key in unexpected if recipe.strict and not key.startswith(heads)]
    for what, keys in (("lacks", missing), ("has the unknown", unknown)):
        if keys:
            listed = ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
            raise InputError(f": it {what} weights {listed}")


def _unwrapped(content: Any, wanted: set[str]) -> dict[str, Any]:
    """Return the state dict of a model in what a file held.

    Args:
        content: of the file: a state dict, or what holds one.
        wanted: names in the state dict of the model, as far as its authors use them too.
    """
    while isinstance(content, Mapping) and not any(isinstance(v, Tensor) for v in content.values()):
        holders = [key for key, value in content.items() if isinstance(value, Mapping)]
        key = next((key for key in _CONTAINERS if key in holders), holders[0] if len(holders) == 1 else None)
        if key is None:
            held = ", ".join(map(str, list(content)[:6])) or "nothing"
            raise InputError(f": it holds {held}, and none of these is known to hold weights")
        content = content[key]
    if not isinstance(content, Mapping):
        raise InputError(f": it holds a {type(content).__name__}, no state dict")
    prefix = _prefix([str(name) for name in content], wanted)
    if not prefix:
        return OrderedDict(content) if not hasattr(content, "_metadata") else content
    _logger.info("The weights are those below %r; other entries are left out.", prefix)
    state = OrderedDict((n[len(prefix) :], v) for n, v in content.items() if n.startswith(prefix))
    metadata = getattr(content, "_metadata", {})
    state._metadata = {
        f"{name}."[len(prefix) :].removesuffix("."): value
        for name, value in metadata.items()
        if f"{name}.".startswith(prefix)
    }
    return state


def _prefix(names: list[str], wanted: set[str]) -> str:
    """Return what stands before the names of the model in a checkpoint; '' where most are found as they are.

    Of several models in one file that of the teacher is taken, or the first.
    """
    counts: dict[str, int] = {}
    for name in names:
        parts = name.split(".")
        for i in range(len(parts)):
            if ".".join(parts[i:]) in wanted:
                before = ".".join(parts[:i])
                counts[before] = counts.get(before, 0) + 1
    if not counts or counts.get("", 0) >= max(counts.values()):
        return ""
    best = max(counts, key=lambda before: (counts[before], "teacher" in before or "ema" in before))
    return f"{best}." if 2 * counts[best] >= len(wanted) else ""
