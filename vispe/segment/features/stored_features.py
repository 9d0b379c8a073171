"""Model outputs of pages, computed once and stored: one safetensors file per page, one array per tile.

Only the outputs of the model are stored. Filters are computed again, which takes about as long as reading them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vispe.errors import InputError, is_integer, short
from vispe.segment.features.coarse_features import CoarseMaps
from vispe.segment.features.micro_features import DenseMaps
from vispe.segment.features.token_features import TokenMaps
from vispe.utils.files import atomic_path
from vispe.utils.version import __version__

FORMAT = "vispe.features"

_LARGEST_HEADER = 1 << 24  # bytes

LoadTile = Callable[[int], Tensor]


def page_file(folder: Path, stem: str, page: int) -> Path:
    """Return the file of a page: `<stem>_features_0000.safetensors`."""
    return folder / f"{stem}_features_{page:04d}.safetensors"


def page_digest(page: np.ndarray) -> str:
    """Return the SHA-256 of the shape and values of a page (h, w, c) float32."""
    digest = hashlib.sha256(repr(page.shape).encode())
    digest.update(np.ascontiguousarray(page).data)
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Return the versions that determine the outputs of a model."""
    return {"vispe": __version__, "torch": torch.__version__}


def save_page(path: Path, maps: TokenMaps | DenseMaps, facts: Mapping[str, Any], force: bool) -> int:
    """Run the model on a page and write its outputs, with facts (JSON-able) that `StoredFeatures` compares.

    Returns:
        The size of the file in bytes.

    Raises:
        InputError: the file exists and not `force`, or is not writable.
    """
    from safetensors.torch import save_file

    tiles = {}
    for number in range(len(maps.regions)):
        tile = torch.from_numpy(maps.maps[number]) if isinstance(maps, TokenMaps) else maps.coarse(number)
        tiles[f"tile.{number}"] = tile.contiguous()
    with atomic_path(path, force) as temporary:
        save_file(tiles, temporary, {"format": FORMAT, "facts": json.dumps(facts, sort_keys=True)})
        return temporary.stat().st_size


def read_facts(path: Path) -> dict[str, Any]:
    """Return the facts of a file of `save_page`.

    Raises:
        InputError: the file does not exist, is damaged, or is of another kind.
    """
    try:
        with path.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size)) if size <= _LARGEST_HEADER else {}
        metadata = header.get("__metadata__", {})
        facts = json.loads(metadata["facts"]) if metadata.get("format") == FORMAT else None
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise InputError(f"{path} is damaged ({short(error)}). Run vispe features again.") from error
    types = {"page_sha256": str, "versions": dict, "model": dict, "reading": dict}
    valid = isinstance(facts, dict) and is_integer(facts.get("pages"))
    if not valid or not all(isinstance(facts.get(name), kind) for name, kind in types.items()):
        raise InputError(f"{path} does not contain stored features. Run vispe features again.")
    return facts


class StoredFeatures:
    """Stored model outputs of the pages of a run, found by the values of the page.

    Pages without stored outputs, such as the rotated pages of `trust`, are computed.

    Attributes:
        used: number of pages found so far.
    """

    def __init__(self) -> None:
        self._files: dict[str, Path] = {}
        self._tile: int | None = None
        self.used = 0

    def add(self, folder: Path, image: Path, expected: Mapping[str, Any]) -> None:
        """Add all pages of an image.

        Args:
            folder: folder of the files.
            image: the image.
            expected: facts that the files must have; see `check`.

        Raises:
            InputError: a file is missing or damaged, or has other facts.
        """
        number = count = 0
        while number == 0 or number < count:
            path = page_file(folder, image.stem, number)
            try:
                facts = read_facts(path)
            except FileNotFoundError:
                raise InputError(
                    f"{folder} has no features of {image.name} ({path.name} does not exist). Run vispe features on "
                    "this image, or omit stored_features."
                ) from None
            _check(path, image, facts, expected)
            count, number = facts["pages"], number + 1
            self._files[str(facts["page_sha256"])] = path
        self._tile = expected["model"]["tile"]

    def find(self, page: np.ndarray, tile: int | None) -> LoadTile | None:
        """Return a function that reads the output of a tile; None if the page or its tiles are not stored.

        Args:
            page: (h, w, c) float32, finite.
            tile: current tile side; it differs from the stored one after memory ran out.
        """
        if tile != self._tile or (path := self._files.get(page_digest(page))) is None:
            return None
        self.used += 1
        return lambda number: _read(path, number)


def _read(path: Path, number: int) -> Tensor:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(f"tile.{number}")
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} is damaged ({error}). Run vispe features again.") from error


def _check(path: Path, image: Path, facts: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise InputError if the facts of a file differ from those expected: image, versions, model, reading."""
    if facts.get("image_sha256") != expected["image_sha256"]:
        raise InputError(
            f"{path} has features of another image than {image} (their SHA-256 differ). Run vispe features again, or "
            "omit stored_features."
        )
    for group in ("versions", "model", "reading"):
        for name, value in expected[group].items():
            stored = facts[group].get(name)
            if stored == value:
                continue
            raise InputError(
                f"{path} was computed with {name}={_shown(stored)}, but this run has {name}={_shown(value)}. "
                "Run vispe features with the same options, or omit stored_features."
            )


def _shown(value: object) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ",".join(map(str, value))
    return str(value)[:80]


class StoredMaps(CoarseMaps):
    """Stored maps of vispe_micro for the tiles of a page.

    Args:
        maps: the maps that would be computed, which define the tiles.
        load: reads the output of a tile.
    """

    def __init__(self, maps: DenseMaps, load: LoadTile) -> None:
        super().__init__(maps.regions, maps.offset, maps.frame, maps.notes)
        self.width, self._load = maps.width, load

    def coarse(self, number: int, again: bool = False) -> Tensor:
        """As `CoarseMaps.coarse`; `again` is ignored."""
        return self._load(number)
