"""Output folder of a training run: atomic checkpoints, log, trained weights and model card."""

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
from vispe.utils.files import atomic_path, check_no_link, remove

State = tuple[int, dict[str, dict[str, Tensor]], dict[str, Any]]
"""Number of training steps done, state dicts by file name, and the remaining state: tensors and plain values."""

_CHECKPOINTS = 2  # checkpoints on disk


@dataclass(frozen=True)
class RunFolder:
    """Output folder of a training run.

    Attributes:
        path: the folder; created on the first write.
        weights_name: file name of the trained weights, with LoRA merged.
        card_name: file name of the model card; it is written last, so a run with a card is finished.
        kind: name of the training in messages.
    """

    path: Path
    weights_name: str = "student.safetensors"
    card_name: str = "card.json"
    kind: str = "retrofit"

    @property
    def weights(self) -> Path:
        """Path of the trained weights."""
        return self.path / self.weights_name

    @property
    def card(self) -> Path:
        """Path of the model card."""
        return self.path / self.card_name

    @property
    def log(self) -> Path:
        """Path of the log, with one line of JSON per interval."""
        return self.path / "log.jsonl"

    def check(self, identity: Mapping[str, Any], force: bool = False, *, partly: bool = False) -> None:
        """Check whether a run can start or resume in this folder; changes nothing.

        Args:
            identity: settings that must not change when a run resumes.
            force: overwriting is allowed.
            partly: `identity` is incomplete; compare only its keys.

        Raises:
            InputError: the folder contains a finished run, foreign files, or an interrupted run with other
                settings.
        """
        if force:
            return
        if self.card.exists():
            raise InputError(
                f"{self.path} contains a finished {self.kind}. Set `force` to overwrite it, or another `out`."
            )
        run = self.path / "run.json"
        if not run.exists():
            for path in self._files():
                raise InputError(f"{path} exists and is not a file of a {self.kind}. Set another `out`.")
            return
        try:
            stored = json.loads(run.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InputError(f"{run} is damaged ({error}). Set `force` to restart.") from error
        requested = json.loads(json.dumps(dict(identity)))
        expected = requested if partly else {**requested, **stored}
        keys = [key for key in expected if requested.get(key) != stored.get(key)]
        if keys:
            changes = [f"{key} was {stored.get(key)!r} and is {requested.get(key)!r}" for key in keys[:4]]
            changes += [f"and {len(keys) - 4} more"] * (len(keys) > 4)
            raise InputError(
                f"{self.path} contains an interrupted {self.kind} with other settings: {'; '.join(changes)}. Set "
                "another `out`, or `force` to restart."
            )

    def begin(self, identity: Mapping[str, Any], force: bool = False) -> None:
        """Prepare the folder after `check`; with `force`, files of earlier runs of this kind are deleted.

        Raises:
            InputError: with `force`, a file or folder of these names was not written by vispe.
        """
        if force:
            paths = self._files()
            for path in paths:
                self._check_file(path)
            for path in paths:
                remove(path, self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        if not (self.path / "run.json").exists():
            _write(self.path / "run.json", identity)

    def save(self, step: int, weights: Mapping[str, Mapping[str, Tensor]], moment: Mapping[str, Any]) -> None:
        """Write a checkpoint atomically: after a kill, the new checkpoint is complete, or the previous one remains.

        Args:
            step: number of training steps done.
            weights: state dicts by file name.
            moment: remaining state: tensors and plain values.
        """
        # written to a temporary folder, flushed to disk, then renamed
        states = self.path / "state"
        partial, final = states / f".{step:09d}.part", states / f"{step:09d}"
        check_no_link(states)
        states.mkdir(parents=True, exist_ok=True)
        remove(partial, states)
        partial.mkdir()
        for name, state in weights.items():
            save_file(_on_cpu(state), partial / f"{name}.safetensors")
        torch.save(dict(moment), partial / "moment.pt")
        for file in partial.iterdir():
            _sync(file)
        # exists if a run was interrupted before it could write its card
        remove(final, states)
        partial.rename(final)
        _sync(states)
        for step_to_remove in self.steps()[:-_CHECKPOINTS]:
            remove(states / f"{step_to_remove:09d}", states)

    def steps(self) -> list[int]:
        """Return the steps of the existing checkpoints, ascending."""
        entries = (self.path / "state").glob("[0-9]*")
        return sorted(int(entry.name) for entry in entries if re.fullmatch(r"\d{9}", entry.name))

    def forget(self) -> None:
        """Delete the checkpoints, which a finished run does not need."""
        for name in ("state", "run.json"):
            remove(self.path / name, self.path)

    def _files(self) -> list[Path]:
        """Return the existing files of a training, the card first: deleting it first marks the run as unfinished."""
        rest = [self.path / name for name in ("run.json", "log.jsonl", "state", "tensorboard")]
        return [path for path in (self.card, self.weights, *rest) if os.path.lexists(path)]

    def _check_file(self, path: Path) -> None:
        """Check that the contents of a path were written by a training.

        Raises:
            InputError: the contents were not written by a training.
        """
        if path.is_symlink():
            valid = False
        elif path.name == "state":
            valid = path.is_dir() and all(
                re.fullmatch(r"\d{9}|\.\d{9}\.part", e.name) for e in path.iterdir()
            )
        elif path.name == "tensorboard":
            valid = path.is_dir() and all(e.name.startswith("events.out.tfevents") for e in path.iterdir())
        elif path in (self.card, self.path / "run.json"):
            valid = isinstance(_read_json(path), dict)
        else:  # weights and log cannot be identified without run.json or a card
            valid = path.is_file() and any((self.path / n).is_file() for n in ("run.json", self.card_name))
        if not valid:
            raise InputError(f"{path} exists and is not a file of a {self.kind}. Set another `out`.")

    def load(self) -> State | None:
        """Return the last checkpoint as passed to `save`, or None.

        Raises:
            InputError: the checkpoint is damaged.
        """
        steps = self.steps()
        if not steps:
            return None
        folder = self.path / "state" / f"{steps[-1]:09d}"
        try:
            weights = {file.stem: load_file(file) for file in sorted(folder.glob("*.safetensors"))}
            moment = torch.load(folder / "moment.pt", map_location="cpu", weights_only=True)
        except (SafetensorError, RuntimeError, EOFError, OSError, ValueError) as error:
            raise InputError(
                f"{folder} is damaged ({' '.join(str(error).split())[:160]}). Delete it to resume from the "
                "previous checkpoint."
            ) from error
        return steps[-1], weights, moment

    def finish(self, weights: Mapping[str, Tensor], card: Mapping[str, Any]) -> None:
        """Write the trained weights and then the model card."""
        with atomic_path(self.weights, force=True) as part:
            save_file(_on_cpu(weights), part, metadata={"format": "pt", "vispe": "retrofit, see card.json"})
            # safetensors creates files that only their owner can read
            part.chmod(self.log.stat().st_mode & 0o666)
        _write(self.card, card)


def _write(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON file atomically."""
    with atomic_path(path, force=True) as part:
        part.write_text(json.dumps(dict(values), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _on_cpu(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of tensors on the CPU without shared memory, as required by safetensors."""
    return {name: value.detach().to("cpu", copy=True).contiguous() for name, value in weights.items()}


def _read_json(path: Path) -> Any:
    """Return the contents of a JSON file, None if it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk (fsync)."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open folders
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
