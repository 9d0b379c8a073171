"""Folder of a debiased model: its model by name, the method and the linear map, without the weights of the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from vispe.backbones.local.debiased import Debiasing
from vispe.errors import InputError, short
from vispe.images.symmetry.view_averages import ViewAverage
from vispe.utils.files import atomic_path, write_json
from vispe.utils.version import __version__

RECORD, MAP = "debias.json", "projection.safetensors"
_KIND = "vispe debias"


def is_debiased(folder: str | Path) -> bool:
    """Return whether a path is a folder that `vispe debias` wrote."""
    return (Path(folder) / RECORD).is_file()


def save_debiased(
    folder: str | Path, debiasing: Debiasing, model: Mapping[str, Any], force: bool = False
) -> None:
    """Write a debiased model, without the weights of the model itself.

    Args:
        folder: output folder.
        debiasing: what is done to the features.
        model: JSON values of `name`, `pos_embed`, `weights`, `img_size` and `seed`, as passed to `load_model`.
        force: overwrite existing files.

    Raises:
        InputError: a file exists and `force` is false.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {"matrix": debiasing.matrix, "bias": debiasing.bias}
    stored = {key: value.double().contiguous() for key, value in tensors.items() if value is not None}
    if stored:
        with atomic_path(folder / MAP, force) as part:
            save_file(stored, part)
    elif force:  # the map of an earlier method
        (folder / MAP).unlink(missing_ok=True)
    record = {
        "kind": _KIND,
        "model": dict(model),
        "method": debiasing.method,
        "average": asdict(debiasing.average),
        "seed": debiasing.seed,
        "unit_norm": debiasing.unit_norm,
        "registers": [list(neuron) for neuron in debiasing.registers],
        "passes": debiasing.average.passes,
        "details": dict(debiasing.details),
        "versions": {"vispe": __version__, "torch": torch.__version__},
    }
    write_json(folder / RECORD, record, force)


def read_debiased(folder: str | Path) -> tuple[dict[str, Any], Debiasing]:
    """Return the arguments of `load_model` for the model, and what is done to its features.

    Raises:
        InputError: the folder was not written by `vispe debias`, or is damaged.
    """
    folder = Path(folder)
    if not is_debiased(folder):
        raise InputError(f"{folder} must contain {RECORD}, got none. Run vispe debias.")
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        if record["kind"] != _KIND:
            raise ValueError(f"kind={record['kind']!r}")
        model = {key: record["model"][key] for key in ("name", "pos_embed", "weights", "img_size", "seed")}
        tensors = load_file(folder / MAP) if (folder / MAP).is_file() else {}
        debiasing = Debiasing(
            str(record["method"]),
            ViewAverage(**record["average"]),
            int(record["seed"]),
            tensors.get("matrix"),
            tensors.get("bias"),
            bool(record["unit_norm"]),
            record["details"],
            tuple((int(block), int(unit)) for block, unit in record["registers"]),
        )
    except (KeyError, TypeError, ValueError, RecursionError, SafetensorError) as error:
        raise InputError(f"{folder / RECORD} is not a record of vispe debias ({short(error)}).") from error
    return model, debiasing
