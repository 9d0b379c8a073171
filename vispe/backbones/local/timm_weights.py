"""Loading of weight files into timm models, in timm's layout or that of the authors, for all commands.

The contents of a file are unwrapped (`state_dict`, `teacher`, prefixes of wrappers), converted by timm's filter for the
architecture, which renames and resamples, and loaded strictly, except for the classifier, which has no effect
on features. No code in a file is executed.
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

from vispe.encodings.saved_spec import named, saved_terms
from vispe.errors import EncodingMismatch, InputError, short
from vispe.hosts.checkpoints.weight_files import read_file
from vispe.hosts.common.state_dict_loading import LoadsWeights
from vispe.hosts.timm.patch_constructors import LoadingRecipe, recorded_recipes

_logger = logging.getLogger(__name__)
# keys of the weights in checkpoints of training programs, in order of precedence
_CONTAINERS = (
    *("state_dict_ema", "model_ema", "ema", "teacher", "target_encoder", "state_dict", "model"),
    *("encoder", "backbone", "module"),
)
_HEADS = ("head", "fc.", "fc_norm")


def built_with(file: str | Path, name: str, make: Callable[[], nn.Module]) -> nn.Module:
    """Return a timm model with the weights of a file.

    Args:
        file: safetensors, or a file of torch or numpy, in timm's layout or that of the authors; tables of another size
            are resampled as in timm.
        name: name of the model, for messages.
        make: function that builds the model without weights, by `timm.create_model`.

    Raises:
        InputError: the file is damaged, or weights are missing or unexpected.
    """
    path = Path(file)
    if not path.is_file():
        raise InputError(f"weights must be a checkpoint file, or 'random' for a trial, got {file}.")
    with recorded_recipes() as recipes:
        model = make()
    try:
        if path.suffix in (".npz", ".npy"):  # JAX weights of the authors
            timm.models.load_checkpoint(model, str(path))
        else:
            _load(model, path, next((r for built, r in recipes if built is model), LoadingRecipe(None, True)))
    except EncodingMismatch as error:
        raise InputError(f"{path} does not fit the model {name}: {error}") from error
    except InputError as error:
        raise InputError(
            f"{path} does not fit the model{error}. Check the name of the model, {name}."
        ) from error
    # a damaged or foreign file can fail anywhere in torch, timm or numpy
    except Exception as error:
        raise InputError(
            f"{path} does not fit the model ({short(error)}). Check the name of the model, {name}."
        ) from error
    return model


def _load(model: nn.Module, path: Path, recipe: LoadingRecipe) -> None:
    """Load the weights of a file strictly; messages of errors are completed by `built_with`."""
    try:
        content = read_file(path)
    except InputError as error:
        raise InputError(f" ({str(error).rstrip('.')})") from error
    state = _unwrapped(content, set(model.state_dict()))
    metadata = getattr(state, "_metadata", None)
    terms = saved_terms((metadata or {}).get("", {}))
    if terms is not None and not isinstance(model, LoadsWeights):
        raise InputError(f": it was saved with the encoding {named(terms)}, which pos_embed must name")
    if recipe.adapt is not None:
        state_only = len(signature(recipe.adapt).parameters) == 1
        state = recipe.adapt(state) if state_only else recipe.adapt(state, model)
    state = OrderedDict(state)
    # the filter returns a new dict without metadata
    if metadata is not None:
        state._metadata = metadata
    classifiers = getattr(model, "pretrained_cfg", {}).get("classifier") or ()
    classifiers = (classifiers,) if isinstance(classifiers, str) else classifiers
    heads = (*_HEADS, *(f"{name}." for name in classifiers))
    missing, unexpected = model.load_state_dict(state, strict=False)
    unknown = [key for key in unexpected if recipe.strict and not key.startswith(heads)]
    for what, keys in (("lacks", missing), ("has the unexpected", unknown)):
        if keys:
            listed = ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
            raise InputError(f": it {what} weights {listed}")


def _unwrapped(content: Any, expected: set[str]) -> dict[str, Any]:
    """Return the state dict of a model in the contents of a file.

    Args:
        content: a state dict, or nested mappings with one.
        expected: names in the state dict of the model; the authors may use others.
    """
    while isinstance(content, Mapping) and not any(isinstance(v, Tensor) for v in content.values()):
        mappings = [key for key, value in content.items() if isinstance(value, Mapping)]
        default = mappings[0] if len(mappings) == 1 else None
        key = next((key for key in _CONTAINERS if key in mappings), default)
        if key is None:
            got = ", ".join(map(str, list(content)[:6])) or "nothing"
            raise InputError(f": it contains {got}, none of which is a known key of weights")
        content = content[key]
    if not isinstance(content, Mapping):
        raise InputError(f": it contains a {type(content).__name__} instead of a state dict")
    prefix = _prefix([str(name) for name in content], expected)
    if not prefix:
        return OrderedDict(content) if not hasattr(content, "_metadata") else content
    _logger.info("The weights are those with the prefix %r; other entries are ignored.", prefix)
    state = OrderedDict((n[len(prefix) :], v) for n, v in content.items() if n.startswith(prefix))
    metadata = getattr(content, "_metadata", {})
    state._metadata = {
        f"{name}."[len(prefix) :].removesuffix("."): value
        for name, value in metadata.items()
        if f"{name}.".startswith(prefix)
    }
    return state


def _prefix(names: list[str], expected: set[str]) -> str:
    """Return the common prefix of the model's names in a checkpoint; '' if most names have no prefix.

    If a file contains several models, the teacher or EMA model is used, otherwise the first.
    """
    counts: dict[str, int] = {}
    for name in names:
        parts = name.split(".")
        for i in range(len(parts)):
            if ".".join(parts[i:]) in expected:
                before = ".".join(parts[:i])
                counts[before] = counts.get(before, 0) + 1
    if not counts or counts.get("", 0) >= max(counts.values()):
        return ""
    best = max(counts, key=lambda before: (counts[before], "teacher" in before or "ema" in before))
    return f"{best}." if 2 * counts[best] >= len(expected) else ""
