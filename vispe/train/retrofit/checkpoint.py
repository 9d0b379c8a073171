"""The folder of a training: its state, which is complete or not there at all, and what it leaves at the end."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from vispe.errors import InputError
from vispe.files import atomic_path, check_no_link, remove

State = tuple[int, dict[str, dict[str, Tensor]], dict[str, Any]]
"""Number of updates that were made, state dicts by file name, and everything else: tensors and plain values."""

_KEPT = 2  # states


@dataclass(frozen=True)
class Folder:
    """Where a training writes.

    Attributes:
        path: the folder; made when something is written.
        weights_name: of the file of the trained weights, plain ones whatever was trained.
        card_name: of the file that says what was done; written last, so a run with a card is finished.
        kind: what messages call the training.
    """

    path: Path
    weights_name: str = "student.safetensors"
    card_name: str = "card.json"
    kind: str = "retrofit"

    @property
    def weights(self) -> Path:
        """The file of the trained weights."""
        return self.path / self.weights_name

    @property
    def card(self) -> Path:
        """The file that says what was done."""
        return self.path / self.card_name

    @property
    def log(self) -> Path:
        """The file with a line of JSON for every interval."""
        return self.path / "log.jsonl"

    def check(self, identity: Mapping[str, Any], force: bool = False, *, partly: bool = False) -> None:
        """Check whether a run may be written or continued here; nothing is changed.

        Args:
            identity: what must be the same in a run that is continued.
            force: everything may be replaced.
            partly: more will be known later; compare what is given.

        Raises:
            InputError: a finished run, files of something else, or a run with another config, whose keys are named.
        """
        if force:
            return
        if self.card.exists():
            raise InputError(
                f"{self.path} holds a finished {self.kind}; add --force to replace it, or choose another out."
            )
        run = self.path / "run.json"
        if not run.exists():
            for path in self._own():
                raise InputError(f"{path} is in the way and not of a {self.kind}; choose another out.")
            return
        try:
            kept = json.loads(run.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InputError(f"{run} is damaged ({error}); add --force to start again.") from error
        plain = json.loads(json.dumps(dict(identity)))
        asked = plain if partly else {**plain, **kept}
        keys = [key for key in asked if plain.get(key) != kept.get(key)]
        if keys:
            changes = [f"{key} was {kept.get(key)!r} and is {plain.get(key)!r}" for key in keys[:4]]
            changes += [f"and {len(keys) - 4} more"] * (len(keys) > 4)
            raise InputError(
                f"{self.path} holds a stopped {self.kind} with another config: {'; '.join(changes)}. Choose another "
                "out, or add --force to start again."
            )

    def begin(self, identity: Mapping[str, Any], force: bool = False) -> None:
        """Make the folder ready after `check`; with `force`, what a training of this kind left in it is deleted.

        Raises:
            InputError: with `force`, a file or folder of these names that vispe has not written.
        """
        if force:
            paths = self._own()
            for path in paths:
                self._check_own(path)
            for path in paths:
                remove(path, self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        if not (self.path / "run.json").exists():
            _write(self.path / "run.json", identity)

    def save(self, step: int, weights: Mapping[str, Mapping[str, Tensor]], moment: Mapping[str, Any]) -> None:
        """Write a state; a kill at any time leaves this one, complete, or the last one.

        Args:
            step: number of updates that were made.
            weights: state dicts by file name.
            moment: tensors and plain values; everything else.
        """
        # written beside its place and moved there in one step, after the disk has everything
        states = self.path / "state"
        part, final = states / f".{step:09d}.part", states / f"{step:09d}"
        check_no_link(states)
        states.mkdir(parents=True, exist_ok=True)
        remove(part, states)
        part.mkdir()
        for name, state in weights.items():
            save_file(_whole(state), part / f"{name}.safetensors")
        torch.save(dict(moment), part / "moment.pt")
        for file in part.iterdir():
            _sync(file)
        # left by a run that was stopped before it could write its card
        remove(final, states)
        part.rename(final)
        _sync(states)
        for old in self.steps()[:-_KEPT]:
            remove(states / f"{old:09d}", states)

    def steps(self) -> list[int]:
        """Return the numbers of updates of which there is a state."""
        entries = (self.path / "state").glob("[0-9]*")
        return sorted(int(entry.name) for entry in entries if re.fullmatch(r"\d{9}", entry.name))

    def forget(self) -> None:
        """Delete the states, which a finished run does not need."""
        for name in ("state", "run.json"):
            remove(self.path / name, self.path)

    def _own(self) -> list[Path]:
        """Return what a training has written here; the card first: without it the rest is no finished run."""
        rest = [self.path / name for name in ("run.json", "log.jsonl", "state", "tensorboard")]
        return [path for path in (self.card, self.weights, *rest) if os.path.lexists(path)]

    def _check_own(self, path: Path) -> None:
        """Check that a path has the content that a training writes; raises InputError if not."""
        if path.is_symlink():
            good = False
        elif path.name == "state":
            good = path.is_dir() and all(re.fullmatch(r"\d{9}|\.\d{9}\.part", e.name) for e in path.iterdir())
        elif path.name == "tensorboard":
            good = path.is_dir() and all(e.name.startswith("events.out.tfevents") for e in path.iterdir())
        elif path in (self.card, self.path / "run.json"):
            good = isinstance(_read_json(path), dict)
        else:  # without a run or a card, weights and lines of a log may be anybody's
            good = path.is_file() and any((self.path / n).is_file() for n in ("run.json", self.card_name))
        if not good:
            raise InputError(f"{path} is in the way and not of a {self.kind}; choose another out.")

    def load(self) -> State | None:
        """Return the last state as it was given to `save`, None when there is none.

        Raises:
            InputError: the state is damaged.
        """
        steps = self.steps()
        if not steps:
            return None
        place = self.path / "state" / f"{steps[-1]:09d}"
        try:
            weights = {file.stem: load_file(file) for file in sorted(place.glob("*.safetensors"))}
            moment = torch.load(place / "moment.pt", map_location="cpu", weights_only=True)
        except (SafetensorError, RuntimeError, EOFError, OSError, ValueError) as error:
            raise InputError(
                f"{place} is damaged ({' '.join(str(error).split())[:160]}); delete it, and the state before it "
                "is used."
            ) from error
        return steps[-1], weights, moment

    def finish(self, weights: Mapping[str, Tensor], card: Mapping[str, Any]) -> None:
        """Write the trained weights and then the card."""
        with atomic_path(self.weights, force=True) as part:
            save_file(_whole(weights), part, metadata={"format": "pt", "vispe": "retrofit, see card.json"})
            # safetensors makes files for their owner alone
            part.chmod(self.log.stat().st_mode & 0o666)
        _write(self.card, card)


def _write(path: Path, values: Mapping[str, Any]) -> None:
    """Write JSON, whole or not at all."""
    with atomic_path(path, force=True) as part:
        part.write_text(json.dumps(dict(values), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _whole(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors on the CPU that share no memory, as safetensors needs them."""
    return {name: value.detach().to("cpu", copy=True).contiguous() for name, value in weights.items()}


def _read_json(path: Path) -> Any:
    """Return the content of a JSON file, None where it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _sync(path: Path) -> None:
    """Have the system write a file, or the names in a folder, to the disk."""
    if path.is_dir() and os.name == "nt":
        return  # folders cannot be opened there
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
