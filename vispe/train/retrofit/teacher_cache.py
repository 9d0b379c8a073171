"""Windows of the pictures and the teacher's features of them, made once and kept in files.

A frozen teacher gives the same features of a window each time, so a long training need not ask it again. Windows are
drawn and changed once, as the rows of `Batches`, and kept as 8-bit pictures; features are kept in bfloat16. The
training goes through them in passes, in another order each time.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.lib.format import open_memmap
from torch import Tensor, nn

from vispe.backbones.distributed import Processes
from vispe.backbones.model_access import final_tokens
from vispe.errors import InputError
from vispe.files import atomic_path
from vispe.train.data import Batches
from vispe.train.data.sampler import Order

_EVERY = 16  # batches between two notes of how many are ready
OnCrops = Callable[[int, int], None]
"""Called with the number of windows that are ready, and that of all."""


@dataclass(frozen=True)
class Crops:
    """Windows and features in a folder: `images.npy` (n, 3, H, W) uint8 and `features.npy` (n, d, h, w) bfloat16.

    Attributes:
        folder: of these files, and of what says how many are ready and what they were made from.
        count: n.
    """

    folder: Path
    count: int

    def make(
        self,
        teacher: nn.Module,
        batches: Batches,
        channels: int,
        patch: int,
        identity: Mapping[str, Any],
        processes: Processes,
        autocast: Callable[[], AbstractContextManager[Any]],
        on_crops: OnCrops | None = None,
    ) -> None:
        """Make what is missing; what was stopped goes on. Processes make whole batches in turn.

        Args:
            teacher: on the device of the processes.
            batches: of one process; its first rows are the windows.
            channels: d.
            patch: its side in pixels.
            identity: JSON values that decide what the files hold.
            processes: that train together.
            autocast: the precision of the teacher.
            on_crops: called after every batch, in the main process.

        Raises:
            InputError: the folder holds windows of something else.
        """
        note = self.folder / f"ready-{processes.rank}.json"
        asked = json.loads(json.dumps({**identity, "count": self.count, "processes": processes.count}))
        ready = self._ready(note, asked)
        sides = batches.size
        if processes.main and not ready:
            for path in (self._images, self._features):
                if os.path.lexists(path) and (path.is_symlink() or not note.exists()):
                    raise InputError(
                        f"{path} exists and was not made for target.folder; choose another target.folder."
                    )
            self.folder.mkdir(parents=True, exist_ok=True)
            _write_note(note, asked, 0)
            open_memmap(self._images, "w+", np.uint8, (self.count, 3, *sides))
            open_memmap(self._features, "w+", np.int16, (self.count, channels, *(n // patch for n in sides)))
        processes.wait()
        images, features = self.arrays("r+")
        steps = range(processes.rank, -(-self.count // batches.batch), processes.count)
        for step in steps[ready:]:
            at = slice(step * batches.batch, min((step + 1) * batches.batch, self.count))
            mean, std = _colours(batches)
            eight = batches.load(step).mul_(std).add_(mean).mul_(255).round_().clamp_(0, 255).to(torch.uint8)
            # the teacher sees what the student will see
            with torch.no_grad(), autocast():
                maps, _ = final_tokens(teacher, _normalised(eight, mean, std).to(processes.place))
            images[at] = eight[: at.stop - at.start].numpy()
            features[at] = (
                maps.to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy()[: at.stop - at.start]
            )
            ready += 1
            if ready % _EVERY == 0 or step == steps[-1]:
                images.flush()
                features.flush()
                _write_note(note, asked, ready)
            if on_crops is not None and processes.main:
                on_crops(at.stop, self.count)
        processes.wait()

    def arrays(self, mode: Literal["r", "r+"] = "r") -> tuple[np.ndarray, np.ndarray]:
        """Return the files of windows and of features, mapped into memory."""
        return np.load(self._images, mode), np.load(self._features, mode)

    @property
    def _images(self) -> Path:
        return self.folder / "images.npy"

    @property
    def _features(self) -> Path:
        return self.folder / "features.npy"

    def _ready(self, note: Path, asked: Mapping[str, Any]) -> int:
        """Return how many batches this process has made."""
        if not note.exists():
            return 0
        kept = json.loads(note.read_text(encoding="utf-8"))
        changed = sorted(k for k in {*asked, *kept["identity"]} if asked.get(k) != kept["identity"].get(k))
        if changed:
            raise InputError(
                f"{self.folder} holds windows that were made with another {', '.join(changed)}; choose another "
                "target.folder, or delete it."
            )
        return kept["ready"]


def _write_note(note: Path, identity: Mapping[str, Any], ready: int) -> None:
    """Record from what the windows are made, and how many batches are ready."""
    with atomic_path(note, force=True) as part:
        part.write_text(json.dumps({"identity": identity, "ready": ready}) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class CropBatches:
    """An endless series of batches of windows and features, as `Batches` is one of pictures.

    Attributes:
        crops: all made.
        batches: whose size, rank, world, colours and seed they have.
    """

    crops: Crops
    batches: Batches

    def __len__(self) -> int:
        """Return how many different windows there are."""
        return self.crops.count

    def from_step(self, step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's normalised windows (b, 3, H, W) and features (b, d, h, w) from a step on."""
        images, features = self.crops.arrays()
        own, count = self.batches, self.crops.count
        order, (mean, std) = Order([(0, count, count)], own.seed), _colours(own)
        for now in itertools.count(step):
            numbers = order(now * own.batch + np.arange(own.rank, own.batch, own.world))
            maps = torch.from_numpy(features[numbers]).view(torch.bfloat16)
            yield _normalised(torch.from_numpy(images[numbers]), mean, std), maps


def _colours(batches: Batches) -> tuple[Tensor, Tensor]:
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in (batches.mean, batches.std))
    return mean, std


def _normalised(eight: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    return eight.float().div_(255).sub_(mean).div_(std)
