"""Checkpoint of an audit: accumulators, finished steps, and digests of the images, to resume an interrupted audit."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from vispe.errors import InputError, short
from vispe.evaluate.measure.audited_model import AuditedModel
from vispe.evaluate.measure.base import Accumulator, Measure
from vispe.utils.digest import tensor_digest
from vispe.utils.files import atomic_path

SAVE_EVERY = 20.0  # seconds between two checkpoints

Ledger = dict[str, dict[str, Accumulator]]
"""Accumulators by run ('own' and the controls) and measure."""


class AuditCheckpoint:
    """State of an audit in one process, saved every `SAVE_EVERY` seconds.

    Args:
        path: file; None saves nothing.
        facts: description of the audit; an audit with other facts does not resume.
        ledger: empty accumulators.

    Attributes:
        ledger: accumulators, filled as the audit proceeds.
        done: names of the finished steps.
    """

    def __init__(self, path: Path | None, facts: str, ledger: Ledger) -> None:
        self.path, self.facts, self.ledger = path, facts, ledger
        self.done: list[str] = []
        # digest of each evaluated image, by its index
        self._digests: dict[int, str] = {}
        self._saved = time.monotonic()

    def finish(self, step: str) -> None:
        """Record that a step is finished."""
        self.done.append(step)
        if self.path is not None and time.monotonic() - self._saved > SAVE_EVERY:
            self._save(self.path)

    def compare(self, number: int, image: Tensor) -> None:
        """Raise `InputError` if an image differs from the one that was evaluated under this index."""
        if self.path is not None:
            digest = tensor_digest([image])
            if self._digests.setdefault(number, digest) != digest:
                raise self._other_audit(self.path)

    def restore(self, read_image: Callable[[int], Tensor]) -> None:
        """Continue from the file, if it exists; evaluated images are read again to compare them.

        Args:
            read_image: function that returns the image of an index, and calls `compare`.

        Raises:
            InputError: the file is damaged or belongs to another audit.
        """
        if self.path is None or not self.path.exists():
            return
        try:
            saved = torch.load(self.path, weights_only=True)
        except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
            raise InputError(
                f"audit: {self.path} is damaged ({short(error, 160)}). Delete it to start again."
            ) from error
        if saved["facts"] != self.facts:
            raise self._other_audit(self.path)
        self.done, self._digests = saved["done"], saved["digests"]
        for number in self._digests:
            read_image(number)
        self.ledger = {
            view: {name: Accumulator(records, sums) for name, (records, sums) in accumulators.items()}
            for view, accumulators in saved["kept"].items()
        }

    def _save(self, path: Path) -> None:
        accumulators = {v: {n: (k.records, k.sums) for n, k in of.items()} for v, of in self.ledger.items()}
        entries = {"facts": self.facts, "done": self.done, "digests": self._digests, "kept": accumulators}
        with atomic_path(path, force=True) as temporary:
            torch.save(entries, temporary)
        self._saved = time.monotonic()

    def _other_audit(self, path: Path) -> InputError:
        return InputError(
            f"audit: {path} is the checkpoint of another audit (other model, images, measures or controls). "
            "Use another folder, or delete the file to start again."
        )


def audit_facts(
    audited: AuditedModel, measures: Sequence[Measure], controls: Sequence[str], count: int, seed: int
) -> str:
    """Return a fingerprint of all but the images, which must be equal to resume an audit."""
    names = ", ".join(repr(m) for m in measures)
    # models with the same name may have different weights
    tensors = () if audited.model is None else (*audited.model.parameters(), *audited.model.buffers())
    return f"{audited.title} {tensor_digest(tensors)}; {names}; {list(controls)}; {count} images; seed {seed}"
