"""Precomputed windows and their teacher features, stored in files.

The features of a frozen teacher do not change, so long trainings can reuse them. Windows are sampled and augmented
once, as rows of `Batches`, and stored as 8-bit images; features are stored in bfloat16. Training iterates over them in
epochs with different orders.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.lib.format import open_memmap
from torch import Tensor, nn

from vispe.backbones.distributed import Processes
from vispe.errors import InputError
from vispe.images.symmetry.view_averages import View
from vispe.train.data import Batches
from vispe.train.data.sampler import Order
from vispe.train.retrofit.distillation_losses import averaged_tokens
from vispe.utils.files import atomic_path

_EVERY = 16  # batches between two writes of the progress file
OnCrops = Callable[[int, int], None]
"""Called with the number of finished windows, and the total."""


@dataclass(frozen=True)
class Crops:
    """Windows and features in a folder: `images.npy` (n, 3, H, W) uint8 and `features.npy` (n, d, h, w) bfloat16.

    Attributes:
        folder: folder of these files, and of progress files with the identity of their source.
        count: n.
    """

    folder: Path
    count: int

    def make(
        self,
        teacher: nn.Module,
        batches: Batches,
        channels: int,
        patch_size: int,
        identity: Mapping[str, Any],
        processes: Processes,
        autocast: Callable[[], AbstractContextManager[Any]],
        on_crops: OnCrops | None = None,
        views_of: Callable[[int], Sequence[View]] = lambda step: (),
        micro_batch_size: int | None = None,
    ) -> None:
        """Compute missing windows and features; interrupted runs resume. Processes compute batches in turn.

        Args:
            teacher: teacher on the device of the processes.
            batches: batches of one process, whose first rows are the windows.
            channels: d.
            patch_size: patch size in pixels.
            identity: JSON values that determine the contents of the files.
            processes: processes of the training.
            autocast: context manager of the teacher's precision.
            on_crops: called after every batch, in the main process.
            views_of: views over which features of a batch are averaged, by the number of the batch.
            micro_batch_size: images per forward pass of the teacher; a batch by default.

        Raises:
            InputError: the folder contains windows of another source.
        """
        state_file = self.folder / f"ready-{processes.rank}.json"
        expected = json.loads(json.dumps({**identity, "count": self.count, "processes": processes.count}))
        ready = self._ready(state_file, expected)
        sides = batches.img_size
        if processes.main and not ready:
            for path in (self._images, self._features):
                if os.path.lexists(path) and (path.is_symlink() or not state_file.exists()):
                    raise InputError(
                        f"{path} exists and was not written by a retrofit. Set another target.folder."
                    )
            self.folder.mkdir(parents=True, exist_ok=True)
            _write_note(state_file, expected, 0)
            open_memmap(self._images, "w+", np.uint8, (self.count, 3, *sides))
            open_memmap(
                self._features, "w+", np.int16, (self.count, channels, *(n // patch_size for n in sides))
            )
        processes.wait()
        images, features = self.arrays("r+")
        steps = range(processes.rank, -(-self.count // batches.batch_size), processes.count)
        for step in steps[ready:]:
            rows = slice(step * batches.batch_size, min((step + 1) * batches.batch_size, self.count))
            mean, std = _colours(batches)
            pixels = batches.load(step).mul_(std).add_(mean).mul_(255).round_().clamp_(0, 255).to(torch.uint8)
            # the teacher gets the quantised windows, the input of the student
            with torch.no_grad(), autocast():
                inputs = _normalised(pixels, mean, std).to(processes.torch_device)
                chunks, views = inputs.split(micro_batch_size or len(inputs)), views_of(step)
                maps = torch.cat([averaged_tokens(teacher, chunk, views)[0] for chunk in chunks])
            images[rows] = pixels[: rows.stop - rows.start].numpy()
            features[rows] = (
                maps.to("cpu", torch.bfloat16)
                .contiguous()
                .view(torch.int16)
                .numpy()[: rows.stop - rows.start]
            )
            ready += 1
            if ready % _EVERY == 0 or step == steps[-1]:
                images.flush()
                features.flush()
                _write_note(state_file, expected, ready)
            if on_crops is not None and processes.main:
                on_crops(rows.stop, self.count)
        processes.wait()

    def arrays(self, mode: Literal["r", "r+"] = "r") -> tuple[np.ndarray, np.ndarray]:
        """Return windows (n, 3, H, W) and features (n, d, h, w) as memory maps."""
        return np.load(self._images, mode), np.load(self._features, mode)

    @property
    def _images(self) -> Path:
        return self.folder / "images.npy"

    @property
    def _features(self) -> Path:
        return self.folder / "features.npy"

    def _ready(self, state_file: Path, expected: Mapping[str, Any]) -> int:
        """Return the number of batches that this process has finished.

        Raises:
            InputError: they were computed with another identity.
        """
        if not state_file.exists():
            return 0
        stored = json.loads(state_file.read_text(encoding="utf-8"))
        changed = sorted(
            k for k in {*expected, *stored["identity"]} if expected.get(k) != stored["identity"].get(k)
        )
        if changed:
            raise InputError(
                f"{self.folder} contains windows computed with another {', '.join(changed)}. Set another "
                "target.folder, or delete it."
            )
        return stored["ready"]


def _write_note(state_file: Path, identity: Mapping[str, Any], ready: int) -> None:
    """Write the identity of the windows and the number of finished batches."""
    with atomic_path(state_file, force=True) as part:
        part.write_text(json.dumps({"identity": identity, "ready": ready}) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class CropBatches:
    """Infinite sequence of batches of windows and features; see `Batches`.

    Attributes:
        crops: finished windows and features.
        batches: source of size, rank, world, normalisation and seed.
    """

    crops: Crops
    batches: Batches

    def __len__(self) -> int:
        """Return the number of distinct windows."""
        return self.crops.count

    def from_step(self, step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's normalised windows (b, 3, H, W) and features (b, d, h, w) from a step on."""
        images, features = self.crops.arrays()
        batches, count = self.batches, self.crops.count
        order, (mean, std) = Order([(0, count, count)], batches.seed), _colours(batches)
        for global_step in itertools.count(step):
            numbers = order(
                global_step * batches.batch_size
                + np.arange(batches.rank, batches.batch_size, batches.world_size)
            )
            maps = torch.from_numpy(features[numbers]).view(torch.bfloat16)
            yield _normalised(torch.from_numpy(images[numbers]), mean, std), maps


def _colours(batches: Batches) -> tuple[Tensor, Tensor]:
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in (batches.mean, batches.std))
    return mean, std


def _normalised(pixels: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    return pixels.float().div_(255).sub_(mean).div_(std)
