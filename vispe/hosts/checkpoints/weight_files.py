"""Reading and writing of weight files (safetensors, torch), without executing code from them."""

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
_CONTAINERS = ("state_dict", "model")  # keys of the weights in checkpoints of training programs


def read_weights(path: str | Path, key: str | None = None) -> tuple[dict[str, Tensor], list[str]]:
    """Return the state dict in a file, and the names of its other entries.

    Example:
        >>> path = getfixture("tmp_path") / "vit.safetensors"
        >>> write_weights(path, {"pos_embed": torch.zeros(1, 4, 8)})
        >>> {name: tuple(tensor.shape) for name, tensor in read_weights(path)[0].items()}
        {'pos_embed': (1, 4, 8)}

    Args:
        path: a file of safetensors or torch; from the latter, only tensors and plain values are read.
        key: key of the state dict in a checkpoint of a training program; default: 'state_dict' or 'model'.

    Raises:
        InputError: the file is damaged, contains objects that would run code, or has no state dict.
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise InputError(
            f"{path}: the name of a weight file must end in {', '.join(SUFFIXES)}, got {path.suffix or 'no suffix'!r}."
        )
    return _state_dict(path, read_file(path), key)


def read_file(path: str | Path) -> Any:
    """Return the contents of a file of safetensors or torch; from the latter, only tensors and plain values are read.

    Raises:
        InputError: the file is damaged, or contains objects that would run code.
    """
    path = Path(path)
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with torch.serialization.safe_globals([Namespace]):  # timm saves its arguments as Namespace
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{path}: the file must contain only tensors and plain values, as other objects can run code, got "
            f"{str(error).splitlines()[0]!r} from torch. Save its state dict alone and use that."
        ) from error
    except (SafetensorError, RuntimeError, EOFError, ValueError, OSError) as error:
        if isinstance(error, OSError) and error.filename is not None:  # such as missing permission
            raise
        raise InputError(
            f"{path} cannot be read: {str(error).splitlines()[0]}. The file may be incomplete."
        ) from error


def write_weights(path: str | Path, weights: Mapping[str, Tensor], note: str = "") -> None:
    """Write a state dict in the format of the file name's suffix, without checks.

    Args:
        path: '.safetensors', or any suffix for the format of torch.
        weights: state dict.
        note: stored as the metadata entry `vispe` in safetensors.
    """
    # clones, as safetensors rejects tensors that share memory
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in weights.items()}
    if Path(path).suffix == ".safetensors":
        save_file(tensors, path, metadata={"format": "pt", "vispe": note})
    else:
        torch.save(tensors, path)


def _state_dict(path: Path, content: Any, key: str | None) -> tuple[dict[str, Tensor], list[str]]:
    """Return the state dict in the contents of a file, and the names of the other entries."""
    other: list[str] = []
    if isinstance(content, Mapping):
        mappings = [name for name, value in content.items() if isinstance(value, Mapping)]
        if key is not None and key not in mappings:
            raise InputError(
                f"{path} has no state dict {key!r}, got the entries {', '.join(map(str, content))}."
            )
        key = key or next((name for name in _CONTAINERS if name in mappings), None)
        if key is not None:
            other = [str(name) for name in content if name != key]
            content = content[key]
    if (
        not isinstance(content, Mapping)
        or not content
        or not all(isinstance(v, Tensor) for v in content.values())
    ):
        got = (
            ", ".join(map(str, list(content)[:6])) if isinstance(content, Mapping) else type(content).__name__
        )
        raise InputError(f"{path}: expected a state dict, got {got or 'no entries'}. Pass its key as `key`.")
    return {str(name): tensor for name, tensor in content.items()}, other
