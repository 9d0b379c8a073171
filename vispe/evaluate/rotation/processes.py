"""Several processes, each with a consecutive share of the images, and one result that does not depend on their number.

Started by `torchrun`, every process measures its share, and all of them get the joined rows. Equal to one process bit
for bit at the same number of threads: images are measured in pieces that do not depend on the shares, and every random
draw belongs to the number of its image.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from vispe.evaluate.rotation.rows import Measurement, merge

T = TypeVar("T")

Piece = tuple[int, "tuple[Measurement, ...] | None"]
"""A number of images and their rows; None where these images have no such rows."""


@dataclass(frozen=True)
class Processes:
    """Which process this is, and of how many.

    Attributes:
        rank: number of this process, from 0.
        count: number of processes.
    """

    rank: int = 0
    count: int = 1

    @classmethod
    def started(cls) -> "Processes":
        """Return what `torchrun` says, and join its processes; a single one where it was not used."""
        count = int(os.environ.get("WORLD_SIZE", "1"))
        if count == 1:
            return cls()
        if not dist.is_initialized():  # shares may differ by hours, and nothing is sent until they are done
            dist.init_process_group("gloo", timeout=timedelta(days=30))
        return cls(dist.get_rank(), dist.get_world_size())

    def share(self, n: int) -> range:
        """Return which of n things, in order, belong to this process; the first processes get the larger shares."""
        return range(-(-self.rank * n // self.count), -(-(self.rank + 1) * n // self.count))

    def joined(self, part: T, error: Exception | None = None) -> list[T]:
        """Return what every process gave, in the order of their numbers; each of them gets it.

        Raises:
            Exception: the first `error` that a process gave; all of them raise it, so that none waits for ever.
        """
        if self.count == 1:
            if error is not None:
                raise error
            return [part]
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, (None if error else part, error))
        failed = next((e for _, e in found if e is not None), None)
        if failed is not None:
            raise failed
        return [p for p, _ in found]

    def device(self, name: str) -> str:
        """Return the device of this process: 'auto' spreads processes over the GPUs of a machine."""
        if name == "auto" and self.count > 1 and torch.cuda.is_available():
            return f"cuda:{int(os.environ.get('LOCAL_RANK', self.rank)) % torch.cuda.device_count()}"
        return name


def filled(pieces: Sequence[Piece]) -> tuple[Measurement, ...]:
    """Join the rows of consecutive pieces; images without rows get NaN, and where none has any there are no rows."""
    known = next((rows for _, rows in pieces if rows is not None), None)
    if known is None:
        return ()
    return merge([_nothing(known, n) if rows is None else rows for n, rows in pieces])


def _nothing(rows: Sequence[Measurement], n: int) -> tuple[Measurement, ...]:
    nan = np.full(n, np.nan)
    return tuple(replace(row, values=nan, floors=dict.fromkeys(row.floors, nan)) for row in rows)
