"""Training log: sums over the images of an interval, one line of JSON per interval, and TensorBoard scalars."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vispe.backbones.distributed import Processes
from vispe.utils.files import atomic_path


class IntervalSums:
    """Sums of losses, and of the gradient norm times the images, over the images of an interval of the log.

    Args:
        values: sums so far, by name; 'images' is the number of images.
    """

    def __init__(self, values: Mapping[str, Tensor] | None = None) -> None:
        self.values = dict(values or {})

    def add(self, name: str, value: Tensor) -> None:
        """Add to a sum."""
        self.values[name] = self.values[name] + value if name in self.values else value

    def nonfinite(self) -> str | None:
        """Return the name of a loss that is not finite, or None."""
        losses = {name: value for name, value in self.values.items() if name != "grad_norm"}
        return next((name for name, value in losses.items() if not torch.isfinite(value)), None)

    def means(self, processes: Processes) -> dict[str, float]:
        """Return the means over the images of all processes; all of them must call this function."""
        sums = [value.clone() for value in self.values.values()]
        processes.sum_(sums)
        totals = dict(zip(self.values, map(float, sums), strict=True))
        images = totals.pop("images")
        return {name: value / images for name, value in totals.items()}


class Log:
    """Writer of JSON lines, and of TensorBoard scalars if tensorboard is installed.

    Lines after the step from which a run resumes are dropped, since they are written again.

    Args:
        path: path of the JSON lines.
        step: number of training steps done.
        tensorboard: folder of the TensorBoard events, or None.
    """

    def __init__(self, path: Path, step: int = 0, tensorboard: Path | None = None) -> None:
        self.path, self.writer = path, None
        lines = [line for line in read_log(path) if line["step"] <= step] if path.exists() else []
        with atomic_path(path, force=True) as part:
            part.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        if tensorboard is not None and importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(tensorboard), purge_step=step + 1)

    def write(self, values: Mapping[str, Any]) -> None:
        """Write one line; values that are not finite are null in JSON and omitted in TensorBoard."""
        nonfinite = {key: None for key, v in values.items() if isinstance(v, float) and not math.isfinite(v)}
        entry = {**values, **nonfinite}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, allow_nan=False) + "\n")
        if self.writer is not None:
            for key, value in entry.items():
                if isinstance(value, int | float) and key != "step":
                    self.writer.add_scalar(f"retrofit/{key}", value, int(values["step"]))

    def close(self) -> None:
        """Close the TensorBoard file."""
        if self.writer is not None:
            self.writer.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a log; a truncated last line is ignored."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            break
    return lines


def memory_mib(device: torch.device) -> float:
    """Return the peak memory in MiB: of tensors on a GPU, or of this process on the CPU; NaN if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    # not available on Windows
    if importlib.util.find_spec("resource") is None:
        return float("nan")
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)
