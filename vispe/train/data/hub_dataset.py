"""Image source of Hugging Face `datasets`, by name or as an object."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from vispe.backbones.hub import check_download
from vispe.errors import InputError, MissingExtra, counted, did_you_mean
from vispe.train.data.dataset import Source, check_not_empty, digest, index
from vispe.train.data.image_reading import Reading, as_tensor, first_line


class HubSource(Source):
    """Images of one column of a dataset of Hugging Face `datasets`.

    Image columns are decoded from the stored files at full bit depth; Pillow images and arrays are used directly.

    Args:
        dataset: a dataset with random access, a mapping of splits to datasets, or a name or folder to load, which needs
            `datasets`.
        split: name of the split; None selects the only one.
        column: name of the column; None selects the only image column.
        normalize: 'auto', 'stack', 'image' or 'none', as in `Reading`.
        channel: channels to read, by number or name, for images that do not have 1 or 3.
        licence: licence in the model card; None uses that of the dataset.

    Raises:
        MissingExtra: `dataset` is a name, and `datasets` is not installed.
        InputError: the dataset, split or column is unknown or ambiguous, there are no images, or the dataset
            is a streaming dataset.
    """

    def __init__(
        self,
        dataset: Any,
        split: str | None = None,
        column: str | None = None,
        *,
        normalize: str = "auto",
        channel: int | str | Sequence[int | str] | None = None,
        licence: str | None = None,
    ) -> None:
        self.where = dataset if isinstance(dataset, str) else type(dataset).__name__
        self.reading = Reading(normalize, channel)
        rows = _load(dataset, split) if isinstance(dataset, str) else dataset
        rows, self.split = _split(rows, split, self.where, named=isinstance(dataset, str))
        if not hasattr(rows, "__len__") or not hasattr(rows, "column_names"):
            raise InputError(
                f"hub={self.where} does not support random access. Load it with streaming=False."
            )
        features = getattr(rows, "features", None) or {}
        self.column = _column(features, rows.column_names, column, self.where)
        fingerprint = getattr(rows, "_fingerprint", None)
        self._content = fingerprint if fingerprint is not None else [self.where, len(rows)]
        declared = getattr(getattr(rows, "info", None), "license", None)
        self.licence = licence if licence is not None else str(declared or "")
        # undecoded files, since datasets would decode them to 8 bits
        feature = features.get(self.column)
        if type(feature).__name__ == "Image":
            rows = rows.cast_column(self.column, type(feature)(decode=False))
        self.dataset = rows
        check_not_empty(len(rows), f"hub={self.where}")

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> Tensor:
        i = index(i, len(self))
        pages = self._pages(self.dataset[i][self.column], self.name(i))
        if len(pages) != 1:
            raise InputError(f"{self.name(i)} must have one page, got {len(pages)}. Store pages separately.")
        return as_tensor(pages[0])

    def _pages(self, value: Any, label: str) -> np.ndarray:
        if isinstance(value, Mapping):
            value = value.get("bytes") or value.get("path")
        if isinstance(value, bytes | bytearray):
            return self.reading.content(bytes(value), label)
        if isinstance(value, str | Path):
            return self.reading.file(Path(value))
        if hasattr(value, "convert") and hasattr(value, "mode"):
            plain = {"LA": "L", "La": "L"}.get(value.mode, "RGB")
            value = value if value.mode in ("1", "L", "I", "I;16", "F", "RGB") else value.convert(plain)
            return self.reading.array(np.asarray(value), label)
        if isinstance(value, np.ndarray):
            return self.reading.array(value, label)
        raise InputError(
            f"{label}: column {self.column!r} must contain images, got {type(value).__name__}. Set `column`."
        )

    def name(self, i: int) -> str:
        """Return dataset, split and row of image i."""
        return f"row {i} of hub={self.where}" + (f" ({self.split})" if self.split else "")

    def describe(self) -> dict[str, Any]:
        """Return kind, count, location, licence, split, column and the reading options."""
        facts = {"kind": "hub", "count": len(self), "where": self.where, "licence": self.licence}
        return {**facts, "split": self.split, "column": self.column, **self.reading.describe()}

    def fingerprint(self) -> str:
        """Return a sha256 of the dataset's fingerprint (or name and length), the column and the reading options."""
        return digest("hub", self._content, self.column, *self.reading.describe().values())


def _load(name: str, split: str | None) -> Any:
    if importlib.util.find_spec("datasets") is None:
        raise MissingExtra(
            f"hub={name!r} needs the package 'datasets', which is not installed. Run: pip install datasets"
        )
    import datasets

    if not Path(name).exists():
        check_download(f"the dataset hub={name!r} is")
    saved = any((Path(name) / file).is_file() for file in ("state.json", "dataset_dict.json"))
    try:
        return datasets.load_from_disk(name) if saved else datasets.load_dataset(name, split=split)
    except (OSError, ValueError, RuntimeError, ImportError, LookupError) as error:
        raise InputError(f"hub={name!r} cannot be loaded: {first_line(error)}") from error


def _split(dataset: Any, split: str | None, where: str, named: bool) -> tuple[Any, str]:
    """Return a split and its name."""
    if not isinstance(dataset, Mapping):
        name = str(getattr(dataset, "split", None) or "")
        # the dataset was loaded with this split; the name of a slice such as train[:10%] is train
        if named and split is not None:
            return dataset, split
        if split is not None and split != name:
            raise InputError(
                f"hub={where} is a single split ({name or 'unnamed'}), got split={split!r}. Omit `split`."
            )
        return dataset, name
    names = list(dataset)
    if split is None and len(names) == 1:
        split = names[0]
    if split not in names:
        hint = did_you_mean(split or "", names)
        raise InputError(f"hub={where}: split must be one of {', '.join(names)}, got {split!r}.{hint}")
    return dataset[split], split


def _column(features: Mapping[str, Any], names: Sequence[str], column: str | None, where: str) -> str:
    images = [name for name in names if type(features.get(name)).__name__ == "Image"]
    if column is None and len(images) == 1:
        return images[0]
    if column is None:
        raise InputError(
            f"hub={where} has {counted(len(images), 'image column')}. Set `column` to one of {', '.join(names)}."
        )
    if column not in names:
        hint = did_you_mean(column, names)
        raise InputError(f"hub={where}: column must be one of {', '.join(names)}, got {column!r}.{hint}")
    return column
