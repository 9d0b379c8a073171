"""Feature cache in memory that spills to a temporary file."""

from __future__ import annotations

import tempfile
import threading
import weakref
from typing import IO

import numpy as np
import torch
from torch import Tensor

MEMORY = 64 << 20
"""Default memory limit in bytes."""

DISK = 4 << 30
"""Default limit in bytes of the temporary file, which is deleted with the cache."""


class SpillCache:
    """Thread-safe cache of float32 tensors by key; each tensor is removed when it is read.

    Args:
        memory: memory limit in bytes.
        disk: limit in bytes of the temporary file; 0: tensors beyond `memory` are dropped.
    """

    def __init__(self, memory: int = MEMORY, disk: int = DISK) -> None:
        self._limits = memory, disk
        self._near: dict[bytes, Tensor] = {}
        self._far: dict[bytes, tuple[int, torch.Size]] = {}
        self._file: IO[bytes] | None = None
        self._lock = threading.Lock()

    def put(self, key: bytes, value: Tensor) -> None:
        """Store a contiguous float32 CPU tensor; it is dropped if there is no space."""
        with self._lock:
            if key in self._near or key in self._far:
                return
            if sum(one.nbytes for one in self._near.values()) + value.nbytes <= self._limits[0]:
                self._near[key] = value
                return
            if not self._limits[1]:
                return
            try:
                if self._file is None:
                    self._file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the cache
                    weakref.finalize(self, self._file.close)
                start = self._file.seek(0, 2)
                if start + value.nbytes <= self._limits[1]:
                    self._file.write(value.numpy().data)
                    self._far[key] = start, value.shape
            except OSError:  # a full disk: the tensor is computed again on demand
                self._far.pop(key, None)

    def take(self, key: bytes) -> Tensor | None:
        """Remove and return a tensor; None if it is not cached."""
        with self._lock:
            if key in self._near:
                return self._near.pop(key)
            if key not in self._far or self._file is None:
                return None
            start, shape = self._far.pop(key)
            self._file.seek(start)
            values = np.empty(shape, np.float32)
            self._file.readinto(values.data.cast("B"))  # type: ignore[attr-defined]
            return torch.from_numpy(values)
