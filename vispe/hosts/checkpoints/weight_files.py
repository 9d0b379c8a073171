"""Files of weights: what is in them, read without running their code, and written in the format of their name."""

from __future__ import annotations

import pickle
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from vispe.errors import InputError

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".tar")
_CONTAINERS = ("state_dict", "model")  # what holds the weights in files of training programs


def read_weights(path: str | Path, key: str | None = None) -> tuple[dict[str, Tensor], list[str]]:
    """Return the state dict in a file, and the names of what else it holds.

    Args:
        path: a file of safetensors or torch; from the latter, only tensors and plain values are read.
        key: where the state dict is in a file of a training program; 'state_dict' or 'model' by default.

    Raises:
        InputError: the file is damaged, holds objects that would run code, or has no state dict.
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise InputError(
            f"{path} is no file of weights that is known: the name must end in {', '.join(SUFFIXES)}."
        )
    return _state_dict(path, read_file(path), key)


def read_file(path: str | Path) -> Any:
    """Return what a file of safetensors or torch holds; from the latter, only tensors and plain values are read.

    Raises:
        InputError: the file is damaged, or holds objects that would run code.
    """
    path = Path(path)
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with torch.serialization.safe_globals([Namespace]):  # plain values, which timm's train.py saves
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{path} holds more than tensors and plain values, which could run code, or is no file of torch "
            f"({str(error).splitlines()[0]}); save its state dict alone and convert that."
        ) from error
    except (SafetensorError, RuntimeError, EOFError, ValueError, OSError) as error:
        if isinstance(error, OSError) and error.filename is not None:  # no permission, say
            raise
        raise InputError(
            f"{path} cannot be read: {str(error).splitlines()[0]}; it may be incomplete."
        ) from error


def write_weights(path: str | Path, weights: Mapping[str, Tensor], note: str = "") -> None:
    """Write a state dict in the format that the name asks for; nothing is checked.

    Args:
        path: ends in '.safetensors', or in a suffix of torch.
        weights: state dict.
        note: kept as metadata `vispe` in safetensors.
    """
    whole = {name: tensor.detach().clone().contiguous() for name, tensor in weights.items()}
    if Path(path).suffix == ".safetensors":
        save_file(whole, path, metadata={"format": "pt", "vispe": note})
    else:
        torch.save(whole, path)


def _state_dict(path: Path, content: Any, key: str | None) -> tuple[dict[str, Tensor], list[str]]:
    """Return the state dict in what a file held, and the names of the rest."""
    rest: list[str] = []
    if isinstance(content, Mapping):
        holders = [name for name, value in content.items() if isinstance(value, Mapping)]
        if key is not None and key not in holders:
            raise InputError(f"{path} has no state dict {key!r}; it holds {', '.join(map(str, content))}.")
        key = key or next((name for name in _CONTAINERS if name in holders), None)
        if key is not None:
            rest = [str(name) for name in content if name != key]
            content = content[key]
    if (
        not isinstance(content, Mapping)
        or not content
        or not all(isinstance(v, Tensor) for v in content.values())
    ):
        held = (
            ", ".join(map(str, list(content)[:6])) if isinstance(content, Mapping) else type(content).__name__
        )
        raise InputError(
            f"{path} is not a state dict, but holds {held or 'nothing'}; say where it is by `key`."
        )
    return {str(name): tensor for name, tensor in content.items()}, rest
