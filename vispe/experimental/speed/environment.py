"""Environment of a measurement: versions, machine, hash of the kernels."""

from __future__ import annotations

import hashlib
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from vispe.attention.backends import triton
from vispe.utils.version import __version__


def environment(device: str) -> dict[str, Any]:
    """Return the environment of the measurement: versions, machine, hash of the kernels."""
    versions = {"vispe": __version__, "torch": torch.__version__, "python": platform.python_version()}
    for package in ("triton", "flash-attn-4"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    folder = Path(triton.__file__).parent
    source = b"".join(p.read_bytes() for p in sorted(folder.rglob("*")) if p.suffix in (".py", ".json"))
    facts: dict[str, Any] = {
        "versions": versions, "device": "cpu", "cpu": platform.machine(),
        "threads": torch.get_num_threads(), "clock": "wall", "kernels": hashlib.sha256(source).hexdigest()[:16],
    }  # fmt: skip
    if device == "cpu" and torch.get_num_threads() == 1:
        facts["clock"] = "process"
    if device != "cpu":
        facts["clock"] = "events"
        gpu = torch.cuda.get_device_properties(0)
        facts["device"], facts["capability"] = gpu.name, f"{gpu.major}.{gpu.minor}"
        facts["cuda"] = torch.version.cuda
        facts |= {"memory_gib": round(gpu.total_memory / 2**30, 1), "cudnn": torch.backends.cudnn.version()}
    return facts
