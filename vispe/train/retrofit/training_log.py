"""The log of a training: a line of JSON for every interval, and the same for tensorboard."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vispe.files import atomic_path


class Log:
    """Writes lines of JSON, and scalars for tensorboard where it is installed.

    Lines of later updates than the one from which a run is continued are dropped: they will be written again.

    Args:
        path: file of the lines.
        step: number of updates that were made already.
        tensorboard: folder of its events; None for none.
    """

    def __init__(self, path: Path, step: int = 0, tensorboard: Path | None = None) -> None:
        self.path, self.writer = path, None
        kept = [line for line in read_log(path) if line["step"] <= step] if path.exists() else []
        with atomic_path(path, force=True) as part:
            part.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        if tensorboard is not None and importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(tensorboard), purge_step=step + 1)

    def write(self, values: Mapping[str, Any]) -> None:
        """Write one line; values that are no numbers, or not finite, are left out of tensorboard and null in JSON."""
        unknown = {key: None for key, v in values.items() if isinstance(v, float) and not math.isfinite(v)}
        plain = {**values, **unknown}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(plain, allow_nan=False) + "\n")
        if self.writer is not None:
            for key, value in plain.items():
                if isinstance(value, int | float) and key != "step":
                    self.writer.add_scalar(f"retrofit/{key}", value, int(values["step"]))

    def close(self) -> None:
        """Finish tensorboard's file."""
        if self.writer is not None:
            self.writer.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a log; a last line that was cut by a kill is left out."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            break
    return lines


def memory_mib(device: torch.device) -> float:
    """Return the largest memory so far in MiB: of tensors on a GPU, or of this process; NaN where unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    # Windows has no such module
    if importlib.util.find_spec("resource") is None:
        return float("nan")
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)
