"""Pictures of Hugging Face `datasets`, by name or as an object."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from vispe.backbones.hub import check_download
from vispe.errors import InputError, MissingExtra, did_you_mean
from vispe.train.data.dataset import Source, digest, filled, index
from vispe.train.data.image_reading import Reading, first_line, picture


class HubSource(Source):
    """The pictures of one column of a data set of Hugging Face `datasets`.

    Columns of images are read as stored, in full depth; pictures of Pillow and arrays are taken as they are.

    Args:
        dataset: a data set with random access, a mapping of splits to such, or a name or folder to load it from, which
            needs `datasets`.
        split: which split; None takes the only one.
        column: which column; None takes the only one that holds images.
        normalize: 'auto', 'stack', 'image' or 'none', as in `Reading`.
        channel: which channels to keep, by number or name, where a file has other than 1 or 3.
        licence: what a card says of it; None asks the data set.

    Raises:
        MissingExtra: `datasets` is not installed, and a name was given.
        InputError: no such data set, split or column, several to choose from, no picture, or streamed data.
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
            raise InputError(f"hub={self.where} cannot be read in any order; load it with streaming=False.")
        features = getattr(rows, "features", None) or {}
        self.column = _column(features, rows.column_names, column, self.where)
        fingerprint = getattr(rows, "_fingerprint", None)
        self._content = fingerprint if fingerprint is not None else [self.where, len(rows)]
        stated = getattr(getattr(rows, "info", None), "license", None)
        self.licence = licence if licence is not None else str(stated or "")
        # images as they are stored, so that they are read in full depth
        feature = features.get(self.column)
        if type(feature).__name__ == "Image":
            rows = rows.cast_column(self.column, type(feature)(decode=False))
        self.dataset = rows
        filled(len(rows), f"hub={self.where}")

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> Tensor:
        i = index(i, len(self))
        pages = self._pages(self.dataset[i][self.column], self.name(i))
        if len(pages) != 1:
            raise InputError(f"{self.name(i)} holds {len(pages)} pages; store them one by one.")
        return picture(pages[0])

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
            f"{label} is {type(value).__name__} in column {self.column!r}, not an image; choose the column by column=."
        )

    def name(self, i: int) -> str:
        """Return data set, split and row of picture i."""
        return f"row {i} of hub={self.where}" + (f" ({self.split})" if self.split else "")

    def describe(self) -> dict[str, Any]:
        """Return kind, count, where, licence, split, column, and how pictures are read."""
        known = {"kind": "hub", "count": len(self), "where": self.where, "licence": self.licence}
        return {**known, "split": self.split, "column": self.column, **self.reading.describe()}

    def fingerprint(self) -> str:
        """Return a sha256 over the data set's own fingerprint, or its name and length, the column and the reading."""
        return digest("hub", self._content, self.column, *self.reading.describe().values())


def _load(name: str, split: str | None) -> Any:
    if importlib.util.find_spec("datasets") is None:
        raise MissingExtra(
            f"hub={name!r} needs the package 'datasets', which is not installed; run: pip install datasets"
        )
    import datasets

    if not Path(name).exists():
        check_download(f"the data set hub={name!r} is")
    saved = any((Path(name) / file).is_file() for file in ("state.json", "dataset_dict.json"))
    try:
        return datasets.load_from_disk(name) if saved else datasets.load_dataset(name, split=split)
    except (OSError, ValueError, RuntimeError, ImportError, LookupError) as error:
        raise InputError(f"hub={name!r} cannot be loaded: {first_line(error)}") from error


def _split(dataset: Any, split: str | None, where: str, named: bool) -> tuple[Any, str]:
    """Return the rows of a split, and its name."""
    if not isinstance(dataset, Mapping):
        own = str(getattr(dataset, "split", None) or "")
        # it was loaded so; a split such as train[:10%] calls itself train
        if named and split is not None:
            return dataset, split
        if split is not None and split != own:
            raise InputError(
                f"split={split!r} was asked of hub={where}, which is one split ({own or 'unnamed'})."
            )
        return dataset, own
    names = list(dataset)
    if split is None and len(names) == 1:
        split = names[0]
    if split not in names:
        asked = "no split was given for" if split is None else f"split={split!r} is not in"
        hint = did_you_mean(split or "", names)
        raise InputError(f"{asked} hub={where}, which has {', '.join(names)}.{hint}")
    return dataset[split], split


def _column(features: Mapping[str, Any], names: Sequence[str], column: str | None, where: str) -> str:
    images = [name for name in names if type(features.get(name)).__name__ == "Image"]
    if column is None and len(images) == 1:
        return images[0]
    if column is None:
        raise InputError(
            f"hub={where} has {len(images)} columns of images; choose one by column=, of {', '.join(names)}."
        )
    if column not in names:
        hint = did_you_mean(column, names)
        raise InputError(f"column={column!r} is not in hub={where}, which has {', '.join(names)}.{hint}")
    return column
